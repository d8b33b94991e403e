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

    def mixing_weights(self, hat_NLD: Tensor) -> Tensor:
        """[N or 1, k, L]."""
        if self.routing == "dynamic":
            xi_NX = hat_NLD[:, self.sources].flatten(1)
            return F.linear(xi_NX, self.router_weight, self.router_bias).unflatten(1, self.shape)
        return self._static_weights()[None]

    def forward(self, unit_NLD: Tensor) -> Tensor:
        """Keys that are not yet rotated, or values, [k, N, G, d]; from states over their RMS."""
        hat_NLD = unit_NLD * self.source_norm
        return self._project(torch.matmul(self.mixing_weights(hat_NLD), hat_NLD), slice(None))

    def channel(self, index: int, unit_NlD: Tensor, missing_ND: Tensor) -> Tensor:
        """One channel [1, N, G, d] where the states of the first l layers are known.

        missing_ND stands in for each of the others; it too is over its RMS.
        """
        known = unit_NlD.shape[1]
        hat_NlD, rest_LD = unit_NlD * self.source_norm[:known], self.source_norm[known:]
        if self.routing == "dynamic":
            weight_LSD = self.router_weight.view(*self.shape, -1, unit_NlD.shape[2])[index]
            xi_NSD = hat_NlD[:, self.sources]
            seen = xi_NSD.shape[1]
            alpha_NL = F.linear(
                xi_NSD.flatten(1), weight_LSD[:, :seen].flatten(1), self.router_bias.view(self.shape)[index]
            )
            # One vector stands for all sources that are missing: their columns are added up first.
            columns_LD = (weight_LSD[:, seen:] * self.source_norm[self.sources][seen:]).sum(1)
            alpha_NL = alpha_NL + F.linear(missing_ND, columns_LD)
        else:
            alpha_NL = self._static_weights()[index][None]
        mix_N1D = torch.matmul(alpha_NL[:, None, :known], hat_NlD)
        rest_ND = torch.matmul(alpha_NL[:, known:], rest_LD) * missing_ND
        return self._project(mix_N1D + rest_ND[:, None], slice(index, index + 1))

    def _static_weights(self) -> Tensor:
        """[k, L], the same for all tokens."""
        if self.routing == "fixed":
            return self.pattern.to(self.proj.dtype)
        bias_kL = self.router_bias.view(self.shape)
        return bias_kL.softmax(-1) if self.routing == "softmax" else bias_kL

    def _project(self, mix_NkD: Tensor, channels: slice) -> Tensor:
        normed_kND = rms_norm(mix_NkD, self.channel_norm[channels], self.eps).transpose(0, 1)
        out_kNX = torch.bmm(normed_kND, self.proj[channels].transpose(1, 2))
        out_kNGd = out_kNX.unflatten(-1, (-1, self.head_dim))
        if self.head_norm is None:
            return out_kNGd
        return rms_norm(out_kNGd, self.head_norm[channels, None, None], self.eps)


class Pool(nn.Module):
    """Rotated, normed keys and raw values of the channels of some tokens."""

    def __init__(self, config: WhiteMatterConfig, rotary: Rotary) -> None:
        super().__init__()
        self.eps, self.layers = config.rms_norm_eps, config.num_hidden_layers
        self._rotary = [rotary]  # in a list: it is not this module's
        self.key = PoolBranch(config, normalise_heads=True)
        self.value = PoolBranch(config, normalise_heads=False)

    def forward(self, state_NLD: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            state_NLD: what entered each layer; or [N, 1, D], which then stands for all layers.

        Returns:
            keys and values, each [k, N, G, d].
        """
        parts = []
        for states, positions in zip(state_NLD.split(TOKENS_AT_ONCE), position_N.split(TOKENS_AT_ONCE)):
            unit_NLD = unit(states, self.eps).expand(-1, self.layers, -1)
            parts.append((self._rotated(self.key(unit_NLD), positions), self.value(unit_NLD)))
        return _joined(parts)

    def channel(
        self, index: int, unit_NlD: Tensor, missing_ND: Tensor, position_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [1, N, G, d] of one channel, as `PoolBranch.channel` makes it."""
        parts = []
        for first in range(0, len(position_N), TOKENS_AT_ONCE):
            part = slice(first, first + TOKENS_AT_ONCE)
            key, value = (
                branch.channel(index, unit_NlD[part], missing_ND[part]) for branch in (self.key, self.value)
            )
            parts.append((self._rotated(key, position_N[part]), value))
        return _joined(parts)

    def _rotated(self, key_kNGd: Tensor, position_N: Tensor) -> Tensor:
        rotated = self._rotary[0](key_kNGd.flatten(0, 1), position_N.repeat(len(key_kNGd)))
        return rotated.view(key_kNGd.shape)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values of all parts."""
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)
