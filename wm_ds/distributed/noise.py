"""What libraries print in every training run and nobody can act on: left out, by exact message, only here.

A message that is not in these tables is shown as ever: a new one is news.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

# Of torch, about calls that DeepSpeed makes: once per rank, or once per step and rank.
WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    (
        FutureWarning,
        "`torch.distributed.all_gather_into_tensor` is deprecated. "
        "Please use `torch.distributed.all_gather_single` instead.",
    ),
    (
        FutureWarning,
        "`torch.distributed.reduce_scatter_tensor` is deprecated. "
        "Please use `torch.distributed.reduce_scatter_single` instead.",
    ),
)
# DeepSpeed's log: our optimizer is one that it does not know, and is tested here.
LOGGED = ("**** You are using ZeRO with an untested optimizer, proceed with caution *****",)
# DeepSpeed's print at every start, also where the helper was only loaded.
PRINTED = ("DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully",)


def _is_news(record: logging.LogRecord) -> bool:
    return record.getMessage() not in LOGGED


def silence() -> None:
    """From now on, in this process; a second call changes nothing."""
    for category, message in WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(message) + r"\Z", category=category)
    from deepspeed.utils import logger

    logger.setLevel(getattr(logging, os.environ["DS_LOG_LEVEL"].upper(), logging.WARNING))
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


class _WithoutKnownLines:
    """A text stream that hands on whole lines, except those of PRINTED."""

    def __init__(self, stream) -> None:  # noqa: ANN001
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line not in PRINTED:
                self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.write(self._line)


@contextlib.contextmanager
def without_known_lines() -> Iterator[None]:
    """Standard output without the lines of PRINTED."""
    sieve = _WithoutKnownLines(sys.stdout)
    with contextlib.redirect_stdout(sieve):  # type: ignore[type-var]
        yield
    sieve.close()
