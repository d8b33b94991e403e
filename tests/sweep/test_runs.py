"""What a sweep's file becomes, and what is refused before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.sweep.conftest import BASE, POOL
from tools import sweep as tool
from wm_ds.config import load as configuration
from wm_ds.sweep import collect, work
from wm_ds.sweep.description import SweepError, load
from wm_ds.sweep.runs import Code, code_version, runs_of

ROOT = Path(__file__).parents[2]
DEEP = {"model.num_hidden_layers": 3}


def runs(path: Path):
    return runs_of(load(path), path)


def refusal(path: Path, *options: str, capsys) -> str:
    """The one line of a sweep that is refused; nothing was made."""
    before = sorted(path.parent.rglob("*"))
    assert tool.main([str(path), "--plan", *options]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert sorted(path.parent.rglob("*")) == before
    return lines[0]


def test_arms_change_the_base_and_seeds_come_one_after_another(write):
    path = write(
        seeds=[0, 1],
        arms={
            "vanilla": {},
            "deep": {"set": {"model.num_hidden_layers": 3}, "seeds": [1]},
            "pool": {"set": POOL},
        },
    )
    found = runs(path)
    assert [(run.arm, run.seed) for run in found] == [
        ("vanilla", 0), ("pool", 0), ("vanilla", 1), ("deep", 1), ("pool", 1)
    ]  # fmt: skip
    vanilla, pool = found[:2]
    assert (vanilla.config.model.family, vanilla.config.model.num_hidden_layers) == ("vanilla", 2)
    assert (pool.config.model.family, pool.config.model.num_groups) == ("whitematter", 2)
    assert [run.config.run.seed for run in found] == [run.seed for run in found]
    assert len({run.folder for run in found}) == len(found)
    # Seeds of an arm share its digest, which the folder's name begins with.
    assert vanilla.digest == found[2].digest
    assert vanilla.folder.name == f"{vanilla.digest[:12]}-s0"
    assert vanilla.tokens == 4 * 4 * 24


def test_a_run_is_known_by_what_trains_it_and_not_by_how_often_it_is_looked_at(write):
    def digest(**base):
        return runs(write(base=base))[0].digest

    plain = digest()
    assert digest(checkpoint={"every": 1}, log={"every": 3}, evaluate={"every": 1}) == plain
    assert digest(optim=BASE["optim"] | {"lr": 2e-2}) != plain
    assert digest(steps=5) != plain


def test_other_rows_make_another_run(write, tmp_path, toy_data):
    first = runs(write())[0].digest
    manifest = toy_data / "manifest.json"
    copy = tmp_path / "copy"
    copy.mkdir()
    for item in toy_data.iterdir():
        (copy / item.name).symlink_to(item)
    assert runs(write(base={"data": {"train": str(copy)}}))[0].digest == first
    (copy / "manifest.json").unlink()
    changed = json.loads(manifest.read_text()) | {"shuffle_seed": 99}
    (copy / "manifest.json").write_text(json.dumps(changed))
    assert runs(write(base={"data": {"train": str(copy)}}))[0].digest != first


def test_equal_flops_gives_as_many_steps_as_the_other_arm_has_work(write):
    arms = {"equal": {"equal_flops_to": "pool"}, "pool": {"set": POOL}, "vanilla": {}}
    found = {run.arm: run for run in runs(write(base={"steps": 100}, arms=arms))}
    pool, vanilla, equal = (found[name] for name in ("pool", "vanilla", "equal"))
    assert pool.steps == vanilla.steps == 100
    assert equal.steps == round(100 * pool.flops / vanilla.flops) > 120
    assert equal.flops == pytest.approx(pool.flops, rel=0.5 / 100)
    assert equal.config.steps == equal.steps


def test_a_length_in_tokens_replaces_one_in_steps(write):
    found = runs(write(arms={"a": {}, "b": {"set": {"tokens": 960}}}))
    assert [run.steps for run in found] == [4, 10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arms": {"a": {"set": {"model.hidden_sise": 8}}}}, ["arm a", "model.hidden_sise", "did you mean"]),
        ({"arms": {"a": {"seet": {}}}}, ["arms.a.seet", "did you mean arms.a.set"]),
        ({"arms": {"a": {}, "b": {"set": {"steps": 4}}}}, ["arms a and b are the same run"]),
        ({"seeds": []}, ["seeds", "at least 1 item"]),
        ({"arms": {"a": {"seeds": []}}}, ["arm a has no seed"]),
        ({"arms": {"a": {"seeds": [1, 1]}}}, ["arm a names a seed twice"]),
        ({"arms": {"a": {"set": {"run.seed": 3}}}}, ["arm a sets run.seed", "use seeds"]),
        ({"arms": {"a": {"equal_flops_to": "z"}}}, ["arm a", "'z'", "no other arm"]),
        ({"arms": {"a": {"set": {"steps": {"x": 1}}}}}, ["arm a", "steps"]),
        ({"arms": {"a": {"set": {"steps.x": 1}}}}, ["arm a", "steps", "no section"]),
        ({"arms": {"a": {"set": {"model.num_kv_channels": 1}}}}, ["arm a", "belongs to family whitematter"]),
        ({"arms": {"a": {"set": POOL | {"model.router_init": "nonsense"}}}}, ["arm a", "router_init"]),
        ({"arms": {"a": {"set": {"data.train": "nowhere"}}}}, ["nowhere"]),
        ({"base": "nowhere.yaml"}, ["nowhere.yaml", "No such file"]),
        ({"measure": {"sequences": 0}}, ["measure.sequences"]),
    ],
)
def test_bad_sweeps_are_refused_in_one_line(write, capsys, changes, words):
    line = refusal(write(**changes), capsys=capsys)
    assert all(word in line for word in words), line


def test_an_equal_arm_has_no_length_of_its_own_and_no_chain(write, capsys):
    arms = {"a": {}, "b": {"equal_flops_to": "a", "set": {"steps": 3}}}
    assert "leave one of them out" in refusal(write(arms=arms), capsys=capsys)
    arms = {"a": {"set": POOL}, "b": {"equal_flops_to": "a"}, "c": {"equal_flops_to": "b"}}
    assert "depends on an arm" in refusal(write(arms=arms), capsys=capsys)


def test_no_sweep_and_no_file(tmp_path, capsys):
    assert tool.main([]) == 1
    assert "no sweep given" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml: No such file" in capsys.readouterr().err


def test_quick_takes_its_arms_steps_and_results_of_its_own(write, capsys):
    path = write(quick={"arms": ["pool"], "set": {"steps": 1}, "seeds": [7]})
    sweep = load(path, quick=True)
    (run,) = runs_of(sweep, path)
    assert (run.arm, run.seed, run.steps) == ("pool", 7, 1)
    assert sweep.results != load(path).results
    assert "quick names arm 'z'" in refusal(write(quick={"arms": ["z"]}), "--quick", capsys=capsys)
    assert "no section `quick`" in refusal(write(), "--quick", capsys=capsys)


def finished_entry(run, sweep) -> dict:
    """An entry of results as if `run` had been trained."""
    return {
        "seed": run.seed,
        "digest": run.digest,
        "code": code_version().digest,
        "commit": None,
        "lr": 0.01,
        "steps": run.steps,
        "tokens": run.tokens,
        "training_flops": run.flops,
        "training": {"wall_s": 2.0, "cpu_s": 3.0},
        "attempts": 1,
        "measured": {
            "settings": sweep.measure.model_dump(),
            "model": {"cache_bytes_per_token": 32.0, "parameters_without_embeddings": 1000},
            "perplexity": {"perplexity": 10.0 + run.seed},
            "passes": {"as_trained": 10.0, "perplexities": []},
            "starts": {"curves": []},
            "exact": {"perplexity": 10.0, "seconds_per_row": None},
            "converge": {"exact": None, "groups": []},
        },
    }


def with_results(path: Path, code: str | None = None) -> dict:
    """Results as if all runs of the sweep had been trained, somewhere else."""
    sweep = load(path)
    found = runs_of(sweep, path)
    entries = [finished_entry(run, sweep) | ({"code": code} if code else {}) for run in found]
    arms = {name: {"runs": [e for e, run in zip(entries, found) if run.arm == name]} for name in sweep.arms}
    report = collect.collect(sweep, path, found, {"arms": arms})
    return report


def test_what_stands_in_the_results_is_not_run_again(write, capsys):
    path = write(seeds=[0, 1])
    with_results(path)
    assert tool.main([str(path), "--plan"]) == 0
    assert capsys.readouterr().out.count("done (in the results)") == 4
    # An arm that is added later is the only one that is left.
    write(
        seeds=[0, 1],
        arms={"vanilla": {}, "pool": {"set": POOL}, "deep": {"set": {"model.num_hidden_layers": 3}}},
    )
    assert tool.main([str(path), "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("to be trained")] == ["deep", "deep"]


def test_results_of_another_base_are_kept_unless_they_are_to_be_replaced(write, capsys):
    path = write()
    with_results(path)
    write(base={"optim": BASE["optim"] | {"lr": 0.5}})
    line = refusal(path, capsys=capsys)
    assert "another base configuration: optim.lr is 0.01 there and 0.5" in line
    assert tool.main([str(path), "--plan", "--replace"]) == 0
    # A key that every arm sets itself makes no other base.
    arms = {"a": {"set": {"optim.lr": 0.1}}, "b": {"set": {"optim.lr": 0.2}}}
    with_results(write(arms=arms, results=str(path.parent / "rates.json")))
    write(arms=arms, results=str(path.parent / "rates.json"), base={"optim": BASE["optim"] | {"lr": 0.5}})
    assert tool.main([str(path), "--plan"]) == 0


def test_where_and_how_often_makes_no_other_base(write):
    path = write()
    with_results(path)
    write(base={"log": {"every": 7}, "run": {"dir": "elsewhere"}})
    assert tool.main([str(path), "--plan"]) == 0


def test_results_of_another_code_version_are_named(write, capsys):
    path = write()
    with_results(path, code="0123456789ab")
    line = refusal(path, capsys=capsys)
    assert "2 of 2 runs (vanilla seed 0, …) were trained by code version 0123456789ab" in line
    assert "--accept-code" in line
    assert tool.main([str(path), "--plan", "--accept-code"]) == 0


def test_a_trained_run_of_another_code_version_is_named_too(write, capsys):
    path = write()
    run = runs(path)[0]
    work.write_files(run, Code("fedcba987654", "c0ffee"))
    assert "fedcba987654 (commit c0ffee)" in refusal(path, capsys=capsys)


def test_a_file_that_is_no_result_is_kept(write, tmp_path, capsys):
    path = write()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "toy.json").write_text("[1]")
    assert "holds no results of a sweep" in refusal(path, capsys=capsys)


def test_the_summary_is_mean_and_sample_deviation(write):
    report = with_results(write(seeds=[0, 1, 4]))
    found = report["arms"]["vanilla"]["summary"]
    mean = (10 + 11 + 14) / 3
    assert found["perplexity"]["mean"] == pytest.approx(mean)
    deviation = (((10 - mean) ** 2 + (11 - mean) ** 2 + (14 - mean) ** 2) / 2) ** 0.5
    assert found["perplexity"]["deviation"] == pytest.approx(deviation)
    assert found["perplexity"]["n"] == 3
    assert found["cpu_s"] == {"mean": 3.0, "deviation": 0.0, "n": 3}
    one = with_results(write())["arms"]["vanilla"]["summary"]
    assert one["perplexity"] == {"mean": 10.0, "deviation": None, "n": 1}
    assert one["exact_s"] == {"mean": None, "deviation": None, "n": 0}


def test_two_sweeps_at_once_in_one_folder(tmp_path):
    folder, again = tmp_path / "runs", pytest.raises(SweepError, match=f"process {os.getpid()}")
    with work.alone_in(folder), again, work.alone_in(folder):
        pass
    with work.alone_in(folder):
        pass


def test_sweeps_that_share_a_run_measure_it_alike(write, tmp_path, capsys):
    other = write(results=str(tmp_path / "other.json"), measure={"sequences": 2})
    other.rename(tmp_path / "other.yaml")
    path = write()
    assert tool.main([str(path), str(tmp_path / "other.yaml"), "--jobs", "0"]) == 1
    assert "measures otherwise" in capsys.readouterr().err


# The repository's own sweeps.

SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
SWEEPS = [path for path in SWEEPS if "base" not in path.stem]


def composed(path: Path, quick: bool = False):
    """Every arm's run, without data: the arms' lengths by FLOPs need it, and are left out."""
    sweep = load(path, quick)
    raw = configuration.read(ROOT / sweep.base, "a run")
    from wm_ds.sweep.runs import _changed, _parse

    return sweep, {name: _parse(_changed(raw, arm.set, name), name) for name, arm in sweep.arms.items()}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_are_runs_and_have_quick_parts(path):
    sweep, arms = composed(path)
    own_length = [name for name in arms if not sweep.arms[name].equal_flops_to]
    different = {(arms[name].model_dump_json(), sweep.arms[name].upcycle_from) for name in own_length}
    assert len(different) == len(own_length)
    assert composed(path, quick=True)[1]
    assert sweep.results == f"docs/results/{path.stem}.json"
    assert (ROOT / sweep.base).parent == path.parent


# What size asks for: how large the model and its data are, and what fits a device.
SIZE = {"num_hidden_layers", "num_kv_channels", "warmup_layers", "layers_per_kv", "own_kv_layers", "lr"}
BASE_SIZE = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *(
        "head_dim",
        "rope_theta",
        "train",
        "global_batch",
        "micro_batch",
        "lr",
        "precision",
        "recompute",
        "steps",
    ),
    *("dir", "every", "num_kv_channels", "sequences", "compile"),
}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_full_size_twins_differ_in_size_only(path):
    small, arms = composed(path)
    full, full_arms = composed(path.parent / "full" / path.name)
    assert list(arms) == list(full_arms)
    for name, arm in small.arms.items():
        twin = full.arms[name]
        assert (arm.label is None) == (twin.label is None)
        assert arm.equal_flops_to == twin.equal_flops_to
        own, other = ({k: v for k, v in a.set.items() if k != "recompute"} for a in (arm, twin))
        if small.title == "Learning rates":
            assert own.pop("optim.lr") == pytest.approx(10 * other.pop("optim.lr"))
        own.pop("optim.lr", None)  # the paper has one learning rate for all
        assert own.keys() == other.keys(), name
        assert {k for k in own if own[k] != other[k]} <= {
            "steps",
            "data.skip",
            *(f"model.{key}" for key in SIZE),
        }, name
        assert (arm.upcycle_from, arm.upcycle_pool) == (twin.upcycle_from, twin.upcycle_pool)
    bases = [configuration.load(ROOT / sweep.base).model_dump() for sweep in (small, full)]
    differing = {
        key.rpartition(".")[2] for key, value in flat(bases[0]).items() if flat(bases[1])[key] != value
    }
    assert differing <= BASE_SIZE
    assert bases[1]["model"]["hidden_size"] == 512


def flat(said: dict, before: str = "") -> dict:
    found: dict = {}
    for key, value in said.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def test_the_full_size_arms_are_the_papers_runs():
    """The same models and recipes as the recipes of configs/, which are pinned against the paper."""
    _, main = composed(ROOT / "configs/sweeps/full/main.yaml")
    _, channels = composed(ROOT / "configs/sweeps/full/channels.yaml")
    _, exact = composed(ROOT / "configs/sweeps/full/exact.yaml")
    names = {
        "vanilla_L": "paper_vanilla_16l",
        "vanilla_1.5L": "paper_vanilla_24l",
        "vanilla_2L": "paper_vanilla_32l",
    }
    names |= {"wm_full": "paper_wm_k16", "wm_half": "paper_wm_k8", "lckv_half": "paper_lckv_w7"}
    names |= {"lckv_small": "paper_lckv_w4"}
    pairs = [(main[arm], name) for arm, name in names.items()]
    for arm, name in {
        **{
            "k_1": "sweep_k1",
            "k_L/4": "sweep_k4",
            "k_L/2": "sweep_k8",
            "k_3L/4": "sweep_k12",
            "k_L": "sweep_k16",
        },
        **{"vanilla_L": "sweep_vanilla", "no_feedback": "ablation_no_feedback"},
        **{"static_1": "ablation_static_k1", "static_L": "ablation_static_k16"},
    }.items():
        pairs.append((channels[arm], name))
    for config, name in pairs:
        recipe = configuration.load(ROOT / "configs" / f"{name}.yaml")
        assert model_of(config) == model_of(recipe), name
        assert (config.optim, config.batch, config.steps) == (recipe.optim, recipe.batch, recipe.steps), name
        assert (config.precision, config.data) == (recipe.precision, recipe.data), name
    recipe = configuration.load(ROOT / "configs" / "paper_exact_4l.yaml")
    assert (exact["exact"].optim, exact["exact"].batch, exact["exact"].steps) == (
        recipe.optim, recipe.batch, recipe.steps
    )  # fmt: skip


def model_of(config) -> dict:
    """The model's fields, defaults of its family filled in."""
    from wm_ds.families import model_config

    return model_config(config.model, vocab_size=100, seq_len=2048, eos_id=0).to_dict()
