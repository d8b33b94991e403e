"""What holds for all tests."""

import signal
from pathlib import Path

import pytest

# Ctrl-C is ignored where the tests are a shell's background job, and the processes that they start inherit
# that: they would never notice the one that they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a byte-level tokenizer."""
    from tests.support import toy_corpus

    return toy_corpus.byte_tokenizer(tmp_path_factory.mktemp("tok"))
