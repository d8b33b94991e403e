"""Progress of the data tools: a line that redraws itself on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time

_TERMINAL_S, _QUIET_S = 0.2, 30.0


class Progress:
    """Prints bytes, MB/s, tokens/s and the time left to stderr. A context manager."""

    def __init__(self, label: str, total_bytes: int, units: int) -> None:
        self._label, self._total, self._units = label, total_bytes, units
        self._begin = self._printed = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._drawn = False

    def update(self, size: int, tokens: int, units: int) -> None:
        """size, tokens, units: done so far in this run."""
        now = time.monotonic()
        if now - self._printed < (_TERMINAL_S if self._terminal else _QUIET_S):
            return
        self._printed = now
        self._print(size, tokens, units, now - self._begin)

    def _print(self, size: int, tokens: int, units: int, seconds: float) -> None:
        parts = [f"{self._label}: {size / 1e6:,.1f}"]
        if self._total:
            parts[0] += f" of {self._total / 1e6:,.1f}"
        parts[0] += " MB"
        parts.append(f"{size / 1e6 / seconds:,.2f} MB/s")
        if tokens:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        if self._units:
            parts.append(f"shard {units}/{self._units}")
        if self._total and size:
            left = int(max(0.0, (self._total - size) * seconds / size))
            parts.append(f"ETA {left // 3600:d}:{left // 60 % 60:02d}:{left % 60:02d}")
        line = ", ".join(parts)
        if self._terminal:
            sys.stderr.write(f"\r\033[K{line}")
            self._drawn = True
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
