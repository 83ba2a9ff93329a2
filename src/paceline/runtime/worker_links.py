"""The connections of a worker, which carry out the requests of its core and pass on what arrives.

What the coordinator and the servers send goes to the core, `paceline.core.worker`. The table `handlers` names the
messages of servers that something else handles. The table `targets` names the messages that have a payload.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, Final, Protocol, TypeVar, cast

from ..core.protocol.host import Host
from ..core.protocol.messages import (
    Answer,
    Bell,
    Commit,
    Hello,
    InitialWeights,
    MemoryAttached,
    Message,
    ModelExtended,
    Started,
    TakenOut,
    Warned,
    first_phase,
)
from ..core.protocol.requests import COORDINATOR, Abort, Peer, Proceed, Request
from ..core.worker import Worker
from ..errors import DeadlineError, PeerLostError, TakenOutError
from ..frontend.session import Callbacks
from ..wire.addresses import connect
from ..wire.forks import close_in_forks
from ..wire.ring import Ring
from ..wire.stream import Stream
from .job import Assignment
from .spin import SPIN_S, fall_asleep, spin, wake_up
from .worker_memory import WorkerMemory

__all__ = ["WAITING_S", "Leaving", "Links", "exclusive"]

WAITING_S = 0.1
"""How often a worker that waits shows that it waits, and checks whether it has been asked to leave."""

# The payload of a commit need not be copied, because it does not change until the commit is answered.
LENT: Final = "until the answer"

Method = TypeVar("Method", bound=Callable[..., Any])


class Leaving(SystemExit):
    """Raised in the script when this worker has been asked to leave the run, at the end of its current iteration."""


class Linked(Protocol):
    """An object that uses the connections of a worker."""

    links: Links


def exclusive(method: Method) -> Method:
    """Let only one thread at a time use the connections: a script may iterate over its loader on another thread.

    If a connection is lost because this worker was taken out of the run, the method raises `TakenOutError`.
    """

    @wraps(method)
    def call(self: Linked, *args: Any, **options: Any) -> Any:
        links = self.links
        with links.lock:
            try:
                return method(self, *args, **options)
            except TakenOutError as error:
                links.taken_out = error
                raise
            except PeerLostError as error:
                links.raise_if_taken_out(error)
                raise

    return cast(Method, call)


class Links(Host):
    """The connections of a worker to the coordinator and to the servers.

    Args:
        core: the worker's core.
        coordinator: the connection to the coordinator.
        callbacks: what the session calls in the front end.

    Attributes:
        servers: the connections to the servers, in order; [] before `connect`.
        handlers: message type -> function that handles the messages of this type from servers, in place of the core.
        targets: message type -> function of (message, size in bytes) that returns the memory for the payload.
        payloads: shard -> payload of the push that is being committed.
        orders: watches only the connection to the coordinator.
        tells_arrivals: True if the front end is told which parts of new weights have arrived.
        initial: function that sends a shard its initial weights; None if this worker is not the initializer.
        lock: held by the thread that uses the connections.
        asked_to_leave: True if this worker must leave the run as soon as the current gradient has been pushed.
        finished: True once this worker leaves the run.
        taken_out: set once the coordinator has said that this worker is no longer part of the run.
    """

    def __init__(self, core: Worker, coordinator: Stream[Message], callbacks: Callbacks) -> None:
        self.core = core
        self.coordinator = coordinator
        self.servers: list[Stream[Message]] = []
        self.handlers: dict[type[Message], Callable[[Any], object]] = {Bell: lambda message: None}
        self.targets: dict[type[Message], Callable[[Any, int], Sequence[memoryview]]] = {}
        self.payloads: Mapping[int, Sequence[memoryview]] = {}
        self.tells_arrivals = False
        self.initial: Callable[[InitialWeights], None] | None = None
        self.lock = threading.RLock()
        self.asked_to_leave = self.finished = False
        self.taken_out: TakenOutError | None = None
        self._callbacks = callbacks
        self._memory: WorkerMemory | None = None  # None before `connect`
        self._selector = selectors.DefaultSelector()
        self._selector.register(coordinator, selectors.EVENT_READ)
        self.orders = select.poll()
        self.orders.register(coordinator, select.POLLIN)
        self._writing: set[Stream[Any]] = set()  # the streams of which the selector also watches the writing
        self._ringed: list[Stream[Message]] = []  # the streams that use rings
        close_in_forks(self)

    # -- connections --------------------------------------------------------------------------------------

    def connect(
        self, place: Assignment, addresses: Sequence[str], local: Sequence[bool], memory: WorkerMemory
    ) -> None:
        """Connect to the servers. Earlier connections stay open; see `disconnect`.

        Args:
            place: the worker's place in the run.
            addresses: the addresses of the servers, in order.
            local: for each server, True if it is on this machine.
            memory: the worker's memory.
        """
        self.servers, self._ringed, self._memory = [], [], memory
        self.handlers[MemoryAttached] = memory.attach
        self.targets[Answer] = memory.target
        if not memory.shared:
            self.handlers[Answer] = self._hear_weights
        channels = memory.region.channels
        for channel, address in enumerate(addresses):
            stream: Stream[Message] = Stream(
                connect(address, known=place.job.contexts),
                first_phase("server", "worker"),
                self._payload_targets,
            )
            self.servers.append(stream)
            self._selector.register(stream, selectors.EVENT_READ)
            hello = Hello(
                place.job.token,
                "worker",
                place.index,
                memory_bytes=memory.passed_bytes,
                channels=len(channels),
                channel=channel,
                follows=memory.follows,
                extension=self.core.extension,
                incarnation=place.incarnation,
                place=memory.place if local[channel] else None,
            )
            self.post(stream, hello, descriptors=memory.passed)
            if channels:
                outgoing, incoming = map(Ring, channels[channel])
                stream.use_rings(outgoing, incoming)
                self._ringed.append(stream)

    def disconnect(self, streams: Iterable[Stream[Message]]) -> None:
        """Close earlier connections to the servers."""
        for stream in streams:
            self._selector.unregister(stream)
            self._writing.discard(stream)
            stream.close()

    def close_in_fork(self) -> None:
        """Close the selector in a forked process. The streams close themselves. See `close_in_forks`."""
        self._selector.close()

    def close(self) -> None:
        """Close the connections."""
        streams: list[Stream[Any]] = [*self.servers, self.coordinator]
        for stream in streams:
            stream.close()
        self._selector.close()

    # -- sending ------------------------------------------------------------------------------------------

    def post(
        self,
        stream: Stream[Any],
        message: Message,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
        *,
        lent: Hashable = LENT,
    ) -> None:
        """Send a message over a connection. See `Stream.send`."""
        stream.send(message, payload, descriptors, lent=lent)
        self._watch(stream)

    def to_shard(
        self, shard: int, message: Message, payload: Sequence[memoryview] = (), *, lent: Hashable = LENT
    ) -> None:
        """Send a message to the server of a shard."""
        self.post(self.servers[self.core.placement.server_of[shard]], message, payload, lent=lent)

    def stage(self, shard: int, message: Message, payload: Sequence[memoryview]) -> None:
        """Send a piece of a gradient. The gradient may change as soon as this method returns."""
        self.to_shard(shard, message, payload, lent=None)

    def is_busy(self, shard: int) -> bool:
        """Return True if earlier messages to a shard's server have not been sent completely."""
        stream = self.servers[self.core.placement.server_of[shard]]
        stream.flush()
        return stream.backlog

    def report_problem(self, text: str) -> None:
        """Report a problem that does not end the run."""
        with contextlib.suppress(PeerLostError):  # the run is already over
            self.post(self.coordinator, Warned(text))

    def _watch(self, stream: Stream[Any]) -> None:
        """Let the selector also watch the writing to a stream while there is a backlog."""
        backlog = stream.backlog
        if backlog != (stream in self._writing):
            (self._writing.add if backlog else self._writing.discard)(stream)
            self._selector.modify(stream, selectors.EVENT_READ | (selectors.EVENT_WRITE if backlog else 0))

    # -- the requests of the core -------------------------------------------------------------------------

    def send(self, to: Peer, message: Message) -> None:
        if to is COORDINATOR:
            self.post(self.coordinator, message)
        else:
            self._callbacks.before_exchange()
            self.post(self.servers[to.index], message)

    def _commit(self, to: Peer, commit: Commit) -> None:
        self._callbacks.before_exchange()
        self.post(self.servers[to.index], commit, self.payloads[commit.shard])

    def _initialize(self, to: Peer, message: InitialWeights) -> None:
        assert self.initial is not None
        self.initial(message)

    senders: ClassVar = {Commit: _commit, InitialWeights: _initialize}

    def proceed(self, request: Proceed) -> None:
        """Do nothing: the session reads the state of the core instead."""

    def abort(self, request: Abort) -> None:
        """Do nothing: the session reads the state of the core instead."""

    # -- waiting ------------------------------------------------------------------------------------------

    def leave_if_asked(self) -> None:
        """End the script if this worker has been asked to leave the run."""
        if self.asked_to_leave and not self.finished:
            raise Leaving(0)

    def wait_while(self, waits: Callable[[], bool]) -> None:
        """Handle messages as long as a function returns True."""
        while waits():
            self.leave_if_asked()
            self.hear(timeout_s=WAITING_S)

    def hear(self, timeout_s: float | None) -> bool:
        """Wait for messages for at most `timeout_s`, and handle them. Return False if this time has passed."""
        if self._ringed:
            streams = spin(self._ringed, SPIN_S if timeout_s != 0 else 0.0)
            for ringed in streams:
                self._hear_server(ringed.receive(from_socket=False))
            if streams or not fall_asleep(self._ringed):
                return True
        ready = self._selector.select(timeout_s)
        wake_up(self._ringed)
        for key, events in ready:
            stream = key.fileobj
            assert isinstance(stream, Stream)
            if events & selectors.EVENT_WRITE:
                stream.flush()
                self._watch(stream)
            if events & selectors.EVENT_READ:
                if stream is self.coordinator:
                    self.hear_coordinator()
                else:
                    self._hear_server(stream.receive())
                    if self.tells_arrivals and (incoming := stream.incoming) is not None:
                        self._tell_arrived(*incoming)
        return bool(ready)

    def hear_coordinator_first(self, timeout_s: float) -> None:
        """Wait for messages of the coordinator for at most `timeout_s`; then handle those of the servers, too.

        A server may request a frozen parameter, for a worker without which this worker's wait does not end.
        """
        if not self.coordinator.backlog and self.orders.poll(1000 * timeout_s):
            self.hear_coordinator()
        else:
            self.hear(timeout_s=timeout_s if self.coordinator.backlog else 0.0)

    def hear_coordinator(self) -> None:
        """Handle what the coordinator has sent."""
        for message in self.coordinator.receive():
            if type(message) is Started or type(message) is ModelExtended:
                self.coordinator.takes_descriptor = False
            self.carry_out(self.core.handle(message))

    def _hear_server(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if (handle := self.handlers.get(type(message))) is not None:
                handle(message)
            else:
                self.carry_out(self.core.handle(message))

    def _hear_weights(self, answer: Answer) -> None:
        """Handle an answer whose weights have travelled, perhaps rounded."""
        assert self._memory is not None
        self._memory.widen(answer)
        if self.tells_arrivals:
            self._tell_arrived(answer)
        self.carry_out(self.core.handle(answer))

    def _tell_arrived(self, message: Message, missing_bytes: int = 0) -> None:
        """Tell the front end which part of the weights has arrived. Rounded ones are usable only when all have."""
        told = self._callbacks.on_arrived
        if type(message) is Answer and told is not None and not (missing_bytes and message.rounded):
            assert self._memory is not None
            for vector, start, stop in self._memory.arrived(message.shard, missing_bytes):
                told(vector, start, stop)

    def _payload_targets(self, message: Message, size_bytes: int) -> Sequence[memoryview]:
        target = self.targets.get(type(message))
        return () if target is None else target(message, size_bytes)

    def raise_if_taken_out(self, error: PeerLostError) -> None:
        """If this worker was taken out of the run, raise an exception that says why.

        The coordinator says it once. A script may call the session again after that, for example when it leaves an
        `with paceline.evaluating():`, and must not see the closed connections instead of the reason.
        """
        if self.taken_out is None:
            try:
                for message in self.coordinator.receive():
                    if type(message) is TakenOut:  # no other message can be carried out
                        self.core.handle(message)
            except TakenOutError as reason:
                self.taken_out = reason
            except PeerLostError:
                return  # the coordinator has not said why
        if self.taken_out is not None:
            raise TakenOutError(*self.taken_out.args) from error

    # -- the end ------------------------------------------------------------------------------------------

    def say_goodbye(self, requests: Iterable[Request]) -> None:
        """Send the last messages of this worker to those who still receive them."""
        _Goodbyes(self).carry_out(requests)


class _Goodbyes(Host):
    """Sends the last messages of a worker, to those who still receive them."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def send(self, to: Peer, message: Message) -> None:
        links = self._links
        if to is not COORDINATOR and not links.servers:
            return
        stream: Stream[Any] = links.coordinator if to is COORDINATOR else links.servers[to.index]
        with contextlib.suppress(PeerLostError, DeadlineError):  # a lost peer need not be notified
            stream.send(message)
            stream.drain()
