"""Arguments that a function does not have are refused, with the nearest name that it has.

`**kwargs` in a signature tells transformers that a model takes part in its protocols; by itself it would
also swallow every misspelt name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def refuse_unknown(what: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError where `unknown` names anything; `what` is said to have no such argument or field."""
    known = sorted(set(known) - {"kwargs"})
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
        raise TypeError(f"{what} has no {name!r}{hint}")


__all__ = ["refuse_unknown"]
