"""What cannot begin a run is refused by name, and nothing is written; what can is trained from."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import MixtralConfig

from tests.support import exported
from tests.upcycle.test_exact import LLAMA3, SIZES, make_config, make_folder
from tools import upcycle as tool
from wm_ds import trained
from wm_ds.checkpoint.format import read_tensor
from wm_ds.config.load import load
from wm_ds.export import export
from wm_ds.upcycle.dense import UpcycleError, model_section, open_dense
from wm_ds.upcycle.mapping import shares
from wm_ds.upcycle.run import upcycle

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    return exported.make_data(root / "packed", exported.make_tokenizer(root / "tokenizer"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("qwen3") / "dense", "qwen3")


def change(folder: Path, target: Path, **fields: object) -> Path:
    """A copy of the folder with other fields in its config.json."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_bias": True}, "attention_bias is true: the output projection has a bias"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "through a sliding window",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', blocks here have silu"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its weights are quantized"),
    ],
)
def test_what_no_block_here_is(qwen3, data, tmp_path, fields, words):
    with open_dense(qwen3) as plain:
        config = make_config(tmp_path, data, plain)
    folder = change(qwen3, tmp_path / "other", **fields)
    with open_dense(folder) as dense, pytest.raises(UpcycleError, match=words):
        upcycle(dense, config)
    assert not (tmp_path / "run").exists()


def test_experts_are_refused(tmp_path):
    MixtralConfig(**SIZES).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with open_dense(tmp_path) as dense, pytest.raises(UpcycleError, match="a mixture of experts"):
        model_section(dense.config)


def test_every_differing_field_is_named_with_both_values(qwen3, data, tmp_path):
    with open_dense(qwen3) as dense:
        config = make_config(tmp_path, data, dense, hidden_size=64, rope_theta=1e4, qkv_bias=True)
        with pytest.raises(UpcycleError) as raised:
            upcycle(dense, config)
    for words in ("hidden_size is 64 in the run and 32", "rope_theta is 10000.0 in the run and 500.0"):
        assert words in str(raised.value)
    assert "qkv_bias is True in the run and False there" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_kv_channels": 2, "routing": "softmax"}, "routing = softmax gives every layer"),
        ({"num_kv_channels": 4, "routing": "fixed"}, "reads other layers than --pool"),
        ({"vocab_size": 384}, "vocab_size is 384 in the run and 320 there"),
    ],
)
def test_runs_that_cannot_start_from_layers(qwen3, data, tmp_path, model, words):
    with open_dense(qwen3) as dense, pytest.raises(UpcycleError, match=words):
        upcycle(dense, make_config(tmp_path, data, dense, **model))
    assert not (tmp_path / "run").exists()


