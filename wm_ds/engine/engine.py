"""One optimizer step of the whole run, on top of DeepSpeed.

`build` turns the run and DeepSpeed's JSON into an `Engine`; `Engine.step(micro_batches)` is one step: it
weighs the loss by the valid tokens of the *global* batch, accumulates, clips by the run's rule, decides on
all ranks alike whether the step counts, and lets DeepSpeed reduce, partition and update.

What DeepSpeed does: partitioning, reduction, the fp32 masters, gathering. What it is kept from doing:
clipping (`gradient_clipping` is 0: its own clip would act on Muon's update, and the default of 1.0 clips
silently), the learning-rate schedule, choosing an optimizer.

Clipping, `clip_rule`:
  local   every rank clips the gradient of its own sequences, before the reduction (the paper). The gradient
  must
          exist unsharded on each rank meanwhile: 4 bytes (bf16: 2) a parameter, at stages 2 and 3 too.
  global  the reduced gradient of the whole batch is clipped, before Muon sees it.
The logged `grad_norm` is the raw one: of the reduced gradient for global; the mean over ranks of each rank's
own for local.

With `sequence_parallel: N` the N ranks of a group are given the same micro-batches; the model runs on its
slice of the positions (sequence_parallel.py), and the loss is of these positions' labels, which are cut here.
What is said of a rank and its own sequences above is then true of a group: the local rule first averages
the gradient over it.

Accumulation is in fp32 at every precision, stage and clip rule. DeepSpeed sums micro-batches' bf16 gradients
in fp32 at stages 2 and 3 only; elsewhere, and wherever the local rule keeps it from reducing, the engine
keeps an fp32 sum beside the bf16 gradient (`sums_own_gradients`): 4 more bytes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wm_ds.config.schema import PASSES, Config, Stage
from wm_ds.config.stages import PlannedStage, effective, plan, rate_schedule
from wm_ds.distributed import deepspeed_internals, process_group
from wm_ds.distributed.process_group import Clock, World
from wm_ds.engine import zero3
from wm_ds.engine.deepspeed_config import deepspeed_config, sums_own_gradients, table_for
from wm_ds.engine.init_weights import place
from wm_ds.engine.loss import IGNORE, TokenLoss
from wm_ds.engine.sequence_parallel import SequenceShard
from wm_ds.errors import WmError
from wm_ds.families import family_of, model_config
from wm_ds.model.shard import ALL, Shard
from wm_ds.model.spans import span
from wm_ds.optim.freeze import Freeze, check_freeze
from wm_ds.optim.learning_rate import RateSchedule, learning_rate
from wm_ds.optim.muon import MuonAdamW, Settings
from wm_ds.optim.partition import fragments, masters, parameter_names

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
SPIKE_MEMORY = 0.98  # of the running mean and variance of the loss: about the last 50 steps
SPIKE_WARMUP = 20  # steps before a spike can be told from the first fall of the loss


class TrainingFailed(WmError, RuntimeError):
    """The run cannot go on: too many steps in a row were skipped. The last checkpoint is intact."""


@dataclass
class StepResult:
    """What happened in one step; equal on all ranks except `seconds`."""

    step: int
    loss: float
    """Mean over the valid tokens of the global batch."""
    grad_norm: float
    """Raw, before clipping; see the module's text for which gradient."""
    lr: float
    tokens: int
    """Valid labels in the global batch."""
    skipped: str | None = None
    """Why nothing was updated, or None."""
    spike: float | None = None
    """How many standard deviations the loss lay above its running mean, where beyond guard.spike_sigma."""
    samples: list[int] = field(default_factory=list)
    """Global sample numbers of the batch, where the step was skipped or a spike."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of this rank: forward, backward, optimizer, communication (explicit waits only)."""


