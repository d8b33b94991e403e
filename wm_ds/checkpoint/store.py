"""Checkpoints at an fsspec address (`s3://bucket/run`, `gs://…`, `file:///…`): sent, listed, fetched, pruned.

  ADDRESS/run.json                      whose checkpoints these are
  ADDRESS/step_00000100/…               the files of the checkpoint, as in the run's own folder
  ADDRESS/step_00000100/run/…           the run's config.yaml and history.json of then
  ADDRESS/step_00000100/manifest.json   written last, after every other file has been read back

An object store has no rename, so the manifest is the mark: a folder without one, or with a damaged one, is no
checkpoint, whatever else lies in it. Removal takes the manifest first. Every file is read back after it was
written and compared with the manifest's sha256. At most a few pieces of a file are in memory at a time.

Credentials, endpoints and time limits are the libraries' own (for s3: AWS_ACCESS_KEY_ID, AWS_PROFILE,
AWS_ENDPOINT_URL and so on).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.checkpoint.directory import LATEST, checkpoints_dir, is_step, step_name
from wm_ds.checkpoint.format import MANIFEST, CheckpointError, Manifest, checksum_problem, read_manifest
from wm_ds.errors import WmError, one_line
from wm_ds.files import sync_directory, write_atomically

PIECE = 8 * 2**20  # bytes that are read or written at once
MOST_PIECES = 9000  # of one object: S3 takes 10,000
OWNER = "run.json"
OF_THE_RUN = ("config.yaml", "history.json")  # sent along, for a folder that has nothing
# Of the packages that fsspec asks for; others name themselves.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class StoreError(WmError):
    """The address cannot be read or written; the text names it and says why in one line."""


class StoreRefused(StoreError):
    """The run's description is wrong: the address is of no known kind, or another run's."""


class Stopped(WmError):
    """A transfer was given up because the run ends."""


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint at the address; `sequence` counts the run's saves."""

    name: str
    step: int
    sequence: int
    manifest: bytes


