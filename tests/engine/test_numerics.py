"""DeepSpeed's ranks against plain PyTorch in one process: gradients, weights, clipping, skipping, bit
equality."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.support import numerics
from tests.support.numerics import Case, assemble, offload
from wm_ds.engine.loss import TokenLoss, document_mask
from wm_ds.model.layout import document_positions

pytestmark = pytest.mark.alone

GRADIENT, WEIGHT = 1e-6, 1e-5

STAGES = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "overlap_comm": True},
    "zero3": {"stage": 3},
    "zero1_offload": offload(1, "optimizer"),
    "zero2_offload": offload(2, "optimizer"),
    "zero3_optimizer": offload(3, "optimizer"),
    "zero3_offload": offload(3, "optimizer", "param"),
}


# The reference: everything in one process, in full tensors


def gradients(
    case: Case, lm: torch.nn.Module, batch: dict[str, Tensor], ranks: int
) -> tuple[float, dict, float]:
    """(loss, gradient after the clip rule, raw norm) of the whole batch, per parameter name."""
    rows = torch.arange(numerics.ROWS).view(case.accumulation, ranks, -1)
    tokens = (batch["labels"] >= 0).sum()
    if case.clip_rule == "global" or case.clip == 0:
        loss, grads = mean_loss(case, lm, batch, tokens)
        norm = norm_of(grads)
        scale = min(1.0, case.clip / (norm + 1e-6)) if case.clip else 1.0
        return loss, {n: g * scale for n, g in grads.items()}, norm
    total, loss, norms = {}, 0.0, []
    for rank in range(ranks):
        part = {k: v[rows[:, rank].flatten()] for k, v in batch.items()}
        share, grads = mean_loss(case, lm, part, tokens / ranks)
        norms.append(norm_of(grads))
        scale = min(1.0, case.clip / (norms[-1] + 1e-6))
        loss += share / ranks
        for n, g in grads.items():
            total[n] = total.get(n, 0) + g * scale / ranks
    return loss, total, sum(norms) / ranks


def mean_loss(
    case: Case, lm: torch.nn.Module, batch: dict[str, Tensor], tokens: Tensor
) -> tuple[float, dict]:
    lm.zero_grad()
    lm.train()
    if case.family != "vanilla":
        hidden = lm.model(input_ids=batch["input_ids"], document_ids=batch["document_ids"]).last_hidden_state
    else:
        hidden = lm.model(
            input_ids=batch["input_ids"],
            attention_mask=document_mask(batch["document_ids"], torch.float32),
            position_ids=document_positions(batch["document_ids"]),
        ).last_hidden_state
    logits = lm.lm_head(hidden)
    loss = (
        cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        / tokens
    )
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in lm.named_parameters()}


def norm_of(grads: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


def newton_schulz(matrix: Tensor) -> Tensor:
    """As published, for one matrix, in fp32."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


MATRIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "pool.key.proj")
MATRIX = (*MATRIX, "pool.value.proj", "router_weight")
PLAIN = ("norm", "bias", "dummy", "fusion")


class Reference:
    """Muon on whole matrices and AdamW on the rest, by the book."""

    def __init__(self, case: Case, lm: torch.nn.Module) -> None:
        self.case, self.lm, self.updates = case, lm, 0
        self.state = {n: [torch.zeros_like(p), torch.zeros_like(p)] for n, p in lm.named_parameters()}

    @torch.no_grad()
    def step(self, number: int, grads: dict[str, Tensor]) -> None:
        # Warm-up of 2 steps, then a cosine to a tenth at step 8.
        lr = self.case.lr * (
            number / 2 if number <= 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * (number - 2) / 6))
        )
        self.updates += 1
        for name, p in self.lm.named_parameters():
            first, second = self.state[name]
            if not any(word in name for word in PLAIN):
                p.mul_(1 - lr * 0.1)
            if self.case.optimizer == "muon" and any(word in name for word in MATRIX):
                first.mul_(0.95).add_(grads[name], alpha=0.05)
                update = grads[name] * 0.05 + first * 0.95
                whole = update.view(-1, *update.shape[-2:])
                rows, cols = whole.shape[-2:]
                scale = 0.2 * math.sqrt(max(rows, cols))
                if self.case.update_scale == "spectral":
                    scale = math.sqrt(max(1, rows / cols))
                p.sub_(torch.stack([newton_schulz(m) for m in whole]).view_as(p), alpha=lr * scale)
            else:
                first.mul_(0.9).add_(grads[name], alpha=0.1)
                second.mul_(0.95).addcmul_(grads[name], grads[name], value=0.05)
                mean = first / (1 - 0.9**self.updates)
                p.sub_(lr * mean / ((second / (1 - 0.95**self.updates)).sqrt() + 1e-8))


