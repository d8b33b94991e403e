"""The WhiteMatter model. Self-contained (torch, transformers): it travels with every exported checkpoint."""

from .cache import WhiteMatterCache
from .configuration import LCKVConfig, WhiteMatterConfig
from .lckv import LCKVForCausalLM, LCKVModel
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .schedule import Converged, Part, Schedule, Step

# `save_pretrained` then writes this package's files beside the weights, so that the folder loads without it.
WhiteMatterConfig.register_for_auto_class()
WhiteMatterModel.register_for_auto_class("AutoModel")
WhiteMatterForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LCKVConfig.register_for_auto_class()
LCKVModel.register_for_auto_class("AutoModel")
LCKVForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "Converged",
    "LCKVConfig",
    "LCKVForCausalLM",
    "LCKVModel",
    "Part",
    "Schedule",
    "Step",
    "WhiteMatterCache",
    "WhiteMatterConfig",
    "WhiteMatterForCausalLM",
    "WhiteMatterModel",
]
