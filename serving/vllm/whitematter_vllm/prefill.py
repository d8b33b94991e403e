"""From a step of the engine to the output of the stack: tokens to decode once, prompts by their schedule.

The passes of all prompts of a step run side by side. Where one request counts as computed what another
computes in this step (`Step.shared`), all positions count from the beginnings of the texts: what is read is
then in the same pass as if the reader had computed it itself.

With a `border` passes run in segments between multiples of it, each behind the finished entries of the one
before. An entry is then a function of the tokens up to its own alone, whatever lies in the cache already.

Shapes: N tokens of the step, n tokens of a batch, D width, k channels, G KV heads of this rank, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from whitematter_vllm.stack import Entries, Stack
from whitematter_vllm.step import Step
from whitematter_vllm.sweeps import Schedule, Sweep


def run_step(stack: Stack, schedule: Schedule, step: Step | None, x_ND: Tensor, position_N: Tensor) -> Tensor:
    """The output of the last layer for every token of a step; what comes after the cache is written.

    `step` is None while vLLM measures memory. x_ND may be overwritten.
    """
    if step is None or step.single:
        return stack.evaluate(x_ND, position_N)
    return _Prefill(stack, schedule, step, x_ND, position_N).run()


class _Prefill:
    """One step with prompts in it."""

    def __init__(
        self, stack: Stack, schedule: Schedule, step: Step, x_ND: Tensor, position_N: Tensor
    ) -> None:
        self.stack, self.step, self.x_ND, self.position_N = stack, step, x_ND, position_N
        tokens = len(step.request_N)  # without what fills up the batch for a CUDA graph
        self.out_ND = torch.zeros_like(x_ND)
        prompt_R = step.new_R > (0 if step.shared else 1)
        self.prompt_N = prompt_R[step.request_N]
        origin_R = torch.zeros_like(step.computed_R)
        if not step.shared:
            origin_R = step.computed_R - step.computed_R % schedule.period
        self.column_N = step.position_N[:tokens] - origin_R[step.request_N]
        width = int(self.column_N[self.prompt_N].max()) + 1 if bool(self.prompt_N.any()) else 1
        self.schedule = schedule.capped(width)
        # Entries as they were, for passes that are relaxed or ask how far entries moved.
        self.kept: Entries | None = None
        self.keeps = self.schedule.relaxed or self.schedule.kind == "converged"

    def run(self) -> Tensor:
        """Everything; returns the output [N, D]."""
        once_n = (~self.prompt_N).nonzero()[:, 0]
        if len(once_n):
            self._update(once_n, None)
        border = self.schedule.border
        if not border:
            self._segment(self.prompt_N)
            return self.out_ND
        segment_N = self.step.position_N // border
        for segment in segment_N[self.prompt_N].unique().tolist():
            self._segment(self.prompt_N & (segment_N == segment))
        return self.out_ND

    def _segment(self, chosen_N: Tensor) -> None:
        """The start and all sweeps over some tokens of the prompts."""
        token_n = chosen_N.nonzero()[:, 0]
        if self.schedule.kind != "exact":
            self._start(token_n)
        column_n = self.column_N[token_n]
        if self.schedule.kind == "converged":
            self._until_converged(token_n)
            return
        for sweep in self.schedule.sweeps(column_n):
            self._sweep(token_n[sweep.token_n], sweep)

    def _start(self, token_n: Tensor) -> None:
        """What the first pass finds in the pool."""
        batch = self.step.batch(token_n)
        x_nD, position_n = self.x_ND[batch.token_n], self.position_N[batch.token_n]
        with batch.in_place():
            if self.schedule.start == "layerwise":
                entries = self.stack.start_layerwise(x_nD, position_n, self.schedule.newest)
            else:
                entries = self.stack.start(x_nD, position_n)
            self.stack.write(entries)
        if self.keeps:
            if self.kept is None:
                tokens = len(self.x_ND)
                self.kept = Entries(*(x.new_zeros(len(x), tokens, *x.shape[2:]) for x in entries))
            for kept, new in zip(self.kept, entries):
                kept[:, batch.token_n] = new

    def _sweep(self, token_n: Tensor, sweep: Sweep) -> Tensor | None:
        factor_n = self.schedule.factor(sweep.pass_n) if self.schedule.relaxed else None
        return self._update(token_n, factor_n)

    def _update(self, token_n: Tensor, factor_n: Tensor | None) -> Tensor | None:
        """One evaluation of some tokens; returns how far their entries moved [n] where passes ask for it."""
        batch = self.step.batch(token_n)
        with batch.in_place():
            out_nD, entries = self.stack.run(self.x_ND[batch.token_n], self.position_N[batch.token_n])
            self.out_ND[batch.token_n] = out_nD
            moved_n = None
            if self.kept is not None:
                old = Entries(*(kept[:, batch.token_n] for kept in self.kept))
                moved_n = _relative_change(old, entries) if self.schedule.kind == "converged" else None
                if factor_n is not None:
                    factor_n11 = factor_n.to(out_nD)[:, None, None]
                    entries = Entries(*(a + factor_n11 * (b - a) for a, b in zip(old, entries)))
                for kept, new in zip(self.kept, entries):
                    kept[:, batch.token_n] = new
            self.stack.write(entries)
        return moved_n

    def _until_converged(self, token_n: Tensor) -> None:
        """Cyclic passes; a request leaves once none of its entries moved by more than the tolerance."""
        for index in range(self.schedule.passes):
            column_n, request_n = self.column_N[token_n], self.step.request_N[token_n]
            moved_R = torch.zeros(len(self.step.new_R))
            for sweep in self.schedule.one_pass(column_n, torch.full_like(column_n, index)):
                moved_n = self._sweep(token_n[sweep.token_n], sweep)
                assert moved_n is not None
                moved_R.scatter_reduce_(0, request_n[sweep.token_n], moved_n, "amax")
            token_n = token_n[(moved_R > self.schedule.tolerance)[request_n]]
            if not len(token_n):
                return


def _relative_change(old: Entries, new: Entries) -> Tensor:
    """The largest of the channels' |new - old| / |new|, of keys and values over all heads: [n] (host)."""
    squares = []
    for before, after in zip(old, new):
        before_knX, after_knX = before.float().flatten(2), after.float().flatten(2)
        squares.append(torch.stack([(after_knX - before_knX).square().sum(-1), after_knX.square().sum(-1)]))
    sums = torch.cat(squares, dim=1)  # [2, 2k, n]
    if get_tensor_model_parallel_world_size() > 1:
        sums = tensor_model_parallel_all_reduce(sums)
    return (sums[0] / sums[1].clamp_min(1e-30)).sqrt().amax(0).cpu()
