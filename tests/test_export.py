"""Exports of a checkpoint, loaded the way a stranger would load them."""

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tests import exported
from tools import export_hf
from wm_ds import export, trained
from wm_ds.encode import make_encoder, open_tokenizer
from wm_ds.model import LCKVForCausalLM, WhiteMatterForCausalLM

TOOL = str(Path(__file__).parent.parent / "tools" / "export_hf.py")


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


def run_export(
    source: Path, out: Path, step: int | None = None, dtype=torch.float32, size: int = 10**9
) -> Path:
    return export.export(
        trained.find(source, step), out, dtype=dtype, max_shard_size=size, say=lambda _: None
    )


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the check, which other tests cover, where only files matter."""
    monkeypatch.setattr(export, "check", lambda *_: 0.0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(export.read_weights(folder))


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
    """EOS is the packer's in all three files; there is no BOS; padding is EOS."""
    packed = json.loads((run.parent / "packed" / "manifest.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id == packed["eos_id"]
    assert config["pad_token_id"] == generation["pad_token_id"] == tokenizer.pad_token_id == packed["eos_id"]
    assert config["bos_token_id"] is None
    assert generation.get("bos_token_id") is None
    assert tokenizer.model_max_length == config["max_position_embeddings"] == packed["seq_len"]
    assert_packer_ids(tokenizer, run.parent / "tokenizer")


def assert_packer_ids(tokenizer, packer: Path) -> None:
    rng = random.Random(0)
    texts = [
        "".join(chr(rng.choice([*range(32, 127), 32, 233, 0x4E2D, 10])) for _ in range(20))
        for _ in range(1000)
    ]
    ids, offsets = make_encoder(open_tokenizer(str(packer))).encode(texts)
    assert tokenizer(texts)["input_ids"] == [ids[a:b].tolist() for a, b in pairwise(offsets)]


def test_sentencepiece_becomes_a_tokenizer_json(tmp_path, unchecked):
    """Data packed with a .model: the export's tokenizer gives the same ids; one that did not is refused."""
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
    out = run_export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert_packer_ids(tokenizer, model)
    assert tokenizer.eos_token_id == json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            export, "_random_texts", lambda _: ["<s>"]
        )  # characters there, a token for transformers
        with pytest.raises(export.ExportError, match="otherwise than the packer: '<s>'"):
            run_export(run, tmp_path / "other")


def test_card_tells_the_run(folder):
    card = (folder / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)' in card
    assert "2 KV channels" in card
    assert "| steps | 7 |" in card
    assert "| tokens | 3,584 |" in card
    assert "5.3000" in card


def test_travels_alone(run, folder, tmp_path):
    """Copied elsewhere, loaded without wm_ds, saved again, loaded again with the first folder gone."""
    first, second = tmp_path / "model", tmp_path / "again"
    shutil.copytree(folder, first)
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=True); m.save_pretrained(sys.argv[2]); "
        "T.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", code, str(first), str(second)]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    shutil.rmtree(first)
    tokens = exported.random_rows(2, 21, 320).tolist()
    tensors, printed = export.load_apart(second, {"tokens": tokens})
    assert printed["class"] == "WhiteMatterForCausalLM"
    model = exported.build(run, seed=7)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits
    torch.testing.assert_close(tensors["logits"], expected, rtol=0, atol=1e-6)


def test_prompts_are_completed(folder):
    request = {"tokens": [[1, 2, 3]], "prompts": ["the ", "a"], "prompt_tokens": 5}
    _, printed = export.load_apart(folder, request)
    assert [text[:1] for text in printed["texts"]] == ["t", "a"]


def test_needs_trust(folder):
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def test_bf16_is_rounded_once_and_tied_head_is_shared(tmp_path):
    """The bf16 file is the elementwise rounding of the masters; a tied head is in no file."""
    run = exported.make_run(tmp_path, tie_word_embeddings=True, num_kv_channels=4)
    out = run_export(run, tmp_path / "out", dtype=torch.bfloat16)
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
    out = run_export(run, tmp_path / "out")
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


