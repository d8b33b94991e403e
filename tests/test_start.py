"""Whether a run may start, where it goes on, and what is then fixed: on run directories, without training."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.test_load import changed
from tests.support import toy_corpus
from wm_ds import files, start, train
from wm_ds.checkpoint import format
from wm_ds.config import load as configuration
from wm_ds.config.schema import Config, ConfigError
from wm_ds.config.stages import plan, rate_schedule
from wm_ds.data import shards
from wm_ds.data.skip import LeftOut
from wm_ds.distributed.process_group import World
from wm_ds.engine.engine import TrainingFailed
from wm_ds.optim.learning_rate import RateSchedule, learning_rate
from wm_ds.run import ancestry, claim, directory

WORLD = World(0, 0, 1, torch.device("cpu"), "gloo")
JSON = {"zero_optimization": {"stage": 2}}
OLD = Path(__file__).parent / "fixtures" / "old_run"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy_corpus.packed(tmp_path / "data", 60, "--seq-len", 24, "--holdout", 4)


def a_run(folder: Path, data: Path | str, **changes: Any) -> Config:
    optim = {"optim__lr": 3e-3, "optim__warmup": "10%", "optim__schedule": "constant"}
    base = {"run__dir": str(folder / "run"), "data__train": str(data), "steps": 20, "tokens": None}
    return configuration.parse(changed(**(base | optim | changes)))


def accept(config: Config, step: int, found: Path | None = None) -> RateSchedule:
    """What a start at `step` from `found` (default: the run's own checkpoint) settles."""
    if found is None and step > 0:
        found = Path(config.run.dir) / "checkpoints" / f"step_{step:08d}"
    stages = plan(config, 24, start.position(config)[1])
    return start.accept(stages, JSON, WORLD, claim.Attempt(Path(config.run.dir), 3), found, step).rate


def check(config: Config, step: int = 0) -> list[str]:
    return directory.check(plan(config, 24, start.position(config)[1]), step, start.content)


def check_branch(config: Config) -> list[str]:
    return start.check_branch(plan(config, 24, start.position(config)[1]))


# -- the data is what it was


def repack(data: Path, texts: int, *options: Any) -> None:
    shutil.rmtree(data)
    source = toy_corpus.write_jsonl(data.parent / "texts.jsonl", toy_corpus.numbered(texts, 3))
    assert toy_corpus.pack(data, [source], data.parent / "tokenizer", *options) == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--seq-len", 24, "--holdout", 4),  # other text
        ("--seq-len", 24, "--holdout", 4, "--shuffle-seed", 7),
        ("--seq-len", 16, "--holdout", 4),
        ("--seq-len", 24, "--holdout", 5),
    ],
)
def test_data_that_was_packed_again_in_the_same_folder_is_refused(tmp_path, data, options):
    accept(a_run(tmp_path, data), 0)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    repack(data, 60, *options)
    with pytest.raises(ConfigError) as caught:
        check(a_run(tmp_path, data))
    assert f"data.train: {data} holds other rows than the run was trained on so far" in str(caught.value)
    assert "it was packed again since" in str(caught.value)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_the_same_rows_are_the_same_data_under_any_name(tmp_path, data, monkeypatch):
    accept(a_run(tmp_path, data), 0)
    (tmp_path / "link").symlink_to(data)
    shutil.copytree(data, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    for name in (f"{data}/", os.path.relpath(data), tmp_path / "link", tmp_path / "moved"):
        assert check(a_run(tmp_path, name)) == []
    again = toy_corpus.packed(tmp_path / "again", 60, "--seq-len", 24, "--holdout", 4)
    assert shards.content(shards.load_manifest(again)) == shards.content(shards.load_manifest(data))


def test_other_data_and_other_weights_are_refused_by_name(tmp_path, data):
    other = toy_corpus.packed(tmp_path / "other", 61, "--seq-len", 24, "--holdout", 4)
    mixed = [{"path": str(data), "weight": 2.0}, {"path": str(other), "weight": 1.0}]
    accept(a_run(tmp_path, data, data__train=mixed), 0)
    for sources, said in (
        (mixed[::-1], "data.train is "),
        ([mixed[0], {"path": str(data), "weight": 1.0}], f"{data} holds other rows"),
        (str(data), "data.train is "),
    ):
        with pytest.raises(ConfigError, match="holds another run") as caught:
            check(a_run(tmp_path, data, data__train=sources))
        assert said in str(caught.value)


def test_a_run_from_before_contents_were_recorded_goes_on(tmp_path, monkeypatch):
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    config = configuration.load("run.yaml")
    assert not (tmp_path / "old/run" / ancestry.HISTORY).exists()
    check(config)
    found = tmp_path / "old/run/checkpoints/step_00000002"
    rate = accept(config, 2, found)
    assert rate == RateSchedule(**rate_schedule(plan(config, 24)))
    known = directory.history("run")
    assert known["data"] == [start.content("packed")]
    assert [past["from"] for past in known["rates"]] == [0], "the rate is the one from before"
    moved = config.model_copy(update={"data": config.data.model_copy(update={"train": "elsewhere"})})
    with pytest.raises(ConfigError, match="elsewhere holds other rows"):
        check(moved)


def test_a_damaged_record_is_named_with_a_remedy_that_works(tmp_path, data):
    accept(a_run(tmp_path, data), 0)
    (tmp_path / "run" / ancestry.HISTORY).write_text('{"data": [')
    with pytest.raises(ConfigError, match=r"history\.json is damaged .*; remove it"):
        check(a_run(tmp_path, data))
    (tmp_path / "run" / ancestry.HISTORY).unlink()
    assert check(a_run(tmp_path, data)) == []


# -- a disk that is full


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("what", ["mkdir", "claim"])
def test_a_run_directory_that_cannot_be_written_refuses_the_start_in_one_line(
    tmp_path, data, monkeypatch, what
):
    stages = plan(a_run(tmp_path, data), 24)
    if what == "mkdir":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "attempts").write_text("")  # as wrong as a full disk
        said = f"{tmp_path}/run/attempts"
    else:
        monkeypatch.setattr(claim, "create", lambda path, _: full(path))
        said = f"{tmp_path}/run/attempts/0001.json: No space left on device"
    with pytest.raises(ConfigError) as caught:
        start.on_main(WORLD, lambda: start.claim(stages, 0, WORLD))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["write_marker", "record_end"])
