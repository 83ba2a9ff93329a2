"""A small job for exhaustive search: its states, which are immutable, and the steps that are possible in each state.

The job runs the same cores as a live run (`paceline.core`): one for each worker, one for each server (each server has
one shard), and one for the coordinator. Messages from one process to another keep their order. Apart from that, steps
can happen in any order, as with a real network and scheduler. In one step, a worker joins, pushes, is lost, requests
another sync model or restarts an iteration; a server or the coordinator receives the next message from a worker, or
notices that the worker is lost; or a timer fires. There is no clock: a timer may fire at any later step, and a worker
that pushes may or may not have received the coordinator's messages. Every step is checked. The checks
use only what a shard has received, never the state of a state machine:

- according to the admission rule of the model in force (see `admission`), every worker that must wait at a shard does
  wait, and every worker that waits is allowed to wait;
- each push is applied, averaged or dropped exactly once;
- no attempt of an iteration is restarted twice, and a shard runs the model that the received flags determine;
- when no step is left, every worker that was not lost has done all its iterations (no deadlock), and the shards have
  completed all changes that any remaining worker has passed, and have averaged the same groups of pushes.

The following reductions keep the number of states small. Each entry explains why its reduction misses no failure:

- *Commits.* A push and the pull that follows it are received together, as in a live run. With `commits=False`, they
  are received separately.
- *Answers together.* A worker receives the answers from all shards when the last answer arrives. The earlier answers
  have only one effect: each may name a round from which the worker must continue. The job keeps the latest of these
  rounds until the last answer arrives.
- *Orders are received at the push.* A message from the coordinator only changes the worker's next push, or restarts
  the iteration. So these messages are received just before the push, and every possible number of received messages
  is tried. A restart that comes too late would be ignored whenever it is received, so it is discarded immediately.
- *Losses while waiting* (made by `reduced_steps`, like the reductions with "first" in their names). Losing a worker
  just before a push has the same effect as losing the worker after the push if none of the push's messages are
  delivered. So the search only considers losses of waiting workers.
- *Answers about joins.* The coordinator receives a `JoinOffered` or a `WorkerWelcomed` immediately. A later receipt
  would have the same effect, except that the messages that it causes would be sent later, and these messages may be
  delayed anyway.
- *Loss notifications.* If no model holds pushes and no worker joins, the coordinator's `WorkerLost` messages are
  discarded: a server can detect a lost worker on its own at any step, so the messages add no new behavior. Otherwise,
  the servers' reports about the lost worker are received immediately, like their answers about joins.
- *Pushes first.* If no further message from the coordinator can reach a worker, nothing that happens before the
  worker's next push changes this push. So the search makes the push first.
- *One shard first.* If every worker that may still push waits for an answer from the same shard, no worker can send a
  new message to this shard before the shard takes a step. If, in addition, no more workers can be lost, all other
  possible steps commute with the shard's steps, so only the shard's steps are searched. (In terms of partial-order
  reduction, the shard's steps are a persistent set. No sequence of steps returns to an earlier state, so there are no
  cycles.) The checks at the shard depend only on what the shard has received, so all of them are still made. If
  scripts clip the gradient, a shard also receives factors, so this reduction is not made.
- *Stale timers.* If a timer would have no effect now, it will have no effect later under the same model. Such a timer
  is discarded in jobs that do not change the model.
- *Deliveries first* (`_in_any_order`; only for ElasticBSP and SpecSync without late workers or changes). The messages
  from two workers to a shard have the same effect in either order, and neither message prevents the other. So a
  shard receives each message immediately. There are two alternatives: the sender is lost at that moment, or the
  message is dropped because the sender was lost before. If the sender is lost later, while it waits, it never receives
  the answers, so losing the sender commutes with all steps since the push. A separate test checks, in every state
  of small jobs, that the order has no effect.
- *Notifications first, and late pushes* (`_apart`; only for SpecSync with ASP as its base). With this base, a push
  affects other workers only when the coordinator receives the notification of the push. A restart that the coordinator
  orders before receiving the notification is ignored, like a restart that a worker receives after the push. So a worker
  pushes only after the coordinator has received all earlier messages from this worker, and the coordinator then
  receives the notification immediately. If the worker is lost before the coordinator receives the notification, the
  worker's push affects no other worker.
- *Order of shards* (`canonical`). Shards with the same model and the same random numbers differ only in name, so
  their order is ignored.
- *Names of workers* (`canonical`). Workers differ only in name, unless the model draws separate random numbers for
  each worker, plans are followed exactly (plans break ties by name), or a worker joins late. Of all states that
  differ only in names, one is kept.
- *Shards that all workers have left* (only with "deliveries first"). The state of such a shard has no effect, so it is
  reset.
- *Means.* A mean that all shards have applied cannot reveal a disagreement between shards, so it is discarded. (No
  push is part of two means, so different means cannot be confused.)
- *Interned cores* (`states.Interned`). Each state of a core is stored once, and each call is made only once in each
  state. States are considered equal if they differ only in the order of a dict, which affects at most the order of
  the answers to one event; in the labels of workers that have left, which matter only if a worker returns; in the
  staleness of the workers' weights, unless a model depends on it; or in the order of held pushes, which are summed in
  worker order. Of SpecSync's state machine at the coordinator, only the
  parts that may still cause a restart are kept (`Speculator.outlook`). The classes of the cores declare
  which attributes are compared (see `paceline.state`). A test checks that equal states behave alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from functools import cache, partial
from hashlib import blake2b
from itertools import permutations, product
from typing import ClassVar, Literal, TypeVar

from msgspec.structs import replace

from ..core import messages
from ..core.coordinator import Coordinator
from ..core.layout import Layout, ModelSpec, OptimizerSpec
from ..core.messages import (
    Answer,
    ChangePublished,
    Commit,
    Hello,
    IterationFinished,
    JoinOffered,
    Message,
    PlanPublished,
    PullRequested,
    PushesReported,
    RestartOrdered,
    Started,
    Status,
    SyncRequested,
    WorkerWelcomed,
)
from ..core.requests import (
    COORDINATOR,
    Apply,
    Discard,
    Host,
    Measure,
    Overwrite,
    Peer,
    Preserve,
    Proceed,
    Request,
    Send,
    Timer,
    server_peer,
    worker_peer,
)
from ..core.server import Server
from ..core.shard import ShardSync
from ..core.worker import Worker
from ..state import Subject
from ..sync import ASP, BSP, SSP, Conditions, ElasticBSP, SpecSync, SyncModel, events, parse
from ..sync.conditions import ConditionMachine
from ..sync.events import Clip
from ..sync.notation import parse_shards
from ..sync.schedule import Schedule, ScheduleStep
from .admission import Admission, ShardView, WorkerView
from .shard_checks import ShardChecks
from .state_pools import (
    Call,
    CoordinatorState,
    Interned,
    Renaming,
    ServerState,
    State,
    StatePool,
    Step,
    Tape,
    WorkerState,
    put,
)

Item = TypeVar("Item")

NO_SCRIPTS: Set[Subject] = {"scripts", "connections"}
"""Subjects about which the cores of workers and the coordinator decide, but which do not exist in a small job."""

MODEL = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())


class SmallJob:
    """A small job whose interleavings can be searched.

    Args:
        sync: the sync model of all shards, or a list with one model for each shard.
        rule: the admission rule; by default `admission(sync)`.
        workers: number of workers at the start.
        shards: number of shards.
        iterations: number of iterations of each worker.
        late: number of additional workers that join later, at any time.
        losses: number of workers that may be lost, at any time.
        changes: the sync models that workers request, one after another, at any time.
        seed: random seed.
        commits: True if a push and its pull arrive together, as in a live run; otherwise they arrive one by one.
        any_plan: True to try every stop that a plan could name. False to follow plans exactly; all events then have
            the time `now_ticks`, an attribute that the caller may change.
        agree: True to check that all shards have averaged the same groups of pushes.
        symmetric: True if the model treats all workers alike and all shards alike, apart from drawing separate random
            numbers for them. False for a model that may depend on the indices of workers or shards.
        shard_host: class that hosts the state machine of the model at a shard.
        worker_core: class of the workers' cores.
        watch: True to check at each shard which workers wait and which model is in force.
        clips: True if all scripts clip the gradient that is applied.
        edits: the iterations in which all scripts edit the weights, instead of computing gradients.
    """

    def __init__(
        self,
        sync: SyncModel | Sequence[SyncModel],
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
        symmetric: bool = True,
        shard_host: Callable[..., ShardSync] = ShardSync,
        worker_core: type[Worker] = Worker,
        watch: bool = True,
        clips: bool = False,
        edits: Sequence[int] = (),
    ) -> None:
        self.now_ticks = 0
        self._agree = agree
        self._watch = watch
        self._iterations = iterations
        self._commits = commits
        self._any_plan = any_plan
        self._clip = Clip(max_norm=1.0, factor=0.5) if clips else None
        self._edits = tuple(edits)
        self._changes = tuple(changes)
        models = (sync,) * shards if isinstance(sync, SyncModel) else tuple(sync)
        self._alone = len(set(models)) == 1
        self._checks = ShardChecks(models[0], rule, agree)
        all_models = (models, *map(parse_shards, changes))
        models_of_all = {model for step in all_models for model in step}
        # True if the search includes messages about lost workers, because shards may hold pushes of a lost worker, or
        # because a worker may be lost before it has connected to the servers, so that only the coordinator notices.
        self._settles = losses > 0 and (late > 0 or any(map(_may_hold, models_of_all)))
        # Shards are distinguishable if their models differ, if each shard draws its own random numbers, or if
        # workers join late (the coordinator's core records which servers have answered).
        alike = symmetric and not (late or self._settles or clips or edits)
        self._shards_alike = alike and all(
            len(set(step)) == 1 and getattr(step[0], "draws", "shared") == "shared" for step in all_models
        )
        # Workers are distinguishable if each has its own random numbers, if plans break ties by name, or if workers
        # join late. (A core may forget which workers have left, and could mistake a renamed worker for such a worker.)
        workers_alike = alike and not any(
            hasattr(model, "draws") or (isinstance(model, ElasticBSP) and not any_plan)
            for model in models_of_all
        )
        # True if the order in which a shard receives messages from different workers has no effect.
        self._unordered = not changes and commits and workers_alike and all(map(_in_any_order, models))
        # True if a worker can affect other workers only through the coordinator.
        self._apart = self._unordered and all(
            isinstance(model, SpecSync) and isinstance(model.base, ASP) for model in models
        )
        self._schedule = Schedule((ScheduleStep(models[:1] if self._alone else models),))
        tape = Tape()
        # The labels of workers that have left matter only if such a worker joins again, or if servers are told of lost
        # workers.
        remembers = late > 1 or self._settles
        self._workers: Interned[Worker] = Interned(tape, NO_SCRIPTS)
        matters: dict[Subject, bool] = {
            "returns": remembers,
            "staleness": any(model.needs_staleness for model in models_of_all),
            "factors": any(model.needs_at_once for model in models_of_all),
            # A server that is told of a lost worker answers immediately only if this worker is no longer connected.
            "connections": self._settles,
            "cuts": False,
        }
        self._servers: Interned[Server] = Interned(
            tape, {subject for subject in matters if not matters[subject]}
        )
        self._coordinators: Interned[Coordinator] = Interned(tape, NO_SCRIPTS)
        self._worker_pool: StatePool[WorkerState] = StatePool()
        self._server_pool: StatePool[ServerState] = StatePool()
        self._coordinator_pool: StatePool[CoordinatorState] = StatePool()
        self._server_after = cache(self._server_takes)
        self._server_with = cache(self._server_is_sent)
        self._labels_at = cache(_labels)
        self._tidy = cache(self._tidied)
        self._is_calm = cache(self._sends_no_more)
        self._requested_at = cache(_request_in_flight)
        everybody = range(workers + late)
        empty: tuple[tuple[Message, ...], ...] = tuple(() for _ in everybody)
        self._new_worker = partial(
            worker_core, self._schedule, workers=len(everybody), shards=shards, servers=shards
        )
        self._new_server = partial(Server, seed, recorder_of=lambda shard: tape)
        self._new_coordinator = partial(
            Coordinator,
            self._schedule,
            workers=len(everybody),
            servers=shards,
            shards=shards,
            seed=seed,
            late=range(workers, len(everybody)),
            recorder=tape,
        )
        first, servers, coordinator = self._begin(models, range(workers), seed, shard_host, tape)
        newcomer = self._new_worker()
        self._hosted = coordinator.job_sync.machine is not None or bool(changes) or clips
        views = tuple(WorkerView("live" if w < workers else "unknown") for w in everybody)
        computing = WorkerState("computing", self._workers.add(first))
        absent = WorkerState("absent", self._workers.add(newcomer))
        state = State(
            workers=tuple(self._worker_pool(computing if w < workers else absent) for w in everybody),
            servers=tuple(
                self._server_pool(
                    ServerState(
                        self._servers.add(core), ShardView(model, BSP(), views, alone=self._alone), empty
                    )
                )
                for core, model in zip(servers, models, strict=True)
            ),
            coordinator=self._coordinator_pool(CoordinatorState(self._coordinators.add(coordinator), empty)),
            losses=losses,
        )
        self._renamings = []
        if workers_alike:
            cores = self._workers, self._servers, self._coordinators
            pools = self._worker_pool, self._server_pool, self._coordinator_pool
            self._renamings = [Renaming(names, cores, pools) for names in permutations(everybody)]
        self.first = state

    def _begin(
        self,
        models: tuple[SyncModel, ...],
        members: range,
        seed: int,
        shard_host: Callable[..., ShardSync],
        tape: Tape,
    ) -> tuple[Worker, list[Server], Coordinator]:
        """Start a run. Return (worker, servers, coordinator); the worker has received its first weights."""
        shards = len(models)
        coordinator = self._new_coordinator()
        if self._alone and type(parse(str(models[0]))) is not type(models[0]):
            # `parse` cannot create an unregistered model.
            coordinator.job_sync.machine = models[0].at_coordinator(seed)
        for index in range(shards):
            coordinator.connected(server_peer(index), 0)
        requests: list[Request] = []
        first = self._new_worker()
        for member in members:
            coordinator.connected(worker_peer(member), 0)
        [register] = first.register(MODEL)
        assert isinstance(register, Send)
        for member in members:
            requests += coordinator.handle(worker_peer(member), register.message, 0)
        servers = []
        for request in requests:
            assert isinstance(request, Send)
            created = request.message
            if not isinstance(created, messages.CreateShards):
                continue
            [bounds] = created.shards
            index = 0 if self._shards_alike else bounds.index
            core = self._new_server()
            core.handle(
                COORDINATOR,
                replace(created, shards=(replace(bounds, index=index),)),
                0,
            )
            core.handle(worker_peer(members[0]), messages.InitialWeights(index), 0)
            host = shard_host(models[bounds.index], seed, index, alone=self._alone)
            for member in members:
                core.connected(member, 0)
                host.handle(events.WorkerJoined(now_ticks=0, worker=member))
            core.shards[index].sync = host
            servers.append(core)
            for reply in coordinator.handle(server_peer(bounds.index), messages.Ready(), 0):
                assert isinstance(reply, Send)
                if reply.to == worker_peer(members[0]):
                    first.handle(reply.message)
        coordinator.handle(worker_peer(members[0]), Status(0, None, "computing"), 0)
        for index in range(shards):
            first.handle(Answer(index, -1, 0))
        tape.take()
        return first, servers, coordinator

    # -- the states ---------------------------------------------------------------------------------------

    def steps(self, state: State) -> tuple[list[Step], list[Step]]:
        """Return two lists of the possible next steps: all steps other than losses of workers, and the losses."""
        losses = [step for w in range(len(state.workers)) for step in self._loss(state, w)]
        return list(self._steps(state)), losses

    def reduced_steps(self, state: State) -> tuple[list[Step], list[Step]]:
        """Return a subset of `steps(state)` that suffices to find every failure (see the docstring of the module)."""
        if self._unordered:
            for index, w in product(range(len(state.servers)), range(len(state.workers))):
                steps = list(self.steps_of(state, index, w))
                if steps:
                    waits = state.workers[w].phase == "waiting"
                    return steps, list(self._loss(state, w)) if waits else []
        if self._apart:
            for w, queue in enumerate(state.coordinator.queues):
                if queue and isinstance(queue[0], IterationFinished):
                    return list(self._steps_at_coordinator(state, w)), []
        if self._is_quiet(state):
            for w, worker_state in enumerate(state.workers):
                if worker_state.phase == "computing" and not worker_state.orders:
                    return list(self._pushes(state, w))[:1], []
        settled = not self._settles or all(worker_state.phase != "lost" for worker_state in state.workers)
        if not state.losses and self._clip is None and settled:
            for index, at in enumerate(state.servers):
                if all(
                    worker_state.phase in ("finished", "lost") or w in at.owes
                    for w, worker_state in enumerate(state.workers)
                ):
                    steps = list(self._steps_at(state, index))
                    if steps:
                        return steps, []
        waiting = [
            w for w, worker_state in enumerate(state.workers) if worker_state.phase in ("waiting", "joining")
        ]
        return list(self._steps(state, self._apart)), [step for w in waiting for step in self._loss(state, w)]

    def plain(self, state: State) -> State:
        """Remove the means that all shards have applied, reset shards without live workers, and return the state."""
        servers = self._tidy(state.servers)
        return state if servers is state.servers else replace(state, servers=servers)

    def _tidied(self, servers: tuple[ServerState, ...]) -> tuple[ServerState, ...]:
        """Return the servers of a state after the changes that `plain` makes."""
        if self._agree and (common := frozenset.intersection(*(at.means for at in servers))):
            servers = tuple(self._server_pool(replace(at, means=at.means - common)) for at in servers)
        if shared := frozenset.intersection(*(at.factors for at in servers)):
            servers = tuple(self._server_pool(replace(at, factors=at.factors - shared)) for at in servers)
        if self._unordered:
            for index, at in enumerate(servers):
                left = all(view.state == "left" for view in at.view.workers) and not any(
                    (*at.queues, at.replies)
                )
                if left and (at.core or at.view.round):
                    at = replace(at, core=0, view=at.view._replace(round=0))
                    servers = put(servers, index, self._server_pool(at))
        return servers

    def canonical(self, state: State) -> State:
        """Return a representative of all states that differ from `state` only in the order of shards and workers."""
        state = self.plain(state)
        if self._renamings:
            return self._named(state)
        if self._shards_alike:
            in_order = tuple(sorted(state.servers, key=self._server_pool.number.__getitem__))
            if in_order != state.servers:
                return replace(state, servers=in_order)
        return state

    def _named(self, state: State) -> State:
        """Return the state with the workers renamed so that its parts have the lexicographically smallest numbers."""
        number = self._worker_pool.number
        least: list[int] = []
        best: list[tuple[tuple[WorkerState, ...], Renaming]] = []
        for renaming in self._renamings:
            workers = renaming.workers(state.workers)
            numbers = [number[worker_state] for worker_state in workers]
            if not best or numbers < least:
                least, best = numbers, [(workers, renaming)]
            elif numbers == least:
                best.append((workers, renaming))
        found: State | None = None
        for workers, renaming in best:
            servers = [renaming.server(at) for at in state.servers]
            if self._shards_alike:
                servers.sort(key=self._server_pool.number.__getitem__)
            coordinator = renaming.coordinator(state.coordinator)
            numbers = [
                self._coordinator_pool.number[coordinator],
                *map(self._server_pool.number.__getitem__, servers),
            ]
            if found is None or numbers < least:
                least = numbers
                found = State(workers, tuple(servers), coordinator, state.losses, state.requested)
        assert found is not None
        return found

    def apart_from_shards(self, state: State) -> set[Hashable]:
        """Return the coordinator's core and the progress of each worker, in a form that does not depend on names."""
        core = state.coordinator.core
        least = min((renaming.coordinator_core(core) for renaming in self._renamings), default=core)
        return {
            least,
            *(
                (
                    worker_state.phase,
                    self._iteration(worker_state),
                    worker_state.restarted,
                    worker_state.changed,
                )
                for worker_state in state.workers
            ),
        }

    def server(self, at: ServerState) -> Server:
        """Return the core of a server in one of its states."""
        return self._servers[at.core]

    def coordinator_differs(self) -> str:
        """Return the result of `Interned.difference` for the coordinator."""
        return self._coordinators.difference()

    def restored_differs(self) -> str:
        """Return the result of `Interned.difference_of_restored` for all cores. The models must be registered."""
        return (
            self._workers.difference_of_restored(self._new_worker)
            or self._servers.difference_of_restored(self._new_server)
            or self._coordinators.difference_of_restored(self._new_coordinator)
        )

    def digest(self, state: State) -> int:
        """Return a 64-bit hash of a state."""
        numbers = array(
            "q",
            [
                *map(self._worker_pool.number.__getitem__, state.workers),
                *map(self._server_pool.number.__getitem__, state.servers),
                self._coordinator_pool.number[state.coordinator],
                state.losses,
                state.requested,
            ],
        )
        return int.from_bytes(blake2b(numbers, digest_size=8).digest())

    def check_end(self, state: State) -> None:
        """Check a terminal state: all work is done and, if `agree`, the shards have averaged the same pushes."""
        for w, worker_state in enumerate(state.workers):
            assert worker_state.phase in ("finished", "lost"), (
                f"deadlock: worker {w} is {worker_state.phase} at iteration {self._iteration(worker_state)}; "
                + "; ".join(
                    f"shard {s}: {shard.sync.waits()}"
                    for s, at in enumerate(state.servers)
                    for shard in self._servers[at.core].shards.values()
                )
            )
        changed = max(
            (worker_state.changed for worker_state in state.workers if worker_state.phase == "finished"),
            default=0,
        )
        for at in state.servers:
            assert not at.held, f"all workers have left, but the pushes {at.held} have not been applied"
            assert at.view.changed >= changed, (
                f"the last change that a shard completed is {at.view.changed}, expected at least {changed}"
            )
            for shard in self._servers[at.core].shards.values():
                assert not shard.clipped.measured, (
                    f"all workers have left, but the means {shard.clipped.measured} have not been applied"
                )
        self._check_edits(state)
        for w, worker_state in enumerate(state.workers):
            joins = (
                {dict(at.joins).get(w) for at in state.servers} if worker_state.phase == "finished" else set()
            )
            assert len(joins) <= 1, (
                f"worker {w} has joined differently at the shards, as (label, c_p): {joins}"
            )
        factors: dict[tuple[int, int], float] = {}
        for pushes, factor in {clipped for at in state.servers for clipped in at.factors}:
            for push in pushes:
                assert factors.setdefault(push, factor) == factor, (
                    f"{push} was clipped by {factor} at one shard and by {factors[push]} at another"
                )
        lost = any(worker_state.phase == "lost" for worker_state in state.workers)
        if not self._agree or (self._changes and lost):
            # One shard may have changed the model together with a worker that was lost afterwards, and another shard
            # changes it together with the next worker. Between these two changes, the two shards run different
            # models, and perhaps only one of these models averages pushes.
            return
        counted = {w for w, worker_state in enumerate(state.workers) if worker_state.phase == "finished"}
        if self._settles and not self._coordinators[state.coordinator.core].losses.torn:
            # A push of a lost worker must not be in the mean of only one shard.
            counted = set(range(len(state.workers)))
        joint = []
        for at in state.servers:
            kept = (tuple(key for key in mean if key[0] in counted) for mean in at.means)
            joint.append({mean for mean in kept if mean})
        assert all(groups == joint[0] for groups in joint), f"shards have averaged different pushes: {joint}"

    def _check_edits(self, state: State) -> None:
        """Check that all shards have made the same edits, except for edits by workers that were lost."""
        survivors = {w for w, worker_state in enumerate(state.workers) if worker_state.phase == "finished"}
        for number in range(len(self._edits)):
            editors = [{w for made, w in at.made if made == number} for at in state.servers]
            if len(survivors) == len(state.workers):
                assert len(editors[0]) == 1, f"edit {number} was made by workers {editors[0]}, expected one"
            surviving = [workers & survivors for workers in editors]
            lost = set().union(*editors) - survivors
            assert lost or all(workers == surviving[0] for workers in surviving), (
                f"the editors of edit {number} differ between shards: {editors}"
            )
            if survivors and all(model.lockstep for model in self._schedule.first) and not self._changes:
                assert all(editors), f"a shard has not made edit {number}; the editors are {editors}"

    def _iteration(self, worker_state: WorkerState) -> int:
        return self._workers[worker_state.core].iteration

    # -- steps --------------------------------------------------------------------------------------------

    def _steps(self, state: State, patient: bool = False) -> Iterator[Step]:
        """Yield all steps other than losses.

        If `patient`, leave out the pushes of workers that still have a message to the coordinator in flight.
        """
        for w, worker_state in enumerate(state.workers):
            if worker_state.phase == "absent":
                yield f"worker {w} joins", partial(self._join, state, w)
            elif worker_state.phase == "computing" and not (patient and state.coordinator.queues[w]):
                yield from self._pushes(state, w)
                if self._may_request(state):
                    label = f"worker {w} requests {self._changes[state.requested]}"
                    yield label, partial(self._request, state, w)
            yield from self._steps_at_coordinator(state, w)
        for index in range(len(state.servers)):
            yield from self._steps_at(state, index)
        for index, at in enumerate(state.servers):
            if at.reports:
                label = f"the coordinator receives {_text(at.reports[0])} from shard {index}"
                yield label, partial(self._deliver_report, state, index)
        for timer in sorted(state.coordinator.timers):
            label = f"the coordinator's timer fires for iteration {timer.iteration} of worker {timer.worker}"
            yield label, partial(self._fire_at_coordinator, state, timer)

    def _steps_at_coordinator(self, state: State, w: int) -> Iterator[Step]:
        """Yield the coordinator's steps: receiving a message from or about worker w, or noticing that w is lost."""
        at = state.coordinator
        if state.workers[w].phase == "lost" and self._known(at, w):
            label = f"the coordinator notices the loss of worker {w}"
            yield label, partial(self._end_at_coordinator, state, w)
        if at.queues[w]:
            label = f"the coordinator receives {_text(at.queues[w][0])} from worker {w}"
            yield label, partial(self._deliver_to_coordinator, state, w)

    def _steps_at(self, state: State, index: int) -> Iterator[Step]:
        """Yield the steps of one shard."""
        at = state.servers[index]
        for label, w, timer in self._labels_at(at, index):
            if timer is None:
                yield label, partial(self._deliver_to_server, state, w, index)
            else:
                yield label, partial(self._fire_at_server, state, timer, index)
        for w, worker_state in enumerate(state.workers):
            if worker_state.phase == "lost":
                yield from self._end_of(state, index, w)
        if at.replies:
            label = f"shard {index} receives {_text(at.replies[0])} from the coordinator"
            yield label, partial(self._deliver_reply, state, index)

    def steps_of(self, state: State, index: int, w: int) -> Iterator[Step]:
        """Yield the steps in which a shard receives a worker's next message, or notices that the worker is lost."""
        queue = state.servers[index].queues[w]
        if queue:
            label = f"shard {index} receives {_text(queue[0])} from worker {w}"
            yield label, partial(self._deliver_to_server, state, w, index)
        if state.workers[w].phase == "lost":
            yield from self._end_of(state, index, w)

    def _end_of(self, state: State, index: int, w: int) -> Iterator[Step]:
        """Yield the step in which a shard notices the loss of a worker, unless the shard has already noticed it."""
        at = state.servers[index]
        connected = _is_in(at, w) if not self._settles else self._servers[at.core].is_connected(w)
        if connected or at.queues[w]:
            label = f"shard {index} notices the loss of worker {w}"
            yield label, partial(self._end_at_server, state, w, index)

    def _pushes(self, state: State, w: int) -> Iterator[Step]:
        """Yield the steps in which a worker receives messages, then pushes or restarts its iteration."""
        worker_state = state.workers[w]
        if not worker_state.edits and self._iteration(worker_state) in self._edits:
            yield f"worker {w} begins an edit", partial(self._begin_edit, state, w)
            return
        while True:
            core = self._workers[worker_state.core]
            what = "pushes iteration"
            if core.change is not None:
                what = f"sends its last push before change {core.change.number}, for iteration"
            elif core.stops_at is not None and core.iteration >= core.stops_at:
                what = "stops after iteration"
            label = f"worker {w} {what} {core.iteration}"
            yield label, partial(self._push, state, w, worker_state)
            if not worker_state.orders:
                return
            order = worker_state.orders[0]
            match order:
                case RestartOrdered():
                    assert order.attempt or not worker_state.restarted, (
                        f"worker {w} is told twice to restart attempt 0 of iteration {core.iteration}"
                    )
                case ChangePublished():
                    assert core.change is None, (
                        f"worker {w} receives a second change before it has passed the first change"
                    )
                case PlanPublished():
                    assert core.stops_at is None, (
                        f"worker {w} receives a second plan before it has stopped for the first plan"
                    )
                case _:
                    raise AssertionError(f"a worker cannot receive {order}")
            number, _ = self._workers.after(worker_state.core, Call("handle", message=order))
            worker_state = self._worker_pool(
                replace(worker_state, core=number, orders=worker_state.orders[1:])
            )
            if self._workers[number].restart_ordered:
                label = f"worker {w} restarts iteration {core.iteration}"
                yield label, partial(self._restart, state, w, worker_state)
                return

    def _loss(self, state: State, w: int) -> Iterator[Step]:
        if state.losses and state.workers[w].phase in ("computing", "waiting", "joining"):
            yield f"worker {w} is lost", partial(self._lose, state, w)

    def _is_quiet(self, state: State) -> bool:
        """Return True if no further message from the coordinator can reach any worker."""
        if not self._hosted:
            return True
        return state.requested == len(self._changes) and self._is_calm(state.coordinator)

    def _sends_no_more(self, at: CoordinatorState) -> bool:
        """Return True if the coordinator will send no more messages to workers, unless a change is requested."""
        sync = self._coordinators[at.core].job_sync
        return not (_request_in_flight(at) or sync.changing or sync.machine is not None)

    def _may_request(self, state: State) -> bool:
        """Return True if a change remains to be requested and the previous request has been received."""
        return state.requested < len(self._changes) and not self._requested_at(state.coordinator)

    def _request(self, state: State, w: int) -> State:
        """Let a worker request the next change. The worker first repeats the earlier requests by other workers."""
        worker_state = state.workers[w]
        number, sent = worker_state.core, worker_state.core
        for sync in self._changes[self._workers[sent].asked : state.requested + 1]:
            number, outcome = self._workers.after(number, Call("request_sync", models=parse_shards(sync)))
        [request] = outcome.requests
        assert isinstance(request, Send)
        state = self._with_worker(state, w, replace(worker_state, core=number))
        state = self._to_coordinator(state, w, request.message)
        return replace(state, requested=state.requested + 1)

    def _lose(self, state: State, w: int) -> State:
        lost = WorkerState("lost")
        return replace(self._with_worker(state, w, lost), losses=state.losses - 1)

    def _join(self, state: State, w: int) -> State:
        """Let a worker join."""
        state = self._with_worker(state, w, replace(state.workers[w], phase="joining"))
        return self._at_coordinator(state, Call("admit", w, now_ticks=self.now_ticks))

    def _start(self, state: State, w: int, started: Started) -> State:
        """Let a joining worker connect to every server and wait for its first weights."""
        worker_state = state.workers[w]
        if worker_state.phase != "joining":
            return state
        started = replace(started, shards=())  # slices are not hashable
        number, _ = self._workers.after(worker_state.core, Call("handle", message=started))
        state = self._with_worker(state, w, replace(worker_state, phase="waiting", core=number))
        for index in range(len(state.servers)):
            state = self._to_server(state, w, index, Hello("", "worker", w))
        return state

    def _push(self, state: State, w: int, worker_state: WorkerState) -> State:
        call = Call("push_edit") if worker_state.edits else Call("push", clip=self._clip)
        number, outcome = self._workers.after(worker_state.core, call)
        commit = self._workers[number].last_commit
        assert commit is not None
        worker_state = replace(
            worker_state,
            phase="waiting",
            core=number,
            restarted=False,
            edits=False,
            changed=commit.change.number if commit.change is not None else worker_state.changed,
            orders=tuple(order for order in worker_state.orders if not isinstance(order, RestartOrdered)),
        )
        state = self._with_worker(state, w, worker_state)
        return self._send_all(state, w, outcome.requests)

    def _restart(self, state: State, w: int, worker_state: WorkerState) -> State:
        number, outcome = self._workers.after(worker_state.core, Call("pull_again"))
        state = self._with_worker(
            state, w, replace(worker_state, phase="waiting", core=number, restarted=True)
        )
        return self._send_all(state, w, outcome.requests)

    def _begin_edit(self, state: State, w: int) -> State:
        worker_state = state.workers[w]
        number, outcome = self._workers.after(worker_state.core, Call("begin_edit"))
        phase: Literal["computing", "waiting"] = "waiting" if outcome.requests else "computing"
        state = self._with_worker(state, w, replace(worker_state, phase=phase, core=number, edits=True))
        return self._send_all(state, w, outcome.requests)

    def _with_worker(self, state: State, w: int, worker_state: WorkerState) -> State:
        return replace(state, workers=put(state.workers, w, self._worker_pool(worker_state)))

    def _with_server(self, state: State, index: int, at: ServerState) -> State:
        return replace(state, servers=put(state.servers, index, self._server_pool(at)))

    def _with_queue(self, state: State, w: int, queue: tuple[Message, ...]) -> State:
        """Return the state with the messages in flight from a worker to the coordinator replaced."""
        at = state.coordinator
        at = self._coordinator_pool(replace(at, queues=put(at.queues, w, queue)))
        return replace(state, coordinator=at)

    # -- messages in flight ------------------------------------------------------------------------------

    def _send_all(self, state: State, w: int, requests: Sequence[Request]) -> State:
        """Append each message from a worker to the queue of its receiver."""
        host = _FromWorker(self, state, w)
        host.carry_out(requests)
        return host.state

    def _to_server(self, state: State, w: int, index: int, message: Message) -> State:
        at = self._server_with(state.servers[index], w, message)
        return replace(state, servers=put(state.servers, index, at))

    def _server_is_sent(self, at: ServerState, w: int, message: Message) -> ServerState:
        """Return the state of a server to which a worker has sent a message."""
        if self._shards_alike and hasattr(message, "shard"):
            message = replace(message, shard=0)
        sent: list[Message] = [message]
        if isinstance(message, Commit) and not self._commits:
            pull = PullRequested(message.shard, message.iteration)
            sent = [replace(message, pulls=False), pull]
        queues = put(at.queues, w, (*at.queues[w], *sent))
        leaves = isinstance(message, messages.WorkerFinished)
        owes = at.owes - {w} if leaves else at.owes | {w}
        return self._server_pool(replace(at, queues=queues, owes=owes))

    def _to_coordinator(self, state: State, w: int, message: Message) -> State:
        if not self._hosted:
            return state  # this coordinator has no effect on workers
        return self._with_queue(state, w, (*state.coordinator.queues[w], message))

    # -- a lost worker, whose undelivered messages are discarded -----------------------------------------

    def _known(self, at: CoordinatorState, w: int) -> bool:
        core = self._coordinators[at.core]
        knows = self._hosted or self._settles
        return knows and (
            w in core.members.present or w in core.reconfigurations.joining or bool(at.queues[w])
        )

    def _end_at_coordinator(self, state: State, w: int) -> State:
        state = self._with_queue(state, w, ())
        return self._at_coordinator(state, Call("disconnected", w, now_ticks=self.now_ticks))

    def _end_at_server(self, state: State, w: int, index: int) -> State:
        at = state.servers[index]
        state = self._with_server(state, index, replace(at, queues=put(at.queues, w, ()), owes=at.owes - {w}))
        if self._settles and not self._servers[at.core].is_connected(w):
            return state  # the coordinator will tell the server
        return self._at_server(state, index, Call("disconnected", w, now_ticks=self.now_ticks))

    # -- at a server --------------------------------------------------------------------------------------

    def _deliver_to_server(self, state: State, w: int, index: int) -> State:
        return self._at_server(state, index, Call("deliver", w, now_ticks=self.now_ticks))

    def _deliver_reply(self, state: State, index: int) -> State:
        at = state.servers[index]
        message, factors = at.replies[0], at.factors
        if isinstance(message, messages.MeanClipped):
            factors |= {(message.pushes, message.factor)}
        state = self._with_server(state, index, replace(at, replies=at.replies[1:], factors=factors))
        return self._at_server(state, index, Call("handle", -1, message, self.now_ticks))

    def _deliver_report(self, state: State, index: int) -> State:
        at = state.servers[index]
        state = self._with_server(state, index, replace(at, reports=at.reports[1:]))
        return self._at_coordinator(state, Call("report", index, at.reports[0], self.now_ticks))

    def _fire_at_server(self, state: State, timer: Timer, index: int) -> State:
        at = state.servers[index]
        state = self._with_server(state, index, replace(at, timers=at.timers - {timer}))
        return self._at_server(state, index, Call("fire", message=timer, now_ticks=self.now_ticks))

    def _at_server(self, state: State, index: int, call: Call) -> State:
        return self._with_sent(state, index, *self._server_after(state.servers[index], index, call))

    def _with_sent(self, state: State, index: int, at: ServerState, sent: tuple[Send, ...]) -> State:
        """Return the state of the job after a server has sent some messages."""
        servers = put(state.servers, index, at)
        state = State(state.workers, servers, state.coordinator, state.losses, state.requested)
        if not sent:
            return state
        host = _FromServer(self, state, index)
        host.carry_out(sent)
        return host.state

    def _server_takes(self, at: ServerState, index: int, call: Call) -> tuple[ServerState, tuple[Send, ...]]:
        """Return the state of a server after a call, and the messages that it sends.

        The call "deliver" stands for the call that a worker's next message causes.
        """
        if call.method == "deliver":
            w = call.worker
            message, *rest = at.queues[w]
            at = replace(at, queues=put(at.queues, w, tuple(rest)))
            call = replace(call, method="handle", message=message)
            if isinstance(message, Hello):
                if w not in self._servers[at.core].expected or self._servers[at.core].is_fenced(w):
                    # The server has been told that the worker is lost, so it refuses the connection.
                    return self._server_pool(at), ()
                call = replace(call, method="connected", message=None)
        core, outcome = self._servers.after(at.core, call)
        at = replace(at, core=core)
        [shard] = self._servers[core].shards.values()
        for entry in outcome.entries:
            at = self._checks.record(at, entry, index)
            # A commit causes two events, and the state of the core is known only after the second one.
            last = not (isinstance(entry.event, events.PushReceived) and self._commits)
            if self._watch:
                self._checks.check_waiting(at.view, entry, shard.sync.sync if last else None)
        taken = _ServerRequests(index)
        taken.carry_out(outcome.requests)
        assert not taken.answered & {w for mean in shard.clipped.measured for w, _ in mean}, (
            f"workers {taken.answered} were answered, but the means {shard.clipped.measured} have not been applied"
        )
        at = replace(
            at,
            timers=at.timers.union(taken.timers),
            owes=at.owes - taken.answered,
            made=at.made.union(taken.made),
            reports=(*at.reports, *taken.squares, *taken.missing),
        )
        return self._server_pool(at), tuple(taken.sent)

    def _answer(self, state: State, index: int, w: int, answer: Answer) -> State:
        """Record a shard's answer to a worker. When the last answer arrives, pass all answers to the core."""
        worker_state = state.workers[w]
        if worker_state.phase != "waiting":
            return state
        if answer.v_train is not None:
            worker_state = replace(worker_state, v_train=max(answer.v_train, worker_state.v_train or 0))
        if index == 0:
            worker_state = replace(worker_state, named=answer.edits)
        if any(w in at.owes for at in state.servers):
            return self._with_worker(state, w, worker_state)
        number = worker_state.core
        requests: tuple[Request, ...] = ()
        for shard in range(len(state.servers)):
            edits = worker_state.named and shard == 0
            answer = Answer(shard, self._workers[number].iteration, 0, worker_state.v_train, edits=edits)
            number, outcome = self._workers.after(number, Call("handle", message=answer))
            requests += outcome.requests
        return self._go_on(state, w, replace(worker_state, core=number, v_train=None, named=False), requests)

    def _go_on(self, state: State, w: int, worker_state: WorkerState, requests: Sequence[Request]) -> State:
        """Let a worker that has received all answers compute its next iteration, or finish."""
        worker_state = replace(worker_state, phase="computing")
        state = self._send_all(self._with_worker(state, w, worker_state), w, requests)
        if self._iteration(worker_state) < self._iterations:
            return state
        _, outcome = self._workers.after(worker_state.core, Call("finish"))
        state = self._with_worker(state, w, WorkerState("finished", changed=worker_state.changed))
        return self._send_all(state, w, outcome.requests)

    # -- at the coordinator -------------------------------------------------------------------------------

    def _deliver_to_coordinator(self, state: State, w: int) -> State:
        message, *rest = state.coordinator.queues[w]
        state = self._with_queue(state, w, tuple(rest))
        return self._at_coordinator(state, Call("handle", w, message, self.now_ticks))

    def _fire_at_coordinator(self, state: State, timer: Timer) -> State:
        at = state.coordinator
        at = self._coordinator_pool(replace(at, timers=at.timers - {timer}))
        return self._at_coordinator(
            replace(state, coordinator=at), Call("fire", message=timer, now_ticks=self.now_ticks)
        )

    def _at_coordinator(self, state: State, call: Call) -> State:
        core, outcome = self._coordinators.after(state.coordinator.core, call)
        host = _FromCoordinator(self, state, core)
        host.carry_out(outcome.requests)
        state, timers = host.state, host.timers
        at = replace(state.coordinator, core=core, timers=timers)
        if not self._changes:
            at = replace(at, timers=frozenset(timer for timer in timers if self._matters(core, timer)))
        return replace(state, coordinator=self._coordinator_pool(at))

    def _matters(self, core: int, timer: Timer) -> bool:
        """Return True if the timer would have an effect now. If not, it never has an effect under the same model."""
        after, outcome = self._coordinators.after(core, Call("fire", message=timer, now_ticks=self.now_ticks))
        return after != core or bool(outcome.requests)

    def _order(self, state: State, w: int, core: int, message: Message) -> State:
        """Send a message from the coordinator to a worker, unless the message comes too late to have an effect."""
        worker_state = state.workers[w]
        iteration = self._iteration(worker_state)
        if isinstance(message, RestartOrdered) and (worker_state.phase, iteration) != (
            "computing",
            message.iteration,
        ):
            return state  # the worker would ignore the message
        if isinstance(message, PlanPublished):
            # After a change, the coordinator processes the events that it kept during the change. These events may
            # cause a plan whose iteration the worker has already passed. The worker then stops later than planned.
            known = self._coordinators[core].job_sync.label(w)
            assert self._changes or message.iteration >= known, (
                f"worker {w} has already passed the iteration at which {message} stops it"
            )
            if self._any_plan:
                message = PlanPublished(message.stop, 0)
        done = iteration + (
            worker_state.phase == "waiting" and not self._workers[worker_state.core].pulls_again
        )
        if worker_state.phase not in ("computing", "waiting", "joining") or done >= self._iterations:
            return state
        return self._with_worker(state, w, replace(worker_state, orders=(*worker_state.orders, message)))


