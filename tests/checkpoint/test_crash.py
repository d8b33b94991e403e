"""Kills and full disks at random moments, also inside saves: the newest complete checkpoint always loads."""

import contextlib
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint_launch import answers, finish, logs, run, start
from wm_ds.checkpoint.directory import latest, leftovers, list_checkpoints
from wm_ds.checkpoint.manager import find_latest, verify

pytestmark = pytest.mark.alone

STEPS = 9
CASE = {"stage": 2, "steps": STEPS, "save_at": list(range(1, STEPS + 1)), "keep_last": 2, "timeout_s": 20}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict:
    """Losses by step of the run that nobody kills."""
    folder = tmp_path_factory.mktemp("unbroken")
    return run(2, [CASE | {"dir": str(folder), "resume": None}])[0][0]["losses"]


def check_survival(folder: Path, published: int, unbroken: dict, killed_world: int = 2) -> int:
    """What must hold after any end of a run; resumes it. Returns the step that it went on from."""
    latest = folder / "checkpoints" / "latest"
    for found in list_checkpoints(folder):  # a final name means a complete checkpoint
        assert verify(found.path) == []
    if latest.exists():
        named = folder / "checkpoints" / latest.read_text().strip()
        assert verify(named) == []
    newest = find_latest(folder)
    step = 0 if newest is None else int(newest.name.removeprefix("step_"))
    assert step >= published, f"step {published} was published, the newest is {step}"
    # The newest complete one loads, the run goes on as if nothing had happened and cleans up.
    answer = run(killed_world, [CASE | {"dir": str(folder), "resume": None}])[0][0]
    assert "error" not in answer
    assert list(answer["losses"]) == [str(s) for s in range(step + 1, STEPS + 1)]
    assert answer["losses"] == {s: unbroken[s] for s in answer["losses"]}
    assert leftovers(folder) == []
    left = [c.step for c in list_checkpoints(folder)]
    assert left[0] == STEPS
    assert len(left) <= CASE["keep_last"]
    return step


def published_in(log: Path) -> int:
    """The last step that rank 0 reported as saved, 0 if none."""
    return max((int(s) for s in re.findall(r"checkpoint: step (\d+) written", log.read_text())), default=0)


