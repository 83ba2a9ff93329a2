"""ElasticBSP: the barrier is placed where the predicted waiting time is shortest.

A superstep has two phases. *Monitoring* lasts until every member (participating worker) has pushed twice since the
previous barrier. In the *prediction* phase, the next R end times of each member are extrapolated from the member's last
interval between pushes. The ZipLine algorithm picks one end time per member to minimize the spread d_Z of these times,
and each member stops at the iteration picked for it. Between barriers, pushes are applied as in ASP. The pushes at
which the members stop are averaged and applied once, as in BSP; then all members continue.

There are two state machines. The *planner*, at the coordinator, is notified of each finished iteration and publishes
one plan per superstep. A plan names iterations, not times, and is sent to the workers. Each worker flags its first
push at or after its stop, with the same flag for all shards. The state machine at each *shard* holds only flagged
pushes, and closes the superstep when every member has sent its flagged push, has finished or is lost. Therefore no
two shards can disagree, even if the plan arrives late, and no push or pull ever waits for the planner.

Reference: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning, 2021, sections 3 to 5, Fig. 5.
Admission: A pull after an unflagged push is answered on arrival. A pull after a flagged push is answered when the
superstep closes.
State: At a shard, the held pushes and the waiting pulls of each superstep that is being closed. At the coordinator, the
time of each worker's last push, and the interval between its last two pushes.
Guarantee: A worker that has stopped waits only for members that have not stopped yet. Within a superstep, a worker does
not run past its stop, except for iterations that it computes before the plan arrives. A member's gradient is always
computed on weights that contain all updates up to the previous barrier. From the plan to the next barrier, each of the
n members ends 1 to R iterations. So, while no worker joins, a gradient that is computed on weights pulled after the
plan has a staleness of at most (R - 1)(n - 1) updates. The paper says only that the difference between the workers'
numbers of iterations has a bound "within the R future intervals" (section 3). This bound leaves out the monitoring
phase, in which a worker that is r times as fast as the slowest worker completes up to 2r iterations, however small R
is.
Use: When the workers' speeds differ but are steady, so that end times can be predicted. The run keeps most of the speed
of ASP and still averages gradients at barriers.
Deviations: Of several barriers with the same d_Z, section 4.2 prefers the earliest. In the example of that section,
Fig. 8b, the paper prefers Z_B, at which the workers' numbers of iterations differ by 4, to Z_A, at which they differ by
10. The text does not say which of these two barriers is earlier; by Theorem 1, Z_B is. Here, the earliest barrier is
chosen, as in Fig. 9, whatever the difference between the numbers of iterations is. A worker that joins before the first
push under this model belongs to the first superstep. A worker that joins later runs as in ASP until the next superstep
begins, even if no worker has pushed since the previous barrier. The first push of a worker that computes batches of a
new size on an accelerator does not count as one of the two pushes of the monitoring phase, and neither does the push of
an edit of the weights. The interval that ends with such a push is left out, because it says nothing about the next
intervals. Unless the run has `--hyperparameters raw`, an interval does not contain the time that the script spent
outside of training, for example to evaluate the model, because the next intervals do not contain such a time. Each push
says how long this time was. If two pushes of a worker arrive at the same tick, its interval counts as one tick, because
end times cannot be extrapolated from an interval of 0.

>>> from paceline.sync.events import IterationFinished, WorkerJoined
>>> planner = ElasticBSP(lookahead=4).at_coordinator()
>>> for worker in (0, 1):
...     _ = planner.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> for ticks, worker, iteration in [(1, 0, 0), (2, 0, 1), (3, 0, 2), (3, 1, 0), (4, 0, 3), (5, 0, 4)]:
...     assert planner.handle(IterationFinished(now_ticks=ticks, worker=worker, iteration=iteration)) == []
>>> [action] = planner.handle(IterationFinished(now_ticks=6, worker=1, iteration=1))
>>> action.plan.stops, action.plan.wait_ticks, action.plan.barrier_ticks
(((0, 8), (1, 2)), 0, 9)
"""

