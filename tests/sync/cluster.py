"""A whole job in miniature: workers, channels, shards and the coordinator, as one immutable state with its next
steps.

Each shard hosts a `ShardSync` and the coordinator a `JobSync`, as the live hosts do. Messages of one peer to another
keep their order; everything else happens in any order, which is what a network and a scheduler may do. A step is one
of: a worker joins, pushes, dies, asks for another sync model or starts an iteration anew; a shard or the coordinator
takes the next message of one worker, or hears that it is gone; a timer fires. There is no time: a timer may fire at
any later step, and a worker may or may not have heard what the coordinator has sent it when it pushes. Every check is
made on the way, out of what a shard has been told and never out of a machine's own state:

- who waits at a shard is who must, or may, by the admission rule of the model in force (see `cluster_rules`);
- each push is applied, averaged or dropped exactly once;
- an iteration is started anew at most once; a shard has the model in force that the flags it has seen say;
- when nothing more can happen, everybody who was not lost has done all iterations (no deadlock), the shards have
  passed all changes that a survivor has passed, and have averaged the same pushes together.

What keeps the number of states small, and why nothing is missed:

- *Commits.* A push and its pull arrive together, as live hosts send them. `commits=False` has them arrive one by one.
- *What is sent to a worker is heard when it pushes.* What it hears changes only its next push, or starts the
  iteration anew; so it may as well hear it then, and each number of messages is tried. A restart that comes too late
  is ignored whenever it is heard, and is forgotten at once.
- *Losses while waiting* (as the next ones, in `reduced_steps`). A worker that dies before a push is one that dies
  after it, with nothing delivered; so only those that wait die.
- *Pushes at once.* If no word of the coordinator can reach a worker any more, nothing that happens before its push
  changes the push, so it comes first.
- *One shard first.* If a shard owes an answer to every worker that may still push, nobody can send it more than is on
  the way until it takes a step itself. If nobody can be lost any more either, all else that may happen commutes with
  the steps of that shard, so only these are followed. (This is a persistent set; there are no cycles, since each step
  uses something up.) A shard is checked by what it has been told alone, so each of its checks is made all the same.
- *Stale timers.* One that would do nothing never does anything again under the same model, and is forgotten where the
  model does not change.
- *Deliveries at once* (`_in_any_order`; ElasticBSP and SpecSync, nobody late, no changes). What two workers send to
  a shard may be taken in either order: the same comes of it, and neither keeps the other from anything. So a shard
  takes a message at once, unless its sender is lost just then (or has been, and it may be dropped). A loss that comes
  later commutes with all between it and the push: nobody listens to the answers. That the order is of no matter is
  tested for itself, in every state of small jobs.
- *Notifications at once, and patience* (`_apart`; SpecSync upon ASP). There a push is felt by the others only when
  the coordinator takes its notification. A restart that the coordinator orders in between is ignored, as is one that
  is not heard before the push. So the push may as well come right before the notification is taken, and after all
  that the coordinator takes of this worker before; if a worker is lost before that, nobody feels the push at all.
- *Shards in no order* (`canonical`). Those of one model that draw the same numbers differ in name only.
- *Workers' names* (`canonical`). Workers differ in name only, too, unless the model draws for each, or breaks ties by
  name, as plans do that are followed as they are, or somebody is late. Of all states that differ in names one is
  kept. A machine is renamed without a look into it: by going the way to it anew, with renamed events.
- *Shards that all have left* (where deliveries come at once). What these know is of no use to anybody.
- *Means.* One that all shards have applied says nothing about their agreement, and is forgotten. (No push is in two
  means, so no two means can be mistaken for each other.)
- *Machines* are interned: each state of a machine is made once, and its answer to each event is computed once. The
  order of a dict reaches at most the order of answers within one event, the labels of those who have left matter
  only to somebody who joins anew, and held pushes are summed in worker order: none of these tells two states apart.
  Of SpecSync's coordinator only that is kept which may yet decide a restart: how many pushes came since a start that
  is still watched, counted no further than enough. That the same follows is tested for itself, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import permutations, product
from typing import TypeVar

from paceline.core.job_sync import JobSync
from paceline.core.shard_sync import ShardSync
from paceline.sync import ASP, BSP, SSP, AnySyncModel, ElasticBSP, SpecSync, SyncModel, parse
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    PublishChange,
    PublishPlan,
    ReportFault,
    RestartWorker,
    SetTimer,
)
from paceline.sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from paceline.sync.notation import notation
from paceline.sync.notation import parse_shards as read_shards

from .cluster_rules import Admission, Key, Seen, Told, admission, more_ahead_than, nobody, stopped
from .cluster_state import Coordinator, Interned, Message, Order, Pool, Renaming, Shard, State, Step, Worker

__all__ = ["Cluster", "MustWait", "State", "more_ahead_than", "nobody", "stopped"]

parse_shards = cache(read_shards)

Item = TypeVar("Item")

Answer = tuple[int, int | None]
"""To a worker, with the round to go on from, if its push came too late."""

MustWait = Admission
"""An admission rule."""


class Cluster:
    """One job.

    Args:
        sync: the sync model, or one for each shard.
        rule: the admission rule, where it is not that of `admission(sync)`.
        workers: who is there from the start.
        shards: how many shards.
        iterations: of each worker.
        late: workers that join at any time.
        losses: how many workers may be lost.
        changes: the sync models that workers ask for, one after another, at any time.
        seed: the run's.
        commits: a push and its pull arrive together, as live hosts send them; otherwise one by one.
        any_plan: take the planner's word for *whether* there is a plan, and allow every stop that it could have
            named; otherwise its plans are followed as they are. The clock is `now_s`, which the caller may move.
        agree: check that the shards have averaged the same pushes together.
        shard_host: what hosts the model at a shard.
        watch: check at each shard who waits and which model is in force.
    """

    def __init__(
        self,
        sync: SyncModel | Sequence[AnySyncModel],
        rule: Admission | None = None,
        *,
        workers: int,
        shards: int,
        iterations: int,
        late: int = 0,
        losses: int = 0,
        changes: Sequence[str] = (),
        seed: int = 0,
        commits: bool = False,
        any_plan: bool = False,
        agree: bool = True,
        shard_host: Callable[[AnySyncModel, int, int], ShardSync] = ShardSync,
        watch: bool = True,
    ) -> None:
        self.now_s = 0.0
        self._rule = rule
        self._agree = agree
        self._watch = watch
        self._iterations = iterations
        self._commits = commits
        self._any_plan = any_plan
        self._changes = tuple(changes)
        models: tuple[AnySyncModel, ...]
        if isinstance(sync, SyncModel):
            assert isinstance(sync, AnySyncModel)
            models = (sync,) * shards
        else:
            models = tuple(sync)
        self._first_model = models[0]
        all_models = (models, *map(parse_shards, changes))
        # Shards differ if their models do, or if they draw apart; or if somebody late is told a count by the first.
        self._alike = not late and all(
            len(set(step)) == 1 and getattr(step[0], "draws", "shared") == "shared" for step in all_models
        )
        # Workers differ if a draw is made for each, or if a plan is: ties are broken by their names; or if some join
        # late: machines that have forgotten who has left may take a namesake for one of these.
        self._namesakes = not late and not any(
            hasattr(model, "draws") or (isinstance(model, ElasticBSP) and not any_plan)
            for step in all_models
            for model in step
        )
        # Orders in which a shard takes what several workers have sent it differ in nothing.
        self._unordered = not changes and commits and self._namesakes
        self._unordered = self._unordered and all(map(_in_any_order, models))
        # What a worker does is felt by others at the coordinator only.
        self._apart = self._unordered and all(
            isinstance(model, SpecSync) and isinstance(model.base, ASP) for model in models
        )
        self._machines: Interned[ShardSync] = Interned()
        self._jobs: Interned[JobSync] = Interned()
        self._pool: Pool[Shard] = Pool()
        self._workers: Pool[Worker] = Pool()
        self._coordinators: Pool[Coordinator] = Pool()
        self._shard_after: dict[tuple[float, Shard, int, Message], tuple[Shard, tuple[Answer, ...]]] = {}
        self._sent: dict[tuple[Shard, int, Message], Shard] = {}
        self._labels: dict[tuple[Shard, int], list[tuple[str, int, Message | None]]] = {}
        self._quiet: dict[int, bool] = {}
        job = JobSync(notation(models), seed)
        if len(set(models)) == 1 and type(parse(str(models[0]))) is not type(models[0]):
            job._machine = models[0].at_coordinator(seed)  # a test's own
        self._hosted = job._machine is not None or bool(changes)
        everybody = range(workers + late)
        told = Told(models[0], BSP(), tuple(Seen() for _ in everybody))
        empty: tuple[tuple[Message, ...], ...] = tuple(() for _ in everybody)
        first = (
            Shard(
                self._machines.add(shard_host(model, seed, 0 if self._alike else shard)),
                told._replace(sync=model),
                empty,
            )
            for shard, model in enumerate(models)
        )
        state = State(
            workers=tuple(self._workers(Worker("absent", sync=job.sync)) for _ in everybody),
            shards=tuple(map(self._pool, first)),
            coordinator=self._coordinators(Coordinator(self._jobs.add(job), empty, (-1,) * len(everybody))),
            losses=losses,
        )
        for worker in range(workers):
            state = self._join(state, worker)
            for shard in range(shards):
                state = self._deliver_to_shard(state, worker, shard)
            while state.coordinator.queues[worker]:
                state = self._deliver_to_coordinator(state, worker)
        self._renamings = []
        if self._namesakes:
            pools = self._machines, self._jobs, self._pool, self._workers, self._coordinators
            self._renamings = [Renaming(names, *pools) for names in permutations(everybody)]
        self.first = state

    def steps(self, state: State) -> tuple[list[Step], list[Step]]:
        """All that may happen next, and the losses that may."""
        losses = [step for worker in range(len(state.workers)) for step in self._loss(state, worker)]
        return list(self._steps(state)), losses

    def reduced_steps(self, state: State) -> tuple[list[Step], list[Step]]:
        """Enough of these to see all that can come of it, see above."""
        if self._unordered:
            for index, worker in product(range(len(state.shards)), range(len(state.workers))):
                steps = list(self.steps_of(state, index, worker))
                if steps:
                    waits = state.workers[worker].phase == "waiting"
                    return steps, list(self._loss(state, worker)) if waits else []
        if self._apart:
            for worker, queue in enumerate(state.coordinator.queues):
                if queue and queue[0].kind == "notify":
                    return list(self._steps_at_coordinator(state, worker)), []
        if self._is_quiet(state):
            for worker, its in enumerate(state.workers):
                if its.phase == "computing" and not its.heard_not:
                    return list(self._pushes(state, worker))[:1], []
        if not state.losses:
            for index, shard in enumerate(state.shards):
                if all(
                    its.phase in ("finished", "lost") or w in shard.owes
                    for w, its in enumerate(state.workers)
                ):
                    steps = list(self._steps_at(state, index))
                    if steps:
                        return steps, []
        waiting = [worker for worker, its in enumerate(state.workers) if its.phase == "waiting"]
        return list(self._steps(state, self._apart)), [
            step for worker in waiting for step in self._loss(state, worker)
        ]

    def plain(self, state: State) -> State:
        """One state for all that differ in means that all shards have, or at a shard that all have left."""
        if self._agree and (common := frozenset.intersection(*(shard.means for shard in state.shards))):
            shards = (self._pool(shard._replace(means=shard.means - common)) for shard in state.shards)
            state = state._replace(shards=tuple(shards))
        if self._unordered:
            for index, shard in enumerate(state.shards):
                left = all(its.state == "left" for its in shard.told.seen) and not any(shard.queues)
                if left and (shard.machine or shard.told.round):
                    shard = self._pool(shard._replace(machine=0, told=shard.told._replace(round=0)))
                    state = state._replace(shards=_put(state.shards, index, shard))
        return state

    def canonical(self, state: State) -> State:
        """One state for all that differ in the shards' order or the workers' names besides."""
        state = self.plain(state)
        if self._renamings:
            return self._named(state)
        if self._alike:
            in_order = tuple(sorted(state.shards, key=self._pool.number.__getitem__))
            if in_order != state.shards:
                return state._replace(shards=in_order)
        return state

    def _named(self, state: State) -> State:
        """The state by those names of the workers that make its numbers least."""
        number = self._workers.number
        least: list[int] = []
        best: list[tuple[tuple[Worker, ...], Renaming]] = []
        for renaming in self._renamings:
            workers = renaming.workers(state.workers)
            numbers = [number[worker] for worker in workers]
            if not best or numbers < least:
                least, best = numbers, [(workers, renaming)]
            elif numbers == least:
                best.append((workers, renaming))
        found: State | None = None
        for workers, renaming in best:
            shards = [renaming.shard[shard] for shard in state.shards]
            if self._alike:
                shards.sort(key=self._pool.number.__getitem__)
            coordinator = renaming.coordinator[state.coordinator]
            numbers = [self._coordinators.number[coordinator], *map(self._pool.number.__getitem__, shards)]
            if found is None or numbers < least:
                least = numbers
                found = State(workers, tuple(shards), coordinator, state.losses, state.asked)
        assert found is not None
        return found

    def apart_from_shards(self, state: State) -> set[Hashable]:
        """Where each worker is, and the coordinator's machine, one for all names."""
        machine = state.coordinator.machine
        least = min((renaming.job(machine) for renaming in self._renamings), default=machine)
        return {least, *((its.phase, its.iteration, its.anew, its.changed) for its in state.workers)}

    def coordinator_differs(self) -> str:
        """See `Interned.difference`."""
        return self._jobs.difference()

    def digest(self, state: State) -> int:
        """64 bits that stand for a state."""
        numbers = array(
            "q",
            [
                *map(self._workers.number.__getitem__, state.workers),
                *map(self._pool.number.__getitem__, state.shards),
                self._coordinators.number[state.coordinator],
                state.losses,
                state.asked,
            ],
        )
        return int.from_bytes(blake2b(numbers, digest_size=8).digest())

    def check_end(self, state: State) -> None:
        """No step is left: that must be because all is done."""
        for worker, its in enumerate(state.workers):
            assert its.phase in ("finished", "lost"), (
                f"deadlock: worker {worker} is {its.phase} with iteration {its.iteration}; "
                + "; ".join(
                    f"shard {s}: {self._machines[at.machine].waits()}" for s, at in enumerate(state.shards)
                )
            )
        changed = max((its.changed for its in state.workers if its.phase == "finished"), default=0)
        for shard in state.shards:
            assert not shard.held, f"nobody will ever apply {shard.held}"
            assert shard.told.changed >= changed, f"a shard has not made change {changed}"
        if not self._agree:
            return
        survivors = {w for w, its in enumerate(state.workers) if its.phase == "finished"}
        joint = []
        for shard in state.shards:
            kept = (tuple(key for key in mean if key[0] in survivors) for mean in shard.means)
            joint.append({mean for mean in kept if mean})
        assert all(groups == joint[0] for groups in joint), f"shards have averaged different pushes: {joint}"

    # -- steps --------------------------------------------------------------------------------------------

    def _steps(self, state: State, patient: bool = False) -> Iterator[Step]:
        """All but losses; if patient, without pushes of those of whom the coordinator has yet to take a message."""
        for worker, its in enumerate(state.workers):
            if its.phase == "absent":
                yield f"worker {worker} joins", lambda w=worker: self._join(state, w)  # type: ignore[misc]
            elif its.phase == "computing" and not (patient and state.coordinator.queues[worker]):
                yield from self._pushes(state, worker)
                if self._may_ask(state):
                    label = f"worker {worker} asks for {self._changes[state.asked]}"
                    yield label, lambda w=worker: self._ask(state, w)  # type: ignore[misc]
            yield from self._steps_at_coordinator(state, worker)
        for index in range(len(state.shards)):
            yield from self._steps_at(state, index)
        for worker, iteration in sorted(state.coordinator.timers):
            timer = Message("timer", iteration)
            label = f"the coordinator's timer fires for {iteration} of worker {worker}"
            yield label, lambda w=worker, t=timer: self._tell_coordinator(state, w, t)  # type: ignore[misc]

    def _steps_at_coordinator(self, state: State, worker: int) -> Iterator[Step]:
        """It takes the next message of one worker, or hears that it is gone."""
        if state.workers[worker].phase == "lost" and self._hosted and self._known(state.coordinator, worker):
            label = f"the coordinator hears no more of worker {worker}"
            yield label, lambda: self._end_at_coordinator(state, worker)
        queue = state.coordinator.queues[worker]
        if queue:
            label = f"the coordinator takes {_text(queue[0])} of worker {worker}"
            yield label, lambda: self._deliver_to_coordinator(state, worker)

    def _steps_at(self, state: State, index: int) -> Iterator[Step]:
        """Those of one shard."""
        shard = state.shards[index]
        key = shard, index
        if key not in self._labels:
            self._labels[key] = [
                (f"shard {index} takes {_text(queue[0])} of worker {worker}", worker, None)
                for worker, queue in enumerate(shard.queues)
                if queue
            ] + [
                (f"shard {index}'s timer fires for {it} of worker {worker}", worker, Message("timer", it))
                for worker, it in sorted(shard.timers)
            ]
        for label, worker, timer in self._labels[key]:
            if timer is None:
                yield label, lambda w=worker: self._deliver_to_shard(state, w, index)  # type: ignore[misc]
            else:
                yield label, lambda w=worker, t=timer: self._tell_shard(state, w, index, t)  # type: ignore[misc]
        for worker in range(len(state.workers)):
            yield from self._end_of(state, index, worker)

    def steps_of(self, state: State, index: int, worker: int) -> Iterator[Step]:
        """Those of one shard that take the next message of one worker, or hear that it is gone."""
        queue = state.shards[index].queues[worker]
        if queue:
            label = f"shard {index} takes {_text(queue[0])} of worker {worker}"
            yield label, lambda: self._deliver_to_shard(state, worker, index)
        yield from self._end_of(state, index, worker)

    def _end_of(self, state: State, index: int, worker: int) -> Iterator[Step]:
        shard = state.shards[index]
        if state.workers[worker].phase == "lost" and (_is_in(shard, worker) or shard.queues[worker]):
            label = f"shard {index} hears no more of worker {worker}"
            yield label, lambda: self._end_at_shard(state, worker, index)

    def _pushes(self, state: State, worker: int) -> Iterator[Step]:
        """A computing worker pushes, or starts anew, having heard some of what was sent to it."""
        its = state.workers[worker]
        while True:
            what = "pushes"
            if its.change is not None:
                what = f"ends model {its.changed} with"
            elif its.planned is not None and its.iteration >= its.planned.iteration:
                what = "stops with"
            yield f"worker {worker} {what} {its.iteration}", lambda its=its: self._push(state, worker, its)  # type: ignore[misc]
            if not its.heard_not:
                return
            order, rest = its.heard_not[0], its.heard_not[1:]
            its = its._replace(heard_not=rest)
            match order.what:
                case "restart":
                    if order.iteration == its.iteration:
                        assert not its.anew, f"worker {worker} is to start {its.iteration} anew once more"
                        label = f"worker {worker} starts {its.iteration} anew"
                        yield label, lambda its=its: self._start_anew(state, worker, its)  # type: ignore[misc]
                        return
                case Change():
                    assert its.change is None, f"worker {worker} has two changes to pass"
                    its = its._replace(change=order.what, planned=None)
                case _:
                    assert its.planned is None, f"worker {worker} has two plans to follow"
                    if its.change is None:  # otherwise it was made before the change
                        its = its._replace(planned=order)

    def _loss(self, state: State, worker: int) -> Iterator[Step]:
        if state.losses and state.workers[worker].phase in ("computing", "waiting"):
            yield f"worker {worker} is lost", lambda: self._lose(state, worker)

    def _is_quiet(self, state: State) -> bool:
        """No word of the coordinator will reach anybody any more."""
        if not self._hosted:
            return True
        if state.asked < len(self._changes) or any(
            m.kind == "request" for q in state.coordinator.queues for m in q
        ):
            return False
        number = state.coordinator.machine
        if number not in self._quiet:
            job = self._jobs[number]
            self._quiet[number] = job._change is None and job._machine is None
        return self._quiet[number]

    def _may_ask(self, state: State) -> bool:
        """One change is asked for at a time: whoever asks for the next has asked for this one too."""
        return state.asked < len(self._changes) and not any(
            message.kind == "request" for queue in state.coordinator.queues for message in queue
        )

    def _ask(self, state: State, worker: int) -> State:
        state = self._send_coordinator(state, worker, Message("request", state.asked))
        return state._replace(asked=state.asked + 1)

    def _lose(self, state: State, worker: int) -> State:
        workers = _put(state.workers, worker, self._workers(Worker("lost")))
        return state._replace(workers=workers, losses=state.losses - 1)

    def _join(self, state: State, worker: int) -> State:
        """Every shard is told the same c_p: near the slowest worker's, as one of them has it."""
        told = state.shards[0].told
        count = min((its.pushed for its in told.seen if its.state == "live"), default=told.round)
        its = self._workers(state.workers[worker]._replace(phase="waiting"))
        state = state._replace(workers=_put(state.workers, worker, its))
        return self._send(state, worker, Message("join", progress=count))

    def _push(self, state: State, worker: int, its: Worker) -> State:
        iteration, change = its.iteration, its.change
        stop = its.planned.what if its.planned is not None and iteration >= its.planned.iteration else None
        assert stop is None or isinstance(stop, Stop)
        notifies = change is not None or self._coordinator_of(its.sync) is not None
        progress = its.progress
        its = its._replace(
            phase="waiting",
            iteration=iteration + 1,
            anew=False,
            progress=None,
            planned=its.planned if stop is None else None,
            heard_not=tuple(o for o in its.heard_not if o.what != "restart"),
        )
        if change is not None:
            stop = None
            its = its._replace(sync=change.sync, first=True, change=None, changed=change.number)
        state = state._replace(workers=_put(state.workers, worker, self._workers(its)))
        if notifies:
            state = self._send_coordinator(state, worker, Message("notify", iteration, stop, change))
        if self._commits:
            return self._send(state, worker, Message("commit", iteration, stop, change, progress))
        state = self._send(state, worker, Message("push", iteration, stop, change, progress))
        return self._send(state, worker, Message("pull", iteration))

    def _start_anew(self, state: State, worker: int, its: Worker) -> State:
        its = self._workers(its._replace(phase="waiting", anew=True))
        state = state._replace(workers=_put(state.workers, worker, its))
        return self._send(state, worker, Message("repeat", its.iteration))

    def _coordinator_of(self, sync: str) -> AnySyncModel | None:
        """The model that has a part at the coordinator, if this one does."""
        models = parse_shards(sync)
        return models[0] if len(set(models)) == 1 and models[0].at_coordinator() is not None else None

    def _send(self, state: State, worker: int, message: Message) -> State:
        """To all shards."""
        shards = []
        for shard in state.shards:
            key = shard, worker, message
            if key not in self._sent:
                queues = _put(shard.queues, worker, (*shard.queues[worker], message))
                self._sent[key] = self._pool(shard._replace(queues=queues, owes=shard.owes | {worker}))
            shards.append(self._sent[key])
        if message.kind == "finish":
            shards = [self._pool(shard._replace(owes=shard.owes - {worker})) for shard in shards]
        return state._replace(shards=tuple(shards))

    def _send_coordinator(self, state: State, worker: int, message: Message) -> State:
        if not self._hosted:
            return state
        at = state.coordinator
        queues = _put(at.queues, worker, (*at.queues[worker], message))
        return state._replace(coordinator=self._coordinators(at._replace(queues=queues)))

    # A worker that is dead: what has not been delivered of its messages never is.

    def _known(self, at: Coordinator, worker: int) -> bool:
        return at.notified[worker] >= 0 or bool(at.queues[worker])

    def _end_at_coordinator(self, state: State, worker: int) -> State:
        at = state.coordinator
        at = self._coordinators(at._replace(queues=_put(at.queues, worker, ())))
        state = state._replace(coordinator=at)
        if at.notified[worker] < 0:
            return state  # it was lost before the coordinator had heard of it
        return self._tell_coordinator(state, worker, Message("loss"))

    def _end_at_shard(self, state: State, worker: int, shard: int) -> State:
        at = state.shards[shard]
        at = self._pool(at._replace(queues=_put(at.queues, worker, ()), owes=at.owes - {worker}))
        state = state._replace(shards=_put(state.shards, shard, at))
        if not _is_in(at, worker):
            return state  # it was lost before this shard had heard of it
        return self._tell_shard(state, worker, shard, Message("loss"))

    # -- at a shard ---------------------------------------------------------------------------------------

    def _deliver_to_shard(self, state: State, worker: int, shard: int) -> State:
        return self._tell_shard(state, worker, shard, state.shards[shard].queues[worker][0])

    def _tell_shard(self, state: State, worker: int, shard: int, message: Message) -> State:
        key = self.now_s, state.shards[shard], worker, message
        if key not in self._shard_after:
            at, answered = self._take(state.shards[shard], worker, message, shard)
            self._shard_after[key] = self._pool(at), tuple(answered)
        at, of = self._shard_after[key]
        state = state._replace(shards=_put(state.shards, shard, at))
        for other, v_train in of:
            state = self._answer(state, other, v_train)
        return state

    def _take(self, at: Shard, worker: int, message: Message, shard: int) -> tuple[Shard, list[Answer]]:
        """What becomes of a shard that takes one message, and whom it answers."""
        if message.kind == "timer":
            at = at._replace(timers=at.timers - {(worker, message.iteration)})
        elif message.kind != "loss":
            at = at._replace(queues=_put(at.queues, worker, at.queues[worker][1:]))
        messages = [message]
        if message.kind == "commit":
            messages = [message._replace(kind="push"), Message("pull", message.iteration)]
        answered: list[Answer] = []
        for part in messages:
            at, more = self._take_one(at, worker, part, shard)
            answered += more
        if message.kind == "join":
            answered.append((worker, None))  # with the first weights
        return at._replace(owes=at.owes - {of for of, _ in answered}), answered

    def _take_one(self, at: Shard, worker: int, message: Message, shard: int) -> tuple[Shard, list[Answer]]:
        told, its = at.told, at.told.seen[worker]
        now_s, iteration = self.now_s, message.iteration
        event: AnyEvent
        match message.kind:
            case "join":
                event = WorkerJoined(now_s=now_s, worker=worker, count=message.progress)
                flagged = max((other.last_stop for other in told.seen), default=-1)
                its = Seen("live", message.progress or 0, last_stop=flagged)
            case "push":
                event = PushReceived(
                    now_s=now_s,
                    worker=worker,
                    iteration=iteration,
                    stop=message.stop,
                    change=message.change,
                    progress=message.progress,
                )
                its = its._replace(pushed=max(its.pushed, message.progress or 0) + 1, stop=message.stop)
                if message.stop is not None:
                    its = its._replace(last_stop=message.stop.superstep)
                if message.change is not None and message.change.number > told.changed:
                    its = its._replace(state="boundary")
                    told = told._replace(change=message.change)
            case "pull":
                event = PullRequested(now_s=now_s, worker=worker, iteration=iteration)
                its = its._replace(asks=True, put_off=True)
            case "repeat":
                event = PullRepeated(now_s=now_s, worker=worker, iteration=iteration)
                its = its._replace(asks=True, put_off=False)
            case "timer":
                event = TimerFired(now_s=now_s, worker=worker, iteration=iteration)
                its = its._replace(put_off=False)
            case "finish":
                event, its = WorkerFinished(now_s=now_s, worker=worker), Seen("left")
            case _:
                event, its = WorkerLost(now_s=now_s, worker=worker), Seen("left")
        told = self._passed(told._replace(seen=_put(told.seen, worker, its)), shard)
        machine, actions = self._machines.after(at.machine, event)
        at, answered = self._perform(at._replace(machine=machine, told=told), event, actions)
        return at, answered

    def _passed(self, told: Told, shard: int) -> Told:
        """The shard with the next model, if all members of the change have ended the old one."""
        change = told.change
        if change is None or any(told.seen[member].state == "live" for member in change.members):
            return told._replace(round=self._round(told))
        models = parse_shards(change.sync)
        seen = (
            Seen("live", asks=its.asks) if its.state in ("live", "boundary") else its for its in told.seen
        )
        return Told(models[shard if len(models) > 1 else 0], told.sync, tuple(seen), changed=change.number)

    def _round(self, told: Told) -> int:
        """V_train: how many rounds enough of the workers have pushed."""
        counts = sorted((its.pushed for its in told.seen if its.state == "live"), reverse=True)
        quorum = self._admission(told).quorum or len(counts)
        return max(told.round, counts[min(quorum, len(counts)) - 1]) if counts else told.round

    def _admission(self, told: Told) -> Admission:
        first = self._rule is not None and told.sync is self._first_model
        return self._rule if first and self._rule is not None else admission(told.sync)

    def _perform(self, at: Shard, event: AnyEvent, actions: list[AnyAction]) -> tuple[Shard, list[Answer]]:
        told = at.told
        seen, held, means, timers = list(told.seen), set(at.held), set(at.means), set(at.timers)
        answered: list[Answer] = []
        fates = 0
        for action in actions:
            match action:
                case ApplyPush(worker, iteration) | DropPush(worker, iteration) | HoldPush(worker, iteration):
                    assert isinstance(event, PushReceived), f"{action} after {event}"
                    assert (worker, iteration) == (event.worker, event.iteration), f"{action} after {event}"
                    fates += 1
                    if isinstance(action, HoldPush):
                        held.add((worker, iteration))
                case ApplyMean(pushes):
                    assert held >= set(pushes), f"{action} of pushes that are not held: {held}"
                    held -= set(pushes)
                    if self._agree:
                        means.add(pushes)
                case AnswerPull(worker, iteration, v_train):
                    assert seen[worker].asks, f"{action}, which was not asked for"
                    assert (worker, iteration) not in held, f"{action} before its push was applied"
                    seen[worker] = seen[worker]._replace(asks=False, put_off=False)
                    answered.append((worker, v_train))
                case SetTimer(worker, iteration):
                    timers.add((worker, iteration))
                case ReportFault():
                    worked = told.worked
                    if isinstance(worked, ElasticBSP):  # needs plans
                        worked = ASP()
                    slowest = min((its.pushed for its in told.seen if its.state == "live"), default=0)
                    told = told._replace(sync=worked, worked=BSP(), round=slowest)
                    assert action.sync == str(told.sync), f"{action}, but {told.sync} is what worked"
                case _:
                    raise AssertionError(f"a shard cannot {action}")
        assert fates == isinstance(event, PushReceived), f"{event} was dealt with {fates} times"
        told = told._replace(seen=tuple(seen))
        at = at._replace(told=told, held=frozenset(held), means=frozenset(means), timers=frozenset(timers))
        if self._watch:
            self._check_waiting(at, event, [worker for worker, _ in answered])
        return at, answered

    def _check_waiting(self, at: Shard, event: AnyEvent, answered: list[int]) -> None:
        """Who waits at a shard is who must, or may."""
        told = at.told
        assert self._machines[at.machine].sync == told.sync, f"after {event} {told.sync} is in force"
        rule = self._admission(told)
        ended = {worker for worker, its in enumerate(told.seen) if its.state == "boundary"}
        assert ended.isdisjoint(answered), f"{ended} were let past the change {told.change}"
        waiting = {worker for worker, its in enumerate(told.seen) if its.asks} - ended
        must_wait = rule.must(told) - ended
        may_wait = must_wait | rule.may(told)
        assert must_wait <= waiting <= may_wait, (
            f"at a shard {waiting} wait and {must_wait} must"
            + (f" ({may_wait} may)" if may_wait != must_wait else "")
            + f", after {event}"
        )

    def _answer(self, state: State, worker: int, v_train: int | None) -> State:
        """A shard's weights reach a worker; with the last of them it goes on, or leaves if it has done its work."""
        its = state.workers[worker]
        if its.phase == "lost":
            return state
        if v_train is not None:
            its = self._workers(its._replace(progress=max(v_train, its.progress or 0)))
            state = state._replace(workers=_put(state.workers, worker, its))
        if any(worker in shard.owes for shard in state.shards):
            return state
        model = None if its.first or its.anew else self._coordinator_of(its.sync)
        starts = its.changed > 0 if its.first else model is not None and model.needs_starts
        if (
            not its.changed
            and its.first
            and its.iteration == 0
            and self._hosted
            and not _has_joined(state, worker)
        ):
            state = self._send_coordinator(
                state, worker, Message("join")
            )  # every shard has heard of it by now
        if its.iteration == self._iterations:
            if its.first and starts:
                state = self._send_coordinator(state, worker, Message("start", its.iteration))
            workers = _put(state.workers, worker, self._workers(Worker("finished", changed=its.changed)))
            state = self._send(state._replace(workers=workers), worker, Message("finish"))
            return self._send_coordinator(state, worker, Message("finish"))
        its = self._workers(
            its._replace(phase="computing", first=False, progress=None if its.first else its.progress)
        )
        state = state._replace(workers=_put(state.workers, worker, its))
        if starts:
            return self._send_coordinator(state, worker, Message("start", its.iteration))
        return state

    # -- at the coordinator -------------------------------------------------------------------------------

    def _deliver_to_coordinator(self, state: State, worker: int) -> State:
        return self._tell_coordinator(state, worker, state.coordinator.queues[worker][0])

    def _tell_coordinator(self, state: State, worker: int, message: Message) -> State:
        at, now_s, iteration = state.coordinator, self.now_s, message.iteration
        if message.kind == "timer":
            at = at._replace(timers=at.timers - {(worker, iteration)})
        elif message.kind != "loss":
            at = at._replace(queues=_put(at.queues, worker, at.queues[worker][1:]))
        event: AnyEvent
        heard = at.notified[worker]
        match message.kind:
            case "join":
                event, heard = WorkerJoined(now_s=now_s, worker=worker), 0
            case "notify":
                event = IterationFinished(
                    now_s=now_s,
                    worker=worker,
                    iteration=iteration,
                    superstep=message.stop.superstep if message.stop is not None else None,
                    change=message.change.number if message.change is not None else None,
                )
                heard = iteration + 1
            case "start":
                event = IterationStarted(now_s=now_s, worker=worker, iteration=iteration)
            case "request":
                event = SyncRequested(
                    now_s=now_s,
                    worker=worker,
                    source="script",
                    number=iteration,
                    sync=self._changes[iteration],
                )
            case "timer":
                event = TimerFired(now_s=now_s, worker=worker, iteration=iteration)
            case "finish":
                event, heard = WorkerFinished(now_s=now_s, worker=worker), -1
            case _:
                event, heard = WorkerLost(now_s=now_s, worker=worker), -1
        machine, actions = self._jobs.after(at.machine, event)
        at = at._replace(machine=machine, notified=_put(at.notified, worker, heard))
        for action in actions:
            match action:
                case SetTimer(of, iteration):
                    at = at._replace(timers=at.timers | {(of, iteration)})
                case RestartWorker(of, iteration):
                    its = state.workers[of]
                    if (its.phase, its.iteration) == ("computing", iteration):  # otherwise it is ignored
                        state = self._order(state, of, Order("restart", iteration))
                case PublishPlan(plan):
                    stop = Stop(superstep=plan.superstep, members=plan.members)
                    for member, iteration in plan.stops:
                        # After a change the coordinator catches up on what it has heard meanwhile, and a plan that
                        # it makes on the way may name an iteration that it hears of next: the worker stops later.
                        caught_up = self._changes or iteration >= at.notified[member]
                        assert caught_up, f"worker {member} is past {plan} already"
                        state = self._order(state, member, Order(stop, 0 if self._any_plan else iteration))
                case PublishChange(change):
                    for member in change.members:
                        state = self._order(state, member, Order(change))
                case _:
                    raise AssertionError(f"a coordinator cannot {action}")
        if not self._changes:
            at = at._replace(timers=frozenset(key for key in at.timers if self._matters(at, key)))
        return state._replace(coordinator=self._coordinators(at))

    def _matters(self, at: Coordinator, timer: Key) -> bool:
        """Something comes of this timer if it fires now. Otherwise nothing ever will, under the same model."""
        event = TimerFired(now_s=self.now_s, worker=timer[0], iteration=timer[1])
        machine, actions = self._jobs.after(at.machine, event)
        return machine != at.machine or bool(actions)

    def _order(self, state: State, worker: int, order: Order) -> State:
        """Send something to a worker, if there is somebody to hear it."""
        its = state.workers[worker]
        if its.phase not in ("computing", "waiting") or its.iteration == self._iterations:
            return state
        its = self._workers(its._replace(heard_not=(*its.heard_not, order)))
        return state._replace(workers=_put(state.workers, worker, its))


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _has_joined(state: State, worker: int) -> bool:
    """The coordinator has been told that it is there, or will be."""
    return state.coordinator.notified[worker] >= 0 or bool(state.coordinator.queues[worker])


def _in_any_order(model: AnySyncModel) -> bool:
    """What several workers send to a shard may be taken in any order, and nothing else comes of it."""
    match model:
        case SpecSync(base=SSP(execution="lazy")):
            return False
        case _:
            return isinstance(model, ElasticBSP | SpecSync)


def _is_in(shard: Shard, worker: int) -> bool:
    return shard.told.seen[worker].state in ("live", "boundary")


def _text(message: Message) -> str:
    flag = f", the last of superstep {message.stop.superstep}" if message.stop is not None else ""
    flag += f", the last before change {message.change.number}" if message.change is not None else ""
    return f"{message.kind} {message.iteration}{flag}"