class _FromWorker(Host):
    """Carries out the requests of a worker.

    Attributes:
        state: the state of the job, which changes with each request.
    """

    def __init__(self, job: SmallJob, state: State, w: int) -> None:
        self.state = state
        self._job = job
        self._worker = w

    def send(self, to: Peer, message: Message) -> None:
        if to.role == "coordinator":
            self.state = self._job._to_coordinator(self.state, self._worker, message)
        else:
            self.state = self._job._to_server(self.state, self._worker, to.index, message)

    def proceed(self, request: Proceed) -> None:
        """Do nothing: a worker proceeds as soon as it no longer waits."""


class _ServerRequests(Host):
    """Collects the requests that a server makes in one call.

    Attributes:
        sent: the messages, with their receivers.
        answered: the workers whose pulls are answered.
        timers: the timers that are set.
        made: (number, worker) of each edit that is carried out.
        squares: the squared norms of means, for the coordinator. The norms do not matter, but they differ between
            shards and between means.
        missing: the `MeanMissing` messages, for the coordinator.
    """

    def __init__(self, index: int) -> None:
        self.sent: list[Send] = []
        self.answered: set[int] = set()
        self.timers: set[Timer] = set()
        self.made: set[tuple[int, int]] = set()
        self.squares: list[Message] = []
        self.missing: list[Message] = []
        self._index = index

    def send(self, to: Peer, message: Message) -> None:
        self.sent.append(Send(to, message))

    def _answer(self, to: Peer, answer: Answer) -> None:
        self.answered.add(to.index)
        self.send(to, answer)

    def _report(self, to: Peer, message: messages.MeanMissing) -> None:
        self.missing.append(message)

    senders: ClassVar = {Answer: _answer, messages.MeanMissing: _report}

    def set_timer(self, timer: Timer) -> None:
        self.timers.add(timer)

    def measure(self, mean: Measure) -> None:
        self.squares.append(mean.report(self._index + len(mean.pushes)).message)

    def overwrite(self, edit: Overwrite) -> None:
        self.made.add((edit.number, edit.worker))

    def apply(self, update: Apply) -> None:
        """Do nothing: the recorded entries tell which pushes are applied."""

    def discard(self, push: Discard) -> None:
        """Do nothing, as in `apply`."""

    def preserve(self, push: Preserve) -> None:
        """Do nothing: no gradient is ever overwritten."""


