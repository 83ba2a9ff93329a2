"""With overlap off: no worker pulls until every shard has received every worker's push."""

from __future__ import annotations

from collections.abc import Set

from ...errors import InternalError
from ...state import stateful
from ..protocol.messages import PullAllowed
from ..protocol.requests import Request, Send, worker_peer

__all__ = ["Turns"]


@stateful(decides="committed")
class Turns:
    """The workers that wait for permission to pull.

    Attributes:
        committed: worker that waits -> the iteration that it has just pushed to all shards.
    """

    def __init__(self) -> None:
        self.committed: dict[int, int] = {}

    def left(self, worker: int) -> None:
        """Remove a worker that has left."""
        self.committed.pop(worker, None)

    def allow(self, present: Set[int]) -> list[Request]:
        """Let all workers pull if each of those that are `present` has pushed to all shards."""
        if not present or self.committed.keys() != present:
            return []
        committed, self.committed = self.committed, {}
        return [Send(worker_peer(worker), PullAllowed(committed[worker])) for worker in sorted(committed)]

    def validate(self, present: Set[int]) -> None:
        """Raise `InternalError` if a worker waits that is not present."""
        if not self.committed.keys() <= present:
            raise InternalError(f"{self.committed} wait to pull, but only {present} are present")
