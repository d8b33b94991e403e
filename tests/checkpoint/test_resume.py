"""Resuming: bitwise at the same world size, and at every other world size and ZeRO stage."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_launch import run, step
from tests.support.checkpoint_worker import Toy, digest
from wm_ds.checkpoint.format import read_manifest
from wm_ds.checkpoint.manager import find_latest, load_weights, read_tensor, verify

pytestmark = pytest.mark.alone

CASES = {
    f"stage{stage}-{precision}": {"stage": stage, "precision": precision, "tied": stage % 2 == 1}
    for stage, precision in itertools.product((0, 1, 2, 3), ("fp32", "bf16", "autocast"))
} | {
    "stage2-adamw": {"stage": 2, "optimizer": "adamw"},
    "stage2-offload": {"stage": 2, "offload": True},
    "stage3-offload-bf16": {"stage": 3, "offload": True, "precision": "bf16"},
}
STEPS, KILLS = 6, (1, 4)
ELASTIC = ("stage0-fp32", "stage1-fp32", "stage2-fp32", "stage3-fp32")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case at world size 2, unbroken to step 6: (folder by case, answer by case)."""
    base = tmp_path_factory.mktemp("unbroken")
    names = list(CASES)
    plan = [
        CASES[n]
        | {"dir": str(base / n), "steps": STEPS, "save_at": [*KILLS, STEPS], "noise": 1e-2, "weights": True}
        for n in names
    ]
    # The elastic runs have no noise, because ranks of another world size draw other numbers.
    quiet = [
        CASES[n] | {"dir": str(base / f"quiet-{n}"), "steps": 5, "save_at": [2], "tied": False}
        for n in ELASTIC
    ]
    answers = run(2, plan + quiet)
    keys = names + [f"quiet-{n}" for n in ELASTIC]
    return base, {key: [rank[i] for rank in answers] for i, key in enumerate(keys)}


def fragment_files(path: Path) -> dict:
    """Checksums of all that was saved apart from the manifest: fragments, generators, client state."""
    return {name: record["sha256"] for name, record in read_manifest(path).files.items()}


def test_resume_is_bitwise(runs, tmp_path):
    """From each kill point, in new processes: losses, masters, optimizer, generators and data as unbroken."""
    base, unbroken = runs
    plan, keys = [], []
    for name, kill in itertools.product(CASES, KILLS):
        keys.append((name, kill))
        folder = tmp_path / f"{name}-{kill}"
        plan.append(
            CASES[name]
            | {"dir": str(folder), "resume": str(step(base / name, kill)), "steps": STEPS, "save_at": [STEPS]}
            | {"noise": 1e-2, "seed": 77, "weights": True}
        )
    answers = run(2, plan)
    for i, (name, kill) in enumerate(keys):
        for rank in (0, 1):
            resumed, whole = answers[rank][i], unbroken[name][rank]
            assert "error" not in resumed, (name, kill, resumed["error"])
            tail = [str(s) for s in range(kill + 1, STEPS + 1)]
            assert list(resumed["losses"]) == tail
            assert resumed["losses"] == {s: whole["losses"][s] for s in tail}, (name, kill)
            assert resumed["rows"] == {s: whole["rows"][s] for s in tail}, (name, kill)
            assert resumed["weights"] == whole["weights"], (name, kill)
            assert resumed["client"] == {"step": kill, "note": "é"}
        mine, theirs = step(tmp_path / f"{name}-{kill}", STEPS), step(base / name, STEPS)
        assert fragment_files(mine) == fragment_files(theirs), (name, kill)


def test_losses_depend_on_generators_and_state(runs):
    """The comparison above could fail: noise, stage, precision and optimizer all change the numbers."""
    _, unbroken = runs
    losses = {name: tuple(answers[0]["losses"].values()) for name, answers in unbroken.items()}
    assert losses["stage2-fp32"] != losses["quiet-stage2-fp32"]
    assert losses["stage2-fp32"] != losses["stage2-adamw"]
    assert losses["stage2-fp32"] != losses["stage2-bf16"]
    assert len(set(losses["stage2-fp32"])) == STEPS


def test_files_hold_the_live_masters(runs):
    """Read back by name, weights are the model's own in fp32, and round to the model's own in bf16."""
    base, unbroken = runs
    for name, case in CASES.items():
        live = unbroken[name][0]["weights"]
        stored = dict(load_weights(step(base / name, STEPS)))
        assert ("lm_head.weight" not in live) == bool(case.get("tied"))
        for key, value in live.items():
            low = stored[key].bfloat16() if case.get("precision") == "bf16" else stored[key]
            assert digest(low) == value, (name, key)


