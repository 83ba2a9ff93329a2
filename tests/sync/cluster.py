"""A whole job in miniature: workers, channels, shards and the planner, as one immutable state with its next steps.

Messages of one worker to one peer keep their order; everything else happens in any order, which is what a network
and a scheduler may do. A step is one of: a worker joins, pushes or dies; a shard or the planner takes the next
message of one worker, or hears that it is gone. A plan may arrive late: a worker may or may not have heard of the one
that was made for it when it pushes. Every check is made on the way, out of what a shard has been told and never out
of the machine's own state:

- who waits at a shard is exactly who must, by the model's admission rule;
- each push is applied, averaged or dropped exactly once;
- when nothing more can happen, everybody who was not lost has done all iterations (no deadlock), and the shards have
  averaged the same pushes together.

Machines are interned: each state of a machine is made once, and its answer to each event is computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from paceline.sync import Machine, SyncModel
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    PublishPlan,
)
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    Stop,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

from .world import freeze

Item = TypeVar("Item")

Key = tuple[int, int]
"""A push: (worker, iteration)."""


class Message(NamedTuple):
    """What a worker sends to a shard or, as "notify", to the planner. A "commit" is a push and its pull."""

    kind: Literal["join", "push", "pull", "commit", "notify", "finish", "loss"]
    iteration: int = 0
    stop: Stop | None = None


class Worker(NamedTuple):
    """A worker, as it sees itself."""

    phase: Literal["absent", "computing", "waiting", "finished", "lost"]
    iteration: int = 0
    awaited: frozenset[int] = frozenset()  # shards that have yet to answer
    planned: tuple[int, Stop] | None = (
        None  # the plan to follow: it stops with its first push at or past this
    )


class Seen(NamedTuple):
    """What one shard has been told of one worker."""

    state: Literal["unknown", "live", "left"] = "unknown"
    pushed: int = 0  # c_p
    asks: bool = False  # its last pull has not been answered
    stop: Stop | None = None  # the flag of its last push
    last_stop: int = -1  # the latest superstep that it has flagged a push for


class Shard(NamedTuple):
    """One shard."""

    machine: int  # its number in `Cluster._machines`
    seen: tuple[Seen, ...]
    held: frozenset[Key] = frozenset()
    means: frozenset[tuple[Key, ...]] = frozenset()


class State(NamedTuple):
    """Everything."""

    workers: tuple[Worker, ...]
    to_shard: tuple[tuple[tuple[Message, ...], ...], ...]  # [worker][shard]: on the way
    to_planner: tuple[tuple[Message, ...], ...]  # [worker]
    shards: tuple[Shard, ...]
    planner: int  # its number in `Cluster._planners`
    notified: tuple[
        int, ...
    ]  # iterations that the planner has heard of; -1 for a worker that is not live there
    losses: int  # that may yet happen


Step = tuple[str, Callable[[], State]]
"""What happens, in words that begin with the actor, and what comes of it."""

MustWait = Callable[[tuple[Seen, ...]], set[int]]
"""What one shard has been told -> the workers that must wait there."""


class Interned:
    """The states that one machine has been in so far, by number."""

    def __init__(self, first: Machine) -> None:
        self._machines: list[Machine] = []
        self._number: dict[Hashable, int] = {}
        self._next: dict[tuple[int, AnyEvent], tuple[int, list[AnyAction]]] = {}
        self.first = self._intern(first)

    def after(self, number: int, event: AnyEvent) -> tuple[int, list[AnyAction]]:
        """What becomes of the machine when it takes an event, and its answer."""
        key = number, event
        if key not in self._next:
            machine = copy.deepcopy(self._machines[number])
            actions = machine.handle(event)
            machine.validate()
            self._next[key] = self._intern(machine), actions
        return self._next[key]

    def _intern(self, machine: Machine) -> int:
        number = self._number.setdefault(freeze(machine), len(self._machines))
        if number == len(self._machines):
            self._machines.append(machine)
        return number


class Cluster:
    """One job.

    Args:
        sync: the sync model.
        must_wait: its admission rule.
        workers: who is there from the start.
        shards: how many shards.
        iterations: of each worker.
        late: workers that join at any time.
        losses: how many workers may be lost.
        commits: a push and its pull arrive together, as live hosts send them; otherwise one by one.
        any_plan: take the planner's word for *whether* there is a plan, and allow every stop that it could have
            named; otherwise its plans are followed as they are. The clock is `now_s`, which the caller may move.
        agree: check that the shards have averaged the same pushes together.
    """

    def __init__(
        self,
        sync: SyncModel,
        must_wait: MustWait,
        *,
        workers: int,
        shards: int,
        iterations: int,
        late: int = 0,
        losses: int = 0,
        commits: bool = False,
        any_plan: bool = False,
        agree: bool = True,
    ) -> None:
        self.now_s = 0.0
        self._must_wait = must_wait
        self._agree = agree
        self._iterations = iterations
        self._commits = commits
        self._any_plan = any_plan
        self._everywhere = frozenset(range(shards))
        self._machines = Interned(sync.at_shard())
        self._shard_after: dict[tuple[float, Shard, int, Message], tuple[Shard, list[int]]] = {}
        planner = sync.at_coordinator()
        self._planners = Interned(planner) if planner is not None else None
        everybody = range(workers + late)
        seen = tuple(Seen() for _ in everybody)
        state = State(
            workers=tuple(Worker("absent") for _ in everybody),
            to_shard=tuple(tuple(() for _ in range(shards)) for _ in everybody),
            to_planner=tuple(() for _ in everybody),
            shards=tuple(Shard(self._machines.first, seen) for _ in range(shards)),
            planner=self._planners.first if self._planners is not None else -1,
            notified=tuple(-1 for _ in everybody),
            losses=losses,
        )
        for worker in range(workers):
            state = self._join(state, worker)
            for shard in range(shards):
                state = self._deliver_to_shard(state, worker, shard)
            if self._planners is not None:
                state = self._deliver_to_planner(state, worker)
        self.first = state

    def steps(self, state: State) -> tuple[list[Step], list[Step]]:
        """All that may happen next, and the losses that may."""
        return list(self._steps(state)), list(self._losses(state))

    def check_end(self, state: State) -> None:
        """No step is left: that must be because all is done."""
        for worker, its in enumerate(state.workers):
            assert its.phase in ("finished", "lost"), f"deadlock: worker {worker} is {its}"
        for shard in state.shards:
            assert not shard.held, f"nobody will ever apply {shard.held}"
        if not self._agree:
            return
        survivors = {w for w, its in enumerate(state.workers) if its.phase == "finished"}
        joint = []
        for shard in state.shards:
            kept = (tuple(key for key in mean if key[0] in survivors) for mean in shard.means)
            joint.append({mean for mean in kept if mean})
        assert all(groups == joint[0] for groups in joint), f"shards have averaged different pushes: {joint}"

    # -- steps --------------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[Step]:
        for worker, its in enumerate(state.workers):
            if its.phase == "absent":
                yield f"worker {worker} joins", partial(self._join, state, worker)
            elif its.phase == "computing":
                yield f"worker {worker} pushes {its.iteration}", partial(self._push, state, worker, None)
                if its.planned is not None and its.iteration >= its.planned[0]:
                    label = f"worker {worker} stops with {its.iteration}"
                    yield label, partial(self._push, state, worker, its.planned[1])
            for shard, queue in enumerate(state.to_shard[worker]):
                if queue:
                    label = f"shard {shard} takes {_text(queue[0])} of worker {worker}"
                    yield label, partial(self._deliver_to_shard, state, worker, shard)
            if state.to_planner[worker]:
                label = f"the planner takes {_text(state.to_planner[worker][0])} of worker {worker}"
                yield label, partial(self._deliver_to_planner, state, worker)
            if its.phase == "lost":
                yield from self._connections_end(state, worker)

    def _losses(self, state: State) -> Iterator[Step]:
        for worker, its in enumerate(state.workers):
            if state.losses and its.phase in ("computing", "waiting"):
                yield f"worker {worker} is lost", partial(self._lose, state, worker)

    def _lose(self, state: State, worker: int) -> State:
        workers = _put(state.workers, worker, Worker("lost"))
        return state._replace(workers=workers, losses=state.losses - 1)

    def _join(self, state: State, worker: int) -> State:
        its = Worker("waiting", awaited=self._everywhere)
        state = state._replace(workers=_put(state.workers, worker, its))
        return self._send(state, worker, Message("join"), Message("join"))

    def _push(self, state: State, worker: int, stop: Stop | None) -> State:
        its = state.workers[worker]
        iteration = its.iteration
        its = Worker("waiting", iteration + 1, self._everywhere, its.planned if stop is None else None)
        state = state._replace(workers=_put(state.workers, worker, its))
        notify = Message("notify", iteration, stop)
        if self._commits:
            return self._send(state, worker, Message("commit", iteration, stop), notify)
        state = self._send(state, worker, Message("push", iteration, stop), notify)
        return self._send(state, worker, Message("pull", iteration), None)

    def _send(self, state: State, worker: int, to_shards: Message, to_planner: Message | None) -> State:
        queues = tuple((*queue, to_shards) for queue in state.to_shard[worker])
        state = state._replace(to_shard=_put(state.to_shard, worker, queues))
        if to_planner is not None and self._planners is not None:
            notifies = (*state.to_planner[worker], to_planner)
            state = state._replace(to_planner=_put(state.to_planner, worker, notifies))
        return state

    def _connections_end(self, state: State, worker: int) -> Iterator[Step]:
        """A worker is dead: what has not been delivered of its messages never is."""
        for shard, at in enumerate(state.shards):
            if at.seen[worker].state == "live" or state.to_shard[worker][shard]:
                label = f"shard {shard} hears no more of worker {worker}"
                yield label, partial(self._end_at_shard, state, worker, shard)
        ends = (Message("loss"),) if state.notified[worker] >= 0 else ()
        if self._planners is not None and state.to_planner[worker] != ends:
            to_planner = _put(state.to_planner, worker, ends)
            label = f"the planner hears no more of worker {worker}"
            yield label, partial(state._replace, to_planner=to_planner)

    def _end_at_shard(self, state: State, worker: int, shard: int) -> State:
        queues = _put(state.to_shard[worker], shard, ())
        state = state._replace(to_shard=_put(state.to_shard, worker, queues))
        if state.shards[shard].seen[worker].state != "live":
            return state  # it was lost before this shard had heard of it
        return self._tell_shard(state, worker, shard, Message("loss"))

    # -- at a shard ---------------------------------------------------------------------------------------

    def _deliver_to_shard(self, state: State, worker: int, shard: int) -> State:
        message, *rest = state.to_shard[worker][shard]
        queues = _put(state.to_shard[worker], shard, tuple(rest))
        state = state._replace(to_shard=_put(state.to_shard, worker, queues))
        if message.kind == "commit":
            state = self._tell_shard(state, worker, shard, message._replace(kind="push"))
            message = message._replace(kind="pull")
        return self._tell_shard(state, worker, shard, message)

    def _tell_shard(self, state: State, worker: int, shard: int, message: Message) -> State:
        key = self.now_s, state.shards[shard], worker, message
        if key not in self._shard_after:
            self._shard_after[key] = self._take(state.shards[shard], worker, message)
        at, answered = self._shard_after[key]
        state = state._replace(shards=_put(state.shards, shard, at))
        for other in answered:
            state = self._answer(state, other, shard)
        return state

    def _take(self, at: Shard, worker: int, message: Message) -> tuple[Shard, list[int]]:
        """What becomes of a shard that takes one message, and whom it answers."""
        its = at.seen[worker]
        now_s, iteration = self.now_s, message.iteration
        event: AnyEvent
        match message.kind:
            case "join":
                event = WorkerJoined(now_s=now_s, worker=worker)
                slowest = min((other.pushed for other in at.seen if other.state == "live"), default=0)
                its = Seen("live", slowest)
            case "push":
                event = PushReceived(now_s=now_s, worker=worker, iteration=iteration, stop=message.stop)
                its = its._replace(pushed=its.pushed + 1, stop=message.stop)
                if message.stop is not None:
                    its = its._replace(last_stop=message.stop.superstep)
            case "pull":
                event = PullRequested(now_s=now_s, worker=worker, iteration=iteration)
                its = its._replace(asks=True)
            case "finish":
                event, its = WorkerFinished(now_s=now_s, worker=worker), Seen("left")
            case _:
                event, its = WorkerLost(now_s=now_s, worker=worker), Seen("left")
        machine, actions = self._machines.after(at.machine, event)
        at, answered = self._perform(at._replace(seen=_put(at.seen, worker, its)), event, actions)
        if message.kind == "join":
            answered.append(worker)  # with the first weights
        return at._replace(machine=machine), answered

    def _perform(self, at: Shard, event: AnyEvent, actions: list[AnyAction]) -> tuple[Shard, list[int]]:
        seen, held, means = list(at.seen), set(at.held), set(at.means)
        answered: list[int] = []
        fates = 0
        for action in actions:
            match action:
                case ApplyPush(worker, iteration) | DropPush(worker, iteration) | HoldPush(worker, iteration):
                    assert isinstance(event, PushReceived)
                    assert (worker, iteration) == (event.worker, event.iteration), f"{action} after {event}"
                    fates += 1
                    if isinstance(action, HoldPush):
                        held.add((worker, iteration))
                case ApplyMean(pushes):
                    assert held >= set(pushes), f"{action} of pushes that are not held: {held}"
                    held -= set(pushes)
                    means.add(pushes)
                case AnswerPull(worker, iteration):
                    assert seen[worker].asks, f"{action}, which was not asked for"
                    assert (worker, iteration) not in held, f"{action} before its push was applied"
                    seen[worker] = seen[worker]._replace(asks=False)
                    answered.append(worker)
                case PublishPlan():
                    raise AssertionError(f"a shard cannot {action}")
        assert fates == isinstance(event, PushReceived), f"{event} was dealt with {fates} times"
        waiting = {worker for worker, its in enumerate(seen) if its.asks}
        must_wait = self._must_wait(tuple(seen))
        assert waiting == must_wait, f"at a shard {waiting} wait and {must_wait} must, after {event}"
        at = at._replace(seen=tuple(seen), held=frozenset(held), means=frozenset(means))
        return at, answered

    def _answer(self, state: State, worker: int, shard: int) -> State:
        """One shard's weights reach a worker; with the last of them it goes on, or leaves if it has done its work."""
        its = state.workers[worker]
        if its.phase == "lost":
            return state
        its = its._replace(awaited=its.awaited - {shard})
        if its.awaited:
            return state._replace(workers=_put(state.workers, worker, its))
        if its.iteration < self._iterations:
            return state._replace(workers=_put(state.workers, worker, its._replace(phase="computing")))
        state = state._replace(workers=_put(state.workers, worker, Worker("finished")))
        return self._send(state, worker, Message("finish"), Message("finish"))

    # -- at the planner -----------------------------------------------------------------------------------

    def _deliver_to_planner(self, state: State, worker: int) -> State:
        message, *rest = state.to_planner[worker]
        now_s = self.now_s
        event: AnyEvent
        match message.kind:
            case "join":
                event, heard = WorkerJoined(now_s=now_s, worker=worker), 0
            case "notify":
                superstep = message.stop.superstep if message.stop is not None else None
                event = IterationFinished(
                    now_s=now_s, worker=worker, iteration=message.iteration, superstep=superstep
                )
                heard = message.iteration + 1
            case "finish":
                event, heard = WorkerFinished(now_s=now_s, worker=worker), -1
            case _:
                event, heard = WorkerLost(now_s=now_s, worker=worker), -1
        assert self._planners is not None
        planner, actions = self._planners.after(state.planner, event)
        state = state._replace(
            to_planner=_put(state.to_planner, worker, tuple(rest)),
            planner=planner,
            notified=_put(state.notified, worker, heard),
        )
        for action in actions:
            assert isinstance(action, PublishPlan)
            stop = Stop(superstep=action.plan.superstep, members=action.plan.members)
            for member, iteration in action.plan.stops:
                its = state.workers[member]
                assert its.planned is None, f"worker {member} has two plans to follow"
                assert iteration >= state.notified[member], f"worker {member} is past {action.plan} already"
                if its.phase in ("computing", "waiting"):  # otherwise nobody hears of it
                    its = its._replace(planned=(0 if self._any_plan else iteration, stop))
                    state = state._replace(workers=_put(state.workers, member, its))
        return state


