"""RUN_DIR/checkpoints: which checkpoints there are, which is the latest, publishing and pruning.

  checkpoints/latest                         name of the newest published checkpoint, replaced by rename
  checkpoints/step_00000100/                 complete: the manifest was in it before it got this name
  checkpoints/step_00000200.partial-TOKEN/   being written by attempt TOKEN, or left behind by a kill
  checkpoints/step_00000050.doomed-TOKEN/    being removed

A directory gets its final name only when it is complete, and `latest` names it only after that, so whatever
moment a kill hits, the newest directory with a final name loads. Files and directories are fsynced in that
order. Everything here is done by rank 0 alone.
"""

import logging
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from wm_ds.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    read_manifest,
    size_problem,
)
from wm_ds.files import sync_directory, write_atomically

log = logging.getLogger(__name__)
LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"step_\d{8,}\.(partial|doomed)-\w+")


@dataclass
class Listed:
    """One directory with the name of a checkpoint; `problem` says why it cannot be loaded, None if it can."""

    path: Path
    step: int
    sequence: int  # counts the saves of a run: after a rewind the newest is not the one with the highest step
    size: int
    problem: str | None


def checkpoints_dir(run_dir: str | Path) -> Path:
    """Where a run's checkpoints lie."""
    return Path(run_dir) / "checkpoints"


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"step_{step:08d}"


def is_step(name: str) -> bool:
    """Whether a directory's name is that of a checkpoint."""
    return _STEP.fullmatch(name) is not None


def list_checkpoints(run_dir: str | Path) -> list[Listed]:
    """All directories named like checkpoints, newest save first; sizes are checked, checksums are not."""
    folder, found = checkpoints_dir(run_dir), []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match is None:
            continue
        try:
            manifest = read_manifest(path)
            problem = size_problem(path, manifest)
            sequence, size = int(manifest.run["sequence"]), manifest.size
        except CheckpointError as error:
            sequence, size, problem = -1, 0, str(error)
        found.append(Listed(path, int(match.group(1)), sequence, size, problem))
    return sorted(found, key=lambda c: (c.sequence, c.step), reverse=True)


def leftovers(run_dir: str | Path) -> list[Path]:
    """Directories of saves or removals that never ended."""
    folder = checkpoints_dir(run_dir)
    return sorted(p for p in folder.iterdir() if _LEFTOVER.fullmatch(p.name)) if folder.is_dir() else []


def describe(run_dir: str | Path) -> str:
    """One line on what is there, for error messages."""
    listed = list_checkpoints(run_dir)
    if not listed:
        return f"there are no checkpoints in {checkpoints_dir(run_dir)}"
    names = [c.path.name + (" (damaged)" if c.problem else "") for c in listed]
    return f"there are: {', '.join(names)} in {checkpoints_dir(run_dir)}"


def find_latest(run_dir: str | Path) -> Path | None:
    """The checkpoint to resume from, None for a start at step 0; what it skipped is logged.

    That is the newest complete one: the one that `latest` names, or a later one that was complete when a kill
    hit before `latest` was replaced. Raises CheckpointError when `latest` is there but names nothing that
    could be loaded, and when there are checkpoints of which not one is complete: neither is a fresh start.
    """
    newest, remarks = latest(run_dir)
    for remark in remarks:
        log.info(remark)
    return newest


def latest(run_dir: str | Path) -> tuple[Path | None, list[str]]:
    """What `find_latest` finds, and what a person should know about how it was found, a line each."""
    folder = checkpoints_dir(run_dir)
    listed = list_checkpoints(run_dir)
    complete = [c for c in listed if c.problem is None]
    pointer = folder / LATEST
    if pointer.exists() or pointer.is_symlink():
        named = _pointed_at(pointer, listed, run_dir)
        if named.problem is not None:
            raise CheckpointError(
                f"the latest checkpoint is damaged: {named.problem}; {_offer(complete)} ({describe(run_dir)})"
            )
    unfinished = [path for path in leftovers(run_dir) if ".partial-" in path.name]  # not half removed ones
    remarks = [f"{partial.name}: skipped, its save never ended" for partial in unfinished]
    if not complete:
        _refuse_damage(folder, listed)
        if unfinished:
            remarks.append("the first save of this run never ended: starting at step 0")
        return None, remarks
    newest = complete[0]
    remarks += [
        f"{other.path.name}: skipped, {other.problem}" for other in listed if other.problem is not None
    ]
    if not pointer.exists():
        remarks.append(f"`{LATEST}` is missing: taking the newest complete checkpoint, {newest.path.name}")
    elif newest.path.name != named.path.name:
        remarks.append(
            f"{newest.path.name} is complete, though its run ended before `{LATEST}` named it instead of "
            f"{named.path.name}: taking it"
        )
    return newest.path, remarks


def _refuse_damage(folder: Path, listed: list[Listed]) -> None:
    if listed:
        problems = "; ".join(str(c.problem) for c in listed)
        raise CheckpointError(
            f"no checkpoint in {folder} is complete: {problems}; remove {folder} to start at step 0 again"
        )