class Store:
    """One address. Raises StoreRefused where its kind is not known or not installed; connects to nothing yet.

    Args:
        address: where the checkpoints lie, in fsspec's notation.
        mib_per_s: most MiB sent or read back a second; None for no limit.
        proceed: asked between pieces; a transfer ends with Stopped where it says no.
    """

    def __init__(
        self, address: str, *, mib_per_s: float | None = None, proceed: Callable[[], bool] = lambda: True
    ) -> None:
        self.address = address.rstrip("/")
        self._mib_per_s, self._proceed = mib_per_s, proceed
        with self._named("opened"):
            import fsspec  # takes a while to import, and most runs have no mirror

            try:
                self.fs, root = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
            except ValueError as error:
                raise StoreRefused(f"{address}: {one_line(str(error))}") from None
            except ImportError as error:
                scheme = self.address.partition("://")[0]
                package = _PACKAGES.get(scheme)
                remedy = f"pip install {package}" if package else one_line(str(error))
                raise StoreRefused(
                    f"{address}: addresses of {scheme}: need a package that is not installed: {remedy}"
                ) from None
        self.root = root.rstrip("/")

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Whatever a store's library raises, as one line with the address."""
        try:
            yield
        except (WmError, KeyboardInterrupt):
            raise
        except Exception as error:
            text = one_line(str(error)) or type(error).__name__
            raise StoreError(f"{self.address} cannot be {doing}: {text}") from error

    # -- looking -----------------------------------------------------------------------------------------

    def listed(self) -> list[Stored]:
        """The complete checkpoints, newest save first; nothing where the address is empty."""
        with self._named("read"):
            found = [self._stored(name) for name in self._folders()]
        return sorted((s for s in found if s), key=lambda s: (s.sequence, s.step), reverse=True)

    def _folders(self) -> list[str]:
        """The names of checkpoints' folders, complete or not."""
        self.fs.invalidate_cache()
        try:
            names = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        last = [name.rstrip("/").rpartition("/")[2] for name in names]
        return [name for name in last if is_step(name)]

    def _stored(self, name: str) -> Stored | None:
        try:
            text = self.fs.cat_file(f"{self.root}/{name}/{MANIFEST}")
            manifest = Manifest.from_json(text.decode())
        except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None  # never completed, being removed, or damaged: no checkpoint
        return Stored(name, int(manifest.run["step"]), int(manifest.run["sequence"]), text)

    def owner(self) -> str | None:
        """The id of the run whose checkpoints lie here; None for an address that nobody uses yet."""
        with self._named("read"):
            self.fs.invalidate_cache()
            try:
                return str(json.loads(self.fs.cat_file(f"{self.root}/{OWNER}"))["id"])
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError):
                raise StoreError(
                    f"{self.address}/{OWNER} is damaged: it says whose checkpoints lie there"
                ) from None

    def claim(self, owner: str) -> None:
        """Write down whose checkpoints these are."""
        with self._named("written"):
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(f"{self.root}/{OWNER}", json.dumps({"id": owner}).encode() + b"\n")

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, path: Path, run_dir: Path) -> int:
        """Bring the checkpoint at `path` there, and the run's own files as they are; returns the bytes sent.

        Each file is read back. Raises StoreError where the address does not take it or gives other bytes
        back, CheckpointError where the checkpoint here is not whole, and Stopped.
        """
        text = (path / MANIFEST).read_bytes()
        manifest, target = read_manifest(path), f"{self.root}/{path.name}"
        stored = self._stored_or_none(path.name)
        if stored is not None and stored.manifest == text:
            return 0
        sent = 0
        with self._named("written"):
            if stored is not None:  # another checkpoint of this step, from before the run went back
                self._remove(path.name)
            self.fs.makedirs(target, exist_ok=True)
            for name, record in manifest.files.items():
                self._send_file(path / name, f"{target}/{name}", record)
                sent += record["size"]
            for name in OF_THE_RUN:
                if (run_dir / name).is_file():
                    self._send_bytes((run_dir / name).read_bytes(), f"{target}/run/{name}")
            self._send_bytes(text, f"{target}/{MANIFEST}")
        return sent

    def _stored_or_none(self, name: str) -> Stored | None:
        with self._named("read"):
            self.fs.invalidate_cache()
            return self._stored(name)

    def _send_bytes(self, data: bytes, target: str) -> None:
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(target, data)
        if self.fs.cat_file(target) != data:
            raise StoreError(f"{self.address}: {target} was sent and reads back otherwise")

    def _send_file(self, source: Path, target: str, record: dict[str, Any]) -> None:
        block, here = max(PIECE, record["size"] // MOST_PIECES), hashlib.sha256()
        with open(source, "rb") as file, self.fs.open(target, "wb", block_size=block) as out:
            for piece in self._pieces(file):
                here.update(piece)
                out.write(piece)
        if here.hexdigest() != record["sha256"]:
            raise CheckpointError(f"{source}: is damaged (its sha256 differs from the manifest's)")
        there = hashlib.sha256()
        with self.fs.open(target, "rb", block_size=PIECE) as back:
            for piece in self._pieces(back):
                there.update(piece)
        if there.hexdigest() != record["sha256"]:
            raise StoreError(f"{self.address}: {target} was sent and reads back with another sha256")

    def _pieces(self, file: Any) -> Iterator[bytes]:
        """A file piece by piece, no faster than allowed."""
        began, moved = time.monotonic(), 0
        while piece := file.read(PIECE):
            if not self._proceed():
                raise Stopped("the run ends")
            moved += len(piece)
            yield piece
            if self._mib_per_s is not None:
                ahead = moved / (self._mib_per_s * 2**20) - (time.monotonic() - began)
                while ahead > 0 and self._proceed():
                    time.sleep(min(ahead, 0.2))
                    ahead = moved / (self._mib_per_s * 2**20) - (time.monotonic() - began)

    # -- removing ----------------------------------------------------------------------------------------

    def prune(self, newest: str, *, keep_last: int, keep_every: int = 0) -> list[str]:
        """Remove complete checkpoints but the `keep_last` newest and those at multiples of `keep_every`
        steps, and what never became one. Call it after `newest` was sent: what else counts as newer is of a
        branch that the run has given up since, and goes too. Returns the names of the removed."""
        complete = self.listed()
        last = next(s.sequence for s in complete if s.name == newest)
        complete = [s for s in complete if s.name == newest or s.sequence < last]
        kept = {s.name for i, s in enumerate(complete) if i < keep_last or _is_multiple(s.step, keep_every)}
        removed = []
        with self._named("written"):
            for name in self._folders():
                if name not in kept:
                    self._remove(name)
                    removed.append(name)
        return removed

    def _remove(self, name: str) -> None:
        folder = f"{self.root}/{name}"
        if self.fs.exists(f"{folder}/{MANIFEST}"):
            self.fs.rm_file(f"{folder}/{MANIFEST}")
        self.fs.rm(folder, recursive=True)

    # -- fetching ----------------------------------------------------------------------------------------

    def fetch(self, stored: Stored, run_dir: Path) -> Path:
        """Bring a checkpoint into RUN_DIR/checkpoints, and the run's own files where there are none.

        It gets its name once every file has the manifest's sha256. Raises StoreError.
        """
        manifest = Manifest.from_json(stored.manifest.decode())
        folder, source = checkpoints_dir(run_dir), f"{self.root}/{stored.name}"
        partial = folder / f"{step_name(stored.step)}.partial-fetched"
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in OF_THE_RUN:  # first: a folder that holds them is a run's, also after a kill
            data = self._read(f"{source}/run/{name}")
            if data is not None and not (run_dir / name).exists():
                write_atomically(run_dir / name, data)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, record in manifest.files.items():
            # Apart, so that a full disk here is not said of the address.
            with self._named("read"):
                back = self.fs.open(f"{source}/{name}", "rb", block_size=PIECE)
            with back, open(partial / name, "wb") as file:
                while True:
                    with self._named("read"):
                        piece = back.read(PIECE)
                    if not piece:
                        break
                    file.write(piece)
            if problem := checksum_problem(partial, name, record):
                shutil.rmtree(partial, ignore_errors=True)
                raise StoreError(f"{self.address}/{stored.name} is damaged: {problem}")
        write_atomically(partial / MANIFEST, stored.manifest)
        final = partial.rename(folder / step_name(stored.step))
        sync_directory(folder)
        write_atomically(folder / LATEST, f"{final.name}\n")
        return final

    def _read(self, name: str) -> bytes | None:
        with self._named("read"):
            try:
                return self.fs.cat_file(name)
            except FileNotFoundError:
                return None


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
