"""Stands in for measuring: every part at once, with numbers that are made up."""

import json
import sys
from pathlib import Path


def main(folder: str, output: str, settings: str) -> None:
    found = {
        "settings": json.loads(settings),
        "step": json.loads((Path(folder) / "done").read_text())["step"],
        "model": {"cache_bytes_per_token": 64.0, "parameters_without_embeddings": 10},
        "perplexity": {"perplexity": 20.0},
        "passes": {"as_trained": 21.0, "groups": None, "perplexities": [25.0, 20.5]},
        "starts": {"curves": []},
        "exact": {"perplexity": 21.5, "seconds_per_row": 0.5},
        "converge": {"exact": None, "groups": []},
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
