"""Saving and resuming a run: exact, at any world size and ZeRO stage, and safe against kills.

A save has two halves. The snapshot stops training: each rank copies its own share of masters and optimizer
state into host memory. The rest runs beside training in one thread per rank: write the share as named
fragments, agree that every rank has done so, then rank 0 writes the manifest, gives the directory its final
name, replaces `latest`, and only then removes old checkpoints. One save is in flight at a time.

A load reads ranges: whatever share a rank has under its own world size and stage, it finds the fragments that
overlap it. Resuming at the same size, at another size, and exporting are the same code. Format:
`wm_ds/checkpoint_format.py`; directories: `wm_ds/checkpoint_directory.py`; what is where inside DeepSpeed:
`wm_ds/fragments.py`.
"""

import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from . import random_state
from .agreement import Agreement, RankError
from .attempt import Attempt, SupersededError
from .checkpoint_directory import (
    checkpoints_dir,
    clean_up,
    describe,
    find_latest,
    next_sequence,
    partial_path,
    previous_complete,
    prune,
    publish,
)
from .checkpoint_format import (
    CLIENT,
    CheckpointError,
    Entry,
    Manifest,
    Reader,
    State,
    checksum_problem,
    load_weights,
    read_json,
    read_manifest,
    read_tensor,
    verify,
    write_fragments,
    write_json,
)
from .engine_state import WEIGHT, EngineState

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Saved",
    "find_latest",
    "load",
    "load_weights",
    "read_tensor",
    "save",
    "verify",
]


@dataclass
class Saved:
    """What one save cost. `stall_s` is what training waited: for the save before, and for the snapshot."""

    step: int
    waited_s: float
    snapshot_s: float
    bytes: int  # this rank's share, and what its snapshot takes of host memory when written in the background
    background: bool
    write_s: float = 0.0  # set when the write has ended, as is `path`
    path: Path | None = None

    @property
    def stall_s(self) -> float:
        return self.waited_s + self.snapshot_s + (0.0 if self.background else self.write_s)


