"""Reading documents: bytes that files really contain, and every kind of damage."""

import gzip
import json
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from wm_ds.packing.documents import BLANK, PieceReader, Reading, lines_before
from wm_ds.packing.inputs import Piece, cut, find_inputs


def read(path, size=1 << 30, **reading):
    """All records of a file, cut into pieces of about `size`: (texts, [(problem, line or row)], pieces)."""
    options = Reading(**reading)
    inputs = find_inputs([str(path)])
    texts, problems, pieces = [], [], []
    for unit in cut(inputs, size, options.txt_split):
        for piece in unit:
            pieces.append(piece)
            offset = lines_before(inputs[0], piece)
            for record in PieceReader(inputs[0], piece, options, lambda _: None):
                if record.text is not None:
                    texts.append(record.text)
                else:
                    problems.append((record.problem, record.where + offset))
    return texts, problems, pieces


def jsonl(tmp_path, data, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


class TestJsonl:
    def test_line_ends_and_blank_lines(self, tmp_path):
        data = b'{"text":"a"}\r\n\r\n{"text":"b"}\n \t \n\n{"text":"c"}'
        texts, problems, _ = read(jsonl(tmp_path, data))
        assert texts == ["a", "b", "c"]
        assert problems == [(BLANK, 1), (BLANK, 3), (BLANK, 4)]

    def test_separators_inside_a_text_do_not_separate_records(self, tmp_path):
        text = "one\u2028two\u2029three\u0085four\u000bfive\u000csix\u001cseven\reight"
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        assert read(jsonl(tmp_path, line * 2))[0] == [text, text]

    def test_byte_order_mark(self, tmp_path):
        plain = b'{"text":"a"}\n{"text":"b\xef\xbb\xbf"}\n'
        texts, problems, _ = read(jsonl(tmp_path, b"\xef\xbb\xbf" + plain))
        assert texts == read(jsonl(tmp_path, plain, "plain.jsonl"))[0] == ["a", "b\ufeff"]
        assert problems == []

    def test_byte_order_mark_belongs_to_the_beginning_only(self, tmp_path):
        data = b'{"text":"a"}\n\xef\xbb\xbf{"text":"b"}\n'
        assert read(jsonl(tmp_path, data))[1] == [("invalid_json", 1)]

    def test_nul(self, tmp_path):
        data = b'{"text":"a\\u0000b"}\n{"text":"a\x00b"}\n{"text":"c"}\n'
        texts, problems, _ = read(jsonl(tmp_path, data))
        assert texts == ["a\0b", "c"]
        assert problems == [("invalid_json", 1)]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"{not json}", "invalid_json"),
            (b'{"text":"a"} x', "invalid_json"),
            (b'{"text":"a"', "invalid_json"),
            (b"[" * 100_000, "invalid_json"),
            (b'["text"]', "not_an_object"),
            (b"null", "not_an_object"),
            (b'{"txt":"a"}', "missing_field"),
            (b'{"text":null}', "missing_value"),
            (b'{"text":["a"]}', "not_a_string"),
            (b'{"text":5}', "not_a_string"),
            (b'{"text":true}', "not_a_string"),
            (b'{"text":{"x":1}}', "not_a_string"),
            (b'{"text":"\\ud800"}', "lone_surrogate"),
            (b'{"text":"x\\udc00\\ud800"}', "lone_surrogate"),
            (b'{"text":"\xff"}', "invalid_utf8"),
            (b'{"text":"\xc3"}', "invalid_utf8"),
            (b'{"text":"\xed\xa0\x80"}', "invalid_utf8"),
            (b'\xff\xfe{"text":"a"}', "invalid_utf8"),
        ],
    )
    def test_bad_records(self, tmp_path, line, reason):
        data = b'{"text":"before"}\n' + line + b'\n{"text":"after"}\n'
        texts, problems, _ = read(jsonl(tmp_path, data))
        assert texts == ["before", "after"]
        assert problems == [(reason, 1)]

    def test_surrogate_pairs_are_characters(self, tmp_path):
        assert read(jsonl(tmp_path, b'{"text":"\\ud83d\\ude00"}'))[0] == ["\U0001f600"]

    def test_other_field(self, tmp_path):
        assert read(jsonl(tmp_path, b'{"content":"a","text":5}'), text_field="content")[0] == ["a"]

    def test_long_lines_across_blocks(self, tmp_path):
        texts = ["x" * 3_000_000, "y", "z" * 1_100_000]
        data = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)
        assert read(jsonl(tmp_path, data))[0] == texts


@settings(deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=30),
    size=st.integers(1, 300),
    crlf=st.booleans(),
    escaped=st.booleans(),
)
def test_pieces_of_jsonl_join_to_the_whole(tmp_path_factory, texts, size, crlf, escaped):
    end = b"\r\n" if crlf else b"\n"
    data = b"".join(json.dumps({"text": t}, ensure_ascii=escaped).encode() + end for t in texts)
    path = jsonl(tmp_path_factory.mktemp("in"), data)
    found, problems, pieces = read(path, size)
    assert found == texts
    assert problems == []
    if pieces:
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces)][: len(pieces)]
        assert pieces[-1].stop == len(data)


