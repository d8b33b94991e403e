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

from torch import Tensor

from whitematter_vllm.attention import PagedAttention
from whitematter_vllm.layers import Block

# States [N, L or 1, D], positions [N] and which channels, to keys and values [N, channels, G, d].
PoolFunction = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]


class Entries(NamedTuple):
    """Keys and values, [N, k, G, d] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Stack:
    """Layers, their pool, the pages of its channels, and the learned dummies [k, G, d] (None: zeros)."""

    layers: Sequence[Block]
    pool: PoolFunction
    channels: Sequence[PagedAttention]
    dummy_key: Tensor | None = None
    dummy_value: Tensor | None = None

    def evaluate(self, x_ND: Tensor, position_N: Tensor) -> Tensor:
        """All layers once, and the tokens' entries written: the output of the last layer."""
        out_ND, entries = self.run(x_ND, position_N)
        self.write(entries)
        return out_ND

    def run(self, x_ND: Tensor, position_N: Tensor) -> tuple[Tensor, Entries]:
        """All layers once: the output of the last one, and the tokens' new entries."""
        out_ND, state_NLD = self._layers(x_ND, position_N, None)
        return out_ND, Entries(*self.pool(state_NLD, position_N, slice(None)))

    def start(self, x_ND: Tensor, position_N: Tensor) -> Entries:
        """The entries as if every layer's state were the token's embedding."""
        return Entries(*self.pool(x_ND[:, None], position_N, slice(None)))

    def start_layerwise(self, x_ND: Tensor, position_N: Tensor, newest: bool) -> Entries:
        """One sweep over the tokens at hand: a layer reads its channel pooled from the states so far.

        newest: the newest state stands in for those of the layers to come; otherwise the embedding does.
        """
        _, state_NLD = self._layers(x_ND, position_N, newest)
        return Entries(*self.pool(state_NLD, position_N, slice(None)))

    def write(self, entries: Entries) -> None:
        """The tokens' entries, less the dummies, into their pages."""
        keys, values = entries
        if self.dummy_key is not None:
            keys, values = keys - self.dummy_key, values - self.dummy_value
        for index, paged in enumerate(self.channels):
            paged.write(keys[:, index], values[:, index])

    def _layers(
        self, x_ND: Tensor, position_N: Tensor, stand_in_newest: bool | None
    ) -> tuple[Tensor, Tensor]:
        """The output of the last layer, and what entered each of them; with a stand-in, channels are made on
        the way, one for each layer just before it reads."""
        # Nothing lies before the first token of a text: backends leave what it reads undefined.
        first_N11 = (position_N == 0)[:, None, None]
        change_ND, entered_ND = x_ND, None
        state_NLD = x_ND.new_empty(len(x_ND), len(self.layers), x_ND.shape[1])
        if stand_in_newest is False:
            state_NLD[:] = x_ND[:, None]
        for index, layer in enumerate(self.layers):
            channel = index % len(self.channels)
            normed_ND, entered_ND = layer.enter(change_ND, entered_ND)
            if stand_in_newest:
                state_NLD[:, index:] = entered_ND[:, None]
            else:
                state_NLD[:, index] = entered_ND
            if stand_in_newest is not None:
                self._write_one(channel, state_NLD, position_N)
            read_NHd = self._read(channel, layer.self_attn.queries(normed_ND, position_N), first_N11)
            change_ND, entered_ND = layer.leave(read_NHd, entered_ND)
        return change_ND + entered_ND, state_NLD

    def _read(self, channel: int, q_NHd: Tensor, first_N11: Tensor) -> Tensor:
        read_NHd = self.channels[channel].read(q_NHd).masked_fill(first_N11, 0)
        if self.dummy_value is None:
            return read_NHd
        kv_heads = self.dummy_value.shape[1]
        return (read_NHd.unflatten(1, (kv_heads, -1)) + self.dummy_value[channel, :, None]).flatten(1, 2)

    def _write_one(self, channel: int, state_NLD: Tensor, position_N: Tensor) -> None:
        keys, values = self.pool(state_NLD, position_N, slice(channel, channel + 1))
        if self.dummy_key is not None:
            keys, values = keys - self.dummy_key[channel], values - self.dummy_value[channel]
        self.channels[channel].write(keys[:, 0], values[:, 0])
