"""Batches of a run in stages, on packed files: what is read, in which order, at which row length."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.data.test_loader import sample_ids
from tests.support import toy_corpus
from wm_ds.data import shards
from wm_ds.data.loader import GlobalBatches, StageData, StagedBatches
from wm_ds.data.sequences import IGNORE, PackedSequences
from wm_ds.data.skip import merged


def texts_of(batches, steps, world=1, micro=1):
    """Bytes of all rows of the steps: (ids, document ids, labels), row by row, in the batch's order."""
    found = []
    for b in steps:
        ranks = [batches.batch(b, rank, world, micro) for rank in range(world)]
        for parts in zip(*ranks, strict=True):
            for part in parts:
                found += list(
                    zip(*(part[k].tolist() for k in ("input_ids", "document_ids", "labels")), strict=True)
                )
    return found


@pytest.fixture(scope="module")
def novel(packed):
    """Rows of 16 whose every token is told apart by (document, place): texts of distinct characters."""
    texts = ["".join(chr(97 + (7 * n + i) % 26) for i in range(5 + n * 3 % 29)) for n in range(40)]
    return packed(texts, seq_len=16, align=2, holdout=5)


class TestEqualStages:
    @pytest.mark.parametrize("border", [1, 5, 17])
    def test_they_are_the_run_without_stages(self, rows_of, border):
        sources = [(rows_of(10), 3), (rows_of(7), 1)]
        whole = GlobalBatches(sources, global_batch=6, seed=1)
        staged = StagedBatches(
            [StageData(sources, 6, border), StageData(sources, 6, 3), StageData(sources, 6)], seed=1
        )
        for world, micro in ((1, 2), (3, 1)):
            assert sample_ids(staged, range(25), world, micro) == sample_ids(whole, range(25), world, micro)

    def test_a_batch_that_grows_reads_the_same_samples_in_larger_portions(self, rows_of):
        sources = [(rows_of(10), 3), (rows_of(7), 1)]
        ramp = StagedBatches(
            [StageData(sources, 2, 6), StageData(sources, 4, 3), StageData(sources, 8)], seed=1
        )
        whole = GlobalBatches(sources, global_batch=2, seed=1)
        assert sample_ids(ramp, range(11), 1, 1) == sample_ids(whole, range(20), 1, 1)
        assert [ramp.stage_of(b) for b in (0, 5, 6, 8, 9, 50)] == [0, 0, 1, 1, 2, 2]


class TestASourceInTwoStages:
    def test_it_goes_on_where_it_was(self, rows_of):
        a, b = rows_of(10), rows_of(7)
        staged = StagedBatches(
            [StageData(a, 2, 3), StageData([(b, 1), (a, 1)], 2, 4), StageData(b, 1, 3), StageData(a, 1)],
            seed=4,
        )
        alone = [GlobalBatches(a, global_batch=1, seed=4).samples(0, 30)[1].tolist()]
        rows = {"a": [], "b": []}
        for step in range(3 + 4 + 3 + 12):
            for part in staged.batch(step, 0, 1, 1):
                stage = staged.stages[staged.stage_of(step)]
                (sample,) = part["sample_ids"].tolist()
                first = staged.sources[stage.numbers[0]]
                in_first = sample < len(first)
                source = stage.numbers[0 if in_first else 1]
                rows["ab"[source]].append(sample if in_first else sample - len(first))
        assert rows["a"] == alone[0][: len(rows["a"])]
        for name, size in (("a", 10), ("b", 7)):
            for start in range(0, len(rows[name]), size):
                epoch = rows[name][start : start + size]
                assert len(set(epoch)) == len(epoch), "a row twice in an epoch"
        assert [round(d.before, 3) for d in staged.drawn(3, 12)] == [round(len(rows["a"][:-12]) / 10, 3)]

    def test_its_folder_may_lie_elsewhere(self, rows_of, tmp_path):
        a = rows_of(10)
        (tmp_path / "link").symlink_to(a)
        here = StagedBatches([StageData(a, 2, 3), StageData(a, 2)], seed=4)
        there = StagedBatches([StageData(a, 2, 3), StageData(tmp_path / "link", 2)], seed=4)
        assert sample_ids(here, range(9)) == sample_ids(there, range(9))

    def test_what_comes_later_does_not_change_what_was(self, rows_of):
        a, b = rows_of(10), rows_of(7)
        early = StagedBatches([StageData([(a, 1), (b, 1)], 4)], seed=0)
        late = StagedBatches([StageData([(a, 1), (b, 1)], 4, 5), StageData(b, 2, 2), StageData(a, 8)], seed=0)
        assert sample_ids(early, range(5)) == sample_ids(late, range(5))