def test_missing_and_unknown_tensors(qwen3, data, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = change(qwen3, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with open_dense(folder) as dense:
        config = make_config(tmp_path, data, dense)
        with pytest.raises(UpcycleError, match=r"layers.1.self_attn.k_proj.weight is absent there"):
            upcycle(dense, config)
    tensors |= {"model.layers.1.self_attn.k_proj.weight": lost, "model.extra.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with (
        open_dense(folder) as dense,
        pytest.raises(UpcycleError, match=r"has model.extra.weight \(1 tensors\)"),
    ):
        upcycle(dense, config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UpcycleError, match=r"has no model.safetensors"):
        open_dense(folder)
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer(qwen3, data, tmp_path):
    folder = change(qwen3, tmp_path / "other")
    exported.make_tokenizer(folder)
    with open_dense(folder) as dense:  # the data's own: taken
        upcycle(dense, make_config(tmp_path, data, dense))
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"!"', '"\\u4e2d"'))
    (tmp_path / "second").mkdir()
    with open_dense(folder) as dense, pytest.raises(UpcycleError, match="not packed with the tokenizer"):
        upcycle(dense, make_config(tmp_path / "second", data, dense))


def test_groups():
    assert shares([1, 3, 5], "nearest") == {3: 1.0}
    assert shares([1, 3], "nearest") == {3: 1.0}  # of two, the upper one
    assert shares([0, 4, 8], "top") == {8: 1.0}
    assert shares([0, 4], "mean") == {0: 0.5, 4: 0.5}


def test_fewer_channels_are_means_or_single_layers(qwen3, data, tmp_path):
    for choice, layers in (("mean", (0, 2)), ("top", (2,))):
        (tmp_path / choice).mkdir()
        with open_dense(qwen3) as dense:
            path = upcycle(dense, make_config(tmp_path / choice, data, dense, num_kv_channels=2), choice)
            read = [dense.read(f"model.layers.{layer}.self_attn.v_proj.weight") for layer in layers]
        expected = sum(read) / len(read)
        torch.testing.assert_close(read_tensor(path, "model.pool.value.proj")[0], expected)
        pattern = read_tensor(path, "model.pool.key.router_bias").view(2, 4)
        assert pattern[0].tolist() == [1 / len(layers) if layer in layers else 0.0 for layer in range(4)]
        assert read_tensor(path, "model.pool.key.router_weight").count_nonzero() == 0


def test_a_sandwich_keeps_its_own_layers_and_shares_the_rest(qwen3, data, tmp_path):
    with open_dense(qwen3) as dense:
        config = make_config(tmp_path, data, dense, family="lckv", warmup_layers=2)
        path = upcycle(dense, config, "mean")
        keys = [dense.read(f"model.layers.{layer}.self_attn.k_proj.weight") for layer in range(4)]
    for layer, expected in ((0, keys[0]), (3, keys[3]), (2, (keys[1] + keys[2]) / 2)):
        torch.testing.assert_close(
            read_tensor(path, f"model.layers.{layer}.self_attn.k_proj.weight"), expected
        )


def test_a_llama_run_goes_back_to_llama(data, tmp_path):
    """Vanilla again: the exported folder is transformers' own, without code, and the folder it came from."""
    folder = make_folder(tmp_path / "dense", "llama")
    with open_dense(folder) as dense:
        upcycle(dense, make_config(tmp_path, data, dense, family="vanilla"))
    out = export.export(
        trained.find(tmp_path / "run"), tmp_path / "out", dtype=torch.float32, max_shard_size=10**9
    )
    entry = json.loads((out / "config.json").read_text())
    assert entry["model_type"] == "llama"
    assert entry["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in entry
    assert entry["rope_parameters"] == LLAMA3
    assert json.loads((out / "export.json").read_text())["upcycled"]["from"] == str(folder)
    with open_dense(folder) as before, open_dense(out) as after:
        assert before.shapes == after.shapes
        for name in before.shapes:
            assert torch.equal(before.read(name), after.read(name)), name


def test_the_command_line(qwen3, tmp_path, data, capsys):
    assert tool.main([str(qwen3), "--print-model"]) == 0
    section = yaml.safe_load(capsys.readouterr().out)["model"]
    assert section["head_dim"] == 12
    assert section["qk_norm"] is True
    with open_dense(qwen3) as dense:
        make_config(tmp_path, data, dense)
    assert tool.main([str(qwen3), str(tmp_path / "run.yaml")]) == 0
    assert "step_00000000" in capsys.readouterr().out
    assert tool.main([str(qwen3), str(tmp_path / "run.yaml")]) == 1
    assert "has checkpoints already" in capsys.readouterr().err


def test_the_recipe_is_the_published_configuration():
    """Every shape of Qwen3-0.6B, from its published config.json, without a download."""
    published = Path(__file__).parents[1] / "fixtures" / "qwen3_0.6b"
    from transformers import AutoConfig

    wanted = model_section(AutoConfig.from_pretrained(published))
    recipe = load(ROOT / "configs" / "recipes" / "upcycle_qwen3_0.6b.yaml").model
    assert {name: getattr(recipe, name) for name in wanted} == wanted