from __future__ import annotations

from ..errors import InternalError, InvalidEventError
from ..state import stateful
from ..zipline import solve_periodic
from .actions import AnswerPull, AnyAction, ApplyMean, ApplyPush, DropPush, HoldPush, Plan, PublishPlan
from .events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    Stop,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from .model import Handover, JobMachine, ShardMachine, SyncModel, require_count, require_within, without_torn

MOST_LOOKAHEAD = 100_000
LEAST_INTERVAL_TICKS = 1  # extrapolation needs an interval > 0, but two pushes can have the same time


class ElasticBSP(SyncModel):
    """Elastic bulk synchronous parallel.

    Attributes:
        lookahead: R, the number of end times that are predicted for each worker; an integer >= 1.
    """

    name = "elastic-bsp"
    style = "#009E73", 0
    shown = ("elastic-bsp:lookahead=5",)
    whole_job = True
    agrees_on_means = True
    needs_plans = True

    lookahead: int = 15

    def __post_init__(self) -> None:
        require_count(self.name, "lookahead", self.lookahead, 1)

    def require_runnable(self, workers: int) -> None:
        # The lookahead is limited, because the time to compute a plan grows with the lookahead.
        require_within(self.name, "lookahead", self.lookahead, 1, MOST_LOOKAHEAD)

    def at_shard(self, seed: int = 0, shard: int = 0) -> ElasticShard:
        return ElasticShard()

    def at_coordinator(self, seed: int = 0) -> Planner:
        return Planner(self.lookahead)