class TestRowLength:
    def stream(self, folder):
        """(ids, document number, -1 on filler and on held-out rows) of every position, from the files."""
        manifest = shards.load_manifest(folder)
        ids, owner = [], []
        for number, document in enumerate(toy_corpus.documents(folder)):
            pad = -len(document) % manifest["align"]
            ids += document + [manifest["filler_id"]] * pad
            owner += [number] * len(document) + [-1] * pad
        pad = -len(ids) % manifest["seq_len"]
        owner += [-1] * pad
        ids += [manifest["filler_id"]] * pad
        held = PackedSequences(folder, "holdout")
        for row in held.sequence_numbers(np.arange(len(held))).tolist():
            owner[row * held.seq_len : (row + 1) * held.seq_len] = [-1] * held.seq_len
        return ids, owner

    def expected(self, folder, length):
        """Rows of `length` from the stream, cut naively: {(ids, document ids, labels): how often}."""
        ids, owner = self.stream(folder)
        rows = Counter()
        pad = -len(ids) % length
        ids, owner = ids + [0] * pad, owner + [-1] * pad
        for start in range(0, len(ids), length):
            row_ids, row_owner = ids[start : start + length], owner[start : start + length]
            filler = shards.load_manifest(folder)["filler_id"]
            documents, number = [], -1
            for i, who in enumerate(row_owner):
                if who >= 0 and (i == 0 or row_owner[i - 1] != who):
                    number += 1
                documents.append(number if who >= 0 else -1)
            shown = [token if d >= 0 else filler for token, d in zip(row_ids, documents, strict=True)]
            labels = [
                shown[i + 1]
                if i + 1 < length and documents[i] >= 0 and documents[i] == documents[i + 1]
                else IGNORE
                for i in range(length)
            ]
            if number >= 0:
                rows[tuple(shown), tuple(documents), tuple(labels)] += 1
        return rows

    @pytest.mark.parametrize("length", [16, 8, 4, 32, 48])
    def test_rows_labels_and_documents_are_those_of_the_stream_cut_at_that_length(self, novel, length):
        batches = StagedBatches([StageData(str(novel), 1, seq_len=length)], seed=2)
        per_epoch = len(batches.sources[0]) * batches.stages[0].legs[0].parts
        found = Counter()
        for ids, documents, labels in texts_of(batches, range(per_epoch)):
            if any(d >= 0 for d in documents):
                found[tuple(ids), tuple(documents), tuple(labels)] += 1
        assert found == self.expected(novel, length)

    @pytest.mark.parametrize("lengths", [(16, 8, 16), (4, 16, 8), (8, 4, 16), (32, 8, 16)])
    def test_every_token_of_an_epoch_once_over_stages_of_other_lengths(self, novel, lengths):
        """At any length a row is counted by its tokens: what is not held out comes once, what is never."""
        _, owner = self.stream(novel)
        stages = [StageData(str(novel), 1, 7, length) for length in lengths[:-1]]
        staged = StagedBatches([*stages, StageData(str(novel), 1, None, lengths[-1])], seed=6)
        tokens, b, leg = 0, 0, staged.stages[-1].legs[0]
        while b < 14 or leg.after(b - 14).epoch == 0:
            tokens += sum((part["document_ids"] >= 0).sum().item() for part in staged.batch(b, 0, 1, 1))
            b += 1
        assert tokens == sum(who >= 0 for who in owner)

    def test_the_last_micro_batch_of_any_world_is_of_the_stages_length(self, novel):
        staged = StagedBatches([StageData(str(novel), 4, 2, 8), StageData(str(novel), 2, None, 16)], seed=0)
        for world, micro in ((1, 1), (2, 1), (1, 2)):
            assert texts_of(staged, range(5), world, micro) == texts_of(staged, range(5))
        assert staged.batch(1, 0, 1, 2)[0]["input_ids"].shape == (2, 8)
        assert staged.batch(2, 0, 1, 2)[0]["labels"].shape == (2, 16)

    def test_lengths_that_do_not_fit_are_refused_naming_both(self, novel):
        first = StageData(str(novel), 1, 2)
        for length, said in (
            (24, "was packed in rows of 16 tokens, and rows of 24 are neither a part nor a multiple"),
            (5, "rows of 5 tokens are no multiple of 2, to which documents in"),
        ):
            with pytest.raises(shards.ShardError, match=f"stages.1: .*{said}"):
                StagedBatches([first, StageData(str(novel), 1, seq_len=length, name="stages.1")], seed=0)
        with pytest.raises(
            shards.ShardError, match=r"read in rows of 16 tokens .* pack it with --seq-len 32"
        ):
            StagedBatches([StageData(str(novel), 1, 2), StageData(str(novel), 1, seq_len=32)], seed=0)
        StagedBatches(  # its remedy
            [StageData(str(novel), 1, 2, seq_len=32), StageData(str(novel), 1, seq_len=16)], seed=0
        )
        with pytest.raises(shards.ShardError, match="its split 'holdout' has no rows of 32"):
            PackedSequences(novel, "holdout", 32)

    def test_a_tail_that_was_dropped_stays_out_of_longer_rows(self, packed):
        folder = packed(["ab" * 21], seq_len=8, tail="drop")  # 43 tokens: five rows of 8
        assert len(PackedSequences(folder, "train", 16)) == 2
        assert len(PackedSequences(folder, "train", 40)) == 1
        with pytest.raises(shards.ShardError, match="has not one row of 48 tokens"):
            PackedSequences(folder, "train", 48)