@settings(deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
        .map(lambda t: "x" + t.replace("\n", " ").replace("\r", " ")),
        max_size=12,
    ),
    size=st.integers(1, 80),
    crlf=st.booleans(),
    gap=st.sampled_from(["\n", "\n\n", " \t\n", "\n \n\n"]),
)  # fmt: skip
def test_pieces_of_paragraphs_join_to_the_whole(tmp_path_factory, texts, size, crlf, gap):
    text = ("\n" + gap).join(texts)
    if crlf:
        text = text.replace("\n", "\r\n")
    path = jsonl(tmp_path_factory.mktemp("in"), text.encode(), "in.txt")
    assert read(path, size, txt_split="blank-lines")[0] == texts


class TestTxt:
    def test_a_file_is_a_document_byte_for_byte(self, tmp_path):
        data = "  lead\r\n\r\nline\u2028x\0\n\n tail \n"
        path = jsonl(tmp_path, b"\xef\xbb\xbf" + data.encode(), "in.txt")
        assert read(path, size=5)[0] == [data]

    def test_blank_lines_separate(self, tmp_path):
        data = b"\xef\xbb\xbf\n\none\ntwo\r\n\r\n  \t\r\nthree \r\n\n\nfour\n"
        texts, problems, _ = read(jsonl(tmp_path, data, "in.txt"), txt_split="blank-lines")
        assert texts == ["one\r\ntwo".replace("\r\n", "\n"), "three ", "four"]
        assert problems == []

    def test_inner_line_ends_stay(self, tmp_path):
        data = b"one\r\ntwo\r\n\r\nthree"
        assert read(jsonl(tmp_path, data, "in.txt"), txt_split="blank-lines")[0] == ["one\r\ntwo", "three"]

    def test_invalid_utf8(self, tmp_path):
        path = jsonl(tmp_path, b"good\n\nb\xffd\n\nfine", "in.txt")
        assert read(path)[1] == [("invalid_utf8", 0)]
        texts, problems, _ = read(path, size=3, txt_split="blank-lines")
        assert texts == ["good", "fine"]
        assert problems == [("invalid_utf8", 2)]


