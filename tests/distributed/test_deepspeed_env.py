"""Where DeepSpeed's CPU helper is built, that it is whole when it is loaded, and what is said otherwise."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from wm_ds.distributed import deepspeed_env
from wm_ds.distributed.deepspeed_env import SetupError

ROOT = Path(__file__).parents[2]


def test_installations_do_not_share_a_build_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = set()
    for name in ("one", "two"):
        package = tmp_path / name / "deepspeed"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        with monkeypatch.context() as inner:
            inner.delitem(sys.modules, "deepspeed", raising=False)
            inner.syspath_prepend(str(tmp_path / name))
            folders.add(deepspeed_env.extensions_folder())
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "cache" / "wm_ds"}


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match=r"'no-such-compiler' is not on PATH; install one"):
        deepspeed_env.build_cpu_helper()


BUILD = """
import sys, time
from pathlib import Path
from wm_ds.distributed import deepspeed_env
from deepspeed.ops.op_builder import cpu
folder = Path(sys.argv[1])
class Builder:
    def load(self, verbose):
        lock = folder / "deepspeed_shm_comm" / "lock"
        assert not lock.exists(), "two builds at once, or a leftover was kept"
        lock.parent.mkdir(exist_ok=True)
        lock.touch(exist_ok=False)
        time.sleep(1.0)
        if sys.argv[2] == "die":
            import os; os._exit(9)
        lock.unlink()
cpu.ShareMemCommBuilder = Builder
deepspeed_env.build_cpu_helper()
"""


def start(folder: Path, how: str) -> subprocess.Popen:
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", BUILD, str(folder), how], env=env, stderr=subprocess.PIPE)


@pytest.mark.long
def test_builds_wait_for_each_other_and_survive_a_killed_one(tmp_path):
    assert start(tmp_path, "die").wait(120) == 9
    assert list(tmp_path.rglob("lock"))  # for which DeepSpeed alone would wait for ever
    both = [start(tmp_path, "live") for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert not list(tmp_path.rglob("lock"))


def without_passwd_entry(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command under a user id that no passwd file knows, without HOME; it may read what root may."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    names = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **settings}
    user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return subprocess.run([*user, *command], env=env, capture_output=True, text=True, timeout=120)


SAY_FOLDER = "from wm_ds.distributed import deepspeed_env; print(deepspeed_env.extensions_folder())"


@pytest.mark.parametrize("home", [None, "/", "/nowhere", "/root"])
def test_a_user_without_passwd_entry_or_a_home_to_write_in(tmp_path, home):
    settings = {"TMPDIR": str(tmp_path)} | ({} if home is None else {"HOME": home})
    found = without_passwd_entry(sys.executable, "-c", SAY_FOLDER, **settings)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).parent.parent == tmp_path / "wm_ds-54321"


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A helper of DeepSpeed that is a file: `library`, and how often it was `compiled` and `loaded`."""
    from deepspeed.ops.op_builder import cpu

    built = tmp_path / "extensions" / deepspeed_env.HELPER
    state = SimpleNamespace(
        library=built / f"{deepspeed_env.HELPER}.so", compiled=0, loaded=[], content=b"x" * 999
    )

    class Builder:
        def load(self, verbose: bool) -> None:
            built.mkdir(exist_ok=True)
            if not state.library.exists():
                state.compiled += 1
                state.library.write_bytes(state.content)
            state.loaded.append(state.library.read_bytes())

    monkeypatch.setattr(cpu, "ShareMemCommBuilder", Builder)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built.parent))
    return state


@pytest.mark.parametrize("length", [0, 500, 998])
def test_a_truncated_helper_is_compiled_again_and_never_loaded(helper, length):
    deepspeed_env.build_cpu_helper()
    deepspeed_env.build_cpu_helper()
    assert helper.compiled == 1
    os.truncate(helper.library, length)
    deepspeed_env.build_cpu_helper()
    assert helper.compiled == 2
    assert helper.loaded == [helper.content] * 3


def test_a_helper_of_unknown_origin_is_compiled_again(helper):
    helper.library.parent.mkdir(parents=True)
    helper.library.write_bytes(b"half")
    (helper.library.parent / "shm.o").write_bytes(b"half")
    deepspeed_env.build_cpu_helper()
    assert helper.loaded == [helper.content]
    assert not (helper.library.parent / "shm.o").exists(), "ninja would link it again"


@pytest.mark.parametrize("writable", [False, True])
def test_a_folder_without_room_is_named(helper, monkeypatch, tmp_path, writable):
    """Files may not grow beyond 100 bytes here, which fails in the calls in which a full disk does."""
    folder = tmp_path / ("extensions" if writable else "file")
    if not writable:
        folder.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(SetupError, match=rf"in {folder}: .*; make room there .* TORCH_EXTENSIONS_DIR"):
            deepspeed_env.build_cpu_helper()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if writable:
        deepspeed_env.build_cpu_helper()
        assert helper.loaded == [helper.content], "the next start compiles it whole"


def test_of_a_compilers_pages_the_line_that_says_it_is_shown():
    telling = "cc1plus: fatal error: No space left"
    pages = f"Error building extension 'x': [1/3] c++ -c shm.cpp\nFAILED: shm.o\n{telling}\nmore"
    assert deepspeed_env._build_problem(RuntimeError(pages)) == telling


def test_a_temporary_folder_of_somebody_else_is_not_trusted(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    own = deepspeed_env.own_temporary_folder()
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(own / "wm_ds" / "extensions"))
    with pytest.raises(SetupError, match=rf"{own} is not a folder of this user alone"):
        deepspeed_env.build_cpu_helper()
