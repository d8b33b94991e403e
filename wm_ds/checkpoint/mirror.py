"""`checkpoint.mirror`: every checkpoint of a run, copied beside training to another place.

One thread of rank 0 sends what is offered to it, one checkpoint at a time; while it is busy only the newest
waits. Whatever goes wrong there is one line and a number in metrics.jsonl, never the end of the run: the next
checkpoint is another try. Where a run's own folder has no checkpoint, `restore` brings the newest from there.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.checkpoint.directory import checkpoints_dir, is_step, list_checkpoints
from wm_ds.checkpoint.store import Stopped, Store, Stored, StoreError, StoreRefused
from wm_ds.distributed.host_group import Agreement
from wm_ds.errors import one_line
from wm_ds.files import write_atomically

log = logging.getLogger(__name__)
ID = "mirror_id"


@dataclass(frozen=True)
class MirrorPolicy:
    """Where to, how fast at most, and what stays there."""

    address: str
    mib_per_s: float | None = None
    keep_last: int = 3
    keep_every: int = 0


class Mirror:
    """Sends checkpoints of one run from a thread of this process, from the first offer until `close`.

    Without a policy, as in a run without a mirror and on other ranks than 0, nothing is sent.
    """

    def __init__(self, run_dir: str | Path, policy: MirrorPolicy | None) -> None:
        self.run_dir, self.policy = Path(run_dir), policy
        self._changed = threading.Condition()
        self._sending: Path | None = None
        self._waiting: Path | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._news: dict[str, Any] | None = None
        self._failures = 0
        self._step: int | None = None  # the newest that is complete there

    def offer(self, path: Path) -> None:
        """A checkpoint has been published. One that still waits is left out for it."""
        with self._changed:
            if self._ended or self.policy is None:
                return
            if self._waiting is not None and self._waiting != path:
                log.info(
                    "mirror: %s is left out, %s is newer and the one before is still on its way",
                    *(self._waiting.name, path.name),
                )
            self._waiting = path
            if self._thread is None:
                work = threading.Thread(target=self._work, args=(self.policy,), name="mirror", daemon=True)
                self._thread = work
                work.start()
            self._changed.notify_all()

    def offer_newest(self) -> None:
        """What an earlier attempt may not have brought there any more."""
        if self.policy is None:
            return
        newest = next((c for c in list_checkpoints(self.run_dir) if c.problem is None), None)
        if newest is not None:
            self.offer(newest.path)

    def needs(self) -> set[str]:
        """Names of the checkpoints that must not be removed here yet."""
        with self._changed:
            return {path.name for path in (self._sending, self._waiting) if path is not None}

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self.needs()

    def news(self) -> dict[str, Any]:
        """For metrics.jsonl: what happened since the last call, {} for nothing."""
        if self._news is None:
            return {}
        with self._changed:
            news, self._news = self._news, None
        return {"mirror": news}

    def close(self) -> list[str]:
        """Send no more; returns the names of what is not there yet. A start sends the newest again."""
        left = sorted(self.needs())
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        return left

    def _work(self, policy: MirrorPolicy) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._waiting is not None)
                if self._ended or self._waiting is None:
                    return
                path = self._sending = self._waiting
                self._waiting = None
            try:
                news = self._send(path, policy)
            except Stopped:
                return
            except Exception as error:  # whatever a library raises: the run is not at stake
                self._failures += 1
                log.warning(
                    "mirror: %s is not at %s: %s; training goes on, and the next checkpoint is another try",
                    *(path.name, policy.address, one_line(str(error)) or type(error).__name__),
                )
                news = {"failed": path.name}
            with self._changed:
                self._sending = None
                self._news = news | {"step": self._step, "failures": self._failures}
                self._changed.notify_all()

    def _send(self, path: Path, policy: MirrorPolicy) -> dict[str, Any]:
        """Bring one there; what happened, for metrics.jsonl."""
        began = time.monotonic()
        store = Store(policy.address, mib_per_s=policy.mib_per_s, proceed=lambda: not self._ended)
        own, there = _own_id(self.run_dir), store.owner()
        if there not in (None, own):
            raise StoreError("another run's checkpoints lie there")
        if there is None:
            store.claim(own)
        sent = store.send(path, self.run_dir)
        self._step = int(path.name.rpartition("_")[2])
        if not sent:  # an earlier attempt has brought it there
            return {}
        seconds = time.monotonic() - began
        log.info("mirror: %s is at %s, %.1f MiB in %.1f s", path.name, policy.address, sent / 2**20, seconds)
        store.prune(path.name, keep_last=policy.keep_last, keep_every=policy.keep_every)
        return {"bytes": sent, "seconds": round(seconds, 2)}


def _own_id(run_dir: Path) -> str:
    """Made once for a run, and kept in its folder."""
    path = run_dir / ID
    if not path.exists():
        write_atomically(path, secrets.token_hex(8) + "\n")
    return path.read_text().strip()


def check(run_dir: str | Path, address: str) -> None:
    """What a start can tell of the mirror before anything is built; rank 0.

    A warning where it cannot be reached now, though the run has checkpoints of its own and can do without.
    Raises StoreError where its kind is not installed, another run's checkpoints lie there, or, for a
    run without any, it cannot be read: what lies there might be this run's.
    """
    run_dir, store = Path(run_dir), Store(address)
    try:
        there = store.owner()
    except StoreError as error:
        if has_checkpoints(run_dir):
            log.warning("checkpoint.mirror: %s; training goes on, and each checkpoint is another try", error)
            return
        raise StoreError(
            f"checkpoint.mirror: {error}; a run without checkpoints of its own looks there first: mend it, "
            "or leave checkpoint.mirror out"
        ) from None
    path = run_dir / ID
    own = path.read_text().strip() if path.is_file() else None
    if there is not None and there != own and (own is not None or has_checkpoints(run_dir)):
        raise StoreRefused(
            f"checkpoint.mirror = {address}: another run's checkpoints lie there; give this run an "
            "address of its own"
        )


def has_checkpoints(run_dir: str | Path) -> bool:
    """Whether a run's folder holds anything with the name of a checkpoint, whole or not."""
    return bool(list_checkpoints(run_dir))


