"""Rows against a naive packer, labels, the held-out split, evaluation batches."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import toy_corpus
from wm_ds.data import shards
from wm_ds.data.loader import GlobalBatches
from wm_ds.data.sequences import PackedSequences, evaluation_batches, shift_labels


def naive_rows(folder):
    """(ids, document ids) of every sequence in stream order, cut from a flat list of all positions."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ids, owner = [], []
    for number, document in enumerate(toy_corpus.documents(folder)):
        ids += document
        owner += [number] * len(document)
        pad = -len(ids) % manifest["align"]
        ids += [manifest["filler_id"]] * pad
        owner += [-1] * pad
    length = manifest["seq_len"]
    pad = -len(ids) % length if manifest["tail"] == "pad" else 0
    ids, owner = ids + [manifest["filler_id"]] * pad, owner + [-1] * pad
    rows = []
    for start in range(0, len(ids) - length + 1, length):
        names: dict[int, int] = {}
        cut = owner[start : start + length]
        rows.append(
            (ids[start : start + length], [names.setdefault(o, len(names)) if o >= 0 else -1 for o in cut])
        )
    return rows


@pytest.mark.parametrize("align", [1, 4, 8])
@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("shard_bytes", [40, 10_000])
def test_rows_equal_a_naive_packer(packed, align, tail, shard_bytes):
    texts = ["a", "bb", "the other in the winter", "x" * 40, "y", "zzzzz" * 7, "in"]
    folder = packed(texts, seq_len=16, align=align, tail=tail, shard_bytes=shard_bytes)
    expected = naive_rows(folder)
    sequences = PackedSequences(folder)
    assert len(sequences) == sequences.sequences == len(expected)
    for number, (ids, owner) in enumerate(expected):
        ids_T, documents_T = sequences.sequence(number)
        assert ids_T.tolist() == ids
        assert documents_T.tolist() == owner
    if shard_bytes == 40:
        assert len(sequences.manifest["shards"]) > 3


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    align=st.sampled_from([1, 2, 4]),
    shard_bytes=st.integers(20, 400),
)
def test_rows_equal_a_naive_packer_for_any_lengths(packed, lengths, align, shard_bytes):
    folder = packed(["q" * n for n in lengths], seq_len=12, align=align, shard_bytes=shard_bytes)
    sequences = PackedSequences(folder)
    for number, (ids, owner) in enumerate(naive_rows(folder)):
        ids_T, documents_T = sequences.sequence(number)
        assert (ids_T.tolist(), documents_T.tolist()) == (ids, owner)


def test_documents_start_at_multiples_of_align(packed):
    sequences = PackedSequences(packed(["abc", "d", "efghi" * 5, "j"] * 5, seq_len=16, align=4))
    for number in range(sequences.sequences):
        _, documents_T = sequences.sequence(number)
        for start in np.flatnonzero(np.diff(documents_T, prepend=-2)):
            if documents_T[start] >= 0:
                assert start % 4 == 0


def test_types_and_shapes(packed):
    folder = packed(["abc", "defgh"] * 6, seq_len=8)
    row = PackedSequences(folder)[0]
    assert (row.input_ids.dtype, row.labels.dtype, row.document_ids.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )
    parts = GlobalBatches(folder, global_batch=4, seed=0).batch(0, 1, 2, 1)
    assert len(parts) == 2
    for part in parts:
        assert {name: (tuple(t.shape), t.dtype) for name, t in part.items()} == {
            "input_ids": ((1, 8), torch.int64),
            "labels": ((1, 8), torch.int64),
            "document_ids": ((1, 8), torch.int32),
            "sample_ids": ((1,), torch.int64),
        }


