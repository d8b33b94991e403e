"""The WhiteMatter model. Self-contained (torch, transformers): it travels with every exported checkpoint."""

from .cache import WhiteMatterCache
from .configuration import CLAConfig, FusedKVConfig, LCKVConfig, WhiteMatterConfig, YOCOConfig
from .lckv import LCKVForCausalLM, LCKVModel
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .schedule import EMBEDDING, LAYERWISE, Converged, Part, Schedule, Start, Step
from .sharing import CLAForCausalLM, CLAModel, FusedKVForCausalLM, FusedKVModel, YOCOForCausalLM, YOCOModel

# `save_pretrained` then writes this package's files beside the weights, so that the folder loads without it.
for _config in (WhiteMatterConfig, LCKVConfig, CLAConfig, YOCOConfig, FusedKVConfig):
    _config.register_for_auto_class()
for _model in (WhiteMatterModel, LCKVModel, CLAModel, YOCOModel, FusedKVModel):
    _model.register_for_auto_class("AutoModel")
for _causal_lm in (
    WhiteMatterForCausalLM,
    LCKVForCausalLM,
    CLAForCausalLM,
    YOCOForCausalLM,
    FusedKVForCausalLM,
):
    _causal_lm.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "EMBEDDING",
    "LAYERWISE",
    "CLAConfig",
    "CLAForCausalLM",
    "CLAModel",
    "Converged",
    "FusedKVConfig",
    "FusedKVForCausalLM",
    "FusedKVModel",
    "LCKVConfig",
    "LCKVForCausalLM",
    "LCKVModel",
    "Part",
    "Schedule",
    "Start",
    "Step",
    "WhiteMatterCache",
    "WhiteMatterConfig",
    "WhiteMatterForCausalLM",
    "WhiteMatterModel",
    "YOCOConfig",
    "YOCOForCausalLM",
    "YOCOModel",
]
