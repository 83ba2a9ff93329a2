"""The states of a `SmallJob` as immutable values, and the pools that store each value once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, dataclass_transform

import msgspec
from msgspec.structs import replace

from ..core.coordinator import Coordinator
from ..core.messages import ChangePublished, Commit, Message, PlanPublished
from ..core.requests import COORDINATOR, Entry, Peer, Request, Timer, worker_peer
from ..core.server import Server
from ..core.worker import Worker
from ..errors import InternalError
from ..state import Outlook, Subject, restore, snapshot
from ..sync.events import Change, Clip, PushFlags, Stop
from .admission import ShardView

Item = TypeVar("Item")
PooledItem = TypeVar("PooledItem", bound="Pooled")
Core = TypeVar("Core", Worker, Server, Coordinator)
Value = TypeVar("Value")

Key = tuple[int, int]
"""(worker, iteration) of a push."""

MOST_WORKERS = 4
"""The maximum number of workers in a `SmallJob`."""


def put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    """Return a copy of `items` with the item at `index` replaced."""
    return (*items[:index], item, *items[index + 1 :])


@dataclass_transform(frozen_default=True, eq_default=False)
class Pooled(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A value that is compared by identity, because a `StatePool` keeps only one object per value."""


class ServerState(Pooled):
    """The state of a server with one shard, the messages in flight to it, and the workers that await its answers.

    Attributes:
        core: number of the server's core (see `Interned`).
        view: a summary of what the shard has received.
        queues: for each worker, the messages in flight, in order.
        owes: workers that are waiting for an answer from this server.
        timers: timers that are set.
        held: pushes that are held for a mean.
        means: the means that the shard has applied; each mean is given as the pushes that it contains.
        reports: messages that are in flight to the coordinator, in order.
        replies: messages that are in flight from the coordinator, in order.
        factors: (pushes, factor) of each clipped mean.
        made: (number, worker) of each edit that the shard has carried out.
        joins: (worker, (label, c_p)) of each worker that has joined a run in progress.
    """

    core: int
    view: ShardView
    queues: tuple[tuple[Message, ...], ...]
    owes: frozenset[int] = frozenset()
    timers: frozenset[Timer] = frozenset()
    held: frozenset[Key] = frozenset()
    means: frozenset[tuple[Key, ...]] = frozenset()
    reports: tuple[Message, ...] = ()
    replies: tuple[Message, ...] = ()
    factors: frozenset[tuple[tuple[Key, ...], float]] = frozenset()
    made: frozenset[tuple[int, int]] = frozenset()
    joins: frozenset[tuple[int, tuple[int, int | None]]] = frozenset()


class CoordinatorState(Pooled):
    """The state of the coordinator, and the messages that are in flight to it.

    Attributes:
        core: number of the coordinator's core (see `Interned`).
        queues: for each worker, the messages in flight, in order.
        timers: timers that are set.
    """

    core: int
    queues: tuple[tuple[Message, ...], ...]
    timers: frozenset[Timer] = frozenset()


class WorkerState(Pooled):
    """The state of a worker, and the messages that are in flight to it.

    Attributes:
        phase: what the worker is doing.
        core: number of the state of the worker's core, as `Interned` numbers states.
        orders: messages from the coordinator that the worker has not received yet.
        v_train: the latest round that an answer has named since the worker's last push; None if no answer has named
            one. The core receives all answers together, when the last answer arrives.
        restarted: True if the worker has restarted its current iteration.
        changed: number of the last change with which a push of the worker was flagged; 0 if no push was flagged.
        edits: True while the worker makes an edit, that is, before it pushes the edited weights.
        named: True if shard 0 has named the worker as the one whose edit counts, while answers from other shards are
            still missing.
    """

    phase: Literal["absent", "joining", "computing", "waiting", "finished", "lost"]
    core: int = 0
    orders: tuple[Message, ...] = ()
    v_train: int | None = None
    restarted: bool = False
    changed: int = 0
    edits: bool = False
    named: bool = False


class State(msgspec.Struct, frozen=True, gc=False):
    """The state of a whole job.

    Attributes:
        workers: the state of each worker.
        servers: the state of each server.
        coordinator: the state of the coordinator.
        losses: the number of workers that may still be lost.
        requested: the number of changes that have been requested.
    """

    workers: tuple[WorkerState, ...]
    servers: tuple[ServerState, ...]
    coordinator: CoordinatorState
    losses: int
    requested: int = 0


