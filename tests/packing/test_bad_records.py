"""Records that cannot be packed: refused by file and line, or skipped and counted."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.toy_corpus import (
    lines,
    manifest,
    pack,
    texts,
)


class TestBadRecords:
    BAD = (b'{"txt":"a"}', b'{"text":null}', b'{"text":["a"]}', b'{"text":5}', b'{"text":{"x":1}}')

    def test_fail_names_file_and_line(self, tmp_path, tok, capsys):
        source = lines(tmp_path, b'{"text":"a"}', b"", b'{"text":"b"}', self.BAD[0])
        assert pack(tmp_path / "out", [source], tok) == 1
        error = capsys.readouterr().err
        assert f"{source}:4: missing_field" in error
        assert "--on-bad-record skip" in error
        assert not (tmp_path / "out" / "manifest.json").exists()

    @pytest.mark.parametrize("workers", [1, 3])
    def test_the_first_bad_record_is_named_whatever_the_workers(self, tmp_path, tok, capsys, workers):
        records = [b'{"text":"%s"}' % (b"x" * (50 * (i % 7))) for i in range(300)]
        records[120] = records[200] = records[290] = b"{broken"
        source = lines(tmp_path, *records)
        options = ("--workers", workers, "--shard-bytes", 2000)
        assert pack(tmp_path / "out", [source], tok, *options) == 1
        assert f"{source}:121: invalid_json" in capsys.readouterr().err

    def test_skip_counts_by_reason_with_places(self, tmp_path, tok, capsys):
        source = lines(tmp_path, b'{"text":"a"}', *self.BAD, b'{"text":"\\ud800"}', b'{"text":"b"}')
        options = ("--on-bad-record", "skip", "--seq-len", 8, "--shard-bytes", 30)
        assert pack(tmp_path / "out", [source], tok, *options) == 0
        assert texts(tmp_path / "out") == ["a", "b"]
        found = manifest(tmp_path / "out")
        assert found["bad"] == {
            "lone_surrogate": 1,
            "missing_field": 1,
            "missing_value": 1,
            "not_a_string": 3,
        }
        assert found["counts"]["read"] == 8
        assert [example["place"] for example in found["bad_examples"]] == [
            f"{source}:{n}" for n in range(2, 7)
        ]
        out = capsys.readouterr().out
        assert "not_a_string=3" in out
        assert f"{source}:2: missing_field (no field 'text'; it has ['txt'])" in out
        assert "None" not in texts(tmp_path / "out")

    def test_skip_after_fail_goes_on_and_fail_after_skip_refuses(self, tmp_path, tok, capsys):
        source = lines(tmp_path, b'{"text":"a"}', self.BAD[1], b'{"text":"b"}')
        options = ("--seq-len", 8, "--shard-bytes", 13)
        assert pack(tmp_path / "out", [source], tok, *options) == 1
        assert pack(tmp_path / "out", [source], tok, *options, "--on-bad-record", "skip") == 0
        assert pack(tmp_path / "out", [source], tok, *options) == 1
        assert f"{source}:2: missing_value" in capsys.readouterr().err

    def test_truncated_gzip(self, tmp_path, tok, capsys):
        data = gzip.compress(b"".join(b'{"text":"record %d"}\n' % i for i in range(1000)))[:-10]
        source = tmp_path / "x.jsonl.gz"
        source.write_bytes(data)
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8) == 1
        error = capsys.readouterr().err
        assert "truncated" in error
        count = int(error.split(" lines came before")[0].split()[-1])
        assert count > 900, "the message says how many records there were"
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8, "--allow-truncated") == 0
        assert manifest(tmp_path / "out")["bad"] == {"truncated": 1}
        assert manifest(tmp_path / "out")["counts"]["written"] == count

    def test_parquet_nulls(self, tmp_path, tok, capsys):
        source = tmp_path / "x.parquet"
        pq.write_table(pa.table({"text": ["a", None, "b", None]}), source, row_group_size=2)
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8) == 1
        assert "row 1 from row group 0" in capsys.readouterr().err
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8, "--on-bad-record", "skip") == 0
        assert manifest(tmp_path / "out")["bad"] == {"missing_value": 2}
        assert texts(tmp_path / "out") == ["a", "b"]
