"""The packing command from outside: counts, tokenizers, the tail, input formats, refusals."""

import gzip
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import toy_corpus
from tests.support.toy_corpus import (
    EOS,
    documents,
    lines,
    manifest,
    pack,
    packed_bytes,
    run,
    texts,
    write_jsonl,
)


class TestCounts:
    @pytest.mark.parametrize("empty_at", [0, 1, 4])
    def test_empty_and_blank(self, tmp_path, tok, capsys, empty_at):
        records = [b'{"text":"a"}', b'{"text":" \\n\\t"}', b"", b'{"text":"b"}']
        records.insert(empty_at, b'{"text":""}')
        assert pack(tmp_path / "out", [lines(tmp_path, *records)], tok, "--seq-len", 8) == 0
        assert "read=4 written=3 empty=1 bad=0 blank_lines=1" in capsys.readouterr().out
        assert texts(tmp_path / "out") == ["a", " \n\t", "b"]
        assert [len(ids) for ids in documents(tmp_path / "out")] == [2, 4, 2], "one EOS each, no lone EOS"

    @pytest.mark.parametrize("data", [b'{"text":""}\n', b"", b"\n\n"])
    def test_nothing_to_pack(self, tmp_path, tok, capsys, data):
        (tmp_path / "in.jsonl").write_bytes(data)
        assert pack(tmp_path / "out", [tmp_path / "in.jsonl"], tok) == 1
        assert "error: nothing to pack" in capsys.readouterr().err
        assert not (tmp_path / "out" / "manifest.json").exists()

    def test_one_eos_and_all_lengths_add_up(self, tmp_path, tok):
        template = toy_corpus.byte_tokenizer(tmp_path / "template", template=True)
        source = write_jsonl(tmp_path / "in.jsonl", ["a", "bb", "ccc"])
        found = []
        for number, tokenizer in enumerate((tok, template)):
            out = tmp_path / f"out{number}"
            assert pack(out, [source], tokenizer, "--seq-len", 4, "--align", 1) == 0
            eos = manifest(out)["eos_id"]
            found.append(documents(out))
            assert [ids.count(eos) for ids in found[-1]] == [1, 1, 1]
            assert all(ids[-1] == eos for ids in found[-1])
            assert sum(map(len, found[-1])) == manifest(out)["counts"]["tokens"] == 6 + 3
        assert found[0] == found[1]

    @pytest.mark.parametrize("options", [(), ("--eos", "</s>")])
    def test_an_eos_that_does_not_exist(self, tmp_path, tok, capsys, options):
        tokenizer = tok if options else toy_corpus.byte_tokenizer(tmp_path / "t", eos=None)
        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        assert pack(tmp_path / "out", [source], tokenizer, *options) == 1
        assert ("'</s>' is not in the vocabulary" if options else "--eos") in capsys.readouterr().err
        assert not (tmp_path / "out").exists(), "stop before anything is written"

    @pytest.mark.parametrize("workers", [1, 2])
    def test_special_token_text(self, tmp_path, tok, workers):
        records = [f"say {EOS} now", "z", "<|im_start|>"]
        source = write_jsonl(tmp_path / "in.jsonl", records)
        options = ("--workers", workers, "--shard-bytes", 20, "--seq-len", 8)
        assert pack(tmp_path / "out", [source], tok, *options) == 0
        found = documents(tmp_path / "out")
        eos = manifest(tmp_path / "out")["eos_id"]
        stream = np.concatenate(
            [np.fromfile(path, dtype="<u2") for path in sorted((tmp_path / "out").glob("shard-*/tokens.bin"))]
        )
        assert (stream == eos).sum() == len(found) == 3
        assert texts(tmp_path / "out") == records

    def test_large_vocabulary(self, tmp_path):
        big = toy_corpus.byte_tokenizer(tmp_path / "big", filler_tokens=70_000)
        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        assert pack(tmp_path / "out", [source], big, "--seq-len", 8) == 0
        assert manifest(tmp_path / "out")["dtype"] == "uint32"
        assert documents(tmp_path / "out")[0][-1] == manifest(tmp_path / "out")["eos_id"] == 70_262

    def test_filler_is_not_counted_and_is_not_eos(self, tmp_path, tok):
        source = write_jsonl(tmp_path / "in.jsonl", ["abc", "de"])
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 16, "--align", 8) == 0
        counts = manifest(tmp_path / "out")["counts"]
        assert (counts["tokens"], counts["filler"], counts["text_bytes"]) == (7, 9, 5)
        assert manifest(tmp_path / "out")["filler_id"] != manifest(tmp_path / "out")["eos_id"]

    def test_json_summary(self, tmp_path, tok, capsys):
        source = write_jsonl(tmp_path / "in.jsonl", ["abc", ""])
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8, "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["counts"]["written"] == 1
        assert summary["sequences"] == 1


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=8),
    align=st.sampled_from([1, 4]),
    shard_bytes=st.integers(10, 300),
    trained=st.booleans(),
)
def test_text_to_shards_to_text(tok, small_tok, tmp_path_factory, records, align, shard_bytes, trained):
    """Byte for byte, through byte-level BPE and through our own trained tokenizer."""
    root = tmp_path_factory.mktemp("trip")
    source = write_jsonl(root / "in.jsonl", ["never empty", *records])
    options = ("--seq-len", 8, "--align", align, "--shard-bytes", shard_bytes)
    assert pack(root / "out", [source], small_tok if trained else tok, *options) == 0
    assert texts(root / "out") == ["never empty", *(text for text in records if text)]


