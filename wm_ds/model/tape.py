"""The pool's buffer as seen by autograd: written in place forward, restored step by step backward.

Plain autograd through the passes would keep a concatenated copy of the pool for each step. Here one buffer is
written in place, and a scalar `token` is threaded through the steps as the only link that autograd sees
between them:

    token = begin(x, dummy)
    for each step:   x = read(token), K, V = read_channel(token) per layer  ->  layers, pool
                     token = write(token, entries, h)
    hidden = finish(token)

`write` keeps the entries that it overwrites. Its backward hands out the gradient that later readers left at
those entries and puts the old ones back, so when a step's own backward runs (and, under checkpointing,
recomputes the step from the buffer) the pool is again what it was when the step ran. `write`'s backward
waits for the following step's `read` through the token, which makes the order of steps in backward the exact
reverse. The token has neither value nor gradient: autograd waits for an edge also where None flows back
along it. Kept per gradient pass: 2·k·G·d numbers a token.

Shapes: B rows, W workspace positions, n positions of a step, D width, k channels, G KV heads, d head width,
M = 1 + P + W slots of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shard import ALL, Shard
from .work import Update


class Computed(NamedTuple):
    """What an update makes: pool entries [k, B, G, n, d] and final states [B, n, D]; None if not needed."""

    keys: Tensor | None
    values: Tensor | None
    h_BnD: Tensor | None

    def beside(self, tape: Tape) -> list[tuple[Tensor, Tensor]]:
        """The tape's keys with the new ones, its values with the new ones; nothing if there are none."""
        if self.keys is None or self.values is None:
            return []
        return [(tape.keys, self.keys), (tape.values, self.values)]


