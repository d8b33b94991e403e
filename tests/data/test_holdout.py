"""Held out by document: against a naive reading of which document has tokens in which row."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import toy_corpus
from wm_ds.data import shards, shuffle
from wm_ds.data.loader import GlobalBatches
from wm_ds.data.sequences import PackedSequences

SEQ = 8


def make(root, tok, lengths, *options):
    """Documents of so many bytes, each of a letter pair of its own as far as they go; packed."""
    texts = [(chr(0x4E00 + number)) * max(1, length // 3) for number, length in enumerate(lengths)]
    source = toy_corpus.write_jsonl(root / "in.jsonl", texts)
    status = toy_corpus.pack(root / "out", [source], tok, "--seq-len", SEQ, *options)
    return root / "out" if status == 0 else None


def naive(folder):
    """(document number of each position, -1 on filler, in rows [R, T]; ids [R, T]) from the files alone."""
    manifest = json.loads((folder / "manifest.json").read_text())
    owner, ids, number = [], [], 0
    for record in manifest["shards"]:
        tokens = np.fromfile(folder / record["name"] / "tokens.bin", "<u2")
        of = np.full(tokens.size, -1)
        start = 0
        for end in np.fromfile(folder / record["name"] / "ends.bin", "<i8").tolist():
            of[start:end] = number
            number, start = number + 1, -(-end // manifest["align"]) * manifest["align"]
        owner.append(of)
        ids.append(tokens)
    size = manifest["sequences"] * SEQ
    owner, ids = np.concatenate(owner)[:size], np.concatenate(ids)[:size]
    short = size - owner.size
    owner = np.pad(owner, (0, short), constant_values=-1).reshape(-1, SEQ)
    return owner, np.pad(ids, (0, short), constant_values=manifest["filler_id"]).reshape(-1, SEQ)


def rows_of(sequences):
    """{sequence number: (ids, document ids)} of a split."""
    numbers = sequences.sequence_numbers(np.arange(len(sequences)))
    assert len(set(numbers.tolist())) == len(sequences)
    return {number: sequences.sequence(number) for number in numbers.tolist()}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 70), min_size=4, max_size=25),
    holdout=st.integers(1, 6),
    align=st.sampled_from([1, 4, 8]),
    tail=st.sampled_from(["pad", "drop"]),
    shard_bytes=st.integers(20, 400),
    seed=st.integers(0, 5),
)
def test_training_sees_no_document_of_a_held_out_row(
    tok, tmp_path_factory, lengths, holdout, align, tail, shard_bytes, seed
):
    options = ("--holdout", holdout, "--align", align, "--tail", tail, "--shard-bytes", shard_bytes)
    options += ("--shuffle-seed", seed)
    root = tmp_path_factory.mktemp("packed")
    by_row = make(root / "row", tok, lengths, *options)
    by_document = make(root / "document", tok, lengths, *options, "--holdout-by", "document")
    if by_row is None:
        assert by_document is None
        return
    owner, ids = naive(by_row)
    held = rows_of(PackedSequences(by_row, "holdout"))
    secret = {int(document) for row in held for document in owner[row]} - {-1}
    hidden = np.isin(owner, list(secret))
    shown = (owner >= 0) & ~hidden
    expected = {row for row in range(len(owner)) if row not in held and shown[row].any()}
    empty = {row for row in range(len(owner)) if row not in held and not (owner[row] >= 0).any()}
    if by_document is None:
        assert not expected - empty
        return
    assert {name: (by_document / name).read_bytes() for name in files(by_document)} == {
        name: (by_row / name).read_bytes() for name in files(by_row)
    }, "shards are the same"
    found = rows_of(PackedSequences(by_document, "holdout"))
    assert found.keys() == held.keys()
    for row in held:
        np.testing.assert_array_equal(found[row][0], ids[row])
        np.testing.assert_array_equal(found[row][1], held[row][1])
    train = rows_of(PackedSequences(by_document, "train"))
    assert expected - empty <= train.keys() <= expected | empty
    manifest = json.loads((by_document / "manifest.json").read_text())
    for row, (row_ids, documents) in train.items():
        here = shown[row]
        np.testing.assert_array_equal(documents >= 0, here)
        np.testing.assert_array_equal(row_ids[here], ids[row][here])
        assert (row_ids[~here] == manifest["filler_id"]).all()
        real = owner[row][here]
        np.testing.assert_array_equal(documents[here], real - real.min() if real.size else real)
    assert manifest["holdout_by"] == "document"
    assert manifest["version"] == 2
    left_out = manifest["holdout_left_out"]
    assert left_out["sequences"] == len(owner) - len(held) - len(train)
    outside = hidden[[row for row in range(len(owner)) if row not in held]].sum()
    assert outside <= left_out["positions"] <= outside + align * 2 * len(secret) + align


def files(folder):
    return sorted(
        str(path.relative_to(folder)) for path in folder.glob("shard-*/*.bin") if ".tmp-" not in str(path)
    )


def test_batches_visit_every_row_once(tok, tmp_path):
    folder = make(tmp_path, tok, [60] * 30, "--holdout", 3, "--holdout-by", "document", "--align", 1)
    batches = GlobalBatches(folder, global_batch=1, seed=1)
    count = len(PackedSequences(folder))
    seen = [batches.batch(b, 0, 1, 1)[0] for b in range(count)]
    assert sorted(batch["sample_ids"].item() for batch in seen) == list(range(count))
    assert all((batch["document_ids"] >= 0).any() for batch in seen)


def test_a_corpus_of_one_document(tok, tmp_path, capsys):
    assert make(tmp_path, tok, [300], "--holdout", 1, "--holdout-by", "document") is None
    error = capsys.readouterr().err
    assert "--holdout-by document leaves nothing to train on" in error
    assert make(tmp_path / "again", tok, [300], "--holdout", 1, "--holdout-by", "row")  # as it says


def test_changed_settings_and_missing_spans(tok, tmp_path, capsys):
    lengths, document = [20] * 20, ("--holdout-by", "document")
    folder = make(tmp_path, tok, lengths, "--holdout", 2, *document)
    assert make(tmp_path, tok, lengths, "--holdout", 2) is None
    assert "settings holdout_by was 'document', is now 'row'" in capsys.readouterr().err
    assert make(tmp_path / "row", tok, lengths, "--holdout", 2)
    assert make(tmp_path / "row", tok, lengths, "--holdout", 2, *document) is None
    assert "settings holdout_by was 'row', is now 'document'" in capsys.readouterr().err
    assert make(tmp_path / "none", tok, lengths, *document) is None
    assert "--holdout-by document needs --holdout" in capsys.readouterr().err
    spans = folder / "holdout_spans.bin"
    data = spans.read_bytes()
    spans.write_bytes(data[:-1] + b"x")
    with pytest.raises(shards.ShardError, match=r"holdout_spans\.bin is damaged"):
        PackedSequences(folder)
    spans.unlink()
    with pytest.raises(shards.ShardError, match=r"holdout_spans\.bin is missing"):
        PackedSequences(folder)
    (folder / "manifest.json").unlink()  # as the message says
    assert make(tmp_path, tok, lengths, "--holdout", 2, *document)
    assert spans.read_bytes() == data
    assert len(PackedSequences(folder)) > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_the_order_backwards(size):
    index = np.arange(size)
    for seed in (0, 1, 12345678901234567890):
        there = shuffle.permute(index, size, seed)
        np.testing.assert_array_equal(shuffle.unpermute(there, size, seed), index)
    with pytest.raises(IndexError):
        shuffle.unpermute(np.array([size]), size, 0)
