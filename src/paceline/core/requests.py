"""What a core asks of its host, in the order in which the host must do it.

A core returns a finished list of these for every message. An update must be applied before a later answer is sent,
since an answer carries the weights as they are at that point of the list.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import msgspec

from .messages import Message

__all__ = [
    "COORDINATOR",
    "Abort",
    "Apply",
    "Discard",
    "Fail",
    "Peer",
    "Preserve",
    "Proceed",
    "Report",
    "Request",
    "Send",
    "Timer",
    "server_peer",
    "worker_peer",
]


class Peer(msgspec.Struct, frozen=True):
    """One party of a run.

    Attributes:
        role: what it is.
        index: index of the worker, server or reader; 0 for the coordinator.
    """

    role: Literal["worker", "server", "coordinator", "reader"]
    index: int

    def __str__(self) -> str:
        return "the coordinator" if self.role == "coordinator" else f"{self.role} {self.index}"


COORDINATOR = Peer("coordinator", 0)


@cache
def worker_peer(index: int) -> Peer:
    """Return the worker with this index."""
    return Peer("worker", index)


@cache
def server_peer(index: int) -> Peer:
    """Return the server with this index."""
    return Peer("server", index)


class Send(NamedTuple):
    """Send a message. With an `Answer` go the weights of its shard, as they are now."""

    to: Peer
    message: Message


class Timer(NamedTuple):
    """Come back to the core's `fire` with this value when it is due.

    Attributes:
        due_s: on the clock of the events, in seconds.
        worker: worker that the timer is about.
        iteration: iteration that the timer is about.
        shard: index of the shard that has set it; -1 for the coordinator.
    """

    due_s: float
    worker: int
    iteration: int
    shard: int = -1


class Apply(NamedTuple):
    """Update a shard: one optimizer step with the sum of these pushes, in the order given, times `scale`.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push.
        scale: factor of the sum.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    scale: float


class Discard(NamedTuple):
    """Forget a push, if there is one with a gradient."""

    shard: int
    worker: int
    iteration: int


class Preserve(NamedTuple):
    """Copy a push that is held: its worker is answered next, and will write into the memory of its gradient."""

    shard: int
    worker: int
    iteration: int


class Proceed(NamedTuple):
    """The worker has all that it has waited for, and computes."""


class Abort(NamedTuple):
    """The worker is to abort the computation of this iteration, if its host can, and pull again."""

    iteration: int


class Report(NamedTuple):
    """Show the user something that has gone wrong without ending the run."""

    words: str


class Fail(NamedTuple):
    """The run has failed.

    Attributes:
        where: where it has failed.
        reason: one sentence.
        traceback: traceback; "" for none.
    """

    where: str
    reason: str
    traceback: str = ""


Request = Send | Timer | Apply | Discard | Preserve | Proceed | Abort | Report | Fail