def explore(cluster: Cluster, most_states: int = 5_000_000) -> int:
    """Visit every state that can be reached; return how many there are.

    A check that fails is raised with the steps that led there.
    """
    came_from: dict[State, tuple[State, str] | None] = {cluster.first: None}
    todo = [cluster.first]
    while todo:
        state = todo.pop()
        try:
            steps, losses = cluster.steps(state)
            if not steps:
                cluster.check_end(state)
            following = [(label, take()) for label, take in steps + losses]
        except Exception as error:
            raise AssertionError("\n".join([*_way_to(state, came_from), repr(error)])) from error
        for label, after in following:
            if after not in came_from:
                came_from[after] = state, label
                todo.append(after)
        assert len(came_from) <= most_states, "too big to be searched whole"
    return len(came_from)


def nobody(seen: tuple[Seen, ...]) -> set[int]:
    """ASP: nobody waits."""
    return set()


def more_ahead_than(staleness: float) -> MustWait:
    """SSP: whoever asks with c_p - min c > s waits."""

    def must_wait(seen: tuple[Seen, ...]) -> set[int]:
        slowest = min((its.pushed for its in seen if its.state == "live"), default=0)
        return {worker for worker, its in enumerate(seen) if its.asks and its.pushed - slowest > staleness}

    return must_wait


def stopped(seen: tuple[Seen, ...]) -> set[int]:
    """ElasticBSP: whoever has stopped waits for the live members that have not."""
    return {
        worker
        for worker, its in enumerate(seen)
        if its.asks
        and its.stop is not None
        and any(
            seen[member].state == "live" and seen[member].last_stop < its.stop.superstep
            for member in its.stop.members
        )
    }


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _text(message: Message) -> str:
    flag = f", the last of superstep {message.stop.superstep}" if message.stop is not None else ""
    return f"{message.kind} {message.iteration}{flag}"


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    labels: list[str] = []
    link = came_from[state]
    while link is not None:
        before, label = link
        labels.append(label)
        link = came_from[before]
    return labels[::-1]
