"""One checkpoint on disk: fragment files, their manifest, and reading tensors back by name and range.

  step_00000100/
    manifest.json             written last; names, shapes, fragments, sizes and sha256 of all other files
    client.json               the trainer's own state (step, data cursor, configuration fingerprint, ...)
    rank_00000.safetensors    rank 0's fragments; every key is NAME:KIND:START, every tensor one-dimensional
    rank_00000.json           rank 0's random number generators and own state
    rank_00001.safetensors ...

Fragments are safetensors and everything else is JSON, so that reading a checkpoint cannot run code. Needs
neither DeepSpeed nor a process group: the exporter and the tools read checkpoints with this file alone.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wm_ds.errors import WmError
from wm_ds.files import naming, write_synced

MANIFEST = "manifest.json"
CLIENT = "client.json"
FORMAT, VERSION = "wm_ds-checkpoint", 1
WEIGHT = "weight"
_CHUNK = 16 * 2**20
_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(WmError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or of another model; the text names it and the way out."""


@dataclass
class State:
    """One kind of state of a tensor: its dtype and where its elements lie, as (file, start, stop)."""

    dtype: str
    fragments: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass
class Entry:
    """All that a checkpoint holds of one named tensor."""

    shape: tuple[int, ...]
    role: str  # "trainable", "frozen" or "buffer"
    updates: int | None = None  # how often the optimizer has updated it
    states: dict[str, State] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return int(torch.Size(self.shape).numel())


@dataclass
class Manifest:
    """What a checkpoint consists of. `run`: step, sequence, attempt, world_size, zero_stage, ..."""

    run: dict[str, Any]
    tensors: dict[str, Entry]
    tied: dict[str, str]
    files: dict[str, dict[str, Any]]  # name -> {"size": bytes, "sha256": hex}

    @property
    def size(self) -> int:
        """Bytes of all files together, the manifest apart."""
        return sum(record["size"] for record in self.files.values())

    def to_json(self) -> str:
        """As it is written."""
        names = list(self.files)
        index = {name: i for i, name in enumerate(names)}
        tensors = {
            name: {
                "shape": list(entry.shape),
                "role": entry.role,
                "updates": entry.updates,
                "states": {
                    kind: {"dtype": s.dtype, "fragments": [[index[f], a, b] for f, a, b in s.fragments]}
                    for kind, s in entry.states.items()
                },
            }
            for name, entry in self.tensors.items()
        }
        body = {"format": FORMAT, "version": VERSION, "run": self.run, "tied": self.tied, "tensors": tensors}
        body["files"] = [{"name": name, **self.files[name]} for name in names]
        return json.dumps({"sha256": _sha256_of(body), "manifest": body})

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Raises ValueError on anything that is not a whole, unaltered manifest of this format."""
        outer = json.loads(text)
        body = outer["manifest"] if isinstance(outer, dict) and "manifest" in outer else None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError("is not a checkpoint manifest")
        if body.get("version") != VERSION:
            raise ValueError(f"has format version {body.get('version')}, this program reads {VERSION}")
        if outer.get("sha256") != _sha256_of(body):
            raise ValueError("does not match its own checksum")
        names = [record["name"] for record in body["files"]]
        if any(Path(name).name != name or name in (".", "..") for name in names):
            raise ValueError("names a file outside of its directory")
        tensors = {
            name: Entry(
                tuple(entry["shape"]),
                entry["role"],
                entry["updates"],
                {
                    kind: State(s["dtype"], [(names[f], a, b) for f, a, b in s["fragments"]])
                    for kind, s in entry["states"].items()
                },
            )
            for name, entry in body["tensors"].items()
        }
        files = {r["name"]: {"size": r["size"], "sha256": r["sha256"]} for r in body["files"]}
        return Manifest(body["run"], tensors, body["tied"], files)

    def check_coverage(self) -> None:
        """Raise CheckpointError unless the fragments of every state cover its tensor exactly once."""
        for name, entry in self.tensors.items():
            if WEIGHT not in entry.states and entry.numel:
                raise CheckpointError(
                    f"no rank saved the weight of {name}; is it in no group of the optimizer?"
                )
            for kind, state in entry.states.items():
                state.fragments.sort(key=lambda fragment: fragment[1])
                at = 0
                for file, start, stop in state.fragments:
                    if start != at or stop <= start:
                        raise CheckpointError(
                            f"{kind} of {name}: {file} holds [{start}, {stop}), expected from {at}"
                        )
                    at = stop
                if at != entry.numel:
                    raise CheckpointError(f"{kind} of {name}: elements {at} to {entry.numel} are in no file")


def _sha256_of(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# -- writing ---------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write and fsync; returns the file's record for the manifest."""
    write_synced(path, data)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_json(path: Path, content: Any) -> dict[str, Any]:
    """`content` as JSON; TypeError names what cannot be stored without pickle."""
    return write_file(path, (json.dumps(content) + "\n").encode())