class Engine:
    """The training state of this rank: DeepSpeed's engine (`ds`), the optimizer, and the counters."""

    def __init__(
        self,
        ds: Any,
        optimizer: MuonAdamW,
        world: World,
        config: Config,
        rate: RateSchedule,
        accumulation: int,
        shard: Shard = ALL,
    ) -> None:
        self.ds, self.optimizer, self.world = ds, optimizer, world
        self.clip, self.clips_locally = config.optim.clip, config.optim.clips_locally
        self.guard, self.rate, self.accumulation = config.guard, rate, accumulation
        self.shard = shard
        self.stage = int(ds.zero_optimization_stage())
        self.sums_own = sums_own_gradients(config, self.stage, accumulation)
        self.planned: PlannedStage | None = None
        """The run's stage at hand, once one is entered."""
        self.lr_factor = 1.0
        self.freeze: Freeze | None = None
        self.steps = 0
        """Steps taken, skipped ones included: the data's cursor and the learning rate's argument."""
        self.tokens = 0
        """Valid labels seen, skipped steps included."""
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.loss_mean = self.loss_var = 0.0
        self.loss_count = 0
        self.spikes_in_a_row = 0
        self.spiking_since = 0
        """The first step of them."""
        self.traces = zero3.Traces(ds)

    @property
    def lm(self) -> nn.Module:
        """The Hugging Face model inside."""
        return self.ds.module.lm

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The parts of a step's `seconds` in which no rank waits for another one: its own computing.

        Backward is none of them where DeepSpeed reduces gradients in it; neither is forward where it gathers
        parameters (ZeRO 3) or ranks share rows.
        """
        if self.stage == 3 or self.shard.ranks > 1:
            return ()
        return ("forward", "backward") if self.clips_locally or self.sums_own else ("forward",)

    @property
    def data_rank(self) -> tuple[int, int]:
        """(this rank's number, how many) among the ranks that work on different sequences."""
        return self.world.rank // self.shard.ranks, self.world.size // self.shard.ranks

    def enter(self, stage: PlannedStage) -> None:
        """Go on as a stage of the run says: its passes, batch, frozen parameters and learning rate.

        At the border of two stages that differ in what they train on, a spike is told from the losses of the
        new one only. All ranks alike.
        """
        config = stage.config
        once = self.clips_locally or self.sums_own
        self.accumulation = config.accumulation(self.world.size)
        deepspeed_internals.set_batch(self.ds, config.batch.micro_batch, 1 if once else self.accumulation)
        self.lr_factor = stage.lr_factor
        if self.freeze is not None:
            self.freeze.set(config.freeze)
        before, self.planned = self.planned, stage
        self._set_passes(config)
        if before is not None and self.steps + 1 == stage.first and _loss_of(before) != _loss_of(stage):
            self.loss_mean = self.loss_var = 0.0
            self.loss_count = 0

    def _set_passes(self, config: Config) -> None:
        hf = self.lm.config
        new = model_config(config.model, vocab_size=hf.vocab_size, seq_len=1, eos_id=None)
        changed = {
            name: getattr(new, name) for name in PASSES if getattr(new, name, None) != getattr(hf, name, None)
        }
        for name, value in changed.items():
            setattr(hf, name, value)
        if changed:
            self.traces.forget()

    def _own_labels(self, micro_batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The micro-batches with the labels of this rank's positions only; all else stays whole."""
        return [mb | {"labels": self.shard.share(mb["labels"], 1)} for mb in micro_batches]

    def step(self, micro_batches: list[dict[str, Tensor]]) -> StepResult:
        """One optimizer step on this rank's micro-batches of a global batch. Collective.

        Each micro-batch: input_ids, labels, document_ids [B, T] and sample_ids [B], on any device. Raises
        TrainingFailed after guard.max_skipped skipped steps in a row, on all ranks alike.
        """
        if len(micro_batches) != self.accumulation:
            raise ValueError(
                f"{len(micro_batches)} micro-batches given, the engine accumulates {self.accumulation}"
            )
        micro_batches = self._own_labels(micro_batches)
        clock = Clock(self.world.device, span)
        self.ds.train()
        device = self.world.device
        valid = sum((mb["labels"] != IGNORE).sum() for mb in micro_batches)
        with clock.of("communication"):
            tokens = int(process_group.all_reduce_sum([float(valid)], device)[0])
        # DeepSpeed averages gradients over ranks; sums of losses times this average to the mean over all
        # tokens.
        weight = self.world.size / max(tokens, 1)
        if self.clips_locally or self.sums_own:
            loss_sum, raw = self._backward_reduced_once(micro_batches, weight, clock)
        else:
            loss_sum, raw = self._backward_reduced_by_deepspeed(micro_batches, weight, clock)
        with clock.of("communication"):
            loss_total, norm_total = process_group.all_reduce_sum([float(loss_sum), raw], device)
        loss = loss_total / max(tokens, 1)
        if self.clips_locally:
            grad_norm, scale = norm_total / self.world.size, 1.0
        else:
            # Whole on every rank at stage 0, in disjoint parts otherwise.
            grad_norm = math.sqrt(norm_total / self.world.size if self.stage == 0 else norm_total)
            scale = min(1.0, self.clip / (grad_norm + CLIP_EPS)) if self.clip > 0 else 1.0
        reason, spike = self._judge(loss, grad_norm, tokens)
        lr = learning_rate(self.steps + 1, self.rate) * self.lr_factor
        self.optimizer.set_lr(lr)
        self.optimizer.skip, self.optimizer.grad_scale = reason is not None, scale
        with clock.of("optimizer"):
            self.ds.step()
        if reason is None:
            self.optimizer.count_update()
        self.steps += 1
        self.tokens += tokens
        result = StepResult(self.steps, loss, grad_norm, lr, tokens, reason, spike, seconds=clock.seconds())
        if reason is not None or spike is not None:
            result.samples = self._samples(micro_batches)
        self._count(result)
        return result

    def _forward_backward(self, micro_batch: dict[str, Tensor], weight: float, clock: Clock) -> Tensor:
        batch = {
            k: v.to(self.world.device, non_blocking=True) for k, v in micro_batch.items() if k != "sample_ids"
        }
        with clock.of("forward"):
            loss_sum = self.ds(**batch)
        with clock.of("backward"):
            self.ds.backward(loss_sum * weight, scale_wrt_gas=False)
        return loss_sum.detach().double()

    def _backward_reduced_by_deepspeed(
        self, micro_batches: list[dict], weight: float, clock: Clock
    ) -> tuple[Tensor, float]:
        """Backward of all micro-batches; the last one leaves the reduced gradient with DeepSpeed.

        Returns this rank's summed loss and its part of the squared norm of the reduced gradient.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for i, micro_batch in enumerate(micro_batches):
            total += self._forward_backward(micro_batch, weight, clock)
            if i + 1 < len(micro_batches):
                self.ds.step()  # inside an accumulation this only counts
        return total, _squared_norm(deepspeed_internals.reduced_gradients(self.ds))

    def _backward_reduced_once(
        self, micro_batches: list[dict], weight: float, clock: Clock
    ) -> tuple[Tensor, float]:
        """Backward of all micro-batches, perhaps clip this rank's gradient, then reduce.

        Returns this rank's summed loss and the norm of its own raw gradient (the local rule) or its part of
        the squared norm of the reduced one.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        sums: dict[nn.Parameter, Tensor] = {}
        with self.ds.no_sync() if self.stage == 0 else self.ds.coalesce_grad_reduction():
            for micro_batch in micro_batches:
                total += self._forward_backward(micro_batch, weight, clock)
                if self.sums_own:
                    self._add_to(sums)
            for p, whole in sums.items():
                # Written into the gradient that is there: at stage 3 a cut parameter refuses a new one.
                p.grad.copy_(whole)  # type: ignore[union-attr]
            del sums
            norm = 0.0
            if self.clips_locally:
                with clock.of("optimizer"):
                    own = [p.grad for p in self.ds.module.parameters() if p.grad is not None]
                    self.shard.mean_(own)
                    norm = math.sqrt(_squared_norm(own))
                    scale = self.clip / (norm + CLIP_EPS)
                    if not scale >= 1.0:  # also for a norm that is not a number: it must reach every rank
                        torch._foreach_mul_(own, scale)
        if self.stage == 0:
            with clock.of("communication"):
                self.ds.allreduce_gradients()
        if not self.clips_locally:
            norm = _squared_norm(deepspeed_internals.reduced_gradients(self.ds))
        return total, norm

    def _add_to(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Move each parameter's gradient of one micro-batch into an fp32 sum."""
        for p in self.ds.module.parameters():
            if p.grad is None:
                continue
            if p in sums:
                sums[p].add_(p.grad)
            else:
                sums[p] = p.grad.float()
            p.grad.zero_()

    def _judge(self, loss: float, grad_norm: float, tokens: int) -> tuple[str | None, float | None]:
        """(reason to skip the step, size of a spike); from numbers that all ranks share."""
        if not math.isfinite(loss):
            return f"loss is {loss}", None
        if not math.isfinite(grad_norm):
            return f"gradient norm is {grad_norm}", None
        if tokens == 0:
            return "no valid token in the global batch", None
        deviation = math.sqrt(self.loss_var)
        if self.loss_count >= SPIKE_WARMUP and deviation > 0:
            sigmas = (loss - self.loss_mean) / deviation
            if sigmas > self.guard.spike_sigma:
                skip = (
                    f"loss {loss:.4g} is {sigmas:.1f} sigma above its mean"
                    if self.guard.skip_spikes
                    else None
                )
                return skip, sigmas
        return None, None

    def _count(self, result: StepResult) -> None:
        if result.spike is not None:
            self.spiking_since = self.spiking_since if self.spikes_in_a_row else result.step
            self.spikes_in_a_row += 1
        elif result.skipped is None:  # a loss that is not finite neither makes a row nor breaks it
            self.spikes_in_a_row = 0
        if result.skipped is None:
            self.skipped_in_a_row = 0
            if result.spike is not None and self.guard.rollback is not None:
                return  # what comes after it must not look usual beside it
            self.loss_count += 1
            # An average over what there is, until the memory is full.
            rate = max(1.0 / self.loss_count, 1.0 - SPIKE_MEMORY)
            delta = result.loss - self.loss_mean
            self.loss_mean += rate * delta
            self.loss_var = (1.0 - rate) * (self.loss_var + rate * delta * delta)
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.guard.max_skipped:
            raise TrainingFailed(
                f"step {result.step}: {result.skipped}; {self.skipped_in_a_row} steps in a row were skipped "
                f"(guard.max_skipped = {self.guard.max_skipped}). The last checkpoint is intact; the last "
                f"batch had samples {result.samples}"
            )

    def _samples(self, micro_batches: list[dict[str, Tensor]]) -> list[int]:
        own = [int(i) for mb in micro_batches if "sample_ids" in mb for i in mb["sample_ids"]]
        if self.shard.rank > 0:  # the group's first rank has told them
            own = []
        if not torch.distributed.is_initialized():
            return own
        everyone: list[Any] = [None] * self.world.size
        torch.distributed.all_gather_object(everyone, own)
        return [i for part in everyone for i in part]

    @torch.no_grad()
    def evaluate(
        self, micro_batches: list[dict[str, Tensor]], **model_arguments: object
    ) -> tuple[float, int]:
        """(mean loss, valid tokens) over all ranks' micro-batches, in evaluation mode. Collective.

        Every rank gives the same number of micro-batches (rows without labels where it has fewer).
        """
        micro_batches = self._own_labels(micro_batches)
        self.ds.eval()
        if self.passes and "schedule" not in model_arguments:
            model_arguments["schedule"] = self.passes_schedule(1)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        tokens = 0
        measures = getattr(self.lm.model, "measure_residuals", False)  # diagnostics.py: more is then computed
        with self.traces.of(("evaluation", str(model_arguments.get("schedule")), measures)):
            for micro_batch in micro_batches:
                batch = {k: v.to(self.world.device) for k, v in micro_batch.items() if k != "sample_ids"}
                total += self.ds(**batch, **model_arguments).double()
                tokens += int((micro_batch["labels"] != IGNORE).sum())
        self.ds.train()
        loss, count = process_group.all_reduce_sum([float(total), float(tokens)], self.world.device)
        return loss / max(count, 1), int(count)

    @torch.no_grad()
    def next_token_logits(self, ids: list[int]) -> Tensor:
        """[V] fp32 on the CPU: what follows a document that begins with `ids`, by the trained schedule, in
        evaluation mode. Collective, with the same ids on all ranks."""
        device = self.world.device
        row = torch.tensor([ids], device=device)
        batch: dict[str, Any] = {"input_ids": row, "labels": None, "document_ids": torch.zeros_like(row)}
        if self.passes:
            batch["schedule"] = self.passes_schedule(1)
        steps = len(batch["schedule"].steps(len(ids))) if self.passes else 1
        self.ds.eval()
        with self.traces.of(("samples", steps)):
            logits_BV = self.ds(**batch)
        self.ds.train()
        return logits_BV[0].float().cpu()

    @property
    def passes(self) -> int:
        """Passes of a training step; 0 for a model that has none."""
        config = self.lm.config
        return config.no_grad_passes + config.grad_passes if family_of(config).has_passes else 0

    def passes_schedule(self, factor: int) -> Any:
        """The training schedule with `factor` times its passes, for evaluation."""
        trained = self.lm.config.training_schedule()
        if trained.kind == "exact":
            return trained
        return replace(trained, passes=factor * self.passes)

    def state_dict(self) -> dict[str, Any]:
        """The counters, for the checkpoint's client state. Weights and optimizer state are not in it."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_mean": self.loss_mean,
            "loss_var": self.loss_var,
            "loss_count": self.loss_count,
            "updates": self.optimizer.param_groups[0]["step"],
        } | self._spikes()

    def _spikes(self) -> dict[str, Any]:
        """Only where there are some: the state is that of before there was such a count."""
        if not self.spikes_in_a_row:
            return {}
        return {"spikes_in_a_row": self.spikes_in_a_row, "spiking_since": self.spiking_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters from `state_dict`."""
        state = {"spikes_in_a_row": 0, "spiking_since": 0} | state
        for group in self.optimizer.param_groups:
            group["step"] = state["updates"]
        del state["updates"]
        for name, value in state.items():
            setattr(self, name, value)


def _squared_norm(tensors: list[Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = torch._foreach_norm([t.detach() for t in tensors], 2, dtype=torch.float32)
    return float(torch.stack([n.double() for n in norms]).square().sum())


def _loss_of(stage: PlannedStage) -> list[Any]:
    """What the loss's level depends on."""
    passes = [getattr(stage.config.model, name) for name in PASSES]
    return [passes, stage.config.data.sources(), stage.seq_len]


# Construction


def build(
    config: Config,
    json: dict[str, Any],
    lm: nn.Module,
    world: World,
    seq_len: int,
    values: Iterable[tuple[str, Tensor]] | None = None,
) -> Engine:
    """Wrap `lm` for training. Collective.

    `lm` is equal on all ranks: fp32 on the CPU; or on the meta device with the `values` of its parameters,
    which are then placed one by one (init_weights.py). `json`: the checked content of the run's DeepSpeed
    file (config/deepspeed_json.py). Raises ConfigError where a stage's global batch does not divide over the
    ranks. The engine does what the run says without its stages, until it enters one.
    """
    import deepspeed

    # One engine serves all stages of a run: it is built for the one that accumulates most.
    stages = [effective(config, stage) for stage in config.stages or [Stage()]]
    accumulation = max(stage.accumulation(world.size) for stage in stages)
    shard: Shard = ALL
    if config.sequence_parallel > 1:
        shard = SequenceShard(world, config.sequence_parallel, config.run.timeout_minutes)
        lm.model.shard = shard
    table = table_for(config, lm)
    check_freeze(config, [row.name for row in table])
    full = deepspeed_config(config, json, accumulation, zero3.parameter_shapes(lm), world.size)
    if values is not None:
        place(lm, values, full, world.device)
    module = TokenLoss(lm)
    names = parameter_names(module)
    o = config.optim
    optimizer = MuonAdamW(
        table,
        {names[id(p)]: p for p in module.parameters()},
        Settings(o.lr, o.momentum, o.ns_steps, getattr(torch, o.ns_dtype), o.betas, o.eps),
    )
    ds, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=full, dist_init_required=False)
    if ds.zero_optimization_stage() == 3:
        deepspeed.zero.register_external_parameter(
            ds.module.head_loss, ds.module.lm.get_output_embeddings().weight
        )
    optimizer.attach(masters(ds), fragments(ds), world.device)
    alone = plan(effective(config, Stage()), seq_len)
    rate = RateSchedule(**rate_schedule(alone))
    engine = Engine(ds, optimizer, world, config, rate, accumulation, shard)
    engine.freeze = Freeze(ds.module, optimizer)
    engine.enter(alone.at(1))
    return engine
