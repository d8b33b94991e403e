"""The fixed-point passes: one loop that runs any schedule, with or without gradient (paper §3.3).

Shapes: B rows, W workspace positions, n positions of a step, L layers, D width, k channels, G KV heads,
d head width, M = 1 + P + W slots of the pool's buffer (attention.py says who sees which).

Every step runs the layers on its positions against the pool as it is and rewrites their pool entries. Dead
work is left out: only a position's last update runs the last layer, whose output no pool reads; entries that
no later step can see are not computed. With gradient, the first `no_grad` passes run detached. The gradient
phase begins by pooling the detached states with gradient; the last detached pass writes just those entries,
so that pass runs its layers detached and its pool with gradient, and nothing is pooled twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import MAX_RUNS, MAX_RUNS_WITH_GRAD, Slots, compute_dtype, slots_of, takes_flex
from .pool import Pool
from .schedule import Schedule
from .shard import ALL, Shard
from .tape import (
    Tape,
    begin,
    columns,
    finish,
    finish_with_entries,
    ordered,
    overwrite,
    read,
    read_channel,
    write,
)
from .visibility import Visibility

# Under "group+layer" the pool of a step is computed in up to so many pieces of at least so many positions.
POOL_PIECES = 8
MIN_POSITIONS_PER_PIECE = 32
RECOMPUTE_POLICIES = ("none", "layer", "group", "group+layer")


@dataclass(frozen=True)
class PassResult:
    """hidden_BWD: output of the last layer; keys, values: pool entries of the workspace, [k, B, G, W, d],
    final only where a cache was asked for; residuals [passes]: relative change of the pool in each pass;
    states: where asked for, what entered each layer in the positions' last pass, L of [B, W, D]."""

    hidden_BWD: Tensor
    keys: Tensor
    values: Tensor
    residuals: Tensor | None = None
    states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Work:
    """What one part of a step computes: its positions and pass, and which of its results anybody needs."""

    positions: range
    turn: int
    needs_pool: bool
    needs_hidden: bool


