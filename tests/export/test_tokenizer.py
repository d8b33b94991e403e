"""The tokenizer of an export against the packer's own."""

import json
import random

import pytest
import sentencepiece
from transformers import AutoTokenizer

from tests.support import exported
from wm_ds.export import export


def test_sentencepiece_becomes_a_tokenizer_json(tmp_path, monkeypatch):
    """Data packed with a .model: the export's tokenizer gives the same ids; one that did not is refused."""
    monkeypatch.setattr(export, "check", lambda *_: 0.0)  # only files matter here
    model = tmp_path / "packer.model"
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(1, 7))) for _ in range(300)]
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(rng.choices(words, k=12)) for _ in range(300)]),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            minloglevel=2,
        )
    exported.make_data(tmp_path / "packed", model)
    run = exported.make_run(tmp_path)
    out = exported.run_export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    exported.assert_packer_ids(tokenizer, model)
    assert tokenizer.eos_token_id == json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    with pytest.MonkeyPatch.context() as patch:
        # Characters there, a token for transformers.
        patch.setattr(tokenizer, "_random_texts", lambda _: ["<s>"])
        with pytest.raises(export.ExportError, match="otherwise than the packer: '<s>'"):
            exported.run_export(run, tmp_path / "other")
