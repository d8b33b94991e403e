"""The loader: orders, worlds, resume, prefetch, mixing."""

from itertools import islice

import numpy as np
import pytest
import torch

from tests.support import toy_corpus
from wm_ds.data import shards
from wm_ds.data.loader import GlobalBatches
from wm_ds.data.sequences import PackedSequences, evaluation_batches


def sample_ids(batches, steps, world=1, micro=2):
    """Global sample ids in order, step by step, put together from every rank's micro-batches."""
    result = []
    for b in steps:
        ranks = [batches.batch(b, rank, world, micro) for rank in range(world)]
        for parts in zip(*ranks, strict=True):
            result += [int(i) for part in parts for i in part["sample_ids"]]
    return result


class TestOrder:
    def test_every_epoch_visits_every_row_once_in_its_own_order(self, rows_of):
        batches = GlobalBatches(rows_of(10), global_batch=2, seed=1)
        epochs = [sample_ids(batches, range(5 * e, 5 * e + 5)) for e in range(4)]
        assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 4

    def test_seed_changes_the_order(self, rows_of):
        folder = rows_of(10)
        orders = {
            tuple(sample_ids(GlobalBatches(folder, global_batch=2, seed=s), range(5))) for s in range(5)
        }
        assert len(orders) == 5

    @pytest.mark.parametrize("stop", [1, 3, 4, 5, 6, 7, 9])
    def test_resume_before_at_and_after_an_epochs_end(self, rows_of, stop):
        """10 rows, global batch 2, two epochs: joined order of two runs = the unbroken one."""
        folder = rows_of(10)

        def run(start, end):
            iterator = GlobalBatches(folder, global_batch=2, seed=5).iterate(start, 0, 1, 2, workers=2)
            with iterator:
                ids = [int(i) for parts in islice(iterator, end - start) for i in parts[0]["sample_ids"]]
            assert iterator.next_batch == end
            return ids

        assert run(0, stop) + run(stop, 10) == run(0, 10)

    def test_partial_batches_carry_over_the_epochs_end(self, rows_of):
        """10 rows, 8 a step: nothing dropped, nothing doubled, step count times 8 samples."""
        batches = GlobalBatches(rows_of(10), global_batch=8, seed=2)
        ids = sample_ids(batches, range(5), world=2, micro=2)
        assert len(ids) == 40
        for epoch in range(4):
            assert sorted(ids[10 * epoch : 10 * epoch + 10]) == list(range(10))

    def test_a_global_batch_larger_than_the_epoch(self, rows_of):
        ids = sample_ids(GlobalBatches(rows_of(3), global_batch=8, seed=2), range(3))
        assert all(sorted(ids[3 * e : 3 * e + 3]) == [0, 1, 2] for e in range(8))

    def test_a_batch_does_not_depend_on_what_was_read_before(self, rows_of):
        folder = rows_of(24)
        fresh = GlobalBatches(folder, global_batch=4, seed=0).batch(1000, 0, 1, 4)[0]
        used = GlobalBatches(folder, global_batch=4, seed=0)
        sample_ids(used, range(9))
        again = used.batch(1000, 0, 1, 4)[0]
        assert all(torch.equal(fresh[name], again[name]) for name in fresh)


