"""Talking to a trained model: the one that the tests of serving keep, 160 steps on this project's pages."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tools import chat
from wm_ds import trained

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "serving/vllm/tests/trained"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture
def templated(tmp_path) -> Path:
    folder = shutil.copytree(FOLDER, tmp_path / "templated")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def opened(folder: Path, *options: str) -> chat.Chat:
    return chat.open_chat(chat.parser().parse_args([str(folder), "--temperature", "0", *options]))


def generated(ids: list[int], tokens: int) -> list[int]:
    """What transformers itself makes of them."""
    lm = trained.find(FOLDER).load(torch.float32)
    out = lm.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=tokens)
    return out[0, len(ids) :].tolist()


def test_a_prompt_is_continued_as_transformers_would(capsys):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer("The pool of a", add_special_tokens=False)["input_ids"]
    expected = tokenizer.decode(generated(ids, 24), skip_special_tokens=True)
    capsys.readouterr()
    assert chat.main([str(FOLDER), "The pool of a", "--temperature", "0", "--tokens", "24"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    assert captured.err == ""
    assert len("".join(opened(FOLDER, "--tokens", "24").answer("The pool of a"))) == len(expected)


def test_the_same_seed_gives_the_same_answer_and_exact_prefill_runs(capsys):
    for extra in ([], [], ["--prefill", "exact"]):
        assert chat.main([str(FOLDER), "A run", "--seed", "3", "--tokens", "8", *extra]) == 0
    first, second, exact = capsys.readouterr().out.splitlines()[:3]
    assert first == second
    assert exact


def test_a_conversation_goes_through_the_template(templated):
    talk = opened(templated, "--tokens", "4")
    first = "".join(talk.answer("hello"))
    tokenizer = AutoTokenizer.from_pretrained(templated)
    said = tokenizer.decode(talk.ids("and then?")[0].tolist())
    assert said == f"[user]hello[assistant]{first}[user]and then?[a]"
    assert tokenizer.decode(opened(templated, "--raw").ids("x")[0].tolist()) == "x"


def test_an_answer_that_is_cut_off_stays_in_the_conversation(templated):
    talk = opened(templated, "--tokens", "30")
    stream = talk.answer("hello")
    begun = next(stream)
    stream.close()  # as Ctrl-C does
    said = [("user", "hello"), ("assistant", begun)]
    assert [(m["role"], m["content"]) for m in talk.messages] == said
    assert "".join(talk.answer("again"))


def test_standard_input_is_one_prompt(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The pool\nof"))
    assert chat.main([str(FOLDER), "--tokens", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_typed_prompts_until_an_empty_line(capsys, monkeypatch):
    lines = iter(["The pool", "word " * 3000, ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    chat.converse(opened(FOLDER, "--tokens", "3"))
    out = capsys.readouterr().out
    assert "whitematter, rows of" in out
    assert "error: the prompt has" in out  # and it goes on
    assert next(lines, None) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([str(FOLDER), "x", "--tokens", "0"], "--tokens 0 is out of range"),
        ([str(FOLDER), "x", "--top-p", "1.5"], "--top-p 1.5 is out of range"),
        ([str(FOLDER), "word " * 3000], "and the model's rows have"),
    ],
)
def test_what_cannot_be_answered_is_one_line(capsys, words, said):
    assert chat.main(words) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
