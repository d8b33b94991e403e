"""The cross-layer KV pool: the states of all L layers at a token become its k KV channels (paper §3.1).

Shapes: N tokens (rows x positions), B rows, n positions, L source layers, S = L' router sources, D width,
k channels, G KV heads, d head width. The key and the value branch have parameters of their own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import rms_norm, rotate
from .configuration import WhiteMatterConfig
from .tape import ordered


class PoolBranch(nn.Module):
    """States to channels for one of keys and values.

    Parameters: source_norm [L, D], router_weight [k*L, S*D], router_bias [k*L], channel_norm [k, D],
    proj [k, G*d, D], and for keys head_norm [k, d].
    """

    def __init__(self, config: WhiteMatterConfig, normalise_heads: bool) -> None:
        super().__init__()
        layers, channels, width = config.num_hidden_layers, config.num_kv_channels, config.hidden_size
        self.eps = config.rms_norm_eps
        self.shape = (channels, layers)
        self.head_dim = config.head_dim
        self.sources = slice(config.router_sources[0], layers, config.router_stride)
        self.source_norm = nn.Parameter(torch.ones(layers, width))
        self.router_weight = nn.Parameter(torch.zeros(channels * layers, len(config.router_sources) * width))
        self.router_bias = nn.Parameter(torch.zeros(channels * layers))
        self.channel_norm = nn.Parameter(torch.ones(channels, width))
        self.proj = nn.Parameter(torch.zeros(channels, config.num_key_value_heads * config.head_dim, width))
        self.head_norm = nn.Parameter(torch.ones(channels, config.head_dim)) if normalise_heads else None

    def mixing_weights(self, hat_NLD: Tensor) -> Tensor:
        """alpha [N, k, L]: signed, from the normed states of every p-th layer counted from the top."""
        xi_NSD = hat_NLD[:, self.sources].flatten(1)
        return F.linear(xi_NSD, self.router_weight, self.router_bias).unflatten(1, self.shape)

    def forward(self, unit_NLD: Tensor, token: Tensor | None) -> Tensor:
        """unit_NLD: states over their RMS. Returns [k, N, G, d]; `token` orders backward passes (tape.py)."""
        hat_NLD = (unit_NLD * self.source_norm).to(unit_NLD.dtype)
        alpha_NkL = self.mixing_weights(hat_NLD)
        if token is not None:
            alpha_NkL = ordered(alpha_NkL, token)
        mix_NkD = torch.bmm(alpha_NkL, hat_NLD.to(alpha_NkL.dtype))
        normed_kND = rms_norm(mix_NkD, self.channel_norm, self.eps).transpose(0, 1)
        out_kNGd = torch.bmm(normed_kND, self.proj.transpose(1, 2).to(normed_kND.dtype)).unflatten(
            -1, (-1, self.head_dim)
        )
        if self.head_norm is None:
            return out_kNGd
        return rms_norm(out_kNGd, self.head_norm[:, None, None], self.eps)


class Pool(nn.Module):
    """P = Pool(H): rotated, normed keys and raw values of k channels for the tokens of a step."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.layers = config.num_hidden_layers
        self.key = PoolBranch(config, normalise_heads=True)
        self.value = PoolBranch(config, normalise_heads=False)

    def forward(
        self, states: list[Tensor], cos: Tensor, sin: Tensor, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            states: h_0 … h_{L-1}, each [B, n, D]; or one tensor, which then stands for all L (the start of
                the iteration, where every state is the token's embedding).
            cos, sin: rotary table of the positions, [B or 1, n, d].
            token: orders this evaluation among the steps' backward passes, see tape.py.

        Returns:
            keys and values, each [k, B, G, n, d].
        """
        rows, positions = states[0].shape[:2]
        h_NLD = torch.stack(states, dim=2).flatten(0, 1)
        unit_NLD = self._unit(h_NLD).expand(-1, self.layers, -1)
        keys, values = self.key(unit_NLD, token), self.value(unit_NLD, token)
        keys = keys.unflatten(1, (rows, positions))
        values = values.unflatten(1, (rows, positions))
        keys = rotate(keys, cos[None, :, :, None], sin[None, :, :, None])
        return keys.transpose(2, 3), values.transpose(2, 3)

    def _unit(self, h_NLD: Tensor) -> Tensor:
        """States over their RMS: the part of the source norm that both branches share."""
        h_wide = h_NLD.to(torch.promote_types(h_NLD.dtype, torch.float32))
        return (h_wide * torch.rsqrt(h_wide.square().mean(-1, keepdim=True) + self.eps)).to(h_NLD.dtype)


def initial_router_bias(config: WhiteMatterConfig) -> Tensor:
    """The static mixing weights [k*L] that routers start from (paper §3.1, Router initialization)."""
    layers, channels = config.num_hidden_layers, config.num_kv_channels
    kind = config.router_init
    if kind == "auto":
        kind = "top" if channels == 1 else "shifted" if channels == layers else "cyclic"
    bias_kL = torch.zeros(channels, layers)
    if kind == "top":
        bias_kL[:, layers - 1] = 1
    elif kind == "cyclic":
        bias_kL[torch.arange(layers) % channels, torch.arange(layers)] = 1
    else:
        source = torch.clamp(torch.arange(channels) + 1, max=layers - 1)
        bias_kL[torch.arange(channels), source] = 1
    return bias_kL.flatten()
