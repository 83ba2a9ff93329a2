"""The requests that a core returns to its host, and the class `Host`, which carries them out.

For every message, a core returns a list of requests, which the host must carry out in order. In particular, the
weights in each answer must include all updates that precede the answer in the list, and no later update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, NoReturn, Protocol, dataclass_transform

import msgspec

from ..errors import InternalError
from ..sync.actions import AnyAction
from ..sync.events import RecordedEvent
from ..sync.translation import Standing
from .job_cut import JobCut, LoopCut
from .lease import Split
from .messages import MeanMeasured, Message


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


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class HostRequest(msgspec.Struct, frozen=True, gc=False):
    """Base class of the requests. Its subclasses are also frozen, and the garbage collector does not track them."""


class Send(HostRequest):
    """Send a message. If the message is an `Answer`, the host adds the current weights of the shard."""

    to: Peer
    message: Message


class Timer(HostRequest, order=True):
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


class Apply(HostRequest):
    """Update a shard: sum the scaled gradients in the order of `pushes`, and take one optimizer step.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push.
        scales: for each push, the factor by which its gradient is multiplied.
        standing: what the shard knows about the update, used to translate the hyper-parameters; None to use the
            hyper-parameters as they are.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]
    standing: Standing | None = None


class Measure(HostRequest):
    """Compute the squared L2 norm of the sum of scaled gradients that `Apply` would use, then send `report(square)`.

    The pushes remain unchanged: a later `Apply` lists them again.

    Attributes:
        shard: index of the shard.
        pushes: (worker, iteration) of each push.
        scales: for each push, the factor by which its gradient is multiplied.
        max_norm: the norm to which the joint gradient is clipped.
    """

    shard: int
    pushes: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]
    max_norm: float

    def report(self, square: float) -> Send:
        """Return the request that sends the squared norm to the coordinator."""
        return Send(COORDINATOR, MeanMeasured(self.shard, self.pushes, self.max_norm, square))


class Discard(HostRequest):
    """Discard the gradient of a push, if it has one."""

    shard: int
    worker: int
    iteration: int


class Overwrite(HostRequest):
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


class Preserve(HostRequest):
    """Copy the gradient of a held push. The next request answers the worker, which then overwrites the gradient."""

    shard: int
    worker: int
    iteration: int


class Proceed(HostRequest):
    """Let the worker continue: everything that the worker waited for has arrived."""


PROCEED = Proceed()


class Abort(HostRequest):
    """Abort the computation of this iteration if possible, and pull again."""

    iteration: int


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run that are needed to simulate it under several sync models, the candidates.

    Attributes:
        syncs: the candidates.
        cycles: for each live worker, the number of samples (-1 if unknown) and the seconds of each of its latest
            cycles.
        computed: for each live worker, its latest computations in the same form; empty if they are unknown. Unlike a
            computation, a cycle also contains the transfers.
        samples: number of samples in an epoch; None if the script distributes no loader of known size.
        batch_size: usual number of samples of a gradient; of a joint gradient if `joint` is True.
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


class LeaveOut(HostRequest):
    """Leave out a worker's buffers when the model's buffers are pooled, unless no other worker has sent buffers.

    The worker has left before it finished. Its BatchNorm statistics, for example, no longer change, while the weights
    do. Only the server of shard 0 makes this request.
    """

    worker: int


class TakeCut(HostRequest):
    """Copy the weights, the optimizer state and the buffers of a shard as they are now, for a cut of the job.

    A copy for a cut with a smaller number is no longer needed.

    Attributes:
        shard: index of the shard.
        number: number of the cut.
    """

    shard: int
    number: int


class SaveCut(HostRequest):
    """Begin to write a cut, for which every shard has been copied. The cut is not whole before a `CompleteCut`."""

    cut: JobCut


class CompleteCut(HostRequest):
    """Complete a cut: all workers that are still present have given the states of their scripts.

    Attributes:
        number: number of the cut.
        states: (worker, iteration) of each `KeepWorkerState` that belongs to the cut, by worker.
        loop: the place of the job in its training loops, to which these states belong.
    """

    number: int
    states: tuple[tuple[int, int], ...]
    loop: LoopCut


class AbandonCut(HostRequest):
    """Stop writing a cut, which cannot be completed. The job is cut again.

    Attributes:
        number: number of the cut.
        reason: why the cut cannot be completed, as a clause.
    """

    number: int
    reason: str


