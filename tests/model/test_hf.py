"""At home in transformers: saved, copied, loaded, resized, compiled, fine-tuned, also without wm_ds."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    dynamic_module_utils,
    pipeline,
)

from tests.support.tiny import VOCABULARY, build, tokens
from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM, WhiteMatterModel, configuration

PACKAGE = Path(configuration.__file__).parent


def same_weights(one, other) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y.to(x.dtype)) for (a, x), (b, y) in pairs)


@pytest.fixture(scope="module")
def lm():
    return build(dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    lm.save_pretrained(path)
    return path


# --------------------------------------------------------------------------------------------- loading

LOADS = {
    "class": lambda path, **more: WhiteMatterForCausalLM.from_pretrained(path, **more),
    "remote code": lambda path, **more: AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=True, **more
    ),
}


@pytest.mark.parametrize(
    "more", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"device_map": "auto"}], ids=str
)
@pytest.mark.parametrize("how", LOADS)
def test_every_tensor_is_the_saved_one(lm, folder, how: str, more: dict) -> None:
    """Five times, with memory dirtied in between: what is uninitialised looks right once."""
    for _ in range(5):
        torch.empty(1 << 20).fill_(float("nan"))
        loaded = LOADS[how](folder, **more).eval()
        assert same_weights(loaded, lm)
        assert loaded.dtype == more.get("dtype", torch.float32)
        assert list(loaded.buffers()) == [], "nothing that loading could leave uninitialised"
    with torch.no_grad():
        difference = (loaded(tokens(2, 9)).logits - lm(tokens(2, 9)).logits).abs().max()
    assert difference == 0 if "dtype" not in more else difference < 0.5


def test_the_bare_model_loads_too(lm, folder) -> None:
    assert same_weights(WhiteMatterModel.from_pretrained(folder), lm.model)


def test_a_model_is_built_on_the_meta_device_and_filled() -> None:
    lm = build(dtype=torch.float32).eval()
    with torch.device("meta"):
        empty = WhiteMatterForCausalLM(lm.config)
    assert all(weight.is_meta for weight in empty.parameters())
    empty.load_state_dict(lm.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(empty.eval()(tokens(1, 7)).logits, lm(tokens(1, 7)).logits)


def test_a_bfloat16_file_is_the_rounded_file_and_nothing_else(lm, folder, tmp_path) -> None:
    WhiteMatterForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    wide, narrow = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)
    assert WhiteMatterConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_without_trust_nothing_is_loaded(folder) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


# ------------------------------------------------------------------------------------------- travelling


def test_every_file_of_the_package_travels(folder) -> None:
    ours = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    named = {line.split()[1][1:] for line in configuration._FILES.split("\n") if line}
    assert named | {"configuration"} == ours, "configuration._FILES names all files"
    assert {path.stem for path in folder.glob("*.py")} == ours


ELSEWHERE = """
import sys, torch
sys.modules["wm_ds"] = None  # whether installed or not: importing it, or anything below it, raises
from transformers import AutoConfig, AutoModelForCausalLM
source, target, result = sys.argv[1:]
config = AutoConfig.from_pretrained(source, trust_remote_code=True)
assert not any("--" in value for value in config.auto_map.values()), config.auto_map
lm, report = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, output_loading_info=True)
assert not any(report.values()), report
lm.eval()
row = torch.arange(1, 10)[None]
with torch.no_grad():
    logits = lm(row).logits
