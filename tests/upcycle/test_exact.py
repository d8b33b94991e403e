"""The mapping, proven: the run is the dense model in which a token sees the dummy instead of itself."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support import exported
from wm_ds import trained
from wm_ds.config.load import load
from wm_ds.families import model_class
from wm_ds.model.schedule import Schedule
from wm_ds.upcycle.dense import open_dense
from wm_ds.upcycle.run import upcycle

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden / heads
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
DENSE = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, PLAIN),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, LINEAR),
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA3),
    "mistral": (MistralConfig, MistralForCausalLM, PLAIN),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Packed data of 64 tokens a row."""
    root = tmp_path_factory.mktemp("data")
    return exported.make_data(root / "packed", exported.make_tokenizer(root / "tokenizer"))


def make_folder(folder: Path, kind: str, eps: float = 1e-6, **more: object) -> Path:
    """A dense model with random weights, also norms and biases; states are of size one."""
    config_class, causal_lm, rope = DENSE[kind]
    off = {"sliding_window": None} if kind == "mistral" else {}
    config = config_class(**{**SIZES, **off, "rms_norm_eps": eps, "rope_parameters": dict(rope), **more})
    model = causal_lm(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1.0 if "embed" in name else 0.3
            parameter.copy_(scale * noise + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return folder


def make_config(root: Path, data: Path, dense, **model: object):
    from wm_ds.upcycle.dense import model_section

    section = {k: v for k, v in model_section(dense.config).items() if v is not None}
    settings = {
        "run": {"dir": str(root / "run")},
        "model": section | model,
        "data": {"train": str(data)},
        "batch": {"global_batch": 8, "micro_batch": 2},
        "optim": {"lr": 1e-3},
        "steps": 10,
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load(path)


def upcycled(root: Path, data: Path, folder: Path, choice: str = "mean", **model: object):
    with open_dense(folder) as dense:
        upcycle(dense, make_config(root, data, dense, **model), choice)
    return trained.find(root / "run")


def load_wide(source, dtype: torch.dtype):
    """The run's model in float32, or the same numbers in float64."""
    return source.load(torch.float32).to(dtype)


def without_itself(module, query, key, value, attention_mask, scaling, **_):
    """Attention to earlier tokens and to a key and a value of zeros in front of all."""
    groups = query.shape[1] // key.shape[1]
    key, value = (torch.cat((x[:, :, :1] * 0, x), dim=2) for x in (key, value))
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    length = query.shape[2]
    seen = torch.ones(length, length + 1, dtype=torch.bool).tril()  # slot j + 1 is token j
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("without_itself", without_itself)


def dense_logits(folder: Path, tokens, dtype, monkeypatch, attention: str = "without_itself"):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(dtype).eval()
    model.set_attn_implementation(attention)
    if dtype == torch.float64:  # transformers computes norms and rotary tables in float32
        rotary = model.model.rotary_emb
        base, dim = rotary.config.rope_parameters["rope_theta"], SIZES["head_dim"]
        frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=dtype) / dim)
        angle = (torch.arange(tokens.shape[1], dtype=dtype)[:, None] * frequency).repeat(1, 2)[None]
        monkeypatch.setattr(rotary, "forward", lambda x, position_ids: (angle.cos(), angle.sin()))
        norm = type(model.model.norm)

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

        monkeypatch.setattr(norm, "forward", forward)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("kind", DENSE)
def test_channels_are_the_layers_own_keys_and_values(tmp_path, data, monkeypatch, kind):
    """k = L in float32, at the fixed point: what the dense model computes, without a token's own KV."""
    folder = make_folder(tmp_path / "dense", kind, tie_word_embeddings=kind == "qwen2")
    source = upcycled(tmp_path, data, folder, num_kv_channels=4)
    tokens = exported.random_rows(2, 23, 320)
    expected = dense_logits(folder, tokens, torch.float32, monkeypatch)
    with torch.no_grad():
        found = load_wide(source, torch.float32)(tokens, schedule=Schedule.exact()).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_in_float64_the_mapping_is_exact(tmp_path, data, monkeypatch):
    """Tenfold digits; with an epsilon that does not count, which the pool's second norm has otherwise."""
    folder = make_folder(tmp_path / "dense", "qwen3", eps=1e-14)
    tokens = exported.random_rows(2, 23, 320)
    expected = dense_logits(folder, tokens, torch.float64, monkeypatch)
    source = upcycled(tmp_path, data, folder, num_kv_channels=4)
    with torch.no_grad():
        found = load_wide(source, torch.float64)(tokens, schedule=Schedule.exact()).logits
        converged = load_wide(source, torch.float64)(tokens, prefill="cyclic", prefill_passes=23).logits
    assert (found - expected).abs().max() < 1e-10
    assert (converged - expected).abs().max() < 1e-10


@pytest.mark.parametrize("kind", DENSE)
def test_without_feedback_it_is_the_dense_model_itself(tmp_path, data, monkeypatch, kind):
    folder = make_folder(tmp_path / "dense", kind)
    source = upcycled(tmp_path, data, folder, num_kv_channels=4, feedback=False)
    tokens = exported.random_rows(2, 23, 320)
    expected = dense_logits(folder, tokens, torch.float32, monkeypatch, "sdpa")
    with torch.no_grad():
        found = load_wide(source, torch.float32)(tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_without_feedback_in_float64(tmp_path, data, monkeypatch):
    folder = make_folder(tmp_path / "dense", "qwen3", eps=1e-14)
    tokens = exported.random_rows(2, 23, 320)
    expected = dense_logits(folder, tokens, torch.float64, monkeypatch, "sdpa")
    source = upcycled(tmp_path, data, folder, num_kv_channels=4, feedback=False)
    with torch.no_grad():
        found = load_wide(source, torch.float64)(tokens).logits
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("vanilla", {}),
        ("cla", {"layers_per_kv": 1}),
        ("yoco", {"own_kv_layers": 3}),
        ("fusedkv", {"own_kv_layers": 4}),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_families_that_share_nothing_are_the_dense_model(tmp_path, data, monkeypatch, kind, family, fields):
    """The options of the blocks (no head norms, biases, scaled rotary) against transformers' own models."""
    folder = make_folder(tmp_path / "dense", kind)
    source = upcycled(tmp_path, data, folder, family=family, **fields)
    if family == "vanilla":
        assert model_class(source.hf_config()) is DENSE[kind][1]
    tokens = exported.random_rows(2, 40, 320)
    expected = dense_logits(folder, tokens, torch.float32, monkeypatch, "sdpa")
    with torch.no_grad():
        found = load_wide(source, torch.float32)(tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
