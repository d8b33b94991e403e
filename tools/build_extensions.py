"""Compile the C++ extension that DeepSpeed needs on a machine without a GPU, before anything waits for it.

The first `deepspeed.init_distributed` on a CPU compiles `deepspeed_shm_comm`, which takes up to a minute;
with several ranks, or with a build that was killed and left its lock file behind, that looks like a hang.
Here it is done once, alone and with a message. On a machine with a GPU there is nothing to do.
"""

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path


def main() -> None:
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not folder:
        sys.exit("error: TORCH_EXTENSIONS_DIR is not set; run this through `make install`")
    Path(folder).mkdir(parents=True, exist_ok=True)
    # ninja is a console script of the virtual environment, which need not be on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (Path(folder) / "wm_ds.lock").open("w") as own_lock:
        fcntl.flock(own_lock, fcntl.LOCK_EX)
        # While we hold our own lock, a `lock` of torch's builder can only be left from a killed build;
        # torch would wait for it without end.
        for stale in Path(folder).rglob("lock"):
            stale.unlink()
        build()


def build() -> None:
    import torch

    if torch.cuda.is_available():
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not (shutil.which("c++") or shutil.which("g++") or os.environ.get("CXX")):
        sys.exit(
            "error: no C++ compiler found, and DeepSpeed needs one on a machine without a GPU;"
            " on Debian and Ubuntu: apt-get install g++"
        )
    print("compiling DeepSpeed's shared-memory communication (once, about a minute)", flush=True)
    start = time.monotonic()
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()
    print(f"compiled in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