@stateful()
class Barrier:
    """The state, at one shard, of the barrier that ends a superstep."""

    def __init__(self, remaining: set[int]) -> None:
        self.remaining = remaining  # live members whose flagged push has not arrived yet
        self.held: list[tuple[int, int]] = []  # (worker, iteration) of the flagged pushes that have arrived
        self.pulls: dict[int, int] = {}  # worker -> iteration of the pull that waits for the barrier

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return what is compared (see `stateful`).

        The order of the held pushes is left out, because a mean always adds them in the order of the workers.
        """
        return {"held": frozenset(self.held)}


@stateful()
class ElasticShard(ShardMachine):
    """The state machine at a shard. It handles unflagged pushes as ASP does, and holds flagged pushes.

    More than one barrier can be open at the same time: if a worker belongs only to the next superstep, its flagged push
    may arrive here before the last flagged push of the current superstep.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, Barrier] = {}  # superstep -> its barrier, in order of opening
        self._closed = -1  # latest superstep that has closed at this shard
        self._stopped_at: dict[int, int] = {}  # worker -> open superstep for which the worker has stopped
        self._first: dict[int, int] = {}  # live worker -> the worker's first superstep as a member

    def check(self, event: AnyEvent) -> None:
        if isinstance(event, PushReceived) and event.stop is not None:
            stop = event.stop
            barrier = self._open.get(stop.superstep)
            if barrier is not None and event.worker in barrier.remaining:
                return  # the usual case, which needs no search of all members
            if event.worker not in stop.members:
                raise InvalidEventError(
                    f"worker {event.worker} stopped for superstep {stop.superstep}, whose members are {stop.members}"
                )

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        worker, iteration = push.worker, push.iteration
        barrier = self._barrier(push.stop)
        if barrier is None:
            return [DropPush(worker, iteration) if push.empty else ApplyPush(worker, iteration)]
        assert push.stop is not None
        barrier.remaining.discard(worker)
        self._stopped_at[worker] = push.stop.superstep
        if push.empty:
            return [DropPush(worker, iteration), *self._close_complete()]
        barrier.held.append((worker, iteration))
        return [HoldPush(worker, iteration), *self._close_complete()]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        if pull.worker in self._stopped_at:
            self._open[self._stopped_at[pull.worker]].pulls[pull.worker] = pull.iteration
            return []
        return [AnswerPull(pull.worker, pull.iteration)]

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self._first[event.worker] = event.superstep
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        del self._first[event.worker]
        for barrier in self._open.values():
            barrier.remaining.discard(event.worker)
            barrier.pulls.pop(event.worker, None)
        self._stopped_at.pop(event.worker, None)
        return self._close_complete()

    def holds(self, worker: int) -> bool:
        return any(holder == worker for barrier in self._open.values() for holder, _ in barrier.held)

    def settle(self, worker: int, kept: int | None) -> list[AnyAction]:
        self.frozen.discard(worker)
        actions: list[AnyAction] = []
        for barrier in self._open.values():
            barrier.held, dropped = without_torn(barrier.held, worker, kept)
            actions += dropped
        return actions if worker in self.counts.count else actions + self._close_complete()

    def waits(self) -> dict[int, str]:
        return {
            worker: f"the end of superstep {superstep}, which workers {sorted(barrier.remaining)} have not reached"
            for superstep, barrier in self._open.items()
            for worker in barrier.pulls
        }

    def hand_over(self) -> Handover:
        barriers = self._open.values()
        held = [key for barrier in barriers for key in barrier.held]
        delayed = {worker: at for barrier in barriers for worker, at in barrier.pulls.items()}
        return Handover(self.counts, held, delayed, {})

    def validate(self) -> None:
        super().validate()
        if self._first.keys() != self.counts.count.keys():
            raise InternalError(
                f"first supersteps {self._first} do not match the live workers {self.counts.count}"
            )
        for superstep, barrier in self._open.items():
            stopped = {worker for worker, at in self._stopped_at.items() if at == superstep}
            if (
                self._is_complete(barrier)
                or barrier.remaining & stopped
                or not barrier.pulls.keys() <= stopped
            ):
                raise InternalError(
                    f"superstep {superstep} is inconsistent: {vars(barrier)}, stopped workers {stopped}"
                )
        if not self._stopped_at.keys() | set().union(*(b.remaining for b in self._open.values())) <= (
            self.counts.count.keys()
        ):
            raise InternalError("a barrier waits for a worker that is not live")

    def _barrier(self, stop: Stop | None) -> Barrier | None:
        """Return the barrier that a push belongs to.

        Return None for an unflagged push, and for a push that is flagged for a superstep that has already closed.
        """
        if stop is None:
            return None
        if stop.superstep in self._open:
            return self._open[stop.superstep]
        if stop.superstep <= self._closed:
            return None
        barrier = Barrier({m for m in stop.members if m in self._first and self._first[m] <= stop.superstep})
        self._open[stop.superstep] = barrier
        return barrier

    def _is_complete(self, barrier: Barrier) -> bool:
        return not barrier.remaining and not (
            self.frozen and any(worker in self.frozen for worker, _ in barrier.held)
        )

    def _close_complete(self) -> list[AnyAction]:
        actions: list[AnyAction] = []
        for superstep in [s for s, barrier in self._open.items() if self._is_complete(barrier)]:
            barrier = self._open.pop(superstep)
            self._closed = max(self._closed, superstep)
            self._stopped_at = {w: at for w, at in self._stopped_at.items() if at != superstep}
            if barrier.held:
                actions.append(ApplyMean(tuple(sorted(barrier.held))))
            actions += [AnswerPull(worker, iteration) for worker, iteration in barrier.pulls.items()]
        return actions


