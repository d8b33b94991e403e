#!/usr/bin/env bash
# Everything that a CPU cannot show, on one GPU, in under ten minutes: writes one JSON.
#
#     benchmarks/gpu_smoke.sh [OUTPUT.json]          default gpu_smoke.json
#
# 1. equality on CUDA: model tests with the default device cuda; flex against SDPA; a compiled against a plain block
# 2. training step against Qwen3 with MFU, in bf16 autocast, at the paper's shape
# 3. peak memory of a step against the planner's figure
# 4. prefill and decode
# Not yet run on a GPU: it was written without one, and is the first thing to run where there is one.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${1:-gpu_smoke.json}")
PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "error: torch sees no CUDA device; this script needs one GPU" >&2; exit 2; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

echo "1/3 equality, memory, prefill and decode"
timeout 240 "$PYTHON" -m benchmarks.gpu_checks > "$WORK/checks.json" || echo "the checks failed, see the JSON" >&2
echo "2/3 training step against Qwen3, bf16 autocast"
timeout 240 "$PYTHON" benchmarks/training.py --precision autocast --device cuda --rows 8 --channels 8 16 \
  --vocabulary 151936 --repeats 5 --json "$WORK/training.json" || echo "the training benchmark failed" >&2
echo "3/3 DeepSpeed's engine on one GPU against a bare loop"
timeout 100 "$PYTHON" benchmarks/training.py --precision autocast --engine-rank --rows 8 --channels 8 --repeats 3 \
  > "$WORK/engine.json" || echo "the engine benchmark failed" >&2

"$PYTHON" - "$WORK" "$OUT" <<'PY'
import json, sys
from pathlib import Path

import torch

work, out = Path(sys.argv[1]), Path(sys.argv[2])
report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
failed = False
for name in ("checks", "training", "engine"):
    try:
        report[name] = json.loads((work / f"{name}.json").read_text().strip().splitlines()[-1] if name == "engine"
                                  else (work / f"{name}.json").read_text())
    except (OSError, ValueError, IndexError) as error:
        report[name], failed = {"error": str(error)}, True
failed = failed or any(not value for value in report["checks"].get("passed", {}).values())
out.write_text(json.dumps(report, indent=2))
print(f"{out}: {'FAILED' if failed else 'ok'}")
sys.exit(failed)
PY
