"""Imports point one way, read from the source without running it."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "wm_ds"


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, source: str | None = None) -> set[str]:
    """Every module that the file (or `source` in its place) imports, anywhere in it, as dotted names."""
    package = _module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _inner(name: str) -> set[str]:
    """The modules of wm_ds that module `name` needs (packages that merely hold it left out)."""
    inner = _imports(MODULES[name]) & set(MODULES)
    return {other for other in inner - {name, "wm_ds"} if not name.startswith(f"{other}.")}


def test_reads_every_kind_of_import():
    source = (
        "import torch.nn\nfrom .pool import Pool\nfrom .. import config\ndef f():\n    import wm_ds.train\n"
    )
    found = _imports(PACKAGE / "model" / "probe.py", source)
    assert {"torch.nn", "wm_ds.model.pool", "wm_ds.config", "wm_ds.train"} <= found


def test_no_cycles():
    try:
        order = list(TopologicalSorter({name: _inner(name) for name in MODULES}).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")
    assert set(order) >= set(MODULES) - {"wm_ds"}


def test_model_stands_alone():
    """An export ships wm_ds/model/*.py: torch, transformers and sibling files are all that is there."""
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    files = [path for name, path in MODULES.items() if f"{name}.".startswith("wm_ds.model.")]
    assert len(files) > 5
    for path in files:
        assert path.parent == PACKAGE / "model", f"{path} is not flat"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
                assert roots <= allowed, f"{path.name}:{node.lineno} imports {roots - allowed}"
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, (
                    f"{path.name}:{node.lineno} imports {node.module}"
                )
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1, f"{path.name}:{node.lineno} reaches out of the package"
                assert node.module, (
                    f"{path.name}:{node.lineno}: name the module, as in `from .pool import Pool`"
                )
                assert "." not in node.module, f"{path.name}:{node.lineno} imports a nested module"


def test_nothing_imports_the_trainer_or_the_tools():
    for name, path in MODULES.items():
        imports = _imports(path)
        assert not {i for i in imports if i.split(".")[0] in {"tools", "tests", "benchmarks"}}, name
        if name != "wm_ds.train":
            assert "wm_ds.train" not in imports, name


# Who may import whom: a room (a folder of wm_ds, or a module of its own there) and the rooms it may need.
# `errors` is open to all. docs/architecture.md draws this table.
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "config": set(),
    "model": set(),
    "distributed": set(),
    "data": {"files"},
    "packing": {"data", "files"},
    "optim": {"config", "distributed"},
    "families": {"config", "model"},
    "run": {"config", "distributed", "files"},
    "engine": {"config", "distributed", "families", "model", "optim"},
    "checkpoint": {"distributed", "files", "optim", "run"},
    "plan": {"config", "data", "distributed", "engine", "families", "files", "model", "optim"},
    "trained": {"checkpoint", "config", "data", "families", "run"},
    "metrics": {"config", "distributed", "engine", "files", "plan", "run"},
    "export": {"checkpoint", "data", "engine", "families", "files", "model", "packing", "trained"},
    "evaluate": {
        *("config", "checkpoint", "data", "distributed", "engine", "families", "files", "model", "packing"),
        *("run", "trained"),
    },
    "sweep": {
        *("config", "data", "distributed", "evaluate", "families", "files"),
        *("model", "plan", "run", "trained"),
    },
    "report": {"distributed", "run"},
    "upcycle": {
        *("checkpoint", "config", "data", "engine", "export", "families"),
        *("files", "model", "optim", "packing", "trained"),
    },
    "rollback": {"checkpoint", "config", "data", "engine", "run", "start"},
    "start": {"checkpoint", "config", "data", "distributed", "engine", "families", "optim", "run"},
    "train": {
        *("config", "files", "model", "distributed", "data", "optim", "families"),
        *("run", "engine", "checkpoint", "plan", "metrics", "start", "rollback", "evaluate"),
    },
}


def _room(name: str) -> str:
    return name.split(".")[1]


def test_every_room_is_in_the_table_and_few_modules_lie_outside_rooms():
    assert {_room(name) for name in MODULES if name != "wm_ds"} <= set(MAY_IMPORT)
    own = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(own) <= 8, f"wm_ds/ holds {len(own)} modules of its own; find them a room"


def test_the_table_has_no_circle():
    list(TopologicalSorter(MAY_IMPORT).static_order())


def test_rooms_import_what_the_table_allows():
    found = [
        f"{path.relative_to(ROOT)} imports {other}; it may import {sorted(MAY_IMPORT[_room(name)])}"
        for name, path in MODULES.items()
        if name != "wm_ds"
        for other in _inner(name)
        if _room(other) not in MAY_IMPORT[_room(name)] | {_room(name), "errors"}
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["wm_ds", "wm_ds.distributed", "wm_ds.run"])
def test_what_the_batch_script_imports_stays_empty(name):
    """The batch script's Python has no packages: it runs wm_ds.run.attempt and wm_ds.run.rendezvous."""
    assert not _imports(MODULES[name])


@pytest.mark.parametrize("name", ["wm_ds.run.attempt", "wm_ds.run.rendezvous"])
def test_the_batch_script_needs_the_standard_library_alone(name):
    def roots(module: str, seen: frozenset[str] = frozenset()) -> set[str]:
        foreign = {i.split(".")[0] for i in _imports(MODULES[module])} - {"wm_ds"}
        inner = [roots(other, seen | {module}) for other in _inner(module) if other not in seen]
        return foreign.union(*inner)

    assert roots(name) <= set(sys.stdlib_module_names)
