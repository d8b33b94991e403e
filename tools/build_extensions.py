"""Compile what DeepSpeed needs on a machine without a GPU before any run waits for it (`make install`)."""

import argparse
import sys

from wm_ds.errors import run_cli


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """Compile, where there is something to compile."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    from wm_ds.distributed import deepspeed_env, process_group  # seconds, for which --help need not wait

    if process_group.pick_device(local_rank=0)[0].type == "cuda":
        return
    print("compiling DeepSpeed's CPU helper (once, up to a minute)", flush=True)
    deepspeed_env.build_cpu_helper()


if __name__ == "__main__":
    sys.exit(main())
