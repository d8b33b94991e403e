"""What packing will do, decided before anything is done: settings, inputs, units, and the output folder.

The plan is a function of inputs and settings. Its units are numbered; unit i becomes shard i, whoever packs
it. The output folder keeps the plan (plan.json); a command with another plan is refused, and the message
says what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wm_ds.data import shards
from wm_ds.errors import WmError
from wm_ds.packing import hf_datasets, inputs
from wm_ds.packing.documents import PieceReader, Reading
from wm_ds.packing.hf_datasets import DATASET_PREFIX
from wm_ds.packing.inputs import Input, Piece
from wm_ds.packing.tokenizer import TokenizerSpec, copy_tokenizer

PLAN = "plan.json"
TOKENIZER = "tokenizer"  # a copy, so that the data can be decoded without its source
_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS = 1 << 20, 256 << 20, 64


class PackError(WmError, RuntimeError):
    """Packing cannot go on; the message says what, where and what to do."""


@dataclass(frozen=True)
class Settings:
    """What, besides the inputs and the tokenizer, decides the packed bytes and how they are cut.

    seq_len: positions of a training sequence. align: every document starts at a multiple of it.
    tail: "pad" fills the last sequence with masked filler, "drop" leaves an incomplete one out.
    holdout: sequences of the split `holdout`. holdout_by: "row", or "document": training sees no document
        that has a token in a held-out sequence. shuffle_seed: names the order whose end is held out.
    text_field, txt_split: see documents.Reading.
    shard_bytes: input bytes a shard is made of; None: by the size of the corpus.
    literal_tokens, encoder: see tokenizer.open_tokenizer and quicktok.py. The encoder gives the same ids
        wherever it was checked; it is a setting because nobody can check all texts.
    """

    seq_len: int
    align: int = 8
    tail: str = "pad"
    holdout: int = 0
    shuffle_seed: int = 0
    text_field: str = "text"
    txt_split: str = "file"
    shard_bytes: int | None = None
    literal_tokens: str = "special"
    encoder: str = "tokenizers"
    holdout_by: str = "row"

    def description(self) -> dict[str, Any]:
        """The settings as a plan keeps them. What was added later is left out where it is the default, so
        that folders begun before go on."""
        described = asdict(self)
        if self.holdout_by == "row":
            del described["holdout_by"]
        return described


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first document is read."""

    settings: Settings
    inputs: list[Input]
    units: list[list[Piece]]
    tokenizer: TokenizerSpec

    def bytes_of(self, units: list[int]) -> int:
        """Bytes of input in some units."""
        return sum(piece.size for number in units for piece in self.units[number])

    def description(self) -> dict[str, Any]:
        """Everything that the result depends on; its hash is the key of the output folder."""
        tokenizer = self.tokenizer
        return {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "settings": self.settings.description(),
            "tokenizer": {
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "eos_token": tokenizer.eos_token,
            },
            "inputs": [
                {
                    "name": item.name,
                    "bytes": item.size,
                    **({"dataset": item.identity} if item.identity else {}),
                }
                for item in self.inputs
            ],
            "units": len(self.units),
        }


def filler_id(eos_id: int) -> int:
    """The id between aligned documents: not EOS, so that EOS ids in a raw stream count its documents."""
    return 0 if eos_id != 0 else 1


