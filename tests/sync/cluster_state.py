"""What a `Cluster` consists of, as values, and the pools in which there is one of each."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Literal, NamedTuple, TypeVar

from paceline.sync.actions import AnyAction
from paceline.sync.changes import ShardSync
from paceline.sync.events import AnyEvent, Change, Stop
from paceline.sync.model import Machine
from paceline.sync.user_conditions import UserMachine

from .cluster_rules import Key, Told

__all__ = ["Coordinator", "Interned", "Message", "Order", "Pool", "Shard", "State", "Step", "Worker"]

Item = TypeVar("Item")
Host = TypeVar("Host", bound=Machine)


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

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def after(self, number: int, event: AnyEvent) -> tuple[int, list[AnyAction]]:
        """What becomes of the host when it takes an event, and its answer."""
        key = number, event
        if key not in self._next:
            host = _copied(self._hosts[number])
            actions = host.handle(event)
            host.validate()
            self._next[key] = self.add(host), actions
        return self._next[key]

    def add(self, host: Host) -> int:
        number = self._number.setdefault(_frozen(host), len(self._hosts))
        if number == len(self._hosts):
            self._hosts.append(host)
        return number


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


def _frozen(thing: object) -> Hashable:
    """A value that is equal for equal states."""
    match thing:
        case dict():
            return frozenset((key, _frozen(value)) for key, value in thing.items())
        case list() | tuple() | deque():
            return tuple(map(_frozen, thing))
        case set():
            return frozenset(thing)
        case types.FunctionType() | types.MethodType():
            return None  # a condition: it does not change
        case _ if hasattr(thing, "__dict__"):
            own = ((key, _frozen(value)) for key, value in vars(thing).items() if key != "_former")
            return type(thing).__name__, frozenset(own)
        case _:
            assert isinstance(thing, Hashable)
            return thing