class TestCompression:
    lines = b"".join(b'{"text":"record %d"}\n' % i for i in range(1000))

    def texts(self):
        return [f"record {i}" for i in range(1000)]

    def test_members_and_frames_one_after_another(self, tmp_path):
        half = self.lines.index(b'{"text":"record 400"}')
        parts = self.lines[:half], self.lines[half:]
        path = jsonl(tmp_path, b"".join(map(gzip.compress, parts)), "a.jsonl.gz")
        assert read(path)[:2] == (self.texts(), [])
        path = jsonl(tmp_path, b"".join(map(zstandard.compress, parts)), "a.jsonl.zst")
        assert read(path)[:2] == (self.texts(), [])

    def test_a_member_that_ends_inside_a_line(self, tmp_path):
        data = b"".join(gzip.compress(part) for part in (self.lines[:77], b"", self.lines[77:]))
        assert read(jsonl(tmp_path, data, "a.jsonl.gz"))[:2] == (self.texts(), [])

    def test_zero_padding_behind_a_member(self, tmp_path):
        data = gzip.compress(self.lines) + bytes(512)
        assert read(jsonl(tmp_path, data, "a.jsonl.gz"))[:2] == (self.texts(), [])

    def test_skippable_zstandard_frame(self, tmp_path):
        skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
        data = skippable + zstandard.compress(self.lines) + skippable
        assert read(jsonl(tmp_path, data, "a.jsonl.zst"))[:2] == (self.texts(), [])

    @pytest.mark.parametrize("suffix", ["gz", "zst"])
    def test_byte_order_mark_inside(self, tmp_path, suffix):
        compress = gzip.compress if suffix == "gz" else zstandard.compress
        path = jsonl(tmp_path, compress(b"\xef\xbb\xbf" + self.lines), f"a.jsonl.{suffix}")
        assert read(path)[:2] == (self.texts(), [])

    def test_truncated_gzip(self, tmp_path):
        path = jsonl(tmp_path, gzip.compress(self.lines)[:-10], "a.jsonl.gz")
        texts, problems, _ = read(path)
        assert [reason for reason, _ in problems] == ["truncated"]
        assert problems[0][1] == len(texts)
        assert texts == self.texts()[: len(texts)]
        assert len(texts) > 900

    def test_truncated_zstandard(self, tmp_path):
        frames = zstandard.compress(self.lines[:20_000][: self.lines[:20_000].rindex(b"\n") + 1])
        data = frames + zstandard.compress(self.lines)[:-10]
        texts, problems, _ = read(jsonl(tmp_path, data, "a.jsonl.zst"))
        assert [reason for reason, _ in problems] == ["truncated"]
        assert len(texts) > 800

    @pytest.mark.parametrize("suffix", ["gz", "zst"])
    @pytest.mark.parametrize("kept", [1, 3, 7])
    def test_only_a_beginning(self, tmp_path, suffix, kept):
        compress = gzip.compress if suffix == "gz" else zstandard.compress
        path = jsonl(tmp_path, compress(self.lines)[:kept], f"a.jsonl.{suffix}")
        assert read(path)[:2] == ([], [("truncated", 0)])

    def test_damage_in_the_middle(self, tmp_path):
        import random

        noise = random.Random(0).randbytes(30_000).hex().encode()
        lines = b"".join(b'{"text":"%s"}\n' % noise[i : i + 300] for i in range(0, 60_000, 300))
        data = bytearray(gzip.compress(lines))
        data[len(data) // 2] ^= 0xFF
        texts, problems, _ = read(jsonl(tmp_path, bytes(data), "a.jsonl.gz"))
        assert [reason for reason, _ in problems if reason != "invalid_json"] == ["corrupt_compression"]
        assert len(texts) <= 200

    def test_not_compressed_at_all(self, tmp_path):
        for suffix in ("gz", "zst"):
            path = jsonl(tmp_path, self.lines, f"a.jsonl.{suffix}")
            assert read(path)[:2] == ([], [("corrupt_compression", 0)])

    def test_garbage_behind_the_end(self, tmp_path):
        path = jsonl(tmp_path, gzip.compress(self.lines) + b"garbage", "a.jsonl.gz")
        assert read(path)[:2] == (self.texts(), [("trailing_data", 1000)])

    def test_txt(self, tmp_path):
        path = jsonl(tmp_path, gzip.compress(b"one\n\ntwo"), "a.txt.gz")
        assert read(path)[0] == ["one\n\ntwo"]
        assert read(path, txt_split="blank-lines")[0] == ["one", "two"]
        path = jsonl(tmp_path, zlib.compress(b"x"), "b.txt.zst")
        assert read(path)[1] == [("corrupt_compression", 0)]


class TestParquet:
    def write(self, tmp_path, column, **options):
        path = tmp_path / "in.parquet"
        pq.write_table(pa.table({"text": column, "other": pa.array(range(len(column)))}), path, **options)
        return path

    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
    @pytest.mark.parametrize("size", [1, 1 << 30])
    def test_nulls_and_row_groups(self, tmp_path, kind, size):
        values = ["a", None, "é\U0001f600", "", "x" * 100] * 20
        path = self.write(tmp_path, pa.array(values, pa.string()).cast(kind), row_group_size=7)
        texts, problems, pieces = read(path, size)
        assert texts == [value for value in values if value is not None]
        assert [reason for reason, _ in problems] == ["missing_value"] * 20
        assert len(pieces) == (15 if size == 1 else 1)

    def test_dictionary(self, tmp_path):
        path = self.write(tmp_path, pa.array(["a", None, "b", "a"]).dictionary_encode())
        assert read(path)[:2] == (["a", "b", "a"], [("missing_value", 1)])

    def test_numbers(self, tmp_path):
        path = self.write(tmp_path, pa.array([1, None, 3]))
        assert read(path)[:2] == ([], [("not_a_string", 0), ("missing_value", 1), ("not_a_string", 2)])

    def test_missing_column(self, tmp_path):
        path = self.write(tmp_path, pa.array(["a", "b"]))
        assert read(path, text_field="body")[:2] == ([], [("missing_field", 0), ("missing_field", 1)])

    def test_invalid_utf8_in_a_string_column(self, tmp_path):
        raw = pa.array([b"good", b"b\xffd", b"fine"], pa.binary())
        column = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
        path = self.write(tmp_path, column)
        assert read(path)[:2] == (["good", "fine"], [("invalid_utf8", 1)])

    def test_not_parquet(self, tmp_path):
        path = jsonl(tmp_path, b"PAR1 nonsense", "in.parquet")
        assert read(path)[:2] == ([], [("corrupt_file", 0)])

    def test_truncated(self, tmp_path):
        path = self.write(tmp_path, pa.array(["a"] * 100))
        path.write_bytes(path.read_bytes()[:-20])
        assert read(path)[:2] == ([], [("corrupt_file", 0)])


def test_digest_is_of_what_was_read(tmp_path):
    path = jsonl(tmp_path, b'{"text":"a"}\n{"text":"b"}\n')
    item = find_inputs([str(path)])[0]

    def digest():
        reader = PieceReader(item, Piece(0, 0, 26, 26), Reading(), lambda _: None)
        list(reader)
        return reader.digest()

    before = digest()
    assert digest() == before
    path.write_bytes(b'{"text":"a"}\n{"text":"c"}\n')
    assert digest() != before
