"""The run's configuration: parsing, overrides, refusals, durations, DeepSpeed's JSON."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from wm_ds import config as configuration
from wm_ds.config import Batch, ConfigError

ROOT = Path(__file__).parent.parent

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
    raw = copy.deepcopy(BASE)
    for key, value in changes.items():
        *path, last = key.split("__")
        at = raw
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return raw


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
        ("log__xyz", "known here: details_every, every, tensorboard, wandb"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(key, said):
    assert said in refusal(changed(**{key: 1}))


def test_unknown_key_of_a_source_in_a_list():
    raw = changed(data__train=[{"path": "a", "wieght": 1.0}])
    assert "did you mean data.train" in refusal(raw)
    assert "weight" in refusal(raw)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp16"}, ("precision = fp16", "optim.name = muon", "autocast or bf16")),
        ({"precision": "fp16", "optim__name": "adamw"}, ("precision = fp16", "loss scale")),
        ({"tokens": 5}, ("steps = 100", "tokens = 5")),
        ({"steps": None}, ("steps = None", "tokens = None")),
        ({"model__family": "vanilla", "model__num_groups": 4}, ("model.num_groups = 4", "vanilla")),
        ({"model__family": "vanilla", "recompute": "group"}, ("recompute = group", "vanilla")),
        ({"model__num_kv_channels": 5}, ("num_kv_channels = 5", "num_hidden_layers = 4")),
        ({"model__num_key_value_heads": 3}, ("num_attention_heads = 4", "num_key_value_heads = 3")),
        ({"checkpoint__every": 100, "checkpoint__keep_every": 150}, ("keep_every = 150", "every = 100")),
        ({"optim__lr": "fast"}, ("optim.lr", "fast")),
        ({"batch__global_batch": 0}, ("batch.global_batch", "0")),
        ({"model__hidden_size": 1.5}, ("model.hidden_size", "1.5")),
        ({"run__deterministic": "yes"}, ("run.deterministic", "yes")),
        ({"optim": 5}, ("optim must be a section",)),
    ],
)
def test_contradictions_and_wrong_values_name_both_sides(changes, said):
    message = refusal(changed(**changes))
    assert all(part in message for part in said), message


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


def test_accumulation_keeps_the_global_batch():
    assert [Batch(global_batch=128, micro_batch=4).accumulation(r) for r in (1, 4, 8, 32)] == [32, 8, 4, 1]


def test_indivisible_global_batch_lists_choices_that_work():
    with pytest.raises(ConfigError) as caught:
        Batch(global_batch=128, micro_batch=4).accumulation(6)
    message = str(caught.value)
    assert "global_batch 128 does not divide over 6 ranks x micro_batch 4" in message
    assert "2, 4, 8 ranks" in message
    assert "global_batch 120 or 144" in message
    with pytest.raises(ConfigError, match=r"micro_batch in \{1, 2, 4\}"):
        Batch(global_batch=24, micro_batch=3).accumulation(6)
    for micro in (1, 2, 4):
        Batch(global_batch=24, micro_batch=micro).accumulation(6)


# The paper's 2% of 30,518 steps is 610.36: 610 steps.
@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (200, 200),
        ("2%", 610),
        ("0.5%", 153),
        (0, 0),
        ("262144 tokens", 1),
        ("1.5M tokens", 6),
        ("1e9 tokens", 3815),
    ],
)
def test_durations_become_whole_steps(duration, steps):
    assert configuration.to_steps("optim.warmup", duration, 30518, 128 * 2048) == steps


@pytest.mark.parametrize("duration", ["2", "x%", "5 M", "200%", -1, 40000])
def test_durations_that_make_no_sense_are_refused(duration):
    with pytest.raises(ConfigError, match=r"optim\.warmup"):
        configuration.to_steps("optim.warmup", duration, 30518, 128 * 2048)


def test_a_run_in_tokens_is_rounded_up_to_whole_steps():
    config = configuration.parse(changed(steps=None, tokens="8e9", batch__global_batch=128))
    assert config.total_steps(2048) == 30518  # 8e9 / (128 * 2048) = 30517.6


def test_data_that_does_not_fit():
    config = configuration.parse(changed(model__vocab_size=100))
    configuration.check_against_data(config, vocab_size=100, seq_len=16, sequences=5)
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size = 100 is smaller than the data's tokenizer \(101"
    ):
        configuration.check_against_data(config, vocab_size=101, seq_len=16, sequences=5)


def deepspeed(tmp_path: Path, content: dict) -> dict:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return configuration.load_deepspeed(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"gradient_clipping": 1.0}, "optim.clip"),
        ({"train_batch_size": 8}, "batch.global_batch"),
        ({"bf16": {"enabled": True}}, "precision"),
        ({"optimizer": {"type": "Muon"}}, "set optim"),
        ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "use cpu or none"),
    ],
)
def test_deepspeed_keys_are_checked(tmp_path, content, said):
    with pytest.raises(ConfigError) as caught:
        deepspeed(tmp_path, content)
    assert said in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_deepspeed_files_are_valid(path):
    assert "zero_optimization" in configuration.load_deepspeed(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_runs_are_valid(path):
    config = configuration.load(path)
    assert (ROOT / config.deepspeed).is_file()


def test_known_deepspeed_keys_are_those_that_deepspeed_reads():
    """An allowed key that DeepSpeed does not read would be the silent typo again."""
    import deepspeed as package

    source = "\n".join(
        p.read_text(errors="replace")
        for p in Path(package.__file__).parent.rglob("*.py")
        if p.name in ("constants.py", "config.py", "engine.py", "__init__.py")
    )
    unknown = [
        key for key in configuration.DEEPSPEED_KEYS if f'"{key}"' not in source and f"'{key}'" not in source
    ]
    assert unknown == []