def _pointed_at(pointer: Path, listed: list[Listed], run_dir: str | Path) -> Listed:
    try:
        name = pointer.read_text().removesuffix("\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read ({error}); {describe(run_dir)}") from None
    for candidate in listed:
        if candidate.path.name == name:
            return candidate
    raise CheckpointError(
        f"{pointer} names {name!r}, which is no checkpoint; {describe(run_dir)}. "
        f"Remove it to go on from the newest that is complete"
    )


def _offer(complete: list[Listed]) -> str:
    if not complete:
        return "no other checkpoint is complete"
    newest = complete[0]
    run_dir = shlex.quote(str(newest.path.parent.parent))
    return (
        f"the newest complete one is {newest.path}: go back to it with "
        f"`python tools/reshape_checkpoint.py {run_dir} --rewind {newest.step}`, which removes nothing"
    )


def previous_complete(path: str | Path) -> str:
    """What to offer when the checkpoint at `path` turns out damaged: words for an error message."""
    path = Path(path)
    if path.parent.name != "checkpoints":
        return "restore it from a copy, or resume from another checkpoint"
    others = [
        c for c in list_checkpoints(path.parent.parent) if c.problem is None and c.path.name != path.name
    ]
    return _offer(others)


# -- rank 0 of a running attempt ---------------------------------------------------------------------------


def clean_up(run_dir: str | Path) -> None:
    """Make the folder and remove what ended attempts left behind; once, before an attempt's first save."""
    checkpoints_dir(run_dir).mkdir(parents=True, exist_ok=True)
    for path in leftovers(run_dir):
        shutil.rmtree(path, ignore_errors=True)


def partial_path(run_dir: str | Path, step: int, token: str) -> Path:
    """Where attempt `token` writes the checkpoint of `step` before it is published."""
    return checkpoints_dir(run_dir) / f"{step_name(step)}.partial-{token}"


def next_sequence(run_dir: str | Path) -> int:
    """The number of the next save of this run."""
    return 1 + max((c.sequence for c in list_checkpoints(run_dir)), default=0)


def publish(
    run_dir: str | Path, partial: Path, step: int, manifest: Manifest, fence: Callable[[], None]
) -> Path:
    """Make the partial directory, complete but for its manifest, the latest checkpoint; returns its path.

    `fence` is called at the last moment and raises when this attempt may no longer write. Raises
    CheckpointError when files are not as their ranks said.
    """
    folder, final = checkpoints_dir(run_dir), checkpoints_dir(run_dir) / step_name(step)
    problem = size_problem(partial, manifest)
    if problem is not None:
        raise CheckpointError(problem)
    write_atomically(partial / MANIFEST, manifest.to_json())
    fence()
    replaced = None
    if final.exists():  # a run that went back passes the same step again
        (folder / LATEST).unlink(missing_ok=True)  # a kill in between must not leave it naming nothing
        replaced = final.rename(_doomed(final))
    partial.rename(final)
    sync_directory(folder)
    write_atomically(folder / LATEST, f"{final.name}\n")
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def prune(
    run_dir: str | Path, *, keep_last: int, keep_every: int = 0, spared: Collection[str] = ()
) -> list[str]:
    """Remove complete checkpoints but the `keep_last` newest and those at multiples of `keep_every` steps.

    `spared`: names of those that somebody still reads. Call after a publication only. Damaged ones do not
    count as kept and are left for a person to look at.
    Returns the names of the removed.
    """
    if keep_last < 1:
        raise ValueError(
            f"keep_last is {keep_last}, must be 1 or more: the latest checkpoint is never removed"
        )
    complete = [c for c in list_checkpoints(run_dir) if c.problem is None]
    removed = []
    for old in complete[keep_last:]:
        if (keep_every and old.step % keep_every == 0) or old.path.name in spared:
            continue
        doomed = old.path.rename(_doomed(old.path))
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(old.path.name)
    return removed


def set_aside(path: Path) -> Path:
    """Give a checkpoint a name under which nobody looks for one, and leave it to a person; returns that."""
    aside, number = path.with_name(f"set_aside_{path.name}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"set_aside_{path.name}-{number}")
    return path.rename(aside)


def go_back(run_dir: str | Path, target: Path | None) -> list[tuple[str, str]]:
    """Make `target` the checkpoint that the run resumes from, and set newer saves and damaged ones aside.

    None: the run has none of its own from then on. Returns their old names and new ones. Whatever moment a
    kill hits, the run can start: as it will, or from a save that was still to be set aside.
    """
    listed = list_checkpoints(run_dir)
    if target is None:
        sequence = -1
        (checkpoints_dir(run_dir) / LATEST).unlink(missing_ok=True)
    else:
        sequence = next(found.sequence for found in listed if found.path.name == target.name)
        write_atomically(checkpoints_dir(run_dir) / LATEST, f"{target.name}\n")
    newer = [found.path for found in listed if found.sequence > sequence or found.problem is not None]
    moved = [(path.name, set_aside(path).name) for path in newer]
    if moved:
        sync_directory(checkpoints_dir(run_dir))
    return moved


def _doomed(path: Path) -> Path:
    """A name that marks `path` for removal before any file of it goes, so that half of it is never loaded."""
    return path.with_name(f"{path.name}.doomed-{secrets.token_hex(4)}")
