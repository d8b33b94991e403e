"""Exports of a checkpoint, loaded the way a stranger would load them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, pipeline

from tests.support import exported
from wm_ds import trained
from wm_ds.export import export, verify
from wm_ds.export import weights as weight_files
from wm_ds.model import FusedKVForCausalLM, LCKVForCausalLM, WhiteMatterForCausalLM

TOOL = str(Path(__file__).parents[2] / "tools" / "export_hf.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return exported.make_run(tmp_path_factory.mktemp("whitematter"))


@pytest.fixture(scope="module")
def folder(run) -> Path:
    """An fp32 export in several shards, made by the command."""
    out = run.parent / "out"
    result = cli(run, "--output", out, "--dtype", "float32", "--max-shard-size", "100KB")
    assert result.returncode == 0, result.stderr
    return out


def cli(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the check, which other tests cover, where only files matter."""
    monkeypatch.setattr(export, "check", lambda *_: 0.0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(weight_files.read_weights(folder))


def test_fp32_export_is_the_checkpoint(run, folder):
    """Every tensor bitwise, in shards that the index describes, with everything that loading needs."""
    model = exported.build(run, seed=7)
    expected = dict(model.named_parameters())
    held = weights(folder)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert len(set(index["weight_map"].values())) > 1
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in held.values())
    assert all((folder / f).stat().st_size < 110_000 for f in set(index["weight_map"].values()))
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling.WhiteMatterForCausalLM"
    assert not [value for value in config["auto_map"].values() if "--" in value]


