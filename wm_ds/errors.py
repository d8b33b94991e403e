"""The base of this project's errors, and how a command line ends on them. Standard library only.

Every exception that is meant for the person at the terminal derives from `WmError`: its text is one line that
names the file, key or option, what is wrong and what to do. Anything else is a fault of this program, and its
traceback is shown.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable

INTERRUPTED = 130  # the shell's code for Ctrl-C
READER_GONE = 141  # the shell's code for SIGPIPE


class WmError(Exception):
    """Something that the person at the terminal can act on; the text says what."""


def run_cli(
    command: Callable[[list[str] | None], int | None],
    arguments: list[str] | None = None,
    *,
    refused: int = 1,
    interrupted: str = "interrupted",
) -> int:
    """Run `command(arguments)` (None: those of the process) and return the exit code of the process.

    - WmError, and OSError (a missing or unreadable file, a full disk): `error: …` on stderr, one line; code
      `refused`.
    - Ctrl-C: one line, `interrupted`; code 130.
    - A reader that has closed its end, as in `tool | head -1`: nothing is said. The code is the command's own
      where it had finished, else 141, as for any program that writes on into a closed pipe.
    """
    try:
        code = command(arguments) or 0
    except WmError as error:
        return _fail(str(error), refused)
    except KeyboardInterrupt:
        return _fail(interrupted, INTERRUPTED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            _flush()
            return READER_GONE
        return _fail(describe(error), refused)
    problem = _flush()
    if problem is not None and not isinstance(problem, BrokenPipeError):
        return _fail(f"standard output: {describe(problem)}", refused)
    return code


def one_line(text: str) -> str:
    """A message on one line, whatever line ends a library has put into it."""
    return " ".join(text.split("\n")).strip()


def describe(error: OSError) -> str:
    """`FILE: No space left on device`, or what else the error says about itself."""
    if error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return error.strerror or str(error) or type(error).__name__


def _fail(text: str, code: int) -> int:
    _flush()
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {one_line(text)}", file=sys.stderr, flush=True)
    return code


def _reader_gone() -> bool:
    """Whether it is our own output that nobody reads, and not a pipe to some other process that broke."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def _flush() -> OSError | None:
    """Get what was printed out; returns why that failed. The interpreter, which flushes again at its end,
    then finds nothing to complain of."""
    problem = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            problem = problem or error
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor of its own
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)
    return problem
