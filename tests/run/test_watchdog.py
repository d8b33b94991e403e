"""The watchdog in processes of its own: it ends them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wm_ds.run.claim import claim
from wm_ds.run.exit_codes import EXIT_HUNG, EXIT_SUPERSEDED

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
START = """
import ctypes, os, sys, time
from wm_ds.run.claim import Attempt
from wm_ds.run.watchdog import Watchdog
from pathlib import Path
rank = int(sys.argv[2])
attempt = Attempt(Path(sys.argv[1]), 1)
dog = Watchdog(attempt, rank=rank, local_rank=rank, world=2, timeout_s=1.5, poll_s=0.2).start()
print("started", flush=True)
"""


def launch(folder, body, rank=0, **environment):
    child = subprocess.Popen(
        [sys.executable, "-c", START + body, str(folder), str(rank)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert child.stdout.readline() == "started\n"
    return child


def test_beats_keep_it_alive_and_leave_the_step(tmp_path):
    claim(tmp_path)
    progress = tmp_path / "progress"
    body = "for step in range(30):\n    dog.beat(step)\n    time.sleep(0.1)\ndog.stop()\n"
    child = launch(tmp_path, body, WM_PROGRESS_FILE=str(progress))
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 0, errors
    assert progress.read_text().strip() == "29"
    assert (tmp_path / "attempts" / "0001.alive").exists()


def test_one_hung_rank_makes_every_rank_dump_and_end(tmp_path):
    attempt = claim(tmp_path)
    hung = launch(tmp_path, "def stuck():\n    time.sleep(60)\ndog.beat(4)\nstuck()\n", rank=1)
    busy = launch(
        tmp_path, "def busy():\n    while True:\n        dog.beat(5)\n        time.sleep(0.05)\nbusy()\n"
    )
    reports = {child: child.communicate(timeout=30)[1] for child in (hung, busy)}
    assert hung.returncode == busy.returncode == EXIT_HUNG
    assert "stack dump of rank 1" in reports[hung]
    assert "in stuck" in reports[hung]
    assert "stack dump of rank 0" in reports[busy]
    assert "another rank reported a hang" in reports[busy]
    assert attempt.failure() | {"node": None} == {
        "rank": 1,
        "node": None,
        "kind": "hang",
        "exit_code": EXIT_HUNG,
        "step": 4,
    }


def test_a_hang_that_holds_pythons_lock(tmp_path):
    claim(tmp_path)
    child = launch(tmp_path, "def stuck():\n    ctypes.PyDLL(None).sleep(60)\nstuck()\n")
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "in stuck" in errors


def test_a_superseded_rank_ends_itself(tmp_path):
    claim(tmp_path)
    child = launch(tmp_path, "while True:\n    dog.beat(1)\n    time.sleep(0.05)\n")
    claim(tmp_path, lease_s=0)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == EXIT_SUPERSEDED
    assert "superseded by a newer one" in errors


def test_an_exception_is_noted_and_ends_the_process_at_once(tmp_path):
    """A thread that never ends would keep an ordinary process from ending."""
    attempt = claim(tmp_path)
    body = "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\ndog.beat(3)\n1 / 0\n"
    start = time.monotonic()
    child = launch(tmp_path, body, rank=1)
    _, errors = child.communicate(timeout=30)
    assert time.monotonic() - start < 20
    assert child.returncode == 1
    assert errors.count("ZeroDivisionError") == 1
    failure = attempt.failure()
    assert (failure["rank"], failure["kind"], failure["step"]) == (1, "exception", 3)


def test_a_disk_that_is_full_is_one_line_and_noted(tmp_path):
    attempt = claim(tmp_path)
    body = "import errno\nraise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'runs/x/done')\n"
    child = launch(tmp_path, body, rank=1)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 1
    assert errors == "error: runs/x/done: No space left on device\n"
    assert attempt.failure()["kind"] == "exception"


def test_a_rank_that_waits_for_a_dead_one_ends(tmp_path):
    attempt = claim(tmp_path)
    body = "import wm_ds.run.watchdog as w\nw.FAILURE_GRACE_S = 1\nwhile True:\n    dog.beat(1)\n"
    child = launch(tmp_path, body)
    attempt.record_failure(rank=1, exit_code=137)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "another rank of attempt 1 has failed" in errors


def test_usr2_dumps_the_stacks_and_goes_on(tmp_path):
    claim(tmp_path)
    child = launch(tmp_path, "def at_work():\n    time.sleep(1)\nat_work()\nprint('went on')\n")
    time.sleep(0.3)
    child.send_signal(signal.SIGUSR2)
    output, errors = child.communicate(timeout=30)
    assert child.returncode == 0
    assert "in at_work" in errors
    assert "went on" in output
