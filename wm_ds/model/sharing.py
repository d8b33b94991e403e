"""Layers that run once and share KV: three other ways to a smaller cache, to measure WhiteMatter beside.

Some layers are Qwen3's, with K and V of their own; the others read what such layers below them made.
Attention is ordinary and causal, and one forward is exact. Which layer reads what is the configuration's
`reads`:

cla      Cross-layer attention (Brandon et al., 2024): of some consecutive layers the lowest makes the KV.
yoco     You only cache once (Sun et al., 2024), its sharing: above the lower layers with KV of their own, all
         read one KV, made from the state that leaves these. The lower layers attend to everything here; in
         YOCO they have attention of a bounded cache (a sliding window, or gated retention).
fusedkv  FusedKV (Lin et al., 2026): the upper layers read learned mixtures of the bottom and the middle KV.
"""

from __future__ import annotations

from torch import nn
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .blocks import FusedLayer, Fusion, OwnKVLayer, WhiteMatterDecoderLayer
from .configuration import CLAConfig, FusedKVConfig, SharedKVConfig, YOCOConfig
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .once import run_once
from .schedule import Converged, Schedule, is_fixed
from .stack import PassOptions, PassResult, Workspace


class SharedKVModel(WhiteMatterModel):
    """Embeddings, L blocks of which k make KV, and the final norm."""

    def _build(self, config: SharedKVConfig) -> None:
        self.layers = nn.ModuleList(
            OwnKVLayer(config)
            if index in config.makers
            else (WhiteMatterDecoderLayer if len(kvs) == 1 else FusedLayer)(config)
            for index, kvs in enumerate(config.reads)
        )
        self.dummy_key = None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Fusion):
            for kept in (module.key_middle, module.value_bottom):
                init.ones_(kept)
            for left_out in (module.key_bottom, module.value_middle):
                init.zeros_(left_out)

    def _evaluate(
        self, workspace: Workspace, schedule: Schedule | Converged, options: PassOptions
    ) -> PassResult:
        if not (is_fixed(schedule) and schedule.kind == "exact"):
            raise ValueError(
                f"schedule={schedule} has no effect on a {self.config.model_type} model: its layers run "
                "once, and one forward is exact; leave it out"
            )
        return run_once(self.layers, self.config.reads, workspace, options)


class CLAModel(SharedKVModel):
    """Consecutive layers share the KV of the lowest of them."""

    config_class = CLAConfig


class CLAForCausalLM(WhiteMatterForCausalLM):
    """Cross-layer attention with a language-model head."""

    config_class = CLAConfig
    base_class = CLAModel


class YOCOModel(SharedKVModel):
    """The upper layers share one KV."""

    config_class = YOCOConfig


class YOCOForCausalLM(WhiteMatterForCausalLM):
    """YOCO's sharing with a language-model head."""

    config_class = YOCOConfig
    base_class = YOCOModel


class FusedKVModel(SharedKVModel):
    """The upper layers read learned mixtures of the bottom and the middle KV."""

    config_class = FusedKVConfig


class FusedKVForCausalLM(WhiteMatterForCausalLM):
    """FusedKV with a language-model head."""

    config_class = FusedKVConfig
    base_class = FusedKVModel


for _class in (CLAForCausalLM, YOCOForCausalLM, FusedKVForCausalLM):
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_class.config_class.model_type] = _class.__name__  # see modeling.py

__all__ = [
    "CLAForCausalLM",
    "CLAModel",
    "FusedKVForCausalLM",
    "FusedKVModel",
    "YOCOForCausalLM",
    "YOCOModel",
]
