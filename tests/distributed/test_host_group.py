"""Who says why a run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wm_ds.distributed.host_group import speaks
from wm_ds.distributed.process_group import free_port

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import torch, torch.distributed as dist
from wm_ds.distributed import log
from wm_ds.distributed.process_group import World
from wm_ds.errors import WmError
from wm_ds.train import say
log.start()
dist.init_process_group("gloo")
world = World(dist.get_rank(), 0, 3, torch.device("cpu"), "gloo")
for name, failing in (("full", [0, 1, 2]), ("damaged", [2]), ("gone", [0]), ("late", [1, 2])):
    if world.rank in failing:
        say(world, WmError(f"the disk is {name}"))
    dist.barrier()
"""


def test_one_rank_alone_speaks():
    assert speaks("anything")


@pytest.mark.alone
def test_an_error_is_said_once_by_whoever_has_it():
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | meeting
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert texts[0] == "error: the disk is full\nerror: the disk is gone\n"
    assert "error: rank 2: the disk is damaged\n" in texts[2]
    assert "full" not in texts[1] + texts[2]
    assert (texts[1] + texts[2]).count("the disk is late") == 1