Step = tuple[str, Callable[[], State]]
"""A step: its description, which begins with the name of a process, and a function that returns the next state."""


class StatePool(Generic[PooledItem]):
    """Stores one object for each value, so that values can be compared by identity, which is fast.

    Attributes:
        number: object -> its index, in order of first appearance.
    """

    def __init__(self) -> None:
        self._by_value: dict[Hashable, PooledItem] = {}
        self.number: dict[PooledItem, int] = {}

    def __call__(self, item: PooledItem) -> PooledItem:
        known = self._by_value.setdefault(msgspec.structs.astuple(item), item)
        if known is item:
            self.number[item] = len(self.number)
        return known


class Call(msgspec.Struct, frozen=True, gc=False):
    """One call of a method of a core, stored as a value.

    Attributes:
        method: name of the method.
        worker: the worker that the call concerns; -1 if there is none.
        message: the message or timer that is passed to the core.
        now_ticks: current time, in ticks.
        models: the sync models that a worker requests.
        clip: how the gradient of a push is clipped; None if the script does not clip.
    """

    method: str
    worker: int = -1
    message: Message | Timer | None = None
    now_ticks: int = 0
    models: tuple[object, ...] = ()
    clip: Clip | None = None


class _Outcome(NamedTuple):
    """The result of a call: the requests to the host, and the recorded entries."""

    requests: tuple[Request, ...]
    entries: tuple[Entry, ...]


class Tape:
    """A recorder that keeps the entries of one call."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.record = self.entries.append

    def take(self) -> tuple[Entry, ...]:
        """Return and remove the recorded entries."""
        entries = tuple(self.entries)
        self.entries.clear()
        return entries


SHARED = (Tape, type, FunctionType, BuiltinFunctionType)
"""Classes of the objects that a core and its copy share, besides immutable values."""


class Interned(Generic[Core]):
    """Numbers the distinct states of one kind of core, and makes each call only once in each state.

    Args:
        tape: the recorder that the cores use.
        without: subjects that do not matter in the job. States are equal if they differ only in fields that decide
            about one of these subjects.
    """

    def __init__(self, tape: Tape, without: Collection[Subject] = ()) -> None:
        self._tape = tape
        self._outlook = Outlook(without, MOST_WORKERS)
        self._cores: list[Core] = []
        self._written = cache(lambda number: Written(self._cores[number]))
        self._number: dict[Hashable, int] = {}
        self._next: dict[tuple[int, Call], tuple[int, _Outcome]] = {}
        self._came_from: list[tuple[int, Call] | None] = []

    def __getitem__(self, number: int) -> Core:
        return self._cores[number]

    def after(self, number: int, call: Call) -> tuple[int, _Outcome]:
        """Return the number of a core's state after a call, and the result of the call."""
        key = number, call
        if (found := self._next.get(key)) is None:
            core = self._written(number).copy()
            outcome = self._perform(core, call)
            found = self._next[key] = self.add(core, key), outcome
        return found

    def add(self, core: Core, came_from: tuple[int, Call] | None = None) -> int:
        """Store the state of a core if it is new, and return the number of the state."""
        number = self._number.setdefault(self._outlook(core), len(self._cores))
        if number == len(self._cores):
            self._cores.append(core)
            self._came_from.append(came_from)
        return number

    def difference(self) -> str:
        """Describe a core that behaves differently from the stored core with the same number.

        Return an empty string if there is no such core.

        This method compares all states in full, with their history, so it is only suitable for small jobs without
        late workers.
        """
        calls: dict[int, list[Call]] = {}
        for number, call in self._next:
            calls.setdefault(number, []).append(call)
        todo = [(0, self._cores[0])]
        known = {snapshot(self._cores[0])}
        while todo:
            number, core = todo.pop()
            for call in calls.get(number, []):
                after = Written(core).copy()
                if difference := self._difference(after, number, call):
                    return difference
                if (whole := snapshot(after)) not in known:
                    known.add(whole)
                    todo.append((self._next[number, call][0], after))
        return ""

    def difference_of_restored(self, make: Callable[[], Core]) -> str:
        """Describe a core that behaves differently after it was restored. Return "" if there is none.

        Every call that the search has made in any state is made again, on a new core to which this state was restored.
        So all behavior that the search has seen is compared.
        """
        for number, call in self._next:
            core = make()
            restore(core, snapshot(self._cores[number]))
            if difference := self._difference(core, number, call):
                return difference
        return ""

    def _difference(self, core: Core, number: int, call: Call) -> str:
        """Make a call. Describe how the result differs from the stored result of the same call in state `number`."""
        outcome = self._perform(core, call)
        then, expected = self._next[number, call]
        state = self._number.get(self._outlook(core))
        if outcome.requests == expected.requests and state == then:
            return ""
        return f"{call} caused {outcome.requests} and state {state}, expected {expected.requests} and state {then}"

    def renamed(self, number: int, call: Callable[[Call], Call], known: dict[int, int]) -> int:
        """Repeat the calls that led to state `number`, with each call replaced, and return the new state's number.

        Args:
            number: number of the original state.
            call: function that returns the replacement of a call.
            known: cache of the results: number of a state -> number of the new state.

        The initial state must not depend on the names of the workers.
        """
        way = []
        while number not in known:
            before = self._came_from[number]
            if before is None:
                known[number] = number
            else:
                way.append(number)
                number = before[0]
        for number in reversed(way):
            before = self._came_from[number]
            assert before is not None
            known[number] = self.after(known[before[0]], call(before[1]))[0]
        return known[way[0] if way else number]

    def _perform(self, core: Core, call: Call) -> _Outcome:
        requests = tuple(_call(core, call))
        entries = self._tape.take()
        if not isinstance(core, Worker):
            core.validate()
        return _Outcome(requests, entries)


