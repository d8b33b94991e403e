"""A run without training, its tokenizer and its model; they are only read."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.support import exported
from wm_ds import trained


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    return exported.make_run(tmp_path_factory.mktemp("scored"))


@pytest.fixture(scope="session")
def tokenizer(run):
    return AutoTokenizer.from_pretrained(run.parent / "tokenizer")


@pytest.fixture(scope="session")
def model(run):
    return trained.find(run).load(torch.float32)
