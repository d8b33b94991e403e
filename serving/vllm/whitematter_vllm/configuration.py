"""The fields of an export's config.json, as far as serving knows them; wm_ds says what they mean.

vLLM finds these classes by the file's `model_type` and so never runs the code that lies beside it.
"""

import difflib
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from whitematter_vllm.versions import require_tested

# What any configuration of transformers may have, and what vLLM writes into one.
COMMON = {
    *(field.name for field in fields(PreTrainedConfig)),
    "attn_implementation",
    "auto_map",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "pad_token_id",
    "rope_parameters",
    "tokenizer_class",
    "torch_dtype",
    "use_cache",
}


class WhiteMatterConfig(PreTrainedConfig):
    """A WhiteMatter export's config.json."""

    model_type = "whitematter"

    vocab_size: int = 151936
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 16
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    head_dim: int = 96
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    scaled_rope: dict[str, Any] | None = None
    num_kv_channels: int = 16
    router_stride: int = 2
    router_init: str = "auto"
    routing: str = "dynamic"
    feedback: bool = True
    schedule: str = "cyclic"
    num_groups: int = 8
    no_grad_passes: int = 1
    grad_passes: int = 2
    chunk_size: int | None = None
    relaxation: Any = 1.0
    start: str = "embedding"
    start_missing: str = "newest"
    start_grad: bool = False
    prefill: str = "trained"
    prefill_passes: int | None = None
    prefill_groups: int | None = None
    prefill_tolerance: float = 1e-3
    prefill_start: str | None = None
    tokenizer_size: int | None = None
    attention: str = "auto"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    # Of serving alone: a prompt's passes never cross a multiple of so many positions (prefill.py).
    prefill_border: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        require_tested()
        super().__post_init__(**kwargs)

    @property
    def router_sources(self) -> list[int]:
        """The layers whose states the router reads, ascending."""
        return sorted(range(self.num_hidden_layers - 1, -1, -self.router_stride))


class LCKVConfig(WhiteMatterConfig):
    """The config.json of an LCKV sandwich's export."""

    model_type = "lckv"

    warmup_layers: int = 4
    router_init: str = "top"
    routing: str = "fixed"
    num_groups: int = 1
    no_grad_passes: int = 7
    grad_passes: int = 2

    @property
    def condensed(self) -> range:
        """The layers that share one KV."""
        bottom = self.warmup_layers // 2
        return range(bottom, self.num_hidden_layers - (self.warmup_layers - bottom))


class SharedKVConfig(PreTrainedConfig):
    """Families of wm_ds whose layers share KV without a pool: not served."""

    def __post_init__(self, **kwargs: Any) -> None:
        raise ValueError(
            f"models of the family {self.model_type} are not served by whitematter-vllm; transformers runs "
            "them, with trust_remote_code=True"
        )


class CLAConfig(SharedKVConfig):
    """Not served."""

    model_type = "cla"


class YOCOConfig(SharedKVConfig):
    """Not served."""

    model_type = "yoco"


class FusedKVConfig(SharedKVConfig):
    """Not served."""

    model_type = "fusedkv"


FAMILIES = (WhiteMatterConfig, LCKVConfig, CLAConfig, YOCOConfig, FusedKVConfig)


def refuse_unknown(config: WhiteMatterConfig) -> None:
    """Raises ValueError for a field that nothing here reads: a misspelt one, or one of a newer wm_ds."""
    known = {field.name for field in fields(config)}
    for name in config.to_dict():
        if name in known | COMMON or name.startswith("_"):
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else "it may come from a newer wm_ds than this plugin knows"
        )
        raise ValueError(
            f"config.json or --hf-overrides has the field {name!r}, which is not known here; {hint}"
        )
