"""The trained tokenizer: sentencepiece's ids, exact round trips, loads as any Hugging Face tokenizer."""

import os
import subprocess
import sys

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoTokenizer

from tests.support import toy_corpus
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

    def stripping(folder):
        tokenizer = load(folder)
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
