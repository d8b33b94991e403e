"""One way to replace a file: whole or not at all, whatever hits it and whenever."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from wm_ds import files

STEPS = ("open", "fsync", "replace", "sync_directory")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".tmp-" in path.name]


def break_at(step: str, act, patch: pytest.MonkeyPatch) -> None:
    """Do `act` instead of one step of a replacement."""
    if step == "open":
        patch.setattr(files, "write_synced", act)
    elif step == "sync_directory":
        patch.setattr(files, step, act)
    else:
        patch.setattr(files.os, step, act)


@pytest.mark.parametrize("before", [None, "the old\n"])
def test_the_new_content_is_there_and_nothing_else(tmp_path, before):
    path = tmp_path / "a.json"
    if before is not None:
        path.write_text(before)
    files.write_atomically(path, "ä\n")
    assert path.read_bytes() == b"\xc3\xa4\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path, step):
    """The process ends at that step, as by SIGKILL: no handler, no `finally`."""
    path = tmp_path / "a"
    path.write_text("old")
    if (child := os.fork()) == 0:
        with pytest.MonkeyPatch.context() as patch:
            break_at(step, lambda *_: os._exit(9), patch)
            files.write_atomically(path, "new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_text() == ("new" if step == "sync_directory" else "old")
    assert all(name.startswith(".") for name in hidden(tmp_path))
    files.write_atomically(path, "newer")
    assert path.read_text() == "newer"


@pytest.mark.parametrize("step", STEPS[:3])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_an_error_in_the_midst_leaves_the_old_file_alone(tmp_path, monkeypatch, step, error):
    path = tmp_path / "a"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise error

    break_at(step, fail, monkeypatch)
    with pytest.raises(type(error)) as raised:
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
    if isinstance(error, OSError):
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_with_the_file_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "temporary", lambda _: tmp_path / "full")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        files.write_atomically(tmp_path / "a", "x" * 10_000)
    assert raised.value.filename == str(tmp_path / "a")


def test_errors_name_the_file_and_not_the_temporary_one(tmp_path):
    (tmp_path / "folder").mkdir()
    for path, kind in [(tmp_path / "no" / "a", FileNotFoundError), (tmp_path / "folder", IsADirectoryError)]:
        with pytest.raises(kind) as raised:
            files.write_atomically(path, "new")
        assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == ["folder"]


def test_json(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"b": 1, "a": "ä"}, indent=1, sort_keys=True)
    assert path.read_text() == '{\n "a": "\\u00e4",\n "b": 1\n}\n'
    with pytest.raises(TypeError):
        files.write_json(path, object())
    assert json.loads(path.read_text()) == {"a": "ä", "b": 1}


def test_create_is_exclusive_and_leaves_nothing_half(tmp_path):
    path = tmp_path / "claim"
    assert files.create(path, "1")
    assert not files.create(path, "2")
    assert path.read_text() == "1"
    with pytest.raises(TypeError):
        files.create(tmp_path / "other", None)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["claim"]


class Full:
    """A file on a disk without room."""

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, _: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_with_the_file_that_was_to_be_created(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "open", lambda *_: Full(), raising=False)
    with pytest.raises(OSError, match="No space left on device") as raised:
        files.create(tmp_path / "claim", "1")
    assert raised.value.filename == str(tmp_path / "claim")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_are_the_umasks(tmp_path, umask):
    old = os.umask(umask)
    try:
        files.write_atomically(tmp_path / "a", "x")
        files.create(tmp_path / "b", "x")
        (tmp_path / "c").touch(mode=0o600)
        files.give_usual_mode(tmp_path / "c")
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}
    assert len(os.listdir(tmp_path)) == 3


def test_a_file_system_that_cannot_flush_folders_is_no_error(tmp_path, monkeypatch):
    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(files.os, "fsync", refuse)
    files.sync_directory(tmp_path)


@pytest.mark.parametrize(
    "module", ["files", "errors", "distributed.environment", "run.attempt", "run.rendezvous"]
)
def test_the_batch_scripts_python_has_no_packages(module):
    code = f"import sys; sys.path.insert(0, '.'); import wm_ds.{module}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