@pytest.fixture(scope="module")
def small_tok(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    source = write_jsonl(root / "in.jsonl", toy_corpus.numbered(100))
    train = toy_corpus.tool("train_tokenizer")
    assert train.main(["--input", str(source), "--vocab-size", "290", "--output", str(root / "tok")]) == 0
    return root / "tok"


class TestEncoders:
    RECORDS = ("the winter", "in<think>the", f"a{EOS}b", "e\u0301\0\u2028 x", "12 other rivers  \n") * 5

    def test_quicktok_gives_the_same_shards(self, tmp_path, capsys):
        pytest.importorskip("quicktok", reason="the optional package quicktok-v1 is not installed")
        tok = toy_corpus.byte_tokenizer(tmp_path / "tok", words=toy_corpus.QWEN_WORDS)
        source = write_jsonl(tmp_path / "in.jsonl", list(self.RECORDS))
        options = ("--seq-len", 16, "--shard-bytes", 100)
        for encoder, workers in (("tokenizers", 1), ("quicktok", 1), ("quicktok", 2)):
            out = tmp_path / f"{encoder}{workers}"
            more = ("--encoder", encoder, "--workers", workers)
            assert pack(out, [source], tok, *options, *more) == 0
            assert not list(out.glob(".*")), "neither lock nor tables stay behind"
        assert documents(tmp_path / "tokenizers1") == documents(tmp_path / "quicktok1")
        assert packed_bytes(tmp_path / "quicktok1") == packed_bytes(tmp_path / "quicktok2")
        assert texts(tmp_path / "quicktok1") == list(self.RECORDS)

    def test_quicktok_for_a_tokenizer_that_it_does_not_know(self, tmp_path, tok, capsys):
        pytest.importorskip("quicktok", reason="the optional package quicktok-v1 is not installed")
        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        assert pack(tmp_path / "out", [source], tok, "--encoder", "quicktok") == 1
        assert "use --encoder tokenizers" in capsys.readouterr().err

    def test_sentencepiece_model(self, tmp_path, small_tok):
        source = write_jsonl(tmp_path / "in.jsonl", list(self.RECORDS))
        for name, tokenizer in (("folder", small_tok), ("model", small_tok / "sentencepiece.model")):
            assert pack(tmp_path / name, [source], tokenizer, "--seq-len", 16) == 0
            assert texts(tmp_path / name) == list(self.RECORDS)
        assert documents(tmp_path / "folder") == documents(tmp_path / "model")


class TestTail:
    @pytest.mark.parametrize(("tail", "sequences", "dropped"), [("pad", 3, 0), ("drop", 2, 4)])
    def test_stated_and_counted(self, tmp_path, tok, capsys, tail, sequences, dropped):
        source = write_jsonl(tmp_path / "in.jsonl", ["a" * 9, "bcdefgh", "i"])  # 10 + 8 + 2 positions
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8, "--align", 1, "--tail", tail) == 0
        assert f"(tail {tail}): {dropped} tokens" in capsys.readouterr().out
        assert manifest(tmp_path / "out")["sequences"] == sequences

    def test_dropped_filler_is_no_data(self, tmp_path, tok):
        source = write_jsonl(tmp_path / "in.jsonl", ["a" * 7, "b"])
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8, "--align", 4, "--tail", "drop") == 0
        assert manifest(tmp_path / "out")["counts"]["dropped_tokens"] == 2

    def test_holdout_larger_than_the_corpus(self, tmp_path, tok, capsys):
        source = write_jsonl(tmp_path / "in.jsonl", ["a" * 7, "b"])
        assert pack(tmp_path / "out", [source], tok, "--seq-len", 8, "--holdout", 2) == 1
        assert "--holdout 2 leaves nothing to train on: the corpus is 2 sequences" in capsys.readouterr().err

    def test_a_corpus_shorter_than_one_sequence(self, tmp_path, tok, capsys):
        source = write_jsonl(tmp_path / "in.jsonl", ["abc"])
        options = ("--seq-len", 64)
        assert pack(tmp_path / "out", [source], tok, *options, "--tail", "drop") == 1
        error = capsys.readouterr().err
        assert "less than one sequence of 64" in error
        assert "holdout" not in error
        assert pack(tmp_path / "padded", [source], tok, *options, "--tail", "pad") == 0  # as it says
        shorter = ("--seq-len", 4, "--align", 4, "--tail", "drop")
        assert pack(tmp_path / "shorter", [source], tok, *shorter) == 0

    @pytest.mark.parametrize("options", [("--seq-len", 12, "--align", 8), ("--align", 0), ("--seq-len", 1)])
    def test_settings_that_cannot_work(self, tmp_path, tok, capsys, options):
        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        assert pack(tmp_path / "out", [source], tok, *options) == 1
        assert "error: --seq-len" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