def test_an_end_that_cannot_be_written_down_is_one_line_with_what_helps(tmp_path, data, monkeypatch, place):
    mine = claim.claim(tmp_path / "run")
    marker = tmp_path / "run" / ("done" if place == "write_marker" else "attempts/0001.end")
    with monkeypatch.context() as patch:
        original = files.write_atomically
        patch.setattr(files, "write_atomically", lambda p, d: full(p) if p == marker else original(p, d))
        with pytest.raises(TrainingFailed) as caught:
            train.note_end(str(tmp_path / "run"), mine, "done", {"step": 20, "began": 0})
    assert f"{marker}: No space left on device: the checkpoint of step 20 is written" in str(caught.value)
    # What it says helps: there is room, and the start that finds nothing left to do notes the end.
    train.note_end(str(tmp_path / "run"), mine, "done", {"step": 20, "began": 20})
    assert json.loads((tmp_path / "run" / "done").read_text())["step"] == 20
    assert json.loads(mine.path("end").read_text())["clean"]


# -- doing nothing is no success


def test_a_start_that_would_train_nothing_is_refused(tmp_path, data):
    other = tmp_path / "other" / "checkpoints" / "step_00000020"
    with pytest.raises(ConfigError) as caught:
        accept(a_run(tmp_path, data), 20, other)
    assert f"{other} is at step 20 and this run has 20 steps: nothing would be trained" in str(caught.value)
    assert "give it more than 20 steps" in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()
    accept(a_run(tmp_path, data, steps=21), 20, other)  # the remedy


def test_a_finished_run_may_start_again_but_not_be_made_shorter_than_it_is(tmp_path, data):
    accept(a_run(tmp_path, data), 0)
    accept(a_run(tmp_path, data), 20)
    with pytest.raises(ConfigError, match="at step 20 and this run has 15 steps"):
        accept(a_run(tmp_path, data, steps=15), 20)


# -- a learning rate that has happened is fixed


def test_a_longer_run_does_not_warm_up_again_and_says_what_the_rest_will_be(tmp_path, data, caplog):
    accept(a_run(tmp_path, data), 0)
    with caplog.at_level(logging.INFO, "wm_ds"):
        rate = accept(a_run(tmp_path, data, steps=400), 20)
    assert [learning_rate(step, rate) for step in (1, 2, 21, 40, 400)] == [1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3]
    assert "the warm-up stays 2 steps, as it was; optim.warmup would be 40 now" in caplog.text
    assert "20 steps became 400; learning rate from here on: 0.003 at step 21" in caplog.text
    caplog.clear()
    again = accept(a_run(tmp_path, data, steps=400), 20)
    assert again == rate
    assert "became" not in caplog.text, "said once"


