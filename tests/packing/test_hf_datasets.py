"""Datasets as inputs of the packing command: folders that are streamed, saved ones, failures."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import toy_corpus
from tests.support.toy_corpus import (
    manifest,
    pack,
    packed_bytes,
    texts,
    write_jsonl,
)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_dataset_folder(tmp_path, tok, offline, kind):
    """The code path of a hub dataset, on a folder that `datasets` loads and streams."""
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


def test_dataset_that_changed(tmp_path, tok, capsys, offline):
    folder = tmp_path / "data"
    write_jsonl(folder / "train.jsonl", ["a", "b"])
    assert pack(tmp_path / "out", [f"hf:{folder}"], tok, "--seq-len", 8) == 0
    write_jsonl(folder / "train.jsonl", ["a", "c"])
    os.utime(folder / "train.jsonl", ns=(1, 1))
    assert pack(tmp_path / "out", [f"hf:{folder}"], tok, "--seq-len", 8) == 1
    assert f"dataset hf:{folder} changed" in capsys.readouterr().err


def test_a_touched_dataset_is_the_same_dataset(tmp_path, tok, offline):
    write_jsonl(tmp_path / "data" / "train.jsonl", ["a", "b"])
    arguments = tmp_path / "out", [f"hf:{tmp_path / 'data'}"], tok, "--seq-len", 8
    assert pack(*arguments) == 0
    os.utime(tmp_path / "data" / "train.jsonl", ns=(1, 1))
    assert pack(*arguments) == 0
    assert texts(tmp_path / "out") == ["a", "b"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_dataset_files_with_different_columns(tmp_path, tok, offline, kind):
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
def test_a_dataset_folder_with_any_name(tmp_path, tok, offline, name, monkeypatch):
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
def test_a_dataset_folder_that_does_not_exist(tmp_path, tok, capsys, offline, name, words):
    write_jsonl(tmp_path / "v1" / "train.jsonl", ["a"])
    write_jsonl(tmp_path / "file.jsonl", ["a"])
    assert pack(tmp_path / "out", [f"hf:{tmp_path / name}"], tok) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b'{"text": "b"}\n{broken\n', b'{"text": "b"', b"\xff\xfe\n"])
def test_a_loader_that_fails_follows_the_policy(tmp_path, tok, capfd, offline, damage):
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


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), TimeoutError("a"), ImportError("x")])
def test_an_outage_is_no_bad_record(tmp_path, tok, capfd, offline, monkeypatch, failure):
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
def test_a_saved_dataset(tmp_path, tok, capsys, prefix):
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


def test_dataset_split_that_does_not_exist(tmp_path, tok, capsys, offline):
    write_jsonl(tmp_path / "data" / "train.jsonl", ["a"])
    source = f"hf:{tmp_path / 'data'}"
    assert pack(tmp_path / "out", [source], tok, "--dataset-split", "nothing") == 1
    assert "split 'nothing'" in capsys.readouterr().err
