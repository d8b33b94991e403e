"""Claims of a run directory: numbers, and waiting for the attempt before."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wm_ds.run.claim import Attempt, SupersededError, attempts, claim, join

pytestmark = pytest.mark.alone


def _claim_number(folder):
    return claim(folder, lease_s=0).number


def test_numbers_are_unique_and_without_gaps(tmp_path):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        # Claims that are overtaken at once refuse to go on: that is their purpose, and not of interest here.
        results = [pool.apply_async(_claim_number, (tmp_path,)) for _ in range(40)]
        numbers = []
        for result in results:
            try:
                numbers.append(result.get())
            except SupersededError:
                continue
    assert len(set(numbers)) == len(numbers)
    assert [a.number for a in attempts(tmp_path)] == list(range(1, 41))


def test_the_older_attempt_may_not_write(tmp_path):
    first = claim(tmp_path)
    first.check()
    second = claim(tmp_path)
    assert first.superseded()
    assert not second.superseded()
    with pytest.raises(SupersededError, match=r"attempt 1 of .* superseded"):
        first.check()
    second.check()


def test_a_clean_end_is_not_waited_for(tmp_path):
    first = claim(tmp_path)
    first.touch()
    first.record_end(result="stopped", clean=True)
    start = time.monotonic()
    claim(tmp_path, lease_s=60)
    assert time.monotonic() - start < 5


def test_waits_for_a_living_attempt_to_fall_silent(tmp_path, caplog):
    first = claim(tmp_path)
    first.touch()
    alive = threading.Event()

    def live():
        while not alive.wait(0.05):
            first.touch()

    thread = threading.Thread(target=live)
    thread.start()
    timer = threading.Timer(1.0, alive.set)
    timer.start()
    start = time.monotonic()
    claim(tmp_path, lease_s=0.5)
    waited = time.monotonic() - start
    thread.join()
    assert waited >= 1.4, "it must not go on while the other one lives"
    assert len(caplog.messages) == 1
    assert "attempt 1" in caplog.messages[0]


def test_a_long_silent_attempt_is_not_waited_for(tmp_path):
    first = claim(tmp_path)
    first.touch()
    os.utime(first.path("alive"), (time.time() - 100, time.time() - 100))
    start = time.monotonic()
    claim(tmp_path, lease_s=60)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("dead", [True, False])
def test_a_run_on_this_machine_is_looked_up_by_its_process(tmp_path, dead):
    program = (
        "from wm_ds.run.claim import join; import sys; a = join(sys.argv[1], solo=True); a.touch(); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    deadline = time.monotonic() + 30
    while not Attempt(tmp_path, 1).path("alive").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if dead:
        child.kill()
        child.wait()
    start = time.monotonic()
    claim(tmp_path, lease_s=30 if dead else 1)
    waited = time.monotonic() - start
    child.kill()
    child.wait()
    assert waited < 10 if dead else waited >= 0.9


@pytest.mark.parametrize("reaped", [True, False])
def test_a_run_on_this_machine_that_dies_while_it_is_waited_for(tmp_path, reaped):
    """torchrun was killed: its ranks live on, find a newer attempt and end; no parent reaps them."""
    program = (
        "from wm_ds.run.claim import join; import sys, time; a = join(sys.argv[1], solo=True); a.touch()\n"
        "while not a.superseded(): time.sleep(0.05)\n"
    )
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=root)
    deadline = time.monotonic() + 30
    while not Attempt(tmp_path, 1).path("alive").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    reaper = threading.Thread(target=child.wait) if reaped else None
    if reaper:
        reaper.start()
    start = time.monotonic()
    claim(tmp_path, lease_s=60)
    assert time.monotonic() - start < 30
    child.wait()
    if reaper:
        reaper.join()


def test_a_newer_claim_ends_the_waiting(tmp_path):
    claim(tmp_path).touch()
    threading.Timer(0.5, lambda: claim(tmp_path, lease_s=0)).start()
    with pytest.raises(SupersededError):
        claim(tmp_path, lease_s=30)


def test_ranks_take_the_batch_scripts_number(tmp_path, monkeypatch):
    monkeypatch.setenv("WM_ATTEMPT", "12")
    assert join(tmp_path).number == 12
    assert attempts(tmp_path) == []


def test_only_the_first_failure_is_kept(tmp_path):
    attempt = claim(tmp_path)
    assert attempt.record_failure(rank=3, exit_code=137)
    assert not attempt.record_failure(rank=0, exit_code=1)
    assert attempt.failure() == {"rank": 3, "exit_code": 137}