def test_ids_agree_everywhere(run, folder):
    """EOS is the packer's in all three files; text without a prompt starts from it; padding is EOS."""
    packed = json.loads((run.parent / "packed" / "manifest.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id == packed["eos_id"]
    assert config["pad_token_id"] == generation["pad_token_id"] == tokenizer.pad_token_id == packed["eos_id"]
    assert config["bos_token_id"] == generation["bos_token_id"] == packed["eos_id"]
    assert tokenizer.bos_token_id is None, "it adds nothing to a text"
    assert tokenizer.model_max_length == config["max_position_embeddings"] == packed["seq_len"]
    exported.assert_packer_ids(tokenizer, run.parent / "tokenizer")


def test_text_without_a_prompt_and_short_rows(folder):
    """With the tokenizer as it is: an empty text starts from EOS, and rows of a batch as alone."""
    pipe = pipeline("text-generation", model=str(folder), trust_remote_code=True, device="cpu")
    settings = {"do_sample": False, "max_new_tokens": 8, "prefill": "exact"}
    empty = pipe("", **settings)[0]["generated_text"]
    model, tokenizer = pipe.model, pipe.tokenizer
    start = torch.tensor([[tokenizer.eos_token_id]])
    want = model.generate(start, attention_mask=torch.ones_like(start), **settings)
    assert empty == tokenizer.decode(want[0], skip_special_tokens=True)
    for inputs in ({}, tokenizer("", return_tensors="pt")):
        assert torch.equal(model.generate(**inputs, **settings), want)
    texts = ["a longer text than the other", "", "short"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    together = model.generate(**batch, **settings)[:, batch["input_ids"].shape[1] :]
    assert torch.equal(together[1], want[0, 1:])
    for text, row in zip(texts[::2], together[::2]):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **settings)[0]
        assert torch.equal(row[: 8 - 1], alone[-8:-1]), text


def test_card_tells_the_run(folder):
    card = (folder / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)' in card
    assert "2 KV channels" in card
    assert "| steps | 7 |" in card
    assert "| tokens | 3,584 |" in card
    assert "5.3000" in card


def test_travels_alone(run, folder, tmp_path):
    """Copied elsewhere, loaded without wm_ds, saved again, loaded again with the first folder gone.

    Without: its import raises, since an editable installation is found in `python -I`, too.
    """
    first, second = tmp_path / "model", tmp_path / "again"
    shutil.copytree(folder, first)
    code = (
        "import sys; sys.modules['wm_ds'] = None; "
        "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=True); m.save_pretrained(sys.argv[2]); "
        "T.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", code, str(first), str(second)]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    shutil.rmtree(first)
    tokens = exported.random_rows(2, 21, 320).tolist()
    tensors, printed = verify.load_apart(second, {"tokens": tokens})
    assert printed["class"] == "WhiteMatterForCausalLM"
    model = exported.build(run, seed=7)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits
    torch.testing.assert_close(tensors["logits"], expected, rtol=0, atol=1e-6)


def test_prompts_are_completed(folder):
    request = {"tokens": [[1, 2, 3]], "prompts": ["the ", "a"], "prompt_tokens": 5}
    _, printed = verify.load_apart(folder, request)
    assert [text[:1] for text in printed["texts"]] == ["t", "a"]


def test_needs_trust(folder):
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.long
def test_bf16_is_rounded_once_and_tied_head_is_shared(tmp_path):
    """The bf16 file is the elementwise rounding of the masters; a tied head is in no file."""
    run = exported.make_run(tmp_path, tie_word_embeddings=True, num_kv_channels=4)
    out = exported.run_export(run, tmp_path / "out", dtype=torch.bfloat16)
    model = exported.build(run, seed=7)
    held = weights(out)
    assert "lm_head.weight" not in held
    assert held.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(held[name], p.to(torch.bfloat16)) for name, p in model.named_parameters())
    loaded = WhiteMatterForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_vanilla_is_plain_qwen3(tmp_path):
    run = exported.make_run(tmp_path, family="vanilla")
    out = exported.run_export(run, tmp_path / "out")
    assert not list(out.glob("*.py"))
    config = json.loads((out / "config.json").read_text())
    assert not {"auto_map", "tokenizer_size"} & config.keys()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert type(loaded) is Qwen3ForCausalLM
    model = exported.build(run, seed=7)
    tokens = exported.random_rows(2, 21, 320)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
    assert "trust_remote_code" not in (out / "README.md").read_text()
    assert_no_padded_id_is_sampled(loaded)


@pytest.mark.long
def test_lckv_stands_alone(tmp_path):
    """What a process without wm_ds computes from the folder, against the model built anew."""
    run = exported.make_run(tmp_path, family="lckv", warmup_layers=2)
    out, asked, tensors, printed = watched_export(run, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "lckv.LCKVForCausalLM"
    assert config["tokenizer_size"] == 257
    assert printed["class"] == "LCKVForCausalLM"
    card = (out / "README.md").read_text()
    assert "2 of its 4 layers have KV of their own" in card
    assert "3/4 of what a model of this depth usually keeps" in card
    assert "| schedule | cyclic, all tokens at once, 7 passes without gradient and 2 with |" in card
    model, tokens = exported.build(run, seed=7), torch.tensor(asked["tokens"])
    with torch.no_grad():
        torch.testing.assert_close(tensors["logits"], model(tokens).logits, rtol=0, atol=1e-6)
    greedy = model.generate(tokens, do_sample=False, min_new_tokens=32, max_new_tokens=32)
    assert torch.equal(tensors["greedy"], greedy[:, tokens.shape[1] :])
    assert_no_padded_id_is_sampled(LCKVForCausalLM.from_pretrained(out))


@pytest.mark.long
def test_fusedkv_stands_alone(tmp_path):
    """As above; the held-out rows and the way back: test_import_hf.py."""
    run = exported.make_run(tmp_path, family="fusedkv")
    out, asked, tensors, printed = watched_export(run, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "sharing.FusedKVForCausalLM"
    assert (config["own_kv_layers"], config["tokenizer_size"]) == (2, 257)
    assert not {"num_groups", "router_stride", "feedback"} & config.keys()
    assert printed["class"] == "FusedKVForCausalLM"
    card = (out / "README.md").read_text()
    assert "2 of the 4 layers have KV of their own, and each of those above reads a learned mixture" in card
    assert "2/4 of what a model of this depth usually keeps: 256 bytes a token in float32." in card
    assert "passes" not in card
    model, tokens = exported.build(run, seed=7), torch.tensor(asked["tokens"])
    with torch.no_grad():
        torch.testing.assert_close(tensors["logits"], model(tokens).logits, rtol=0, atol=1e-6)
    greedy = model.generate(tokens, do_sample=False, min_new_tokens=32, max_new_tokens=32)
    assert torch.equal(tensors["greedy"], greedy[:, tokens.shape[1] :])
    assert_no_padded_id_is_sampled(FusedKVForCausalLM.from_pretrained(out))


def watched_export(run: Path, out: Path) -> tuple[Path, dict, dict, dict]:
    """(folder, what the check asked of the process without wm_ds, the tensors and words that it answered)."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        real = verify.load_apart

        def spy(folder, request, **options):
            answer = real(folder, request, **options)
            seen.extend([request, *answer])
            return answer

        patch.setattr(verify, "load_apart", spy)
        folder = exported.run_export(run, out)
    return folder, *seen


def assert_no_padded_id_is_sampled(model) -> None:
    """257 tokens in a vocabulary of 320: at this temperature a fifth of all samples would have none."""
    torch.manual_seed(0)
    rows = torch.zeros(64, 1, dtype=torch.long)
    out = model.generate(rows, do_sample=True, temperature=50.0, min_new_tokens=8, max_new_tokens=8)
    assert out.max() < 257


@pytest.mark.long
def test_rows_shorter_than_the_check(tmp_path):
    """The check's prompt is as long as the model's rows allow, whatever it then generates."""
    run = exported.make_run(tmp_path, seq_len=16)
    _, asked, tensors, _ = watched_export(run, tmp_path / "out")
    assert tensors["logits"].shape == (2, 16, 320)
    assert tensors["greedy"].shape == (2, asked["new_tokens"]) == (2, 32)


def test_explicit_step_is_that_step(tmp_path, unchecked):
    run = exported.make_run(tmp_path, step=7)
    exported.save(run, exported.build(run, seed=9), 9)
    latest = exported.run_export(run, tmp_path / "latest")
    seventh = exported.run_export(run, tmp_path / "seventh", step=7)
    by_path = exported.run_export(run / "checkpoints" / "step_00000007", tmp_path / "by_path")
    name = "model.layers.1.mlp.up_proj.weight"
    for out, seed in ((latest, 9), (seventh, 7), (by_path, 7)):
        assert torch.equal(weights(out)[name], dict(exported.build(run, seed).named_parameters())[name])
    assert json.loads((seventh / "export.json").read_text())["step"] == 7
    # Losses of later steps do not belong to it.
    assert json.loads((seventh / "export.json").read_text())["train_loss"] == pytest.approx(5.3)


def test_export_again_leaves_nothing_stale(run, tmp_path, unchecked):
    exported.run_export(run, tmp_path / "out", size=50_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    exported.run_export(run, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_kill_leaves_no_folder(run, tmp_path):
    """Killed at random moments, there is no folder or a whole one; the next export clears up and succeeds."""
    out = tmp_path / "out"
    rng = random.Random(1)
    command = [sys.executable, TOOL, str(run), "--output", str(out), "--max-shard-size", "2KB"]
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:  # until the first shard is being written
            if line.startswith("writing"):
                break
        time.sleep(rng.uniform(0, 2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not out.exists()
    assert list(tmp_path.glob(".out.unfinished-*"))
    exported.run_export(run, out, dtype=torch.bfloat16)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_kill_in_the_last_check_leaves_a_hidden_folder_that_does_not_load(run, tmp_path, unchecked):
    """All weights are there by then; the next export of DIR removes it, also where DIR's name means something
    to glob, or is a link."""
    (tmp_path / "target[1]").mkdir()
    (tmp_path / "link").symlink_to("target[1]")
    command = [sys.executable, TOOL, str(run), "--output", str(tmp_path / "link")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("checking: loading"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not list((tmp_path / "target[1]").iterdir())
    (left,) = tmp_path.glob(".target*.unfinished-*")
    assert (left / "model.safetensors").is_file()
    with pytest.raises(ValueError, match=r"Unrecognized model .* in its config\.json"):
        AutoModelForCausalLM.from_pretrained(left, trust_remote_code=True)
    exported.run_export(run, tmp_path / "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target[1]"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target[1]" / "config.json").is_file()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("value", "are not the checkpoint's"),
        ("missing", "lacks model.norm.weight"),
        ("shape", "has shape"),
        ("code", "logits differ"),
        ("import", "must stand alone"),
    ],
)
def test_check_finds(run, folder, tmp_path, damage, message):
    """What the check is for: each fault alone must be found."""
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    file = next(f for f in bad.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    if damage == "value":
        tensors["model.norm.weight"][3] += 1e-6
    elif damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    elif damage == "code":
        code = (bad / "modeling.py").read_text()
        assert "self.norm(result.hidden_BWD)" in code
        (bad / "modeling.py").write_text(code.replace("self.norm(result.hidden_BWD)", "result.hidden_BWD"))
    elif damage == "import":
        with (bad / "modeling.py").open("a") as code:
            code.write("\nimport wm_ds\n")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(export.ExportError, match=message):
        export.check(trained.find(run), bad, torch.float32)


@pytest.mark.slow
def test_memory_is_the_model_and_a_shard(tmp_path):
    """388 million parameters, 776 MB in bf16, from 1.55 GB of fp32 fragments, in shards of 200 MB.

    Prints what it measures; docs/evaluation.md quotes that. 100 MB are for libraries and pages in passing.
    """
    shape = {"hidden_size": 1280, "intermediate_size": 3840, "num_hidden_layers": 16, "vocab_size": 32768}
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 128, "num_kv_channels": 8}
    run = exported.make_run(tmp_path, **shape, **heads)
    program = tmp_path / "measure.py"
    program.write_text(
        "import re, sys\n"
        f"sys.path.insert(0, {str(Path(TOOL).parent.parent)!r})\n"
        "import tools.export_hf as tool\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1.024e-3\n"
        "before = peak()\n"
        "tool.main()\n"
        "print('PEAK', before, peak())\n"
    )
    command = [sys.executable, str(program), str(run), "--output", str(tmp_path / "out")]
    command += ["--max-shard-size", "200MB"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    before, peak = map(float, result.stdout.strip().splitlines()[-1].split()[1:])
    model = sum(t.nbytes for t in weights(tmp_path / "out").values()) / 1e6
    print(f"model {model:.0f} MB, before {before:.0f} MB, peak {peak:.0f} MB: {peak - before:.0f} MB more")
    assert peak - before < model + 200 + 100


def test_damaged_checkpoint_is_not_exported(tmp_path):
    run = exported.make_run(tmp_path)
    file = run / "checkpoints" / "step_00000007" / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    result = cli(run, "--output", tmp_path / "out")
    exported.assert_one_line_error(result, "rank_00001.safetensors: is damaged")
    assert not (tmp_path / "out").exists()


def test_shards_are_planned_by_size():
    shards = weight_files.plan_shards({"a": 4, "b": 4, "c": 9, "d": 1, "e": 7}, 8)
    assert [(s.names, s.size) for s in shards] == [(["a", "b"], 8), (["c"], 9), (["d", "e"], 8)]
    assert shards[1].file == "model-00002-of-00003.safetensors"
    assert [s.file for s in weight_files.plan_shards({"a": 4}, 8)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5MB", 1_500_000), ("64kb", 64_000), ("7", 7)]
)
def test_sizes(text, size):
    assert weight_files.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5 apples"])
def test_bad_sizes(text):
    with pytest.raises(export.ExportError, match="is not a size"):
        weight_files.parse_size(text)
