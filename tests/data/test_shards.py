"""The shard format: pinned bytes, borders of types, damage, positions beyond 2^31."""

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wm_ds.data import shards


def write(root, documents, *, vocab_size=320, align=4, eos_id=300, filler_id=0, index=0, batches=1):
    """Publish a shard of the given documents (lists of ids without EOS), added in `batches` parts."""
    with shards.ShardWriter(
        root, index, vocab_size=vocab_size, eos_id=eos_id, filler_id=filler_id, align=align
    ) as writer:
        for part in range(batches):
            some = documents[part * len(documents) // batches : (part + 1) * len(documents) // batches]
            offsets = np.cumsum([0, *map(len, some)])
            writer.add(np.array([i for document in some for i in document], dtype=np.uint32), offsets)
        return writer.publish({}, {})


def test_golden_shard(tmp_path):
    """These bytes are the format. If this fails, old data cannot be read: raise shards.VERSION instead."""
    record = write(tmp_path, [[1, 2, 3], [7], [258, 5, 6, 9, 10]], align=4)
    expected_tokens = struct.pack("<16H", 1, 2, 3, 300, 7, 300, 0, 0, 258, 5, 6, 9, 10, 300, 0, 0)
    expected_ends = struct.pack("<3q", 4, 6, 14)
    assert (tmp_path / "shard-000000" / "tokens.bin").read_bytes() == expected_tokens
    assert (tmp_path / "shard-000000" / "ends.bin").read_bytes() == expected_ends
    assert record == {
        "name": "shard-000000",
        "length": 16,
        "tokens": 12,
        "documents": 3,
        "sha256_tokens": "adac44d7951f44fbf7c9af5d87962a58dacb73794dc8bdacf151a9d954cce006",
        "sha256_ends": "43408573e7e68709674829b11c71e2c9b34214e6d93bb87a11a49612efd5629c",
    }
    assert json.loads((tmp_path / "shard-000000" / "shard.json").read_text()) == record


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "<u2"), (65536, "<u2"), (65537, "<u4"), (2**32, "<u4")]
)
def test_token_type_follows_the_vocabulary(vocab_size, dtype):
    assert shards.token_dtype(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("vocab_size", [0, 2**32 + 1])
def test_no_type_for_impossible_vocabularies(vocab_size):
    with pytest.raises(shards.ShardError, match=str(vocab_size)):
        shards.token_dtype(vocab_size)


def test_ids_at_the_border_of_16_bits(tmp_path):
    small = write(tmp_path / "a", [[65535, 0]], vocab_size=65536, eos_id=65535)
    tokens, _ = shards.open_shard(tmp_path / "a", small, shards.token_dtype(65536))
    assert tokens.tolist()[:3] == [65535, 0, 65535]
    large = write(tmp_path / "b", [[65536, 0]], vocab_size=65537, eos_id=65536)
    tokens, _ = shards.open_shard(tmp_path / "b", large, shards.token_dtype(65537))
    assert tokens.tolist()[:3] == [65536, 0, 65536]


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(shards.ShardError, match="produced id 320, but its vocabulary ends at 319"):
        write(tmp_path, [[5, 320]])
    assert list(tmp_path.iterdir()) == [], "the refused shard must leave nothing behind"


def test_an_empty_document_is_refused(tmp_path):
    with pytest.raises(shards.ShardError, match="empty document"):
        write(tmp_path, [[5], []])


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=9), min_size=1, max_size=12),
    align=st.integers(1, 9),
    batches=st.integers(1, 4),
)
def test_documents_come_back(tmp_path_factory, documents, align, batches):
    root = tmp_path_factory.mktemp("shard")
    record = write(root, documents, align=align, batches=batches, vocab_size=320, eos_id=319)
    tokens, ends = shards.open_shard(root, record, np.dtype("<u2"))
    start = 0
    for document, end in zip(documents, ends.tolist(), strict=True):
        assert tokens[start:end].tolist() == [*document, 319]
        following = -(-end // align) * align
        assert set(tokens[end:following].tolist()) <= {0}
        start = following
    assert start == record["length"] == len(tokens)
    assert record["tokens"] == sum(map(len, documents)) + len(documents)
    shards.verify_shard(root, record)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    align=st.integers(1, 5),
    start=st.integers(0, 60),
    size=st.integers(1, 40),
)
def test_spans_agree_with_marking_every_position(lengths, align, start, size):
    owner, ends = [], []
    for number, length in enumerate(lengths):
        owner += [number] * length
        ends.append(len(owner))
        owner += [-1] * (-len(owner) % align)
    stop = min(start + size, len(owner))
    starts, stops = shards.document_spans(np.array(ends), start, stop, align)
    marked = [-1] * len(owner)
    first = next((n for n, end in enumerate(ends) if end > start), 0)
    for number, (a, b) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        assert a < b
        marked[a:b] = [first + number] * (b - a)
    assert marked[start:stop] == owner[start:stop]


def test_a_shard_appears_only_when_published(tmp_path):
    with shards.ShardWriter(tmp_path, 3, vocab_size=320, eos_id=300, filler_id=0, align=1) as writer:
        writer.add(np.array([1, 2], dtype=np.uint32), np.array([0, 2]))
        assert shards.read_record(tmp_path, "shard-000003") is None
        assert not (tmp_path / "shard-000003").exists()
        writer.publish({}, {})
    assert shards.read_record(tmp_path, "shard-000003")["tokens"] == 3


def test_a_twin_that_was_faster_is_accepted_and_a_stranger_is_not(tmp_path):
    first = write(tmp_path, [[1, 2, 3]])
    assert write(tmp_path, [[1, 2, 3]]) == first
    with pytest.raises(OSError, match="shard-000000"):
        write(tmp_path, [[1, 2, 4]])
    assert shards.read_record(tmp_path, "shard-000000") == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["shard-000000"]


