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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .blocks import OwnKVLayer, WhiteMatterDecoderLayer
from .configuration import LCKVConfig
from .modeling import WhiteMatterForCausalLM, WhiteMatterModel
from .once import run_once
from .schedule import Converged, Schedule
from .stack import PassOptions, PassResult, Stack, Workspace


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
        below = _warm_up(bottom, replace(workspace, past=pasts[0]), options)
        zero = x_BWD.new_zeros(1, self.config.num_key_value_heads, self.config.head_dim)
        stack = Stack(middle, CondensedKV(middle[-1]), zero, zero)
        entering = replace(workspace, x_BWD=below.hidden_BWD, past=pasts[1])
        result = self._iterate(stack, entering, schedule, options)
        leaving = replace(workspace, x_BWD=result.hidden_BWD, past=pasts[2])
        above = _warm_up(top, leaving, options)
        parts = (below, result, above)
        keys, values = (
            torch.cat([side.to(result.keys.dtype) for side in sides if len(side)])
            for sides in zip(*((part.keys, part.values) for part in parts))
        )
        kept = tuple(state for part in parts for state in part.states) if options.keep_states else ()
        return PassResult(above.hidden_BWD, keys, values, result.residuals, kept)


def _warm_up(layers: list[OwnKVLayer], workspace: Workspace, options: PassOptions) -> PassResult:
    """Layers with their own KV."""
    return run_once(layers, [(index,) for index in range(len(layers))], workspace, options)


class LCKVForCausalLM(WhiteMatterForCausalLM):
    """The LCKV sandwich with a language-model head."""

    config_class = LCKVConfig
    base_class = LCKVModel


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LCKVConfig.model_type] = LCKVForCausalLM.__name__  # see modeling.py

__all__ = ["LCKVForCausalLM", "LCKVModel"]
