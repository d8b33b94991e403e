"""The trainer with one planted fault: FAULT=KIND:RANK:STEP, in attempts up to FAULT_ATTEMPTS (default 1).

The fault sits where a rank enters a step, so that the other ranks are in that step's collectives.
"""

import os
import sys
from pathlib import Path

from rank_program import fail

from wm_ds import train
from wm_ds.engine.engine import Engine

kind, rank, step = os.environ["FAULT"].split(":")
original = Engine.step


def step_with_fault(engine: Engine, micro_batches: list) -> object:
    if (
        engine.steps + 1 == int(step)
        and engine.world.rank == int(rank)
        and int(os.environ["WM_ATTEMPT"]) <= int(os.environ.get("FAULT_ATTEMPTS", "1"))
    ):
        print(f"planting the fault {kind} in {Path(__file__).name}", flush=True)
        fail(kind)
    return original(engine, micro_batches)


if __name__ == "__main__":
    Engine.step = step_with_fault
    sys.exit(train.main())
