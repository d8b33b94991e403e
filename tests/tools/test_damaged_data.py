"""Every file of packed data, damaged in every way: one line, never a traceback; and what it says helps."""

import re
import shutil
import sys

import pytest

from tests.support import toy_corpus

INSPECT = toy_corpus.tool("inspect_shards")
OPTIONS = ("--seq-len", 16, "--holdout", 2, "--shard-bytes", 400)
FILES = (
    *("plan.json", "manifest.json", "shard-000000/shard.json", "shard-000000/source.json"),
    *("tokenizer/tokenizer.json", "shard-000000/ends.bin", "shard-000000/tokens.bin"),
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    tokenizer = toy_corpus.byte_tokenizer(root / "tok")
    source = toy_corpus.write_jsonl(root / "in.jsonl", toy_corpus.numbered(20))
    assert toy_corpus.pack(root / "good", [source], tokenizer, *OPTIONS) == 0
    return root / "good", source, tokenizer


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("data", [b"{broken", b"[]", b"{}", b"", b"\xff", None])
def test_one_line(packed, tmp_path, capsys, monkeypatch, file, data):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good, source, tokenizer = packed
    commands = {
        "pack": lambda folder: toy_corpus.pack(folder, [source], tokenizer, *OPTIONS),
        "merge": lambda folder: toy_corpus.PACK.main(["merge", str(folder)]),
        "inspect": lambda folder: INSPECT.main(
            [str(folder), "--documents", "0", "--sequence", "0", "--verify"]
        ),
    }
    refused = 0
    for name, command in commands.items():
        folder = tmp_path / name
        shutil.copytree(good, folder)
        (folder / file).unlink()
        if data is not None:
            (folder / file).write_bytes(data)
        capsys.readouterr()
        code = command(folder)
        error = capsys.readouterr().err
        if code == 0:
            continue
        refused += 1
        assert code == 1
        assert error.startswith("error: ")
        assert error.count("\n") == 1, "one line"
        if found := re.search("remove the folder ([^ ,]+), then run the same pack_data", error):
            shutil.rmtree(found[1])
            assert commands["pack"](folder) == 0
        elif "remove it and write it again" in error:
            (folder / file).unlink()
            assert commands["merge"](folder) == 0
    # The manifest is written anew by packing and merging; a source is read again where its time differs.
    assert refused > 0 or file == "shard-000000/source.json" or (file, data) == ("manifest.json", None)


@pytest.mark.parametrize("name", ["/nothing/here", "./nothing", "no_such_tokenizer"])
def test_a_tokenizer_that_does_not_exist(packed, tmp_path, capsys, monkeypatch, name):
    # The variable alone is read at import, and without it names are looked up on the network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert toy_corpus.pack(tmp_path / "out", [packed[1]], name, *OPTIONS) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("no such file or folder" in error) == ("/" in name)


@pytest.mark.parametrize("tool", ["pack_data", "train_tokenizer", "inspect_shards", "fetch_text"])
def test_help_loads_no_heavy_package(tool):
    """--help answers at once: what takes seconds to import is imported when it is needed."""
    heavy = {
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "pyarrow",
        "pandas",
        "sentencepiece",
        "matplotlib",
    }
    code = (
        f"import runpy, sys; sys.argv = ['{tool}', '--help']\n"
        f"try: runpy.run_path('tools/{tool}.py', run_name='__main__')\n"
        f"except SystemExit as end: print(end.code, "
        f"sorted(set({sorted(heavy)!r}) & set(sys.modules)))"
    )
    result = toy_corpus.run([sys.executable, "-c", code], cwd=toy_corpus.ROOT)
    assert result.stdout.splitlines()[-1] == "0 []", result.stdout[-300:] + result.stderr[-300:]
