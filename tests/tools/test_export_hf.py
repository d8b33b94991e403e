"""The export command: refusals in one line, uploads through the real client to a server on this machine."""

import base64
import contextlib
import io
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support import exported
from tools import export_hf
from wm_ds.export import export


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return exported.make_run(tmp_path_factory.mktemp("whitematter"))


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the check, which tests/export/test_export.py covers, where only files matter."""
    monkeypatch.setattr(export, "check", lambda *_: 0.0)


def test_bad_input_is_one_line(run, tmp_path, capsys):
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
        capsys.readouterr()
        code = export_hf.main([*map(str, arguments)])
        result = subprocess.CompletedProcess(arguments, code, stderr=capsys.readouterr().err)
        exported.assert_one_line_error(result, *words)
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
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = export_hf.main(arguments)
    assert code == bool(stderr.getvalue())
    return stderr.getvalue()


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
    exported.assert_one_line_error(subprocess.CompletedProcess([], 1, stderr=error), words)
    assert (tmp_path / "out").exists() == (fault == "refused")
