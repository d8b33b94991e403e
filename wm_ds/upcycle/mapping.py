"""Which tensors of a dense model each parameter of a run starts from.

Blocks, embedding, final norm and head are copied. What layers share starts from the layers that read it,
their *group*: of channel c of a pool, the layers l with l mod k = c; of an LCKV sandwich's condensed KV, all
condensed layers; of a KV of the other families, the layers that read it alone. `choice` says how a group
becomes one:

    nearest   the layer nearest to the group's mean depth (of two, the upper one): its state, input norm,
              projections and key norm
    top       likewise the group's topmost layer
    mean      the mean of the group's states, input norms, projections and key norms

(Where the architecture says whose state it is, as in all families but WhiteMatter, the choice is about the
projections and the key norm alone.)

With one layer in each group (k = L) they are the same, and the channel is exactly that layer's keys and
values. The pool divides twice by an RMS: a state by its own, and the mixture by its own. The layer's input
norm therefore goes to the *second* one, the channel's, and the source norms are ones: unit(unit(h)) is
unit(h), whereas the RMS of a weighted state differs from token to token, and values would be scaled by it.
What is left is the epsilon, which counts once less: a relative difference of eps / (2 mean(h²)) of values.

A dummy is zero: a key that no query prefers, with nothing behind it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from wm_ds.families import family_of
from wm_ds.model import LCKVConfig
from wm_ds.model.configuration import SharedKVConfig
from wm_ds.model.pool import initial_router_bias
from wm_ds.upcycle.dense import Dense, UpcycleError

CHOICES = ("nearest", "top", "mean")
DEFAULT = "mean"
# Fresh values of FusedKV's mixtures (model/blocks.py): keys of the middle layer, values of the bottom one.
_FUSION = {"key_bottom": 0.0, "key_middle": 1.0, "value_bottom": 1.0, "value_middle": 0.0}
_MAKES_KV = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(k_proj\.weight|v_proj\.weight|k_norm\.weight|[kv]_proj\.bias)"
)


def shares(group: list[int], choice: str) -> dict[int, float]:
    """Layers of a group and their weights, which add up to 1."""
    if choice == "mean":
        return {layer: 1 / len(group) for layer in group}
    if choice == "top":
        return {max(group): 1.0}
    middle = sum(group) / len(group)
    return {min(group, key=lambda layer: (abs(layer - middle), -layer)): 1.0}


def channel_groups(layers: int, channels: int) -> list[list[int]]:
    """The layers that read each channel of a pool."""
    return [list(range(channel, layers, channels)) for channel in range(channels)]


def check(config: PreTrainedConfig, choice: str) -> None:
    """Raises UpcycleError where the run's model cannot start from another model's layers."""
    if choice not in CHOICES:
        raise UpcycleError(f"--pool {choice!r}: choose one of {', '.join(CHOICES)}")
    if not family_of(config).has_pool:
        return
    if config.routing == "softmax":
        raise UpcycleError(
            "model.routing = softmax gives every layer a positive weight, so no channel can start as one "
            "layer's; use dynamic or static"
        )
    if config.routing == "fixed" and not torch.equal(initial_router_bias(config), _pattern(config, choice)):
        raise UpcycleError(
            f"model.routing = fixed with router_init {config.router_init!r} reads other layers than --pool "
            f"{choice} starts from, and cannot learn; use dynamic or static, or at k = L router_init cyclic"
        )


def value(name: str, shape: tuple[int, ...], config: PreTrainedConfig, dense: Dense, choice: str) -> Tensor:
    """The run's parameter `name` of a model of `config`, in fp32. Raises UpcycleError."""
    found = _value(name, shape, config, dense, choice)
    if tuple(found.shape) != tuple(shape):
        raise UpcycleError(f"{dense.path}: {name} would be {list(found.shape)}, the run's is {list(shape)}")
    return found.contiguous()


def _value(name: str, shape: tuple[int, ...], config: Any, dense: Dense, choice: str) -> Tensor:
    if name.startswith("model.pool."):
        return _of_pool(name, shape, config, dense, choice)
    if name.startswith("model.dummy_"):
        return torch.zeros(shape)
    if ".fusion." in name:
        return torch.full(shape, _FUSION[name.rpartition(".")[2]])
    made = _MAKES_KV.fullmatch(name)
    if made is not None:
        layer, part = int(made.group(1)), made.group(2)
        return _mean(dense, f"self_attn.{part}", shares(_readers(config, layer), choice))
    return _read(dense, name)


def _of_pool(name: str, shape: tuple[int, ...], config: Any, dense: Dense, choice: str) -> Tensor:
    _, _, branch, part = name.split(".")
    if part == "source_norm":
        return torch.ones(shape)
    if part == "router_weight":
        return torch.zeros(shape)
    if part == "router_bias":
        return _pattern(config, choice)
    projection = "k_proj" if branch == "key" else "v_proj"
    of_layer = {
        "channel_norm": "input_layernorm.weight",
        "proj": f"self_attn.{projection}.weight",
        "proj_bias": f"self_attn.{projection}.bias",
        "head_norm": "self_attn.k_norm.weight",
    }[part]
    groups = channel_groups(config.num_hidden_layers, config.num_kv_channels)
    return torch.stack([_mean(dense, of_layer, shares(group, choice)) for group in groups])


def _pattern(config: Any, choice: str) -> Tensor:
    """Mixing weights [k*L] that pick each channel's layers."""
    pattern_kL = torch.zeros(config.num_kv_channels, config.num_hidden_layers)
    for channel, group in enumerate(channel_groups(config.num_hidden_layers, config.num_kv_channels)):
        for layer, share in shares(group, choice).items():
            pattern_kL[channel, layer] = share
    return pattern_kL.flatten()


def _readers(config: Any, layer: int) -> list[int]:
    """The layers that read the KV which `layer` makes."""
    if isinstance(config, LCKVConfig):
        return list(config.condensed) if layer in config.condensed else [layer]
    if isinstance(config, SharedKVConfig):
        kv = config.reads[layer]
        return [other for other, reads in enumerate(config.reads) if reads == kv]
    return [layer]


def _mean(dense: Dense, part: str, share: dict[int, float]) -> Tensor:
    total: Tensor | None = None
    for layer, weight in share.items():
        tensor = _read(dense, f"model.layers.{layer}.{part}")
        if len(share) == 1:
            return tensor
        total = tensor * weight if total is None else total.add_(tensor, alpha=weight)
    assert total is not None
    return total


def _read(dense: Dense, name: str) -> Tensor:
    if name not in dense.shapes:
        raise UpcycleError(f"{dense.path} lacks {name}, which a model of type {dense.config.model_type} has")
    return dense.read(name)