def watched_export(run: Path, out: Path) -> tuple[Path, dict, dict, dict]:
    """(folder, what the check asked of the process without wm_ds, the tensors and words that it answered)."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        real = export.load_apart

        def spy(folder, request, **options):
            answer = real(folder, request, **options)
            seen.extend([request, *answer])
            return answer

        patch.setattr(export, "load_apart", spy)
        folder = run_export(run, out)
    return folder, *seen


def assert_no_padded_id_is_sampled(model) -> None:
    """257 tokens in a vocabulary of 320: at this temperature a fifth of all samples would have none."""
    torch.manual_seed(0)
    rows = torch.zeros(64, 1, dtype=torch.long)
    out = model.generate(rows, do_sample=True, temperature=50.0, min_new_tokens=8, max_new_tokens=8)
    assert out.max() < 257


def test_rows_shorter_than_the_check(tmp_path):
    """The check's prompt is as long as the model's rows allow, whatever it then generates."""
    run = exported.make_run(tmp_path, seq_len=16)
    _, asked, tensors, _ = watched_export(run, tmp_path / "out")
    assert tensors["logits"].shape == (2, 16, 320)
    assert tensors["greedy"].shape == (2, asked["new_tokens"]) == (2, 32)


def test_explicit_step_is_that_step(tmp_path, unchecked):
    run = exported.make_run(tmp_path, step=7)
    exported.save(run, exported.build(run, seed=9), 9)
    latest, seventh = run_export(run, tmp_path / "latest"), run_export(run, tmp_path / "seventh", step=7)
    by_path = run_export(run / "checkpoints" / "step_00000007", tmp_path / "by_path")
    name = "model.layers.1.mlp.up_proj.weight"
    for out, seed in ((latest, 9), (seventh, 7), (by_path, 7)):
        assert torch.equal(weights(out)[name], dict(exported.build(run, seed).named_parameters())[name])
    assert json.loads((seventh / "export.json").read_text())["step"] == 7
    # Losses of later steps do not belong to it.
    assert json.loads((seventh / "export.json").read_text())["train_loss"] == pytest.approx(5.3)


def test_export_again_leaves_nothing_stale(run, tmp_path, unchecked):
    run_export(run, tmp_path / "out", size=50_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    run_export(run, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


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
    run_export(run, out, dtype=torch.bfloat16)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


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
    run_export(run, tmp_path / "link")
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
        export.check(trained.find(run), bad, torch.float32, say=lambda _: None)


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
    assert_one_line_error(result, "rank_00001.safetensors: is damaged")
    assert not (tmp_path / "out").exists()


def assert_one_line_error(result: subprocess.CompletedProcess, *words: str) -> None:
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


def test_bad_input_is_one_line(run, tmp_path, monkeypatch):
    """In this process, for speed: SystemExit with a text is that text on stderr and exit status 1."""
    out = tmp_path / "out"
    other = exported.make_tokenizer(tmp_path / "other")
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["pre_tokenizer"]["add_prefix_space"] = True
    (other / "tokenizer.json").write_text(json.dumps(settings))
    bigger = exported.make_tokenizer(tmp_path / "bigger")
    more = AutoTokenizer.from_pretrained(bigger)
    more.add_tokens([f"<more{i}>" for i in range(100)])
    more.save_pretrained(bigger)
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.tex").write_text("years of work")
    empty_run = tmp_path / "empty"
    empty_run.mkdir()
    (empty_run / "config.yaml").write_text((run / "config.yaml").read_text())
    cases = [
        ((tmp_path / "nowhere", "--output", out), ["nowhere does not exist"]),
        ((tmp_path, "--output", out), ["is no run directory, checkpoint or exported folder"]),
        ((empty_run, "--output", out), ["has no checkpoint yet"]),
        ((run, "--step", "8", "--output", out), ["no checkpoint of step 8", "step_00000007"]),
        ((run, "--output", occupied), ["occupied exists and is not an export"]),
        ((run, "--output", out, "--max-shard-size", "many"), ["'many' is not a size"]),
        ((run, "--output", out, "--tokenizer", tmp_path), ["no tokenizer.json or tokenizer.model in"]),
        ((run, "--output", out, "--tokenizer", bigger), ["has 357 tokens, more than", "vocab_size 320"]),
        ((run, "--output", out, "--tokenizer", other), ["not the one that packed the data"]),
    ]
    for arguments, words in cases:
        monkeypatch.setattr(sys, "argv", [TOOL, *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            export_hf.main()
        result = subprocess.CompletedProcess(arguments, 1, stderr=exit.value.code)
        assert_one_line_error(result, *words)
    assert not out.exists()
    assert (occupied / "thesis.tex").exists()


class FakeHub(BaseHTTPRequestHandler):
    """As much of the Hub's protocol as an upload of small files needs; `log` is what was asked of it."""

    def do_GET(self):
        if "Authorization" not in self.headers:
            return self.answer(401, {"error": "Invalid credentials"})
        return self.answer(200, {"name": "me", "type": "user"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.log.append((self.path, body))
        if self.server.refuse in self.path:
            return self.answer(403, {"error": "You may not\nwrite here"})
        if self.path == "/api/repos/create":
            return self.answer(200, {"url": f"{self.server.address}/me/model"})
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.answer(200, {"files": [f | {"shouldIgnore": False} for f in files]})
        return self.answer(200, {"commitUrl": f"{self.server.address}/me/model/commit/1", "commitOid": "1"})

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.address, server.log, server.refuse = f"http://127.0.0.1:{server.server_port}", [], "nothing"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push(monkeypatch, run: Path, out: Path, address: str, token: str | None) -> str:
    """Export and upload through the real client, made to speak to `address`; returns the error, if any."""
    from huggingface_hub import HfApi

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(endpoint=address, token=token or False))
    arguments = [str(run), "--output", str(out), "--push-to-hub", "me/model", "--private"]
    monkeypatch.setattr(sys, "argv", [TOOL, *arguments])
    try:
        export_hf.main()
    except SystemExit as exit:
        return str(exit.code)
    return ""


def test_the_folder_is_uploaded(run, tmp_path, hub, unchecked, monkeypatch):
    assert push(monkeypatch, run, tmp_path / "out", hub.address, "hf_x") == ""
    create = json.loads(next(body for path, body in hub.log if path == "/api/repos/create"))
    assert (create["name"], create["organization"]) == ("model", "me")
    assert create["visibility"] == "private"
    commit = next(body for path, body in hub.log if path == "/api/models/me/model/commit/main")
    lines = [json.loads(line) for line in commit.splitlines()]
    sent = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
    assert sent.keys() == {path.name for path in (tmp_path / "out").iterdir()}
    assert base64.b64decode(sent["config.json"]) == (tmp_path / "out" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no token", "cannot upload to me/model"),
        ("no network", "cannot upload to me/model"),
        ("refused", "is complete, but uploading it to me/model failed"),
    ],
)
def test_an_upload_that_fails_is_one_line(run, tmp_path, hub, unchecked, monkeypatch, fault, words):
    """Without token or network nothing is exported; a refusal later leaves the complete folder."""
    hub.refuse = "/commit/"
    address = "http://127.0.0.1:9" if fault == "no network" else hub.address
    token = None if fault == "no token" else "hf_x"
    error = push(monkeypatch, run, tmp_path / "out", address, token)
    assert_one_line_error(subprocess.CompletedProcess([], 1, stderr=error), words)
    assert (tmp_path / "out").exists() == (fault == "refused")


def test_shards_are_planned_by_size():
    shards = export.plan_shards({"a": 4, "b": 4, "c": 9, "d": 1, "e": 7}, 8)
    assert [(s.names, s.size) for s in shards] == [(["a", "b"], 8), (["c"], 9), (["d", "e"], 8)]
    assert shards[1].file == "model-00002-of-00003.safetensors"
    assert [s.file for s in export.plan_shards({"a": 4}, 8)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5MB", 1_500_000), ("64kb", 64_000), ("7", 7)]
)
def test_sizes(text, size):
    assert export.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5 apples"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="is not a size"):
        export.parse_size(text)