@dataclass(eq=False)
class Tape:
    """Buffers of one forward.

    Attributes:
        keys, values: the pool, [k, B, G, M, d], in compute dtype.
        x_BWD: embeddings of the workspace, without gradient.
        hidden_BWD: outputs of the last layer, filled by the last update of each position; where the states
            of all layers are kept, they lie before it in the last dimension.
        offset: slot of workspace position 0, which is 1 + P.
        shard: this rank's part of the row: x_BWD and hidden_BWD are its positions, the pool its heads.
    """

    keys: Tensor
    values: Tensor
    x_BWD: Tensor
    hidden_BWD: Tensor
    offset: int
    shard: Shard = ALL
    grad_keys: Tensor | None = None
    grad_values: Tensor | None = None
    grad_x_BWD: Tensor | None = None
    grad_hidden_BWD: Tensor | None = None

    def rows(self, index: Tensor) -> Tape:
        """A copy of those rows for which the bool mask `index` [B] is true; not for a backward."""
        keys, values, x_BWD, hidden_BWD = self.keys, self.values, self.x_BWD, self.hidden_BWD
        return Tape(
            keys[:, index], values[:, index], x_BWD[index], hidden_BWD[index], self.offset, self.shard
        )

    def entries(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the workspace [k, B, G, W, d], aliases of the buffers."""
        return self.keys[:, :, :, self.offset :], self.values[:, :, :, self.offset :]

    def slots(self, positions: range) -> slice:
        """The buffer's slots of workspace positions."""
        return slice(self.offset + positions.start, self.offset + positions.stop, positions.step)

    def columns(self, positions: range) -> slice:
        """Workspace positions as a slice of a [B, W, …] tensor, those of this rank's part."""
        return columns(self.shard.local(positions, self.x_BWD.shape[1]))

    def start_backward(self, grad_hidden_BWD: Tensor) -> None:
        """Allocates the accumulators; gradients are summed over steps in at least float32."""
        if self.grad_hidden_BWD is not None:
            raise RuntimeError(
                "the passes were back-propagated a second time, but the first time consumed their buffer: "
                "run the forward again (retain_graph does not apply here)"
            )
        wide = torch.promote_types(self.keys.dtype, torch.float32)
        self.grad_keys = torch.zeros_like(self.keys, dtype=wide)
        self.grad_values = torch.zeros_like(self.values, dtype=wide)
        self.grad_x_BWD = torch.zeros_like(
            self.x_BWD, dtype=torch.promote_types(self.x_BWD.dtype, torch.float32)
        )
        self.grad_hidden_BWD = grad_hidden_BWD


def columns(positions: range) -> slice:
    """Positions as a slice of a [B, W, …] tensor."""
    return slice(positions.start, positions.stop, positions.step)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tape: Tape,
        x_BWD: Tensor,
        dummy_key: Tensor,
        dummy_value: Tensor,
        past_keys: Tensor | None,
        past_values: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        ctx.dtypes = (x_BWD.dtype, dummy_key.dtype, None if past_keys is None else past_keys.dtype)
        return x_BWD.new_empty(())

    @staticmethod
    def backward(ctx: Any, _token: Tensor | None) -> tuple:
        tape, (x_dtype, dummy_dtype, past_dtype) = ctx.tape, ctx.dtypes
        sides = (tape.grad_keys, tape.grad_values)
        dummies = [grad[:, :, :, 0].sum(1).to(dummy_dtype) for grad in sides]
        pasts = [None, None]
        if past_dtype is not None:
            pasts = [grad[:, :, :, 1 : tape.offset].to(past_dtype, copy=True) for grad in sides]
        grad_x = tape.grad_x_BWD.to(x_dtype)
        tape.grad_keys = tape.grad_values = tape.grad_x_BWD = None
        return None, grad_x, *dummies, *pasts


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, positions: range, token: Tensor) -> Tensor:
        ctx.tape, ctx.positions = tape, positions
        return tape.x_BWD.data[:, tape.columns(positions)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple:
        ctx.tape.grad_x_BWD[:, ctx.tape.columns(ctx.positions)] += grad_x
        return None, None, None


class _ReadChannel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, channel: int, lengths: list[int], token: Tensor) -> tuple[Tensor, ...]:
        ctx.tape, ctx.channel, ctx.lengths = tape, channel, lengths
        ctx.set_materialize_grads(False)
        # `.data` gives the aliases version counters of their own: later writes to the buffer must not
        # invalidate what attention saved, because the buffer is restored before its backward reads it.
        keys, values = tape.keys.data[channel], tape.values.data[channel]
        return *(keys[:, :, :m] for m in lengths), *(values[:, :, :m] for m in lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        tape, runs = ctx.tape, len(ctx.lengths)
        for index, grad in enumerate(grads):
            if grad is not None:
                buffer = tape.grad_keys if index < runs else tape.grad_values
                buffer[ctx.channel, :, :, : ctx.lengths[index % runs]] += grad
        return None, None, None, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tape: Tape,
        update: Update,
        token: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        h_BnD: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # no zeros for the token
        ctx.tape, ctx.positions, ctx.relaxation = tape, update.positions, update.relaxation
        ctx.has_pool, ctx.h_dtype = keys is not None, None if h_BnD is None else h_BnD.dtype
        if keys is not None and values is not None:
            ctx.dtypes = (keys.dtype, values.dtype)
            if update.keeps_old:
                slots = tape.slots(update.positions)
                ctx.save_for_backward(tape.keys[:, :, :, slots].clone(), tape.values[:, :, :, slots].clone())
        store(tape, update, Computed(keys, values, h_BnD))
        return token.new_empty(())

    @staticmethod
    def backward(ctx: Any, _token: Tensor | None) -> tuple:
        tape, slots = ctx.tape, ctx.tape.slots(ctx.positions)
        keys = values = h_BnD = None
        if ctx.has_pool:
            keys = _take(tape.grad_keys, slots, ctx.relaxation, ctx.dtypes[0])
            values = _take(tape.grad_values, slots, ctx.relaxation, ctx.dtypes[1])
            if ctx.saved_tensors:
                tape.keys[:, :, :, slots], tape.values[:, :, :, slots] = ctx.saved_tensors
        if ctx.h_dtype is not None:
            h_BnD = tape.grad_hidden_BWD[:, tape.columns(ctx.positions)].to(ctx.h_dtype)
        return None, None, None, keys, values, h_BnD


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, token: Tensor) -> Tensor:
        ctx.tape = tape
        return tape.hidden_BWD.data

    @staticmethod
    def backward(ctx: Any, grad_hidden_BWD: Tensor) -> tuple:
        ctx.tape.start_backward(grad_hidden_BWD)
        return None, None


