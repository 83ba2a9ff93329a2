"""Carries out the requests of the cores. No other file tells the kinds of requests apart.

A host runs cores: it passes them messages and times, and carries out the requests that they return. `Host` is the
base class of all hosts, live, simulated or searched. It finds the method for each request in a table, by the type of
the request. A host overrides the methods for the requests that its core returns. Every other request is a bug.

A host that treats some kinds of messages specially lists them in its own table, `senders`: for example, a live server
adds the weights to each `Answer`. All other messages are sent by `send`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

from ...errors import InternalError
from ...sync.translation import Standing
from .messages import Message
from .requests import (
    AbandonCut,
    Abort,
    Apply,
    CompleteCut,
    Discard,
    EndWithout,
    Fail,
    Measure,
    Overwrite,
    Peer,
    Preserve,
    Proceed,
    Rehearse,
    Request,
    SaveCut,
    Send,
    TakeCut,
    TakeOut,
    Timer,
    Warn,
)

__all__ = ["Host", "ShardStore"]


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
        senders: the methods that send messages of these types, in place of `send`.
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
        """Complete a cut for which the workers have given what their scripts hold."""
        self._refuse(request)

    def abandon_cut(self, request: AbandonCut) -> None:
        """Write no more of a cut."""
        self._refuse(request)

    def warn(self, warning: Warn) -> None:
        """Report a problem that does not end the run."""
        self._refuse(warning)

    def take_out(self, request: TakeOut) -> None:
        """Continue without a worker whose process goes on."""
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
    """The method of a host that sends each kind of message: the listed method, else `send`."""

    def __init__(self, host: type[Host]) -> None:
        super().__init__(host.senders)
        self._send = host.send

    def __missing__(self, kind: type[Message]) -> Callable[[Any, Peer, Any], None]:
        self[kind] = self._send
        return self._send
