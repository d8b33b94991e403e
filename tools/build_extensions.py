"""Compile what DeepSpeed needs on a machine without a GPU before any run waits for it (`make install`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wm_ds import distributed


def main() -> None:
    if distributed.pick_device(local_rank=0)[0].type == "cuda":
        return
    print("compiling DeepSpeed's CPU helper (once, up to a minute)", flush=True)
    try:
        distributed.build_cpu_helper()
    except distributed.SetupError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
