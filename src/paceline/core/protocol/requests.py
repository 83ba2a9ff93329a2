"""The requests that a core returns to its host.

For every message, a core returns a list of requests, which the host must carry out in order. In particular, the
weights in each answer must include all updates that precede the answer in the list, and no later update.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from ...sync.translation import Standing
from .job_cut import JobCut, LoopCut
from .lease import Split
from .messages import MeanMeasured, Message

__all__ = [
    "COORDINATOR",
    "PROCEED",
    "AbandonCut",
    "Abort",
    "Apply",
    "CompleteCut",
    "Discard",
    "EndWithout",
    "Fail",
    "Measure",
    "Overwrite",
    "Peer",
    "Preserve",
    "Proceed",
    "Rehearse",
    "Request",
    "SaveCut",
    "Send",
    "Situation",
    "TakeCut",
    "TakeOut",
    "Timer",
    "Warn",
    "server_peer",
    "worker_peer",
]


class Peer(msgspec.Struct, frozen=True):
    """The role and index of a process that takes part in a run or reads from it.

    Attributes:
        role: role of the peer.
        index: index of the worker, server or reader; 0 for the coordinator.
    """

    role: Literal["worker", "server", "coordinator", "reader"]
    index: int

    def __str__(self) -> str:
        return "the coordinator" if self.role == "coordinator" else f"{self.role} {self.index}"


COORDINATOR = Peer("coordinator", 0)


@cache
def worker_peer(index: int) -> Peer:
    """Return the `Peer` for the worker with this index."""
    return Peer("worker", index)


@cache
def server_peer(index: int) -> Peer:
    """Return the `Peer` for the server with this index."""
    return Peer("server", index)


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message. If it is an `Answer`, the host adds the current weights of the shard."""

    to: Peer
    message: Message


class Timer(msgspec.Struct, frozen=True, order=True, gc=False):
    """Call the core's `fire` with this object when the timer is due.

    Attributes:
        due_ticks: due time in ticks, on the same clock as the attribute `now_ticks` of events.
        worker: worker for which the timer was set.
        iteration: iteration for which the timer was set.
        shard: index of the shard that has set the timer; -1 if the coordinator has set it.
    """

    due_ticks: int
    worker: int
    iteration: int
    shard: int = -1


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Update a shard: sum the scaled gradients of the pushes in this order, and take one optimizer step.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push.
        scales: for each push, the factor by which its gradient is multiplied.
        standing: what the shard knows about the update, by which its hyper-parameters are translated; None to use
            them as they are.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]
    standing: Standing | None = None


class Measure(msgspec.Struct, frozen=True, gc=False):
    """Compute the squared L2 norm of the sum of scaled gradients that `Apply` would use, then send `report(square)`.

    The pushes remain unchanged: a later `Apply` lists them again.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push.
        scales: for each push, the factor by which its gradient is multiplied.
        max_norm: largest norm of the joint gradient.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]
    max_norm: float

    def report(self, square: float) -> Send:
        """Return the request that sends the squared norm to the coordinator."""
        return Send(COORDINATOR, MeanMeasured(self.shard, self.pushes, self.max_norm, square))


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Discard the gradient of a push, if it has one."""

    shard: int
    worker: int
    iteration: int


class Overwrite(msgspec.Struct, frozen=True, gc=False):
    """Set the parameters that are present in a push to the values in the push. The optimizer takes no step.

    Attributes:
        shard: index of the shard.
        worker: worker that sent the push.
        iteration: label of the push.
        number: number of the edit. Parameters that an edit with a higher number has set remain unchanged.
    """

    shard: int
    worker: int
    iteration: int
    number: int


class Preserve(msgspec.Struct, frozen=True, gc=False):
    """Copy the gradient of a held push. The next request answers the worker, which then overwrites the gradient."""

    shard: int
    worker: int
    iteration: int


class Proceed(msgspec.Struct, frozen=True, gc=False):
    """Let the worker continue: everything that the worker waited for has arrived."""


PROCEED = Proceed()


