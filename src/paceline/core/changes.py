"""What a host hosts: the model in force, and the passage to the next one.

A job may change its sync model in mid-run. All shards must change at one boundary: if two shards counted a worker's
progress from different iterations, one of them could wait for worker 0 because of worker 1 and the other for worker
1 because of worker 0. So the boundary is made by the workers. The coordinator publishes a change; each member flags
its next push with it, identically to all shards, and has thereby ended the old model. Two machines:

    ShardSync   takes a flagged push by the old model, which then sees the worker leave: so nobody waits for it, and
                what it had pushed is applied, averaged or dropped as ever. Its pull waits here. When every member has
                sent its flagged push, has finished or is lost, the members join the new model, with equal counts,
                and the pulls are answered. Whoever has joined while the change was under way is a *guest*: it lives
                by no model, waits for nobody and is waited for by nobody, until it passes a change itself
    JobSync     orders the changes, one at a time: the next is published when this one is complete everywhere. A
                worker that has passed and starts its next iteration shows it: every shard has answered it. If all
                who had passed are lost before that, nobody knows which shards have changed; if somebody has joined
                meanwhile, they do not know of it. It is published anew then, to all

Neither knows more of the models than the contract in `model`. A flagged push arrives with the boundary in it, so no
two shards can disagree, however late the coordinator's word, and the coordinator is on the path of no push or pull.

A condition of a user that fails is dealt with here too: the shard alone goes back to the last model that worked, with
the counts as they are.

Guarantee: live whenever both models are; each push is applied, averaged or dropped exactly once.
"""

from __future__ import annotations

from collections import deque

from ..errors import InternalError, InvalidEventError
from ..sync.actions import AnswerPull, AnyAction, ApplyPush, DropPush, PublishChange, ReportFault
from ..sync.asp import ASP
from ..sync.bsp import BSP
from ..sync.conditions import ConditionMachine
from ..sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.ledger import Ledger
from ..sync.model import JobMachine, ShardMachine
from ..sync.notation import AnySyncModel, parse_shards

__all__ = ["JobSync", "ShardSync"]

MOST_REQUESTED = 1000  # changes that have yet to be made