def make_plan(files: list[Input], tokenizer: TokenizerSpec, settings: Settings) -> Plan:
    """Check the settings and cut the inputs into units. Raises PackError for settings that cannot work."""
    if settings.seq_len < 2:
        raise PackError(f"--seq-len {settings.seq_len} must be at least 2")
    if settings.align < 1 or settings.seq_len % settings.align:
        raise PackError(
            f"--seq-len {settings.seq_len} is not a multiple of --align {settings.align}: a document that "
            f"goes on in the next sequence could not keep its alignment; choose an align that divides it"
        )
    if settings.holdout_by == "document" and not settings.holdout:
        raise PackError("--holdout-by document needs --holdout N: nothing is held out")
    if settings.holdout < 0:
        raise PackError(f"--holdout {settings.holdout} is negative")
    if settings.shard_bytes is None:
        # From the size of the inputs, never from workers or tasks: enough units for many processes in a
        # small corpus, few enough files in a large one.
        total = sum(item.size for item in files)
        settings = replace(settings, shard_bytes=min(max(total // _UNITS, _SMALLEST_UNIT), _LARGEST_UNIT))
    elif settings.shard_bytes < 1:
        raise PackError(f"--shard-bytes {settings.shard_bytes} must be positive")
    assert settings.shard_bytes is not None
    return Plan(settings, files, inputs.cut(files, settings.shard_bytes, settings.txt_split), tokenizer)


# ------------------------------------------------------------------------------------------ the folder


def prepare(plan: Plan, root: Path) -> None:
    """Make the output folder this plan's, or check that it is. Raises PackError naming what differs."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / PLAN
    description = json.loads(json.dumps(plan.description()))
    if not path.exists():
        strangers = [
            entry.name
            for entry in root.iterdir()
            if not entry.name.startswith((".lock-", TOKENIZER, f".{TOKENIZER}.tmp-", f".{PLAN}.tmp-"))
        ]
        if strangers and not path.exists():  # another task of the array may have been faster
            raise PackError(
                f"{root} holds other files ({', '.join(sorted(strangers)[:3])}); choose an empty folder"
            )
        copy_tokenizer(plan.tokenizer, root / TOKENIZER)
        shards.write_json(path, {"tokenizer_name": plan.tokenizer.name, **description})
    found = read_plan(root)
    differences = list(_differences(found, description))
    if differences:
        raise PackError(
            f"{root} was begun with other inputs or settings: {'; '.join(differences[:5])}"
            f"{f' and {len(differences) - 5} more' if len(differences) > 5 else ''}. "
            f"Repeat the first command, or choose another folder"
        )


def read_plan(root: Path) -> dict[str, Any]:
    """The plan that a folder was begun with; raises ShardError if it is damaged."""
    keys = ("settings", "tokenizer", "tokenizer_name", "inputs", "units", "format", "version")
    return shards.read_json(root / PLAN, keys, "pack into another folder")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    later = {"holdout_by": "row"}  # settings that earlier plans do not have
    for part, defaults in (("settings", later), ("tokenizer", {})):
        before, after = ({**defaults, **side[part]} for side in (old, new))
        for name, value in after.items():
            if before.get(name) != value:
                yield f"{part} {name} was {before.get(name)!r}, is now {value!r}"
    for name in ("format", "version"):
        if old[name] != new[name]:
            yield f"{name} was {old[name]!r}, is now {new[name]!r}"
    yield from _input_differences(*({item["name"]: item for item in side["inputs"]} for side in (old, new)))


def _input_differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        if name not in after:
            yield f"input {name} is missing now"
        elif name not in before:
            yield f"input {name} is new"
        elif _identity(before[name]) != _identity(after[name]):
            yield f"dataset {name} changed: another revision, split, configuration or other files"
        elif before[name]["bytes"] != after[name]["bytes"]:
            yield f"input {name} changed: it had {before[name]['bytes']} bytes, now {after[name]['bytes']}"
    if before.keys() == after.keys() and list(before) != list(after):
        yield "the inputs are in another order"


def _identity(item: dict[str, Any]) -> dict[str, Any] | None:
    """Which dataset an input of a plan is. Plans of earlier versions also hold the files' times."""
    dataset = item.get("dataset")
    return dataset and {**dataset, "files": [file[:2] for file in dataset["files"]]}


def modification_stamp(item: Input) -> int | str | None:
    """Changes whenever a local input's files are written or touched; None for what has no such time."""
    if item.identity is None:
        return os.stat(item.name).st_mtime_ns
    repository = item.name.removeprefix(DATASET_PREFIX)
    times = hf_datasets.modified(repository, item.identity["config"], item.identity["split"])
    return None if times is None else hashlib.sha256(repr(times).encode()).hexdigest()


def check_sources(plan: Plan, root: Path, numbers: list[int]) -> None:
    """Compare published shards' inputs with today's files: by time, and by content where the time differs."""
    reading = Reading(plan.settings.text_field, plan.settings.txt_split)
    stamps = [modification_stamp(item) for item in plan.inputs] if numbers else []
    for number in numbers:
        path = root / shards.shard_name(number) / "source.json"
        remedy = f"remove the folder {path.parent}, then run the same pack_data command again"
        for entry in shards.read_json(path, ("pieces",), remedy)["pieces"]:
            item = plan.inputs[entry["input"]]
            if entry["mtime_ns"] == stamps[entry["input"]]:
                continue
            piece = Piece(entry["input"], entry["start"], entry["stop"], entry["size"])
            reader = PieceReader(item, piece, reading, lambda _: None)
            for _ in reader:
                pass
            if reader.digest() != entry["sha256"]:
                raise PackError(
                    f"{'dataset' if item.identity else 'input'} {item.name} changed after "
                    f"{shards.shard_name(number)} was packed from it; restore it, or pack into another folder"
                )
