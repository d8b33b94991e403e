"""Stands in for tools/upcycle.py: the mark of a step 0 that came from a trained run."""

import json
import sys
from pathlib import Path

import yaml


def main(origin: str, config: str, *more: str) -> int:
    folder = Path(yaml.safe_load(Path(config).read_text())["run"]["dir"])
    assert (Path(origin) / "done").is_file(), "started before the run that it starts from was trained"
    begun = folder / "checkpoints" / "step_00000000"
    begun.mkdir(parents=True)
    (begun / "manifest.json").write_text(json.dumps({"from": origin, "more": more}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
