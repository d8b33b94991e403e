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


@pytest.mark.parametrize("name", ["wm_ds.shards", "wm_ds.model.schedule", "wm_ds.model.configuration"])
def test_foundations_need_nothing_above_them(name):
    above = {"wm_ds.config", "wm_ds.data", "wm_ds.engine", "wm_ds.train", "wm_ds.evaluate", "wm_ds.export"}
    assert not _inner(name) & above
