"""Launch environment, device choice, collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wm_ds.distributed import process_group
from wm_ds.distributed.process_group import SetupError

ROOT = Path(__file__).parents[2]


def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_launch_from_the_environment_or_alone(monkeypatch):
    environment(monkeypatch)
    assert process_group.launch_size() == (0, 0, 1)
    environment(monkeypatch, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    assert process_group.launch_size() == (5, 1, 8)


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
        process_group.launch_size()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert process_group.pick_device(1) == (torch.device("cuda", 1), "nccl")
    with pytest.raises(SetupError, match="LOCAL_RANK 2 has no GPU: this process sees 2"):
        process_group.pick_device(2)


def test_collectives_without_ranks_are_what_one_rank_has():
    assert process_group.all_reduce_sum([1.5, 2.0], torch.device("cpu")) == [1.5, 2.0]
    assert process_group.all_reduce_max([1.5], torch.device("cpu")) == [1.5]
    assert process_group.broadcast({"a": 1}) == {"a": 1}
    assert process_group.peak_memory_bytes(torch.device("cpu")) > 1 << 20


INIT = """
import os
from wm_ds.distributed import process_group
world = process_group.init(timeout_minutes=0.5)
process_group.barrier()
print(world.size, os.environ["MASTER_ADDR"])
"""


def test_a_plain_start_does_not_use_a_meeting_point_left_in_the_shell():
    left = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "12345", "PYTHONPATH": str(ROOT)}
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | left
    done = subprocess.run([sys.executable, "-c", INIT], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1 127.0.0.1\n"), done.stderr


def test_deterministic_kernels_do_not_fill_new_tensors():
    """A filled bucket of DeepSpeed's is seconds of a step."""
    try:
        process_group.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
