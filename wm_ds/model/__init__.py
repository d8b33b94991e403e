"""The WhiteMatter model. Self-contained (torch, transformers): it travels with every exported checkpoint."""

from .cache import WhiteMatterCache
from .configuration import WhiteMatterConfig
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .schedule import Converged, Part, Schedule, Step

# `save_pretrained` then writes this package's files beside the weights, so that the folder loads without it.
WhiteMatterConfig.register_for_auto_class()
WhiteMatterModel.register_for_auto_class("AutoModel")
WhiteMatterForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "Converged",
    "Part",
    "Schedule",
    "Step",
    "WhiteMatterCache",
    "WhiteMatterConfig",
    "WhiteMatterForCausalLM",
    "WhiteMatterModel",
]