@stateful()
class _Pace:
    """The planner's record of one live worker."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration  # the next iteration that the worker will finish
        self.pushes = 0  # number of pushes since the worker's last barrier, without warm-ups
        self.last_ticks = 0  # time of the worker's last push
        # time between the worker's last two pushes, without the time outside of training
        self.interval_ticks = 0

    def finished(self, event: IterationFinished) -> None:
        if not event.warm_up:
            self.pushes += 1
            self.interval_ticks = max(0, event.now_ticks - self.last_ticks - event.outside_ticks)
        self.last_ticks = event.now_ticks


@stateful(fixed="_lookahead")
class Planner(JobMachine):
    """The state machine at the coordinator: it monitors the workers and publishes one plan per superstep.

    `_unmonitored` and `_remaining` are updated incrementally. Only an event that completes the monitoring or the
    superstep takes time linear in the number of workers.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._pace: dict[int, _Pace] = {}  # live workers, in order of joining
        self._superstep = 0
        self._members: set[int] = set()  # members of the current superstep
        self._begun = False  # True after the first push: from then on, new workers join the next superstep
        self._unmonitored: set[int] = set()  # members with fewer than two pushes since their last barrier
        self._remaining: set[int] | None = None  # members that have yet to stop; None while monitoring

    @property
    def next_superstep(self) -> int:  # type: ignore[override]
        """The first superstep that would include a worker that joins now."""
        return self._superstep + self._begun

    def check(self, event: AnyEvent) -> None:
        if not isinstance(event, IterationFinished) or event.superstep is None:
            return
        if event.superstep != self._superstep or event.worker not in (self._remaining or ()):
            raise InvalidEventError(
                f"worker {event.worker} stopped for superstep {event.superstep}, which does not wait for it "
                f"(the current superstep is {self._superstep})"
            )

    def finished(self, event: IterationFinished) -> list[AnyAction]:
        worker = event.worker
        pace = self._pace[worker]
        pace.iteration = event.iteration + 1
        self._begun = True
        if event.superstep is not None:
            pace.pushes = 0
            assert self._remaining is not None
            self._remaining.discard(worker)
        else:
            pace.finished(event)
            if pace.pushes >= 2:
                self._unmonitored.discard(worker)
        return self._proceed()

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self._pace[event.worker] = _Pace(event.iteration)
        if not self._begun:
            self._members.add(event.worker)
            self._unmonitored.add(event.worker)
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        del self._pace[event.worker]
        self._members.discard(event.worker)
        self._unmonitored.discard(event.worker)
        if self._remaining is not None:
            self._remaining.discard(event.worker)
        return self._proceed()

    def validate(self) -> None:
        if not self._unmonitored <= self._members <= self._pace.keys():
            raise InternalError(f"superstep {self._superstep} has members that are not live: {self._members}")
        if (
            self._unmonitored != {w for w in self._members if self._pace[w].pushes < 2}
            and self._remaining is None
        ):
            raise InternalError(
                f"superstep {self._superstep}: {self._unmonitored} are not the members with fewer than two pushes"
            )

    def _proceed(self) -> list[AnyAction]:
        """If all members have stopped, begin the next superstep; if all have been monitored, publish the plan."""
        awaited = self._members if self._remaining is None else self._remaining
        if not awaited and self._pace:  # all members have stopped, or left before the plan was published
            self._superstep += 1
            self._remaining = None
            for newcomer in self._pace.keys() - self._members:  # newcomers are monitored from this barrier on
                self._pace[newcomer].pushes = 0
            self._members = set(self._pace)
            self._unmonitored = {worker for worker, pace in self._pace.items() if pace.pushes < 2}
        if self._remaining is not None or self._unmonitored or not self._members:
            return []
        self._remaining = set(self._members)
        return [PublishPlan(self._plan(sorted(self._members)))]

    def _plan(self, members: list[int]) -> Plan:
        paces = [self._pace[worker] for worker in members]
        solution = solve_periodic(
            [pace.last_ticks for pace in paces],
            [max(pace.interval_ticks, LEAST_INTERVAL_TICKS) for pace in paces],
            self._lookahead,
        )
        stops = zip(members, paces, solution.picks.tolist(), strict=True)
        return Plan(
            superstep=self._superstep,
            stops=tuple((worker, pace.iteration + pick) for worker, pace, pick in stops),
            wait_ticks=int(solution.wait),
            barrier_ticks=int(solution.barrier),
        )
