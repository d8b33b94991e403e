"""Reasons to stop: noticed on one rank, agreed by all at one step, and what is written then."""

import contextlib
import json
import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkpoint_launch import answers, finish, logs, start
from wm_ds.checkpoint.manager import find_latest, verify
from wm_ds.distributed.host_group import Agreement
from wm_ds.run.stopping import Signals, Stopping, clear_markers, write_marker

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


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGTERM), (1, signal.SIGTERM), (0, signal.SIGUSR1), (1, signal.SIGUSR1), (0, signal.SIGINT),
     (1, signal.SIGHUP)],
)  # fmt: skip
def test_signal_to_any_one_rank(tmp_path, rank, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here (nohup), and what is ignored stays ignored")
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


AT_A_TERMINAL = """
import signal, sys, time
signal.alarm(120)
from wm_ds.distributed.host_group import Agreement
from wm_ds.run.stopping import Signals, Stopping
signals = Signals().install()
stopping = Stopping(sys.argv[1], Agreement(), signals=signals)
print("ready", flush=True)
reason = None
while not (reason and sys.argv[2] == "stops"):
    time.sleep(0.05)
    print("a step", flush=True)
    reason = stopping.check()
open(sys.argv[1] + "/saved", "w").write(reason)
"""


def at_a_terminal(folder: Path, how: str) -> tuple[int, int]:
    """A process at a terminal of its own, once it is ready: its id and the terminal's other end.

    It does not outlive two minutes, so that a test that waits for it ends.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        os.execv(sys.executable, [sys.executable, "-c", AT_A_TERMINAL, str(folder), how])
    read_until(terminal, b"ready")
    return pid, terminal


def read_until(terminal: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 4096)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_to_the_end(terminal: int) -> str:
    seen = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 4096):
            seen += part
    return seen.decode()


def test_a_terminal_that_hangs_up_stops_the_run_gracefully(tmp_path):
    pid, terminal = at_a_terminal(tmp_path, "stops")
    os.close(terminal)
    assert exit_code(pid) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_ctrl_c_saves_and_says_so(tmp_path):
    pid, terminal = at_a_terminal(tmp_path, "stops")
    os.write(terminal, b"\x03\x03")  # as from torchrun, which hands it on to ranks that have had it
    text = read_to_the_end(terminal)
    assert exit_code(pid) == 0
    assert (tmp_path / "saved").read_text() == "SIGINT"
    assert text.count("Ctrl-C: the run saves and stops after this step; once more ends it at once") == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    pid, terminal = at_a_terminal(tmp_path, "goes on")
    os.write(terminal, b"\x03")
    read_until(terminal, b"once more ends it at once")
    time.sleep(1.1)
    os.write(terminal, b"\x03")
    text = read_to_the_end(terminal)
    assert exit_code(pid) == 130
    assert not (tmp_path / "saved").exists()
    assert "ended at once; the run goes on from its last checkpoint" in text
    assert "Traceback" not in text


def test_what_nohup_ignores_stays_ignored():
    before, interrupt = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGINT)
    try:
        signals = Signals().install()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signals.restore()
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGHUP, before)


def test_who_is_asked_to_stop_while_starting_takes_no_step(tmp_path):
    signals = Signals(speaks=False).install()
    try:
        (tmp_path / "STOP").touch()
        stopping = Stopping(tmp_path, Agreement(), time_limit_s=1e-9, signals=signals)
        assert stopping.before_the_first_step() is None, "a limit leaves every start its first step"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping.before_the_first_step() == "SIGUSR1"
    finally:
        signals.restore()


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