class Abort(msgspec.Struct, frozen=True, gc=False):
    """Abort the computation of this iteration if possible, and pull again."""

    iteration: int


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation of the candidates needs to know about a run.

    Attributes:
        syncs: the candidates.
        cycles: for each live worker, its latest cycles: the number of samples (-1 if it is unknown) and seconds.
        computed: for each live worker, its latest computations in the same form; empty if they are unknown. What a
            cycle takes longer is the time of its transfers.
        samples: number of samples in an epoch; None if the script distributes no loader of known size.
        batch_size: number of samples for which a worker usually computes a gradient; for which all workers together
            do, if `joint` is True.
        balanced: True if the batches are balanced.
        joint: True if the batches are parts of joint batches of a given size.
        split: how the epochs are split.
        pushes_per_batch: mean number of gradients that are computed from a batch.
    """

    syncs: tuple[str, ...]
    cycles: tuple[tuple[tuple[int, float], ...], ...]
    computed: tuple[tuple[tuple[int, float], ...], ...]
    samples: int | None
    batch_size: int
    balanced: bool
    split: Split
    pushes_per_batch: float = 1.0
    joint: bool = False


class TakeCut(msgspec.Struct, frozen=True, gc=False):
    """Copy the weights, the optimizer state and the buffers of a shard as they are now, for a cut of the job.

    A copy for a cut with a smaller number is no longer needed.

    Attributes:
        shard: index of the shard.
        number: number of the cut.
    """

    shard: int
    number: int


class SaveCut(msgspec.Struct, frozen=True, gc=False):
    """Begin to write a cut: every shard has been copied. Its number is that of the `TakeCut`.

    It is not whole before a `CompleteCut`.
    """

    cut: JobCut


class CompleteCut(msgspec.Struct, frozen=True, gc=False):
    """Complete a cut: all workers that are still present have given what their scripts hold.

    Attributes:
        number: number of the cut.
        states: (worker, iteration) of each `KeepWorkerState` that belongs to the cut, by worker.
        loop: the place of the job in its training loops, to which these states belong.
    """

    number: int
    states: tuple[tuple[int, int], ...]
    loop: LoopCut


class AbandonCut(msgspec.Struct, frozen=True, gc=False):
    """Write no more of a cut, which cannot be completed. The job is cut again.

    Attributes:
        number: number of the cut.
        reason: why, as a clause.
    """

    number: int
    reason: str


class Rehearse(msgspec.Struct, frozen=True, gc=False):
    """Simulate a run under several sync models, then call `Coordinator.rehearsed` with the results.

    In a live run, this happens beside the run, which goes on meanwhile.
    """

    situation: Situation


class Warn(msgspec.Struct, frozen=True, gc=False):
    """Report a problem that does not end the run."""

    words: str


class TakeOut(msgspec.Struct, frozen=True, gc=False):
    """Continue without a worker whose process goes on, and end its connection.

    Attributes:
        worker: index of the worker.
        reason: why, as a clause.
    """

    worker: int
    reason: str


class Fail(msgspec.Struct, frozen=True, gc=False):
    """End the run, because a part of it has failed.

    Attributes:
        where: the part of the run that has failed, for example "worker 2".
        reason: what went wrong, in one sentence.
        traceback: traceback of the failure; "" if there is none.
    """

    where: str
    reason: str
    traceback: str = ""


class EndWithout(msgspec.Struct, frozen=True, gc=False):
    """End the run, because it cannot continue without a server that is lost.

    How the process of the server has ended may say more than the reason. A host that learns it names it instead.

    Attributes:
        server: index of the server.
        reason: what is known of the loss, as a clause.
    """

    server: int
    reason: str


Request = (
    Send
    | Timer
    | Apply
    | Measure
    | Overwrite
    | Discard
    | Preserve
    | TakeCut
    | SaveCut
    | CompleteCut
    | AbandonCut
    | Proceed
    | Abort
    | Rehearse
    | Warn
    | TakeOut
    | Fail
    | EndWithout
)