class ShardSync:
    """One shard's sync model, through all changes.

    Args:
        sync: the model to begin with.
        seed: the run's.
        shard: its index.

    Attributes:
        sync: the model in force.
        changed_to: the models of all shards, by the last change that was completed here; () before the first.
    """

    def __init__(self, sync: AnySyncModel, seed: int = 0, shard: int = 0) -> None:
        self.sync = sync
        self._seed = seed
        self._shard = shard
        self._machine: ShardMachine = sync.at_shard(seed, shard)
        self._worked: AnySyncModel = BSP()  # what a condition that fails is replaced with
        self._change: Change | None = None  # under way
        self.changed_to: tuple[AnySyncModel, ...] = ()
        self._changed = 0  # number of that change
        self._remaining: set[int] = set()  # its live members whose flagged push has not come
        self._joined_after: dict[int, int] = {}  # live worker -> the last change published before it joined
        self._guests = Ledger()  # those who have joined during a change, see above
        # Workers at the boundary, with the iteration of their flagged push: those that have yet to pull, and those
        # whose pull waits. The first may outlast the change; the second never do.
        self._to_pull: dict[int, int] = {}
        self._pulled: dict[int, int] = {}

    @property
    def ledger(self) -> Ledger:
        """That of the model in force. A worker at the boundary is not in it."""
        return self._machine.ledger

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it. Raises `InvalidEventError`, state unchanged."""
        if self._change is None and not self._to_pull and not self._guests.count and type(event) in _ORDINARY:
            if type(event) is PushReceived and event.change is not None:
                return self._arrive(event, event.change)
            return self._tell(event)
        match event:
            case PullRepeated() if event.worker in self._to_pull:
                raise InvalidEventError(
                    f"worker {event.worker} pulled again before the pull after its last push"
                )
            case PullRepeated():
                (self._guests if event.worker in self._guests.count else self.ledger).repeated(event)
                return [AnswerPull(event.worker, event.iteration - 1)]
            case PushReceived() if event.worker in self._to_pull or event.worker in self._pulled:
                raise InvalidEventError(
                    f"worker {event.worker} sent a push before the pull after its last one"
                )
            case PushReceived() if event.change is not None:
                return self._arrive(event, event.change)
            case PullRequested() if event.worker in self._to_pull or event.worker in self._pulled:
                return self._pull_at_boundary(event)
            case WorkerJoined():
                return self._join(event)
            case WorkerLost() | WorkerFinished():
                return self._leave(event)
            case PushReceived() if event.worker in self._guests.count:
                return [self._take_from_guest(event)]
            case PullRequested() if event.worker in self._guests.count:
                self._guests.pulled(event)
                self._guests.answered(event.worker)
                return [AnswerPull(event.worker, event.iteration)]
            case _:
                return self._tell(event)

    def last_iteration(self, worker: int) -> int:
        """The label of the last push of a live worker that waits."""
        return self._pulled[worker] if worker in self._pulled else self.ledger.label(worker) - 1

    def waits(self) -> dict[int, str]:
        """For each pull that is delayed, what it waits for."""
        boundary = (
            f"the change to {self._change.sync}, for workers {sorted(self._remaining)}"
            if self._change
            else ""
        )
        return self._machine.waits() | dict.fromkeys(self._pulled, boundary)

    def validate(self) -> None:
        """Cross-check the collections derived from one another."""
        self._machine.validate()
        live = self.ledger.count.keys()
        guests = self._guests.count.keys()
        self._guests.validate()
        if self._change is None and (
            self._pulled or self._remaining or not self._to_pull.keys() <= live | guests
        ):
            raise InternalError(f"no change is under way, and yet {self._pulled} wait for {self._remaining}")
        if self._change is not None and (not self._remaining or not self._remaining <= live | guests):
            raise InternalError(
                f"the change {self._change} waits for {self._remaining} of {set(live | guests)}"
            )
        if live & guests or self._pulled.keys() & (live | guests | self._to_pull.keys()):
            raise InternalError(
                f"{set(live)}, guests {set(guests)} and those at the boundary {self._pulled} overlap"
            )

    def _tell(self, event: AnyEvent) -> list[AnyAction]:
        """Hand an event to the model in force. If a condition fails over it, go back to what worked."""
        actions = self._machine.handle(event)
        machine = self._machine
        if isinstance(machine, ConditionMachine) and machine.fault is not None:
            fault = machine.fault
            replacement = self._worked.at_shard(self._seed, self._shard)
            self.sync = self._worked
            if not isinstance(replacement, ConditionMachine):  # it cannot go on from counts, or needs plans
                replacement, self.sync = ASP().at_shard(), ASP()
            self._machine = replacement
            actions.append(ReportFault(fault.reason, fault.traceback, str(self.sync)))
            actions += replacement.inherit(machine, event.now_s)
            self._worked = BSP()
        return actions

    # -- the passage --------------------------------------------------------------------------------------

    def _arrive(self, push: PushReceived, change: Change) -> list[AnyAction]:
        """A worker's last push under the old model."""
        if push.worker not in change.members:
            raise InvalidEventError(
                f"worker {push.worker} ended the model for change {change.number}, whose members are {change.members}"
            )
        if self._change is not None and change.number < self._change.number:
            raise InvalidEventError(
                f"worker {push.worker} ended the model for change {change.number} during {self._change.number}"
            )
        guest = push.worker in self._guests.count
        actions = [self._take_from_guest(push)] if guest else self._tell(push)
        if change.number <= self._changed:  # completed without it: nobody waits for it any more
            return actions
        if self._change is None or self._change.number < change.number:
            # Published anew, since all members of the earlier one are gone, though it is not known here yet.
            self._change = change
            self._remaining = {
                m for m in change.members if self._joined_after.get(m, change.number) < change.number
            }
            self._remaining &= self.ledger.count.keys() | self._guests.count.keys()
        self._to_pull[push.worker] = push.iteration
        self._remaining.discard(push.worker)
        left = WorkerFinished(now_s=push.now_s, worker=push.worker)
        if guest:
            self._guests.left(left)
        else:  # the old model sees it leave: it waits for it no more, and forgets none of its pushes
            actions += self._tell(left)
        return actions + self._complete(push.now_s)

    def _pull_at_boundary(self, pull: PullRequested) -> list[AnyAction]:
        worker = pull.worker
        if self._to_pull.get(worker) != pull.iteration:
            raise InvalidEventError(
                f"worker {worker} sent a pull of iteration {pull.iteration}, expected "
                + (f"{self._to_pull[worker]}" if worker in self._to_pull else "none: it waits already")
            )
        del self._to_pull[worker]
        if self._change is None or worker in self.ledger.count or worker in self._guests.count:
            return [AnswerPull(worker, pull.iteration)]  # the change that it has passed is complete
        self._pulled[worker] = pull.iteration
        return []

    def _leave(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        worker = event.worker
        actions: list[AnyAction] = []
        if worker in self._guests.count:
            self._guests.left(event)
        elif worker in self.ledger.count or not (worker in self._to_pull or worker in self._pulled):
            actions = self._tell(event)
        self._to_pull.pop(worker, None)
        self._pulled.pop(worker, None)
        self._joined_after.pop(worker, None)
        self._remaining.discard(worker)
        return actions + (self._complete(event.now_s) if self._change is not None else [])

    def _join(self, event: WorkerJoined) -> list[AnyAction]:
        worker = event.worker
        if worker in self._to_pull or worker in self._pulled or worker in self._guests.count:
            raise InvalidEventError(f"worker {worker} joined, but it is live already")
        actions: list[AnyAction] = []
        if event.change > self._changed:
            self._guests.joined(event, 0)
        else:
            actions = self._tell(event)
        self._joined_after[worker] = event.change
        return actions

    def _take_from_guest(self, push: PushReceived) -> AnyAction:
        self._guests.pushed(push)
        return (DropPush if push.empty else ApplyPush)(push.worker, push.iteration)

    def _complete(self, now_s: float) -> list[AnyAction]:
        """Pass to the new model, if every member is at the boundary or has left."""
        if self._remaining:
            return []
        change, old = self._change, self.ledger
        assert change is not None
        updates: list[AnyAction] = []
        answers: list[AnyAction] = []  # after all updates
        members = {
            worker: last + 1
            for worker, last in (self._to_pull | self._pulled).items()
            if worker not in old.count and worker not in self._guests.count
        }
        for worker in list(old.count):  # no members: they have joined since the change was published
            label, phase = old.label(worker), old.phase(worker)
            self._guests.joined(WorkerJoined(now_s=now_s, worker=worker, iteration=label), 0)
            if phase == "pushed":
                self._to_pull[worker] = label - 1
            elif phase == "waiting":
                answers.append(AnswerPull(worker, label - 1))
            for action in self._tell(WorkerFinished(now_s=now_s, worker=worker)):
                (answers if isinstance(action, AnswerPull) else updates).append(action)
        models = parse_shards(change.sync)
        self._worked, self.sync = self.sync, models[self._shard if len(models) > 1 else 0]
        self._machine = self.sync.at_shard(self._seed, self._shard)
        for worker in sorted(members):
            self._tell(WorkerJoined(now_s=now_s, worker=worker, iteration=members[worker]))
        answers += [AnswerPull(worker, self._pulled[worker]) for worker in sorted(self._pulled)]
        self._pulled = {}
        self._change, self._changed, self.changed_to = None, change.number, models
        return updates + answers


_ORDINARY = {PushReceived, PullRequested, TimerFired}
"""Events that need no second look while no change is under way, the first two above all."""


class JobSync:
    """The coordinator's part: the machine of the model in force, where it has one here, and the order of changes.

    Args:
        sync: what the job begins with, in the notation of the command line: one model, or one for each shard.
        seed: the run's.

    Attributes:
        sync: what is in force, or will be when the change under way is complete; "" if nobody knows any more.
    """

    def __init__(self, sync: str, seed: int = 0) -> None:
        self.sync = sync
        self._seed = seed
        self._machine: JobMachine | None = self._new_machine(sync)
        self._live: set[int] = set()
        self._seen = {"schedule": -1, "script": -1}  # of each source, the last request that was made
        self._requested: deque[str] = deque()  # and that have yet to be published
        self._changes = 0  # how many have been published
        self._change: Change | None = None  # under way
        self._certain = False  # is it known that every shard has made it, or will
        self._remaining: set[int] = set()  # its members of whom it is not known that they have passed
        self._passed: dict[int, WorkerJoined] = {}  # the others: as what each will join the new model
        self._labels: dict[int, int] = {}  # the iteration that each of these will finish next
        self._computing: set[int] = set()  # of these, those that have started it, where that is to be told
        self._early: list[AnyEvent] = []  # what is known of them under the new model, until it is there
        self._joined: set[int] = set()  # those who are no members
        self._to_start: dict[int, int] = {}  # worker that has passed -> its first iteration, yet to start

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take one event; return what follows from it. Raises `InvalidEventError`, state unchanged."""
        match event:
            case SyncRequested():
                return self._request(event)
            case IterationFinished() if event.change is not None:
                return self._pass(event, event.change)
            case IterationStarted() if event.worker in self._to_start:
                return self._start(event)
            case IterationFinished() if event.worker in self._to_start:
                raise InvalidEventError(
                    f"worker {event.worker} finished iteration {event.iteration}, which it has yet to start"
                )
            case WorkerLost() | WorkerFinished():
                return self._leave(event)
            case TimerFired() if self._change is not None:
                return []  # the old model's
            case _ if self._change is not None:
                return self._during_change(event)
            case WorkerJoined():
                actions = self._tell(event)
                self._live.add(event.worker)
                return actions + self._publish_next()
            case _:
                return self._tell(event)

    @property
    def changes(self) -> int:
        """How many have been published."""
        return self._changes

    @property
    def next_superstep(self) -> int:
        """The first one that a worker is a member of which joins now; 0 where no barriers are planned."""
        return self._machine.next_superstep if self._machine is not None else 0

    def validate(self) -> None:
        """Cross-check the collections derived from one another."""
        if self._machine is not None:
            self._machine.validate()
        if not self._to_start.keys() <= self._live:
            raise InternalError(f"{self._to_start} have yet to start, but {self._live} are live")
        waiting = self._remaining or self._passed or self._joined or self._early or self._labels
        if self._change is None and (waiting or (self._requested and self._live)):
            raise InternalError("no change is under way, and yet something waits for one")
        if self._change is not None and (
            self._remaining | self._passed.keys() | self._joined != self._live
            or self._remaining & self._passed.keys()
            or self._labels.keys() != self._passed.keys()
        ):
            raise InternalError(f"the change {self._change} waits for {self._remaining} of {self._live}")

    def _new_machine(self, sync: str) -> JobMachine | None:
        models = parse_shards(sync)
        return models[0].at_coordinator(self._seed) if len(set(models)) == 1 else None

    def _require_expected(self, event: IterationStarted) -> None:
        if not any(model.needs_starts for model in parse_shards(self.sync)):
            raise InvalidEventError(
                f"worker {event.worker} started iteration {event.iteration}, which {self.sync} does not ask for"
            )

    def _tell(self, event: AnyEvent) -> list[AnyAction]:
        if isinstance(event, IterationStarted):
            self._require_expected(event)
        if self._machine is not None:
            return self._machine.handle(event)
        if isinstance(event, WorkerJoined):
            self._require_new(event)
        elif not isinstance(event, TimerFired):
            self._require_live(event)
        if isinstance(event, PushReceived | PullRequested | PullRepeated):
            raise InternalError(f"no coordinator is told of a {type(event).__name__}")
        return []

    # -- changes ------------------------------------------------------------------------------------------

    def _request(self, event: SyncRequested) -> list[AnyAction]:
        self._require_live(event)
        seen = self._seen[event.source]
        if event.number <= seen:
            return []
        if event.number > seen + 1 or len(self._requested) >= MOST_REQUESTED:
            raise InvalidEventError(
                f"worker {event.worker} asks for change {event.number} of the {event.source}, expected {seen + 1} at "
                f"most, and no more than {MOST_REQUESTED} that have yet to be made"
            )
        self._seen[event.source] = event.number
        self._requested.append(event.sync)
        return self._publish_next()

    def _publish_next(self) -> list[AnyAction]:
        while self._requested and self._change is None and self._live:
            sync = self._requested.popleft()
            if sync != self.sync:
                return self._publish(sync)
        return []

    def _publish(self, sync: str) -> list[AnyAction]:
        self.sync = sync
        self._changes += 1
        self._change = Change(number=self._changes, members=tuple(sorted(self._live)), sync=sync)
        self._remaining = set(self._live)
        self._certain = False
        self._machine = None  # whatever it still plans comes too late
        return [PublishChange(self._change)]

    def _pass(self, event: IterationFinished, number: int) -> list[AnyAction]:
        """A member has ended the old model."""
        if self._change is None or number != self._change.number or event.worker not in self._remaining:
            raise InvalidEventError(
                f"worker {event.worker} ended the model for change {number}, which does not wait for it"
            )
        worker, following = event.worker, event.iteration + 1
        self._remaining.remove(worker)
        self._passed[worker] = WorkerJoined(now_s=event.now_s, worker=worker, iteration=following)
        self._labels[worker] = self._to_start[worker] = following
        return self._complete()

    def _start(self, event: IterationStarted) -> list[AnyAction]:
        """It has been answered by every shard. The new model is not told: nobody started its first iteration late."""
        if event.iteration != self._to_start[event.worker]:
            raise InvalidEventError(
                f"worker {event.worker} started iteration {event.iteration}, expected {self._to_start[event.worker]}"
            )
        del self._to_start[event.worker]
        if event.worker not in self._passed:  # of an earlier change
            return []
        self._computing.add(event.worker)
        self._certain = True
        return self._complete()

    def _leave(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        worker = event.worker
        self._require_live(event)
        actions = self._tell(event) if self._change is None else []
        self._live.remove(worker)
        self._to_start.pop(worker, None)
        if self._change is None:
            return actions
        self._remaining.discard(worker)
        self._joined.discard(worker)
        self._passed.pop(worker, None)
        self._labels.pop(worker, None)
        self._computing.discard(worker)
        self._early = [early for early in self._early if early.worker != worker]
        return self._complete()

    def _during_change(self, event: AnyEvent) -> list[AnyAction]:
        match event:
            case WorkerJoined():
                self._require_new(event)
                self._live.add(event.worker)
                self._joined.add(event.worker)
            case IterationFinished() | IterationStarted():
                self._require_live(event)
                if event.worker in self._passed:  # otherwise it is under the old model
                    self._note_early(event)
            case _:
                raise InternalError(f"no coordinator is told of a {type(event).__name__}")
        return []

    def _note_early(self, event: IterationFinished | IterationStarted) -> None:
        """Keep what is for the new model's machine, which must not refuse it later: somebody else speaks then."""
        worker, starts = event.worker, isinstance(event, IterationStarted)
        if event.iteration != self._labels[worker]:
            raise InvalidEventError(
                f"{type(event).__name__} of worker {worker}, iteration {event.iteration}, expected "
                f"{self._labels[worker]}"
            )
        needs_starts = any(model.needs_starts for model in parse_shards(self.sync))
        if isinstance(event, IterationStarted):
            self._require_expected(event)
        elif event.superstep is not None:
            raise InvalidEventError(
                f"worker {worker} stopped for superstep {event.superstep}, before there is a plan"
            )
        if needs_starts and starts == (worker in self._computing):
            raise InvalidEventError(
                f"worker {worker} {'started' if starts else 'finished'} iteration {event.iteration}, which it has "
                + ("started already" if starts else "yet to start")
            )
        if starts:
            self._computing.add(worker)
        else:
            self._computing.discard(worker)
            self._labels[worker] += 1
        self._early.append(event)

    def _complete(self) -> list[AnyAction]:
        """Begin with the new model, if every member has passed or left and every shard will have it."""
        if self._remaining or (self._passed and not self._certain):
            return []
        passed, early = self._passed, self._early
        anew = self._joined or not self._certain
        self._change, self._passed, self._joined, self._early, self._labels = None, {}, set(), [], {}
        self._computing = set()
        if anew:
            sync, self.sync = self.sync, ""
            self._requested.appendleft(sync)
            return self._publish_next()
        self._machine = self._new_machine(self.sync)
        actions: list[AnyAction] = []
        if self._machine is not None:
            for event in [*(passed[worker] for worker in sorted(passed)), *early]:
                actions += self._machine.handle(event)
        return actions + self._publish_next()

    def _require_live(self, event: AnyEvent) -> None:
        if event.worker not in self._live:
            raise InvalidEventError(f"{type(event).__name__} of worker {event.worker}, which is not live")

    def _require_new(self, event: WorkerJoined) -> None:
        if event.worker in self._live:
            raise InvalidEventError(f"worker {event.worker} joined, but it is live already")
