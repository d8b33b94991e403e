"""The tokenizer of an export against the packer's own."""

import json
import random
import subprocess
import sys

import pytest
import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support import exported
from wm_ds.export import export
from wm_ds.export import tokenizer as export_tokenizer
from wm_ds.packing.tokenizer import open_tokenizer


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
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    exported.assert_packer_ids(tokenizer, model)
    assert tokenizer.eos_token_id == json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    with pytest.MonkeyPatch.context() as patch:
        # Characters there, a token for transformers.
        patch.setattr(export_tokenizer, "_random_texts", lambda _: ["<s>"])
        with pytest.raises(export.ExportError, match="otherwise than the packer: '<s>'"):
            exported.run_export(run, tmp_path / "other")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "check", lambda *_: 0.0)
        return exported.run_export(exported.make_run(root, num_kv_channels=2, num_groups=4), root / "out")


def test_the_tokenizer_needs_no_code_and_our_tools_are_not_asked(folder, monkeypatch):
    """A folder with code beside the tokenizer: the packer opens it, and a user does, without a question."""

    def asked(prompt=""):
        raise KeyboardInterrupt(prompt)

    monkeypatch.setattr("builtins.input", asked)
    assert open_tokenizer(str(folder)).eos_id == 256
    for load in (
        lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        lambda: PreTrainedTokenizerFast.from_pretrained(folder),
    ):
        tokenizer = load()
        assert tokenizer("ab")["input_ids"] == [64, 65]
        assert tokenizer.padding_side == "left"
    card = (folder / "README.md").read_text()
    assert 'PreTrainedTokenizerFast.from_pretrained("PATH")' in card


def test_nobody_to_ask_is_no_obstacle(folder, tmp_path):
    """Without the argument, and with a closed stdin, AutoTokenizer finds what it needs at once."""
    code = (
        "import sys; from transformers import AutoTokenizer as A; print(A.from_pretrained(sys.argv[1])('ab'))"
    )
    command = [sys.executable, "-I", "-c", code, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[64, 65]" in done.stdout
