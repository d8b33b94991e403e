"""The LCKV sandwich, the paper's baseline with feedback (§4.2): layers in the middle that share one KV.

w // 2 warm-up layers at the bottom and the rest of the w at the top are Qwen3's, with K and V of their own;
attention in them is ordinary and causal, and they run once. The condensed layers between them all read one KV
per token, which the top one of them makes from its own input: input norm, K and V projection, key norm,
rotation. A token's condensed KV exists only after the token's pass, so a query reads earlier tokens' alone,
and in slot 0 a KV of zeros, which is not learned and is all that a first token sees. The condensed layers are
iterated like WhiteMatter's: their pool has one channel, and the iteration starts from the state that enters
the first of them.

Shapes: B rows, W positions, P cached tokens, D width, G KV heads, d head width, n positions of a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .attention import Slots, compute_dtype
from .blocks import PoolAttention, RMSNorm, WhiteMatterDecoderLayer, rotate
from .configuration import LCKVConfig
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .schedule import Converged, Schedule
from .stack import PassOptions, PassResult, Stack, Workspace
from .visibility import additive_mask


class OwnKVAttention(PoolAttention):
    """PoolAttention with K and V projections and a key norm: all of Qwen3's attention."""

    def __init__(self, config: LCKVConfig) -> None:
        super().__init__(config)
        width = config.num_key_value_heads * config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def entries(self, x_BnD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated, normed keys and raw values, each [B, G, n, d]."""
        key = self.k_norm(self.k_proj(x_BnD).unflatten(-1, (-1, self.head_dim)))
        value = self.v_proj(x_BnD).unflatten(-1, (-1, self.head_dim))
        return rotate(key, cos[:, :, None], sin[:, :, None]).transpose(1, 2), value.transpose(1, 2)


class OwnKVLayer(WhiteMatterDecoderLayer):
    """A Qwen3 block: a warm-up layer, or the condensed layer that makes the KV of all of them."""

    def __init__(self, config: LCKVConfig) -> None:
        super().__init__(config)
        self.self_attn = OwnKVAttention(config)


class CondensedKV:
    """The pool of the condensed layers: one channel, from the state that enters the top one."""

    def __init__(self, layer: OwnKVLayer) -> None:
        self.layer = layer

    def __call__(self, states: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, B, G, n, d]; the arguments are those of `pool.Pool`."""
        normed_BnD = self.layer.input_layernorm(states[-1])
        key, value = self.layer.self_attn.entries(normed_BnD, cos, sin)
        return key[None], value[None]


class LCKVModel(WhiteMatterModel):
    """Embeddings, bottom warm-up layers, condensed layers' fixed point, top warm-up layers, final norm."""

    config_class = LCKVConfig

    def _build(self, config: LCKVConfig) -> None:
        condensed = config.condensed
        self.layers = nn.ModuleList(
            WhiteMatterDecoderLayer(config) if index in condensed[:-1] else OwnKVLayer(config)
            for index in range(config.num_hidden_layers)
        )
        self.dummy_key = None

    def _evaluate(
        self, workspace: Workspace, schedule: Schedule | Converged, options: PassOptions
    ) -> PassResult:
        condensed, x_BWD = self.config.condensed, workspace.x_BWD
        layers = list(self.layers)
        bottom, middle, top = (
            layers[: condensed.start],
            layers[condensed.start : condensed.stop],
            layers[condensed.stop :],
        )
        pasts: tuple = (None, None, None)
        if workspace.past is not None:
            sizes = [len(bottom), 1, len(top)]
            pasts = tuple(zip(*(entries.split(sizes) for entries in workspace.past)))
        h_BWD, below, states = self._warm_up(bottom, replace(workspace, past=pasts[0]), options)
        zero = x_BWD.new_zeros(1, self.config.num_key_value_heads, self.config.head_dim)
        stack = Stack(middle, CondensedKV(middle[-1]), zero, zero)
        entering = replace(workspace, x_BWD=h_BWD, past=pasts[1])
        result = self._iterate(stack, entering, schedule, options)
        leaving = replace(workspace, x_BWD=result.hidden_BWD, past=pasts[2])
        h_BWD, above, late_states = self._warm_up(top, leaving, options)
        keys, values = (
            torch.cat([part.to(shared.dtype) for part in (lower, shared, upper)])
            for lower, shared, upper in zip(below, (result.keys, result.values), above)
        )
        kept = (*states, *result.states, *late_states) if options.keep_states else ()
        return PassResult(h_BWD, keys, values, result.residuals, kept)

    def _warm_up(
        self, layers: list[OwnKVLayer], workspace: Workspace, options: PassOptions
    ) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
        """Layers with their own KV, once: the state, the new keys and values [layers, B, G, W, d], and the
        states that entered each layer."""
        h_BWD, cos, sin, past = workspace.x_BWD, workspace.cos, workspace.sin, workspace.past
        width, dtype = h_BWD.shape[1], compute_dtype(h_BWD)
        shape = (h_BWD.shape[0], self.config.num_key_value_heads, width, self.config.head_dim)
        mask = additive_mask(workspace.visibility, range(width), dtype, h_BWD.device, own=True)
        slots = Slots([width], [mask.shape[-1]], [mask])

        def run(index: int, h_BWD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            layer = layers[index]
            entries = layer.self_attn.entries(layer.input_layernorm(h_BWD), cos, sin)
            key, value = (new.to(dtype) for new in entries)
            seen = [key, value]
            if past is not None:
                seen = [
                    torch.cat((old[index].to(dtype), new), dim=2) for old, new in zip(past, seen, strict=True)
                ]
            return layer(h_BWD, slots, cos, sin, [seen[0]], [seen[1]]), key, value

        empty = h_BWD.new_zeros(0, *shape, dtype=dtype)
        keys, values, states = [], [], []
        for index in range(len(layers)):
            states.append(h_BWD)
            if options.recompute != "none" and torch.is_grad_enabled():
                h_BWD, key, value = checkpoint(
                    run, index, h_BWD, use_reentrant=False, preserve_rng_state=False
                )
            else:
                h_BWD, key, value = run(index, h_BWD)
            keys.append(key)
            values.append(value)
        new = (torch.stack(keys), torch.stack(values)) if layers else (empty, empty)
        return h_BWD, new, states


class LCKVForCausalLM(WhiteMatterForCausalLM):
    """The LCKV sandwich with a language-model head."""

    config_class = LCKVConfig
    base_class = LCKVModel


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LCKVConfig.model_type] = LCKVForCausalLM.__name__  # see modeling.py

__all__ = ["LCKVForCausalLM", "LCKVModel"]