def test_stages_of_another_tokenizer_are_refused(rows_of, tmp_path):
    other = toy_corpus.byte_tokenizer(tmp_path / "tok", filler_tokens=3)
    source = toy_corpus.write_jsonl(tmp_path / "in.jsonl", ["a" * 7])
    assert toy_corpus.pack(tmp_path / "out", [source], other, "--seq-len", 8) == 0
    with pytest.raises(shards.ShardError, match="sha256 differ"):
        StagedBatches([StageData(rows_of(4), 1, 2), StageData(tmp_path / "out", 1)], seed=0)


class TestLeftOut:
    SPANS = ((3, 4), (7, 7), (9, 12), (30, 33))

    def test_batches_are_consumed_and_not_given(self, rows_of):
        """As a run whose stages take the batches that are left out as steps, without these steps."""
        a, b = rows_of(10), rows_of(7)

        def stages(*steps):
            both = [(a, 3), (b, 1)]
            return [StageData(s, n, k) for s, n, k in zip((both, both, b, a), (2, 4, 2, 2), (*steps, None))]

        some = StagedBatches(stages(3, 4, 6), seed=5, left_out=merged(self.SPANS))
        # Steps 1 to 3 are batches 1, 2, 5; 4 to 7 are 6, 8, 13, 14; then 15 to 20, and the rest.
        every = StagedBatches(stages(5, 9, 6), seed=5)
        kept = [n for n in range(1, 60) if not any(first <= n <= last for first, last in self.SPANS)]
        for world, micro in ((1, 2), (2, 1)):
            ours = sample_ids(some, range(40), world, micro)
            assert ours == sample_ids(every, [n - 1 for n in kept[:40]], world, micro)
        assert [some.stage_of(step) for step in (2, 3, 6, 7, 12, 13)] == [0, 1, 1, 2, 2, 3]
        for index in range(4):
            assert some.stages[index].first == every.stages[index].first
        assert some.drawn(1, 4) == every.drawn(1, 9), "what is used up"
        assert [some.passed_over(*stage) for stage in ((0, 3), (1, 4), (2, 6), (3, 40))] == [2, 5, 0, 4]

    def test_what_is_left_out_later_does_not_change_what_was(self, rows_of):
        sources = [StageData([(rows_of(10), 3), (rows_of(7), 1)], 4)]
        before = StagedBatches(sources, seed=1, left_out=merged([[3, 4]]))
        after = StagedBatches(sources, seed=1, left_out=merged([[3, 4], [10, 12]]))
        assert sample_ids(before, range(7)) == sample_ids(after, range(7))
        assert sample_ids(before, [7]) != sample_ids(after, [7])
        assert sample_ids(before, [10]) == sample_ids(after, [7])
