"""What DeepSpeed reads from its environment, and the one C++ helper that it needs on a machine without CUDA.

Import this module before anything that imports `deepspeed`: DeepSpeed reads its environment at import.

Without CUDA, DeepSpeed compiles one small helper (`deepspeed_shm_comm`, about a minute) when the first
process group starts. We build it ourselves beforehand, in one fixed folder per installation of DeepSpeed and
under a file lock that the kernel releases when its owner dies, so that a killed build can neither be waited
for forever (DeepSpeed's own `lock` file stays behind) nor be entered by two ranks at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from wm_ds.errors import WmError

log = logging.getLogger(__name__)


class SetupError(WmError, RuntimeError):
    """The machine or the launch cannot run this; the message says what to change."""


def cache_folder() -> Path:
    """XDG_CACHE_HOME, else ~/.cache; where no home can be written, this user's own folder in TMPDIR.

    A job may run under a user id without a passwd entry, without HOME, or with a home that its node cannot
    write: containers and some sites do all three.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    try:
        cache = Path.home() / ".cache"
    except RuntimeError:  # no HOME and no passwd entry
        return own_temporary_folder()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return cache if usable else own_temporary_folder()


def own_temporary_folder() -> Path:
    """A folder of this user id alone under TMPDIR or /tmp; not made here."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"wm_ds-{os.getuid()}"


def extensions_folder() -> Path:
    """Where DeepSpeed's C++ helpers are built for this Python, this torch and this installation of DeepSpeed.

    The build names source files by their paths, so installations that shared a folder would rebuild each
    other's helpers in turns, under the feet of running jobs.
    """
    found = importlib.util.find_spec("deepspeed")
    where = hashlib.sha256(str(found and found.origin).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / "wm_ds" / f"extensions-torch{torch.__version__}-{python}-{where}"


if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
os.environ.setdefault("DS_LOG_LEVEL", "warning")


def build_cpu_helper() -> None:
    """Compile and load DeepSpeed's CPU communication helper, once per machine; later calls load it.

    A helper is loaded only when it is, byte for byte, one that was compiled to the end and loaded then: a
    truncated library (a disk that filled up, a copy that was cut off) would end the process by a bus error
    and without a word. Any other is compiled again.

    Raises SetupError where it has to be compiled and there is no C++ compiler, no room or no folder to write.
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    # Ninja comes with the environment that runs this process, which need not be activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    try:
        _claim_folder(folder)
        with _exclusive(folder), _quiet_stdout():
            for leftover in folder.rglob("lock"):
                leftover.unlink(missing_ok=True)  # nobody else builds in here now: it is of a killed build
            if not _sound(folder / HELPER):
                _prepare_build(folder / HELPER)
            ShareMemCommBuilder().load(verbose=False)
            _stamp(folder / HELPER)
    except (OSError, RuntimeError, ImportError) as error:
        if isinstance(error, SetupError):
            raise
        raise SetupError(
            f"DeepSpeed's CPU helper could not be compiled and loaded in {folder}: {_build_problem(error)}; "
            "make room there (10 MB), or set TORCH_EXTENSIONS_DIR to a folder that you can write"
        ) from None


HELPER = "deepspeed_shm_comm"  # DeepSpeed's name of the helper, of its folder and of its library
STAMP = "wm_ds.sha256"  # checksum of the library, written when it has been loaded


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _sound(built: Path) -> bool:
    library, stamp = built / f"{HELPER}.so", built / STAMP
    return library.is_file() and stamp.is_file() and stamp.read_text().strip() == _checksum(library)


def _stamp(built: Path) -> None:
    library = built / f"{HELPER}.so"
    if library.is_file() and not _sound(built):
        part = built / f".{STAMP}"
        part.write_text(_checksum(library) + "\n")
        part.replace(built / STAMP)


def _prepare_build(built: Path) -> None:
    """Look for the compiler, and empty the folder: object files of half a build may be cut off, too."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise SetupError(
            f"no C++ compiler: DeepSpeed on CPU compiles a small helper and {compiler!r} is not on PATH; "
            "install one (Debian/Ubuntu: apt install g++) or set CXX"
        )
    if built.exists():
        shutil.rmtree(built)
    if sys.stderr.isatty() or built.is_relative_to(own_temporary_folder()):
        where = f" in {built.parent}" if built.is_relative_to(own_temporary_folder()) else ""
        log.warning("compiling DeepSpeed's CPU helper%s (about a minute, once)", where)


def _build_problem(error: Exception) -> str:
    """What went wrong in one line; of a compiler's pages the line that says it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"(error|failed): ", line)]
    return (telling or lines or [type(error).__name__])[0]


def _claim_folder(folder: Path) -> None:
    """Make the folder; what is loaded from a temporary folder that all can write must be this user's own."""
    own = own_temporary_folder()
    if folder.is_relative_to(own):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = own.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise SetupError(
                f"{own} is not a folder of this user alone, so nothing is loaded from it: remove it, or set "
                "TORCH_EXTENSIONS_DIR to a folder that you can write"
            )
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with open(folder / ".wm_ds_build", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel, also when the holder is killed
        yield


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    with contextlib.redirect_stdout(
        sys.stderr if os.environ.get("DS_LOG_LEVEL") == "debug" else open(os.devnull, "w")
    ):
        yield