@pytest.mark.parametrize("name", CASES)
def test_extracted_weights_load_strictly(runs, name):
    base, _ = runs
    tied = bool(CASES[name].get("tied"))
    weights = dict(load_weights(step(base / name, STEPS)))
    model = Toy(tied)
    model.load_state_dict(weights, strict=True)
    assert model.channel_map.tolist() == [0, 1, 2]
    assert torch.equal(model.q_norm.weight, torch.full((63,), 1.5, dtype=model.q_norm.weight.dtype))
    assert torch.equal(weights["embed_tokens.weight"], weights["lm_head.weight"]) == tied
    assert weights["embed_tokens.weight"].dtype == torch.float32
    assert read_manifest(step(base / name, STEPS)).tensors["q_norm.weight"].role == "frozen"


def test_disk_holds_nothing_twice(runs):
    """Bytes on disk: 4 per weight and state element, plus headers, however many ranks held a copy."""
    base, _ = runs
    for name in CASES:
        path = step(base / name, STEPS)
        manifest = read_manifest(path)
        data = sum(r["size"] for f, r in manifest.files.items() if f.endswith(".safetensors"))
        minimum = sum(
            entry.numel * getattr(torch, state.dtype).itemsize
            for entry in manifest.tensors.values()
            for state in entry.states.values()
        )
        assert minimum <= data <= minimum + 20_000, name
        assert verify(path) == []


def elastic_plan(runs, tmp_path, world: int) -> tuple[list[dict], list[tuple[str, str]]]:
    base, _ = runs
    plan, keys = [], []
    for source, target in itertools.product(ELASTIC, ELASTIC):
        if world == 2 and source == target:
            continue
        keys.append((source, target))
        checkpoint = str(step(base / f"quiet-{source}", 2))
        folder = str(tmp_path / f"{world}-{source}-{target}")
        common = CASES[target] | {"dir": folder, "resume": checkpoint, "seed": 77, "tied": False}
        plan.append(common | {"steps": 5, "save_at": [5], "save_first": True})
    return plan, keys


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resume_at_another_size_and_stage(runs, tmp_path, world):
    """From world 2 and each stage to every stage: state equal by name, next losses within 1e-4."""
    base, unbroken = runs
    plan, keys = elastic_plan(runs, tmp_path, world)
    answers = run(world, plan)
    for i, (source, target) in enumerate(keys):
        whole = unbroken[f"quiet-{source}"]
        for rank in range(world):
            assert "error" not in answers[rank][i], (source, target, answers[rank][i]["error"])
            for s in ("3", "4", "5"):
                assert abs(answers[rank][i]["losses"][s] - whole[0]["losses"][s]) < 1e-4, (source, target, s)
        for s in ("3", "4", "5"):  # the same global batch in the same order
            joined = [token for rank in range(world) for token in answers[rank][i]["rows"][s]]
            assert joined == whole[0]["rows"][s] + whole[1]["rows"][s]
        before, after = step(base / f"quiet-{source}", 2), step(tmp_path / f"{world}-{source}-{target}", 2)
        assert_same_state(before, after)


def assert_same_state(before: Path, after: Path) -> None:
    """All tensors of two checkpoints are bitwise equal by name and kind, whatever their fragments."""
    a, b = read_manifest(before), read_manifest(after)
    assert a.tensors.keys() == b.tensors.keys()
    kinds = set()
    for name, entry in a.tensors.items():
        assert (entry.shape, entry.role, entry.updates) == (
            b.tensors[name].shape,
            b.tensors[name].role,
            b.tensors[name].updates,
        )
        assert entry.states.keys() == b.tensors[name].states.keys()
        for kind in entry.states:
            kinds.add(kind)
            assert torch.equal(read_tensor(before, name, kind), read_tensor(after, name, kind)), (name, kind)
            if kind != "weight":  # two zeros would be no proof
                assert read_tensor(before, name, kind).abs().sum() > 0
    assert kinds - {"momentum"} == {"weight", "exp_avg", "exp_avg_sq"}


def test_there_and_back(runs, tmp_path):
    """2 ranks -> 3 ranks at stage 3 -> 2 ranks at stage 1: every tensor survives bit by bit."""
    base, _ = runs
    source = step(base / "quiet-stage2-fp32", 2)
    far = {"stage": 3, "dir": str(tmp_path / "far"), "resume": str(source), "steps": 2, "save_first": True}
    reads = run(3, [far])[1][0]["reads"]
    assert read_manifest(step(tmp_path / "far", 2)).run["world_size"] == 3
    assert reads[0] > 0
    largest = max(entry.numel for entry in read_manifest(source).tensors.values())
    assert reads[1] < largest / 2  # of the largest tensor this rank reads its third only
    back = {"stage": 1, "dir": str(tmp_path / "back"), "resume": str(step(tmp_path / "far", 2)), "steps": 2}
    run(2, [back | {"save_first": True}])
    assert_same_state(source, step(tmp_path / "back", 2))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 3])