class TestInputKinds:
    RECORDS = ("first", "se\0cond \U0001f600", "\u2028third\u0085", "", "x" * 500, " tail \n")

    def test_all_kinds_give_the_same_data(self, tmp_path, tok):
        plain = "".join(json.dumps({"text": text}) + "\n" for text in self.RECORDS).encode()
        cut = plain.index(b"\n", 20) + 1
        kinds = {
            "plain.jsonl": plain,
            "bom.jsonl": b"\xef\xbb\xbf" + plain,
            "crlf.jsonl": plain.replace(b"\n", b"\r\n"),
            "raw.jsonl": "".join(
                json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in self.RECORDS
            ).encode(),
            "two.jsonl.gz": gzip.compress(plain[:cut]) + gzip.compress(plain[cut:]),
            "two.jsonl.zst": zstandard.compress(plain[:cut]) + zstandard.compress(plain[cut:]),
        }
        for name, data in kinds.items():
            (tmp_path / name).write_bytes(data)
        pq.write_table(pa.table({"text": list(self.RECORDS)}), tmp_path / "table.parquet", row_group_size=2)
        results = {}
        for name in [*kinds, "table.parquet"]:
            out = tmp_path / f"out-{name}"
            assert pack(out, [tmp_path / name], tok, "--seq-len", 16) == 0
            results[name] = [(out / "shard-000000" / f).read_bytes() for f in ("tokens.bin", "ends.bin")]
        assert all(result == results["plain.jsonl"] for result in results.values())
        assert texts(tmp_path / "out-plain.jsonl") == [text for text in self.RECORDS if text]

    def test_byte_order_mark_of_the_second_file(self, tmp_path, tok):
        first = lines(tmp_path, b'{"text":"a"}', name="1.jsonl")
        second = lines(tmp_path, b'\xef\xbb\xbf{"text":"\xef\xbb\xbfb"}', name="2.jsonl")
        assert pack(tmp_path / "out", [first, second], tok, "--seq-len", 8) == 0
        assert texts(tmp_path / "out") == ["a", "\ufeffb"]
        assert [item["documents"] for item in manifest(tmp_path / "out")["inputs"]] == [1, 1]

    def test_txt_files_and_paragraphs(self, tmp_path, tok):
        for number, text in enumerate(["one\n\ntwo\n", "three"]):
            (tmp_path / f"{number}.txt").write_text(text)
        source = str(tmp_path / "*.txt")
        assert pack(tmp_path / "files", [source], tok, "--seq-len", 8) == 0
        assert texts(tmp_path / "files") == ["one\n\ntwo\n", "three"]
        assert pack(tmp_path / "parts", [source], tok, "--seq-len", 8, "--txt-split", "blank-lines") == 0
        assert texts(tmp_path / "parts") == ["one", "two", "three"]

    def test_unknown_suffix(self, tmp_path, tok, capsys):
        (tmp_path / "x.csv").write_text("a")
        assert pack(tmp_path / "out", [tmp_path / "x.csv"], tok) == 1
        assert "'.csv'" in capsys.readouterr().err

    def test_output_inside_the_input(self, tmp_path, tok, capsys):
        write_jsonl(tmp_path / "a.jsonl", ["a"])
        assert pack(tmp_path / "out", [tmp_path], tok) == 1
        assert "lies inside --input" in capsys.readouterr().err


