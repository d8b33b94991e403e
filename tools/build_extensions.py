"""Compile what DeepSpeed needs on a machine without a GPU before any run waits for it (`make install`)."""

import sys

from wm_ds.distributed import deepspeed_env, process_group


def main() -> None:
    if process_group.pick_device(local_rank=0)[0].type == "cuda":
        return
    print("compiling DeepSpeed's CPU helper (once, up to a minute)", flush=True)
    try:
        deepspeed_env.build_cpu_helper()
    except deepspeed_env.SetupError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
