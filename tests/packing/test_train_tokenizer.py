"""The trained tokenizer: sentencepiece's ids, exact round trips, loads as any Hugging Face tokenizer."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoTokenizer

from tests.support import toy_corpus
from wm_ds import files
from wm_ds.packing import train_tokenizer
from wm_ds.packing.tokenizer import make_encoder, open_tokenizer

TRAIN = toy_corpus.tool("train_tokenizer")
CORPUS = [
    f"It was the {i}th of May; the rain, they said, would not stop.\n\n  \u201cNot today\u201d, she said {i}."
    for i in range(300)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("tok")
    source = toy_corpus.write_jsonl(root / "in.jsonl", CORPUS)
    assert TRAIN.main(["--input", str(source), "--vocab-size", "350", "--output", str(root / "tok")]) == 0
    return root / "tok"


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


@pytest.fixture(scope="module")
def encoder(trained):
    return make_encoder(open_tokenizer(str(trained)))


def test_ids_of_sentencepiece(trained, tokenizer):
    model = sentencepiece.SentencePieceProcessor(model_file=str(trained / "sentencepiece.model"))
    assert len(tokenizer) == model.vocab_size() == 350
    for text in [*CORPUS, "  two  spaces", "new\nline\r\n", "", " ", "日本 é \0", "unseen zebra quiz"]:
        assert tokenizer(text)["input_ids"] == model.encode(text)


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_comes_back(encoder, tokenizer, text):
    ids, _ = encoder.encode([text])
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "   a",
        "a   ",
        "\n",
        "\r\n\t",
        "a\0b",
        "\u2581",
        "a \u2581 b",
        "<0x41>",
        "<unk>",
        "<|endoftext|>",
        "\ufeff",
    ],
)
def test_difficult_texts_come_back(encoder, tokenizer, text):
    ids, _ = encoder.encode([text])
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids.tolist()) == text


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == 1
    assert tokenizer.bos_token is None
    assert tokenizer("x<|endoftext|>")["input_ids"][-1] == 1


def test_loads_in_another_process_offline_without_remote_code(trained, tmp_path):
    code = (
        "import sys; from transformers import AutoTokenizer as A;"
        f"t = A.from_pretrained({str(trained)!r}); print(t(sys.argv[1])['input_ids'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, CORPUS[7]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(AutoTokenizer.from_pretrained(trained)(CORPUS[7])["input_ids"])


def test_saving_again_keeps_ids(trained, tmp_path):
    first = AutoTokenizer.from_pretrained(trained)
    first.save_pretrained(tmp_path / "again")
    second = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert [second(text)["input_ids"] for text in CORPUS] == [first(text)["input_ids"] for text in CORPUS]
    assert open_tokenizer(str(trained)).sha256 == open_tokenizer(str(tmp_path / "again")).sha256


def test_training_is_deterministic(trained, tmp_path):
    assert (
        train_tokenizer.train(CORPUS, 350, "<|endoftext|>") == (trained / "sentencepiece.model").read_bytes()
    )


def test_a_tokenizer_that_does_not_survive_saving_is_refused(tmp_path, monkeypatch):
    model = train_tokenizer.train(CORPUS, 350, "<|endoftext|>")
    load = AutoTokenizer.from_pretrained

    def stripping(folder, **options):
        tokenizer = load(folder, **options)
        tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", stripping)
    with pytest.raises(train_tokenizer.TrainingError, match="differ after saving"):
        train_tokenizer.save(train_tokenizer.wrap(model, "<|endoftext|>"), model, tmp_path / "t", [])


def test_a_tokenizer_that_loses_text_is_refused(tmp_path):
    model = train_tokenizer.train(CORPUS, 350, "<|endoftext|>")
    tokenizer = train_tokenizer.wrap(model, "<|endoftext|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    with pytest.raises(train_tokenizer.TrainingError, match="comes back as"):
        train_tokenizer.save(tokenizer, model, tmp_path / "t", ["\ufb01"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "100"], "--vocab-size 100 is too small"),
        (["--vocab-size", "60000"], "cannot train 60000 pieces"),
        (["--text-field", "body"], "missing_field"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, options, message):
    source = toy_corpus.write_jsonl(tmp_path / "in.jsonl", CORPUS)
    assert TRAIN.main(["--input", str(source), "--output", str(tmp_path / "tok"), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_no_text(tmp_path, capsys):
    source = toy_corpus.write_jsonl(tmp_path / "in.jsonl", ["", ""])
    assert TRAIN.main(["--input", str(source), "--output", str(tmp_path / "tok")]) == 1
    assert "no text" in capsys.readouterr().err


def train_tool(capfd, tmp_path, texts, *options, name="tok"):
    """Runs the tool; returns (exit code, its JSON or its error line)."""
    source = toy_corpus.write_jsonl(tmp_path / f"{name}.jsonl", texts)
    capfd.readouterr()
    code = TRAIN.main(["--input", str(source), "--output", str(tmp_path / name), *options])
    out, err = capfd.readouterr()
    return code, json.loads(out) if code == 0 else err.strip()


RESERVED = [
    "x\u2585y \u2581 z",
    "\0",
    "a\0b",
    "\u2585\u2586\u2587",
    "z" * 70_000,
    "\ud55c" * 40_000,
    "a\tb\r",
    " ",
]


def test_no_line_is_left_out_by_the_trainer(capfd, monkeypatch):
    """By the trainer's own log, which is off otherwise."""
    quiet = sentencepiece.SentencePieceTrainer.train

    def loud(**options):
        quiet(**{**options, "minloglevel": 0})

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", loud)
    train_tokenizer.train([*CORPUS, *RESERVED], 350, "<|endoftext|>")
    log = capfd.readouterr().err
    assert "Loaded all" in log
    assert "skipped" not in log.lower()
    assert "null character" not in log.lower()


