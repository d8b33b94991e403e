"""gzip and zstandard: what is damage, what is a refusal, and what is simply read."""

import gzip
from functools import partial

import pytest
import zstandard

from wm_ds.packing.compression import DamagedError, decompress
from wm_ds.packing.documents import PieceReader, Reading
from wm_ds.packing.file_kinds import InputError
from wm_ds.packing.inputs import cut, find_inputs

# Without the clock: parameters of tests, which two processes must collect alike.
gz = partial(gzip.compress, mtime=0)

LINES = b"".join(b'{"text":"record %d"}\n' % number for number in range(10))


def frame(data=LINES, **parameters):
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(**parameters)
    ).compressobj()
    return compressor.compress(data) + compressor.flush()


def decompressed(compression, data, step=5):
    blocks = (data[at : at + step] for at in range(0, len(data), step))
    return b"".join(decompress("x.jsonl", compression, blocks))


def records(path, **reading):
    inputs, options = find_inputs([str(path)]), Reading(**reading)
    return [
        record
        for unit in cut(inputs, 1 << 30, options.txt_split)
        for piece in unit
        for record in PieceReader(inputs[0], piece, options, lambda _: None)
    ]


@pytest.mark.parametrize("log", [10, 27, 28, 31])
@pytest.mark.parametrize("step", [1, 3, 1 << 14])
def test_every_window_of_the_zstd_program(log, step):
    data = frame(window_log=log, enable_ldm=True)
    assert decompressed("zst", data, step) == LINES
    assert decompressed("zst", data + data, step) == LINES * 2


@pytest.mark.parametrize(
    ("compression", "data", "words"),
    [
        ("zst", b"\x28\xb5\x2f\xfd\x00\xff" + frame()[6:], "window of 3,840.0 GiB"),
        ("zst", b"\x28\xb5\x2f\xfd\x08" + frame()[5:], "later version of the format"),
        ("zst", b"\x27\xb5\x2f\xfd" + frame()[4:], "version before 0.8"),
        ("zst", gz(LINES), "holds gzip data"),
        ("zst", b"\xfd7zXZ\0" + LINES, "holds xz data"),
        ("gz", frame(), "holds zstandard data"),
        ("gz", b"BZh91AY&SY" + LINES, "holds bzip2 data"),
        ("gz", b"PK\x03\x04" + LINES, "holds a zip archive"),
        ("gz", b"\x1f\x8b\x07" + gz(LINES)[3:], "compression method 7"),
        ("gz", b"\x1f\x8b\x08\xe0" + gz(LINES)[4:], "flags 0xe0"),
    ],
)
def test_refusals_name_the_reason(compression, data, words):
    with pytest.raises(InputError, match=words):
        decompressed(compression, data)


def test_a_dictionary_that_is_not_in_the_file():
    samples = [b'{"text":"record %d %d"}' % (number, number * 7) for number in range(5000)]
    dictionary = zstandard.train_dictionary(1000, samples)
    data = zstandard.ZstdCompressor(dict_data=dictionary).compress(LINES)
    with pytest.raises(InputError, match=rf"dictionary \(number {dictionary.dict_id()}\)"):
        decompressed("zst", data)


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("garbage", [b"x", b"garbage", b"\n"])
def test_what_follows_the_end_takes_nothing_away(tmp_path, compression, garbage):
    whole = LINES.rstrip(b"\n")  # a last line without a line end
    data = (gzip.compress(whole) if compression == "gz" else zstandard.compress(whole)) + garbage
    (tmp_path / f"in.jsonl.{compression}").write_bytes(data)
    found = records(tmp_path / f"in.jsonl.{compression}")
    assert [record.text for record in found[:-1]] == [f"record {number}" for number in range(10)]
    assert (found[-1].problem, found[-1].where) == ("trailing_data", 10)
    (tmp_path / f"in.txt.{compression}").write_bytes(data)
    for split in ("file", "blank-lines"):
        found = records(tmp_path / f"in.txt.{compression}", txt_split=split)
        assert [record.problem for record in found] == [None, "trailing_data"]
        assert found[0].text == whole.decode()


def test_damage_is_still_damage():
    with pytest.raises(DamagedError) as damage:
        decompressed("gz", gz(LINES)[:-8] + bytes(8))
    assert damage.value.reason == "corrupt_compression"
    data = bytearray(frame(write_checksum=True))
    data[-1] ^= 1
    with pytest.raises(DamagedError) as damage:
        decompressed("zst", bytes(data))
    assert damage.value.reason == "corrupt_compression"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", gz(LINES), "holds gzip data"),
        ("a.txt", zstandard.compress(LINES), "holds zstandard data"),
        ("a.jsonl.gz", gz(gz(LINES)), "holds gzip data"),
        ("a.jsonl", "\ufeff{}".encode("utf-16-le"), "text in UTF-16"),
        ("a.txt.gz", gz("\ufefftext".encode("utf-32-le")), "text in UTF-32"),
        ("a.parquet", gz(LINES), "holds gzip data"),
        ("a.arrow", b"PAR1" + LINES, "holds a parquet file"),
        ("a.json", b'[{"text": "a"},\n{"text": "b"}]', "one JSON array, not one object a line"),
        ("a.json.gz", gz(b'\n[\n{"text": "a"}\n]'), "one JSON array, not one object a line"),
        ("a.jsonl", b'[{"text": "a"}, {"text": "b"}]', "one JSON array, not one object a line"),
        ("a.json", b'{\n  "text": "a"\n}\n', "objects over several lines"),
    ],
)
def test_a_file_that_is_something_else(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name} .*{words}"):
        records(tmp_path / name)


@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.json.gz", "a.json.zst"])
def test_json_is_one_object_a_line(tmp_path, name):
    compress = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(compress(LINES))
    assert [record.text for record in records(tmp_path / name)] == [f"record {i}" for i in range(10)]


def test_texts_that_begin_like_another_format(tmp_path):
    for number, text in enumerate((b"BZh is a name", b"ORC army", b"PAR1 for the course")):
        (tmp_path / f"{number}.txt").write_bytes(text)
        assert [record.text for record in records(tmp_path / f"{number}.txt")] == [text.decode()]
