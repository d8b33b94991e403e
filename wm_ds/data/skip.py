"""Which batches of a run's order are trained on: what `data.skip` and rollbacks leave out is passed over.

The global batches of a run are numbered 1, 2, 3, … in the order in which it would train on them if it left
out none, one at each step. A batch that is left out is consumed: its rows are gone for this epoch, and the
step that would have had it has the next one that is not left out. So the batch of a step is a pure function
of the step and of what is left out, and no row comes twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LeftOut:
    """Batches that are not trained on: `spans` of them, [first, last], sorted and apart (see `merged`)."""

    spans: tuple[tuple[int, int], ...] = ()

    def batch(self, step: int) -> int:
        """The batch that step `step` trains on; steps and batches count from 1."""
        number = step
        for first, last in self.spans:
            if number < first:
                break
            number += last - first + 1
        return number

    def consumed(self, steps: int) -> int:
        """How many batches of the order are gone after so many steps."""
        return self.batch(steps) if steps > 0 else 0

    def before(self, steps: int) -> LeftOut:
        """What was left out of the batches that the first `steps` steps have consumed."""
        return LeftOut(tuple((first, last) for first, last in self.spans if first <= self.consumed(steps)))

    def __str__(self) -> str:
        return str([list(span) for span in self.spans])


NOTHING = LeftOut()


def merged(spans: Iterable[Sequence[int]]) -> LeftOut:
    """`spans` of batches, [first, last] with both left out, in any order; they may overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for first, last in spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return LeftOut(tuple(found))
