"""What a program writes to a terminal."""

import os


def read_to_the_end(terminal: int) -> bytes:
    """All that is written to the other side of a pseudo-terminal, until that is closed."""
    seen = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(terminal)
    return seen
