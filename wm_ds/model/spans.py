"""Names for the parts of a step, for a profiler: `pass 1`, `group 3`, `layer 0`, `pool`, `head`.

Nothing is named, and next to nothing is spent, until `name_parts(True)`. A part that backward recomputes is
named again there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()
_named = False


def name_parts(wanted: bool) -> None:
    """Name parts from now on, or no more; for this process."""
    global _named
    _named = wanted


def span(part: str, number: int | None = None) -> AbstractContextManager[object]:
    """What runs inside is `part`, the `number`-th of its kind; a context manager."""
    if not _named:
        return _NOTHING
    return torch.profiler.record_function(part if number is None else f"{part} {number}")


__all__ = ["name_parts", "span"]
