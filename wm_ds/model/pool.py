"""The cross-layer KV pool: the states of all L layers at a token become its k KV channels (paper §3.1).

Shapes: N tokens (rows x positions), B rows, n positions, L source layers, S = L' router sources, D width,
k channels, G KV heads, d head width. The key and the value branch have parameters of their own.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import rms_norm, rotate
from .configuration import WhiteMatterConfig


class PoolBranch(nn.Module):
    """States to channels for one of keys and values.

    Parameters: source_norm [L, D], router_weight [k*L, S*D], router_bias [k*L], channel_norm [k, D],
    proj [k, G*d, D], with qkv_bias proj_bias [k, G*d], and for keys with qk_norm head_norm [k, d].
    """

    def __init__(self, config: WhiteMatterConfig, normalise_heads: bool) -> None:
        super().__init__()
        layers, channels, width = config.num_hidden_layers, config.num_kv_channels, config.hidden_size
        self.eps = config.rms_norm_eps
        self.shape = (channels, layers)
        self.head_dim = config.head_dim
        self.sources = slice(config.router_sources[0], layers, config.router_stride)
        self.source_norm = nn.Parameter(torch.ones(layers, width))
        self.routing = config.routing
        self.router_weight = self.router_bias = None
        if config.routing == "dynamic":
            inputs = len(config.router_sources) * width
            self.router_weight = nn.Parameter(torch.zeros(channels * layers, inputs))
        if config.routing == "fixed":
            self.pattern = initial_router_bias(config).tolist()
        else:
            self.router_bias = nn.Parameter(torch.zeros(channels * layers))
        self.channel_norm = nn.Parameter(torch.ones(channels, width))
        self.proj = nn.Parameter(torch.zeros(channels, config.num_key_value_heads * config.head_dim, width))
        self.proj_bias = None
        if config.qkv_bias:
            self.proj_bias = nn.Parameter(torch.zeros(channels, self.proj.shape[1]))
        self.head_norm = nn.Parameter(torch.ones(channels, config.head_dim)) if normalise_heads else None

    def mixing_weights(self, hat_NLD: Tensor) -> Tensor:
        """alpha [N, k, L], or [1, k, L] where it is the same for every token.

        Dynamic weights are signed, from the normed states of every p-th layer counted from the top.
        """
        if self.router_weight is not None:
            xi_NSD = hat_NLD[:, self.sources].flatten(1)
            return F.linear(xi_NSD, self.router_weight, self.router_bias).unflatten(1, self.shape)
        if self.router_bias is None:
            return hat_NLD.new_tensor(self.pattern).view(1, *self.shape)
        alpha_1kL = self.router_bias.view(1, *self.shape)
        return alpha_1kL.softmax(-1) if self.routing == "softmax" else alpha_1kL

    def forward(
        self, unit_NLD: Tensor, channel: int | None = None, missing_ND: Tensor | None = None
    ) -> Tensor:
        """unit_NLD: states over their RMS. Returns [k, N, G, d]; one channel alone as `one` says."""
        if channel is not None:  # by way of forward, so that ZeRO-3's hooks gather the parameters
            return self.one(channel, unit_NLD, missing_ND)
        hat_NLD = (unit_NLD * self.source_norm).to(unit_NLD.dtype)
        alpha_NkL = self.mixing_weights(hat_NLD)
        mix_NkD = torch.matmul(alpha_NkL, hat_NLD.to(alpha_NkL.dtype))
        return self.project(mix_NkD, slice(None))

    def one(self, channel: int, unit_NlD: Tensor, missing_ND: Tensor | None = None) -> Tensor:
        """Channel `channel` from the states of the first l layers.

        unit_NlD: these states over their RMS. missing_ND: what stands in for each deeper one, over its RMS;
        without it, router and mixture leave them out (the ablation without feedback). Returns [1, N, G, d].
        """
        count, layers = unit_NlD.shape[1], self.shape[1]
        hat_NlD = (unit_NlD * self.source_norm[:count]).to(unit_NlD.dtype)
        sources = count if missing_ND is None else layers
        rows = slice(channel * layers, channel * layers + sources)
        if self.router_bias is not None:
            alpha_NL = self.router_bias[rows]
        elif missing_ND is not None:
            alpha_NL = hat_NlD.new_tensor(self.pattern[rows])
        else:
            raise ValueError("a fixed routing reads layers above the channel's own")
        if self.routing == "softmax":
            alpha_NL = alpha_NL.softmax(-1)
        if self.router_weight is not None:
            xi_NSD = hat_NlD[:, self.sources].flatten(1)
            known, rest = self.router_weight[rows].split(
                (xi_NSD.shape[1], self.router_weight.shape[1] - xi_NSD.shape[1]), dim=1
            )
            alpha_NL = F.linear(xi_NSD, known, alpha_NL)
            if missing_ND is not None and rest.shape[1]:
                # One vector for all of them: their norms and router columns are added up first.
                norm_SD = self.source_norm[self.sources][-(rest.shape[1] // missing_ND.shape[1]) :]
                rest_LD = (rest.unflatten(1, norm_SD.shape) * norm_SD).sum(1)
                alpha_NL = alpha_NL + F.linear(missing_ND, rest_LD)
        alpha_Nl = alpha_NL[..., :count]
        mix_N1D = torch.matmul(alpha_Nl.unsqueeze(-2), hat_NlD.to(alpha_Nl.dtype))
        if missing_ND is not None and count < layers:
            weight_ND = torch.matmul(alpha_NL[..., count:], self.source_norm[count:].to(alpha_NL.dtype))
            mix_N1D = mix_N1D + (weight_ND * missing_ND).unsqueeze(-2)
        return self.project(mix_N1D, slice(channel, channel + 1))

    def project(self, mix_NkD: Tensor, channels: slice) -> Tensor:
        """Mixed states of some channels to their keys or values [k, N, G, d] (§3.1, step 2)."""
        normed_kND = rms_norm(mix_NkD, self.channel_norm[channels], self.eps).transpose(0, 1)
        proj_kDE = self.proj[channels].transpose(1, 2).to(normed_kND.dtype)
        out_kNE = torch.bmm(normed_kND, proj_kDE)
        if self.proj_bias is not None:
            out_kNE = out_kNE + self.proj_bias[channels, None].to(out_kNE.dtype)
        out_kNGd = out_kNE.unflatten(-1, (-1, self.head_dim))
        if self.head_norm is None:
            return out_kNGd
        return rms_norm(out_kNGd, self.head_norm[channels, None, None], self.eps)


class Pool(nn.Module):
    """P = Pool(H): rotated, normed keys and raw values of k channels for the tokens of a step."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.layers = config.num_hidden_layers
        self.key = PoolBranch(config, normalise_heads=config.qk_norm)
        self.value = PoolBranch(config, normalise_heads=False)

    def forward(self, states: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            states: h_0 … h_{L-1}, each [B, n, D]; or one tensor, which then stands for all L (the start of
                the iteration, where every state is the token's embedding).
            cos, sin: rotary table of the positions, [B or 1, n, d].

        Returns:
            keys and values, each [k, B, G, n, d].
        """
        rows, positions = states[0].shape[:2]
        h_NLD = torch.stack(states, dim=2).flatten(0, 1)
        unit_NLD = unit(h_NLD, self.eps).expand(-1, self.layers, -1)
        keys, values = self.key(unit_NLD), self.value(unit_NLD)
        keys = keys.unflatten(1, (rows, positions))
        values = values.unflatten(1, (rows, positions))
        keys = rotate(keys, cos[None, :, :, None], sin[None, :, :, None])
        return keys.transpose(2, 3), values.transpose(2, 3)

    def channel(
        self,
        index: int,
        units: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        missing_BWD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, W, d] of one channel from the first states over their RMS, each [B, W, D].

        missing_BWD stands in for deeper layers' states, over its RMS; without it they are left out.
        """
        rows = units[0].shape[0]
        unit_NlD = torch.stack(list(units), dim=2).flatten(0, 1)
        missing_ND = None if missing_BWD is None else missing_BWD.flatten(0, 1)
        key, value = (
            branch(unit_NlD, index, missing_ND)[0].unflatten(0, (rows, -1))
            for branch in (self.key, self.value)
        )
        return rotate(key, cos[:, :, None], sin[:, :, None]).transpose(1, 2), value.transpose(1, 2)


def unit(h: Tensor, eps: float) -> Tensor:
    """States over their RMS: the part of the source norm that keys and values share."""
    h_wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return (h_wide * torch.rsqrt(h_wide.square().mean(-1, keepdim=True) + eps)).to(h.dtype)


def initial_router_bias(config: WhiteMatterConfig) -> Tensor:
    """The static mixing weights [k*L] that routers start from (paper §3.1, Router initialization)."""
    layers, channels = config.num_hidden_layers, config.num_kv_channels
    kind = config.router_init
    if kind == "auto":
        # Without feedback a channel starts as its own layer's state, which "cyclic" is at k = L.
        shifted = channels == layers and config.feedback
        kind = "top" if channels == 1 else "shifted" if shifted else "cyclic"
    # On the CPU by name: models are also built inside a meta-device context.
    bias_kL = torch.zeros(channels, layers, device="cpu")
    for source in range(layers):
        if kind == "cyclic":
            bias_kL[source % channels, source] = 1
    for channel in range(channels):
        if kind == "top":
            bias_kL[channel, layers - 1] = 1
        elif kind == "shifted":
            bias_kL[channel, min(channel + 1, layers - 1)] = 1
    return bias_kL.flatten()