def run_passes(
    layers: nn.ModuleList,
    pool: Pool,
    dummy_key: Tensor,
    dummy_value: Tensor,
    x_BWD: Tensor,
    rotary: tuple[Tensor, Tensor],
    visibility: Visibility,
    schedule: Schedule,
    *,
    past: tuple[Tensor, Tensor] | None = None,
    keep_cache: bool = False,
    keep_states: bool = False,
    recompute: str = "none",
    entries_on_host: bool = False,
    measure_residuals: bool = False,
    shard: Shard = ALL,
) -> PassResult:
    """Runs `schedule` over the embeddings of a workspace.

    Args:
        layers, pool, dummy_key, dummy_value: the model's parts; dummies are [k, G, d].
        x_BWD: token embeddings. Gradient flows, to them and to all parameters, if they require it.
        rotary: cosines and sines of the positions, each [B or 1, W, d].
        visibility: who exists and who may see whom.
        past: keys and values of cached tokens, each [k, B, G, P, d]. Gradient flows to them.
        keep_cache: compute the pool entries of every position's last update, too. Gradient flows from them.
        keep_states: keep the states that enter each layer in a position's last update.
        recompute: what backward recomputes instead of keeping it: "none", "layer" (each layer), "group" (each
            step of the schedule), "group+layer" (each step, and inside its recomputation each layer and each
            piece of the pool).
        entries_on_host: keep the entries that steps overwrite in the host's memory until backward.
        measure_residuals: report how far every pass moved the pool.
        shard: which part of the row x_BWD, the rotary table and the result are (its positions). The dummies
            are whole; visibility and schedule are the whole row's.

    Raises:
        ValueError: unknown recompute policy.
    """
    if recompute not in RECOMPUTE_POLICIES:
        raise ValueError(f"recompute is {recompute!r}; choose one of {', '.join(RECOMPUTE_POLICIES)}")
    with_grad = torch.is_grad_enabled() and x_BWD.requires_grad
    dummy_key, dummy_value = shard.share(dummy_key, 1), shard.share(dummy_value, 1)
    run = _Run(layers, pool, x_BWD, rotary, visibility, recompute, shard, with_grad, keep_states)
    tape = _empty_tape(x_BWD, dummy_key, dummy_value, past, run.dtype, shard)
    if keep_states:
        tape.hidden_BWD = torch.cat([tape.hidden_BWD] * (len(layers) + 1), dim=-1)
    start, work = _plan(
        schedule, x_BWD.shape[1] * shard.ranks, keep_cache, shard.ranks > 1 or measure_residuals
    )
    residuals = x_BWD.new_zeros(schedule.passes, 2, dtype=torch.float32) if measure_residuals else None

    # The start is pooled like a pass of its own, number -1; without any detached pass it carries gradient.
    first_grad = schedule.no_grad if with_grad else schedule.passes
    token = None
    for parts in [*start, *work]:
        results = []
        for part in parts:
            mode = "detached"
            if with_grad and part.turn >= first_grad - 1:
                mode = "pool" if 0 <= part.turn == first_grad - 1 else "all"
                if token is None:
                    token = begin(tape, x_BWD, dummy_key, dummy_value, *(past or (None, None)))
            keys, values, h_BnD = run.part(tape, part, mode, token, alone=len(parts) == 1)
            if keys is not None:
                keys, values = shard.entries(keys, values)
            results.append((keys, values, h_BnD))
        # All parts of a step have read before the first one writes.
        for part, (keys, values, h_BnD) in zip(parts, results):
            relaxation = schedule.factor(part.turn)
            if residuals is not None and part.turn >= 0 and keys is not None:
                residuals[part.turn] += _change(tape, part, keys, values)
            if token is not None:
                # Nothing that runs in backward reads what was there before the start.
                restore = part.turn >= 0 and not run.starts_anew(part, alone=len(parts) == 1)
                token = write(
                    tape,
                    part.positions,
                    relaxation,
                    token,
                    keys,
                    values,
                    h_BnD,
                    restore=restore,
                    on_host=entries_on_host,
                )
                continue
            if keys is not None:
                overwrite(tape.keys, tape.slots(part.positions), keys, relaxation)
                overwrite(tape.values, tape.slots(part.positions), values, relaxation)
            if h_BnD is not None:
                tape.hidden_BWD[:, tape.columns(part.positions)] = h_BnD
    entries = [buffer[:, :, :, tape.offset :] for buffer in (tape.keys, tape.values)]
    if token is None:
        hidden_BWD = tape.hidden_BWD
    elif keep_cache:
        hidden_BWD, *entries = finish_with_entries(tape, token)
    else:
        hidden_BWD = finish(tape, token)
    states = []
    if keep_states:
        *states, hidden_BWD = hidden_BWD.split(x_BWD.shape[-1], dim=-1)
    if residuals is not None:
        residuals = shard.total(residuals)
        residuals = (residuals[:, 0] / residuals[:, 1].clamp_min(1e-30)).sqrt()
    return PassResult(hidden_BWD, *entries, residuals, tuple(states))


