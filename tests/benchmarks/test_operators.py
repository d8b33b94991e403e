"""Counts of operators and moved bytes: upper bounds for our steps, so that no change slows them unseen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.machine import machine_line
from benchmarks.operators import Shape, counted, inference, training

OURS = Shape(layers=2, width=32, length=32, rows=2, vocabulary=64, channels=2)
# Exact when written, with torch 2.13.0 on a CPU: lower them with every change that launches or moves less.
TRAINING = {
    ("none", False): (6733, 18_635_474),
    ("none", True): (7970, 19_443_842),
    ("layer", False): (7477, 19_944_722),
    ("layer", True): (8978, 22_436_546),
    ("group", False): (8904, 22_603_746),
    ("group", True): (11019, 27_011_746),
}
PREFILL_AND_TOKEN = {
    torch.float32: ((2365, 4_429_052), (130, 90_204)),
    torch.bfloat16: ((2861, 4_352_314), (155, 69_724)),
}


@pytest.mark.parametrize(("policy", "autocast"), TRAINING)
def test_a_training_step_launches_and_moves_no_more_than_it_did(policy: str, autocast: bool) -> None:
    counts = training(OURS, policy, autocast=autocast)
    operators, moved = TRAINING[policy, autocast]
    assert counts.operators <= operators, counts.launched.most_common(12)
    assert counts.moved <= moved


@pytest.mark.parametrize("dtype", PREFILL_AND_TOKEN)
def test_a_prefill_and_a_token_launch_and_move_no_more_than_they_did(dtype: torch.dtype) -> None:
    for counts, (operators, moved) in zip(inference(OURS, dtype), PREFILL_AND_TOKEN[dtype], strict=True):
        assert counts.operators <= operators, counts.launched.most_common(12)
        assert counts.moved <= moved


def test_counts_of_a_few_operators_by_hand() -> None:
    x, row, weight = torch.ones(4, 8), torch.ones(8), torch.ones(8, 8)
    table, index = torch.ones(100, 8), torch.tensor([3, 5])
    expanded = torch.ones(1, 8).expand(4, 8)

    def moved(call) -> tuple[dict[str, int], int]:  # type: ignore[no-untyped-def]
        counts = counted(call)
        return dict(counts.launched), counts.moved

    assert moved(lambda: x + row) == ({"add": 1}, 4 * (32 + 8 + 32))
    assert moved(lambda: x + expanded) == ({"add": 1}, 4 * (32 + 8 + 32))
    assert moved(lambda: x.add_(0)) == ({"add_": 1}, 4 * (32 + 32))
    assert moved(lambda: x.zero_()) == ({"zero_": 1}, 4 * 32)
    assert moved(lambda: x[:2].copy_(x[2:])) == ({"copy_": 1}, 4 * (16 + 16))
    assert moved(lambda: x @ weight) == ({"mm": 1}, 0)
    assert moved(lambda: nn.functional.embedding(index, table)) == ({"embedding": 1}, 4 * 32 + 8 * 2)
    assert moved(lambda: x.T.view(8, 4, 1)[1:]) == ({}, 0)


def test_backward_is_counted() -> None:
    x = torch.ones(4, requires_grad=True)
    launched = counted(lambda: x.exp().sum().backward()).launched
    assert (launched["exp"], launched["mul"]) == (1, 1)


def test_the_machine_says_units_mask_and_load(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    line = machine_line(cpuinfo)
    assert line.startswith("amx_bf16: yes; ONEDNN_MAX_CPU_ISA=AVX512_CORE; load average ")
    cpuinfo.write_text("flags : fpu avx2\n")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert "amx_bf16: no; ONEDNN_MAX_CPU_ISA not set" in machine_line(cpuinfo)
    assert "amx_bf16: unknown" in machine_line(tmp_path / "none")