class Checkpoints:
    """The checkpoints of a running engine. Build it and call every method on all ranks alike.

    Args:
        engine: the DeepSpeed engine, at an optimizer step's boundary whenever a method is called.
        run_dir: checkpoints go to RUN_DIR/checkpoints, on a file system that all ranks share.
        keep_last: how many of the newest checkpoints stay, at least 1.
        keep_every: checkpoints at multiples of this many steps stay as well; 0 for none.
        background: write beside training from a copy in host memory; otherwise write at once, without copy.
        timeout_s: how long ranks wait for one another before a save or load counts as failed.
        attempt: this launch of the run, where several may follow each other (see attempt.py): once a newer
            one has begun, this one publishes nothing any more.
        say: where messages for a person go (rank 0 only).

    Raises ValueError for an engine whose state cannot be saved (see `EngineState`).
    """

    def __init__(
        self,
        engine: Any,
        run_dir: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        background: bool = True,
        timeout_s: float = 600.0,
        attempt: Attempt | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, must be 1 or more")
        self.run_dir = Path(run_dir)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.background, self.timeout_s = background, timeout_s
        self._agreement = Agreement(timeout_s)  # for the training thread
        self._writing = Agreement(timeout_s)  # for the writer thread
        self.rank, self.world = self._agreement.rank, self._agreement.world
        self._say = say if self.rank == 0 else _silent
        self._state = EngineState(engine, rank=self.rank, world=self.world)
        self._engine = engine
        self._attempt = attempt
        self._clean = False  # whether leftovers of earlier attempts have been removed
        self._host: dict[str, torch.Tensor] = {}  # the snapshot's memory, kept from save to save
        self._thread: threading.Thread | None = None
        self._moved: float | None = None  # when the writer thread last got something onto the disk
        self._error: BaseException | None = None
        self._on_disk_step: int | None = (
            None  # the step that is already saved, by us or by what we resumed from
        )

    # -- saving ------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether a background save has failed on this rank. Agree on it before acting (`Stopping.check`)."""
        return self._error is not None

    def save(self, step: int, client_state: dict[str, Any], *, wait: bool = False) -> Saved | None:
        """Save the state after `step` optimizer steps; returns once the state is copied.

        `client_state` is the trainer's own state in JSON types, equal on all ranks. With `wait`, as at the
        end of a run, it is written at once, without copy. A step that is on disk already is not saved again:
        None. Raises CheckpointError on all ranks when this save or the one before it failed.
        """
        started = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - started
        if step == self._on_disk_step:
            return None
        self._clean_up_once()
        background = self.background and not wait and self._fits_in_memory()
        token = "x" if self._attempt is None else f"{self._attempt.number:04d}"
        partial = partial_path(self.run_dir, step, token)
        job = _Job(step, client_state, random_state.capture(), self._state.update_counts(), partial)
        try:
            self._collect(job, background)
        except (RuntimeError, MemoryError) as error:
            job.error = error  # told to all ranks by the writer
        saved = Saved(step, waited, time.perf_counter() - started - waited, job.bytes, background)
        # Also a blocking save writes in a thread: a write that never returns must not hold this one.
        self._thread = threading.Thread(target=self._write, args=(job, saved), name="checkpoint", daemon=True)
        self._thread.start()
        if not background:
            self.wait()
        return saved

    def wait(self) -> None:
        """Wait for the save in flight. Raises CheckpointError on all ranks when it failed."""
        if self._thread is not None:
            # A rank whose file system hangs does not know that the others have given up on it.
            given_up = self._agreement.maximum(int(self.failed)) and not self.failed
            while self._thread.is_alive() and not (given_up and self._stuck_for() > 1.0):
                self._thread.join(0.1)
                if self._stuck_for() > self.timeout_s:
                    break
            if self._thread.is_alive() and self._error is None:
                self._error = CheckpointError(
                    f"rank {self.rank} cannot write: its file system does not answer"
                )
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(str(error)) from error

    def _stuck_for(self) -> float:
        """Seconds since this rank's files last grew, 0 while it is not writing."""
        moved = self._moved
        return 0.0 if moved is None else time.monotonic() - moved

    def _move(self) -> None:
        self._moved = time.monotonic()

    def _clean_up_once(self) -> None:
        if self._clean:
            return
        error = None
        try:
            if self.rank == 0:
                clean_up(self.run_dir)
        except OSError as raised:
            error = raised
        self._settle(f"cannot write checkpoints to {checkpoints_dir(self.run_dir)}", error)
        self._clean = True

    def _fence(self) -> None:
        if self._attempt is not None:
            self._attempt.check()

    def _fits_in_memory(self) -> bool:
        """Whether the snapshots of each host's ranks fit into its free memory; all ranks decide alike."""
        needed = 0
        for share in self._state.shares():
            key = f"{share.name}:{share.kind}:{share.owned[0]}"
            if key not in self._host:
                needed += (share.owned[1] - share.owned[0]) * share.view.element_size()
        hosts = self._agreement.gather((socket.gethostname(), needed, psutil.virtual_memory().available))
        for name in {host for host, _, _ in hosts}:
            need = sum(n for host, n, _ in hosts if host == name)
            free = min(f for host, _, f in hosts if host == name)
            if need > free:
                self._say(
                    f"checkpoint: host {name} has {free / 2**30:.1f} GiB of memory free, snapshots need "
                    f"{need / 2**30:.1f} GiB: this save is written while training waits"
                )
                return False
        if needed:
            self._say(
                f"checkpoint: a rank's snapshot keeps {needed / 2**20:.1f} MiB of host memory from now on"
            )
        return True

    def _collect(self, job: "_Job", background: bool) -> None:
        """List what this rank saves; in background mode copy it to host memory."""
        on_device = False
        for share in self._state.shares():
            view = share.owned_view()
            if not view.numel():
                continue
            key = f"{share.name}:{share.kind}:{share.owned[0]}"
            if background:
                host = self._host.get(key)
                if host is None or host.numel() != view.numel() or host.dtype != view.dtype:
                    pinned = view.device.type != "cpu"
                    host = torch.empty(view.numel(), dtype=view.dtype, pin_memory=pinned)
                    self._host[key] = host
                host.copy_(view, non_blocking=True)
                on_device = on_device or view.device.type != "cpu"
                job.tensors.append(host)
            else:
                job.tensors.append(view)
            job.specs.append((key, view.dtype, view.numel()))
            dtype = str(view.dtype).removeprefix("torch.")
            job.index.append((share.name, share.kind, dtype, *share.owned))
            job.bytes += view.numel() * view.element_size()
        if on_device:
            torch.accelerator.synchronize()

    def _write(self, job: "_Job", saved: Saved) -> None:
        """Write this rank's files, agree, publish. Never raises: the verdict is left in `_error`."""
        started = time.perf_counter()
        try:
            self._move()
            files = self._write_files(job)
            self._moved = None
            answers = self._writing.gather((files, job.index, job.counts, _text(job.error)))
            outcome: tuple[str, str | None] = ("", None)
            if self.rank == 0:
                self._move()
                outcome = self._publish(job, answers)
                self._moved = None
            path, problem = self._writing.broadcast(outcome)
            if problem is not None:
                raise CheckpointError(problem)
            saved.path, saved.write_s = Path(path), time.perf_counter() - started
            self._on_disk_step = job.step
            self._say(
                f"checkpoint: step {job.step} written in {saved.write_s:.1f} s, "
                f"training waited {saved.stall_s:.2f} s"
            )
        except CheckpointError as error:
            self._error = error
        except BaseException as error:
            # Whatever it is, it must reach the training thread, which all ranks leave at the same step.
            self._error = CheckpointError(
                f"save of step {job.step} failed: rank {self.rank} could not agree with the others within "
                f"{self.timeout_s:g} s ({error})"
            )

    def _write_files(self, job: "_Job") -> dict[str, Any]:
        files: dict[str, Any] = {}
        if job.error is not None:
            return files
        try:
            job.partial.mkdir(parents=True, exist_ok=True)
            name = f"rank_{self.rank:05d}"
            files[f"{name}.safetensors"] = write_fragments(
                job.partial / f"{name}.safetensors", job.specs, job.tensors, self._move
            )
            files[f"{name}.json"] = write_json(job.partial / f"{name}.json", {"random": job.random})
            if self.rank == 0:
                files[CLIENT] = write_json(job.partial / CLIENT, job.client_state)
        except (OSError, TypeError, ValueError) as error:
            job.error = error
        return files

    def _publish(self, job: "_Job", answers: list) -> tuple[str, str | None]:
        """Rank 0: manifest, final name, `latest`, pruning. Returns (path, problem)."""
        errors = [f"rank {rank}: {text}" for rank, (_, _, _, text) in enumerate(answers) if text is not None]
        if errors:
            shutil.rmtree(job.partial, ignore_errors=True)
            return "", f"save of step {job.step} failed: {'; '.join(errors)}; nothing of it was published"
        try:
            manifest = self._manifest(job, answers)
            path = publish(self.run_dir, job.partial, job.step, manifest, self._fence)
        except (OSError, CheckpointError, SupersededError) as error:
            shutil.rmtree(job.partial, ignore_errors=True)
            return "", f"save of step {job.step} failed: {error}"
        try:
            prune(self.run_dir, keep_last=self.keep_last, keep_every=self.keep_every)
        except OSError as error:  # an old checkpoint too many is no reason to end a run
            self._say(f"checkpoint: could not remove old checkpoints ({error})")
        return str(path), None

    def _manifest(self, job: "_Job", answers: list) -> Manifest:
        shapes, roles = self._state.shapes(), self._state.roles()
        tensors = {name: Entry(shape, roles[name]) for name, shape in shapes.items()}
        files: dict[str, Any] = {}
        for rank, (records, index, counts, _) in enumerate(answers):
            files |= records
            for name, kind, dtype, start, stop in index:
                state = tensors[name].states.setdefault(kind, State(dtype))
                if state.dtype != dtype:
                    raise CheckpointError(
                        f"{kind} of {name} is {state.dtype} on one rank and {dtype} on another"
                    )
                state.fragments.append((f"rank_{rank:05d}.safetensors", start, stop))
            for name, count in counts.items():
                if tensors[name].updates not in (None, count):
                    raise CheckpointError(
                        f"ranks disagree on the updates of {name}: {tensors[name].updates}, {count}"
                    )
                tensors[name].updates = count
        engine = self._engine
        run = {
            "step": job.step,
            "sequence": next_sequence(self.run_dir),
            "attempt": None if self._attempt is None else self._attempt.number,
            "world_size": self.world,
            "zero_stage": int(engine.zero_optimization_stage()),
            "engine": {k: int(getattr(engine, k)) for k in _COUNTERS},
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        manifest = Manifest(run, tensors, self._state.tied(), files)
        manifest.check_coverage()
        return manifest

    # -- resuming ----------------------------------------------------------------------------------------

    def choose(self, resume: str | Path | None = None) -> Path | None:
        """The checkpoint to load, None for a fresh start; the same on all ranks.

        With `resume` (a checkpoint, or a run directory whose latest is meant) it is that or an error.
        Without, it is the newest complete one of this run directory. Changes nothing.
        """
        answer: tuple[str | None, str | None] = (None, None)
        if self.rank == 0:
            try:
                path = self._choose(resume)
                answer = (None if path is None else str(path), None)
            except CheckpointError as error:
                answer = (None, str(error))
            except OSError as error:
                answer = (None, f"{checkpoints_dir(self.run_dir)} cannot be read: {error}")
        path_text, problem = self._agreement.broadcast(answer)
        if problem is not None:
            raise CheckpointError(problem)
        return None if path_text is None else Path(path_text)

    def _choose(self, resume: str | Path | None) -> Path | None:
        if resume is None:
            found = find_latest(self.run_dir, self._say)
            self._say(
                f"no checkpoint in {checkpoints_dir(self.run_dir)}: starting at step 0"
                if found is None
                else f"resuming from {found}"
            )
            return found
        resume = Path(resume)
        if checkpoints_dir(resume).is_dir():
            found = find_latest(resume, self._say)
            if found is None:
                raise CheckpointError(f"cannot resume from {resume}: it holds no complete checkpoint")
            return found
        try:
            read_manifest(resume)
        except CheckpointError as error:
            near = resume.parent.parent if resume.parent.name == "checkpoints" else self.run_dir
            raise CheckpointError(f"cannot resume: {error}; {describe(near)}") from None
        return resume

    def load(self, path: str | Path) -> dict[str, Any]:
        """Put the engine into the state of the checkpoint at `path`; returns the client state.

        Before anything of the engine changes, names and shapes are compared and every file is checked
        against its sha256 (each rank checks its part of the files). Random number generators are restored:
        each rank's own; ranks that did not exist when it was saved get seeds derived from the saved ones.
        Raises CheckpointError on all ranks alike.
        """
        self.wait()
        path = Path(path)
        error: Exception | None = None
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(path)
            self._compare(path, manifest)
        except CheckpointError as raised:
            error = raised
        self._settle("cannot resume", error)
        assert manifest is not None
        names = sorted(manifest.files)[self.rank :: self.world]
        problems = [p for p in (checksum_problem(path, n, manifest.files[n]) for n in names) if p]
        error = CheckpointError(f"{'; '.join(problems)}; {previous_complete(path)}") if problems else None
        self._settle("cannot resume", error)
        self._state.before_load()
        client: dict[str, Any] = {}
        try:
            self._fill(path, manifest)
            client = read_json(path, manifest, CLIENT)
            self._restore_random(path, manifest)
        except (CheckpointError, RuntimeError, ValueError, KeyError) as raised:
            error = raised
        self._settle("cannot resume", error)
        self._state.after_load()
        for counter, value in manifest.run["engine"].items():
            setattr(self._engine, counter, value)
        if path.parent.resolve() == checkpoints_dir(self.run_dir).resolve():
            self._on_disk_step = int(manifest.run["step"])
        self._clean_up_once()
        return client

    def _compare(self, path: Path, manifest: Manifest) -> None:
        here, there = self._state.shapes(), {name: entry.shape for name, entry in manifest.tensors.items()}
        differences = [f"{n} is not in the checkpoint" for n in here if n not in there]
        differences += [f"{n} is not in the model" for n in there if n not in here]
        differences += [
            f"{n} is {list(there[n])} in the checkpoint and {list(here[n])} in the model"
            for n in here
            if n in there and here[n] != there[n]
        ]
        if not differences and self._state.tied() != manifest.tied:
            differences = [
                f"tied weights are {manifest.tied} in the checkpoint and {self._state.tied()} in the model"
            ]
        for share in self._state.shares():
            entry = manifest.tensors.get(share.name)
            if entry is not None and share.kind not in entry.states:
                known = ", ".join(k for k in entry.states if k != WEIGHT) or "none"
                differences.append(
                    f"the optimizer keeps {share.kind} of {share.name}, the checkpoint {known}"
                )
        if differences:
            more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise CheckpointError(f"{path} does not fit this model: {'; '.join(differences[:4])}{more}")

    @torch.no_grad()
    def _fill(self, path: Path, manifest: Manifest) -> None:
        self._state.set_update_counts(
            {n: entry.updates for n, entry in manifest.tensors.items() if entry.updates is not None}
        )
        with Reader(path, manifest) as reader:
            for share in self._state.shares():
                reader.read_into(share.view, share.name, share.kind, share.start)

    def _restore_random(self, path: Path, manifest: Manifest) -> None:
        saved_world = int(manifest.run["world_size"])
        state = read_json(path, manifest, f"rank_{self.rank % saved_world:05d}.json")["random"]
        if self.rank < saved_world:
            random_state.restore(state)
        else:
            random_state.restore_derived(state, self.rank)

    def _settle(self, doing: str, error: Exception | None) -> None:
        try:
            self._agreement.settle(doing, error)
        except RankError as failure:
            raise CheckpointError(str(failure)) from error


@dataclass
class _Job:
    """One save on its way to disk."""

    step: int
    client_state: dict[str, Any]
    random: dict[str, Any]
    counts: dict[str, int]
    partial: Path

    def __post_init__(self) -> None:
        self.specs: list[tuple[str, torch.dtype, int]] = []
        self.tensors: list[torch.Tensor] = []
        self.index: list[tuple[str, str, str, int, int]] = []
        self.bytes = 0
        self.error: BaseException | None = None


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def save(engine: Any, run_dir: str | Path, step: int, client_state: dict[str, Any], **options: Any) -> Path:
    """Save once and wait until it is published; for scripts. `options` as for `Checkpoints`."""
    saved = Checkpoints(engine, run_dir, background=False, **options).save(step, client_state)
    assert saved is not None
    assert saved.path is not None
    return saved.path


def load(engine: Any, path: str | Path, **options: Any) -> dict[str, Any]:
    """Load the checkpoint at `path` into the engine and return its client state; for scripts.

    Unlike `Checkpoints.load` it writes nothing, not even to remove what ended saves left behind.
    """
    loader = Checkpoints(engine, Path(path).parent.parent, **options)
    loader._clean = True
    return loader.load(path)


def _silent(_: str) -> None:
    pass


def _text(error: BaseException | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__
