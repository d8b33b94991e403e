"""Engines that tests share: starting one takes longer than what is asked of it."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The engine in the tests' own process, where they can look at it; and nothing compiled for a minute.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
sys.path.insert(0, str(ROOT))  # wm_ds.model, of which the tests make models; the plugin never imports it


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Folders and engines by name; see engines.py."""
    from engines import Engines

    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()