def write_fragments(
    path: Path,
    specs: list[tuple[str, torch.dtype, int]],
    tensors: Iterable[torch.Tensor],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Stream one-dimensional tensors (key, dtype, numel) into a safetensors file; returns its record.

    `progress` is called whenever the file has grown.

    Ours rather than `safetensors.save_file`, because that wants all tensors at once, copies each to bytes,
    and leaves the checksum to a second pass over the file. Reading back is left to the library.
    """
    header: dict[str, Any] = {}
    at = 0
    for key, dtype, numel in specs:
        size = numel * dtype.itemsize
        header[key] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": [numel], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with naming(path), open(path, "wb", buffering=0) as file:

        def put(data: Any) -> None:
            nonlocal size
            view = memoryview(data)
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                while len(part):  # a raw write may take less than it is given
                    written = file.write(part)
                    digest.update(part[:written])
                    size += written
                    progress()
                    part = part[written:]

        put(len(text).to_bytes(8, "little") + text)
        for (key, dtype, numel), tensor in zip(specs, tensors, strict=True):
            if tensor.dtype != dtype or tensor.numel() != numel:
                raise ValueError(
                    f"{key}: {tensor.numel()} x {tensor.dtype} where {numel} x {dtype} was announced"
                )
            put(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


# -- reading ---------------------------------------------------------------------------------------------


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint at `path`; CheckpointError when there is none or it is damaged."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: no such directory")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"no checkpoint at {path}: it holds no {MANIFEST} (not a checkpoint, or never completed)"
        )
    try:
        return Manifest.from_json((path / MANIFEST).read_text())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else "is damaged"
        raise CheckpointError(f"{path / MANIFEST}: {reason}") from None


def read_json(path: str | Path, manifest: Manifest, name: str) -> Any:
    """Content of a JSON file of the checkpoint."""
    if name not in manifest.files:
        raise CheckpointError(f"{path}: holds no {name}")
    try:
        return json.loads((Path(path) / name).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{Path(path) / name}: cannot be read ({error})") from None


def size_problem(path: str | Path, manifest: Manifest) -> str | None:
    """The first file that is missing or of another size than the manifest says; None if there is none."""
    for name, record in manifest.files.items():
        file = Path(path) / name
        try:
            size = file.stat().st_size
        except OSError:
            return f"{file}: is missing"
        if size != record["size"]:
            return f"{file}: has {size} bytes, the manifest says {record['size']}"
    return None


def checksum_problem(path: str | Path, name: str, record: dict[str, Any]) -> str | None:
    """What is wrong with one file of the checkpoint, None if its size and sha256 are right."""
    file, digest, size = Path(path) / name, hashlib.sha256(), 0
    try:
        with open(file, "rb", buffering=0) as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        return f"{file}: cannot be read ({error.strerror})"
    if size != record["size"]:
        return f"{file}: has {size} bytes, the manifest says {record['size']}"
    if digest.hexdigest() != record["sha256"]:
        return f"{file}: is damaged (its sha256 differs from the manifest's)"
    return None


def verify(path: str | Path) -> list[str]:
    """Check every file of the checkpoint against its manifest; returns what is wrong, one line per file."""
    return [problem for _, problem in verify_each(path) if problem is not None]


def verify_each(path: str | Path) -> Iterator[tuple[str, str | None]]:
    """(name, what is wrong with it or None) of one file of the checkpoint after another, as it is read."""
    try:
        manifest = read_manifest(path)
        manifest.check_coverage()
    except CheckpointError as error:
        yield MANIFEST, str(error)
        return
    for name, record in manifest.files.items():
        yield name, checksum_problem(path, name, record)


class Reader:
    """Reads ranges of named tensors; keeps a few fragment files mapped. Use as a context manager.

    Pages that were read count as this process's memory as long as their file is mapped. So reads are cut
    into pieces, and all files are unmapped once so many bytes were read.
    """

    _MOST_OPEN = 32
    _MOST_MAPPED = 32 * 2**20
    _PIECE = 2**22  # elements

    def __init__(self, path: str | Path, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._open: dict[str, Any] = {}
        self._mapped = 0
        self._starts: dict[tuple[str, str], list[int]] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def ranges(self, name: str, kind: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements [start, stop) of a flattened tensor, piece by piece: (position, 1-D tensor)."""
        state = self.manifest.tensors[name].states[kind]
        starts = self._starts.setdefault((name, kind), [a for _, a, _ in state.fragments])
        for file, a, b in state.fragments[max(0, bisect_right(starts, start) - 1) :]:
            low, high = max(a, start), min(b, stop)
            if a >= stop:
                return
            for at in range(low, high, self._PIECE):
                yield at, self._slice(file, f"{name}:{kind}:{a}", at - a, min(at + self._PIECE, high) - a)

    def read_into(self, out: torch.Tensor, name: str, kind: str, start: int) -> None:
        """Fill the 1-D tensor `out` with the elements from `start` on, casting to its dtype and device."""
        filled = 0
        for at, part in self.ranges(name, kind, start, start + out.numel()):
            out[at - start : at - start + part.numel()].copy_(part)
            filled += part.numel()
        if filled != out.numel():
            raise CheckpointError(f"{self.path}: {kind} of {name} lacks {out.numel() - filled} elements")

    def tensor(self, name: str, kind: str = WEIGHT, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor in its own shape, cast piece by piece if asked for; tied names are resolved."""
        name = self.manifest.tied.get(name, name)
        entry = self.manifest.tensors.get(name)
        if entry is None or kind not in entry.states:
            known = "no such tensor" if entry is None else f"it has {', '.join(entry.states)}"
            raise CheckpointError(f"{self.path}: holds no {kind} of {name} ({known})")
        out = torch.empty(entry.numel, dtype=dtype or getattr(torch, entry.states[kind].dtype))
        self.read_into(out, name, kind, 0)
        return out.view(entry.shape)

    def _slice(self, file: str, key: str, start: int, stop: int) -> torch.Tensor:
        try:
            if self._mapped > self._MOST_MAPPED:
                self._open.clear()
                self._mapped = 0
            if file not in self._open:
                if len(self._open) >= self._MOST_OPEN:
                    self._open.pop(next(iter(self._open)))
                self._open[file] = safe_open(self.path / file, framework="pt")
            part = self._open[file].get_slice(key)[start:stop]
            self._mapped += part.nbytes
            return part
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: cannot be read ({error})") from None


def read_tensor(path: str | Path, name: str, kind: str = WEIGHT) -> torch.Tensor:
    """One whole tensor on the CPU: `kind` is "weight" (the fp32 master) or an optimizer state's name."""
    with Reader(path) as reader:
        return reader.tensor(name, kind)


def load_weights(path: str | Path, *, tied: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights one after another (masters, frozen parameters, persistent buffers), each in memory alone.

    With `tied`, second names of shared tensors are yielded too, so that the pairs form a state dict that
    loads strictly into the model.
    """
    with Reader(path) as reader:
        for name in reader.manifest.tensors:
            yield name, reader.tensor(name)
        if tied:
            for name in reader.manifest.tied:
                yield name, reader.tensor(name)