def _call(core: Core, call: Call) -> Sequence[Request]:
    """Make a call, and return the requests of the core."""
    message = call.message
    if isinstance(core, Worker):
        match call.method:
            case "handle":
                assert isinstance(message, Message)
                return core.handle(message)
            case "request_sync":
                return core.request_sync(call.models)  # type: ignore[arg-type]
            case "push":
                return core.push(PushFlags(clip=call.clip))
            case _:
                result: Sequence[Request] = getattr(core, call.method)()
                return result
    sender = COORDINATOR if call.worker < 0 else worker_peer(call.worker)
    match call.method:
        case "handle":
            assert isinstance(message, Message)
            return core.handle(sender, message, call.now_ticks)
        case "fire":
            assert isinstance(message, Timer)
            return core.fire(message, call.now_ticks)
        case "connected" if isinstance(core, Server):
            return core.connected(call.worker, call.now_ticks)
        case "disconnected" if isinstance(core, Server):
            return core.disconnected(call.worker, call.now_ticks)
        case "disconnected" if isinstance(core, Coordinator):
            return core.disconnected(sender, call.now_ticks)
        case "admit" if isinstance(core, Coordinator):
            return core.admit(call.worker, call.now_ticks)
        case "report" if isinstance(core, Coordinator):
            assert isinstance(message, Message)
            return core.handle(Peer("server", call.worker), message, call.now_ticks)
        case _:
            raise InternalError(f"a core has no method {call.method}")


