"""Parquet and Arrow files: every type that holds text, and refusals that are no damage."""

import base64

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from tests.packing.test_compression import records
from wm_ds.packing.columns import values
from wm_ds.packing.file_kinds import InputError
from wm_ds.packing.inputs import cut, find_inputs

TEXTS = ["a", None, "é\U0001f600", "", "x" * 40, "a"]
STRINGS = pa.array(TEXTS)
COLUMNS = {
    "string": STRINGS,
    "large_string": STRINGS.cast(pa.large_string()),
    "string_view": STRINGS.cast(pa.string_view()),
    "binary": STRINGS.cast(pa.binary()),
    "large_binary": STRINGS.cast(pa.large_binary()),
    "binary_view": STRINGS.cast(pa.binary_view()),
    "dictionary": STRINGS.dictionary_encode(),
    "dictionary of large_string": STRINGS.cast(pa.large_string()).dictionary_encode(),
    "dictionary of binary": STRINGS.cast(pa.binary()).dictionary_encode(),
    "dictionary of string_view": pa.DictionaryArray.from_arrays(
        pa.array([1, None, 2, 3, 0, 1]), pa.array(["x" * 40, "a", "é\U0001f600", ""], pa.string_view())
    ),
    "json": pa.ExtensionArray.from_storage(pa.json_(), STRINGS),
    "run ends": pa.RunEndEncodedArray.from_arrays(pa.array(range(1, 7), pa.int32()), STRINGS),
}
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 7], pa.int32()), pa.array(["a", None, "b"]))


@pytest.mark.parametrize("name", COLUMNS)
def test_every_type_of_text(name):
    assert values(COLUMNS[name]) == [None if text is None else text.encode() for text in TEXTS]


def test_runs_and_slices():
    assert values(RUNS) == [b"a", b"a", None, b"b", b"b", b"b", b"b"]
    assert values(RUNS.slice(1, 3)) == [b"a", None, b"b"]
    assert values(COLUMNS["dictionary"].slice(2, 2)) == ["é\U0001f600".encode(), b""]


@pytest.mark.parametrize("name", [name for name in COLUMNS if "run" not in name])
@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "file.arrow"])
def test_in_a_file(tmp_path, name, kind):
    path, table = tmp_path / f"in.{kind}", pa.table({"id": range(6), "text": COLUMNS[name]})
    if kind == "parquet":
        if "view" in name and "dictionary" in name:
            pytest.skip("pyarrow does not write it")
        pq.write_table(table, path, row_group_size=4)
    else:
        write = ipc.new_stream if kind == "stream.arrow" else ipc.new_file
        with write(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    found = records(path)
    assert [record.text for record in found] == TEXTS
    assert [(record.where, record.problem) for record in found if record.text is None] == [
        (1, "missing_value")
    ]


@pytest.mark.parametrize("column", [[1, 2], [True, False], [["a"], ["b"]], [1.5, 2.5]])
def test_other_types_are_named(tmp_path, column):
    table = pa.table({"text": column})
    pq.write_table(table, tmp_path / "in.parquet")
    found = records(tmp_path / "in.parquet")
    assert [record.problem for record in found] == ["not_a_string"] * 2
    assert str(table.schema.field("text").type).partition("<")[0] in found[0].detail


def test_an_arrow_file_without_the_column_or_cut(tmp_path):
    with ipc.new_stream(tmp_path / "in.arrow", pa.schema({"body": pa.string()})) as writer:
        for _ in range(3):
            writer.write_table(pa.table({"body": ["a", "b"]}))
    found = records(tmp_path / "in.arrow")
    assert [(record.problem, record.where) for record in found] == [
        ("missing_field", row) for row in range(6)
    ]
    data = (tmp_path / "in.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(data[: len(data) - 60])
    found = records(tmp_path / "cut.arrow", text_field="body")
    assert [record.text for record in found[:-1]] == ["a", "b", "a", "b"]
    assert (found[-1].problem, found[-1].where) == ("corrupt_file", 4)


def encrypted(path, column, plain_footer):
    import pyarrow.parquet.encryption as encryption

    class Keys(encryption.KmsClient):
        def __init__(self, _):
            super().__init__()

        def wrap_key(self, key, _):
            return base64.b64encode(key).decode()

        def unwrap_key(self, key, _):
            return base64.b64decode(key)

    properties = encryption.CryptoFactory(Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"k": [column]}, plaintext_footer=plain_footer
        ),
    )
    table = pa.table({"text": ["a"] * 10, "other": ["b"] * 10})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        for _ in range(3):
            writer.write_table(table)


@pytest.mark.parametrize("plain_footer", [True, False])
def test_encrypted_parquet_is_named(tmp_path, plain_footer):
    encrypted(tmp_path / "in.parquet", "text", plain_footer)
    with pytest.raises(InputError, match=r"in\.parquet is encrypted"):
        records(tmp_path / "in.parquet")


def test_a_plain_column_beside_an_encrypted_one(tmp_path):
    encrypted(tmp_path / "in.parquet", "other", True)
    assert [record.text for record in records(tmp_path / "in.parquet")] == ["a"] * 30
    inputs = find_inputs([str(tmp_path / "in.parquet")])
    assert len([piece for unit in cut(inputs, 1, "file") for piece in unit]) == 3


@pytest.mark.parametrize(("number", "words"), [(3, "LZO"), (8, "codec value: 8")])
def test_a_codec_that_is_not_known(tmp_path, number, words):
    """The codec of the only column, in the footer as Thrift writes it: field header 0x15, then zigzag."""
    pq.write_table(pa.table({"text": ["a" * 100] * 100}), tmp_path / "in.parquet", compression="gzip")
    data = bytearray((tmp_path / "in.parquet").read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [at for at in range(footer, len(data)) if data[at : at + 2] == b"\x15\x04"]
    refusals = []
    for place in places:
        changed = bytearray(data)
        changed[place + 1] = 2 * number
        (tmp_path / "changed.parquet").write_bytes(changed)
        try:
            records(tmp_path / "changed.parquet")
        except InputError as error:
            refusals.append(str(error))
    assert any(words in refusal for refusal in refusals)
    assert all(f"changed.parquet cannot be read by pyarrow {pa.__version__}" in text for text in refusals)


def test_errors_of_the_system_are_not_damage(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in.parquet")

    def failing(*_args, **_options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", failing)
    with pytest.raises(OSError, match="Input/output"):
        records(tmp_path / "in.parquet")
