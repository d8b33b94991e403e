"""Who is slow: told by its own computing, named when it lasts; one of four ranks of a real run is."""

import logging
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import slow_worker, toy_corpus
from tests.support.checkpoint_launch import finish, fork, logs, metric_rows
from tests.support.settings import trainable
from wm_ds.run.stragglers import Stragglers, Told


class Four:
    """The agreement of four ranks, this one the first; `others` is what the other three say."""

    rank, world = 0, 4

    def __init__(self) -> None:
        self.others: list[Told] = []
        self.calls = 0

    def gather(self, own: Told) -> list[Any]:
        self.calls += 1
        return [own, *self.others]

    def maximum(self, value: int) -> int:
        self.calls += 1
        return value


def others(*seconds: float, data: float = 0.01, asks: bool = False) -> list[Told]:
    return [Told(f"node{i}", own, data * i, 0.1, asks) for i, own in enumerate(seconds, start=1)]


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def interval(watched: Stragglers, last: int, own: float = 1.0, asks: bool = False) -> tuple[dict, bool]:
    """Two steps up to `last`; the first says nothing."""
    seconds = {"forward": own, "backward": 9.0, "communication": 0.5}
    assert watched.after(last - 1, seconds, 0.2, lambda: pytest.fail("asked within an interval")) == (
        {},
        False,
    )
    return watched.after(last, seconds, 0.4, lambda: asks)


def test_it_compares_own_computing_and_tells_waits_apart():
    four = Four()
    watched = Stragglers(four, ("forward",), 2, 1.3, 3)
    four.others = others(1.0, 1.2, 1.0)
    row, asked = interval(watched, 2)
    assert not asked
    assert four.calls == 1, "once an interval"
    assert row["straggler"] == {
        "data_rank": 0,
        "data_node": socket.gethostname(),
        "data_s": 0.3,
        "rank": 2,
        "node": "node2",
        "ratio": 1.2,
        "compute_s": 1.2,
        "median_s": 1.0,
        "waits_s": 0.12,
    }


def test_one_that_stays_slow_is_named_once_until_it_recovers(caplog):
    four, slow = Four(), others(1.0, 1.0, 1.5)
    watched = Stragglers(four, ("forward",), 2, 1.3, 3)
    with caplog.at_level(logging.WARNING, "wm_ds"):
        for number, said in enumerate([slow, slow, others(1.0, 1.0, 1.2), slow, slow], start=1):
            four.others = said
            interval(watched, 2 * number)
        assert not caplog.records, "never three in a row so far"
        for number in (6, 7, 8):
            interval(watched, 2 * number)
        (line,) = lines(caplog)
        assert line == (
            "step 12: rank 3 on node3 has been slow for 6 steps: it computes 1.5 times as long as the median "
            "rank (1.5 s against 1 s a step, waits left out); look at that node"
        )
        four.others = others(1.0, 1.0, 1.0)
        interval(watched, 18)
        four.others = slow
        for number in (10, 11, 12):
            interval(watched, 2 * number)
        assert len(caplog.records) == 2


def test_a_slow_first_rank_is_seen_too(caplog):
    four = Four()
    four.others = others(1.0, 1.0, 1.0)
    watched = Stragglers(four, ("forward",), 2, 1.3, 1)
    with caplog.at_level(logging.WARNING, "wm_ds"):
        row, _ = interval(watched, 2, own=4.0)
    assert (row["straggler"]["rank"], row["straggler"]["ratio"]) == (0, 4.0)
    assert "rank 0 on" in lines(caplog)[0]


def test_an_interval_with_a_profiler_and_steps_without_a_part_of_their_own_compare_nobody():
    four = Four()
    four.others = others(1.0, math.nan, 5.0)
    watched = Stragglers(four, ("forward",), 2, 1.3, 1)
    row, _ = interval(watched, 2)
    assert "rank" not in row["straggler"]
    assert row["straggler"]["data_s"] == 0.3
    four.others = others(1.0, 1.0, 5.0)
    watched.after(3, {}, 0.0, lambda: False)  # this rank was profiled
    row, _ = watched.after(4, {"forward": 1.0}, 0.0, lambda: False)
    assert "rank" not in row["straggler"]
    row, _ = interval(watched, 6)
    assert row["straggler"]["rank"] == 3
    none = Stragglers(four, (), 2, 1.3, 1)
    row, _ = interval(none, 2)
    assert "rank" not in row["straggler"]


def test_anybody_may_ask_for_a_profile_and_nobody_need_be_compared():
    four = Four()
    four.others = others(1.0, 1.0, 1.0, asks=True)
    assert interval(Stragglers(four, ("forward",), 2, 1.3, 1), 2)[1]
    off = Stragglers(four, ("forward",), 2, None, 1)
    assert interval(off, 2) == ({}, False)
    assert interval(off, 4, asks=True) == ({}, True)


@pytest.mark.alone
def test_the_slow_one_of_four_ranks_is_named_and_a_profile_is_had_on_demand(tmp_path):
    data = toy_corpus.packed(tmp_path / "data", 200, "--seq-len", 24, "--holdout", 8)
    run = tmp_path / "run"
    config = trainable(
        data,
        run={"dir": str(run), "timeout_minutes": 2.0},
        batch={"global_batch": 4, "micro_batch": 1},
        steps=12,
        evaluate={"every": None, "sequences": 4, "double_passes": False},
        checkpoint={"every": None},
        log__every=2,
        watch={"straggler": 1.3, "straggler_intervals": 3},
        profile={"ranks": [0, 2]},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    arguments = [str(tmp_path / "run.yaml")]
    codes = finish(fork(slow_worker.trainer, [(arguments, str(run))] * 4, ranks(tmp_path)), 150)
    said = logs(ranks(tmp_path))
    assert codes == [0] * 4, said
    compared = {row["step"]: row["straggler"] for row in metric_rows(run) if "straggler" in row}
    assert sorted(compared) == [2, 4, 6, 8, 10, 12]
    for step in (2, 4, 6):
        assert compared[step]["rank"] == slow_worker.SLOW_RANK
        assert compared[step]["ratio"] > 1.3
        assert compared[step]["compute_s"] > slow_worker.SECONDS
        assert compared[step]["node"] == socket.gethostname()
    named = [line for line in said.splitlines() if "has been slow for 6 steps" in line]
    assert len(named) == 1, said
    assert named[0].startswith(f"step 6: rank 2 on {socket.gethostname()} ")
    assert "rank" not in compared[10], "a profiler was running"
    assert not (run / "PROFILE").exists()
    folder = run / "profiles" / "step_00000009"
    written = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert written == {"rank_00000", "rank_00002"}


def ranks(folder: Path) -> Path:
    (folder / "ranks").mkdir(exist_ok=True)
    return folder / "ranks"