class TestRefusals:
    OPTIONS = ("--seq-len", 16, "--shard-bytes", 200)

    @pytest.fixture
    def begun(self, tmp_path, tok):
        source = write_jsonl(tmp_path / "in.jsonl", toy_corpus.numbered(20))
        other = write_jsonl(tmp_path / "other.jsonl", ["x"])
        assert pack(tmp_path / "out", [source, other], tok, *self.OPTIONS) == 0
        return source, other

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--seq-len", 32), "settings seq_len was 16, is now 32"),
            (("--align", 4), "settings align was 8, is now 4"),
            (("--holdout", 1), "settings holdout was 0, is now 1"),
            (("--shuffle-seed", 5), "settings shuffle_seed was 0, is now 5"),
            (("--tail", "drop"), "settings tail was 'pad', is now 'drop'"),
            (("--shard-bytes", 300), "settings shard_bytes was 200, is now 300"),
            (("--text-field", "body"), "settings text_field was 'text', is now 'body'"),
            (("--eos", "<|im_start|>"), "tokenizer eos_id was 262, is now 261"),
            (("--literal-tokens", "all"), "settings literal_tokens was 'special', is now 'all'"),
        ],
    )
    def test_changed_settings(self, begun, tmp_path, tok, capsys, options, words):
        before = packed_bytes(tmp_path / "out")
        assert pack(tmp_path / "out", [*begun], tok, *self.OPTIONS, *options) == 1
        assert words in capsys.readouterr().err
        assert packed_bytes(tmp_path / "out") == before

    def test_another_tokenizer(self, begun, tmp_path, capsys):
        other = toy_corpus.byte_tokenizer(tmp_path / "t", filler_tokens=3)
        assert pack(tmp_path / "out", [*begun], other, *self.OPTIONS) == 1
        assert "tokenizer sha256 was" in capsys.readouterr().err

    def test_input_missing_added_or_reordered(self, begun, tmp_path, tok, capsys):
        source, other = begun
        new = write_jsonl(tmp_path / "new.jsonl", ["x"])
        for inputs, words in (
            ([source], f"input {other} is missing now"),
            ([source, other, new], f"input {new} is new"),
            ([other, source], "in another order"),
        ):
            assert pack(tmp_path / "out", inputs, tok, *self.OPTIONS) == 1
            assert words in capsys.readouterr().err

    def test_input_of_another_size(self, begun, tmp_path, tok, capsys):
        write_jsonl(begun[1], ["xyz"])
        assert pack(tmp_path / "out", [*begun], tok, *self.OPTIONS) == 1
        assert f"input {begun[1]} changed: it had 14 bytes, now 16" in capsys.readouterr().err

    def test_input_of_the_same_size_with_other_content(self, begun, tmp_path, tok, capsys):
        write_jsonl(begun[1], ["y"])
        os.utime(begun[1], ns=(1, 1))
        assert pack(tmp_path / "out", [*begun], tok, *self.OPTIONS) == 1
        assert f"input {begun[1]} changed after shard-" in capsys.readouterr().err

    def test_a_touched_input_is_the_same_input(self, begun, tmp_path, tok):
        os.utime(begun[0], ns=(1, 1))
        assert pack(tmp_path / "out", [*begun], tok, *self.OPTIONS) == 0

    def test_a_folder_with_other_files(self, tmp_path, tok, capsys):
        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("x")
        assert pack(tmp_path / "out", [source], tok) == 1
        assert "holds other files (thesis.tex)" in capsys.readouterr().err

    def test_two_packers_at_once(self, tmp_path, tok, capsys):
        import fcntl

        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        (tmp_path / "out").mkdir()
        with open(tmp_path / "out" / ".lock-0", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert pack(tmp_path / "out", [source], tok) == 1
        assert "another pack_data is at work" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "options",
        [("--task", 1), ("--task", 2, "--tasks", 2), ("--workers", 0), ("--task", -1, "--tasks", 2)],
    )
    def test_arguments(self, tmp_path, tok, options):
        source = write_jsonl(tmp_path / "in.jsonl", ["a"])
        with pytest.raises(SystemExit) as stop:
            pack(tmp_path / "out", [source], tok, *options)
        assert stop.value.code == 2


def test_help_runs():
    result = run([sys.executable, str(toy_corpus.ROOT / "tools" / "pack_data.py"), "--help"])
    assert result.returncode == 0
    assert "--on-bad-record" in result.stdout