def test_wsd_made_longer_stays_where_it_is_and_the_remedy_goes_back_to_the_peak(tmp_path, data, caplog):
    wsd = {"optim__schedule": "wsd", "optim__decay": "20%"}
    accept(a_run(tmp_path, data, **wsd), 0)
    with caplog.at_level(logging.INFO, "wm_ds"):
        after = accept(a_run(tmp_path, data, steps=40, **wsd), 20)
    assert [learning_rate(step, after) for step in (21, 30, 40)] == pytest.approx([3e-4] * 3)
    assert "had begun to fall before step 20: it does not rise again" in caplog.text
    assert "another run.dir with run.branch_from = RUN@STEP" in caplog.text
    branch = a_run(tmp_path / "branch", data, steps=40, run__branch_from=f"{tmp_path / 'run'}@16", **wsd)
    rate = accept(branch, 16, tmp_path / "run" / "checkpoints" / "step_00000016")
    assert [learning_rate(step, rate) for step in (17, 32)] == [3e-3, 3e-3]
    assert learning_rate(40, rate) == pytest.approx(3e-4)


def test_a_rate_that_does_not_change_is_recorded_once(tmp_path, data):
    for step in (0, 5, 5, 12):
        accept(a_run(tmp_path, data), step)
    assert [past["from"] for past in directory.history(tmp_path / "run")["rates"]] == [0]
    accept(a_run(tmp_path, data, steps=40), 12)
    accept(a_run(tmp_path, data, steps=40), 30)
    assert [past["from"] for past in directory.history(tmp_path / "run")["rates"]] == [0, 12]


def test_going_back_before_a_change_undoes_it(tmp_path, data):
    cosine = {"optim__schedule": "cosine"}
    plan = accept(a_run(tmp_path, data, **cosine), 0)
    capped = accept(a_run(tmp_path, data, steps=100, **cosine), 15)
    assert capped.cap == pytest.approx(learning_rate(15, plan) / 3e-3)
    back = accept(a_run(tmp_path, data, steps=100, **cosine), 5)
    assert back.cap == pytest.approx(learning_rate(5, plan) / 3e-3)
    assert [past["from"] for past in directory.history(tmp_path / "run")["rates"]] == [0, 5]


