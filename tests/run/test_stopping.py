"""Reasons to stop: noticed on one rank, agreed by all at one step, and what is written then."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.checkpoint_launch import answers, finish, logs, start
from wm_ds.checkpoint.manager import find_latest, verify
from wm_ds.distributed.host_group import Agreement
from wm_ds.run.stopping import Stopping, clear_markers, write_marker

pytestmark = pytest.mark.alone

CASE = {"stage": 2, "resume": None, "steps": 4000, "save_at": [], "pause_s": 0.005}


def stop_after(tmp_path: Path, case: dict, act: object) -> list[dict]:
    """Start two ranks, call `act` (ranks) once they train, wait; both ranks' answers."""
    folder = tmp_path / "ranks"
    ranks = start(2, [CASE | {"dir": str(tmp_path / "run")} | case], folder)
    log, deadline = folder / "rank_0.log", time.monotonic() + 60
    while not log.exists() or "step 3\n" not in log.read_text():
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.01)
    act(ranks)
    assert finish(ranks, timeout_s=60) == [0, 0], logs(folder)
    return [rank[0] for rank in answers(folder, 2)]


def check_same_step(tmp_path: Path, both: list[dict], reason: str) -> None:
    """Both ranks stopped after the same step, for the same reason, with that step saved whole."""
    step, why = both[0]["stopped"]
    assert why == reason
    assert both[1]["stopped"] == [step, reason]
    assert both[0]["losses"].keys() == both[1]["losses"].keys()
    latest = find_latest(tmp_path / "run")
    assert latest.name == f"step_{step:08d}"
    assert verify(latest) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_any_one_rank(tmp_path, rank, number):
    both = stop_after(tmp_path, {}, lambda ranks: os.kill(ranks[rank].pid, number))
    check_same_step(tmp_path, both, number.name)


def test_signal_to_all_ranks_in_turn(tmp_path):
    def act(ranks):
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
            time.sleep(0.02)

    check_same_step(tmp_path, stop_after(tmp_path, {}, act), "SIGTERM")


def test_stop_file(tmp_path):
    (tmp_path / "run").mkdir()
    both = stop_after(tmp_path, {}, lambda _: (tmp_path / "run" / "STOP").touch())
    check_same_step(tmp_path, both, "STOP file")


def test_time_limit(tmp_path):
    both = stop_after(tmp_path, {"limit_s": 4.0}, lambda _: None)
    check_same_step(tmp_path, both, "time limit")


def test_save_and_stop_on_the_same_step(tmp_path):
    """A signal while every step is saved: the step is saved once, in full."""
    both = stop_after(
        tmp_path,
        {"save_at": list(range(1, 4000)), "keep_last": 2},
        lambda ranks: os.kill(ranks[1].pid, signal.SIGUSR1),
    )
    check_same_step(tmp_path, both, "SIGUSR1")


def test_quiet_until_there_is_a_reason(tmp_path):
    stopping = Stopping(tmp_path, Agreement(), time_limit_s=1000)
    assert stopping.check() is None
    assert stopping.check(save_failed=True) == "save failed"


def test_time_limit_counts_from_the_given_start(tmp_path):
    assert (
        Stopping(tmp_path, Agreement(), time_limit_s=5, started=time.monotonic() - 6).check() == "time limit"
    )
    assert Stopping(tmp_path, Agreement(), time_limit_s=5, started=time.monotonic()).check() is None
    with pytest.raises(ValueError, match="time_limit_s is 0"):
        Stopping(tmp_path, Agreement(), time_limit_s=0)


def test_signal_is_noted_and_not_obeyed(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    try:
        stopping = Stopping(tmp_path, Agreement())
        stopping.install([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping.check() == "SIGUSR1"
        assert stopping.check() == "SIGUSR1"  # until somebody acts
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_failed_save_outranks_a_signal(tmp_path):
    (tmp_path / "STOP").touch()
    stopping = Stopping(tmp_path, Agreement())
    assert stopping.check() == "STOP file"
    assert stopping.check(save_failed=True) == "save failed"


def test_markers(tmp_path):
    write_marker(tmp_path, "stopped", {"step": 7, "reason": "SIGTERM"})
    assert json.loads((tmp_path / "stopped").read_text()) == {"step": 7, "reason": "SIGTERM"}
    assert [p.name for p in tmp_path.iterdir()] == ["stopped"]
    clear_markers(tmp_path)
    clear_markers(tmp_path)
    assert list(tmp_path.iterdir()) == []