class Rehearse(HostRequest):
    """Simulate a run under several sync models, then call `Coordinator.rehearsed` with the results.

    A live run goes on during the simulation.
    """

    situation: Situation


class Warn(HostRequest):
    """Report a problem that does not end the run."""

    words: str


class TakeOut(HostRequest):
    """Continue the run without a worker whose process may still run, and end the worker's connection.

    Attributes:
        worker: index of the worker.
        reason: why the worker is taken out, as a clause.
    """

    worker: int
    reason: str


class Fail(HostRequest):
    """End the run, because a part of it has failed.

    Attributes:
        where: the part of the run that has failed, for example "worker 2".
        reason: what went wrong, in one sentence.
        traceback: traceback of the failure; "" if there is none.
    """

    where: str
    reason: str
    traceback: str = ""


class EndWithout(HostRequest):
    """End the run, because it cannot continue without a server that is lost.

    If the host learns how the process of the server has ended, it reports this cause in place of `reason`.

    Attributes:
        server: index of the server.
        reason: why the server is lost, as far as this is known, as a clause.
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
    | LeaveOut
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


# -- Carries out the requests of the cores. No other file tells the kinds of requests apart ------------------
#
# A host runs cores: it passes them messages and times, and carries out the requests that they return. `Host`
# is the base class of all hosts, live, simulated or searched. This class finds the method for each request in a table,
# by the type of the request. A host overrides the methods for the requests that its core returns. Every other request
# is a bug.
#
# A host that treats some kinds of messages specially lists them in its own table, `senders`: for example, a
# live server adds the weights to each `Answer`. All other messages are sent by `send`.


class ShardStore(Protocol):
    """Interface to the tensors of one shard. See `paceline.shard.store.Store`."""

    def put(self, worker: int, iteration: int, push: Any) -> None: ...

    def apply(
        self,
        pushes: Sequence[tuple[int, int]],
        scales: Sequence[float],
        standing: Standing | None = None,
    ) -> None: ...

    def squared_norm(self, pushes: Sequence[tuple[int, int]], scales: Sequence[float]) -> float: ...

    def overwrite(self, worker: int, iteration: int, number: int) -> None: ...

    def discard(self, worker: int, iteration: int) -> None: ...

    def preserve(self, worker: int, iteration: int) -> None: ...


METHODS: dict[type[Request], str] = {
    Timer: "set_timer",
    Apply: "apply",
    Measure: "measure",
    Overwrite: "overwrite",
    Discard: "discard",
    Preserve: "preserve",
    LeaveOut: "leave_out",
    TakeCut: "take_cut",
    SaveCut: "save_cut",
    CompleteCut: "complete_cut",
    AbandonCut: "abandon_cut",
    Proceed: "proceed",
    Abort: "abort",
    Rehearse: "rehearse",
    Warn: "warn",
    TakeOut: "take_out",
    Fail: "end_run",
    EndWithout: "end_without",
}
"""The method that carries out each kind of request. `Send` has a table of its own, by the type of the message."""


class Host:
    """Base class of everything that carries out the requests of a core.

    Attributes:
        senders: type of message -> the method that sends messages of this type, in place of `send`.
        stores: the tensors of each shard. Only the host of a server needs them.
    """

    senders: ClassVar[Mapping[type[Message], Callable[[Any, Peer, Any], None]]] = {}
    stores: Mapping[int, ShardStore] | Sequence[ShardStore]

    _methods: ClassVar[dict[type[Request], Callable[[Any, Any], None]]]
    _senders: ClassVar[_Senders]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._methods = {kind: getattr(cls, name) for kind, name in METHODS.items()}
        cls._senders = _Senders(cls)

    def carry_out(self, requests: Iterable[Request]) -> None:
        """Carry out the requests of a core in order, each one completely before the next."""
        for request in requests:
            if type(request) is Send:
                message = request.message
                self._senders[type(message)](self, request.to, message)
            else:
                self._methods[type(request)](self, request)

    # -- for all cores ------------------------------------------------------------------------------------

    def send(self, to: Peer, message: Message) -> None:
        """Send a message that `senders` does not list."""
        self._refuse(Send(to, message))

    # -- for workers --------------------------------------------------------------------------------------

    def proceed(self, request: Proceed) -> None:
        """Let the worker continue."""
        self._refuse(request)

    def abort(self, request: Abort) -> None:
        """Abort the computation of an iteration if possible, and pull again."""
        self._refuse(request)

    # -- for servers and the coordinator ------------------------------------------------------------------

    def set_timer(self, timer: Timer) -> None:
        """Call the core's `fire` when the timer is due."""
        self._refuse(timer)

    # -- for servers --------------------------------------------------------------------------------------

    def apply(self, update: Apply) -> None:
        """Update a shard."""
        self.stores[update.shard].apply(update.pushes, update.scales, update.standing)

    def measure(self, mean: Measure) -> None:
        """Compute the squared norm of a mean, and report it to the coordinator."""
        square = self.stores[mean.shard].squared_norm(mean.pushes, mean.scales)
        self.carry_out([mean.report(square)])

    def overwrite(self, edit: Overwrite) -> None:
        """Set parameters of a shard to the values of an edit."""
        self.stores[edit.shard].overwrite(edit.worker, edit.iteration, edit.number)

    def discard(self, push: Discard) -> None:
        """Discard the gradient of a push."""
        self.stores[push.shard].discard(push.worker, push.iteration)

    def preserve(self, push: Preserve) -> None:
        """Copy the gradient of a held push."""
        self.stores[push.shard].preserve(push.worker, push.iteration)

    def leave_out(self, request: LeaveOut) -> None:
        """Leave out a worker's buffers when buffers are pooled. A host that keeps no buffers does nothing."""

    def take_cut(self, request: TakeCut) -> None:
        """Copy the state of a shard for a cut of the job."""
        self._refuse(request)

    # -- for the coordinator ------------------------------------------------------------------------------

    def rehearse(self, request: Rehearse) -> None:
        """Simulate a run under several sync models, then call the core's `rehearsed`."""
        self._refuse(request)

    def save_cut(self, request: SaveCut) -> None:
        """Begin to write a cut of which every shard has been copied."""
        self._refuse(request)

    def complete_cut(self, request: CompleteCut) -> None:
        """Complete a cut for which the workers have given the states of their scripts."""
        self._refuse(request)

    def abandon_cut(self, request: AbandonCut) -> None:
        """Stop writing a cut."""
        self._refuse(request)

    def warn(self, warning: Warn) -> None:
        """Report a problem that does not end the run."""
        self._refuse(warning)

    def take_out(self, request: TakeOut) -> None:
        """Continue the run without a worker whose process may still run."""
        self._refuse(request)

    def end_run(self, failure: Fail) -> None:
        """End the run, because a part of it has failed."""
        self._refuse(failure)

    def end_without(self, loss: EndWithout) -> None:
        """End the run, because it cannot continue without a server."""
        self._refuse(loss)

    def _refuse(self, request: Request) -> NoReturn:
        raise InternalError(f"{type(self).__name__} cannot carry out {request}")


