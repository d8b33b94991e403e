"""Who writes what to the terminal, and that a terminal that is gone ends nothing."""

from __future__ import annotations

import logging
import sys

import pytest

from wm_ds.distributed import log as terminal

pytestmark = pytest.mark.usefixtures("log_as_before")

log = logging.getLogger("wm_ds.anywhere")


def shown(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    log.debug("detail")
    log.info("story %d %%", 1)
    log.warning("trouble")
    log.error("error: end")
    return tuple(capsys.readouterr())


def test_rank_0_tells_the_story_and_every_rank_its_own_trouble(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    terminal.start()
    assert shown(capsys) == ("story 1 %\n", "trouble\nerror: end\n")
    monkeypatch.setenv("RANK", "3")
    terminal.start()
    assert shown(capsys) == ("", "trouble\nerror: end\n")
    monkeypatch.setenv("RANK", "0")
    terminal.start("stderr")
    assert shown(capsys) == ("", "story 1 %\ntrouble\nerror: end\n")


def test_a_terminal_that_is_gone_ends_nothing(capsys, monkeypatch):
    class Gone:
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.delenv("RANK", raising=False)
    terminal.start()
    monkeypatch.setattr(sys, "stdout", Gone())
    log.info("nobody reads this")
    log.warning("this, somebody does")
    assert capsys.readouterr().err == "this, somebody does\n"