class TestWorlds:
    @pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
    def test_the_same_global_order_at_every_world_size(self, rows_of, world):
        folder = rows_of(50)
        expected = sample_ids(GlobalBatches(folder, global_batch=48, seed=9), range(3), 1, 48)
        for micro in {1, 48 // world // 2, 48 // world}:
            batches = GlobalBatches(folder, global_batch=48, seed=9)
            assert sample_ids(batches, range(3), world, micro) == expected

    def test_world_size_changes_in_the_middle(self, rows_of):
        """24 rows, 4 a step: world 4 for 3 steps, then 2, then 1, is one epoch in the unbroken order."""
        folder = rows_of(24)
        batches = GlobalBatches(folder, global_batch=4, seed=4)
        broken = (
            sample_ids(batches, range(0, 3), 4, 1)
            + sample_ids(batches, range(3, 5), 2, 1)
            + sample_ids(batches, range(5, 6), 1, 4)
        )
        assert broken == sample_ids(GlobalBatches(folder, global_batch=4, seed=4), range(6), 1, 4)
        assert sorted(broken) == list(range(24))

    @pytest.mark.parametrize("workers", [0, 1, 3, 8])
    def test_the_same_tensors_with_any_number_of_workers(self, packed, workers):
        folder = packed(toy_corpus.numbered(60), seq_len=32, align=4, shard_bytes=500)
        batches = GlobalBatches(folder, global_batch=6, seed=0)
        with batches.iterate(2, 1, 3, 1, workers=workers, prefetch=5) as iterator:
            for b, parts in zip(range(2, 30), iterator):
                expected = batches.batch(b, 1, 3, 1)
                assert all(
                    torch.equal(a[name], e[name]) for a, e in zip(parts, expected, strict=True) for name in e
                )

    def test_what_does_not_divide_is_refused(self, rows_of):
        batches = GlobalBatches(rows_of(8), global_batch=8, seed=0)
        with pytest.raises(ValueError, match="global_batch 8 does not divide over 3 ranks x micro_batch 1"):
            batches.batch(0, 0, 3, 1)
        with pytest.raises(ValueError, match="rank 2"):
            batches.batch(0, 2, 2, 1)


class TestPrefetch:
    def test_an_error_reaches_the_consumer(self, rows_of):
        with (
            GlobalBatches(rows_of(8), global_batch=8, seed=0).iterate(0, 0, 3, 1) as iterator,
            pytest.raises(ValueError, match="does not divide"),
        ):
            next(iterator)

    def test_waiting_time_is_measured(self, rows_of, monkeypatch):
        batches = GlobalBatches(rows_of(8), global_batch=2, seed=0)
        import time

        read = batches.batch
        monkeypatch.setattr(batches, "batch", lambda *args: (time.sleep(0.05), read(*args))[1])
        with batches.iterate(0, 0, 1, 2, workers=0) as iterator:
            next(iterator)
            next(iterator)
        assert iterator.waited_s >= 0.1


class TestErrors:
    """A read that fails moves nothing: the next call gives what the failed one should have given."""

    def failing(self, monkeypatch, fails):
        """Make each call of `PackedSequences.cut` number n in `fails` raise."""
        read, calls = PackedSequences.cut, 0

        def cut(self, start, length):
            nonlocal calls
            calls += 1
            if calls - 1 in fails:
                raise OSError(5, "Input/output error")
            return read(self, start, length)

        monkeypatch.setattr(PackedSequences, "cut", cut)

    @pytest.mark.parametrize("workers", [0, 1, 3])
    @pytest.mark.parametrize("fails", [{0}, {3}, {3, 4}, {2, 7, 8, 9}])
    def test_batches(self, rows_of, monkeypatch, workers, fails):
        batches = GlobalBatches(rows_of(12), global_batch=1, seed=3)
        expected = [batches.batch(b, 0, 1, 1)[0]["sample_ids"].item() for b in range(10)]
        self.failing(monkeypatch, fails)
        found, errors = [], 0
        with batches.iterate(0, 0, 1, 1, workers=workers, prefetch=4) as iterator:
            while len(found) < 10:
                before = iterator.next_batch
                try:
                    found.append(next(iterator)[0]["sample_ids"].item())
                except OSError:
                    errors += 1
                    assert iterator.next_batch == before
                else:
                    assert iterator.next_batch == before + 1
        assert found == expected
        assert errors > 0

    def test_a_closed_iterator_keeps_its_state(self, rows_of):
        iterator = GlobalBatches(rows_of(12), global_batch=1, seed=3).iterate(5, 0, 1, 1)
        next(iterator)
        iterator.close()
        with pytest.raises(RuntimeError):
            next(iterator)
        assert iterator.next_batch == 6

    def test_evaluation(self, rows_of, monkeypatch):
        sequences = PackedSequences(rows_of(7))
        expected = [b["sample_ids"].tolist() for b in evaluation_batches(sequences, 0, 1, 2)]
        self.failing(monkeypatch, {0, 3, 4})
        stream, found, errors = evaluation_batches(sequences, 0, 1, 2), [], 0
        assert len(stream) == 4
        while len(found) < len(stream):
            try:
                found.append(next(stream)["sample_ids"].tolist())
            except OSError:
                errors += 1
        assert found == expected
        assert errors == 3
        with pytest.raises(StopIteration):
            next(stream)


class TestMixing:
    def shares(self, batches, count=65536):
        source, _ = batches.samples(0, count)
        return np.bincount(source, minlength=len(batches.sources)) / count

    def test_weights_hold_exactly_over_a_block(self, rows_of):
        a, b, c = rows_of(900), rows_of(500), rows_of(300)
        batches = GlobalBatches([(a, 5), (b, 2), (c, 1)], global_batch=4, seed=0)
        assert self.shares(batches).tolist() == [5 / 8, 2 / 8, 1 / 8]
        early = self.shares(batches, 2000)
        assert np.abs(early - [5 / 8, 2 / 8, 1 / 8]).max() < 0.05, "mixed from the beginning, not in turns"

    def test_each_source_runs_through_its_own_epochs(self, rows_of):
        batches = GlobalBatches(
            [{"path": str(rows_of(100)), "weight": 0.7}, {"path": str(rows_of(40)), "weight": 0.3}],
            global_batch=4,
            seed=0,
        )
        source, row = batches.samples(65536 - 300, 1000)  # across the border of a block
        whole_source, whole_row = batches.samples(0, 65536 + 700)
        assert (whole_source[65536 - 300 :] == source).all()
        assert (whole_row[65536 - 300 :] == row).all()
        for number, rows in ((0, 100), (1, 40)):
            mine = whole_row[whole_source == number]
            epochs = mine[: mine.size // rows * rows].reshape(-1, rows)
            assert (np.sort(epochs, axis=1) == np.arange(rows)).all()
            assert len({tuple(epoch) for epoch in epochs[:4].tolist()}) > 1

    def test_pure_function_of_the_batch_number(self, rows_of):
        sources = [(rows_of(10), 3), (rows_of(7), 1)]
        one = GlobalBatches(sources, global_batch=6, seed=1)
        late = sample_ids(one, [20_000, 3])
        assert late == sample_ids(GlobalBatches(sources, global_batch=6, seed=1), [20_000, 3], 3, 2)

    def test_sample_ids_name_rows_of_all_sources(self, rows_of):
        batches = GlobalBatches([(rows_of(10), 1), (rows_of(7), 1)], global_batch=4, seed=1)
        assert batches.rows == 17
        assert set(sample_ids(batches, range(40))) == set(range(17))

    def test_refusals(self, rows_of, packed, tmp_path):
        good = rows_of(4)
        with pytest.raises(ValueError, match="weight 0"):
            GlobalBatches([(good, 0)], global_batch=1, seed=0)
        with pytest.raises(ValueError, match="never be drawn"):
            GlobalBatches([(good, 1), (rows_of(5), 1e-9)], global_batch=1, seed=0)
        with pytest.raises(shards.ShardError, match="sequences of 16"):
            GlobalBatches([good, packed(["a" * 40], seq_len=16)], global_batch=1, seed=0)
        other = toy_corpus.byte_tokenizer(tmp_path / "tok", filler_tokens=3)
        source = toy_corpus.write_jsonl(tmp_path / "in.jsonl", ["a" * 7])
        assert toy_corpus.pack(tmp_path / "out", [source], other, "--seq-len", 8) == 0
        with pytest.raises(shards.ShardError, match="sha256 differ"):
            GlobalBatches([good, tmp_path / "out"], global_batch=1, seed=0)
        with pytest.raises(ValueError, match="no data sources"):
            GlobalBatches([], global_batch=1, seed=0)


def test_more_sequences_than_32_bits_count(tmp_path):
    """Sparse shards of 2^33 positions in rows of 2: 2^32 samples, each read where it is."""
    length, first = 2**33, 2**32 + 2
    values = {2**33 - 2: 51, 2**33 - 1: 52, 2**32: 41, 2**32 + 1: 42, 2**32 + 2: 43, 10: 21, 11: 22}
    records = []
    for number, size in enumerate((first, length - first)):
        folder = tmp_path / shards.shard_name(number)
        folder.mkdir()
        with open(folder / "tokens.bin", "wb") as file:
            file.truncate(size * 2)
            for position, value in values.items():
                if number * first <= position < number * first + size:
                    file.seek(2 * (position - number * first))
                    file.write(np.array([value], dtype="<u2").tobytes())
        np.array([size], dtype="<i8").tofile(folder / "ends.bin")
        sums = {"sha256_tokens": "", "sha256_ends": ""}  # of gigabytes of zeros; nobody compares them here
        records.append({"name": folder.name, "length": size, "tokens": size, "documents": 1} | sums)
    manifest = {
        "format": shards.FORMAT, "version": shards.VERSION, "vocab_size": 320, "dtype": "uint16", "eos_id": 1,
        "filler_id": 0, "seq_len": 2, "align": 1, "tail": "pad", "shuffle_seed": 0, "sequences": length // 2,
        "holdout": 5000, "shards": records, "tokenizer": {"name": "none", "sha256": "0"},
    }  # fmt: skip
    shards.write_json(tmp_path / shards.MANIFEST, manifest)
    train, holdout = PackedSequences(tmp_path), PackedSequences(tmp_path, "holdout")
    assert len(train) + len(holdout) == 2**32
    for position in (2**33 - 2, 2**32, 2**32 + 2, 10):
        assert train.sequence(position // 2)[0].tolist() == [
            values[position],
            values.get(position + 1, 0),
        ]
    held = holdout.sequence_numbers(np.arange(5000))
    assert np.unique(held).size == 5000
    assert 0.3 < (held > 2**31).mean() < 0.7
    batches = GlobalBatches(tmp_path, global_batch=128, seed=0)
    far = batches.batch(len(train) // 128 + 7, 0, 1, 128)[0]  # in the second epoch, after 2^32 samples
    assert far["input_ids"].shape == (128, 2)
    assert 0.3 < (far["sample_ids"] > 2**31).double().mean() < 0.7
    assert train[len(train) - 1].document_ids.tolist() == [0, 0]