def reference(case: Case, ranks: int) -> dict:
    """Losses, raw norms, first gradient and final weights of a case in one process, with plain autograd."""
    local = case.clip_rule == "local" and case.clip > 0
    # What must not matter is taken out, so that many cases share one reference.
    plain = replace(
        case, zero={}, json={}, recompute="none", evaluate=False, streamed=False, precision="fp32"
    )
    plain = plain if local else replace(plain, accumulation=1)
    return _reference(json.dumps(asdict(plain)), ranks if local else 1)


@functools.cache
def _reference(plain: str, ranks: int) -> dict:
    case = Case(**json.loads(plain))
    lm = numerics.model(case)
    optimizer = Reference(case, lm)
    found: dict = {"losses": [], "norms": []}
    for step in range(case.steps):
        loss, grads, norm = gradients(
            case, lm, numerics.batch(0 if case.fixed else step, case.lopsided), ranks
        )
        found["losses"].append(loss)
        found["norms"].append(norm)
        found.setdefault("gradients", grads)
        optimizer.step(step + 1, grads)
    found["weights"] = {n: p.detach() for n, p in lm.named_parameters()}
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference of a parameter (in the 2-norm), and its name."""
    assert found.keys() == expected.keys()
    worst = {n: float((found[n] - e).norm() / e.norm().clamp(min=1e-12)) for n, e in expected.items()}
    name = max(worst, key=worst.get)
    return worst[name], name


def check(case: Case, ranks: int, results: list[dict]) -> None:
    expected = reference(case, ranks)
    what = f"{case} on {ranks} ranks"
    grads = assemble([r["gradients"] for r in results])
    scale = norm_of(expected["gradients"])
    off = {name: grads[name] - g for name, g in expected["gradients"].items()}
    assert norm_of(off) < GRADIENT * scale, f"gradient off by {norm_of(off) / scale:.1e}: {what}"
    for name, g in expected["gradients"].items():
        # And each parameter's alone, where it is not nearly nothing. The dummy's is a sum over all tokens,
        # layers and passes, whose order is worth 1.1e-6.
        error = float(off[name].norm()) / max(float(g.norm()), 1e-2 * scale)
        assert error < 2 * GRADIENT, f"gradient of {name} off by {error:.1e}: {what}"
    error, name = difference(assemble([r["weights"] for r in results]), expected["weights"])
    assert error < WEIGHT, f"{name} off by {error:.1e} after {case.steps} steps: {what}"
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), what
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4), what
        assert result["clipping"] == 0.0, "DeepSpeed's own clipping must be off"
        assert result["layout"] is None, what


# A selection that covers every value of every factor with every stage; the full product is `slow`

RECOMPUTE = ("none", "layer", "group", "group+layer")


def selection() -> dict[int, list[Case]]:
    """Cases per world size."""
    plan: dict[int, list[Case]] = {1: [], 2: [], 3: [], 4: []}
    for i, zero in enumerate(STAGES.values()):
        streamed = i % 2 == 0
        case = Case(zero, "whitematter", recompute=RECOMPUTE[i % 4], streamed=streamed)
        plan[2].append(replace(case, accumulation=(1, 2)[i % 2]))
        case = Case(zero, "vanilla", recompute=RECOMPUTE[i % 2], streamed=not streamed, tied=True)
        plan[2].append(replace(case, accumulation=(4, 1, 2)[i % 3]))
        rule = ("local", "global")
        plan[2].append(Case(zero, "vanilla", clip=0.3, clip_rule=rule[i % 2], accumulation=2))
        plan[2].append(Case(zero, "vanilla", clip=0.3, clip_rule=rule[1 - i % 2]))
    for i, stage in enumerate(("zero0", "zero1", "zero2", "zero3")):
        plan[1].append(
            Case(STAGES[stage], "whitematter", recompute=RECOMPUTE[i], accumulation=(1, 2, 4, 2)[i])
        )
        plan[3].append(
            Case(STAGES[stage], "vanilla", accumulation=(2, 4, 1, 4)[i], clip=0.3, clip_rule="local")
        )
    plan[3].append(Case(STAGES["zero3"], "whitematter", tied=True, recompute="group", optimizer="adamw"))
    plan[4].append(Case(STAGES["zero3"], "whitematter", accumulation=4, update_scale="spectral"))
    plan[4].append(Case(STAGES["zero2"], "whitematter", recompute="group", accumulation=2, clip=0.3))
    plan[4].append(Case(STAGES["zero3_offload"], "vanilla", optimizer="adamw", evaluate=True))
    for stage, family, rule in (("zero1", "vanilla", "global"), ("zero3", "whitematter", "local")):
        case = Case(STAGES[stage], family, accumulation=2, lopsided=True, steps=3)
        plan[4].append(replace(case, clip=0.3, clip_rule=rule, streamed=True))
    plan[2].append(Case(STAGES["zero3"], "whitematter", recompute="group", evaluate=True))
    plan[2].append(Case(STAGES["zero2"], "lckv", accumulation=2))
    for i, stage in enumerate(("zero0", "zero1", "zero2", "zero3")):
        recompute = ("layer", "none")[i % 2]
        plan[2].append(Case(STAGES[stage], "fusedkv", recompute=recompute, streamed=i % 2 == 1, steps=2))
    plan[2].append(Case(STAGES["zero3"], "yoco", recompute="layer", tied=True, evaluate=True, steps=2))
    # A layerwise start, at every stage and recompute policy, its sweep without and with gradient.
    lone = {"start": "layerwise", "no_grad_passes": 0, "grad_passes": 1}
    for i, stage in enumerate(("zero0", "zero1", "zero2", "zero3")):
        start = lone | {"start_grad": i % 2 == 1}
        plan[2].append(Case(STAGES[stage], "whitematter", recompute=RECOMPUTE[i], steps=2, start=start))
    start = {"start": "layerwise", "start_missing": "embedding"}
    plan[2].append(Case(STAGES["zero3"], "whitematter", recompute="group", evaluate=True, start=start))
    return plan


@pytest.mark.parametrize("ranks", [1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_equal_to_one_process(ranks: int) -> None:
    cases = selection()[ranks]
    for case, results in zip(cases, numerics.run(ranks, cases)):
        check(case, ranks, results)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", list(STAGES))
def test_full_product(stage: str, ranks: int) -> None:
    """Stages and offload x ranks x recomputation x accumulation. The clip rules take turns: each meets every
    stage, number of ranks, recomputation and accumulation, though not all four at once."""
    rules = ((0.0, "global"), (0.3, "global"), (0.3, "local"))
    cases = []
    for family, recomputes in (("vanilla", RECOMPUTE[:2]), ("whitematter", RECOMPUTE)):
        for (i, recompute), (j, accumulation) in itertools.product(
            enumerate(recomputes), enumerate((1, 2, 4))
        ):
            clip, rule = rules[(i + j + ranks + list(STAGES).index(stage)) % 3]
            case = Case(STAGES[stage], family, accumulation=accumulation, recompute=recompute)
            cases.append(replace(case, clip=clip, clip_rule=rule))
    for case, results in zip(cases, numerics.run(ranks, cases, timeout_s=3600)):
        check(case, ranks, results)


# Beyond exactness


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_weights_given_one_by_one_train_like_a_whole_model(precision: str) -> None:
    """Bit for bit, at every stage: the same engine comes out of both ways to build it."""
    cases = [
        Case(zero, "whitematter", precision=precision, recompute="group", steps=2, streamed=streamed)
        for zero in (*STAGES.values(), {"stage": 3, "zero_hpz_partition_size": 2})
        for streamed in (False, True)
    ]
    results = numerics.run(2, cases)
    for case, whole, streamed in zip(cases[::2], results[::2], results[1::2]):
        for one, other in zip(whole, streamed):
            assert one["losses"] == other["losses"], case
        weights = assemble([r["weights"] for r in whole])
        for name, weight in assemble([r["weights"] for r in streamed]).items():
            assert torch.equal(weight, weights[name]), (name, case)


def test_stages_agree_bit_for_bit() -> None:
    """Two ranks' gradients are one addition each, so stages 0, 1 and 2 have no freedom of order.

    Stage 3 has: it puts its own linear in torch's place and gathers the body as one: another order of sums.
    """
    cases = [Case({"stage": s}, "whitematter", recompute="group", steps=3) for s in (0, 1, 2, 3)]
    results = numerics.run(2, cases)
    first, *others, third = (assemble([r["weights"] for r in ranks]) for ranks in results)
    for other in others:
        assert all(torch.equal(weight, first[name]) for name, weight in other.items())
    assert difference(third, first)[0] < WEIGHT


@pytest.mark.long
@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_low_precision_norms_do_not_depend_on_the_stage(precision: str) -> None:
    at_rest = {"lr": 1e-30, "fixed": True, "steps": 3}
    cases = [
        Case({"stage": s}, precision=precision, accumulation=a, clip=1.0, clip_rule=rule, **at_rest)
        for s in (0, 1, 2, 3)
        for a, rule in ((1, "global"), (4, "global"), (4, "local"))
    ]
    for case, results in zip(cases, numerics.run(2, cases)):
        exact = replace(case, zero={"stage": 0}, precision="fp32", steps=1)
        expected = reference(exact, 2)
        norms = results[0]["norms"]
        assert norms == pytest.approx([norms[0]] * case.steps, rel=1e-6), f"changes at rest: {case}"
        assert norms[0] == pytest.approx(expected["norms"][0], rel=0.01), case
        assert results[0]["losses"][0] == pytest.approx(expected["losses"][0], rel=5e-3)


@pytest.mark.long
def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32() -> None:
    """48 micro-batches of one row, against their sum in fp64. Rounding the sum to bf16 once is worth 0.16%;
    summing in bf16 is off by 0.39%, and in long sums small gradients would vanish."""
    cases = [
        Case({"stage": s}, precision="bf16", accumulation=numerics.ROWS, steps=1, clip=1e9, clip_rule=rule)
        for s in (0, 1, 2, 3)
        for rule in ("global", "local")
    ]
    lm = numerics.model(cases[0]).train()
    for p in lm.parameters():  # and no buffers, as DeepSpeed does it
        p.data = p.data.bfloat16()
    loss, whole = TokenLoss(lm), numerics.batch(0)
    weight = 1 / int((whole["labels"] >= 0).sum())
    rounded, exact = {}, {}
    for row in range(numerics.ROWS):
        loss(**{k: v[row : row + 1] for k, v in whole.items() if k != "sample_ids"}).mul(weight).backward()
        for name, p in lm.named_parameters():
            rounded[name] = rounded.get(name, 0) + p.grad
            exact[name] = exact.get(name, 0) + p.grad.double()
            p.grad = None
    size = norm_of(exact)
    bound = 2e-3 * size
    assert norm_of({n: rounded[n] - e for n, e in exact.items()}) > 1.5 * bound, "the bound tells nothing"
    for case, results in zip(cases, numerics.run(1, cases)):
        found = assemble([r["gradients"] for r in results])
        off = norm_of({n: found[n] - e for n, e in exact.items()})
        assert off < bound, f"off by {off / size:.1e}: {case}"


@pytest.mark.long
def test_low_precision_trains_like_fp32() -> None:
    cases = [
        Case({"stage": s}, "whitematter", precision=p, steps=3)
        for s in (0, 1, 2, 3)
        for p in ("autocast", "bf16")
    ]
    expected = reference(Case(family="whitematter", steps=3), 2)["weights"]
    start = dict(numerics.model(Case(family="whitematter")).named_parameters())
    moved = math.sqrt(sum(float((expected[n] - start[n]).square().sum().detach()) for n in expected))
    for case, results in zip(cases, numerics.run(2, cases)):
        found = assemble([r["weights"] for r in results])
        off = math.sqrt(sum(float((found[n] - expected[n]).square().sum()) for n in expected))
        # Orthogonalised updates of small gradients have their rounding amplified; the direction must survive.
        assert off < 0.25 * moved, f"{off / moved:.2f} of the way moved: {case}"


def test_non_finite_steps_are_skipped_alike_and_end_the_run() -> None:
    """Steps 2, 4, 5 and 6 have a sequence that gives NaN on the last rank; the limit is three in a row."""
    cases = [
        Case({"stage": s}, poison=True, steps=8, clip=0.3, clip_rule=r)
        for s in (0, 1, 2, 3)
        for r in ("local", "global")
    ]
    clean = Case(poison=True, clip=0.3)
    for case, results in zip(cases, numerics.run(2, cases)):
        lm = numerics.model(clean)
        optimizer = Reference(case, lm)
        for step in (0, 2):
            optimizer.step(step + 1, gradients(case, lm, numerics.batch(step), 2)[1])
        for result in results:
            assert [bool(s) for s in result["skipped"]] == [False, True, False, True, True], case
            assert result["skipped"] == results[0]["skipped"]
            assert "3 steps in a row were skipped" in result["failed"]
            assert result["updates"] == 2
            assert sorted(result["samples"][1]) == list(range(numerics.ROWS))
        found = assemble([r["weights"] for r in results])
        for name, p in lm.named_parameters():
            expected, row = p.detach(), slice(1, None) if "embed" in name else slice(None)
            assert float((found[name][row] - expected[row]).norm() / expected[row].norm()) < WEIGHT, (
                name,
                case,
            )


def test_learning_rate_is_one_for_all_groups_and_ignores_accumulation() -> None:
    cases = [Case(STAGES["zero2"], accumulation=a) for a in (1, 4)]
    for results in numerics.run(2, cases):
        # Warm-up of 2 to 1e-2, then half a cosine over 6 steps to 1e-3.
        wanted = [5e-3, 1e-2, *(1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * s / 6))) for s in (1, 2, 3))]
        for step, rates in enumerate(results[0]["lr"]):
            assert len(rates) == 3  # Muon, AdamW with and without decay
            assert rates == pytest.approx([wanted[step]] * 3, rel=1e-12)