def test_a_refused_start_leaves_the_runs_record_as_it_was(tmp_path, data):
    accept(a_run(tmp_path, data), 0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for wrong in (
        {"run__seed": 9},
        {"model__num_groups": 2},
        {"batch__global_batch": 4, "batch__micro_batch": 1},
    ):
        with pytest.raises(ConfigError, match="holds another run"):
            check(a_run(tmp_path, data, **wrong))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


# -- branches: another run's checkpoint, and a future of its own


def checkpoint(run: Path, step: int) -> Path:
    """A checkpoint in name: complete, and without a tensor."""
    path = run / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    manifest = format.Manifest({"step": step, "sequence": step}, {}, {}, {})
    (path / format.MANIFEST).write_text(manifest.to_json())
    return path


@pytest.fixture
def long(tmp_path: Path, data: Path) -> Path:
    """A run of 20 steps with checkpoints of 10 and 20, whose rate has fallen since step 16."""
    run = tmp_path / "run"
    accept(a_run(tmp_path, data, optim__schedule="wsd", optim__decay=4), 0)
    for step in (10, 20):
        checkpoint(run, step)
    return run


def branch(long: Path, data: Path, step: int = 20, name: str = "branch", **changes: Any) -> Config:
    return a_run(long.parent / name, data, run__branch_from=f"{long}@{step}", steps=40, **changes)


def begin(config: Config) -> RateSchedule:
    """What a start settles that begins the branch."""
    assert config.run.branch_point is not None
    run, step = config.run.branch_point
    assert check(config) == []
    check_branch(config)
    return accept(config, step, Path(run) / "checkpoints" / f"step_{step:08d}")


def test_a_branch_has_its_own_rate_also_where_its_ancestors_had_fallen(long, data, caplog):
    config = branch(long, data, optim__schedule="wsd", optim__decay=10)
    with caplog.at_level(logging.INFO, "wm_ds"):
        rate = begin(config)
    assert rate == RateSchedule(**rate_schedule(plan(config, 24)))
    assert [learning_rate(step, rate) for step in (21, 30)] == [3e-3, 3e-3]
    assert learning_rate(40, rate) == pytest.approx(3e-4)
    assert f"a branch of {long}@20, where the learning rate was 0.0003; from here on: 0.003" in caplog.text
    assert directory.history(config.run.dir)["rates"][0]["from"] == 20
    checkpoint(Path(config.run.dir), 30)
    shutil.rmtree(long)  # it is needed no more
    assert check(config) == []
    assert check_branch(config) == []
    assert accept(config, 30) == rate
    longer = branch(long, data, optim__schedule="wsd", optim__decay=10).model_copy(update={"steps": 80})
    capped = accept(longer, 35)
    assert learning_rate(36, capped) == pytest.approx(learning_rate(35, rate)), "a fallen rate of its own"


def test_what_a_branch_may_choose_is_named_and_the_rest_is_refused(long, data, tmp_path):
    other = toy_corpus.packed(tmp_path / "other", 61, "--seq-len", 24, "--holdout", 4)
    notes = check_branch(branch(long, data, model__grad_passes=3, optim__lr=1e-4))
    assert f"unlike {long}: model.grad_passes: None -> 3" in notes
    assert f"unlike {long}: optim.lr: 0.003 -> 0.0001" in notes
    for changes, said in (
        ({"model__hidden_size": 128}, "model.hidden_size is 64 there and 128 here"),
        ({"model__num_hidden_layers": 6}, "model.num_hidden_layers is 4 there and 6 here"),
        ({"run__seed": 1}, "run.seed is 0 there and 1 here"),
        ({"batch__global_batch": 8}, "batch.global_batch is 16 there and 8 here"),
        ({"data__train": str(other)}, f"data.train: {other} holds other rows"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_branch(branch(long, data, **changes))
        assert str(caught.value).startswith(f"run.branch_from = {long}@20: ")
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_branch_may_have_other_data_from_where_it_begins(long, data, tmp_path):
    """Annealing on better data, as a stage: what is before the branch stays the ancestor's."""
    other = toy_corpus.packed(tmp_path / "other", 61, "--seq-len", 24, "--holdout", 4)

    def config(until: int) -> Config:
        return branch(long, data, stages=[{"until": until}, {"data": str(other)}])

    assert "steps of the run: 20 -> 40" in " ".join(check_branch(config(20)))
    with pytest.raises(ConfigError, match=r"steps 11 to 20: data.train: .* holds other rows"):
        check_branch(config(10))
    begin(config(20))
    _, batches, _ = start.open_data(config(20), *start.position(config(20))[1:])
    (of_other,) = batches.drawn(1, 20)
    assert (of_other.path, of_other.before) == (str(other), 0.0), "from its beginning"
    _, ancestor, _ = start.open_data(a_run(tmp_path, data))
    assert batches.batch(19, 0, 1, 4)[0]["sample_ids"].tolist() == (
        ancestor.batch(19, 0, 1, 4)[0]["sample_ids"].tolist()
    )


def test_a_branch_point_that_is_not_there_is_refused(long, data, tmp_path):
    (checkpoint(long, 15) / format.MANIFEST).unlink()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for point, said in (
        (f"{long}@17", "no checkpoint of step 17; there are: step_00000020, step_00000010, step_00000015 (d"),
        (f"{long}@15", "step_00000015: it holds no manifest.json"),
        (f"{tmp_path / 'nowhere'}@20", f"{tmp_path / 'nowhere'} is no run directory (no config.yaml)"),
        (f"{tmp_path / 'loop'}@20", f"{tmp_path / 'loop'} is no run directory (no config.yaml)"),
        (f"{tmp_path / 'branch' / 'run'}@20", "is this run itself; give the branch another run.dir"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_branch(a_run(tmp_path / "branch", data, run__branch_from=point, steps=40))
        assert str(caught.value).startswith(f"run.branch_from = {point}")
        assert said in str(caught.value)
    assert not (tmp_path / "branch").exists()
    with pytest.raises(ConfigError, match="at step 20 and this run has 20 steps: nothing would be trained"):
        begin(a_run(tmp_path / "branch", data, run__branch_from=f"{long}@20"))


def test_a_run_has_one_beginning(long, data, tmp_path, monkeypatch):
    for point in ("runs/long", "runs/long@", "@5", "runs/long@five", "runs/long@-5"):
        with pytest.raises(ConfigError, match=f"run.branch_from = {point}: write RUN@STEP"):
            a_run(tmp_path, data, run__branch_from=point)
    with pytest.raises(ConfigError, match="are two beginnings; leave one out"):
        a_run(tmp_path, data, run__branch_from="a@5", checkpoint__resume="b")
    begin(branch(long, data))
    monkeypatch.chdir(tmp_path)
    assert check(branch(Path("run"), data, name=str(tmp_path / "branch"))) == [], "the same point"
    for point, other in ((f"{long}@10", f"'{long}@20' there and '{long}@10' here"), (None, "there and None")):
        changed_point = branch(long, data).run.model_copy(update={"branch_from": point})
        with pytest.raises(ConfigError, match=r"holds another run: run\.branch_from is") as caught:
            check(branch(long, data).model_copy(update={"run": changed_point}))
        assert other in str(caught.value)


def test_the_chain_of_ancestors_is_recorded(long, data, tmp_path):
    first = branch(long, data)
    begin(first)
    checkpoint(Path(first.run.dir), 30)
    second = branch(Path(first.run.dir), data, 30, "second")
    begin(second)
    chain = [ancestry.Ancestor(str(long), 20), ancestry.Ancestor(first.run.dir, 30)]
    assert ancestry.chain(second.run.dir) == chain
    accept(second, 35)
    assert ancestry.chain(second.run.dir) == chain, "a restart keeps it"
    assert ancestry.chain(long) == []
    assert ancestry.chain(tmp_path / "nowhere") == []
    moved = Path(shutil.move(tmp_path, tmp_path.with_name("moved")))
    assert ancestry.located(chain[0], moved / "x") == moved / "run"


# -- batches that are left out


def skip(run: Path, data: Path, *spans: tuple[int, int], **changes: Any) -> Config:
    return a_run(run.parent, data, data__skip=[list(span) for span in spans], **changes)


def test_what_is_left_out_may_change_in_the_future_only(tmp_path, data):
    """At step 10, batches up to 13 are gone: 4 to 6 were left out."""
    run = tmp_path / "run"
    accept(skip(run, data, (4, 6)), 0)
    checkpoint(run, 10)
    accept(skip(run, data, (4, 6)), 10)
    for spans in ((), ((4, 5),), ((4, 6), (13, 13)), ((1, 2), (4, 6))):
        with pytest.raises(ConfigError) as caught:
            start.check_left_out(skip(run, data, *spans), run, 10)
        assert f"data.skip is [[4, 6]] in {run} and {[list(span) for span in spans]} here" in str(
            caught.value
        )
        assert "13 batches are consumed there: leave out later ones only" in str(caught.value)
    later = skip(run, data, (4, 6), (14, 20))
    assert start.check_left_out(later, run, 10) == ["data.skip: [[4, 6]] -> [[4, 6], [14, 20]]"]
    assert start.check_left_out(skip(run, data, (4, 4), (5, 6)), run, 10) == [], "the same"
    accept(later, 10)
    (change,) = directory.history(run)["changes"]
    assert change["step"] == 10
    assert "data.skip: [[4, 6]] -> [[4, 6], [14, 20]]" in change["what"]


def test_what_rollbacks_left_out_stays_so_here_and_in_branches(long, data):
    directory.amend(long, rollbacks=[{"at": 13, "to": 9, "batches": [10, 13], "attempt": 1, "number": 1}])
    assert start.position(a_run(long.parent, data)).left_out == LeftOut(((10, 13),))
    config = branch(long, data, data__skip=[[30, 31]])
    assert start.position(config).left_out == LeftOut(((10, 13), (30, 31)))
    begin(config)
    shutil.rmtree(long)
    checkpoint(Path(config.run.dir), 25)
    assert start.position(config) == (25, [], LeftOut(((10, 13), (30, 31))))
    (entry,) = directory.history(config.run.dir)["rollbacks"]
    assert entry["inherited"], "and is none of its own guard.max_rollbacks"


@pytest.mark.parametrize("spans", [[[5, 4]], [[0, 3]], [[3]], [3, 4], [[1, 2, 3]], "3-4", [["a", 4]]])
def test_spans_that_are_none_are_refused(tmp_path, data, spans):
    with pytest.raises(ConfigError, match=r"data\.skip") as caught:
        a_run(tmp_path, data, data__skip=spans)
    assert "\n" not in str(caught.value)


def test_rollbacks_that_cannot_be_are_refused(tmp_path, data):
    for changes, said in (
        ({"checkpoint__every": None}, "has no checkpoint to go back to with checkpoint.every = null"),
        ({"checkpoint__every": 1, "checkpoint__keep_last": 2}, "checkpoint.keep_last = 2; keep 3 or more"),
        ({"guard__skip_spikes": True, "guard__max_skipped": 3}, "guard.rollback = 3 never comes"),
    ):
        with pytest.raises(ConfigError) as caught:
            a_run(tmp_path, data, guard__rollback=3, **changes)
        assert said in str(caught.value)
    a_run(tmp_path, data, guard__rollback=3, checkpoint__every=1, checkpoint__keep_last=3)
    a_run(tmp_path, data, guard__rollback=3, checkpoint__every=2, checkpoint__keep_last=2)