@contextlib.contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[Callable[[], None]]:
    """Mount a disk of that size; the value given makes it large enough. Skips the test where it may not."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def trial(seed: int, folder: Path, unbroken: dict) -> str:
    """One random end: a rank dies at some file operation, one or all die at some time, the disk is full."""
    draw = random.Random(seed)
    kind = draw.choice(["file operation", "file operation", "one at a time", "all at a time", "disk full"])
    if kind == "disk full":  # a checkpoint takes 240 KiB, keeping two three times that at its peak
        with small_disk(folder / "run", draw.randint(100, 800)) as enlarge:
            return end_and_resume(draw, kind, folder, unbroken, enlarge)
    return end_and_resume(draw, kind, folder, unbroken, lambda: None)


def end_and_resume(
    draw: random.Random, kind: str, folder: Path, unbroken: dict, enlarge: Callable[[], None]
) -> str:
    ranks_folder, run_folder = folder / "ranks", folder / "run"
    case = CASE | {"dir": str(run_folder), "resume": None, "pause_s": 0.02}
    if kind == "file operation":
        die_rank = draw.choice([0, 0, 1])  # a whole run has about 190 operations on rank 0, 28 on rank 1
        case |= {"die_rank": die_rank, "die_event": draw.randint(1, (180, 27)[die_rank])}
    ranks = start(2, [case], ranks_folder)
    if "at a time" in kind:
        log = ranks_folder / "rank_0.log"
        first = draw.randint(1, STEPS - 1)
        deadline = time.monotonic() + 60
        while not log.exists() or f"step {first}\n" not in log.read_text():
            assert time.monotonic() < deadline, logs(ranks_folder)
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        for rank in ranks if kind.startswith("all") else [draw.choice(ranks)]:
            rank.kill()
    codes = finish(ranks, timeout_s=60)
    assert None not in codes, f"a rank hangs after {kind}\n{logs(ranks_folder)}"
    if -signal.SIGKILL in codes:  # nobody may think that all went well
        assert all(code != 0 for code in codes), codes
    enlarge()
    published = published_in(ranks_folder / "rank_0.log")
    step = check_survival(run_folder, published, unbroken)
    return f"{kind}, exit codes {codes}, {published} published, resumed from step {step}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_end(seed, tmp_path, unbroken):
    trial(seed, tmp_path, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_forty_random_ends(seed, tmp_path, unbroken):
    print(f"seed {seed}: {trial(seed, tmp_path, unbroken)}")


def test_random_kills_reach_into_saves(tmp_path, unbroken):
    """The trials are no empty promise: a death between two file operations leaves a partial directory."""
    left = set()
    for event in (1, 4, 6, 9, 13):
        folder = tmp_path / str(event)
        case = CASE | {"dir": str(folder), "resume": None, "die_rank": 0, "die_event": event}
        codes = finish(start(2, [case], tmp_path / f"ranks{event}"), timeout_s=60)
        assert codes[0] == -signal.SIGKILL
        left |= {re.sub(r".*\.(partial|doomed).*", r"\1", p.name) for p in leftovers(folder)}
    assert "partial" in left


def test_killed_between_the_last_file_and_the_pointer(tmp_path, unbroken):
    """Dead when the directory has its name and `latest` not yet: the newest complete one is taken."""
    first = CASE | {"dir": str(tmp_path / "run"), "resume": None, "steps": 1, "keep_last": 5}
    run(2, [first])
    # Rank 0's file operations of one save end with: rename to the final name, sync, `latest`.
    for event in range(20, 60):
        folder = tmp_path / f"run{event}"
        shutil.copytree(tmp_path / "run", folder)
        case = CASE | {"dir": str(folder), "resume": None, "steps": 2, "die_rank": 0, "die_event": event}
        finish(start(2, [case], tmp_path / f"ranks{event}"), timeout_s=60)
        names = {c.step for c in list_checkpoints(folder)}
        pointer = (folder / "checkpoints" / "latest").read_text().strip()
        if names == {1, 2} and pointer == "step_00000001":
            break
    else:
        pytest.fail("no death came between the last file and the pointer")
    newest, remarks = latest(folder)
    assert newest.name == "step_00000002"
    assert "step_00000002 is complete" in remarks[0]
    assert check_survival(folder, 1, unbroken) == 2


def assert_failed_alone(answer: list[list[dict]], folder: Path, text: str) -> None:
    """Both ranks report the failed save, and the checkpoint before it is whole and still the latest."""
    for rank in answer:
        assert text in rank[0]["error"], rank[0]
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert verify(folder / "checkpoints" / "step_00000002") == []
    assert leftovers(folder) == []
    assert answer[0][0]["losses"].keys() == answer[1][0]["losses"].keys()  # they ended at the same step


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_write_error_on_one_rank(tmp_path, background, rank):
    """One rank cannot write (its files may not grow): all ranks end at one step, nothing is lost."""
    case = {"stage": 2, "dir": str(tmp_path), "resume": None, "steps": 2, "save_at": [2], "keep_last": 1}
    run(2, [case])
    case |= {"steps": 40, "save_at": [4], "limit_rank": rank, "limit_bytes": 50_000, "background": background}
    started = time.monotonic()
    answer = run(2, [case | {"pause_s": 0.05}])
    assert time.monotonic() - started < 60
    assert_failed_alone(answer, tmp_path, f"save of step 4 failed: rank {rank}: [Errno 27] File too large")


def test_disk_full(tmp_path):
    """A disk that has room for one checkpoint and a half, keeping one: the good one stays, the run ends."""
    case = {"stage": 2, "dir": str(tmp_path / "disk"), "resume": None, "steps": 40, "save_at": [2, 4]}
    with small_disk(tmp_path / "disk", 420):
        started = time.monotonic()
        answer = run(2, [case | {"keep_last": 1, "pause_s": 0.05}])
        assert time.monotonic() - started < 60
        assert_failed_alone(answer, tmp_path / "disk", "No space left on device")


def test_superseded_attempt_publishes_nothing(tmp_path):
    """A node that was given up lives on while a newer attempt runs: its save must not become `latest`."""
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    (attempts / "0001.json").write_text("{}")
    case = {"stage": 2, "dir": str(tmp_path), "resume": None, "steps": 2, "save_at": [2], "attempt": 1}
    assert "error" not in run(2, [case])[0][0]
    (attempts / "0002.json").write_text("{}")
    answer = run(2, [case | {"steps": 40, "save_at": [4], "pause_s": 0.05}])
    assert_failed_alone(answer, tmp_path, "attempt 1 of")
    assert "superseded by a newer one" in answer[0][0]["error"]


def test_rank_that_dies_is_not_waited_for(tmp_path):
    """With one rank dead inside its save, the other ends by itself, non-zero, well before the time-out."""
    case = CASE | {"dir": str(tmp_path / "run"), "die_rank": 1, "die_event": 2, "timeout_s": 30}
    folder = tmp_path / "ranks"
    started = time.monotonic()
    codes = finish(start(2, [case], folder), timeout_s=60)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None), logs(folder)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("background", [True, False])
def test_write_that_hangs_ends_within_the_time_out(tmp_path, rank, background):
    """One rank's file system does not answer: all ranks give up, at the same step, and nothing is lost."""
    case = {"stage": 2, "dir": str(tmp_path / "run"), "steps": 2, "save_at": [2], "keep_last": 1}
    run(2, [case])
    case |= {"resume": None, "steps": 4000, "save_at": [4], "hang_rank": rank, "timeout_s": 3}
    started = time.monotonic()
    folder = tmp_path / "ranks"
    codes = finish(start(2, [case | {"background": background, "pause_s": 0.02}], folder), timeout_s=45)
    assert codes == [0, 0], logs(folder)  # the worker reports the error and ends by itself
    assert time.monotonic() - started < 30
    both = [r[0] for r in answers(folder, 2)]
    assert both[0]["losses"].keys() == both[1]["losses"].keys()
    assert "could not agree with the others within 3 s" in both[1 - rank]["error"]
    assert f"rank {rank} cannot write: its file system does not answer" in both[rank]["error"]
    assert find_latest(tmp_path / "run").name == "step_00000002"


def test_answers_of_a_whole_run_are_complete(tmp_path):
    """The helpers themselves: a run that nobody disturbs ends with 0 on both ranks and saves every step."""
    ranks = start(2, [CASE | {"dir": str(tmp_path / "run")}], tmp_path / "ranks")
    assert finish(ranks, timeout_s=60) == [0, 0]
    assert answers(tmp_path / "ranks", 2)[1][0]["losses"].keys() == {str(s) for s in range(1, STEPS + 1)}
    assert published_in(tmp_path / "ranks" / "rank_0.log") == STEPS