ids = lm.generate(row, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
torch.save((logits, ids), result)
lm.save_pretrained(target)
"""


@pytest.mark.long
def test_saved_copied_loaded_and_saved_again_where_there_is_no_wm_ds(lm, folder, tmp_path) -> None:
    row = torch.arange(1, 10)[None]
    with torch.no_grad():
        want = lm(row).logits
    ids = lm.generate(row, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    here = tmp_path / "first"
    shutil.copytree(folder, here)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for generation in ("second", "third"):
        there = tmp_path / generation
        subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(here), str(there), str(tmp_path / "result.pt")],
            cwd=tmp_path,
            env=env | {"HF_MODULES_CACHE": str(tmp_path / f"modules-{generation}"), "HF_HUB_OFFLINE": "1"},
            check=True,
        )
        got, got_ids = torch.load(tmp_path / "result.pt")
        # The weights are the same bits; products in another process may round otherwise (threads, alignment).
        assert (there / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        assert torch.equal(got_ids, ids)
        shutil.rmtree(here)
        here = there
    assert sorted(p.name for p in here.glob("*.py")) == sorted(p.name for p in folder.glob("*.py"))


@pytest.mark.skipif(
    not hasattr(dynamic_module_utils, "_compute_local_source_files_hash"),
    reason="this transformers tells remote code apart by the folder's name alone",
)
def test_two_exports_of_one_name_with_different_code(lm, folder, tmp_path) -> None:
    other = tmp_path / folder.name
    shutil.copytree(folder, other)
    code = (other / "blocks.py").read_text()
    changed = code.replace("return weight * x_wide", "return 3 * weight * x_wide")
    assert changed != code
    (other / "blocks.py").write_text(changed)
    row = tokens(1, 8)
    with torch.no_grad():
        want = lm(row).logits
        for path, equal in ((folder, True), (other, False), (folder, True)):
            loaded = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
            assert torch.equal(loaded(row).logits, want) == equal, path


# ------------------------------------------------------------------------------- embeddings, vocabulary


def test_tied_embeddings_stay_tied(tmp_path) -> None:
    lm = build(dtype=torch.float32, tie_word_embeddings=True).eval()
    path = tmp_path
    for generation in ("a", "b"):
        path = tmp_path / generation
        lm.save_pretrained(path)
        assert "lm_head.weight" not in load_file(path / "model.safetensors")
        loaded = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert same_weights(loaded, lm)
        lm = loaded
    loaded.resize_token_embeddings(50)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded(tokens(1, 4)).logits.shape[-1] == 50


@pytest.mark.parametrize("size", [30, 52])
def test_resizing_keeps_old_rows_and_survives_saving(lm, tmp_path, size: int) -> None:
    resized = copy.deepcopy(lm)
    resized.resize_token_embeddings(size)
    resized.save_pretrained(tmp_path)
    loaded = WhiteMatterForCausalLM.from_pretrained(tmp_path).eval()
    kept = min(size, VOCABULARY)
    assert loaded.config.vocab_size == size
    assert loaded.config.tokenizer_size == size
    for get in (lambda m: m.lm_head.weight, lambda m: m.model.embed_tokens.weight):
        assert get(loaded).shape[0] == size
        assert torch.equal(get(loaded)[:kept], get(lm)[:kept])
        assert torch.isfinite(get(loaded)).all()
    row = tokens(1, 6) % 30
    with torch.no_grad():
        assert (loaded(row).logits[..., :kept] - lm(row).logits[..., :kept]).abs().max() < 1e-5


# --------------------------------------------------------------------- training and tools of transformers


def gradients(lm, model=None) -> dict:
    lm.zero_grad()
    row = tokens(2, 9)
    (lm if model is None else model)(row, labels=row).loss.backward()
    return {name: weight.grad.clone() for name, weight in lm.named_parameters()}


def test_labels_give_the_mean_loss_of_the_next_tokens(lm) -> None:
    row = tokens(2, 9)
    labels = row.clone()
    labels[0, :5] = -100
    with torch.no_grad():
        out = lm(row, labels=labels)
    log_p = out.logits.log_softmax(-1)
    want = [-log_p[b, t, labels[b, t + 1]] for b in range(2) for t in range(8) if labels[b, t + 1] >= 0]
    assert (out.loss - torch.stack(want).mean()).abs() < 1e-6


def test_gradient_checkpointing_changes_no_gradient() -> None:
    lm = build(dtype=torch.float32).train()
    want = gradients(lm)
    lm.gradient_checkpointing_enable()
    assert lm.is_gradient_checkpointing
    got = gradients(lm)
    assert all((got[name] - want[name]).abs().max() < 1e-6 for name in want)
    lm.gradient_checkpointing_disable()
    assert not lm.is_gradient_checkpointing


def test_compiled_forward(lm) -> None:
    row = tokens(2, 9)
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    compiled = torch.compile(copy.deepcopy(lm), backend="aot_eager")
    with torch.no_grad():
        for inputs in ({}, {"attention_mask": mask}, {"prefill": "converged"}):
            assert (compiled(row, **inputs).logits - lm(row, **inputs).logits).abs().max() < 1e-5
    trained = copy.deepcopy(lm).train()
    for layer in trained.model.layers:
        layer.compile(backend="aot_eager")
    want = gradients(copy.deepcopy(lm).train())
    got = gradients(trained, torch.compile(trained, backend="aot_eager"))
    assert all((got[name] - want[name]).abs().max() < 1e-5 for name in want)


@pytest.mark.parametrize("prefill", ["trained", "converged"])
def test_a_saved_folder_runs_the_prefill_of_its_configuration(prefill: str, tmp_path) -> None:
    """Its configuration and its model are imported one by one: their classes of schedules may be two."""
    lm = build(dtype=torch.float32, prefill=prefill, prefill_tolerance=1e-2).eval()
    lm.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    passes = []
    for model in (lm, loaded):
        count = [0]
        hook = model.model.pool.register_forward_hook(lambda *_, count=count: count.append(1))
        with torch.no_grad():
            logits = model(tokens(2, 5)).logits
        hook.remove()
        passes.append((len(count), logits))
    assert passes[0][0] == passes[1][0], "passes that change nothing are left out in both"
    assert torch.equal(passes[0][1], passes[1][1])


def word_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="w0", pad_token="w0", padding_side="left"
    )


def test_text_generation_pipeline(folder, tmp_path) -> None:
    path = tmp_path / "with-tokenizer"
    shutil.copytree(folder, path)
    word_tokenizer().save_pretrained(path)
    write = pipeline("text-generation", model=str(path), trust_remote_code=True, device="cpu")
    prompts = ["w1 w2 w3", "w4 w5 w6 w7 w8"]
    settings = {"max_new_tokens": 6, "do_sample": False, "prefill": "exact"}
    one_by_one = [write(prompt, **settings)[0]["generated_text"] for prompt in prompts]
    together = [out[0]["generated_text"] for out in write(prompts, batch_size=2, **settings)]
    assert together == one_by_one
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text, prompt in zip(together, prompts))


@pytest.mark.parametrize("how", LOADS)
def test_trainers_label_smoothing_shifts_the_labels(folder, tmp_path, how: str) -> None:
    """Against the formula: (1 - s) times the loss of the next token, s times the mean over all tokens."""
    model = LOADS[how](folder)
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.2, report_to=[], use_cpu=True)
    row = tokens(2, 9)
    with torch.no_grad():
        loss = Trainer(model, arguments).compute_loss(model, {"input_ids": row, "labels": row.clone()})
        log_p = model(row).logits[:, :-1].log_softmax(-1)
    nll = -log_p.gather(-1, row[:, 1:, None]).mean()
    want = 0.8 * nll + 0.2 * -log_p.mean()
    assert (loss - want).abs() < 1e-5


def test_somebody_else_fine_tunes_it(folder, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.evaluate(rows)["eval_loss"] < 0.8 * before
    trainer.save_model(str(tmp_path / "tuned"))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", trust_remote_code=True)
    assert same_weights(tuned, model)
    assert AutoConfig.from_pretrained(tmp_path / "tuned", trust_remote_code=True).num_kv_channels == 3
