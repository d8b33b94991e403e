"""Stands in for the trainer: no model, but its marks on the disk, its signals and its exit codes."""

import json
import signal
import sys
import time
from pathlib import Path

import yaml


def main(path: str) -> int:
    config = yaml.safe_load(Path(path).read_text())
    folder = Path(config["run"]["dir"])
    folder.mkdir(parents=True, exist_ok=True)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    metrics = folder / "metrics.jsonl"
    first = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    (folder / "started").touch()
    for step in range(first + 1, config["steps"] + 1):
        while (folder.parent / "hold").exists() and not asked:
            time.sleep(0.01)
        if asked:
            (folder / "stopped").write_text(json.dumps({"step": step - 1}))
            print(f"stopped after step {step - 1}")
            return 0
        if (folder.parent / "fail").exists() and config["model"]["family"] == "vanilla":
            print("some talk\nerror: told to fail\nmore talk", file=sys.stderr)
            return 3
        with open(metrics, "a") as file:
            file.write(
                json.dumps({"step": step, "loss": 5.0 / step, "step_s": 0.1, "tokens": 96 * step}) + "\n"
            )
    (folder / "done").write_text(json.dumps({"step": config["steps"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
