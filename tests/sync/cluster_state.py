"""What a `Cluster` consists of, as values, and the pools in which there is one of each."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from paceline.core.job_sync import JobSync
from paceline.core.shard_sync import ShardSync
from paceline.sync.actions import AnyAction
from paceline.sync.events import AnyEvent, Change, PushReceived, Stop, WorkerJoined
from paceline.sync.model import Machine
from paceline.sync.spec_sync import Speculator
from paceline.sync.user_conditions import UserMachine

from .cluster_rules import Key, Told

__all__ = [
    "Coordinator",
    "Interned",
    "Message",
    "Order",
    "Pool",
    "Renaming",
    "Shard",
    "State",
    "Step",
    "Worker",
]

Item = TypeVar("Item")
Host = TypeVar("Host", bound=Machine)
MOST_WORKERS = 4
"""In one cluster."""

Flag = TypeVar("Flag", Stop | None, Change | None, Stop | Change | Literal["restart"])


def pooled(kind: type[Item]) -> type[Item]:
    """For tuples of which a `Pool` keeps one for each value: equal ones are the same one, which is quick to tell."""
    kind.__hash__ = object.__hash__  # type: ignore[method-assign]
    kind.__eq__ = object.__eq__  # type: ignore[method-assign]
    return kind


class Message(NamedTuple):
    """What a worker sends to a shard or to the coordinator. A "commit" is a push and its pull."""

    kind: Literal[
        "join", "push", "pull", "commit", "repeat", "notify", "start", "request", "finish", "loss", "timer"
    ]
    iteration: int = 0
    stop: Stop | None = None
    change: Change | None = None
    progress: int | None = None  # of a push, the round to go on from; of a late joining, its c_p


class Order(NamedTuple):
    """What the coordinator sends to a worker: of a plan and a restart also the iteration."""

    what: Stop | Change | Literal["restart"]
    iteration: int = 0


@pooled
class Shard(NamedTuple):
    """One shard, what is on the way to it, and what it owes."""

    machine: int  # its number in `Cluster._machines`
    told: Told
    queues: tuple[tuple[Message, ...], ...]  # of each worker
    owes: frozenset[int] = frozenset()  # workers that wait for an answer of this shard
    timers: frozenset[Key] = frozenset()
    held: frozenset[Key] = frozenset()
    means: frozenset[tuple[Key, ...]] = frozenset()


@pooled
class Coordinator(NamedTuple):
    """The coordinator and what is on the way to it."""

    machine: int  # its number in `Cluster._jobs`
    queues: tuple[tuple[Message, ...], ...]
    notified: tuple[int, ...]  # iterations that it has heard of; -1 for a worker that is not live there
    timers: frozenset[Key] = frozenset()


@pooled
class Worker(NamedTuple):
    """A worker, as it sees itself."""

    phase: Literal["absent", "computing", "waiting", "finished", "lost"]
    iteration: int = 0
    sync: str = ""  # the model in force, for it
    first: bool = True  # its first iteration under that model is yet to start
    anew: bool = False  # it has started this iteration anew
    planned: Order | None = None  # it stops with its first push at or past this
    change: Change | None = None  # to flag its next push with
    changed: int = 0  # the last one that it has flagged a push with
    progress: int | None = None  # the latest round that a shard has told it to go on from
    heard_not: tuple[Order, ...] = ()  # on the way to it


class State(NamedTuple):
    """Everything."""

    workers: tuple[Worker, ...]
    shards: tuple[Shard, ...]
    coordinator: Coordinator
    losses: int  # that may yet happen
    asked: int = 0  # changes that somebody has asked for


Step = tuple[str, Callable[[], State]]
"""What happens, in words that begin with the actor, and what comes of it."""


class Pool(Generic[Item]):
    """One object for each value, so that telling two apart is quick; `number` is in order of appearance."""

    def __init__(self) -> None:
        self._by_value: dict[Hashable, Item] = {}
        self.number: dict[Item, int] = {}

    def __call__(self, item: Item) -> Item:
        known = self._by_value.setdefault(tuple(item), item)  # type: ignore[arg-type]
        if known is item:
            self.number[item] = len(self.number)
        return known


class Interned(Generic[Host]):
    """The states that hosts of one kind have been in so far, by number."""

    def __init__(self) -> None:
        self._hosts: list[Host] = []
        self._number: dict[Hashable, int] = {}
        self._next: dict[tuple[int, AnyEvent], tuple[int, list[AnyAction]]] = {}
        self._came_from: list[tuple[int, AnyEvent] | None] = []

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def after(self, number: int, event: AnyEvent) -> tuple[int, list[AnyAction]]:
        """What becomes of the host when it takes an event, and its answer."""
        key = number, event
        if key not in self._next:
            host = _copied(self._hosts[number])
            actions = host.handle(event)
            host.validate()
            self._next[key] = self.add(host, key), actions
        return self._next[key]

    def add(self, host: Host, came_from: tuple[int, AnyEvent] | None = None) -> int:
        number = self._number.setdefault(_frozen(host), len(self._hosts))
        if number == len(self._hosts):
            self._hosts.append(host)
            self._came_from.append(came_from)
        return number

    def difference(self) -> str:
        """What a host does otherwise than the one that it is taken for; "" if none does.

        For small jobs that nobody joins late: it takes each for itself.
        """
        events: dict[int, list[AnyEvent]] = {}
        for number, event in self._next:
            events.setdefault(number, []).append(event)
        todo = [(0, self._hosts[0])]
        known = {_frozen(self._hosts[0], whole=True)}
        while todo:
            number, host = todo.pop()
            is_first = _frozen(host, whole=True) == _frozen(self._hosts[number], whole=True)
            for event in events.get(number, []):
                if isinstance(event, WorkerJoined) and not is_first:
                    continue  # somebody has left meanwhile
                after = _copied(host)
                actions = after.handle(event)
                then, expected = self._next[number, event]
                if actions != expected or self._number[_frozen(after)] != then:
                    return f"{actions} after {event}, not {expected}"
                if (whole := _frozen(after, whole=True)) not in known:
                    known.add(whole)
                    todo.append((then, after))
        return ""

    def renamed(self, number: int, event: Callable[[AnyEvent], AnyEvent], known: dict[int, int]) -> int:
        """What would have become of the host, had every event on its way been another one."""
        way = []
        while number not in known:
            before = self._came_from[number]
            if before is None:
                known[number] = number  # nobody is there yet
            else:
                way.append(number)
                number = before[0]
        for number in reversed(way):
            before = self._came_from[number]
            assert before is not None
            known[number] = self.after(known[before[0]], event(before[1]))[0]
        return known[way[0] if way else number]


class Memo(dict[Item, Item]):
    """What a function makes of each item."""

    def __init__(self, of: Callable[[Item], Item]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, item: Item) -> Item:
        self[item] = value = self._of(item)
        return value


class Renaming:
    """Everything as it would be if the workers had other names.

    The states of machines are not looked into: one is renamed by going the way there anew, with renamed events.

    Args:
        names: the new one of each worker.
    """

    def __init__(
        self,
        names: tuple[int, ...],
        machines: Interned[ShardSync],
        jobs: Interned[JobSync],
        shards: Pool[Shard],
        workers: Pool[Worker],
        coordinators: Pool[Coordinator],
    ) -> None:
        self._names = names
        self._former = sorted(range(len(names)), key=names.__getitem__)
        self._machines, self._jobs = machines, jobs
        self._machine: dict[int, int] = {}
        self._job: dict[int, int] = {}
        self.shard: Memo[Shard] = Memo(lambda shard: shards(self._shard(shard)))
        self.worker: Memo[Worker] = Memo(lambda worker: workers(self._worker(worker)))
        self.coordinator: Memo[Coordinator] = Memo(lambda at: coordinators(self._coordinator(at)))

    def job(self, number: int) -> int:
        return self._jobs.renamed(number, self._event, self._job)

    def workers(self, workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
        worker = self.worker
        return tuple([worker[workers[former]] for former in self._former])

    def _placed(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(items[former] for former in self._former)

    def _event(self, event: AnyEvent) -> AnyEvent:
        event = msgspec.structs.replace(event, worker=self._names[event.worker])
        if isinstance(event, PushReceived):
            event = msgspec.structs.replace(
                event, stop=self._flag(event.stop), change=self._flag(event.change)
            )
        return event

    def _flag(self, flag: Flag) -> Flag:
        if not isinstance(flag, Stop | Change):
            return flag
        members = tuple(sorted(self._names[member] for member in flag.members))
        return msgspec.structs.replace(flag, members=members)

    def _order(self, order: Order) -> Order:
        return order._replace(what=self._flag(order.what))

    def _queues(self, queues: tuple[tuple[Message, ...], ...]) -> tuple[tuple[Message, ...], ...]:
        return tuple(
            tuple(m._replace(stop=self._flag(m.stop), change=self._flag(m.change)) for m in queue)
            for queue in self._placed(queues)
        )

    def _keys(self, keys: Iterable[Key]) -> Iterator[Key]:
        return ((self._names[worker], iteration) for worker, iteration in keys)

    def _worker(self, worker: Worker) -> Worker:
        return worker._replace(
            planned=self._order(worker.planned) if worker.planned is not None else None,
            change=self._flag(worker.change),
            heard_not=tuple(map(self._order, worker.heard_not)),
        )

    def _shard(self, shard: Shard) -> Shard:
        told = shard.told
        seen = tuple(its._replace(stop=self._flag(its.stop)) for its in self._placed(told.seen))
        return Shard(
            machine=self._machines.renamed(shard.machine, self._event, self._machine),
            told=told._replace(seen=seen, change=self._flag(told.change)),
            queues=self._queues(shard.queues),
            owes=frozenset(self._names[worker] for worker in shard.owes),
            timers=frozenset(self._keys(shard.timers)),
            held=frozenset(self._keys(shard.held)),
            means=frozenset(tuple(sorted(self._keys(mean))) for mean in shard.means),
        )

    def _coordinator(self, at: Coordinator) -> Coordinator:
        return Coordinator(
            machine=self.job(at.machine),
            queues=self._queues(at.queues),
            notified=self._placed(at.notified),
            timers=frozenset(self._keys(at.timers)),
        )


def _copied(host: Host) -> Host:
    """A copy; a user's conditions, which report to the machine that they were made for, are made anew."""
    host = copy.deepcopy(host)
    machine = host._machine if isinstance(host, ShardSync) else None
    if isinstance(machine, UserMachine) and isinstance(host, ShardSync):
        fresh = host.sync.at_shard()
        kept = {key: value for key, value in vars(machine).items() if not key.endswith("_condition")}
        vars(fresh).update(kept)
        host._machine = fresh
    return host


