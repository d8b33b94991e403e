"""A run, as written by a person: YAML plus `section.field=value` overrides, checked before anything is built.

schema.py declares every key; an unknown one is refused with the nearest name. `load` parses and checks what
the file alone can tell (validate.contradictions and without_effect); validate.check_against_data needs the
packed data's manifest, `Batch.accumulation` the number of ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from wm_ds.config.schema import PASSES, Batch, Config, ConfigError, Model, Stage
from wm_ds.config.text import nearest, read_text
from wm_ds.config.validate import contradictions, without_effect

__all__ = [
    "Batch",
    "Config",
    "ConfigError",
    "Model",
    "dump",
    "explain",
    "load",
    "load_record",
    "parse",
    "parse_new",
    "read",
]


class _Loader(yaml.SafeLoader):
    """YAML with `3e-4` as a number (YAML 1.1 wants a point in it) and without silent duplicate keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise ConfigError(f"line {key.start_mark.line + 1}: key {key.value!r} appears twice")
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a run's YAML, apply `section.field=value` overrides, and check what can be checked without data.

    Relative paths inside stay relative to the working directory. Raises ConfigError with one line per
    problem, a key that nothing would read among them.
    """
    raw = read(path)
    for override in overrides or []:
        _override(raw, override)
    return parse_new(raw, source=str(path))


def load_record(path: str | Path) -> Config:
    """Read what `dump` has written for a run, which an earlier version may have begun. Raises ConfigError."""
    return parse(read(path), source=str(path))


def read(path: str | Path, holds: str = "sections (run, model, data, …)") -> dict[str, Any]:
    """The mapping that a YAML file is, as plain dictionaries; `holds` says in a word what of.

    Raises ConfigError in one line for a file that cannot be read, is no YAML or holds something else.
    """
    text = read_text(path)
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}:{where} not valid YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, TypeError, RecursionError) as error:  # keys given twice; values that YAML cannot make
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold {holds}, found {type(raw).__name__}")
    return raw


def parse(raw: dict[str, Any], source: str = "config") -> Config:
    """A checked Config from plain dictionaries. Raises ConfigError."""
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(explain(e) for e in error.errors())) from None
    problems = contradictions(config)
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
    return config


def parse_new(raw: dict[str, Any], source: str) -> Config:
    """The same of a run that is about to begin: a key that nothing would read is refused, too."""
    config = parse(raw, source)
    idle = without_effect(config)
    if idle:
        raise ConfigError(f"{source}: " + "; ".join(idle))
    return config


def dump(config: Config) -> str:
    """The resolved run as YAML; `load` reads it back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override; write section.field=value")
    *path, last = key.split(".")
    try:
        parsed = _override_value([*path, last], value)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise ConfigError(f"{override!r}: the value is not valid YAML") from None
    at = raw
    for i, part in enumerate(path):
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(f"{override!r}: {'.'.join(path[: i + 1])} is a value, not a section")
    at[last] = parsed


def _override_value(path: list[str], value: str) -> Any:
    """YAML, except where the key holds text: a path may look like YAML (`a: b`, `[x]`) and is none."""
    if not value:
        return None
    kinds = _kinds(path)
    quoted, empty, several = value[0] in "'\"", value in ("null", "~"), value[0] in "[-"
    if str not in kinds or quoted or (empty and type(None) in kinds):
        return yaml.load(value, _Loader)
    if any(get_origin(kind) is list for kind in kinds) and several and not Path(value).exists():
        return yaml.load(value, _Loader)
    return yaml.load(value, _Loader) if int in kinds else value


def _kinds(path: list[str]) -> tuple[Any, ...]:
    """The types that the key at `path` may have; none where there is no such key."""
    at: Any = Config
    for name in path[:-1]:
        fields = getattr(at, "model_fields", {})
        kinds = [fields[name].annotation] if name in fields else []
        kinds += [k for kind in kinds for k in get_args(kind)]
        at = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    fields = getattr(at, "model_fields", {})
    if path[-1] not in fields:
        return ()
    annotation = fields[path[-1]].annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def explain(error: Any, model: type[BaseModel] = Config) -> str:
    """One of pydantic's errors about a `model` in a few words, with the nearest name for an unknown key."""
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        if fixed := _fixed(error["loc"]):
            return f"{where}: {fixed}"
        known = _known_keys(error["loc"][:-1], model)
        name = str(error["loc"][-1])
        return f"unknown key {where}{nearest(name, known, prefix=where[: -len(name)])}"
    if error["type"] == "missing":
        return f"{where} is required"
    if error["type"] == "model_type":
        return f"{where} must be a section, got {error['input']!r}"
    return f"{where} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _fixed(path: tuple) -> str | None:
    """Why a key of the run is none of a stage, where `path` leads to one; None elsewhere."""
    if path[0] != "stages" or len(path) < 3:
        return None
    name = path[-1]
    if len(path) == 4 and path[2] == "passes" and name in Model.model_fields:
        return f"a stage changes the passes ({', '.join(PASSES)}), never the shape of the model"
    if len(path) == 3 and name in ("seed", "tokenizer", "holdout", *Model.model_fields, *Config.model_fields):
        return (
            "it holds for the whole run and cannot change with a stage; a stage has "
            f"{', '.join(Stage.model_fields)}"
        )
    return None


def _known_keys(path: tuple, at: Any) -> list[str]:
    for part in path:
        fields = getattr(at, "model_fields", {})
        if part not in fields:
            continue  # an index or the tag of a union
        kinds = [fields[part].annotation, *get_args(fields[part].annotation)]
        kinds += [a for k in kinds for a in get_args(k)]
        at = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), at)
    return list(at.model_fields)
