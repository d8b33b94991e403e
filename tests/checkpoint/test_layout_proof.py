"""The proof that weights are where optimizer and checkpoints look for them, on maps wrong on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wm_ds.checkpoint.engine_state import WEIGHT, Share
from wm_ds.checkpoint.layout_proof import LayoutError, prove

SHAPES = {"a.weight": (6, 4), "b.weight": (6, 4), "norm.weight": (4,)}


class Ranks:
    """Two ranks' states in one process; `gather` answers with what both ranks come with."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.masters = {n: torch.randn(s, generator=generator).flatten() for n, s in SHAPES.items()}
        self.live = [{n: m.to(dtype) for n, m in self.masters.items()} for _ in range(2)]
        # Rank 0 holds the first half of each tensor and rank 1 the rest: views, as in an engine.
        self.held = [
            {
                n: (0, m.numel() // 2) if rank == 0 else (m.numel() // 2, m.numel())
                for n, m in self.masters.items()
            }
            for rank in range(2)
        ]
        self.stage, self.updates = 2, 0

    def state(self, rank: int) -> Any:
        def shares() -> Any:
            for name, (start, stop) in self.held[rank].items():
                view = self.masters[name][start:stop]
                yield Share(name, WEIGHT, start, stop, (start, stop), view)
                yield Share(name, "momentum", start, stop, (start, stop), torch.zeros_like(view))

        return SimpleNamespace(
            stage=self.stage,
            shares=shares,
            live_parameters=lambda: iter(self.live[rank].items()),
            parameter_shapes=lambda: SHAPES,
            updated=lambda: self.updates > 0,
        )

    def prove(self) -> None:
        """On both ranks; each must come to the same verdict."""
        given: list[Any] = []
        verdicts = []
        for rank in (0, 1):  # what each rank would send
            with pytest.raises(StopIteration):
                prove(
                    self.state(rank), SimpleNamespace(gather=lambda v: given.append(v) or stop()), before="x"
                )
        for rank in (0, 1):
            try:
                prove(self.state(rank), SimpleNamespace(gather=lambda _: given), before="the first step")
                verdicts.append(None)
            except LayoutError as error:
                verdicts.append(str(error))
        assert verdicts[0] == verdicts[1]
        if verdicts[0] is not None:
            raise LayoutError(verdicts[0])


def stop() -> None:
    raise StopIteration


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_map_passes_also_with_weights_that_are_not_numbers(dtype):
    ranks = Ranks(dtype)
    ranks.masters["a.weight"][3] = float("nan")
    for live in ranks.live:
        live["a.weight"][3] = float("nan")
    ranks.prove()


def test_two_parameters_of_one_shape_that_changed_places_are_named():
    ranks = Ranks()
    ranks.masters["a.weight"], ranks.masters["b.weight"] = (
        ranks.masters["b.weight"],
        ranks.masters["a.weight"],
    )
    with pytest.raises(LayoutError) as caught:
        ranks.prove()
    said = str(caught.value)
    assert "found before the first step: rank 0: a.weight: of its elements 0 to 12, 12 differ" in said
    assert "(and 1 more)" in said  # rank 1 found it, too
    assert "Leave out of DeepSpeed's JSON whatever the files in ds_configs do not have" in said


def test_one_wrong_element_of_one_rank_is_found():
    ranks = Ranks()
    ranks.masters["b.weight"][20] += 0.5
    with pytest.raises(
        LayoutError, match=r"rank 1: b\.weight: of its elements 12 to 24, 1 differ .* by up to 0\.5"
    ):
        ranks.prove()


def test_rounding_to_the_weights_type_is_no_difference_and_more_is():
    ranks = Ranks()
    ranks.masters["a.weight"][0] = 1.0
    for live in ranks.live:
        live["a.weight"][0] = 1.0
    ranks.masters["a.weight"][0] += 2**-10  # rounds to 1 in bf16
    ranks.prove()
    ranks.masters["a.weight"][0] += 2**-6
    with pytest.raises(LayoutError, match=r"a\.weight"):
        ranks.prove()


def test_what_no_rank_holds_is_found():
    ranks = Ranks()
    ranks.held[1]["norm.weight"] = (3, 4)
    with pytest.raises(LayoutError, match=r"norm\.weight: its elements from 2 on are held by no rank, or by"):
        ranks.prove()
    ranks.held[1]["norm.weight"] = (1, 4)
    with pytest.raises(LayoutError, match=r"norm\.weight: its elements from 2 on"):
        ranks.prove()


def test_a_rank_whose_own_copy_went_astray_is_found():
    """Rank 1's copy of what rank 0 holds: rank 0 cannot see it, and rank 1 has no master for it."""
    ranks = Ranks()
    ranks.live[1]["a.weight"] = ranks.live[1]["a.weight"].clone()
    ranks.live[1]["a.weight"][[0, 1]] = ranks.live[1]["a.weight"][[1, 0]]
    with pytest.raises(LayoutError, match=r"rank 1: its a\.weight differs from rank 0's"):
        ranks.prove()
    ranks.stage, ranks.updates = 0, 3  # each rank has updated its own copy: last bits may differ
    ranks.prove()
