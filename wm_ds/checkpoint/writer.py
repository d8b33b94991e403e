"""Getting one rank's share of a save onto the disk, and with the others' shares into a published checkpoint.

A save has two halves. The snapshot stops training: the share is copied into host memory. The rest runs beside
training in one thread per rank: write the share, agree with all ranks that everybody has, then rank 0 writes
the manifest, publishes, and removes old checkpoints (see directory.py).
"""

import logging
import shutil
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from wm_ds.checkpoint import rng
from wm_ds.checkpoint.directory import next_sequence, partial_path, prune, publish
from wm_ds.checkpoint.engine_state import EngineState
from wm_ds.checkpoint.format import (
    CLIENT,
    CheckpointError,
    Entry,
    Manifest,
    State,
    write_fragments,
    write_json,
)
from wm_ds.checkpoint.mirror import Mirror
from wm_ds.distributed.host_group import Agreement
from wm_ds.run.claim import Attempt, SupersededError

log = logging.getLogger(__name__)
# Of DeepSpeed's engine, restored on resume.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


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
        """Seconds for which training stood still."""
        return self.waited_s + self.snapshot_s + (0.0 if self.background else self.write_s)


@dataclass
class _Job:
    """One save on its way to disk."""

    step: int
    client_state: dict[str, Any]
    random: dict[str, Any]
    counts: dict[str, int]
    partial: Path
    specs: list[tuple[str, torch.dtype, int]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    index: list[tuple[str, str, str, int, int]] = field(default_factory=list)
    bytes: int = 0
    error: BaseException | None = None


@dataclass(frozen=True)
class SavePolicy:
    """Which checkpoints stay, and how they are written. Raises ValueError where none would stay."""

    keep_last: int = 3
    """How many of the newest stay, at least 1."""
    keep_every: int = 0
    """Those at multiples of this many steps stay as well; 0 for none."""
    background: bool = True
    """Written beside training from a copy in host memory; otherwise at once, without copy."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}, must be 1 or more")


class Writer:
    """Saves of one engine, one in flight. `state` and `agreement` are the training thread's."""

    def __init__(
        self,
        state: EngineState,
        agreement: Agreement,
        run_dir: Path,
        *,
        policy: SavePolicy,
        attempt: Attempt | None,
        mirror: Mirror | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.policy = policy
        self.timeout_s = agreement.timeout_s
        self.rank, self.world = agreement.rank, agreement.world
        self.on_disk_step: int | None = None  # the step that is saved already, here or by who went before
        self._state, self._attempt, self._mirror = state, attempt, mirror
        self._agreement = agreement
        self._writing = Agreement(agreement.timeout_s)  # for the writer thread
        self._host: dict[str, torch.Tensor] = {}  # the snapshot's memory, kept from save to save
        self._thread: threading.Thread | None = None
        self._moved: float | None = None  # when the writer thread last got something onto the disk
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed on this rank."""
        return self._error is not None

    def start(self, step: int, client_state: dict[str, Any], *, waited_s: float, wait: bool) -> Saved:
        """Take the snapshot and start the write. With `wait` there is no snapshot: written on return."""
        started = time.perf_counter()
        background = self.policy.background and not wait and self._fits_in_memory()
        token = "x" if self._attempt is None else f"{self._attempt.number:04d}"
        partial = partial_path(self.run_dir, step, token)
        job = _Job(step, client_state, rng.capture(), self._state.update_counts(), partial)
        try:
            self._collect(job, background)
        except (RuntimeError, MemoryError) as error:
            job.error = error  # the writer's thread reports it to all ranks
        saved = Saved(step, waited_s, time.perf_counter() - started, job.bytes, background)
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
                log.info(
                    f"checkpoint: host {name} has {free / 2**30:.1f} GiB of memory free, snapshots need "
                    f"{need / 2**30:.1f} GiB: this save is written while training waits"
                )
                return False
        if needed:
            log.info(
                f"checkpoint: a rank's snapshot keeps {needed / 2**20:.1f} MiB of host memory from now on"
            )
        return True

    def _collect(self, job: _Job, background: bool) -> None:
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

    def _write(self, job: _Job, saved: Saved) -> None:
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
            self.on_disk_step = job.step
            log.info(
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

    def _write_files(self, job: _Job) -> dict[str, Any]:
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

    def _publish(self, job: _Job, answers: list) -> tuple[str, str | None]:
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
        spared: set[str] = set()
        if self._mirror is not None:
            self._mirror.offer(path)
            spared = self._mirror.needs()
        try:
            prune(
                self.run_dir,
                keep_last=self.policy.keep_last,
                keep_every=self.policy.keep_every,
                spared=spared,
            )
        except OSError as error:  # an old checkpoint too many is no reason to end a run
            log.warning(f"checkpoint: could not remove old checkpoints ({error})")
        return str(path), None

    def _fence(self) -> None:
        if self._attempt is not None:
            self._attempt.check()

    def _manifest(self, job: _Job, answers: list) -> Manifest:
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
        engine = self._state.engine
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


def _text(error: BaseException | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__