def test_lines_with_reserved_characters_are_learned_from(capfd, tmp_path):
    lines = [f"the weather of station {i % 17} was fair and the river was low" for i in range(300)]
    marked = [f"{line} \u2585\u2585 \u2581 end" for line in lines]
    plain = train_tokenizer.train([line + " \n  end" for line in lines], 320, "<|endoftext|>")
    assert train_tool(capfd, tmp_path, marked, "--vocab-size", "320")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tok")
    model = sentencepiece.SentencePieceProcessor(model_proto=plain)
    assert len(tokenizer.encode(lines[3])) <= len(model.encode(lines[3])) + 1
    assert tokenizer.decode(tokenizer.encode(marked[0])) == marked[0]


IDEOGRAPHS = ["".join(chr(0x4E00 + i) for i in range(j, j + 30)) for j in range(0, 3000, 30)]


def test_the_remedies_for_a_vocabulary_that_is_too_small(capfd, tmp_path):
    code, error = train_tool(capfd, tmp_path, IDEOGRAPHS, "--vocab-size", "1024")
    assert code == 1
    assert "smaller" not in error
    needed = re.search(r"choose --vocab-size (\d+) or more", error)[1]
    texts = [*IDEOGRAPHS, *IDEOGRAPHS]
    assert train_tool(capfd, tmp_path, texts, "--vocab-size", needed, name="larger")[0] == 0
    assert "--character-coverage below 0.9995" in error
    common = ["the rain in spain " * 2000, *IDEOGRAPHS[:10]]
    code, error = train_tool(capfd, tmp_path, common, "--vocab-size", "400", name="common")
    assert code == 1
    lower = ["--vocab-size", "270", "--character-coverage", "0.98"]
    assert train_tool(capfd, tmp_path, common, *lower, name="lower")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lower")
    assert tokenizer.decode(tokenizer.encode(IDEOGRAPHS[3])) == IDEOGRAPHS[3]


def test_the_remedy_for_a_vocabulary_that_is_too_large(capfd, tmp_path):
    code, error = train_tool(capfd, tmp_path, CORPUS, "--vocab-size", "60000")
    assert code == 1
    most = re.search(r"--vocab-size (\d+), or less", error)[1]
    assert train_tool(capfd, tmp_path, CORPUS, "--vocab-size", most, name="less")[0] == 0


@pytest.mark.parametrize("eos", ["", "<unk>", "<0x41>", "a", " x", "a\0b", "\n", "\u2581\u2581", "a\u2585"])
def test_an_eos_that_cannot_be(capfd, tmp_path, eos):
    code, error = train_tool(capfd, tmp_path, CORPUS, "--vocab-size", "350", "--eos", eos)
    assert code == 1
    assert error.startswith(f"error: --eos {eos!r}".replace("\n", " "))
    assert "vocab-size" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vocab-size", str(2**31)], "too large"),
        (["--vocab-size", "-3"], "too small"),
        (["--max-bytes", "0"], "--max-bytes 0"),
        (["--character-coverage", "0.5"], "--character-coverage 0.5"),
    ],
)
def test_settings_that_cannot_work(capfd, tmp_path, options, words):
    code, error = train_tool(capfd, tmp_path, CORPUS, *options)
    assert (code, len(error.splitlines())) == (1, 1)
    assert words in error
    assert not (tmp_path / "tok").exists()


@pytest.mark.parametrize("text", ["   ", "\0\0", "\u2585", "\n\n"])
def test_text_that_teaches_nothing(capfd, tmp_path, text):
    code, error = train_tool(capfd, tmp_path, [text], "--vocab-size", "300")
    assert (code, len(error.splitlines())) == (1, 1)
    assert "more text" in error or "no text" in error


def test_bad_records(capfd, tmp_path):
    source = toy_corpus.write_jsonl(tmp_path / "in.jsonl", [*CORPUS, None, 5])
    command = ["--input", str(source), "--vocab-size", "350", "--output", str(tmp_path / "tok")]
    assert TRAIN.main(command) == 1
    assert f"{source}:301: missing_value" in capfd.readouterr().err
    assert TRAIN.main([*command, "--on-bad-record", "skip"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["bad"] == {"missing_value": 1, "not_a_string": 1}
    assert told["documents"] == 300


def test_what_exists_is_not_overwritten(capfd, tmp_path):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "mine").write_text("x")
    code, error = train_tool(capfd, tmp_path, CORPUS, "--vocab-size", "350")
    assert code == 1
    assert f"{tmp_path / 'tok'} exists" in error
    assert [path.name for path in (tmp_path / "tok").iterdir()] == ["mine"]


def test_a_full_disk_for_the_library(capfd, tmp_path, monkeypatch):
    def full(*_):
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    code, error = train_tool(capfd, tmp_path, CORPUS, "--vocab-size", "350")
    assert (code, len(error.splitlines())) == (1, 1)
    assert "No space left" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tok.jsonl"]


def test_a_full_disk_leaves_nothing(capfd, tmp_path, monkeypatch):
    def full(path, data):
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_synced", full)
        code, error = train_tool(capfd, tmp_path, CORPUS, "--vocab-size", "350")
    assert code == 1
    assert "No space left" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tok.jsonl"]
    assert train_tool(capfd, tmp_path, CORPUS, "--vocab-size", "350")[0] == 0
