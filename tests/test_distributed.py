"""Launch environment, device choice, and the build of DeepSpeed's CPU helper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wm_ds import distributed
from wm_ds.distributed import SetupError


def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_launch_from_the_environment_or_alone(monkeypatch):
    environment(monkeypatch)
    assert distributed.launch_size() == (0, 0, 1)
    environment(monkeypatch, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    assert distributed.launch_size() == (5, 1, 8)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK missing"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "must be integers"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, r"must lie in 0\.\.WORLD_SIZE-1 = 1"),
    ],
)
def test_incomplete_launches_are_refused(monkeypatch, values, said):
    environment(monkeypatch, **values)
    with pytest.raises(SetupError, match=said):
        distributed.launch_size()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.pick_device(1) == (torch.device("cuda", 1), "nccl")
    with pytest.raises(SetupError, match="LOCAL_RANK 2 has no GPU: this process sees 2"):
        distributed.pick_device(2)


def test_installations_do_not_share_a_build_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = set()
    for name in ("one", "two"):
        package = tmp_path / name / "deepspeed"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        with monkeypatch.context() as inner:
            inner.delitem(sys.modules, "deepspeed", raising=False)
            inner.syspath_prepend(str(tmp_path / name))
            folders.add(distributed.extensions_folder())
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "cache" / "wm_ds"}


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match=r"'no-such-compiler' is not on PATH; install one"):
        distributed.build_cpu_helper()


BUILD = """
import sys, time
from pathlib import Path
from wm_ds import distributed
from deepspeed.ops.op_builder import cpu
folder = Path(sys.argv[1])
class Builder:
    def load(self, verbose):
        lock = folder / "deepspeed_shm_comm" / "lock"
        assert not lock.exists(), "two builds at once, or a leftover was kept"
        lock.parent.mkdir(exist_ok=True)
        lock.touch(exist_ok=False)
        time.sleep(1.0)
        if sys.argv[2] == "die":
            import os; os._exit(9)
        lock.unlink()
cpu.ShareMemCommBuilder = Builder
distributed.build_cpu_helper()
"""


def start(folder: Path, how: str) -> subprocess.Popen:
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen([sys.executable, "-c", BUILD, str(folder), how], env=env, stderr=subprocess.PIPE)


def test_builds_wait_for_each_other_and_survive_a_killed_one(tmp_path):
    assert start(tmp_path, "die").wait(120) == 9
    assert list(tmp_path.rglob("lock"))  # for which DeepSpeed alone would wait for ever
    both = [start(tmp_path, "live") for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert not list(tmp_path.rglob("lock"))


def test_collectives_without_ranks_are_what_one_rank_has():
    assert distributed.all_reduce_sum([1.5, 2.0], torch.device("cpu")) == [1.5, 2.0]
    assert distributed.all_reduce_max([1.5], torch.device("cpu")) == [1.5]
    assert distributed.broadcast({"a": 1}) == {"a": 1}
    assert distributed.peak_memory_bytes(torch.device("cpu")) > 1 << 20
