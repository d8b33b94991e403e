"""The cross-layer pool: the states of all L layers at a token become its k KV channels.

Shapes: N tokens, L layers, S router sources, D width, k channels, G KV heads of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank

from whitematter_vllm.configuration import WhiteMatterConfig
from whitematter_vllm.layers import Rotary, heads_of_rank, rms_norm, unit

# The pool's intermediate results are as large as all states of all layers, several times: part of the tokens
# at a time keeps them small.
TOKENS_AT_ONCE = 1024


def parameter(*shape: int, share_of: int | None = None) -> nn.Parameter:
    """A weight of this shape; `share_of` is the dimension of which a rank holds its share."""
    weight = nn.Parameter(torch.empty(*shape), requires_grad=False)
    if share_of is not None:
        weight.weight_loader = share_loader(share_of)
    return weight


def share_loader(dim: int) -> Callable[[Tensor, Tensor], None]:
    """What vLLM loads a weight with: this rank's share of the file's tensor along `dim`."""

    def load(weight: Tensor, whole: Tensor) -> None:
        size = weight.shape[dim]
        weight.data.copy_(whole.narrow(dim, get_tensor_model_parallel_rank() * size, size))

    return load


def initial_pattern(config: WhiteMatterConfig) -> Tensor:
    """The mixing weights [k, L] that "fixed" routing has and others start from."""
    layers, channels = config.num_hidden_layers, config.num_kv_channels
    kind = config.router_init
    if kind == "auto":
        kind = "top" if channels == 1 else "shifted" if channels == layers else "cyclic"
    pattern_kL = torch.zeros(channels, layers)
    if kind == "cyclic":
        for source in range(layers):
            pattern_kL[source % channels, source] = 1
    for channel in range(channels):
        if kind == "top":
            pattern_kL[channel, -1] = 1
        elif kind == "shifted":
            pattern_kL[channel, min(channel + 1, layers - 1)] = 1
    return pattern_kL


class PoolBranch(nn.Module):
    """States to channels, for one of keys and values."""

    def __init__(self, config: WhiteMatterConfig, normalise_heads: bool) -> None:
        super().__init__()
        layers, channels, width = config.num_hidden_layers, config.num_kv_channels, config.hidden_size
        heads = heads_of_rank(config)
        self.eps, self.routing, self.head_dim = config.rms_norm_eps, config.routing, heads.dim
        self.shape = (channels, layers)
        self.sources = slice(config.router_sources[0], layers, config.router_stride)
        self.source_norm = parameter(layers, width)
        if self.routing == "dynamic":
            self.router_weight = parameter(channels * layers, len(config.router_sources) * width)
        if self.routing == "fixed":
            self.register_buffer("pattern", initial_pattern(config), persistent=False)
        else:
            self.router_bias = parameter(channels * layers)
        self.channel_norm = parameter(channels, width)
        self.proj = parameter(channels, heads.kv * heads.dim, width, share_of=1)
        self.head_norm = parameter(channels, heads.dim) if normalise_heads else None

    def mixing_weights(self, hat_NLD: Tensor, channels: slice) -> Tensor:
        """[N or 1, channels, L]."""
        if self.routing == "fixed":
            return self.pattern[channels].to(hat_NLD.dtype)[None]
        bias_kL = self.router_bias.view(self.shape)[channels]
        if self.routing == "dynamic":
            weight_kLX = self.router_weight.view(*self.shape, -1)[channels]
            xi_NX = hat_NLD[:, self.sources].flatten(1)
            return F.linear(xi_NX, weight_kLX.flatten(0, 1), bias_kL.flatten()).unflatten(1, bias_kL.shape)
        return bias_kL.softmax(-1)[None] if self.routing == "softmax" else bias_kL[None]

    def forward(self, unit_NLD: Tensor, channels: slice) -> Tensor:
        """Keys that are not yet rotated, or values, of some channels: [N, channels, G, d]."""
        hat_NLD = unit_NLD * self.source_norm
        mix_NkD = torch.matmul(self.mixing_weights(hat_NLD, channels), hat_NLD)
        normed_kND = rms_norm(mix_NkD, self.channel_norm[channels], self.eps).transpose(0, 1)
        out_kNX = torch.bmm(normed_kND, self.proj[channels].transpose(1, 2))
        out_NkGd = out_kNX.transpose(0, 1).unflatten(-1, (-1, self.head_dim))
        if self.head_norm is None:
            return out_NkGd
        return rms_norm(out_NkGd, self.head_norm[channels, None], self.eps)


class Pool(nn.Module):
    """Rotated, normed keys and raw values of the channels of some tokens."""

    def __init__(self, config: WhiteMatterConfig, rotary: Rotary) -> None:
        super().__init__()
        self.eps, self.layers = config.rms_norm_eps, config.num_hidden_layers
        self._rotary = [rotary]  # in a list: it is not this module's
        self.key = PoolBranch(config, normalise_heads=True)
        self.value = PoolBranch(config, normalise_heads=False)

    def forward(
        self, state_NLD: Tensor, position_N: Tensor, channels: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            state_NLD: what entered each layer; or [N, 1, D], which then stands for all layers.

        Returns:
            keys and values, each [N, channels, G, d].
        """
        parts = [
            self._part(state, position, channels)
            for state, position in zip(state_NLD.split(TOKENS_AT_ONCE), position_N.split(TOKENS_AT_ONCE))
        ]
        if len(parts) == 1:
            return parts[0]
        keys, values = zip(*parts)
        return torch.cat(keys), torch.cat(values)

    def _part(self, state_NLD: Tensor, position_N: Tensor, channels: slice) -> tuple[Tensor, Tensor]:
        unit_NLD = unit(state_NLD, self.eps).expand(-1, self.layers, -1)
        key_NkGd = self.key(unit_NLD, channels)
        rotated = self._rotary[0](key_NkGd.flatten(1, 2), position_N)
        return rotated.view(key_NkGd.shape), self.value(unit_NLD, channels)
