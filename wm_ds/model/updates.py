"""Carrying out the updates of a plan on a tape: layers and pool, with gradient where the plan says so.

Shapes: B rows, W workspace positions, n positions of an update, L layers, D width, k channels, G KV heads,
d head width, M = 1 + P + W slots of the pool's buffer.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .attention import MAX_RUNS, MAX_RUNS_WITH_GRAD, Slots, compute_dtype, slots_of, takes_flex
from .layerwise import LayerwiseView
from .spans import span
from .stack import Channel, PassOptions, Queries, Stack, States, View, Workspace, run_layers
from .tape import Computed, Tape, ordered, read, read_channel, store
from .work import Step, Update, start_of

# Under "group+layer" the pool of a step is computed in up to so many pieces of at least so many positions,
# and the pool of a sweep, which is of all positions, in as many under every policy.
POOL_PIECES = 8
MIN_POSITIONS_PER_PIECE = 32


def empty_tape(stack: Stack, workspace: Workspace, options: PassOptions) -> Tape:
    """The buffers before the first step: dummy and cached tokens in place, the rest zero."""
    x_BWD, past, shard = workspace.x_BWD, workspace.past, options.shard
    rows, width = x_BWD.shape[0], x_BWD.shape[1] * shard.ranks
    cached = 0 if past is None else past[0].shape[3]
    channels, heads, head_dim = stack.dummy_key.shape
    dtype, buffers = compute_dtype(x_BWD), []
    for dummy, old in zip((stack.dummy_key, stack.dummy_value), past or (None, None)):
        buffer = x_BWD.new_zeros(channels, rows, heads, 1 + cached + width, head_dim, dtype=dtype)
        buffer[:, :, :, 0] = dummy.detach()[:, None]
        if old is not None:
            buffer[:, :, :, 1 : 1 + cached] = old.detach()
        buffers.append(buffer)
    x_BWD = x_BWD.detach()
    hidden_BWD = torch.zeros_like(x_BWD)
    if options.keep_states:
        hidden_BWD = torch.cat([hidden_BWD] * (len(stack.layers) + 1), dim=-1)
    return Tape(buffers[0], buffers[1], x_BWD, hidden_BWD, 1 + cached, shard)


class TapeView(View):
    """The tape's pool at the positions of an update. `token` as in tape.py."""

    def __init__(self, updates: Updates, positions: range, token: Tensor) -> None:
        self.updates, self.positions, self.token = updates, positions, token

    def queries(self) -> Queries:
        """Looked up in what all layers and passes share."""
        return Queries(self.updates.slots(self.positions), *self.updates.table(self.positions))

    def channel(self, index: int, entering: list[Tensor]) -> Channel:
        """Aliases of the buffer."""
        lengths = self.updates.slots(self.positions).lengths
        return Channel(*read_channel(self.updates.tape, index, lengths, self.token))