class Renaming:
    """Renames the workers in states.

    The states of cores are not inspected: a core is renamed by repeating the calls that led to its state, with
    renamed arguments. (A worker's core does not contain the name of the worker.)

    Args:
        names: the new names of the workers, in the order of their old names.
        cores: the interned cores of workers, servers and the coordinator.
        pools: the pools of the states of workers, servers and the coordinator.
    """

    def __init__(
        self,
        names: tuple[int, ...],
        cores: tuple[Interned[Worker], Interned[Server], Interned[Coordinator]],
        pools: tuple[StatePool[WorkerState], StatePool[ServerState], StatePool[CoordinatorState]],
    ) -> None:
        self._names = names
        self._former = sorted(range(len(names)), key=names.__getitem__)
        self._workers, self._servers, self._coordinators = cores
        self._worker_cores: dict[int, int] = {}
        self._server_cores: dict[int, int] = {}
        self._coordinator_cores: dict[int, int] = {}
        workers, servers, coordinators = pools
        self.worker = cache(lambda state: workers(self._worker(state)))
        self.server = cache(lambda state: servers(self._server(state)))
        self.coordinator = cache(lambda state: coordinators(self._coordinator(state)))

    def coordinator_core(self, number: int) -> int:
        """Return the number of the coordinator's core after the workers have been renamed."""
        return self._coordinators.renamed(number, self._call, self._coordinator_cores)

    def workers(self, states: tuple[WorkerState, ...]) -> tuple[WorkerState, ...]:
        """Return the states of the renamed workers, in the order of their new names."""
        worker = self.worker
        return tuple([worker(states[former]) for former in self._former])

    def _call(self, call: Call) -> Call:
        name = self._names[call.worker] if call.worker >= 0 else call.worker
        return replace(call, worker=name, message=self._message(call.message))

    def _message(self, message: Value) -> Value:
        """Return a message or a timer with the workers renamed."""
        match message:
            case Timer():
                return replace(message, worker=self._names[message.worker])
            case Commit():
                return replace(message, stop=self._flag(message.stop), change=self._flag(message.change))
            case PlanPublished():
                return replace(message, stop=self._flag(message.stop))
            case ChangePublished():
                return replace(message, change=self._flag(message.change))
            case _:
                return message

    def _flag(self, flag: Value) -> Value:
        if not isinstance(flag, Stop | Change):
            return flag
        members = tuple(sorted(self._names[member] for member in flag.members))
        return replace(flag, members=members)

    def _messages(self, queue: Iterable[Message]) -> tuple[Message, ...]:
        return tuple(self._message(message) for message in queue)

    def _queues(self, queues: tuple[tuple[Message, ...], ...]) -> tuple[tuple[Message, ...], ...]:
        return tuple(self._messages(queues[former]) for former in self._former)

    def _keys(self, keys: Iterable[Key]) -> list[Key]:
        return [(self._names[worker], iteration) for worker, iteration in keys]

    def _timers(self, timers: Iterable[Timer]) -> frozenset[Timer]:
        return frozenset(self._message(timer) for timer in timers)

    def _worker(self, state: WorkerState) -> WorkerState:
        core = self._workers.renamed(state.core, self._call, self._worker_cores)
        return replace(state, core=core, orders=self._messages(state.orders))

    def _server(self, state: ServerState) -> ServerState:
        view = state.view
        placed = (view.workers[former] for former in self._former)
        workers = tuple(worker._replace(stop=self._flag(worker.stop)) for worker in placed)
        return ServerState(
            core=self._servers.renamed(state.core, self._call, self._server_cores),
            view=view._replace(workers=workers, change=self._flag(view.change)),
            queues=self._queues(state.queues),
            owes=frozenset(self._names[worker] for worker in state.owes),
            timers=self._timers(state.timers),
            held=frozenset(self._keys(state.held)),
            means=frozenset(tuple(sorted(self._keys(mean))) for mean in state.means),
        )

    def _coordinator(self, state: CoordinatorState) -> CoordinatorState:
        return CoordinatorState(
            core=self.coordinator_core(state.core),
            queues=self._queues(state.queues),
            timers=self._timers(state.timers),
        )


class _Writer(pickle.Pickler):
    """Writes a core as bytes that only this process can read. Copying takes 55 to 70 % of the time of `copy.deepcopy`.

    Args:
        file: where the core is written.
        shared: receives the objects that a core and its copy share, because these objects never change.
    """

    def __init__(self, file: io.BytesIO, shared: list[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, thing: object) -> int | None:
        kind: type = type(thing)
        if not _is_shared(kind):
            return None
        self._shared.append(thing)
        return len(self._shared) - 1


class _Reader(pickle.Unpickler):
    """Reads what a `_Writer` has written. Since Python 3.13, `persistent_load` can only be a method."""

    def __init__(self, file: io.BytesIO, shared: list[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> object:
        return self._shared[number]


@cache
def _is_shared(kind: type) -> bool:
    """Return True if a core and its copy share the objects of a class."""
    return issubclass(kind, SHARED) or (issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen)


class Written:
    """A core as bytes, from which copies are read.

    Args:
        core: the core, which is not changed any more.
    """

    def __init__(self, core: object) -> None:
        file = io.BytesIO()
        self._shared: list[object] = []
        _Writer(file, self._shared).dump(core)
        self._bytes = file.getvalue()

    def copy(self) -> Any:
        """Return a copy of the core."""
        copied = _Reader(io.BytesIO(self._bytes), self._shared).load()
        if isinstance(copied, Server):
            for shard in copied.shards.values():
                shard.sync.bind_again()
        return copied