class _FromServer(Host):
    """Delivers those messages of a server that are received immediately. The other messages are in flight as reports.

    Attributes:
        state: the state of the job, which changes with each message.
    """

    def __init__(self, job: SmallJob, state: State, index: int) -> None:
        self.state = state
        self._job = job
        self._index = index

    def send(self, to: Peer, message: Message) -> None:
        """Do nothing: the message has no effect on the job."""

    def _answer(self, to: Peer, answer: Answer) -> None:
        self.state = self._job._answer(self.state, self._index, to.index, answer)

    def _report(self, to: Peer, message: JoinOffered | WorkerWelcomed | PushesReported) -> None:
        call = Call("report", self._index, message, self._job.now_ticks)
        self.state = self._job._at_coordinator(self.state, call)

    senders: ClassVar = {
        Answer: _answer,
        JoinOffered: _report,
        WorkerWelcomed: _report,
        PushesReported: _report,
    }


class _FromCoordinator(Host):
    """Carries out the requests of the coordinator.

    Attributes:
        state: the state of the job, which changes with each request.
        timers: the coordinator's timers.
    """

    def __init__(self, job: SmallJob, state: State, core: int) -> None:
        self.state = state
        self.timers = state.coordinator.timers
        self._job = job
        self._core = core

    def send(self, to: Peer, message: Message) -> None:
        if to.role == "server":
            at = self.state.servers[to.index]
            at = replace(at, replies=(*at.replies, message))
            self.state = self._job._with_server(self.state, to.index, at)
        else:
            self.state = self._job._order(self.state, to.index, self._core, message)

    def _start(self, to: Peer, started: Started) -> None:
        self.state = self._job._start(self.state, to.index, started)

    def _report_loss(self, to: Peer, lost: messages.WorkerLost) -> None:
        if self._job._settles:  # otherwise, the server notices the loss in a separate step
            self.send(to, lost)

    def _ignore(self, to: Peer, message: messages.MainChosen) -> None:
        """Send nothing: the message says which script writes files. No shard or sync model depends on this."""

    senders: ClassVar = {Started: _start, messages.WorkerLost: _report_loss, messages.MainChosen: _ignore}

    def set_timer(self, timer: Timer) -> None:
        self.timers |= {timer}