class Updates:
    """Carries out updates. Masks are built once per set of positions and serve every layer and pass."""

    def __init__(
        self, stack: Stack, workspace: Workspace, tape: Tape, options: PassOptions, with_grad: bool = False
    ) -> None:
        self.stack, self.workspace, self.tape, self.options = stack, workspace, tape, options
        self.max_runs = MAX_RUNS_WITH_GRAD if with_grad else MAX_RUNS
        self.device = workspace.x_BWD.device
        self.no_token = workspace.x_BWD.new_zeros(())
        self.masks: dict[range, Slots] = {}
        self.tables: dict[range, tuple[Tensor, Tensor]] = {}

    def slots(self, positions: range) -> Slots:
        """What queries at `positions` see."""
        if positions not in self.masks:
            visibility = self.workspace.visibility
            blocks = takes_flex(visibility.kernel, self.device, len(positions))
            if self.options.recompute == "group+layer" and not blocks:
                self.masks.clear()  # dense ones are large, and cheap to make again
            slots = slots_of(positions, visibility, self.tape.keys.dtype, self.device, self.max_runs)
            self.masks[positions] = replace(slots, shard=self.options.shard)
        return self.masks[positions]

    def table(self, positions: range) -> tuple[Tensor, Tensor]:
        """The rotary table of some positions: cosines and sines [B or 1, n, d]."""
        if positions not in self.tables:
            if self.options.recompute == "group+layer":
                self.tables.clear()
            columns = self.tape.columns(positions)
            cos, sin = (table[:, columns].contiguous() for table in (self.workspace.cos, self.workspace.sin))
            self.tables[positions] = cos, sin
        return self.tables[positions]

    def step(self, step: Step, token: Tensor | None = None) -> list[tuple[Update, Computed]]:
        """All updates of a step; nothing is written, so that each of them reads the same pool."""
        results = []
        for update in step:
            keys, values, h_BnD = self.run(update, token)
            if keys is not None and values is not None:
                keys, values = self.options.shard.entries(keys, values)
            results.append((update, Computed(keys, values, h_BnD)))
        return results

    def run(self, update: Update, token: Tensor | None = None) -> Computed:
        """One update of this rank's positions."""
        if not update.pool_grad:
            with torch.no_grad():
                return self._compute(update, None)
        if not self.options.by_step or (update.sweeps and not update.states_grad):  # keeps the sweep's states
            return self._compute(update, token)
        runs = 0

        def again(token: Tensor) -> Computed:
            nonlocal runs
            runs += 1
            if runs > 1 and update.remakes_start:
                self._remake_start(update.positions)
            return self._compute(update, token)

        return checkpoint(again, token, use_reentrant=False, preserve_rng_state=False)

    @torch.no_grad()
    def _remake_start(self, positions: range) -> None:
        start = start_of(positions)
        store(self.tape, start, self._compute(start, None))

    def _compute(self, update: Update, token: Tensor | None) -> Computed:
        part = span("start") if update.pass_index is None else span("pass", update.pass_index + 1)
        with part, span("group", update.positions.start):
            return self._computed(update, token)

    def _computed(self, update: Update, token: Tensor | None) -> Computed:
        cos, sin = self.table(update.positions)
        with torch.set_grad_enabled(update.states_grad):
            link = self.no_token if token is None else token
            x_BnD = read(self.tape, update.positions, link)
            states = States([x_BnD], None)
            if update.runs_layers:
                recompute = self.options.by_layer and update.states_grad
                view = self._view(update, link, recompute)
                states = run_layers(self.stack, x_BnD, view, last=update.needs_hidden, recompute=recompute)
            if update.sweeps:
                self.masks.pop(update.positions, None)  # of the whole row, for one step
            # Asked for, the states lie beside the output, in one tensor: the tape then knows nothing of them.
            h_BnD = states.joined() if self.options.keep_states else states.output
        if not update.needs_pool:
            return Computed(None, None, h_BnD)
        if token is not None and not update.states_grad:
            cos = ordered(cos, token)
        return Computed(*self._pool(update, states.entering, cos, sin), h_BnD)

    def _view(self, update: Update, token: Tensor, recompute: bool) -> View:
        """What the layers of an update read."""
        view = TapeView(self, update.positions, token)
        if update.missing is None:
            return view
        mixer = self.stack.mixer
        if mixer is None:
            raise ValueError("start 'layerwise' needs a pool of several channels, which this model has not")
        return LayerwiseView(view, self.tape, token, mixer, update.missing, recompute)

    def _pool(self, update: Update, states: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The pool of an update's states. Where layers are recomputed, too, nothing needs more memory (about
        16 tensors of all L states); it is then computed, and recomputed in backward, piece by piece. So is
        that of a sweep, which is of all positions at once."""
        length, pool = states[0].shape[1], self.stack.pool
        both, with_grad = self.options.recompute == "group+layer", torch.is_grad_enabled()
        pieces = POOL_PIECES ** (update.sweeps + (both and with_grad))
        pieces = max(1, min(pieces, length // MIN_POSITIONS_PER_PIECE))
        kept = update.sweeps and not update.states_grad
        again = with_grad and (self.options.by_step if kept else both and pieces > 1)
        if pieces == 1 and not again:
            with span("pool"):
                return pool(states, cos, sin)

        def piece(cos: Tensor, sin: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
            with span("pool"):
                return pool(list(states), cos, sin)

        cuts = [length * i // pieces for i in range(pieces + 1)]
        keys, values = [], []
        for first, last in pairwise(cuts):
            inputs = [x[:, first:last] for x in (cos, sin, *states)]
            if again:
                key, value = checkpoint(piece, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                key, value = piece(*inputs)
            keys.append(key)
            values.append(value)
        return torch.cat(keys, dim=3), torch.cat(values, dim=3)


__all__ = ["Updates", "empty_tape"]
