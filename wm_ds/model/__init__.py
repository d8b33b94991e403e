"""The WhiteMatter model. Self-contained (torch, transformers): it travels with every exported checkpoint."""

from .cache import WhiteMatterCache
from .configuration import WhiteMatterConfig
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .schedule import Converged, Part, Schedule, Step

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