def _in_any_order(model: SyncModel) -> bool:
    """Return True if the order in which a shard receives messages from different workers has no effect."""
    match model:
        case SpecSync(base=SSP(execution="lazy")):
            return False
        case _:
            return isinstance(model, ElasticBSP | SpecSync)


def _may_hold(model: SyncModel) -> bool:
    """Return True if a shard may hold pushes, under this model or under its substitute after a condition has failed."""
    machine = model.at_shard()
    averages = isinstance(machine, ConditionMachine) and machine.averages
    return averages or isinstance(model, ElasticBSP | Conditions)


def _request_in_flight(at: CoordinatorState) -> bool:
    """Return True if a request for a change is on its way to the coordinator."""
    return any(isinstance(message, SyncRequested) for queue in at.queues for message in queue)


def _labels(at: ServerState, index: int) -> list[tuple[str, int, Timer | None]]:
    """Return (description, worker, timer) of each step in which a shard receives a message or a timer fires."""
    received: list[tuple[str, int, Timer | None]] = [
        (f"shard {index} receives {_text(queue[0])} from worker {w}", w, None)
        for w, queue in enumerate(at.queues)
        if queue
    ]
    return received + [
        (f"shard {index}'s timer fires for iteration {timer.iteration} of worker {timer.worker}", -1, timer)
        for timer in sorted(at.timers)
    ]


def _is_in(at: ServerState, w: int) -> bool:
    return at.view.workers[w].state in ("live", "passed")


@cache  # the same messages occur in many states
def _text(message: Message) -> str:
    match message:
        case Commit(stop=stop, change=change):
            flag = f", which is the last of superstep {stop.superstep}" if stop is not None else ""
            flag += f", which is the last before change {change.number}" if change is not None else ""
            return f"the commit of iteration {message.iteration}{flag}"
        case IterationFinished(superstep=superstep, change=number):
            flag = f", which is the last of superstep {superstep}" if superstep is not None else ""
            flag += f", which is the last before change {number}" if number is not None else ""
            return f"the report on iteration {message.iteration}{flag}"
        case _:
            return f"{type(message).__name__} {getattr(message, 'iteration', '')}".strip()
