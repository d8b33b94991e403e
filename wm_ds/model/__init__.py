"""The WhiteMatter model. Self-contained (torch, transformers): it travels with every exported checkpoint."""

from .cache import WhiteMatterCache
from .configuration import WhiteMatterConfig
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .schedule import Part, Schedule, Step

__all__ = [
    "Part",
    "Schedule",
    "Step",
    "WhiteMatterCache",
    "WhiteMatterConfig",
    "WhiteMatterForCausalLM",
    "WhiteMatterModel",
]
