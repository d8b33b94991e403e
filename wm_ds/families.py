"""The families of models, in one table; and from a run's configuration to a model with fresh weights.

The weights depend on the seed and the model alone, not on ranks or ZeRO stage: every rank draws the same
numbers from the same seed, and keeps what is its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.initialization import no_init_weights

from wm_ds.config.schema import ConfigError, Model
from wm_ds.errors import one_line
from wm_ds.model import (
    CLAConfig,
    CLAForCausalLM,
    FusedKVConfig,
    FusedKVForCausalLM,
    LCKVConfig,
    LCKVForCausalLM,
    WhiteMatterConfig,
    WhiteMatterForCausalLM,
    YOCOConfig,
    YOCOForCausalLM,
)


@dataclass(frozen=True)
class Family:
    """A kind of model, and what the rest of the project must know of it.

    Attributes:
        name: in a run's configuration (`model.family`).
        config_class, model_class: its configuration and its causal language model.
        has_passes: a training step runs its layers several times.
        has_pool: its layers read channels that are mixed from the states of all layers.
        takes_documents: its forward takes `document_ids`; otherwise documents are a mask and positions.
        own_code: its code is ours (it knows our recompute policies) and travels with its exports.
    """

    name: str
    config_class: type[PretrainedConfig]
    model_class: type[PreTrainedModel]
    has_passes: bool
    has_pool: bool
    takes_documents: bool
    own_code: bool

    @property
    def model_type(self) -> str:
        """The family's name in transformers' config.json."""
        return self.config_class.model_type


FAMILIES = (
    Family(
        "whitematter",
        WhiteMatterConfig,
        WhiteMatterForCausalLM,
        has_passes=True,
        has_pool=True,
        takes_documents=True,
        own_code=True,
    ),
    Family(
        "lckv",
        LCKVConfig,
        LCKVForCausalLM,
        has_passes=True,
        has_pool=False,
        takes_documents=True,
        own_code=True,
    ),
    *(
        Family(
            config_class.model_type,  # layers that run once and share KV
            config_class,
            model_class,
            has_passes=False,
            has_pool=False,
            takes_documents=True,
            own_code=True,
        )
        for config_class, model_class in (
            (CLAConfig, CLAForCausalLM),
            (YOCOConfig, YOCOForCausalLM),
            (FusedKVConfig, FusedKVForCausalLM),
        )
    ),
    Family(
        "vanilla",  # transformers' own
        Qwen3Config,
        Qwen3ForCausalLM,
        has_passes=False,
        has_pool=False,
        takes_documents=False,
        own_code=False,
    ),
)
NAMES = {family.name: family for family in FAMILIES}
# What vanilla is where query and key heads have no norm: transformers' own again.
WITHOUT_QK_NORM = (
    replace(NAMES["vanilla"], config_class=LlamaConfig, model_class=LlamaForCausalLM),
    replace(NAMES["vanilla"], config_class=Qwen2Config, model_class=Qwen2ForCausalLM),  # with biases
)
MODEL_TYPES = {family.model_type: family for family in (*FAMILIES, *WITHOUT_QK_NORM)}


def family_of(hf_config: PretrainedConfig) -> Family:
    """The family of a model's configuration."""
    return MODEL_TYPES[hf_config.model_type]


def has_passes(hf_config: PretrainedConfig) -> bool:
    """Whether the model iterates: no family whose layers run once, nor the ablation without feedback."""
    return family_of(hf_config).has_passes and hf_config.feedback


def mixes_layers(hf_config: PretrainedConfig) -> bool:
    """Whether deeper layers' states come back through one pool: WhiteMatter with feedback."""
    return family_of(hf_config).has_pool and hf_config.feedback


def cached_kvs(hf_config: PretrainedConfig) -> int:
    """How many KVs the cache holds for a token: one a layer, or the channels that layers share."""
    return getattr(hf_config, "num_kv_channels", hf_config.num_hidden_layers)


def cache_bytes(hf_config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that the cache takes for one token: keys and values of all its KVs."""
    heads = hf_config.num_key_value_heads * hf_config.head_dim
    return 2 * cached_kvs(hf_config) * heads * dtype.itemsize


def model_class(hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that the configuration belongs to."""
    return family_of(hf_config).model_class


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
        theta, scaling = fields.pop("rope_theta"), fields.pop("scaled_rope", {"rope_type": "default"})
        fields |= {"rope_parameters": scaling | {"rope_theta": theta}, "use_cache": False}
        qk_norm, bias = fields.pop("qk_norm"), fields.pop("qkv_bias")
        if qk_norm and bias:
            raise ValueError(
                "qkv_bias: true with qk_norm: true is no family of transformers: set one of them to false"
            )
        if bias:
            return Qwen2Config(**fields, use_sliding_window=False)
        return (Qwen3Config if qk_norm else LlamaConfig)(**fields, attention_bias=False)
    # Ids beyond the data's are padding of the vocabulary: no token, and never generated.
    fields["tokenizer_size"] = min(vocab_size, fields["vocab_size"])
    if model.family == "whitematter":
        fields.setdefault("num_kv_channels", max(1, model.num_hidden_layers // 2))
    return NAMES[model.family].config_class(**fields)


def num_groups(model: Model) -> int:
    """The run's token groups of a pass, or its family's default; 1 for a model without passes."""
    family = NAMES[model.family]
    if not family.has_passes:
        return 1
    default = signature(family.config_class).parameters["num_groups"].default
    return default if model.num_groups is None else model.num_groups


def on_meta(hf_config: PretrainedConfig) -> PreTrainedModel:
    """The model without numbers: names and shapes of its parameters."""
    with torch.device("meta"), no_init_weights():
        lm = model_class(hf_config)(hf_config)
        lm.tie_weights()
    return lm


def construct(
    hf_config: PretrainedConfig,
    *,
    recompute: str = "none",
    entries_on_host: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The model, its weights drawn from torch's default generator.

    `recompute`: none, layer, group or group+layer, see schema.Config.recompute; `entries_on_host`: see there.
    """
    # Vanilla's attention takes the mask of documents, which SDPA does.
    family = family_of(hf_config)
    options = {} if family.own_code else {"attn_implementation": "sdpa"}
    lm = family.model_class._from_config(hf_config, dtype=dtype, **options)
    if family.own_code:
        lm.model.recompute = recompute
        lm.model.entries_on_host = entries_on_host
    elif recompute == "layer":
        lm.gradient_checkpointing_enable({"use_reentrant": False})
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