def test_state_moves_in_every_precision(runs, tmp_path, world):
    """bf16, autocast, AdamW, offload: every tensor equal after a move to another size and stage."""
    base, _ = runs
    sources = [
        "stage2-bf16",
        "stage0-bf16",
        "stage2-autocast",
        "stage2-adamw",
        "stage2-offload",
        "stage3-bf16",
    ]
    moves = [(name, stage) for name in sources for stage in (0, 2, 3) if stage != CASES[name]["stage"]]
    plan = [
        CASES[name]
        | {"stage": stage, "offload": False, "dir": str(tmp_path / f"{name}-{stage}"), "steps": 4}
        | {"resume": str(step(base / name, 4)), "save_first": True, "seed": 77}
        for name, stage in moves
    ]
    answers = run(world, plan)
    for i, (name, stage) in enumerate(moves):
        assert "error" not in answers[0][i], (name, stage, answers[0][i]["error"])
        assert_same_state(step(base / name, 4), step(tmp_path / f"{name}-{stage}", 4))


def test_auto_resume(tmp_path):
    """A fresh folder starts at 0 and says so; the next start takes the latest and says that."""
    case = {"stage": 2, "dir": str(tmp_path), "resume": None, "steps": 2, "save_at": [2]}
    fresh = run(2, [case])
    assert fresh[0][0]["lines"][0] == f"no checkpoint in {tmp_path}/checkpoints: starting at step 0"
    assert fresh[1][0]["lines"] == []
    again = run(2, [case | {"steps": 3, "save_at": [3]}])
    assert again[0][0]["lines"][0] == f"resuming from {step(tmp_path, 2)}"
    assert list(again[0][0]["losses"]) == ["3"]
    assert find_latest(tmp_path) == step(tmp_path, 3)


def test_wrong_resumes_are_errors_before_the_first_step(runs, tmp_path):
    """Missing path, empty folder, another architecture, other optimizer: every rank ends with the reason."""
    base, _ = runs
    empty = tmp_path / "empty"
    empty.mkdir()
    good = step(base / "stage2-fp32", 4)
    tied = step(base / "stage1-fp32", 4)
    case = {"stage": 2, "dir": str(tmp_path / "run"), "steps": 3}
    plan = [
        case | {"resume": str(tmp_path / "nowhere")},
        case | {"resume": str(empty)},
        case | {"resume": str(tied)},
        case | {"resume": str(good), "optimizer": "adamw"},
        case | {"resume": str(step(base / "stage2-fp32", 3))},
    ]
    expected = [
        f"no checkpoint at {tmp_path / 'nowhere'}: no such directory",
        f"no checkpoint at {empty}: it holds no manifest.json",
        "lm_head.weight is not in the checkpoint",
        "the optimizer keeps exp_avg of",
        "step_00000006, step_00000004",  # what there is instead
    ]
    answers = run(2, plan)
    for i, text in enumerate(expected):
        for rank in (0, 1):
            assert text in answers[rank][i]["error"], answers[rank][i]["error"]
            assert answers[rank][i]["losses"] == {}


def test_snapshot_that_does_not_fit_into_memory(tmp_path):
    """Said loudly, and the save is written from the live tensors instead: the same checkpoint."""
    case = {"stage": 2, "steps": 2, "save_at": [1, 2]}
    tight = run(2, [case | {"dir": str(tmp_path / "tight"), "free_bytes": 100_000}])[0][0]
    roomy = run(2, [case | {"dir": str(tmp_path / "roomy")}])[0][0]
    assert sum("this save is written while training waits" in line for line in tight["lines"]) == 2
    assert sum("of host memory from now on" in line for line in roomy["lines"]) == 1
    assert not any("while training waits" in line for line in roomy["lines"])
    for number in (1, 2):
        assert fragment_files(step(tmp_path / "tight", number)) == fragment_files(
            step(tmp_path / "roomy", number)
        )


def test_client_state_is_plain_json(runs):
    base, _ = runs
    path = step(base / "stage2-fp32", 4)
    assert json.loads((path / "client.json").read_text()) == {"step": 4, "note": "é"}
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_wrong_map_of_the_weights_is_found_before_the_first_save(tmp_path, stage):
    """Head and embedding are taken for each other, after a good start: refused on all ranks, none saved."""
    case = {"stage": stage, "precision": "bf16", "dir": str(tmp_path), "steps": 4, "save_at": [2, 4]}
    for rank in run(2, [case | {"swap": ["embed_tokens.weight", "lm_head.weight"]}]):
        assert "found before the first save: rank 0: " in rank[0]["error"]
        assert "differ from the fp32 weights that the optimizer keeps for them" in rank[0]["error"]
        assert sorted(rank[0]["losses"]) == ["1", "2"]
    assert [p.name for p in tmp_path.rglob("step_*")] == []