class TestLabels:
    ids = np.array([5, 6, 9, 7, 9, 0, 8, 3])
    documents = np.array([0, 0, 0, 1, 1, -1, 2, 2], dtype=np.int32)

    def test_never_across_a_document_a_filler_or_a_row(self):
        assert shift_labels(self.ids, self.documents).tolist() == [6, 9, -100, 9, -100, -100, 3, -100]

    def test_across_documents_when_asked(self):
        got = shift_labels(self.ids, self.documents, across_documents=True)
        assert got.tolist() == [6, 9, 7, 9, 8, -100, 3, -100]

    def test_filler_only(self):
        for across in (False, True):
            labels = shift_labels(np.zeros(4, np.int64), np.full(4, -1, np.int32), across)
            assert labels.tolist() == [-100] * 4

    def test_every_data_token_but_a_segments_first_is_predicted_once(self, packed):
        folder = packed(["the winter", "in", "other rivers here", "a"] * 4, seq_len=16, align=4)
        batch = GlobalBatches(folder, global_batch=5, seed=0).batch(0, 0, 1, 5)[0]
        for ids, labels, docs in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
            for t in range(15):
                same = docs[t] >= 0 and docs[t] == docs[t + 1]
                assert labels[t] == (ids[t + 1] if same else -100)
            assert labels[15] == -100

    def test_option_of_the_batches(self, packed):
        folder = packed(["ab", "cd", "ef", "gh"], seq_len=12)
        apart = GlobalBatches(folder, global_batch=1, seed=0).batch(0, 0, 1, 1)[0]["labels"]
        joined = GlobalBatches(folder, global_batch=1, seed=0, across_documents=True).batch(0, 0, 1, 1)[0]
        assert (apart == -100).sum() == 4
        assert (joined["labels"] == -100).sum() == 1


class TestHoldout:
    def test_a_row_is_in_one_split(self, rows_of):
        folder = rows_of(40, holdout=7)
        train, holdout = PackedSequences(folder), PackedSequences(folder, "holdout")
        assert (len(train), len(holdout)) == (33, 7)
        first = train.sequence_numbers(np.arange(33)).tolist()
        second = holdout.sequence_numbers(np.arange(7)).tolist()
        assert sorted(first + second) == list(range(40))
        assert second != sorted(second) or second != list(range(33, 40)), "held out of the shuffled order"

    def test_the_training_split_cannot_reach_it(self, rows_of):
        folder = rows_of(40, holdout=7)
        train, holdout = PackedSequences(folder), PackedSequences(folder, "holdout")
        held = {tuple(holdout[i].input_ids.tolist()) for i in range(7)}
        for index in (33, 39, 40, -1):
            with pytest.raises(IndexError):
                train[index]
        batches = GlobalBatches(folder, global_batch=5, seed=3)
        numbers = set()
        for b in range(30):
            _, rows = batches.samples(b * 5, 5)
            numbers |= set(train.sequence_numbers(rows).tolist())
        assert len(numbers) == 33
        assert not numbers & set(holdout.sequence_numbers(np.arange(7)).tolist())
        assert held

    def test_without_holdout_the_split_does_not_exist(self, rows_of):
        with pytest.raises(shards.ShardError, match="without --holdout"):
            PackedSequences(rows_of(4), "holdout")

    def test_unknown_split(self, rows_of):
        with pytest.raises(shards.ShardError, match="unknown split 'test'"):
            PackedSequences(rows_of(4), "test")


class TestEvaluation:
    @pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 5), (2, 1), (2, 2), (3, 2), (8, 1)])
    def test_every_row_once_and_ranks_in_step(self, rows_of, world, micro):
        sequences = PackedSequences(rows_of(12, holdout=5), "holdout")
        ranks = [list(evaluation_batches(sequences, rank, world, micro)) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        seen = [int(i) for batches in ranks for batch in batches for i in batch["sample_ids"]]
        assert sorted(i for i in seen if i >= 0) == [0, 1, 2, 3, 4]

    def test_the_mean_over_labels_does_not_depend_on_the_world(self, packed):
        folder = packed(toy_corpus.numbered(30), seq_len=32, align=4, holdout=5)
        sequences = PackedSequences(folder, "holdout")

        def mean(world, micro):  # of a stand-in loss: some function of a position's id and label
            total, count = 0.0, 0
            for rank in range(world):
                for batch in evaluation_batches(sequences, rank, world, micro):
                    valid = batch["labels"] >= 0
                    total += ((batch["input_ids"] * 31 + batch["labels"]) % 97).double()[valid].sum().item()
                    count += int(valid.sum())
            return total / count

        assert mean(2, 1) == pytest.approx(mean(1, 1), abs=1e-6)
        assert mean(3, 2) == pytest.approx(mean(1, 5), abs=1e-6)

    def test_limit(self, rows_of):
        sequences = PackedSequences(rows_of(12))
        seen = [
            int(i) for batch in evaluation_batches(sequences, 0, 1, 2, limit=3) for i in batch["sample_ids"]
        ]
        assert seen == [0, 1, 2, -1]