class _FinishWithEntries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.tape = tape
        # Copies: backward puts older entries back into the buffer.
        keys, values = (buffer.clone() for buffer in tape.entries())
        return tape.hidden_BWD.data, keys, values

    @staticmethod
    def backward(ctx: Any, grad_hidden_BWD: Tensor, grad_keys: Tensor, grad_values: Tensor) -> tuple:
        tape = ctx.tape
        tape.start_backward(grad_hidden_BWD)
        tape.grad_keys[:, :, :, tape.offset :] = grad_keys
        tape.grad_values[:, :, :, tape.offset :] = grad_values
        return None, None


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple:
        return grad_x, None


def store(tape: Tape, update: Update, computed: Computed) -> None:
    """Rewrites the entries of the update's positions and, where there are any, stores their final states."""
    for buffer, new in computed.beside(tape):
        overwrite(buffer, tape.slots(update.positions), new, update.relaxation)
    if computed.h_BnD is not None:
        tape.hidden_BWD[:, tape.columns(update.positions)] = computed.h_BnD


def overwrite(buffer: Tensor, slots: slice, entries: Tensor, relaxation: float) -> None:
    """Writes pool entries [k, B, G, n, d] in place: old + relaxation * (entries - old)."""
    if relaxation == 1.0:
        buffer[:, :, :, slots] = entries
    else:
        buffer[:, :, :, slots] += relaxation * (entries.to(buffer.dtype) - buffer[:, :, :, slots])


def _take(grad: Tensor, slots: slice, relaxation: float, dtype: torch.dtype) -> Tensor:
    """Moves the written entries' share of a gradient out of the accumulator; the rest is the old ones'."""
    part = grad[:, :, :, slots]
    if relaxation == 1.0:
        taken = part.to(dtype, copy=True)
        part.zero_()
        return taken
    taken = (part * relaxation).to(dtype)
    part *= 1.0 - relaxation
    return taken


def begin(
    tape: Tape,
    x_BWD: Tensor,
    dummy_key: Tensor,
    dummy_value: Tensor,
    past_keys: Tensor | None,
    past_values: Tensor | None,
) -> Tensor:
    """Starts the chain; its backward returns the gradients of embeddings, dummy and cached tokens."""
    return _Begin.apply(tape, x_BWD, dummy_key, dummy_value, past_keys, past_values)


def read(tape: Tape, positions: range, token: Tensor) -> Tensor:
    """The embeddings [B, n, D] of a step at `positions`."""
    return _Read.apply(tape, positions, token)


def read_channel(
    tape: Tape, channel: int, lengths: list[int], token: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """What one layer reads: a channel's key prefixes [B, G, m, d] for every m in `lengths`, and its values'.

    All alias the buffer. One call for each layer, also where layers share a channel: each call's backward
    adds to the accumulators at once; a shared one would hold all prefixes' gradients till the last layer.
    """
    flat = _ReadChannel.apply(tape, channel, lengths, token)
    return list(flat[: len(lengths)]), list(flat[len(lengths) :])


def write(tape: Tape, update: Update, computed: Computed, token: Tensor, *, on_host: bool = False) -> Tensor:
    """`store`, with gradient; keeps the entries that it overwrites if the update says so.

    on_host: keep them in the host's memory.
    """
    if not on_host:
        return _Write.apply(tape, update, token, *computed)
    with torch.autograd.graph.save_on_cpu(pin_memory=tape.keys.is_cuda):
        return _Write.apply(tape, update, token, *computed)


def finish(tape: Tape, token: Tensor) -> Tensor:
    """Ends the chain: the final states [B, W, D], with gradient."""
    return _Finish.apply(tape, token)


def finish_with_entries(tape: Tape, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`finish`, and the workspace's pool entries, keys and values [k, B, G, W, d], with gradient."""
    return _FinishWithEntries.apply(tape, token)


def ordered(x: Tensor, token: Tensor) -> Tensor:
    """x itself, made to depend on the token, for a step that reads the buffer outside autograd.

    Its backward runs once x's gradient is known. Where computing that gradient needs recomputed activations,
    the recomputation is thereby finished before the previous step's `write` puts older entries back. Any
    input of the step will do whose gradient is cheap: nobody uses it.
    """
    return _Ordered.apply(x, token)
