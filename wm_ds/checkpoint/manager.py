"""Saving and resuming a run: exact, at any world size and ZeRO stage, and safe against kills.

`Checkpoints` is what the trainer uses. Saving is writer.py: a snapshot in host memory, then a
write beside training. Loading is here, and reads ranges: whatever share a rank has under its own world size
and stage, it finds the fragments that overlap it, so resuming at the same size, at another one and exporting
are the same code. Files: format.py; directories: directory.py; what is where inside
DeepSpeed: engine_state.py and optim/partition.py.
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from wm_ds.checkpoint import rng
from wm_ds.checkpoint.directory import checkpoints_dir, clean_up, describe, find_latest, previous_complete
from wm_ds.checkpoint.engine_state import WEIGHT, EngineState
from wm_ds.checkpoint.format import (
    CLIENT,
    CheckpointError,
    Manifest,
    Reader,
    checksum_problem,
    load_weights,
    read_json,
    read_manifest,
    read_tensor,
    verify,
)
from wm_ds.checkpoint.layout_proof import prove
from wm_ds.checkpoint.mirror import Mirror
from wm_ds.checkpoint.writer import Saved, SavePolicy, Writer
from wm_ds.distributed.host_group import Agreement, RankError
from wm_ds.run.claim import Attempt

log = logging.getLogger(__name__)
_DEFAULT = SavePolicy()

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


class Checkpoints:
    """The checkpoints of a running engine. Build it and call every method on all ranks alike.

    Args:
        engine: the DeepSpeed engine, at an optimizer step's boundary whenever a method is called.
        run_dir: checkpoints go to RUN_DIR/checkpoints, on a file system that all ranks share.
        policy: which checkpoints stay, and how they are written.
        timeout_s: how long ranks wait for one another before a save or load counts as failed.
        attempt: this launch of the run, where several may follow each other (see run/claim.py): once a newer
            one has begun, this one publishes nothing any more.
        mirror: on rank 0, what sends published checkpoints elsewhere, where the run has one.

    Raises ValueError for an engine whose state cannot be saved (see `EngineState`).
    """

    def __init__(
        self,
        engine: Any,
        run_dir: str | Path,
        *,
        policy: SavePolicy = _DEFAULT,
        timeout_s: float = 600.0,
        attempt: Attempt | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._engine = engine
        self._agreement = Agreement(timeout_s)
        self.rank, self.world = self._agreement.rank, self._agreement.world
        self._state = EngineState(engine, rank=self.rank, world=self.world)
        self._writer = Writer(
            self._state,
            self._agreement,
            self.run_dir,
            policy=policy,
            attempt=attempt,
            mirror=mirror,
        )
        self._proved = False  # whether a save has shown that weights are where they are looked for
        self._clean = False  # whether leftovers of earlier attempts have been removed

    # -- saving ------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether a background save has failed on this rank. Agree on it before acting (`Stopping.check`)."""
        return self._writer.failed

    def save(self, step: int, client_state: dict[str, Any], *, wait: bool = False) -> Saved | None:
        """Save the state after `step` optimizer steps; returns once the state is copied.

        `client_state` is the trainer's own state in JSON types, equal on all ranks. With `wait`, as at the
        end of a run, it is written at once, without copy. A step that is on disk already is not saved again:
        None. Raises CheckpointError on all ranks when this save or the one before it failed, and LayoutError
        before the first save where what would be saved are not the model's weights.
        """
        started = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - started
        if step == self._writer.on_disk_step:
            return None
        if not self._proved:
            self.prove("the first save")
            self._proved = True
        self._clean_up_once()
        return self._writer.start(step, client_state, waited_s=waited, wait=wait)

    def prove(self, before: str) -> None:
        """Check that what a save would write are the model's weights (layout_proof.py). A collective.

        The first save does it by itself; call it before the first step, too. Raises LayoutError on all ranks.
        """
        prove(self._state, self._agreement, before=before)

    def wait(self) -> None:
        """Wait for the save in flight. Raises CheckpointError on all ranks when it failed."""
        self._writer.wait()

    def _clean_up_once(self) -> None:
        if self._clean:
            return
        error = None
        try:
            if self.rank == 0:
                clean_up(self.run_dir)
        except OSError as raised:
            error = raised
        self._raise_on_all(f"cannot write checkpoints to {checkpoints_dir(self.run_dir)}", error)
        self._clean = True

    # -- resuming ----------------------------------------------------------------------------------------

    def choose(self, resume: str | Path | None = None, *, otherwise: str | Path | None = None) -> Path | None:
        """The checkpoint to load, None for a fresh start; the same on all ranks.

        With `resume` (a checkpoint, or a run directory whose latest is meant) it is that or an error.
        Without, it is the newest complete one of this run directory, and where there is none the one that
        `otherwise` names, in the same way. Changes nothing.
        """
        answer: tuple[str | None, str | None] = (None, None)
        if self.rank == 0:
            try:
                path = self._choose(resume, otherwise)
                answer = (None if path is None else str(path), None)
            except CheckpointError as error:
                answer = (None, str(error))
            except OSError as error:
                answer = (None, f"{checkpoints_dir(self.run_dir)} cannot be read: {error}")
        path_text, problem = self._agreement.broadcast(answer)
        if problem is not None:
            raise CheckpointError(problem)
        return None if path_text is None else Path(path_text)

    def _choose(self, resume: str | Path | None, otherwise: str | Path | None) -> Path | None:
        if resume is None:
            found = find_latest(self.run_dir)
            if found is None and otherwise is not None:
                found = self._named(Path(otherwise))
                log.info(f"no checkpoint in {checkpoints_dir(self.run_dir)} yet: starting from {found}")
                return found
            log.info(
                f"no checkpoint in {checkpoints_dir(self.run_dir)}: starting at step 0"
                if found is None
                else f"resuming from {found}"
            )
            return found
        return self._named(Path(resume))

    def _named(self, resume: Path) -> Path:
        if checkpoints_dir(resume).is_dir():
            found = find_latest(resume)
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
        self._raise_on_all("cannot resume", error)
        assert manifest is not None
        names = sorted(manifest.files)[self.rank :: self.world]
        problems = [p for p in (checksum_problem(path, n, manifest.files[n]) for n in names) if p]
        own = path.parent.resolve() == checkpoints_dir(self.run_dir).resolve()
        if problems:  # a run that this one only begins with is not to be rewound
            offer = previous_complete(path) if own else describe(path.parent.parent)
            error = CheckpointError(f"{'; '.join(problems)}; {offer}")
        self._raise_on_all("cannot resume", error)
        self._state.before_load()
        client: dict[str, Any] = {}
        try:
            self._fill(path, manifest)
            client = read_json(path, manifest, CLIENT)
            self._restore_random(path, manifest)
        except (CheckpointError, RuntimeError, ValueError, KeyError, TypeError) as raised:
            error = raised
        self._raise_on_all("cannot resume", error)
        self._state.after_load()
        for counter, value in manifest.run["engine"].items():
            setattr(self._engine, counter, value)
        self._writer.on_disk_step = int(manifest.run["step"]) if own else None
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
            rng.restore(state)
        else:
            rng.restore_derived(state, self.rank)

    def _raise_on_all(self, doing: str, error: Exception | None) -> None:
        try:
            self._agreement.raise_on_all(doing, error)
        except RankError as failure:
            raise CheckpointError(str(failure)) from error


def save(engine: Any, run_dir: str | Path, step: int, client_state: dict[str, Any], **options: Any) -> Path:
    """Save once and wait until it is published; for scripts. `options` as for `Checkpoints`."""
    saved = Checkpoints(engine, run_dir, policy=SavePolicy(background=False), **options).save(
        step, client_state
    )
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
