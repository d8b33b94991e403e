"""Batches, read ahead of the consumer by threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from wm_ds.data.sequences import Batch


class PrefetchIterator:
    """Yields `read(b)` for b = start, start+1, ...; `next_batch` is its whole state.

    Read ahead by `workers` threads, at least `prefetch` batches; with none, read when asked.

    `waited_s` sums the seconds that the consumer waited for data. Close it (or use it as a context manager)
    to stop the threads.
    """

    def __init__(
        self, read: Callable[[int], list[Batch]], start: int, *, workers: int, prefetch: int
    ) -> None:
        self.next_batch = start
        self.waited_s = 0.0
        self._read = read
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="wm_ds-data") if workers else None
        self._ahead = max(prefetch, workers, 1)
        self._pending: deque[Future[list[Batch]]] = deque()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next batch. After an error the state is what it was: the next call tries the same batch."""
        begin = time.perf_counter()
        if self._pool is None:
            batch = self._read(self.next_batch)
        else:
            while len(self._pending) <= self._ahead:
                self._pending.append(self._pool.submit(self._read, self.next_batch + len(self._pending)))
            try:
                batch = self._pending[0].result()
            except BaseException:
                for future in self._pending:
                    future.cancel()
                self._pending.clear()
                raise
            self._pending.popleft()
        self.waited_s += time.perf_counter() - begin
        self.next_batch += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()

    def __enter__(self) -> PrefetchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
