"""What each worker's script had drawn of the data before its pushes, as one shard knows it.

A `Commit` says what the script had drawn. If the worker is lost, the data of its last push counts; if the job is cut,
that of its last push whose effect is in the weights. So the entries of held pushes are kept, and the one before them.
"""

from __future__ import annotations

from collections.abc import Collection

from ...state import stateful
from ..protocol.lease import PackedPushed

__all__ = ["DrawnAtShard"]

Drawn = tuple[PackedPushed, ...]

MOST_ENTRIES = 16
"""Number of entries of a worker above which those are forgotten that are no longer needed."""


@stateful(decides="_entries")
class DrawnAtShard:
    """What the workers had drawn before their pushes to one shard.

    >>> drawn = DrawnAtShard()
    >>> drawn.received(0, 0, (1,), unapplied=[])
    >>> drawn.received(0, 1, (2,), unapplied=[(0, 1)])
    >>> drawn.last(0), drawn.until(0, 0)
    ((2,), (1,))
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[tuple[int, Drawn]]] = {}  # worker -> (iteration, drawn), in order

    def received(
        self, worker: int, iteration: int, drawn: Drawn, unapplied: Collection[tuple[int, int]]
    ) -> None:
        """Record a push. At times, forget those before the last one that is not in `unapplied`."""
        entries = self._entries.get(worker)
        if entries is None:
            entries = self._entries[worker] = []
        entries.append((iteration, drawn))
        if len(entries) > MOST_ENTRIES:
            while len(entries) > 1 and (worker, entries[1][0]) not in unapplied:
                del entries[0]

    @property
    def known(self) -> bool:
        """True if a live worker has drawn anything."""
        return bool(self._entries)

    def last(self, worker: int) -> Drawn:
        """Return what a worker had drawn before its last push; () if there is none."""
        entries = self._entries.get(worker)
        return entries[-1][1] if entries else ()

    def until(self, worker: int, iteration: int) -> Drawn:
        """Return what a worker had drawn before its last push with at most this label; () if there is none."""
        return next(
            (drawn for label, drawn in reversed(self._entries.get(worker, ())) if label <= iteration), ()
        )

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._entries.pop(worker, None)
