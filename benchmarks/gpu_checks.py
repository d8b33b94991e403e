"""Checks of benchmarks/gpu_smoke.sh that need a GPU: equality, peak memory against the plan, prefill, decode.

Prints one JSON object. Not yet run on a GPU.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from wm_ds.distributed.process_group import peak_flops
from wm_ds.engine.compile import compile_blocks
from wm_ds.engine.loss import TokenLoss
from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.plan.activations import body
from wm_ds.plan.flops import training
from wm_ds.plan.memory import GIB

DEVICE = torch.device("cuda")
LENGTH, ROWS = 2048, 4


def model(attention: str, dtype: torch.dtype, layers: int = 16, width: int = 512) -> WhiteMatterForCausalLM:
    torch.manual_seed(0)
    config = WhiteMatterConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=3, head_dim=width * 3 // 16, num_kv_channels=layers // 2,
        attention=attention,
    )  # fmt: skip
    return WhiteMatterForCausalLM._from_config(config, dtype=dtype).to(DEVICE)


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 8192, (rows, length + 1), generator=generator)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    documents[:, length // 3 :] = 1
    return {
        "input_ids": ids[:, :-1].to(DEVICE),
        "labels": ids[:, 1:].to(DEVICE),
        "document_ids": documents.to(DEVICE),
    }


def gradients(lm: WhiteMatterForCausalLM, inputs: dict, autocast: bool = False) -> dict[str, torch.Tensor]:
    lm.train()
    lm.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = TokenLoss(lm)(**inputs) / inputs["labels"].numel()
    loss.backward()
    return {name: p.grad.float() for name, p in lm.named_parameters()} | {"loss": loss.detach().float()}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a parameter's gradient, in the 2-norm."""
    return max(float((a[n].to(DEVICE) - b[n].to(DEVICE)).norm() / b[n].norm().clamp(min=1e-12)) for n in b)


def check_cuda_equals_cpu() -> float:
    lm, inputs = model("sdpa", torch.float32, 4, 128), batch(2, 256)
    on_cuda = gradients(lm, inputs)
    on_cpu = gradients(lm.cpu(), {k: v.cpu() for k, v in inputs.items()})
    return _within(worst(on_cpu, on_cuda), 1e-3)


def check_flex_equals_sdpa() -> float:
    inputs = batch(2, 1024)
    results = [gradients(model(kind, torch.float32, 4, 256), inputs) for kind in ("flex", "sdpa")]
    return _within(worst(*results), 1e-3)


def check_policies_agree() -> float:
    lm, inputs = model("sdpa", torch.float32, 4, 128), batch(2, 512)
    want = gradients(lm, inputs)
    errors = []
    for policy in ("layer", "group", "group+layer"):
        lm.model.recompute = policy
        errors.append(worst(gradients(lm, inputs), want))
    return _within(max(errors), 1e-3)


def check_bf16() -> float:
    """bf16 autocast stays near fp32: a few per cent of the gradient."""
    lm, inputs = model("sdpa", torch.float32, 4, 128), batch(2, 512)
    exact, rough = gradients(lm, inputs)["loss"], gradients(lm, inputs, autocast=True)["loss"]
    return _within(float((exact - rough).abs() / exact), 1e-2)


def check_compiled_blocks() -> float:
    lm, inputs = model("sdpa", torch.float32, 4, 128), batch(2, 512)
    want = gradients(lm, inputs)
    compile_blocks(lm)
    return _within(worst(gradients(lm, inputs), want), 1e-3)


def check_entries_on_host() -> float:
    lm, inputs = model("sdpa", torch.float32, 4, 128), batch(2, 512)
    lm.model.recompute = "group"
    want = gradients(lm, inputs)
    lm.model.entries_on_host = True
    return _within(worst(gradients(lm, inputs), want), 1e-3)


def _within(error: float, limit: float) -> float:
    if not error <= limit:
        raise AssertionError(f"difference {error:.2e} exceeds {limit:.0e}")
    return error


def measure_step() -> dict[str, Any]:
    """Seconds, MFU and peak memory of a step by policy, and the planner's figure for the same."""
    result: dict[str, Any] = {}
    inputs = batch(ROWS, LENGTH)
    for policy in ("none", "group", "group+layer"):
        lm = model("auto", torch.float32)
        lm.model.recompute = policy
        for _ in range(2):
            gradients(lm, inputs, autocast=True)
        lm.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        for _ in range(3):
            gradients(lm, inputs, autocast=True)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 3
        flops, peak = training(lm.config, LENGTH, policy), peak_flops(DEVICE)
        weights = sum(p.numel() * 4 for p in lm.parameters())
        result[policy] = {
            "seconds": seconds,
            "mfu": flops.model * ROWS * LENGTH / seconds / peak if flops and peak else None,
            "peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB,
            "planned_gib": (body(lm.config, LENGTH, "autocast", policy).peak * ROWS + weights) / GIB,
        }
    return result


@torch.no_grad()
def measure_inference() -> dict[str, float]:
    lm = model("auto", torch.bfloat16).eval()
    ids = batch(1, LENGTH)["input_ids"]
    lm(input_ids=ids)
    torch.cuda.synchronize()
    start = time.perf_counter()
    lm(input_ids=ids)
    torch.cuda.synchronize()
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    lm.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    torch.cuda.synchronize()
    return {"prefill_s": prefill, "decode_s_per_token": (time.perf_counter() - start - prefill) / 32}


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    checks: dict[str, Callable[[], float]] = {
        name.removeprefix("check_"): f for name, f in globals().items() if name.startswith("check_")
    }
    report: dict[str, Any] = {"passed": {}, "error": {}, "step": {}, "inference": {}}
    for name, check in checks.items():
        try:
            report["error"][name] = check()
            report["passed"][name] = True
        except Exception:  # the report must say what failed, and the rest must run
            report["passed"][name] = False
            report["error"][name] = traceback.format_exc(limit=3)
    for name, measure in (("step", measure_step), ("inference", measure_inference)):
        try:
            report[name] = measure()
        except Exception:
            report[name] = {"error": traceback.format_exc(limit=3)}
            report["passed"][name] = False
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