class _Senders(dict[type[Message], Callable[[Any, Peer, Any], None]]):
    """For each kind of message, the method with which a host sends it: the listed method, else `send`."""

    def __init__(self, host: type[Host]) -> None:
        super().__init__(host.senders)
        self._send = host.send

    def __missing__(self, kind: type[Message]) -> Callable[[Any, Peer, Any], None]:
        self[kind] = self._send
        return self._send


# -- An entry of a trace: one event, and the actions that the sync model returned for it ---------------------


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a trace: an event, and what the sync model did in response.

    Attributes:
        event: the event.
        actions: the actions that the sync model returned for the event, in order.
        refused: the reason why the event was refused; None if the event was accepted.
        version: number of updates that the shard has applied so far, up to and including this event; None at the
            coordinator.
        staleness: (worker, iteration, staleness) of each push that was applied because of this event, in order. The
            staleness is the number of updates between the worker's last pull and the application of its push.
        gap: the largest c_p - min c of a worker whose pull was answered because of this event; c_p is the number of
            pushes that the model in force counts for a worker, and min c the smallest of these numbers. 0 at the
            coordinator.
        standings: the standing of each update that was made because of this event, in order. [] if all updates used the
            hyper-parameters as they are.
    """

    event: RecordedEvent
    actions: list[AnyAction] = []
    refused: str | None = None
    version: int | None = None
    staleness: list[tuple[int, int, int]] = []
    gap: int = 0
    standings: list[Standing | None] = []


class EntryRecorder(Protocol):
    """An object that receives the entries of one trace, in order."""

    def record(self, entry: Entry) -> None: ...
