"""A shard's part of an edit: values that a script sets between two iterations (see `DistributedOptimizer.editing`).

Every worker runs the block of an edit, and the edit of one worker takes effect in all of them. An edit travels as a
push that contains new values instead of a gradient. Like any push, it has a label, and the sync model decides when it
takes effect: on arrival, or when its round closes. But an edit is never part of a mean, and never dropped: it is
carried out after the gradients of its round. An edit is not an update: it changes neither the version nor any
staleness.

All shards must take the same worker's edit. There are two cases:

- In lockstep, every worker pushes its edit, and the shards take the edit of the worker with the lowest index in the
  round. Rounds are the same at all shards. If a worker is lost inside the block, the next worker's edit is taken.
- Otherwise, shard 0 names one editor: the first worker that enters the block. Only this worker pushes its edit; the
  other workers' pushes are empty. If the editor is lost before its push, the next worker that enters the block is
  named, unless a later edit has already been made.

Two edits by different editors may reach two shards in different orders. Therefore an edit leaves those parameters
alone that an edit with a higher number has set (`Store.overwrite`).

As every worker sends its commits to shard 0 last, an edit that shard 0 has carried out was sent to all shards. If the
editor is lost before, some shards may have carried out its edit; the next editor's edit then replaces it.

With rounded values, the weights from which an edit begins must be those of the servers, to the bit. So in lockstep, a
worker pulls before it edits. Under other models it pulls anyway, and shard 0 names the editor in its answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...state import stateful
from ...sync.events import Edit
from ..protocol.requests import Discard, Overwrite, Request

__all__ = ["Edits"]

Key = tuple[int, int]
"""A push: (worker, iteration)."""


@stateful(decides="pending _next _editors", fixed="_shard")
class Edits:
    """The edits of one shard that are yet to be carried out, and the editors that the shard has named.

    Args:
        shard: index of the shard.

    Attributes:
        pending: the pushes that contain edits, and have not been carried out or discarded yet.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self.pending: dict[Key, Edit] = {}
        self._next = 0  # 1 + the highest number of an edit that has been carried out
        self._editors: dict[int, int] = {}  # live worker -> number of the edit for which it was last named

    def name(self, worker: int, number: int) -> bool:
        """Return True if this worker, which enters the block of an edit, is the one whose edit counts."""
        if number < self._next or any(edit.number == number for edit in self.pending.values()):
            return False
        if number not in self._editors.values():
            self._editors[worker] = number
        return self._editors.get(worker) == number

    def leave(self, worker: int) -> None:
        """Record that a worker has left. Another worker may become the editor of its unfinished edit."""
        self._editors.pop(worker, None)

    def receive(self, push: Key, edit: Edit) -> None:
        """Record a push that contains an edit."""
        self.pending[push] = edit

    def discard(self, push: Key) -> list[Request]:
        """Return the request that discards an edit, which some shards have not received from a lost worker."""
        del self.pending[push]
        return [Discard(self._shard, *push)]

    def carry_out(self, pushes: Iterable[Key]) -> list[Request]:
        """Return the requests for the edits of one round: one edit of each number is carried out, in ascending order.

        In lockstep, all edits of a round have the same number. Under other models, the editors of different edits may
        stop at the same barrier.
        """
        edits = sorted(
            ((push, self.pending.pop(push)) for push in pushes), key=lambda each: (each[1].number, each[0])
        )
        chosen: dict[int, Key] = {}  # number -> the push with the edit that is carried out
        for push, edit in edits:
            if edit.sole or edit.number >= self._next:
                chosen.setdefault(edit.number, push)
        self._next = max(self._next, *(edit.number + 1 for _, edit in edits))
        return [
            Overwrite(self._shard, *push, edit.number)
            if chosen.get(edit.number) == push
            else Discard(self._shard, *push)
            for push, edit in edits
        ]
