"""What becomes of the batches that a script has drawn from one loader: which of them belong to the next push.

A batch that was drawn is *undecided* until a gradient is accumulated. Then it is *used*, so it belongs to the next
push, or *skipped*, so it belongs to no push. The batch that was drawn last is used. An earlier one, for which no
gradient was accumulated before the next batch was drawn, is used if its forward pass is a part of this gradient,
because the script may have added up the losses of several batches. If no forward pass was seen before the next batch
was drawn, it is used if the script still holds it, because the script may have collected several batches. Otherwise,
it is skipped: for example, the script has caught an exception, or the loss was not finite.

If accumulated gradients are dropped, their batches are undecided again. If a script accumulates no gradient before a
push, for example because it sets gradients by itself, the push contains all undecided batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...state import stateful
from ..protocol.lease import Pushed

__all__ = ["Drawn", "DrawnBatch"]


@stateful(decides="positions samples is_held passed watched contributes")
@dataclass(slots=True)
class DrawnBatch:
    """A batch that a script has drawn.

    Attributes:
        positions: number of positions in the batch.
        samples: number of samples in the batch; None if it is unknown.
        is_held: function that returns True if the script may still use the batch. Once False, it remains False.
        passed: True if a push has followed, so that the batch is among those that `Drawn.pushed` counts.
        watched: True if a forward pass with the batch was seen, so that `contributes` is known.
        contributes: True if this forward pass is a part of an accumulated gradient.
    """

    positions: int
    samples: int | None
    is_held: Callable[[], bool]
    passed: bool = False
    watched: bool = False
    contributes: bool = False


MOST_BATCHES = 1024
"""Maximum number of undecided batches, for a script that draws batches and never pushes. More are not held."""


@stateful(decides="count pushed _undecided _used _skipped")
class Drawn:
    """The batches that a script has drawn from one loader.

    Attributes:
        count: number of batches that the script has drawn.
        pushed: what the script had drawn before its last push.
    """

    def __init__(self) -> None:
        self.count = 0
        self.pushed: Pushed = Pushed(0, 0)
        self._undecided: list[DrawnBatch] = []
        # Batches that were decided since the last push.
        self._used: list[DrawnBatch] = []
        self._skipped: list[DrawnBatch] = []

    def draw(self, batch: DrawnBatch) -> None:
        """Record that the script has drawn a batch."""
        self.count += 1
        if len(self._undecided) >= MOST_BATCHES:
            self._undecided[:] = [_joined(self._undecided)]
        self._undecided.append(batch)

    def accumulate(self) -> None:
        """Decide on all undecided batches, because a gradient is accumulated."""
        decided = self._undecided[:]
        del self._undecided[: len(decided)]  # a thread of the script may draw another batch meanwhile
        for batch in decided[:-1]:
            used = batch.contributes if batch.watched else batch.is_held()
            (self._used if used else self._skipped).append(batch)
        self._used += decided[-1:]

    def drop(self) -> None:
        """Make the used batches undecided again, because their gradients are dropped."""
        for batch in self._used:
            batch.contributes = False
        self._undecided[:0] = self._used
        self._used.clear()

    def samples(self, *, accumulated: bool) -> int | None:
        """Return the number of samples in the next push; None if it is unknown, or if there is no batch.

        Args:
            accumulated: False if no gradient has been accumulated since the last push.
        """
        batches = self._used if accumulated else [*self._used, *self._undecided]
        counts = [batch.samples for batch in batches if batch.samples is not None]
        return sum(counts) if batches and len(counts) == len(batches) else None

    def push(self, *, accumulated: bool) -> int:
        """Record a push. Return the number of positions that have been skipped since the last push.

        Args:
            accumulated: False if no gradient has been accumulated since the last push.
        """
        skipped = sum(batch.positions for batch in self._skipped)
        self._used.clear()
        self._skipped.clear()
        if not accumulated:
            self._undecided.clear()
        for batch in self._undecided:
            batch.passed = True
        self.pushed = Pushed(self.count, self.pushed.skipped + skipped)
        return skipped

    def end(self) -> Pushed:
        """Return `pushed` when the script ends: batches that were undecided at the last push are skipped."""
        batches = [*self._undecided, *self._used, *self._skipped]
        passed = sum(batch.positions for batch in batches if batch.passed)
        return self.pushed._replace(skipped=self.pushed.skipped + passed)


def _joined(batches: Sequence[DrawnBatch]) -> DrawnBatch:
    counts = [batch.samples for batch in batches if batch.samples is not None]
    return DrawnBatch(
        sum(batch.positions for batch in batches),
        sum(counts) if len(counts) == len(batches) else None,
        lambda: False,
        all(batch.passed for batch in batches),
    )
