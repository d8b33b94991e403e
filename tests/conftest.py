"""What holds for all tests."""

import logging
import signal
from collections.abc import Iterator
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


@pytest.fixture
def log_as_before() -> Iterator[None]:
    """Our logger's handlers and level are put back after the test."""
    logger = logging.getLogger("wm_ds")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
