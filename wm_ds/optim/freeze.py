"""Frozen parameters: by patterns of their names, in stages of a run, and thawed again.

A frozen parameter's gradient is zero, so that it counts in no norm, and the optimizer leaves its weights and
its state bit for bit as they are. Nothing is released: gradients and state stay allocated for a later stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from wm_ds.config.schema import Config, ConfigError
from wm_ds.optim.muon import MuonAdamW
from wm_ds.optim.partition import parameter_names


def frozen_names(patterns: Sequence[str], names: Iterable[str], field: str = "freeze") -> set[str]:
    """The parameters that patterns (`model.layers.0.*`) match.

    Raises ConfigError, naming `field`, for a pattern that matches none and for patterns that leave nothing to
    train.
    """
    names, found = list(names), set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise ConfigError(
                f"{field}: {pattern!r} matches no parameter; they are named like {names[0]}, and * stands "
                "for any characters (the dry run lists them)"
            )
        found |= matched
    if names and len(found) == len(names):
        raise ConfigError(f"{field} = {list(patterns)} freezes every parameter: nothing would be trained")
    return found


def check_freeze(config: Config, names: Sequence[str]) -> None:
    """Raise ConfigError for what `frozen_names` refuses, in the run's own `freeze` or in a stage's."""
    frozen_names(config.freeze, names)
    for index, stage in enumerate(config.stages or []):
        frozen_names(stage.freeze or [], names, f"stages.{index}.freeze")


class Freeze:
    """Freezes and thaws the parameters of a model that `optimizer` updates."""

    def __init__(self, module: nn.Module, optimizer: MuonAdamW) -> None:
        self._optimizer = optimizer
        names = parameter_names(module)
        self._parameters = {names[id(p)]: p for p in module.parameters() if p.requires_grad}
        self._hooks: dict[str, Any] = {}

    def set(self, patterns: Sequence[str]) -> None:
        """From the next step on, exactly what the patterns match is frozen. Raises ConfigError."""
        frozen = frozen_names(patterns, self._parameters)
        if frozen == self._hooks.keys():
            return
        for name in self._hooks.keys() - frozen:
            self._hooks.pop(name).remove()
        for name in sorted(frozen - self._hooks.keys()):
            self._hooks[name] = self._parameters[name].register_hook(_zero)
        self._optimizer.freeze(frozen)


def _zero(grad: Tensor) -> Tensor:
    return torch.zeros_like(grad)
