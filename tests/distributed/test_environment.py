"""Numbers in the environment: read, left out, and wrong ones named."""

import pytest

from wm_ds.distributed import environment
from wm_ds.distributed.environment import VariableError


def test_numbers_are_read_and_left_out(monkeypatch):
    monkeypatch.delenv("WM_X", raising=False)
    assert (environment.whole("WM_X", 7), environment.seconds("WM_X", 1.5)) == (7, 1.5)
    monkeypatch.setenv("WM_X", "")
    assert (environment.whole("WM_X", 7), environment.seconds("WM_X", 1.5)) == (7, 1.5)
    monkeypatch.setenv("WM_X", "3")
    assert (environment.whole("WM_X", 7), environment.seconds("WM_X", 1.5)) == (3, 3.0)
    monkeypatch.setenv("WM_X", "0.5")
    assert environment.seconds("WM_X", 1.5) == 0.5


@pytest.mark.parametrize("value", ["many", "1.5", "-1", "nan", "0x4", "1e3"])
def test_what_is_no_whole_number_is_named(monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(VariableError, match=f"^LOCAL_WORLD_SIZE='{value}' in the environment must be a "):
        environment.whole("LOCAL_WORLD_SIZE", 1)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_what_is_no_time_is_named(monkeypatch, value):
    monkeypatch.setenv("WM_HANG_TIMEOUT", value)
    with pytest.raises(VariableError, match=f"^WM_HANG_TIMEOUT='{value}' in the environment must be a "):
        environment.seconds("WM_HANG_TIMEOUT", 1.0)
