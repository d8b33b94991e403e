"""Numbers that the environment gives: launchers' and our own variables. Standard library only."""

import math
import os

from wm_ds.errors import WmError


class VariableError(WmError, ValueError):
    """A variable of the environment holds something else than it must; the text names it."""


def whole(name: str, default: int, least: int = 0) -> int:
    """The whole number in variable `name`, `default` where it is not set or empty. Raises VariableError."""
    given = os.environ.get(name)
    if not given:
        return default
    try:
        found = int(given)
    except ValueError:
        found = least - 1
    if found < least:
        raise VariableError(f"{name}={given!r} in the environment must be a whole number from {least} on")
    return found


def seconds(name: str, default: float) -> float:
    """The seconds in variable `name`, `default` where it is not set or empty. Raises VariableError."""
    given = os.environ.get(name)
    if not given:
        return default
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise VariableError(f"{name}={given!r} in the environment must be a number of seconds")
    return found
