"""Goldens of what is written: packed shards, a checkpoint, an export, and an old run resumed and exported.

An export's code is left out: it is the model's own and may change while its numbers do not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import yaml

from . import record, subject
from .record import Entries

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "old_run"
WHEN = ("saved_at",)
CODE = (".py", "README.md", "export.json")


def probe(folder: Path, everything: bool) -> Entries:
    """All of them, in an empty folder, which becomes the working directory; a fresh run if all is wanted."""
    os.chdir(folder)
    entries = _packed(Path())  # relative: a manifest names its tokenizer as it was given
    if everything:
        run = _trained(folder)
        entries |= _checkpoint("run", run, 2) | _export("run", run, 2)
    old = folder / "old"
    shutil.copytree(OLD_RUN, old)
    os.chdir(old)
    entries |= _export("old_run", old / "run", 2)
    assert subject.train(["run.yaml"]) == 0, "the old run did not resume"
    metrics = [json.loads(line) for line in (old / "run/metrics.jsonl").read_text().splitlines()]
    last = [row for row in metrics if row["step"] == 3]
    entries["old_run/metrics"] = record.of_floats(
        [row[key] for row in last for key in ("loss", "grad_norm", "holdout_loss") if key in row]
    )
    return entries | _checkpoint("old_run", old / "run", 3)


def _packed(folder: Path) -> Entries:
    source, tokenizer = subject.make_corpus(folder, 40)
    entries: Entries = {}
    for name, options in (("pad", []), ("mixed", ["--align", 1, "--shuffle-seed", 5])):
        out = folder / f"packed_{name}"
        subject.pack(out, source, tokenizer, "--seq-len", 24, "--holdout", 4, *options)
        for path in sorted(
            p for p in out.rglob("*") if p.name in ("tokens.bin", "ends.bin", "manifest.json")
        ):
            entries[f"packed/{name}/{path.relative_to(out)}"] = record.of_bytes(path.read_bytes())
    return entries


def _trained(folder: Path) -> Path:
    run = yaml.safe_load((OLD_RUN / "run.yaml").read_text())
    run["run"] |= {"dir": "run", "seed": 5}
    run["data"] = {"train": "packed_pad", "tokenizer": "tokenizer"}
    run["optim"] |= {"clip_rule": "local"}
    run["steps"] = 2
    shutil.copy(OLD_RUN / "ds.json", folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    # A process of its own: one process trains once.
    done = subprocess.run(subject.TRAIN, capture_output=True, text=True)
    assert done.returncode == 0, f"the run failed:\n{done.stdout}\n{done.stderr}"
    return folder / "run"


def _checkpoint(name: str, run: Path, step: int) -> Entries:
    folder = run / "checkpoints" / f"step_{step:08d}"
    entries: Entries = {}
    for path in sorted(folder.glob("*.safetensors")):
        # safetensors' own reader: what is shown must not depend on ours.
        from safetensors.torch import load_file

        _, values = record.of_tensors(load_file(path).items())
        entries[f"{name}/checkpoint/{path.name}"] = (record.of_bytes(path.read_bytes())[0], values)
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    shape = {"tensors": manifest["tensors"], "tied": manifest["tied"], "format": manifest["format"]}
    shape["run"] = {key: value for key, value in manifest["run"].items() if key not in WHEN}
    entries[f"{name}/checkpoint/manifest"] = record.of_bytes(json.dumps(shape, sort_keys=True).encode())
    client = json.loads((folder / "client.json").read_text())
    entries[f"{name}/checkpoint/client.json"] = record.of_floats(
        [float(v) for v in client["engine"].values()]
    )
    return entries


def _export(name: str, run: Path, step: int) -> Entries:
    out = subject.export(run, run.parent / f"export_of_{name}", step)
    entries: Entries = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and not path.name.endswith(CODE):
            key = f"{name}/export/{path.relative_to(out)}"
            entries[key] = record.of_bytes(path.read_bytes())
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                entries[key] = (entries[key][0], record.of_tensors(load_file(path).items())[1])
    return entries
