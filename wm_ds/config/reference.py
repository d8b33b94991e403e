"""Every key of a run as a page: `python -m wm_ds.config.reference > docs/configuration.md`.

The page is printed from schema.py, the declarations that runs are validated with; a test compares the two.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from wm_ds.config.schema import Config, Section, Unit
from wm_ds.errors import run_cli

INTRODUCTION = """\
# Every key of a run

A run is a YAML file; `section.key=value` on the command line overrides it. An unknown key is refused with the
nearest name, a contradiction between keys before anything is built. This page is printed from
`wm_ds/config/schema.py`, which also validates runs, by
`python -m wm_ds.config.reference > docs/configuration.md`.
"""
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """(key, class) of every section of a run, in the order of the schema."""
    for key, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield key, field.annotation


def summary() -> str:
    """The sections, a line each, for a command's help."""
    return "\n".join(f"  {key:12} {section.__doc__}" for key, section in sections())


def page() -> str:
    """The whole page as Markdown."""
    found = dict(sections())
    parts = [INTRODUCTION, "## Keys of the run itself\n", _table("", Config, leave_out=set(found))]
    for key, section in found.items():
        parts += [f"## `{key}`\n\n{section.__doc__}\n", _table(f"{key}.", section)]
        for name, field in section.model_fields.items():
            for inner in _listed(field.annotation):
                parts += [f"### Each of `{key}.{name}`\n\n{inner.__doc__}\n", _table("", inner)]
            for inner in _optional(field.annotation):
                parts += [f"### `{key}.{name}`\n\n{inner.__doc__}\n", _table(f"{key}.{name}.", inner)]
    for name, field in Config.model_fields.items():
        for inner in _listed(field.annotation):
            if name not in found:
                parts += [f"## Each of `{name}`\n\n{inner.__doc__}\n", _table("", inner)]
    return "\n".join(parts)


def _table(prefix: str, section: type[BaseModel], leave_out: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    lines = ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for key, field in section.model_fields.items():
        if key not in leave_out:
            kinds, units = _describe(field.annotation, field.metadata)
            meaning = " ".join((field.description or "").split())
            cells = [
                f"`{prefix}{key}`",
                " or ".join(kinds),
                _default(field),
                ", ".join(units) or "–",
                meaning,
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _listed(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a key may hold a list of."""
    for argument in get_args(annotation):
        if isinstance(argument, type) and issubclass(argument, BaseModel) and get_origin(annotation) is list:
            yield argument
        yield from _listed(argument)


def _optional(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section that a key may hold, or be null."""
    for argument in get_args(annotation):
        if (
            isinstance(argument, type)
            and issubclass(argument, BaseModel)
            and get_origin(annotation) is not list
        ):
            yield argument


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.default
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`{list(value)}`"
    return f"`{value}`" if value is not PydanticUndefined else "–"


def _describe(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> tuple[list[str], list[str]]:
    """(names of the types, units), each in order and once; a null that only says "not set" is left out."""
    units = [item.name for item in metadata if isinstance(item, Unit)]
    limits = [
        f"{sign} {getattr(item, name):g}"
        for item in _flat(metadata)
        for name, sign in _LIMITS.items()
        if getattr(item, name, None) is not None
    ]
    origin, arguments = get_origin(annotation), get_args(annotation)
    kinds: list[str] = []
    if origin is Annotated:
        kinds, inner = _describe(arguments[0], arguments[1:])
        units += inner
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            if argument is not type(None):
                names, inner = _describe(argument)
                kinds += names
                units += inner
    elif origin is Literal:
        kinds = [f"`{argument}`" for argument in arguments]
    elif origin is list:
        names, units = _describe(arguments[0])
        kinds = [f"list of {' or '.join(names)}"]
    elif origin is tuple:
        kinds = [f"list of {len(arguments)} numbers"]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        keys = ", ".join(f"`{key}`" for key in annotation.model_fields)
        kinds = [f"section of {keys}"]
    else:
        kinds = [_NAMES[annotation]]
    if limits:
        kinds = [f"{kind} {', '.join(limits)}" if kind in ("integer", "number") else kind for kind in kinds]
    return list(dict.fromkeys(kinds)), list(dict.fromkeys(units))


def _flat(metadata: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """The limits among the metadata, also those inside a Field(…)."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def main(arguments: list[str] | None = None) -> int:
    """Print the page."""
    return run_cli(lambda _: print(page(), end=""), arguments)


if __name__ == "__main__":
    sys.exit(main())
