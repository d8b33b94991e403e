"""Private names of DeepSpeed: each is there in the pinned version, and none is touched anywhere else."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from wm_ds.distributed import deepspeed_internals

PACKAGE = Path(importlib.util.find_spec("deepspeed").origin).parent
ROOT = Path(__file__).parents[2] / "wm_ds"
NAMES = [(file, name) for file, names in deepspeed_internals.NAMES.items() for name in names]


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_deepspeed_has_what_we_rely_on(file, name):
    source = (PACKAGE / file).read_text()
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source), (
        f"DeepSpeed's {file} has no {name} any more: wm_ds/distributed/deepspeed_internals.py relies on it"
    )


def test_every_attribute_that_is_reached_for_is_listed():
    """Attributes read in that file are DeepSpeed's (listed), torch's, or ours."""
    known = {name for _, name in NAMES}
    ours = {"numel", "start", "module", "optimizer", "data", "grad", "detach", "view", "name", "param_groups"}
    torchs = {
        "parameters",
        "shape",
        "zero",
        "GatheredParameters",
        "Init",
        "Module",
        "nn",
        "Parameter",
        "optim",
    }
    torchs |= {"optim", "Optimizer", "dtype", "copy_", "values", "contextmanager"}
    tree = ast.parse((ROOT / "distributed" / "deepspeed_internals.py").read_text())
    reached = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert reached - known - ours - torchs == set()


def test_no_other_module_touches_them():
    public = {"basic_optimizer", "zero_optimization_stage", "no_sync", "allreduce_gradients", "reset_step"}
    private = {name for _, name in NAMES} - public
    found = []
    for path in ROOT.rglob("*.py"):
        if path.name == "deepspeed_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in private:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}")
    assert not found
