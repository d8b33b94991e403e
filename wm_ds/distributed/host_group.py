"""Small agreements between ranks, apart from the collectives of training.

Saving and stopping need every rank to come to the same verdict: is the checkpoint complete, did somebody
fail, has one of us been told to stop. These exchanges are a few bytes of host memory, so they have a group
of their own: gloo on every cluster, no wait for the accelerator, and a background thread may use one while
training's own collectives run. A group serves one thread only, because gloo matches calls by order.
"""

import datetime
import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist

from wm_ds.errors import WmError


class RankError(WmError, RuntimeError):
    """Raised on every rank alike when at least one of them failed; the text names each that did."""


class Agreement:
    """Host-side exchanges between all ranks; without torch.distributed it is an agreement of one.

    Must be built on all ranks in the same order (it is a collective). `timeout_s` bounds every call: when a
    rank does not answer in time the others raise an error instead of waiting for ever.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._group = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            if self.world > 1:
                limit = datetime.timedelta(seconds=timeout_s)
                self._group = dist.new_group(backend="gloo", timeout=limit)

    def maximum(self, value: int) -> int:
        """The largest `value` of all ranks: one all-reduce of eight bytes."""
        if self._group is None:
            return value
        cell = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(cell, op=dist.ReduceOp.MAX, group=self._group)
        return int(cell)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        if self._group is None:
            return value
        cell = [value]
        dist.broadcast_object_list(cell, src=0, group=self._group)
        return cell[0]

    def raise_on_all(self, doing: str, error: BaseException | None) -> None:
        """Raise RankError on all ranks if any of them has an `error`; `doing` says what it was doing."""
        errors = self.gather(None if error is None else f"{error or type(error).__name__}")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
        if failed:
            same = len({text for text in errors if text is not None}) == 1 and len(failed) == self.world
            details = str(errors[0]) if same else "; ".join(failed)
            raise RankError(f"{doing}: {details}") from error


def speaks(text: str, patience_s: float = 3.0) -> bool:
    """Whether this rank is the one that says `text`, why it ends, at the terminal.

    Rank 0 says what it ends on. Another rank waits a little for it to say the same, and speaks, as the first
    one, where it does not: an error of one rank alone is then said once, and one that all ranks have, too.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    key = "wm_ds/ended/" + hashlib.sha256(text.encode()).hexdigest()[:16]
    store = dist.distributed_c10d._get_default_store()
    try:
        if dist.get_rank() == 0:
            store.set(key, "said")
            return True
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            if store.check([key]):
                return False
            time.sleep(0.1)
        return store.add(f"{key}/others", 1) == 1
    except (dist.DistNetworkError, dist.DistStoreError):
        # Rank 0, which keeps the store, is gone. It has said why, and this is what came of it.
        return dist.get_rank() == 0
