"""What is left out of what libraries print, and that everything else still shows."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings

import pytest
import torch.distributed

from wm_ds.distributed import deepspeed_env, noise  # noqa: F401  the environment that DeepSpeed reads


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings that reach the terminal, after `silence`."""
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    return shown


def test_known_warnings_are_left_out_and_others_show(seen):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        noise.silence()
        for category, message in noise.WARNINGS:
            warnings.warn(message, category, stacklevel=1)
        assert seen == []
        unknown = [f"{noise.WARNINGS[0][1]} And more.", "`torch.distributed.broadcast` is deprecated."]
        for message in unknown:
            warnings.warn(message, FutureWarning, stacklevel=1)
        warnings.warn(noise.WARNINGS[0][1], UserWarning, stacklevel=1)
        assert seen == [*unknown, noise.WARNINGS[0][1]]


def test_known_lines_of_deepspeeds_log_are_left_out_and_others_show():
    from deepspeed.utils import logger

    noise.silence()
    noise.silence()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    try:
        logger.warning(noise.LOGGED[0])
        logger.warning("%s", noise.LOGGED[0] + "!")
        logger.error("something new")
    finally:
        logger.removeHandler(handler)
    assert records == [noise.LOGGED[0] + "!", "something new"]


def test_known_prints_are_left_out_and_others_show(capsys):
    with noise.without_known_lines():
        print("before")
        print(noise.PRINTED[0])
        print(noise.PRINTED[0], "not really")
        print("half", end="")
    assert capsys.readouterr().out == f"before\n{noise.PRINTED[0]} not really\nhalf"


def test_deepspeed_still_says_what_is_left_out():
    """An upgrade that words it differently shows it again, and makes an entry of the tables useless."""
    assert noise.LOGGED[0] in inspect.getsource(importlib.import_module("deepspeed.runtime.engine"))
    assert "built successfully" in inspect.getsource(importlib.import_module("deepspeed.comm.torch"))
    calls = (torch.distributed.all_gather_into_tensor, torch.distributed.reduce_scatter_tensor)
    assert [call.__deprecated__ for call in calls] == [message for _, message in noise.WARNINGS]