@pytest.mark.parametrize("name", ["tokens", "ends"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_the_damaged_file(tmp_path, name, damage):
    record = write(tmp_path, [[1, 2, 3], [4]])
    path = tmp_path / "shard-000000" / f"{name}.bin"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-2])
    else:
        path.unlink()
    with pytest.raises(shards.ShardError, match=f"{name}.bin is (damaged|missing)"):
        shards.verify_shard(tmp_path, record)


def test_a_cut_file_is_refused_at_opening(tmp_path):
    record = write(tmp_path, [[1, 2, 3]])
    path = tmp_path / "shard-000000" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(shards.ShardError, match="6 bytes; the manifest says 4 values of 2 bytes"):
        shards.open_shard(tmp_path, record, np.dtype("<u2"))


class TestManifest:
    def manifest(self, root, **changes):
        good = {"format": shards.FORMAT, "version": shards.VERSION, "vocab_size": 70257, "dtype": "uint32"}
        shards.write_json(root / shards.MANIFEST, good | changes)

    def test_good(self, tmp_path):
        self.manifest(tmp_path)
        assert shards.load_manifest(tmp_path)["vocab_size"] == 70257

    def test_token_type_that_does_not_fit_the_vocabulary(self, tmp_path):
        self.manifest(tmp_path, dtype="uint16")
        with pytest.raises(shards.ShardError, match="dtype 'uint16', but a vocabulary of 70257 is"):
            shards.load_manifest(tmp_path)

    def test_vocabulary_that_does_not_fit_the_token_type(self, tmp_path):
        self.manifest(tmp_path, vocab_size=320)
        with pytest.raises(shards.ShardError, match="dtype 'uint32', but a vocabulary of 320 is"):
            shards.load_manifest(tmp_path)

    def test_another_version(self, tmp_path):
        self.manifest(tmp_path, version=99)
        with pytest.raises(shards.ShardError, match="version 99"):
            shards.load_manifest(tmp_path)

    def test_not_json(self, tmp_path):
        (tmp_path / shards.MANIFEST).write_text('{"format"')
        with pytest.raises(shards.ShardError, match="not JSON"):
            shards.load_manifest(tmp_path)

    def test_missing(self, tmp_path):
        with pytest.raises(shards.ShardError, match="not a packed data set"):
            shards.load_manifest(tmp_path)

    def test_unfinished(self, tmp_path):
        write(tmp_path, [[1]])
        with pytest.raises(shards.ShardError, match=r"has not finished.*merge"):
            shards.load_manifest(tmp_path)


def sparse(path, dtype, count, values):
    """A file of `count` zeros, with `values` {position: value}; takes a few blocks on disk."""
    with open(path, "wb") as file:
        file.truncate(count * dtype.itemsize)
        for position, value in values.items():
            file.seek(position * dtype.itemsize)
            file.write(np.array([value], dtype=dtype).tobytes())


def test_more_tokens_than_32_bits_count(tmp_path):
    """A shard of 2^32 + 12 tokens: what stands behind 2^31 and 2^32 is read from there."""
    length = 2**32 + 12
    folder = tmp_path / "shard-000000"
    folder.mkdir()
    values = {2**31 + 5: 111, 2**32 + 3: 222, length - 1: 300, 5: 99, 3: 98}
    sparse(folder / "tokens.bin", np.dtype("<u2"), length, values)
    np.array([2**31 + 6, 2**32 + 8, length], dtype="<i8").tofile(folder / "ends.bin")
    record = {"name": "shard-000000", "length": length, "documents": 3}
    tokens, ends = shards.open_shard(tmp_path, record, np.dtype("<u2"))
    assert {position: int(tokens[position]) for position in values} == values
    starts, stops = shards.document_spans(ends, 2**32 - 4, length, 4)
    assert starts.tolist() == [2**32 - 4, 2**32 + 8]
    assert stops.tolist() == [2**32 + 8, length]
    assert os.stat(folder / "tokens.bin").st_blocks * 512 < 2**24, "the test meant to write a sparse file"


def test_more_documents_than_32_bits_count(tmp_path):
    """An index of 2^31 + 8 document ends, of which the last eight are not zero."""
    count = 2**31 + 8
    folder = tmp_path / "shard-000000"
    folder.mkdir()
    sparse(folder / "ends.bin", np.dtype("<i8"), count, {2**31 + i: 4 * i + 3 for i in range(8)})
    np.zeros(32, dtype="<u2").tofile(folder / "tokens.bin")
    record = {"name": "shard-000000", "length": 32, "documents": count}
    _, ends = shards.open_shard(tmp_path, record, np.dtype("<u2"))
    starts, stops = shards.document_spans(ends, 13, 26, 4)
    assert (starts.tolist(), stops.tolist()) == ([13, 16, 20, 24], [15, 19, 23, 26])


def test_writer_counts_beyond_32_bits(tmp_path):
    """The writer's positions are 64-bit: a shard that already holds 2^32 positions goes on right."""
    with shards.ShardWriter(tmp_path, 0, vocab_size=320, eos_id=300, filler_id=0, align=4) as writer:
        writer.length = 2**32
        writer.add(np.array([1, 2, 3, 4], dtype=np.uint32), np.array([0, 1, 4]))
        writer.publish({}, {})
    ends = np.fromfile(tmp_path / "shard-000000" / "ends.bin", dtype="<i8")
    assert ends.tolist() == [2**32 + 2, 2**32 + 8]