def restore(run_dir: str | Path, address: str) -> Path | None:
    """Bring the run's newest complete checkpoint from the mirror into its folder; None where there is none.

    The run goes on as the one whose checkpoints lie there. One that turns out damaged is said, and the one
    before it taken. Raises StoreError.
    """
    store = Store(address)
    complete = store.listed()
    if not complete:
        return None
    path = _fetch_one(store, complete, Path(run_dir))
    owner = store.owner()
    if owner is not None:
        write_atomically(Path(run_dir) / ID, owner + "\n")
    return path


def is_address(text: str) -> bool:
    """Whether `checkpoint.resume` names a place elsewhere."""
    return "://" in text


def fetched(address: str, run_dir: str | Path) -> Path:
    """Where in a run's folder a checkpoint lies that was fetched from elsewhere to begin with."""
    name = address.rstrip("/").rpartition("/")[2]
    folder = Path(run_dir) / "fetched"
    return checkpoints_dir(folder) / name if is_step(name) else folder


def fetch_beginning(address: str, run_dir: str | Path) -> Path:
    """Bring what `checkpoint.resume` names, another run's address or one checkpoint there, into RUN/fetched.

    What an earlier start has brought is not fetched again. Raises StoreError.
    """
    target, name = fetched(address, run_dir), address.rstrip("/").rpartition("/")[2]
    there = [c for c in list_checkpoints(Path(run_dir) / "fetched") if c.problem is None]
    if there and (target.name != name or target == there[0].path):
        return there[0].path
    root = address.rstrip("/").rpartition("/")[0] if is_step(name) else address
    store = Store(root)
    complete = [s for s in store.listed() if not is_step(name) or s.name == name]
    if not complete:
        raise StoreRefused(f"checkpoint.resume = {address}: no complete checkpoint lies there")
    return _fetch_one(store, complete, Path(run_dir) / "fetched")


def _fetch_one(store: Store, complete: list[Stored], into: Path) -> Path:
    """The first of them that is whole."""
    problems = []
    for stored in complete:
        log.info("no checkpoint in %s: fetching %s from %s", into, stored.name, store.address)
        try:
            return store.fetch(stored, into)
        except StoreError as error:
            problems.append(str(error))
            log.warning("mirror: %s", error)
    raise StoreError("; ".join(problems))


def settle(mirror: Mirror, agreement: Agreement, beat: Callable[[], None], patience_s: float) -> None:
    """At the end of a run, wait until everything is there, `patience_s` seconds at most.

    On all ranks alike, which keep calling `beat`. Rank 0, which has the mirror, says what is left.
    """
    until, said = time.monotonic() + patience_s, False
    while agreement.broadcast(not mirror.idle and time.monotonic() < until):
        if not said:
            log.info("mirror: waiting for %s to be sent", max(mirror.needs(), default="a checkpoint"))
        said = True
        beat()
        time.sleep(0.2)
    for name in mirror.close():
        log.info("mirror: %s is not there yet: starting the run again sends it", name)