def _frozen(thing: object, whole: bool = False) -> Hashable:
    """A value that is equal for equal states; unless whole, also for those of which the same will come."""
    match thing:
        case dict():
            return frozenset((key, _frozen(value, whole)) for key, value in thing.items())
        case list() | tuple() | deque():
            return tuple(_frozen(value, whole) for value in thing)
        case set():
            return frozenset(thing)
        case types.FunctionType() | types.MethodType():
            return None  # a condition: it does not change
        case Speculator() if not whole:
            return type(thing).__name__, _frozen(_outlook(thing))
        case _ if hasattr(thing, "__dict__"):
            own = (
                (key, frozenset(value) if key in ("held", "_held") else _frozen(value, whole))
                for key, value in vars(thing).items()
                if key != "_former"
            )
            return type(thing).__name__, frozenset(own)
        case _:
            assert isinstance(thing, Hashable)
            return thing


def _outlook(speculator: Speculator) -> dict[str, object]:
    """What decides which restarts it orders: how many pushes there were since a start, if that is still watched.

    More than enough are as good as enough.
    """
    workers = {}
    assert len(speculator._workers) <= MOST_WORKERS
    for worker, its in speculator._workers.items():
        since = None
        if its.speculation is not None:
            enough = int(MOST_WORKERS * its.speculation.abort_rate) + 1
            since = min(speculator._push_count - its.pushes_before, enough)
        workers[worker] = its.iteration, its.start_s, its.last, its.speculation, since
    own = {key: value for key, value in vars(speculator).items() if key not in ("_push_count", "_workers")}
    return own | {"_workers": workers}
