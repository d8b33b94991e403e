"""The run's configuration: parsing, overrides, refusals."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from tests.support.settings import with_changes
from wm_ds.config import load as configuration
from wm_ds.config.schema import ConfigError

ROOT = Path(__file__).parents[2]

BASE = {
    "run": {"dir": "runs/x"},
    "model": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "data": {"train": "data/x"},
    "batch": {"global_batch": 16, "micro_batch": 4},
    "optim": {"lr": 3e-4},
    "steps": 100,
}


def changed(**changes: object) -> dict:
    return with_changes(BASE, **changes)


def refusal(raw: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        configuration.parse(raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_resolved_run_reads_back_equal(tmp_path):
    config = configuration.parse(changed(optim__betas=[0.8, 0.9], data__train=[{"path": "a", "weight": 2}]))
    assert configuration.load(write(tmp_path, configuration.dump(config))) == config


def test_overrides_reach_nested_fields_with_their_types(tmp_path):
    path = write(tmp_path, yaml.safe_dump(BASE))
    config = configuration.load(
        path,
        [
            "optim.lr=1e-3",
            "run.deterministic=true",
            "checkpoint.every=null",
            "data.train=[{path: a}]",
            "optim.warmup=5%",
        ],
    )
    assert (config.optim.lr, config.run.deterministic, config.checkpoint.every) == (1e-3, True, None)
    assert (config.data.sources()[0].path, config.optim.warmup) == ("a", "5%")


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    path = write(tmp_path, yaml.safe_dump(BASE).replace("0.0003", "3e-4"))
    assert "3e-4" in path.read_text()
    assert configuration.load(path).optim.lr == 3e-4


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("optim__lrr", "unknown key optim.lrr; did you mean optim.lr?"),
        ("run__determinstic", "did you mean run.deterministic?"),
        ("check_point", "did you mean checkpoint?"),
        ("evaluate__evry", "did you mean evaluate.every?"),
        ("model__num_kv_chanels", "did you mean model.num_kv_channels?"),
        ("log__xyz", "known here: details_every, every, mlflow, samples, tensorboard, wandb"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(key, said):
    assert said in refusal(changed(**{key: 1}))


def test_unknown_key_of_a_source_in_a_list():
    raw = changed(data__train=[{"path": "a", "wieght": 1.0}])
    assert "did you mean data.train" in refusal(raw)
    assert "weight" in refusal(raw)


def test_a_missing_field_is_named():
    raw = copy.deepcopy(BASE)
    del raw["optim"]["lr"]
    assert "optim.lr is required" in refusal(raw)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 1\nsteps: 2\n", "line 2: key 'steps' appears twice"),
        ("run: [1\n", "not valid YAML"),
        ("- 1\n", "must hold sections"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        configuration.load(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        configuration.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("override", ["steps", "=3", "steps.x=3"])
def test_bad_overrides_are_refused(tmp_path, override):
    with pytest.raises(ConfigError):
        configuration.load(write(tmp_path, yaml.safe_dump(BASE)), [override])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_runs_are_valid(path):
    config = configuration.load(path)
    assert (ROOT / config.deepspeed).is_file()


@pytest.mark.parametrize(
    "path", ["/a: b", "/a #b", "[x]", "{y}", "-", "a,b=c;d", "%j", "12", "on", "1e3", "~/x", "ü 'q'"]
)
@pytest.mark.parametrize("key", ["run.dir", "data.train", "data.holdout", "checkpoint.resume", "deepspeed"])
def test_a_path_on_the_command_line_is_taken_as_it_stands(tmp_path, monkeypatch, key, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    if path[0] in "[-":  # data.train may be a list, too; what exists is a path
        (tmp_path / path).mkdir()
    at = configuration.load("run.yaml", [f"{key}={path}"]).model_dump()
    for name in key.split("."):
        at = at[name]
    assert at == path


def test_lists_nothing_and_quoted_text_on_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))

    def load(*overrides):
        return configuration.load(tmp_path / "run.yaml", list(overrides))

    two = load("data.train=[{path: a}, {path: b, weight: 2.0}]").data.sources()
    assert [(source.path, source.weight) for source in two] == [("a", 1.0), ("b", 2.0)]
    assert load("data.holdout=null").data.holdout is None
    assert load("run.dir='a: b'").run.dir == "a: b"
    assert load("optim.warmup=50").optim.warmup == 50
    assert load("optim.warmup=3%").optim.warmup == "3%"
