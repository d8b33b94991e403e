"""What inspect_shards prints is what is in the files."""

import json

import pytest

from tests.support import toy_corpus
from tests.support.toy_corpus import documents, pack, write_jsonl

INSPECT = toy_corpus.tool("inspect_shards")
TEXTS = ["abc", "the winter", "x" * 40, "d", f"say {toy_corpus.EOS} now"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    tok = toy_corpus.byte_tokenizer(root / "tok")
    source = write_jsonl(root / "in.jsonl", TEXTS)
    options = ("--seq-len", 16, "--align", 4, "--holdout", 2, "--shard-bytes", 60)
    assert pack(root / "out", [source], tok, *options) == 0
    return root / "out"


def inspect(capsys, *arguments):
    status = INSPECT.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_summary(folder, capsys):
    status, out, _ = inspect(capsys, folder)
    assert status == 0
    tokens = sum(map(len, documents(folder)))
    assert f"{tokens:,} tokens" in out.replace("  ", " ") or f"tokens           {tokens:,}" in out
    assert "264 ids as uint16" in out
    assert "'<|endoftext|>' = 262" in out
    assert "2 held out" in out
    assert "in.jsonl" in out


def test_verify(folder, capsys, tmp_path):
    status, out, _ = inspect(capsys, folder, "--verify")
    assert status == 0
    assert "all checksums right" in out


def test_verify_finds_damage(folder, capsys):
    path = sorted(folder.glob("shard-*/ends.bin"))[1]
    good = path.read_bytes()
    try:
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        status, _, error = inspect(capsys, folder, "--verify")
    finally:
        path.write_bytes(good)
    assert status == 1
    assert f"error: {path} is damaged" in error


def test_documents(folder, capsys):
    status, out, _ = inspect(capsys, folder, "--documents", *range(len(TEXTS)))
    assert status == 0
    for number, text in enumerate(TEXTS):
        ids = documents(folder)[number]
        assert f"--- document {number}: {len(ids) - 1} tokens and EOS\n{text}\n" in out
    status, _, error = inspect(capsys, folder, "--documents", len(TEXTS))
    assert status == 1
    assert "document 5 does not exist" in error


def test_long_documents_are_cut_and_say_so(folder, capsys):
    _, out, _ = inspect(capsys, folder, "--documents", 2, "--characters", 10)
    assert "x" * 10 + "... (30 more characters)" in out


def test_every_sequence_shows_its_segments(folder, capsys):
    """Put together from the sequences' segments, the stream's texts come back."""
    total = json.loads((folder / "manifest.json").read_text())["sequences"]
    by_number = {}
    for split, count in (("train", total - 2), ("holdout", 2)):
        for index in range(count):
            status, out, _ = inspect(capsys, folder, "--sequence", index, "--split", split)
            assert status == 0
            by_number[int(out.split("number ")[1].split(" ")[0])] = out
    assert sorted(by_number) == list(range(total))
    text = ""
    for number in range(total):
        for line in by_number[number].splitlines():
            if line.startswith("    text "):
                text += eval(line.removeprefix("    text "))
    assert text == "".join(t + toy_corpus.EOS for t in TEXTS)
    assert "filler" in by_number[0]
    assert any("goes on in the next sequence" in out for out in by_number.values())
    status, _, error = inspect(capsys, folder, "--sequence", total)
    assert status == 1
    assert "does not exist" in error


def test_histogram(folder, capsys, tmp_path):
    status, out, _ = inspect(capsys, folder, "--histogram", "--png", tmp_path / "h.png")
    assert status == 0
    lengths = [len(ids) for ids in documents(folder)]
    for row in out.splitlines()[1:]:
        low, _, high, count = row.replace(",", "").split()[:4]
        assert sum(int(low) <= length <= int(high) for length in lengths) == int(count)
    assert sum(int(row.split()[3]) for row in out.splitlines()[1:]) == len(TEXTS)
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_not_a_data_set(tmp_path, capsys):
    status, _, error = inspect(capsys, tmp_path)
    assert status == 1
    assert error.startswith("error: ")
    assert "not a packed data set" in error
