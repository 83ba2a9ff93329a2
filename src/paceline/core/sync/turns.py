"""With overlap off: no worker pulls until every shard has received the pushes of all workers for this round.

Workers count their iterations from their first one. So rounds are told apart by the number of updates that the
weights include from which a gradient was computed. A worker that joins is awaited from its first push on, because
only this push tells in which round the worker takes part for the first time.
"""

from __future__ import annotations

from collections.abc import Set

from ...errors import InternalError
from ...state import stateful
from ..protocol.messages import AllCommitted, PullAllowed
from ..protocol.requests import Request, Send, worker_peer

__all__ = ["Turns"]


@stateful(decides="committed reached newcomers")
class Turns:
    """The workers that wait for permission to pull.

    Attributes:
        committed: worker that waits -> the iteration that it has just pushed to all shards.
        reached: worker -> `AllCommitted.updates` of its last push, once it has pushed.
        newcomers: workers that have joined the run, and have not pushed yet.
    """

    def __init__(self) -> None:
        self.committed: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        self.newcomers: set[int] = set()

    def joined(self, worker: int) -> None:
        """Add a worker that has joined while the others train."""
        self.newcomers.add(worker)

    def left(self, worker: int) -> None:
        """Remove a worker that has left."""
        self.committed.pop(worker, None)
        self.reached.pop(worker, None)
        self.newcomers.discard(worker)

    def pushed(self, worker: int, message: AllCommitted, present: Set[int]) -> list[Request]:
        """Handle a worker's report that it has pushed to all shards. See `allow`."""
        self.newcomers.discard(worker)
        self.committed[worker] = message.iteration
        self.reached[worker] = message.updates
        return self.allow(present)

    def allow(self, present: Set[int]) -> list[Request]:
        """Let each worker pull for whose round all `present` workers have pushed to all shards."""
        awaited = present - self.newcomers
        if not awaited or not self.committed:
            return []
        complete = min(self.reached.get(worker, -1) for worker in awaited)
        allowed = [worker for worker in sorted(self.committed) if self.reached[worker] <= complete]
        return [Send(worker_peer(worker), PullAllowed(self.committed.pop(worker))) for worker in allowed]

    def validate(self, present: Set[int]) -> None:
        """Raise `InternalError` if a worker waits that is not present."""
        if not self.committed.keys() <= present:
            raise InternalError(f"{self.committed} wait to pull, but only {present} are present")
