"""What the check of the nodes finds wrong, from invented machines."""

import pytest
import torch

from wm_ds.run import launch_check
from wm_ds.run.launch_check import (
    GIB,
    clock_problems,
    difference_problems,
    disk_problems,
    gpu_problems,
    versions,
)


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch see `count` GPUs of 80 GiB with `free` GiB left, in a process that did not ask for a CPU."""

    def pretend(count, free=79.5):
        monkeypatch.setattr(launch_check, "ASKED_FOR_CPU", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 80 * GIB))

    return pretend


@pytest.mark.parametrize(
    ("count", "ranks", "free", "least", "problem"),
    [
        (8, 8, 79.5, 0, None),
        (8, 8, 79.5, 80, None),
        (8, 8, 79.5, 81, "GPU 3 has 80.0 GiB, 81 are required"),
        (8, 8, 60.0, 0, "GPU 3: 20.0 of 80.0 GiB in use before we start"),
        (7, 8, 79.5, 0, "7 GPUs for 8 ranks"),
        (8, 1, 79.5, 0, "8 GPUs for 1 ranks"),  # --ntasks-per-node forgotten
        (1, 8, 79.5, 0, "not for --gpus-per-task"),
        (0, 8, 79.5, 0, "torch sees no GPU"),
    ],
)
def test_gpus(gpus, count, ranks, free, least, problem):
    gpus(count, free)
    found = gpu_problems(3, ranks, least)
    assert found == [] if problem is None else len(found) == 1
    assert problem is None or problem in found[0]


def test_a_run_on_cpus_has_to_be_asked_for(monkeypatch):
    monkeypatch.setattr(launch_check, "ASKED_FOR_CPU", True)
    assert gpu_problems(0, 4, 80) == []


def test_disks(tmp_path):
    assert disk_problems({tmp_path: 0.0}) == []
    assert "GiB free, 1e+09 are required" in disk_problems({tmp_path: 1e9})[0]
    (tmp_path / "file").touch()
    assert "cannot be written" in disk_problems({tmp_path / "file" / "folder": 0.0})[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "a probe was left behind"


def test_versions_that_differ_are_named_with_the_node():
    reports = [
        {"node": "a", "versions": {"torch": "2", "python": "3"}},
        {"node": "a", "versions": {}},
        {"node": "b", "versions": {"torch": "2", "python": "3"}},
        {"node": "c", "versions": {"torch": "1", "python": "3"}},
    ]
    assert difference_problems(reports) == ["c: torch is 1, on a it is 2"]
    assert {"torch", "deepspeed", "python", "wm_ds sources"} <= set(versions())


def test_clocks():
    times = {"a": 100.0, "b": 100.3, "c": 92.0}
    assert clock_problems(times, "a", 5) == ["c: its clock is -8.0 s off a's, the limit is 5 s"]
