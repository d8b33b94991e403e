"""The packing command from outside: counts, policies, refusals, workers, tasks, kills, a full disk."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import toy_corpus
from tests.support.toy_corpus import EOS, documents, pack, pack_process, packed_bytes, run, write_jsonl
from wm_ds.data import shards
from wm_ds.packing import workers as packing
from wm_ds.packing.tokenizer import open_decoder


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return toy_corpus.byte_tokenizer(tmp_path_factory.mktemp("tok"))


def lines(tmp_path, *records, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"\n".join(records) + b"\n")
    return path


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def texts(folder):
    decode = open_decoder(folder / "tokenizer")
    return [decode(ids[:-1]) for ids in documents(folder)]


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

    @pytest.mark.parametrize("kind", ["parquet", "jsonl"])
    def test_dataset_folder(self, tmp_path, tok, monkeypatch, kind):
        """The code path of a hub dataset, on a folder that `datasets` loads and streams."""
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "data"
        folder.mkdir()
        parts = [["a", "b\u2028b", ""], ["c" * 300], ["d", "e"]]
        for number, part in enumerate(parts):
            if kind == "parquet":
                pq.write_table(pa.table({"text": part}), folder / f"train-{number:05d}-of-00003.parquet")
            else:
                write_jsonl(folder / f"train-{number:05d}.jsonl", part)
        out = tmp_path / "out"
        assert pack(out, [f"hf:{folder}"], tok, "--seq-len", 16) == 0
        assert texts(out) == ["a", "b\u2028b", "c" * 300, "d", "e"]
        assert len(manifest(out)["shards"]) == 3
        assert manifest(out)["inputs"][0]["dataset"]["split"] == "train"
        if kind == "parquet":
            assert pack(tmp_path / "two", [f"hf:{folder}"], tok, "--seq-len", 16, "--workers", 2) == 0
            assert packed_bytes(out) == packed_bytes(tmp_path / "two")

    def test_dataset_that_changed(self, tmp_path, tok, capsys, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "data"
        write_jsonl(folder / "train.jsonl", ["a", "b"])
        assert pack(tmp_path / "out", [f"hf:{folder}"], tok, "--seq-len", 8) == 0
        write_jsonl(folder / "train.jsonl", ["a", "c"])
        os.utime(folder / "train.jsonl", ns=(1, 1))
        assert pack(tmp_path / "out", [f"hf:{folder}"], tok, "--seq-len", 8) == 1
        assert f"dataset hf:{folder} changed" in capsys.readouterr().err

    @pytest.fixture
    def offline(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def test_a_touched_dataset_is_the_same_dataset(self, tmp_path, tok, offline):
        write_jsonl(tmp_path / "data" / "train.jsonl", ["a", "b"])
        arguments = tmp_path / "out", [f"hf:{tmp_path / 'data'}"], tok, "--seq-len", 8
        assert pack(*arguments) == 0
        os.utime(tmp_path / "data" / "train.jsonl", ns=(1, 1))
        assert pack(*arguments) == 0
        assert texts(tmp_path / "out") == ["a", "b"]

    @pytest.mark.parametrize("kind", ["jsonl", "parquet"])
    def test_dataset_files_with_different_columns(self, tmp_path, tok, offline, kind):
        folder = tmp_path / "data"
        folder.mkdir()
        tables = {"text": ["a"]}, {"text": ["b"], "more": [1]}, {"id": [2], "text": ["c"]}
        for number, table in enumerate(tables):
            if kind == "parquet":
                pq.write_table(pa.table(table), folder / f"{number}.parquet")
            else:
                row = {name: column[0] for name, column in table.items()}
                (folder / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
        assert pack(tmp_path / "out", [f"hf:{folder}"], tok, "--seq-len", 8) == 0
        assert texts(tmp_path / "out") == ["a", "b", "c"]

    @pytest.mark.parametrize("name", ["v1@2024", "hf:odd", "a b", "x,y"])
    def test_a_dataset_folder_with_any_name(self, tmp_path, tok, offline, name, monkeypatch):
        write_jsonl(tmp_path / name / "train.jsonl", ["a"])
        monkeypatch.chdir(tmp_path)
        for number, source in enumerate((f"hf:{tmp_path / name}", f"hf:{name}", name)):
            assert pack(tmp_path / f"out{number}", [source], tok, "--seq-len", 8) == 0
            assert texts(tmp_path / f"out{number}") == ["a"]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("v1@2024", "has no revisions"),
            ("nothing", "there is no folder"),
            ("file.jsonl", "is a file; name it without hf:"),
        ],
    )
    def test_a_dataset_folder_that_does_not_exist(self, tmp_path, tok, capsys, offline, name, words):
        write_jsonl(tmp_path / "v1" / "train.jsonl", ["a"])
        write_jsonl(tmp_path / "file.jsonl", ["a"])
        assert pack(tmp_path / "out", [f"hf:{tmp_path / name}"], tok) == 1
        assert words in capsys.readouterr().err

    @pytest.mark.parametrize("damage", [b'{"text": "b"}\n{broken\n', b'{"text": "b"', b"\xff\xfe\n"])
    def test_a_loader_that_fails_follows_the_policy(self, tmp_path, tok, capfd, offline, damage):
        folder = tmp_path / "data"
        write_jsonl(folder / "1.jsonl", ["a"])
        (folder / "2.jsonl").write_bytes(damage)
        write_jsonl(folder / "3.jsonl", ["c"])
        arguments = tmp_path / "out", [f"hf:{folder}"], tok, "--seq-len", 8
        assert pack(*arguments) == 1
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert f"hf:{folder}, shard 1, row 0: unreadable_rest" in error
        assert "--on-bad-record skip" in error
        assert pack(*arguments, "--on-bad-record", "skip") == 0
        assert texts(tmp_path / "out") == ["a", "c"]
        assert manifest(tmp_path / "out")["bad"] == {"unreadable_rest": 1}
        train = toy_corpus.tool("train_tokenizer")
        capfd.readouterr()
        command = ["--input", f"hf:{folder}", "--vocab-size", "259", "--output", str(tmp_path / "tok")]
        assert train.main(command) == 1
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert "unreadable_rest" in error

    @pytest.mark.parametrize(
        "failure", [OSError(5, "Input/output error"), TimeoutError("a"), ImportError("x")]
    )
    def test_an_outage_is_no_bad_record(self, tmp_path, tok, capfd, offline, monkeypatch, failure):
        import datasets

        def failing(*_):
            raise failure

        write_jsonl(tmp_path / "data" / "1.jsonl", ["a"])
        monkeypatch.setattr(datasets.IterableDataset, "__iter__", failing)
        source = f"hf:{tmp_path / 'data'}"
        assert pack(tmp_path / "out", [source], tok, "--on-bad-record", "skip") == 1
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert "run the same command again" in error or "not installed" in error

    @pytest.mark.parametrize("prefix", ["", "hf:"])
    def test_a_saved_dataset(self, tmp_path, tok, capsys, prefix):
        import datasets

        rows = [f"text {number}" for number in range(20)]
        data = datasets.Dataset.from_dict({"text": rows})
        chosen = data.select(range(5, 20)).shuffle(seed=1)
        chosen.save_to_disk(tmp_path / "one", num_shards=3)
        datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "both")
        capsys.readouterr()
        for name, options, found in (
            ("one", (), list(chosen["text"])),
            ("both", (), rows),
            ("both", ("--dataset-split", "test"), rows[:1]),
        ):
            out = tmp_path / f"out-{name}-{len(options)}"
            assert pack(out, [f"{prefix}{tmp_path / name}"], tok, "--seq-len", 8, *options) == 0
            assert texts(out) == found
        assert pack(tmp_path / "out", [tmp_path / "both"], tok, "--dataset-split", "dev") == 1
        assert "no split 'dev'; name one of train, test with --dataset-split" in capsys.readouterr().err

    def test_dataset_split_that_does_not_exist(self, tmp_path, tok, capsys, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        write_jsonl(tmp_path / "data" / "train.jsonl", ["a"])
        source = f"hf:{tmp_path / 'data'}"
        assert pack(tmp_path / "out", [source], tok, "--dataset-split", "nothing") == 1
        assert "split 'nothing'" in capsys.readouterr().err

    def test_unknown_suffix(self, tmp_path, tok, capsys):
        (tmp_path / "x.csv").write_text("a")
        assert pack(tmp_path / "out", [tmp_path / "x.csv"], tok) == 1
        assert "'.csv'" in capsys.readouterr().err

    def test_output_inside_the_input(self, tmp_path, tok, capsys):
        write_jsonl(tmp_path / "a.jsonl", ["a"])
        assert pack(tmp_path / "out", [tmp_path], tok) == 1
        assert "lies inside --input" in capsys.readouterr().err


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


class TestSameResult:
    OPTIONS = ("--seq-len", 32, "--align", 4, "--holdout", 3, "--shard-bytes", 4000)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory):
        root = tmp_path_factory.mktemp("in")
        write_jsonl(root / "a.jsonl", toy_corpus.numbered(400))
        (root / "b.txt").write_text("a text\n\nof its own")
        (root / "c.jsonl.gz").write_bytes(
            gzip.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in toy_corpus.numbered(99)))
        )
        return root

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, source, tok, tmp_path_factory):
        out = tmp_path_factory.mktemp("expected") / "out"
        assert pack(out, [source], tok, *cls.OPTIONS) == 0
        assert len(list(out.glob("shard-*"))) > 10
        assert [text[:13] for text in texts(out)[:3]] == ["document 0: ", "document 1: t", "document 2: t"]
        assert manifest(out)["counts"]["written"] == 500
        return packed_bytes(out)

    @pytest.mark.parametrize("workers", [2, 7])
    def test_for_any_number_of_workers(self, source, tok, expected, tmp_path, workers):
        assert pack(tmp_path / "out", [source], tok, *self.OPTIONS, "--workers", workers) == 0
        assert packed_bytes(tmp_path / "out") == expected

    @pytest.mark.parametrize("tasks", [1, 3, 11, 50])
    def test_for_any_number_of_tasks(self, source, tok, expected, tmp_path, capsys, tasks):
        out = tmp_path / "out"
        order = list(range(tasks))
        random.Random(tasks).shuffle(order)
        for task in order:
            if task == order[-1] and 1 < tasks < 16:
                assert toy_corpus.PACK.main(["merge", str(out)]) == 1
                assert "are missing" in capsys.readouterr().err
            assert pack(out, [source], tok, *self.OPTIONS, "--task", task, "--tasks", tasks, "--json") == 0
            told = json.loads(capsys.readouterr().out)
            assert told["shards"] == len(range(task, 16, tasks))
            assert not (out / "manifest.json").exists()
        assert toy_corpus.PACK.main(["merge", str(out)]) == 0
        assert packed_bytes(out) == expected

    def test_merge_verifies(self, source, tok, tmp_path, capsys):
        out = tmp_path / "out"
        assert pack(out, [source], tok, *self.OPTIONS, "--task", 0, "--tasks", 1) == 0
        path = out / "shard-000003" / "tokens.bin"
        data = bytearray(path.read_bytes())
        data[9] ^= 1
        path.write_bytes(data)
        assert toy_corpus.PACK.main(["merge", str(out)]) == 1
        assert "shard-000003/tokens.bin is damaged" in capsys.readouterr().err
        assert not (out / "manifest.json").exists()
        shutil.rmtree(out / "shard-000003")  # as the message says
        assert pack(out, [source], tok, *self.OPTIONS, "--task", 0, "--tasks", 1) == 0
        assert toy_corpus.PACK.main(["merge", str(out)]) == 0

    def test_again_does_nothing(self, source, tok, expected, tmp_path, monkeypatch):
        out = tmp_path / "out"
        assert pack(out, [source], tok, *self.OPTIONS) == 0
        monkeypatch.setattr(packing, "pack_unit", None)
        assert pack(out, [source], tok, *self.OPTIONS) == 0
        assert packed_bytes(out) == expected

    def test_killed_at_every_step_of_publishing(self, source, tok, expected, tmp_path):
        """Die (without cleaning up) before the n-th flush or rename, for every n; then finish."""
        steps = 0
        for number in range(0, 500, 7):
            out = tmp_path / str(number)
            child = os.fork()
            if child == 0:
                try:
                    die_at(number, kill=True)
                    os._exit(pack(out, [source], tok, *self.OPTIONS))
                except BaseException:
                    os._exit(3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 0:
                break
            steps += 1
            assert status == -signal.SIGKILL
            assert not (out / "manifest.json").exists() or packed_bytes(out) == expected
            assert pack(out, [source], tok, *self.OPTIONS) == 0
            assert packed_bytes(out) == expected
            shutil.rmtree(out)
        assert steps > 15

    def test_disk_full_at_every_step(self, source, tok, expected, tmp_path, monkeypatch, capsys):
        """No space at the n-th write: non-zero, published shards intact; with space the rerun completes."""
        failures = 0
        for number in range(0, 200, 5):
            out = tmp_path / str(number)
            with monkeypatch.context() as patch:
                full_at(patch, number)
                status = pack(out, [source], tok, *self.OPTIONS)
            if status == 0:
                break
            failures += 1
            error = capsys.readouterr().err
            assert "no space left" in error.lower() or "No space left" in error
            assert not list(out.glob("*.tmp-*"))
            for record in out.glob("shard-*/shard.json"):
                shards.verify_shard(out, json.loads(record.read_text()))
            assert pack(out, [source], tok, *self.OPTIONS) == 0
            assert packed_bytes(out) == expected
        assert failures > 5


def die_at(number, kill):
    """Make the `number`-th call of fsync, rename or replace kill this process instead."""
    calls = 0

    def wrap(function):
        def call(*args, **kwargs):
            nonlocal calls
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, wrap(getattr(os, name)))


def full_at(patch, number):
    calls = 0
    write = shards._HashedFile.write

    def call(self, array):
        nonlocal calls
        calls += 1
        if calls > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, array)

    patch.setattr(shards._HashedFile, "write", call)


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


@pytest.mark.alone
class TestProcesses:
    """Real processes and real signals."""

    OPTIONS = ("--seq-len", 64, "--align", 8, "--holdout", 5, "--shard-bytes", 100_000)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory):
        generator = random.Random(1)
        words = ["the", "winter", "rivers", "in", "other", "\u00e9t\u00e9", "12", "\n"]
        path = tmp_path_factory.mktemp("in") / "in.jsonl"
        return write_jsonl(
            path,
            [f"{i} " + " ".join(generator.choices(words, k=generator.randint(1, 900))) for i in range(1500)],
        )

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, source, tok, tmp_path_factory):
        out = tmp_path_factory.mktemp("expected") / "out"
        assert pack(out, [source], tok, *cls.OPTIONS) == 0
        return packed_bytes(out)

    def start(self, out, source, tok, *options):
        command = pack_process(out, [source], tok, *self.OPTIONS, "--workers", 2, *options)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for_shards(self, process, out, count):
        deadline = time.monotonic() + 60
        while len([s for s in out.glob("shard-*") if ".tmp-" not in s.name]) < count:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)

    def finish(self, out, source, tok, expected):
        assert pack(out, [source], tok, *self.OPTIONS) == 0
        assert packed_bytes(out) == expected

    def kill_at_random(self, out, source, tok, expected, generator):
        process = self.start(out, source, tok)
        self.wait_for_shards(process, out, generator.randint(0, 12))
        time.sleep(generator.random() * 0.3)
        process.kill()
        process.communicate(timeout=30)
        for record in out.glob("shard-*/shard.json"):
            if ".tmp-" not in str(record):
                shards.verify_shard(out, json.loads(record.read_text()))
        self.finish(out, source, tok, expected)

    def test_killed_at_random(self, source, tok, expected, tmp_path):
        generator = random.Random()
        for number in range(3):
            self.kill_at_random(tmp_path / str(number), source, tok, expected, generator)

    @pytest.mark.slow
    def test_killed_at_random_often(self, source, tok, expected, tmp_path):
        generator = random.Random()
        for number in range(40):
            self.kill_at_random(tmp_path / str(number), source, tok, expected, generator)

    @pytest.mark.slow
    def test_killed_again_and_again(self, source, tok, expected, tmp_path):
        """The same folder survives a kill at every start until it is complete."""
        generator, out = random.Random(), tmp_path / "out"
        for count in range(1, 30):
            process = self.start(out, source, tok)
            try:
                self.wait_for_shards(process, out, count)
            except AssertionError:
                break  # it finished before it could be killed
            time.sleep(generator.random() * 0.1)
            process.kill()
            process.communicate(timeout=30)
        self.finish(out, source, tok, expected)

    def test_tasks_at_the_same_time(self, source, tok, expected, tmp_path):
        """As an array job starts them: all of them find an empty folder."""
        out = tmp_path / "out"
        tasks = [
            subprocess.Popen(
                pack_process(out, [source], tok, *self.OPTIONS, "--task", task, "--tasks", 4, "--workers", 1),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for task in range(4)
        ]
        for process in tasks:
            _, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
        assert toy_corpus.PACK.main(["merge", str(out)]) == 0
        assert packed_bytes(out) == expected

    def test_a_dead_worker_ends_the_run(self, source, tok, expected, tmp_path):
        out = tmp_path / "out"
        process = self.start(out, source, tok)
        self.wait_for_shards(process, out, 1)
        workers = [pid for pid in children(process.pid) if "spawn_main" in command_line(pid)]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        begin = time.monotonic()
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - begin < 20
        assert process.returncode == 1
        assert "error: a worker process died" in error
        assert "Traceback" not in error
        self.finish(out, source, tok, expected)

    def test_workers_do_not_outlive_their_parent(self, source, tok, tmp_path):
        process = self.start(tmp_path / "out", source, tok)
        self.wait_for_shards(process, tmp_path / "out", 1)
        workers = children(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.communicate(timeout=30)
        deadline = time.monotonic() + 15
        while any(Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid) for pid in workers):
            assert time.monotonic() < deadline, "workers are still there 15 s after their parent was killed"
            time.sleep(0.1)

    def test_interrupt(self, source, tok, expected, tmp_path):
        process = self.start(tmp_path / "out", source, tok)
        self.wait_for_shards(process, tmp_path / "out", 1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "error: interrupted" in error
        self.finish(tmp_path / "out", source, tok, expected)

    def test_a_real_full_disk(self, source, tok, expected, tmp_path):
        """A file system of 1 MiB; needs a mount namespace of its own."""
        mount = tmp_path / "small"
        mount.mkdir()
        command = pack_process(mount / "out", [source], tok, *self.OPTIONS, "--workers", 2)
        script = (
            f'mount -t tmpfs -o size=1m none "{mount}" || exit 77; "$@"; status=$?; '
            f'ls "{mount}/out" >&2; mount -o remount,size=64m "{mount}" || exit 77; '
            f'[ $status -ne 0 ] || exit 78; "$@" || exit 79; cp -r "{mount}/out" "{tmp_path}/kept"'
        )
        result = run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "pack", *command]
        )
        if result.returncode in (1, 77) and "no space" not in result.stderr:
            pytest.skip(f"no mount namespace here: {result.stderr.strip()[-200:]}")
        assert result.returncode == 0, result.stderr
        assert "error: no space left" in result.stderr
        assert ".tmp-" not in result.stderr, "half-written shards are removed at once"
        assert packed_bytes(tmp_path / "kept") == expected

    def test_quiet_when_not_a_terminal(self, source, tok, tmp_path):
        result = run(pack_process(tmp_path / "out", [source], tok, *self.OPTIONS))
        assert result.returncode == 0
        assert "\r" not in result.stderr
        assert result.stderr.count("\n") < 5

    def test_progress_on_a_terminal(self, source, tok, tmp_path):
        import pty

        main, side = pty.openpty()
        process = subprocess.Popen(
            pack_process(tmp_path / "out", [source], tok, *self.OPTIONS, "--workers", 1),
            stdout=subprocess.PIPE,
            stderr=side,
        )
        os.close(side)
        shown = b""
        while True:
            try:
                block = os.read(main, 4096)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            shown += block
        process.communicate(timeout=60)
        os.close(main)
        assert process.returncode == 0
        assert b"MB/s" in shown
        assert b"tokens/s" in shown
        assert b"ETA" in shown


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_help_runs():
    result = run([sys.executable, str(toy_corpus.ROOT / "tools" / "pack_data.py"), "--help"])
    assert result.returncode == 0
    assert "--on-bad-record" in result.stdout
