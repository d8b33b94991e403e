"""DeepSpeed's JSON: what is allowed, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_load import ROOT
from wm_ds.config.deepspeed_json import ALLOWED, REFUSED, RUN_DECIDES, STAGES, load_deepspeed
from wm_ds.config.schema import Config, ConfigError


def read(tmp_path: Path, content: Any) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_deepspeed(path)


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **keys}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"gradient_clipping": 1.0}, "optim.clip"),
        ({"train_batch_size": 8}, "batch.global_batch"),
        ({"bf16": {"enabled": True}}, "precision"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "set precision"),
        ({"optimizer": {"type": "Muon"}}, "set optim"),
        ({"prescale_gradients": True}, "prescale_gradients is not tested to keep a run exact"),
        ({"zero_allow_untested_optimizer": True}, "wm_ds sets it"),
        (zero(round_robin_gradients=True), "zero_optimization.round_robin_gradients is not tested to keep"),
        (zero(round_robin_gradients=False), "remove it"),
        (zero(round_robin_gradient=True), "did you mean zero_optimization.round_robin_gradients?"),
        (zero(zero_quantized_gradients=True), "zero_optimization.zero_quantized_gradients is not tested"),
        (
            zero(offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "zero_optimization.offload_optimizer.ratio",
        ),
        (zero(nonsense=1), "allowed here: allgather_bucket_size, "),
        (zero(stage=4), "zero_optimization.stage = 4 must be 0, 1, 2 or 3"),
        (zero(stage="2"), 'stage = "2" must be 0, 1, 2 or 3'),
        (zero(stage=True), "stage = true must be 0, 1, 2 or 3"),
        (zero(stage=2.0), "stage = 2.0 must be 0, 1, 2 or 3"),
        (zero(stage=[2]), "stage = [2] must be"),
        (zero(offload_param={"device": "cpu"}), "needs stage 3"),
        (zero(stage=0, offload_optimizer={"device": "cpu"}), "needs stage 1"),
        (zero(stage3_max_live_parameters="auto"), "stage3_max_live_parameters needs stage 3"),
        (zero(zero_hpz_partition_size=1), "zero_hpz_partition_size needs stage 3 and would do nothing at"),
        (zero(stage=1, sub_group_size=10), "sub_group_size needs stage 3 and would do nothing at stage 1"),
        (zero(stage=3, allgather_bucket_size=500), "needs stage 1 or 2 and would do nothing at stage 3"),
        (zero(stage=3, use_multi_rank_bucket_allreduce=True), "needs stage 1 or 2"),
        (zero(stage=0, overlap_comm=True), "overlap_comm needs stage 1, 2 or 3 and would do nothing"),
        ({"zero_optimization": {"reduce_bucket_size": 5e8}}, "reduce_bucket_size needs stage 1, 2 or 3"),
        (zero(allgather_partitions=True), "DeepSpeed reads it and does nothing with it); remove it"),
        (zero(reduce_scatter=False, use_multi_rank_bucket_allreduce=False), "with reduce_scatter = false"),
        (zero(offload_optimizer={"pin_memory": True}), 'offload_optimizer does nothing without "device"'),
        ({"comms_logger": {"prof_all": True}}, 'comms_logger does nothing without "enabled"'),
        (zero(allgather_bucket_size=501), "allgather_bucket_size = 501 must be even at stage 2"),
        (zero(stage=3, offload_param={"device": "nvme"}), 'device = "nvme" must be "cpu" or "none"'),
        (zero(offload_optimizer=[]), "zero_optimization.offload_optimizer must be an object"),
        (zero(offload_optimizer="cpu"), 'must be an object ({"key": value}), got a text: "cpu"'),
        (zero(overlap_comm="auto"), 'zero_optimization.overlap_comm = "auto" must be true or false'),
        (zero(overlap_comm=1), "overlap_comm = 1 must be true or false"),
        (zero(reduce_bucket_size="auto"), 'reduce_bucket_size = "auto" must be a whole number from 1 on'),
        (zero(reduce_bucket_size=0.5), "reduce_bucket_size = 0.5 must be a whole number from 1 on"),
        (zero(reduce_bucket_size=0), "from 1 on"),
        (zero(reduce_bucket_size=True), "reduce_bucket_size = true"),
        (zero(reduce_bucket_size=None), "reduce_bucket_size = null"),
        (zero(reduce_bucket_size=1e300), "reduce_bucket_size = 1e+300"),
        ('{"zero_optimization": {"reduce_bucket_size": NaN}}', "reduce_bucket_size = NaN"),
        ('{"zero_optimization": {"reduce_bucket_size": Infinity}}', "reduce_bucket_size = Infinity"),
        (zero(stage3_max_live_parameters=-1), 'a whole number from 0 on or "auto"'),
        ({"zero_optimization": [{"stage": 2}]}, "zero_optimization must be an object"),
        ({"zero_optimization": True}, "got true or false: true"),
        ({"zero_optimization": None}, "got null"),
        ({"comms_logger": {"enabled": "yes"}}, 'comms_logger.enabled = "yes" must be true or false'),
        ({"comms_logger": {"prof_ops": "all_reduce"}}, "must be a list of names"),
        ([], "must hold a JSON object, holds a list: []"),
        ("3", "holds a number: 3"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "key 'stage' appears twice"),
        ('{\n"zero_optimization": {"stage": 2},\n}', "not valid JSON at line 3"),
        ("[" * 100_000, "ds.json: "),
        ("", "not valid JSON at line 1"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line_that_names_it(tmp_path, content, said):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert said in message, message
    assert str(tmp_path / "ds.json") in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="binary: not a text file"):
        load_deepspeed(tmp_path / "binary")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_deepspeed(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_deepspeed("ds_configs/mine.json")
    assert f"deepspeed = ds_configs/mine.json: No such file or directory in {tmp_path}" in str(caught.value)
    assert "start in the repository's folder, or give an absolute path" in str(caught.value)


def test_the_default_is_found_from_any_folder_and_a_file_there_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Config.model_fields["deepspeed"].default
    assert load_deepspeed(name) == json.loads((ROOT / name).read_text())
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text('{"zero_optimization": {"stage": 1}}')
    assert load_deepspeed(name) == {"zero_optimization": {"stage": 1}}


def test_whole_numbers_may_be_written_as_powers_of_ten(tmp_path):
    found = read(tmp_path, '{"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}')
    assert found == {"zero_optimization": {"stage": 1, "reduce_bucket_size": 500_000_000}}
    assert type(found["zero_optimization"]["reduce_bucket_size"]) is int


def test_offload_to_nothing_is_allowed_at_any_stage(tmp_path):
    off = {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none", "pin_memory": True}}
    for stage in (0, 1, 2, 3):
        assert read(tmp_path, zero(stage=stage, **off)) == zero(stage=stage, **off)


def test_every_key_belongs_to_stages():
    assert set(STAGES) == set(ALLOWED["zero_optimization"])
    with_stage_3 = {key for key, stages in STAGES.items() if stages == (3,)}
    assert {key for key in STAGES if key.startswith("stage3_")} <= with_stage_3


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_files_are_allowed_and_unchanged(path):
    assert load_deepspeed(path) == json.loads(path.read_text())


def names(allowed: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for key, kind in allowed.items():
        found |= {f"{prefix}{key}"} | (names(kind, f"{prefix}{key}.") if isinstance(kind, dict) else set())
    return found


def test_every_key_of_deepspeed_s_is_known_here_and_no_other():
    """A new version's new key must be looked at; an allowed key that DeepSpeed does not read is a typo."""
    import deepspeed as package
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    ours = names(ALLOWED) | set(REFUSED)
    sections = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "comms_logger": CommsLoggerConfig,
    }
    for section, model in sections.items():
        theirs = {f"{section}.{field.alias or name}" for name, field in model.model_fields.items()}
        here = {k for k in ours if k.startswith(f"{section}.") and "." not in k[len(section) + 1 :]}
        assert here == theirs, section
    source = "\n".join(
        p.read_text(errors="replace")
        for p in Path(package.__file__).parent.rglob("*.py")
        if p.name in ("constants.py", "config.py", "engine.py", "__init__.py")
    )
    top = {k for k in ours | set(RUN_DECIDES) if "." not in k}
    assert [k for k in sorted(top) if f'"{k}"' not in source and f"'{k}'" not in source] == []
    assert not names(ALLOWED) & (set(REFUSED) | set(RUN_DECIDES))