class _Run:
    """Runs parts of steps. Masks are built once per set of positions and serve every layer and pass."""

    def __init__(
        self,
        layers: nn.ModuleList,
        pool: Pool,
        x_BWD: Tensor,
        rotary: tuple[Tensor, Tensor],
        visibility: Visibility,
        recompute: str,
        shard: Shard,
        with_grad: bool,
        keep_states: bool,
    ) -> None:
        self.with_grad, self.keep_states = with_grad, keep_states
        self.layers, self.pool, self.rotary = layers, pool, rotary
        self.visibility, self.recompute, self.shard = visibility, recompute, shard
        self.device = x_BWD.device
        self.dtype = compute_dtype(x_BWD)
        self.no_token = x_BWD.new_zeros(())
        self.masks: dict[range, Slots] = {}
        self.tables: dict[range, tuple[Tensor, Tensor]] = {}

    def slots(self, positions: range) -> Slots:
        if positions not in self.masks:
            blocks = takes_flex(self.visibility.kernel, self.device, len(positions))
            if self.recompute == "group+layer" and not blocks:
                self.masks.clear()  # dense ones are large, and cheap to make again
            runs = MAX_RUNS_WITH_GRAD if self.with_grad else MAX_RUNS
            slots = slots_of(positions, self.visibility, self.dtype, self.device, runs)
            self.masks[positions] = replace(slots, shard=self.shard)
        return self.masks[positions]

    def table(self, tape: Tape, positions: range) -> tuple[Tensor, Tensor]:
        """The rotary table of a step's positions: cosines and sines [B or 1, n, d]."""
        if positions not in self.tables:
            if self.recompute == "group+layer":
                self.tables.clear()
            cos, sin = (table[:, tape.columns(positions)].contiguous() for table in self.rotary)
            self.tables[positions] = cos, sin
        return self.tables[positions]

    def starts_anew(self, part: _Work, alone: bool) -> bool:
        """Whether the part's recomputation makes the entries that it overwrote once more, instead of finding
        them restored: those of the start come from the embeddings alone, for less than a hundredth of a
        step's work. Parts of one step must find each other's, so only a part that is alone can; ranks that
        share a row would have to send them again, and keep them instead."""
        alone = alone and self.shard.ranks == 1
        return part.turn == 0 and part.needs_pool and alone and "group" in self.recompute

    def part(
        self, tape: Tape, part: _Work, mode: str, token: Tensor | None, alone: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """New pool entries (keys, values: [k, B, G, n, d]) and final states [B, n, D] of one part of a step.

        mode: "detached" (no gradient), "pool" (layers detached, the pool with gradient), "all".
        """
        if mode == "detached":
            with torch.no_grad():
                return self._compute(tape, part, mode, None)
        if "group" in self.recompute:
            runs = 0

            def again(token: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
                nonlocal runs
                runs += 1
                if runs > 1 and self.starts_anew(part, alone):
                    self._start(tape, part.positions)
                return self._compute(tape, part, mode, token)

            return checkpoint(again, token, use_reentrant=False, preserve_rng_state=False)
        return self._compute(tape, part, mode, token)

    @torch.no_grad()
    def _start(self, tape: Tape, positions: range) -> None:
        """Puts the start's entries of some positions into the buffer."""
        keys, values, _ = self._compute(tape, _Work(positions, -1, True, False), "detached", None)
        overwrite(tape.keys, tape.slots(positions), keys, 1.0)
        overwrite(tape.values, tape.slots(positions), values, 1.0)

    def _compute(
        self, tape: Tape, part: _Work, mode: str, token: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        cos, sin = self.table(tape, part.positions)
        with torch.set_grad_enabled(mode == "all"):
            link = self.no_token if token is None else token
            x_BnD = read(tape, part.positions, link)
            if part.turn < 0:
                states, h_BnD = [x_BnD], None
            else:
                states, h_BnD = self._layers(tape, link, x_BnD, part, mode)
        if not part.needs_pool:
            return None, None, h_BnD
        if mode == "pool" and token is not None:
            cos = ordered(cos, token)
        new_keys, new_values = self._pool(states, cos, sin)
        return new_keys, new_values, h_BnD

    def _pool(self, states: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The pool of a step's states. Where layers are recomputed, too, nothing needs more memory (about 16
        tensors of all L states); it is then computed, and recomputed in backward, piece by piece."""
        pieces = min(POOL_PIECES, states[0].shape[1] // MIN_POSITIONS_PER_PIECE)
        if self.recompute != "group+layer" or pieces < 2 or not torch.is_grad_enabled():
            return self.pool(states, cos, sin)

        def piece(cos: Tensor, sin: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
            return self.pool(list(states), cos, sin)

        length = states[0].shape[1]
        cuts = [length * i // pieces for i in range(pieces + 1)]
        parts = []
        for first, last in pairwise(cuts):
            inputs = [x[:, first:last] for x in (cos, sin, *states)]
            parts.append(checkpoint(piece, *inputs, use_reentrant=False, preserve_rng_state=False))
        new_keys, new_values = (torch.cat(entries, dim=3) for entries in zip(*parts))
        return new_keys, new_values

    def _layers(
        self,
        tape: Tape,
        token: Tensor,
        h_BnD: Tensor,
        part: _Work,
        mode: str,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The states entering every layer, and the last layer's output if asked for."""
        states = []
        for index, layer in enumerate(self.layers):
            states.append(h_BnD)
            if index == len(self.layers) - 1 and not part.needs_hidden:
                return states, None
            lengths = self.slots(part.positions).lengths
            channel = read_channel(tape, index % len(tape.keys), lengths, token)

            # Masks and table are looked up inside: as arguments they would be kept until the recomputation.
            def run(
                h_BnD: Tensor,
                layer: nn.Module = layer,
                channel: tuple[list[Tensor], list[Tensor]] = channel,
            ) -> Tensor:
                table = self.table(tape, part.positions)
                return layer(h_BnD, self.slots(part.positions), *table, *channel)

            if "layer" in self.recompute and mode == "all":
                h_BnD = checkpoint(run, h_BnD, use_reentrant=False, preserve_rng_state=False)
            else:
                h_BnD = run(h_BnD)
        # Asked for, the states lie beside the output, in one tensor: the tape then knows nothing of them.
        return states, torch.cat([*states, h_BnD], dim=-1) if self.keep_states else h_BnD


def _empty_tape(
    x_BWD: Tensor,
    dummy_key: Tensor,
    dummy_value: Tensor,
    past: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    shard: Shard,
) -> Tape:
    """The buffers before the first step: dummy and cached tokens in place, the rest zero."""
    rows, width = x_BWD.shape[0], x_BWD.shape[1] * shard.ranks
    cached = 0 if past is None else past[0].shape[3]
    channels, heads, head_dim = dummy_key.shape
    buffers = []
    for dummy, old in zip((dummy_key, dummy_value), past or (None, None)):
        buffer = x_BWD.new_zeros(channels, rows, heads, 1 + cached + width, head_dim, dtype=dtype)
        buffer[:, :, :, 0] = dummy.detach()[:, None]
        if old is not None:
            buffer[:, :, :, 1 : 1 + cached] = old.detach()
        buffers.append(buffer)
    x_BWD = x_BWD.detach()
    return Tape(*buffers, x_BWD, torch.zeros_like(x_BWD), 1 + cached, shard)


@lru_cache(maxsize=64)
def _plan(
    schedule: Schedule, length: int, keep_cache: bool, whole_start: bool = False
) -> tuple[list[tuple[_Work, ...]], list[tuple[_Work, ...]]]:
    """Which results each part must produce, by a walk backwards over the schedule.

    `reach[i]` is the furthest position that reads position i's entry before it is next rewritten; an entry is
    needed only if that lies beyond i. A relaxed write reads the old entry, too: that is needed as much as the
    new one. Returns the pooling of the start (in pieces as large as the largest step) and the steps.
    `whole_start`: its pieces are the first pass's parts, of which every rank of a shard has a share, and none
    of its entries is left out, which a measured change of the first pass would count as zeros.
    """
    # Plain lists: the model also runs on meta and fake tensors, which have no values to decide by.
    reach = [length if keep_cache else -1] * length
    work: list[tuple[_Work, ...]] = []
    steps = schedule.steps(length)
    for parts in reversed(steps):
        planned = []
        for part in parts:
            needed = any(reach[i] > i for i in part.positions)
            planned.append(_Work(part.positions, part.turn, needed, part.turn == schedule.passes - 1))
        for part in parts:
            if schedule.factor(part.turn) == 1.0:
                reach[columns(part.positions)] = [-1] * len(part.positions)
        furthest = max(part.positions[-1] for part in parts)
        reach = [max(old, furthest) for old in reach]
        work.append(tuple(planned))
    unread = [i for i in range(length) if reach[i] > i]
    start = []
    if unread and whole_start:
        first = [part.positions for parts in steps for part in parts if part.turn == 0]
        start = [(_Work(positions, -1, True, False),) for positions in first]
    elif unread:
        piece = max(len(part.positions) for parts in steps for part in parts)
        stop = unread[-1] + 1
        start = [
            (_Work(range(at, min(at + piece, stop)), -1, True, False),)
            for at in range(unread[0], stop, piece)
        ]
    return start, work[::-1]


def _change(tape: Tape, part: _Work, keys: Tensor, values: Tensor) -> Tensor:
    """Squared distance between new and old pool entries, and the new ones' squared norm: [2]."""
    slots = tape.slots(part.positions)
    sums = [torch.zeros(2, device=keys.device)]
    for buffer, new in ((tape.keys, keys), (tape.values, values)):
        new = new.detach().float()
        sums.append(torch.stack(((new - buffer[:, :, :, slots].float()).square().sum(), new.square().sum())))
    return torch.stack(sums).sum(0)
