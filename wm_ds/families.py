"""From a run's configuration to a Hugging Face causal language model of its family, with fresh weights.

The weights depend on the seed and the model alone, not on ranks or ZeRO stage: every rank draws the same
numbers from the same seed, and keeps what is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.configuration_utils import PretrainedConfig

from wm_ds.config.schema import ConfigError, Model
from wm_ds.errors import one_line
from wm_ds.model import LCKVConfig, LCKVForCausalLM, WhiteMatterConfig, WhiteMatterForCausalLM


def model_config(model: Model, *, vocab_size: int, seq_len: int, eos_id: int | None) -> PretrainedConfig:
    """The Hugging Face configuration of the run's model.

    `vocab_size` is the data's, used where the run does not set a larger one; `seq_len` becomes
    max_position_embeddings; `eos_id` is what the packer put between documents. Raises ConfigError where the
    model refuses a field.
    """
    try:
        return _model_config(model, vocab_size, seq_len, eos_id)
    except ValueError as error:
        raise ConfigError(f"model: {one_line(str(error))}") from None


def _model_config(model: Model, vocab_size: int, seq_len: int, eos_id: int | None) -> PretrainedConfig:
    fields: dict[str, Any] = model.fields()
    fields.setdefault("vocab_size", vocab_size)
    fields.update(
        max_position_embeddings=seq_len, bos_token_id=None, eos_token_id=eos_id, pad_token_id=eos_id
    )
    if model.family == "vanilla":
        theta = fields.pop("rope_theta")
        rope = {"rope_type": "default", "rope_theta": theta}
        return Qwen3Config(**fields, rope_parameters=rope, attention_bias=False, use_cache=False)
    # Ids beyond the data's are padding of the vocabulary: no token, and never generated.
    fields["tokenizer_size"] = min(vocab_size, fields["vocab_size"])
    if model.family == "lckv":
        return LCKVConfig(**fields)
    fields.setdefault("num_kv_channels", max(1, model.num_hidden_layers // 2))
    return WhiteMatterConfig(**fields)


# Vanilla is transformers' own; the other families' code travels with their exports.
CLASSES: dict[str, type[PreTrainedModel]] = {
    "whitematter": WhiteMatterForCausalLM,
    "lckv": LCKVForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def model_class(hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that the configuration belongs to."""
    return CLASSES[hf_config.model_type]


def construct(
    hf_config: PretrainedConfig,
    *,
    recompute: str = "none",
    entries_on_host: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The model, its weights drawn from torch's default generator.

    `recompute`: none, layer, group or group+layer, see fields.Config.recompute; `entries_on_host`: see there.
    """
    # Vanilla's attention takes the mask of documents, which SDPA does.
    options = {"attn_implementation": "sdpa"} if hf_config.model_type == "qwen3" else {}
    lm = model_class(hf_config)._from_config(hf_config, dtype=dtype, **options)
    if hf_config.model_type == "qwen3":
        if recompute == "layer":
            lm.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        lm.model.recompute = recompute
        lm.model.entries_on_host = entries_on_host
    return lm


def build_model(
    hf_config: PretrainedConfig, *, seed: int, recompute: str = "none", entries_on_host: bool = False
) -> PreTrainedModel:
    """The model with fresh fp32 weights drawn from `seed` (on the CPU, so the same on every machine).

    Training gives the same weights to its ranks without holding the whole model, see engine/init_weights.py.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return construct(hf_config, recompute=recompute, entries_on_host=entries_on_host)
