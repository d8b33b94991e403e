"""Profiles: the same losses to the last bit, what the tables say, failures that end nothing."""

import errno
import gzip
import json
import logging
import re
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PretrainedConfig, Qwen3Config

from tests.support import toy_corpus
from tests.support.settings import repeatable
from wm_ds.config.load import load
from wm_ds.config.schema import Config, ConfigError
from wm_ds.config.validate import check_against_launch
from wm_ds.distributed.process_group import Clock, World
from wm_ds.engine.loss import TokenLoss
from wm_ds.errors import run_cli
from wm_ds.families import build_model
from wm_ds.model import WhiteMatterConfig
from wm_ds.model.spans import name_parts, span
from wm_ds.plan import operators
from wm_ds.plan import profile as profiles
from wm_ds.plan.operators import Place, measure, read, table
from wm_ds.plan.profile import Profiles

PARTS = r"(pass|layer) \d+|pool|forward|backward|optimizer"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return toy_corpus.packed(tmp_path_factory.mktemp("data"), 200, "--seq-len", 24, "--holdout", 8)


CONFIG = WhiteMatterConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    num_kv_channels=2,
    num_groups=2,
    no_grad_passes=1,
    grad_passes=2,
)
QWEN = Qwen3Config(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    use_cache=False,
)


def settings(folder: Path, data: Path, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(repeatable(data, run__dir=str(folder / "run"), steps=9)))
    return load(path, list(overrides))


