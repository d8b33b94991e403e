"""An OpenAI client against `vllm serve`."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from engines import expected

NAME = "trained"
PROMPT = "The model is trained"


@pytest.fixture(scope="module")
def folder(engines):
    return engines.folder("trained")


@pytest.fixture(scope="module")
def client(engines, folder, tmp_path_factory):
    from openai import OpenAI

    engines.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-num-seqs", "8", "--block-size", "32", "--hf-overrides", '{"prefill": "exact"}',
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def answer(engines, folder):
    """Ids of the prompt, the 20 greedy tokens behind it, and their log-probabilities, by Hugging Face."""
    from transformers import AutoTokenizer

    model = engines.reference(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = tokenizer(PROMPT).input_ids
    out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, prefill="exact")
    new = out[0, len(ids) :].tolist()
    logprobs = expected(model, ids, new, prefill="exact")
    return tokenizer.decode(new), logprobs[range(len(new)), new].tolist()


def ask(client, **settings):
    return client.completions.create(
        model=NAME, prompt=PROMPT, **({"max_tokens": 20, "temperature": 0} | settings)
    )


def test_greedy_answer_with_logprobs(client, answer):
    choice = ask(client, logprobs=1).choices[0]
    assert choice.text == answer[0]
    assert choice.logprobs.token_logprobs == pytest.approx(answer[1], abs=1e-4)


def test_streaming(client, answer):
    pieces = [chunk.choices[0].text for chunk in ask(client, stream=True)]
    assert len(pieces) > 5
    assert "".join(pieces) == answer[0]


def test_stop(client, answer):
    stop = answer[0][5:8]
    choice = ask(client, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == answer[0][: answer[0].index(stop)]


def test_several_answers_at_once(client):
    choices = ask(client, n=3, temperature=1.0, seed=1).choices
    assert len({choice.text for choice in choices}) > 1


def test_a_prompt_that_is_too_long_is_refused(client):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="256"):
        client.completions.create(model=NAME, prompt=list(range(4, 304)), max_tokens=1)
