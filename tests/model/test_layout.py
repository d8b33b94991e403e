"""Where tokens lie while the passes run: padding goes, phases stay, documents are told apart."""

import pytest
import torch

from wm_ds.model.layout import lay_out

CPU = torch.device("cpu")


def test_without_padding_nothing_moves() -> None:
    layout = lay_out((2, 5), 0, 3, CPU)
    assert layout.column_BT is None
    assert layout.width == 5
    assert layout.position_BW.tolist() == [[0, 1, 2, 3, 4]]
    x = torch.randn(2, 5, 3)
    assert layout.to_workspace(x) is x
    assert layout.to_batch(x) is x


@pytest.mark.parametrize("period", [1, 3, 8])
def test_padded_rows_start_at_the_left_edge(period: int) -> None:
    """Padding on the left, on the right and in the middle; a row of padding only."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0] * 5])
    layout = lay_out((4, 5), 0, period, CPU, attention_mask=mask)
    assert layout.width == 3
    x = torch.arange(1.0, 21).view(4, 5, 1)
    assert layout.to_workspace(x)[..., 0].tolist() == [[3, 4, 5], [6, 7, 8], [11, 13, 15], [0, 0, 0]]
    assert torch.equal(layout.to_batch(layout.to_workspace(x)), x * mask[..., None])
    kv = layout.to_workspace(x)[None, :, None]  # [k, B, G, W, d]
    assert torch.equal(layout.to_batch(kv, dim=3)[0, :, 0], x * mask[..., None])
    assert layout.position_BW[:3].tolist() == [[0, 1, 2]] * 3
    assert layout.visibility.document_BW.tolist() == [[0] * 3] * 3 + [[-1] * 3]


@pytest.mark.parametrize(("past", "start"), [(3, 0), (4, 1), (5, 2)])
def test_rows_that_continue_a_cache_begin_at_their_phase(past: int, start: int) -> None:
    layout = lay_out((1, 4), past, 3, CPU)
    assert layout.width == start + 4
    x = torch.arange(1.0, 5).view(1, 4, 1)
    assert layout.to_workspace(x)[0, :, 0].tolist() == [0] * start + [1, 2, 3, 4]
    assert layout.position_BW[0, start:].tolist() == [past, past + 1, past + 2, past + 3]


def test_each_padded_row_has_a_phase_of_its_own() -> None:
    mask = torch.tensor([[0, 0, 1, 1] + [1] * 3, [1] * 7])
    layout = lay_out((2, 3), 4, 3, CPU, attention_mask=mask)
    x = torch.arange(1.0, 7).view(2, 3, 1)
    assert layout.to_workspace(x)[..., 0].tolist() == [[0, 0, 1, 2, 3], [0, 4, 5, 6, 0]]
    assert layout.position_BW.gather(1, layout.column_BT).tolist() == [[2, 3, 4], [4, 5, 6]]


def test_one_new_token_has_no_phase() -> None:
    assert lay_out((2, 1), 4, 3, CPU).width == 1
    assert lay_out((2, 1), 4, 3, CPU, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5])).width == 1


def test_positions_restart_with_every_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1, 2]])
    assert lay_out((1, 8), 0, 3, CPU, document_ids=documents).position_BW.tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 0]
    ]


@pytest.mark.parametrize(
    ("positions", "mask", "documents"),
    [
        ([0, 1, 2, 0, 1, 0], None, [0, 0, 0, 1, 1, 2]),
        ([0, 1, 2, 0, 1, 0], [1] * 6, [0, 0, 0, 1, 1, 2]),
        ([0, 0, 0, 0, 0, 0], None, [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2, 3, 4, 5], None, None),
        ([5, 6, 7, 9, 12, 20], None, None),  # gaps are no documents
        ([1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 1, 1], [0] * 4),  # generate's positions of padding
        ([0, 1, 2, 3, 4, 5], [1, 1, 0, 0, 1, 1], [0] * 4),
    ],
)
def test_documents_told_apart_by_positions(
    positions: list, mask: list | None, documents: list | None
) -> None:
    layout = lay_out(
        (1, 6),
        0,
        3,
        CPU,
        attention_mask=None if mask is None else torch.tensor([mask]),
        position_ids=torch.tensor([positions]),
    )
    found = layout.visibility.document_BW
    assert (None if found is None else found[0].tolist()) == documents
