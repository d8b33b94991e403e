"""The layers that share a pool: one evaluation of all of them, and where its entries go.

A stack works on the tokens that vLLM's forward context describes at the moment (step.py): all of an engine's
step, or a batch of some. It may overwrite the embeddings that it is given.

Shapes: N tokens, L layers of the stack, D width, k channels, H query heads and G KV heads of this rank, d the
width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whitematter_vllm.attention import PagedAttention
from whitematter_vllm.layers import Block, unit
from whitematter_vllm.pool import Pool

# States [N, L or 1, D] and positions [N] to keys and values [k, N, G, d].
PoolFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Entries(NamedTuple):
    """Keys and values, [k, N, G, d] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Stack:
    """Layers, their pool, the pages of its channels, and the learned dummies [k, G, d] (None: zeros).

    `mixer` is the pool again, where it can make single channels; a layerwise start needs that.
    """

    layers: Sequence[Block]
    pool: PoolFunction
    channels: Sequence[PagedAttention]
    dummy_key: Tensor | None = None
    dummy_value: Tensor | None = None
    mixer: Pool | None = None

    def evaluate(self, x_ND: Tensor, position_N: Tensor) -> Tensor:
        """All layers once, and the tokens' entries written: the output of the last layer."""
        out_ND, entries = self.run(x_ND, position_N)
        self.write(entries)
        return out_ND

    def run(self, x_ND: Tensor, position_N: Tensor) -> tuple[Tensor, Entries]:
        """All layers once: the output of the last one, and the tokens' new entries."""
        change_ND, entered_ND, first_N11 = x_ND, None, _first(position_N)
        state_NLD = x_ND.new_empty(len(x_ND), len(self.layers), x_ND.shape[1])
        for index, layer in enumerate(self.layers):
            normed_ND, entered_ND = layer.enter(change_ND, entered_ND)
            state_NLD[:, index] = entered_ND
            change_ND, entered_ND = self._rest(index, normed_ND, entered_ND, position_N, first_N11)
        return change_ND + entered_ND, Entries(*self.pool(state_NLD, position_N))

    def start(self, x_ND: Tensor, position_N: Tensor) -> Entries:
        """The entries as if every layer's state were the token's embedding."""
        return Entries(*self.pool(x_ND[:, None], position_N))

    def start_layerwise(self, x_ND: Tensor, position_N: Tensor, newest: bool) -> Entries:
        """The entries after one sweep in which a layer reads its channel pooled from the states so far.

        The channel is made and written just before the layer reads it, for all tokens at hand. newest: the
        newest state stands in for those of the layers to come; otherwise the embedding does.
        """
        if self.mixer is None:
            raise ValueError("a layerwise start needs a pool of several channels, which this model has not")
        change_ND, entered_ND, first_N11 = x_ND, None, _first(position_N)
        state_NLD = x_ND.new_empty(len(x_ND), len(self.layers), x_ND.shape[1])
        unit_NLD = torch.empty_like(state_NLD)
        for index, layer in enumerate(self.layers):
            channel = index % len(self.channels)
            normed_ND, entered_ND = layer.enter(change_ND, entered_ND)
            state_NLD[:, index] = entered_ND
            unit_NLD[:, index] = unit(entered_ND, self.mixer.eps)
            missing_ND = unit_NLD[:, index if newest else 0]
            keys, values = self.mixer.channel(channel, unit_NLD[:, : index + 1], missing_ND, position_N)
            if self.dummy_key is not None:
                keys, values = keys - self.dummy_key[channel], values - self.dummy_value[channel]
            self.channels[channel].write(keys[0], values[0])
            if index < len(self.layers) - 1:  # nothing reads the output of the last one
                change_ND, entered_ND = self._rest(index, normed_ND, entered_ND, position_N, first_N11)
        return Entries(*self.pool(state_NLD, position_N))

    def write(self, entries: Entries) -> None:
        """The tokens' entries, less the dummies, into their pages."""
        keys, values = entries
        if self.dummy_key is not None:
            keys, values = keys - self.dummy_key[:, None], values - self.dummy_value[:, None]
        for index, paged in enumerate(self.channels):
            paged.write(keys[index], values[index])

    def _rest(
        self, index: int, normed_ND: Tensor, entered_ND: Tensor, position_N: Tensor, first_N11: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A layer from its normed input on: its last change, and the state to which that is to be added."""
        layer, channel = self.layers[index], index % len(self.channels)
        read_NHd = self.channels[channel].read(layer.self_attn.queries(normed_ND, position_N))
        read_NHd = read_NHd.masked_fill(first_N11, 0)
        if self.dummy_value is not None:
            by_kv_head = read_NHd.unflatten(1, (self.dummy_value.shape[1], -1))
            read_NHd = (by_kv_head + self.dummy_value[channel, :, None]).flatten(1, 2)
        return layer.leave(read_NHd, entered_ND)


def _first(position_N: Tensor) -> Tensor:
    """The first tokens of texts [N, 1, 1]: backends leave undefined what these read."""
    return (position_N == 0)[:, None, None]