class Steps:
    """Steps of a small model with the calls that the trainer makes around them."""

    def __init__(self, config: Config, hf: PretrainedConfig = CONFIG, recompute: str = "none") -> None:
        self.lm = build_model(hf, seed=1, recompute=recompute).train()
        self.loss, self.world = TokenLoss(self.lm), World(0, 0, 1, torch.device("cpu"), "gloo")
        self.optimizer = torch.optim.SGD(self.lm.parameters(), lr=0.1)
        self.profiles = Profiles(config, self.lm, self.world)

    def take(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            ids = torch.randint(0, 50, (2, 33), generator=torch.Generator().manual_seed(step))
            self.profiles.before(step)
            clock = Clock(self.world.device, span)
            with clock.of("forward"):
                loss = self.loss(ids[:, :-1], ids[:, 1:], torch.zeros(2, 32, dtype=torch.int32))
            with clock.of("backward"):
                loss.backward()
            with clock.of("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.profiles.after(step)
            losses.append(loss.item())
        return losses


def described(folder: Path) -> str:
    """The tables, once the process beside the run has written them and compressed the trace."""
    deadline = time.monotonic() + 60
    while not (folder / "rank_00000.trace.json.gz").exists() or list(folder.glob("*.json.tmp*")):
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)
    while (folder / "rank_00000.trace.json").exists():
        time.sleep(0.02)
    return (folder / "rank_00000.txt").read_text()


@pytest.mark.parametrize("recompute", ["none", "group+layer"])
def test_losses_are_the_same_and_everything_is_written(tmp_path, data, recompute):
    plain = Steps(settings(tmp_path, data), recompute=recompute).take(1, 5)
    run = Steps(settings(tmp_path, data, "profile.steps=[2, 4]", "profile.memory=true"), recompute=recompute)
    assert run.take(1, 5) == plain
    folder = tmp_path / "run" / "profiles" / "step_00000002"
    described(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        *("rank_00000.memory.json", "rank_00000.trace.json.gz", "rank_00000.txt"),
    ]
    trace = json.loads(gzip.decompress((folder / "rank_00000.trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    parts = {"forward", "backward", "optimizer", "head", "pool", "start", "group 0", "group 1"}
    assert names >= parts | {f"layer {n}" for n in range(3)} | {f"pass {n}" for n in (1, 2, 3)}
    memory = json.loads((folder / "rank_00000.memory.json").read_text())
    assert memory["step"] == 4
    assert memory["peak_bytes"] == sum(memory["at_peak_bytes"].values()) > memory["left_bytes"] >= 0
    text = (folder / "rank_00000.txt").read_text()
    assert text.startswith("steps 2 to 3, rank 0 of 1, on cpu\n")
    assert ("recompute" in text) == (recompute != "none")
    shares = [float(found) for found in re.findall(r"^ *([\d.]+)%", text.split("\n\n")[2], re.MULTILINE)]
    assert sum(shares) == pytest.approx(100, abs=2)
    ranked = text.split("by pass and layer:")[1]
    assert len(re.findall(r"^ *[\d.]+% .*\d  \w", ranked, re.MULTILINE)) == 20


def test_operators_belong_to_the_part_that_ran_them(tmp_path, data):
    """Of a plain stretch of operators whose places are known."""
    weight = torch.ones(8, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        name_parts(True)
        with span("forward"):
            with span("pass", 1), span("layer", 0):
                x = weight @ weight
            with span("pass", 2), span("layer", 1):
                y = torch.tanh(x)
            with span("pool"):
                loss = y.exp().sum()
        with span("backward"):
            loss.backward()
        with span("optimizer"), torch.no_grad():
            weight -= 0.1
        name_parts(False)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    spent = measure(read(tmp_path / "trace.json"))
    places = {(str(name), place) for place, name in spent}
    assert ("aten::mm", Place("forward", "pass 1", "layer 0")) in places
    assert ("aten::mm", Place("backward", "pass 1", "layer 0")) in places
    assert ("aten::tanh", Place("forward", "pass 2", "layer 1")) in places
    assert ("aten::tanh_backward", Place("backward", "pass 2", "layer 1")) in places
    assert ("aten::exp", Place("forward", "", "pool")) in places
    assert any(name == "aten::sub_" and place.phase == "optimizer" for name, place in places)
    calls = {name: calls for (place, name), (_, calls) in spent.items() if place.phase == "backward"}
    assert calls["aten::mm"] == 2
    own = sum(e.self_cpu_time_total for e in profiler.events() if not re.fullmatch(PARTS, e.name)) / 1e6
    assert sum(seconds for seconds, _ in spent.values()) == pytest.approx(own, rel=0.02), "nothing lost"


def test_kernels_count_for_the_operator_that_started_them():
    """A trace as one with a GPU is: host events that only launch, kernels that carry their number."""

    def event(name, cat, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}

    events = [
        event("forward", "user_annotation", 0, 100),
        event("pass 1", "user_annotation", 1, 90),
        event("layer 0", "user_annotation", 2, 80),
        event("aten::linear", "cpu_op", 3, 70, **{"External id": 1, "Sequence number": 7}),
        event("aten::mm", "cpu_op", 4, 60, **{"External id": 2, "Sequence number": 7}),
        event("gemm", "kernel", 500, 3000, **{"External id": 2}),
        event(
            "autograd::engine::evaluate_function: MmBackward0", "cpu_op", 200, 50, **{"Sequence number": 7}
        ),
        event("aten::mm", "cpu_op", 210, 20, **{"External id": 4}),
        event("gemm", "kernel", 4000, 5000, **{"External id": 4}),
        {"ph": "M", "name": "process_name"},
    ]
    assert measure(events) == {
        (Place("forward", "pass 1", "layer 0"), "aten::mm"): (0.003, 1),
        (Place("backward", "pass 1", "layer 0"), "aten::mm"): (0.005, 1),
    }
    assert table(measure(events), steps=2).startswith("0.004 s a step in operators")


def test_the_command_reads_a_trace_of_before_and_names_what_is_none(tmp_path, capsys):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 2e6}
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    assert run_cli(operators.command, [str(tmp_path / "t.json.gz")]) == 0
    assert " 100.0%    2.00000       1  other" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text("{")
    assert run_cli(operators.command, [str(tmp_path / "bad.json")]) == 1
    assert (
        capsys.readouterr().err == f"error: {tmp_path}/bad.json is no trace of a profiler (JSONDecodeError)\n"
    )


def test_layers_of_foreign_models_are_named_too_and_only_meanwhile(tmp_path, data):
    run = Steps(settings(tmp_path, data, "profile.steps=[1, 1]"), QWEN)
    run.take(1, 2)
    text = described(tmp_path / "run/profiles/step_00000001")
    assert "layer 0" in text
    assert "layer 1" in text
    layer = run.lm.model.layers[0]
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_nothing_is_named_without_a_profiler():
    assert span("layer", 1) is span("pass", 2), "one object that does nothing"


def test_a_file_in_the_run_directory_asks_for_the_next_steps(tmp_path, data):
    run = Steps(settings(tmp_path, data))
    (tmp_path / "run").mkdir()
    assert not run.profiles.requested()
    (tmp_path / "run" / "PROFILE").touch()
    assert run.profiles.requested()
    assert not run.profiles.requested()
    assert not (tmp_path / "run" / "PROFILE").exists()
    run.take(1, 1)
    run.profiles.request(1)
    run.take(2, 6)
    assert [p.name for p in (tmp_path / "run" / "profiles").iterdir()] == ["step_00000002"]
    assert "steps 2 to 4" in described(tmp_path / "run/profiles/step_00000002")


def test_other_ranks_than_those_asked_for_do_nothing(tmp_path, data):
    run = Steps(settings(tmp_path, data, "profile.steps=[1, 2]", "profile.ranks=[3]"))
    run.take(1, 3)
    assert not (tmp_path / "run" / "profiles").exists()


@pytest.mark.parametrize("fails", ["start", "mkdir", "export", "empty", "table", "memory"])
def test_a_profile_that_fails_is_one_line_and_the_run_goes_on(tmp_path, data, monkeypatch, caplog, fails):
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        raise full

    if fails == "mkdir":
        (tmp_path / "run").write_text("no folder")
    else:
        owner, name = {
            "start": (torch.profiler.profile, "start"),
            "export": (torch.profiler.profile, "export_chrome_trace"),
            "empty": (torch.profiler.profile, "export_chrome_trace"),
            "table": (profiles.subprocess, "Popen"),
            "memory": (profiles, "write_json"),
        }[fails]
        monkeypatch.setattr(owner, name, (lambda _, path: Path(path).touch()) if fails == "empty" else fail)
    plain = Steps(settings(tmp_path, data)).take(1, 4)
    run = Steps(settings(tmp_path, data, "profile.steps=[2, 3]", "profile.memory=true"))
    with caplog.at_level(logging.WARNING, "wm_ds"):
        assert run.take(1, 4) == plain
    (line,) = (r.getMessage() for r in caplog.records)
    assert re.match(r"step [23]: no profile of rank 0: .*; training goes on$", line)
    assert "\n" not in line
    assert not run.profiles.active
    assert span("layer", 1) is span("pass", 2)
    left = list((tmp_path / "run").rglob("*.tmp-*")) if (tmp_path / "run").is_dir() else []
    assert not left, "nothing half is left"


def test_what_cannot_be_profiled_is_refused(tmp_path, data):
    for said, wanted in {
        "[3, 2]": r"profile.steps = \[3, 2\]: write \[first, last\]",
        "[0, 2]": r"write \[first, last\], counted from 1",
        "[5, 12]": "the run has steps = 9",
        "[1, 100]": "a trace of 100 steps is huge",
    }.items():
        with pytest.raises(ConfigError, match=wanted):
            settings(tmp_path, data, f"profile.steps={said}")
    config = settings(tmp_path, data, "profile.steps=[1, 2]", "profile.ranks=[0, 2]")
    with pytest.raises(
        ConfigError, match=r"profile.ranks = \[0, 2\]: the launch has 2 ranks, numbered from 0"
    ):
        check_against_launch(config, {}, 2)
