"""The checks that a `SmallJob` makes at a shard, based on the events at the shard and the actions of its model."""

from __future__ import annotations

from msgspec.structs import replace

from ..core.requests import Entry
from ..sync import ASP, BSP, SyncModel, events
from ..sync.actions import AnswerPull, ApplyMean, ApplyPush, DropPush, HoldPush, ReportFault, SetTimer
from ..sync.notation import parse_shards
from .admission import Admission, ShardView, WorkerView, admission
from .state_pools import ServerState, put


class ShardChecks:
    """Checks the shards of one job.

    Args:
        first_model: the first model of the job.
        rule: the admission rule of the first model; by default `admission(first_model)`.
        agree: True to store the applied means, so that the means of different shards can be compared at the end.
    """

    def __init__(self, first_model: SyncModel, rule: Admission | None, agree: bool) -> None:
        self._first_model = first_model
        self._rule = rule
        self._agree = agree

    def record(self, at: ServerState, entry: Entry, index: int) -> ServerState:
        """Check the actions that one event caused at a server's shard, and return the new state of the server."""
        assert entry.refused is None, entry.refused
        if isinstance(entry.event, events.OfShard):
            assert not entry.actions, (
                f"{entry.event} caused {entry.actions}, expected no actions of the model"
            )
            return at
        view = _seen(at.view, entry.event)
        if isinstance(entry.event, events.PushReceived) and self._renews(view):
            view = self._counted(view, entry, entry.event)
        if isinstance(entry.event, events.WorkerJoined):
            joined = entry.event.worker, (entry.event.iteration, entry.event.count)
            at = replace(at, joins=frozenset(join for join in at.joins if join[0] != joined[0]) | {joined})
        if not isinstance(entry.event, events.PullRequested | events.PullRepeated | events.TimerFired):
            view = self._advanced(view, index)  # pulls and timers cannot close a round
        if isinstance(entry.event, events.PushReceived) and entry.event.change is not None:
            # First, the push counts in its round. Afterwards, the model is told that the worker has left.
            view = self._advanced(_passed(view, entry.event), index)
        return self._carried_out(replace(at, view=view), entry)

    def check_waiting(self, view: ShardView, entry: Entry, sync: SyncModel | None) -> None:
        """Check that each worker that must wait does wait, and that each worker that waits is allowed to wait.

        `sync` is the model in force at the shard, or None if it is unknown. The shard must run the model that the
        received flags determine.
        """
        event = entry.event
        assert sync in (None, view.sync), f"after {event}, the shard runs {sync}, expected {view.sync}"
        rule = self._admission(view)
        passed = {w for w, worker in enumerate(view.workers) if worker.state == "passed"}
        answered = {action.worker for action in entry.actions if isinstance(action, AnswerPull)}
        assert passed.isdisjoint(answered), (
            f"workers {passed} were answered before the change {view.change} was complete"
        )
        waiting = {w for w, worker in enumerate(view.workers) if worker.asks} - passed
        must_wait = rule.must(view) - passed
        # The first pull of a worker that joins a run in progress waits for the round in which the worker begins.
        joining = {
            w for w, worker in enumerate(view.workers) if worker.joining and worker.pushed > view.round
        }
        may_wait = must_wait | rule.may(view) | joining
        if any(worker.fenced for worker in view.workers):
            may_wait |= {w for w, worker in enumerate(view.workers) if worker.asks}
        assert must_wait <= waiting <= may_wait, (
            f"after {event}, workers {waiting} wait at a shard, but {must_wait} must wait"
            + (f" and {may_wait} may wait" if may_wait != must_wait else "")
        )

    def _advanced(self, view: ShardView, index: int) -> ShardView:
        """Return the view with an updated round, or with the new model if all live workers have passed the change."""
        if any(worker.fenced for worker in view.workers):
            return view
        change = view.change
        if change is None or any(worker.state == "live" for worker in view.workers):
            advanced = view._replace(round=self._round(view))
            if advanced.round > view.round and self._renews(view):
                workers = (worker._replace(newest=False, counted=False) for worker in view.workers)
                return advanced._replace(workers=tuple(workers))
            return advanced
        models = parse_shards(change.sync)
        workers = (
            WorkerView("live", asks=worker.asks) if worker.state == "passed" else worker
            for worker in view.workers
        )
        return ShardView(
            models[index if len(models) > 1 else 0],
            view.sync,
            tuple(workers),
            changed=change.number,
            alone=len(set(models)) == 1,
        )

    def _renews(self, view: ShardView) -> bool:
        """Return True if a push belongs to the round of its weights, regardless of its worker's earlier pushes."""
        return not view.alone and self._admission(view).quorum is not None

    def _counted(self, view: ShardView, entry: Entry, push: events.PushReceived) -> ShardView:
        """Check that only the first nonempty push of a worker on the newest weights is averaged; count this push."""
        worker = view.workers[push.worker]
        averaged = worker.newest and not worker.counted and not push.empty
        assert isinstance(entry.actions[0], HoldPush) == averaged, (
            f"{push} caused {entry.actions[0]}, although the summary of the worker is {worker}"
        )
        worker = worker._replace(counted=worker.counted or averaged)
        return view._replace(workers=put(view.workers, push.worker, worker))

    def _round(self, view: ShardView) -> int:
        """Return V_train, the number of rounds for which enough pushes have been received."""
        live = [worker for worker in view.workers if worker.state == "live"]
        v_train, quorum = view.round, self._admission(view).quorum or len(live)
        while live:
            members = [worker for worker in live if not (worker.joining and worker.pushed > v_train)]
            pushed = sum(
                worker.pushed > v_train or (worker.counted and v_train == view.round) for worker in members
            )
            if members and not (pushed and pushed >= min(quorum, len(members))):
                break
            v_train += 1
        return v_train

    def _admission(self, view: ShardView) -> Admission:
        if self._rule is not None and view.sync is self._first_model:
            return self._rule
        return admission(view.sync)

    def _carried_out(self, at: ServerState, entry: Entry) -> ServerState:
        """Check the actions after one event, and return the server with its pushes, means and pulls updated."""
        event, view = entry.event, at.view
        workers, held, means = list(view.workers), set(at.held), set(at.means)
        fates, renews = 0, self._renews(view)
        for action in entry.actions:
            match action:
                case DropPush(worker, iteration) if isinstance(event, events.WorkerLost):
                    assert (worker, iteration) in held, f"{action} drops a push that is not held"
                    torn = event.kept is not None and iteration > event.kept and worker == event.worker
                    assert torn, f"{action} drops a push that all shards have received"
                    held.remove((worker, iteration))
                case ApplyPush(worker, iteration) | DropPush(worker, iteration) | HoldPush(worker, iteration):
                    assert isinstance(event, events.PushReceived), (
                        f"{action} was caused by {event}, expected a push"
                    )
                    assert (worker, iteration) == (event.worker, event.iteration), (
                        f"{action} names a different push, expected the received push {event}"
                    )
                    fates += 1
                    if isinstance(action, HoldPush):
                        held.add((worker, iteration))
                case ApplyMean(pushes):
                    fenced = {w for w, other in enumerate(view.workers) if other.fenced}
                    assert fenced.isdisjoint(w for w, _ in pushes), (
                        f"{action} contains pushes of lost workers {fenced} before their WorkerLost events"
                    )
                    assert held >= set(pushes), (
                        f"{action} contains pushes that are not held; the held pushes are {held}"
                    )
                    held -= set(pushes)
                    if self._agree:
                        means.add(pushes)
                case AnswerPull(worker, iteration):
                    assert workers[worker].asks, f"{action} answers a pull that was not requested"
                    assert not (view.sync.lockstep and (worker, iteration) in held), (
                        f"{action} was returned before the worker's push was applied"
                    )
                    workers[worker] = workers[worker]._replace(asks=False, deferred=False, joining=False)
                    if renews:
                        workers[worker] = workers[worker]._replace(newest=True)
                case SetTimer():
                    pass
                case ReportFault():
                    worked = ASP() if view.worked.needs_plans else view.worked
                    slowest = min(
                        (worker.pushed for worker in view.workers if worker.state == "live"), default=0
                    )
                    view = view._replace(sync=worked, worked=BSP(), round=slowest)
                    assert action.sync == str(view.sync), (
                        f"{action} names the wrong model, expected the last working model {view.sync}"
                    )
                case _:
                    raise AssertionError(f"a shard cannot carry out {action}")
        assert fates == isinstance(event, events.PushReceived), (
            f"{event} caused {fates} actions that apply, hold or drop a push, expected one per received push"
        )
        view = view._replace(workers=tuple(workers))
        return replace(at, view=view, held=frozenset(held), means=frozenset(means))


def _passed(view: ShardView, push: events.PushReceived) -> ShardView:
    """Return the view after a worker's last push before a change of the model."""
    if push.change is None or push.change.number <= view.changed:
        return view
    worker = view.workers[push.worker]._replace(state="passed")
    return view._replace(workers=put(view.workers, push.worker, worker), change=push.change)


def _seen(view: ShardView, event: events.AnyEvent) -> ShardView:
    """Return the view after one more event."""
    worker = view.workers[event.worker]
    match event:
        case events.WorkerJoined():
            flagged = max((other.last_stop for other in view.workers), default=-1)
            worker = WorkerView("live", event.count or 0, last_stop=flagged, joining=event.pulls)
            worker = worker._replace(newest=view.alone or not event.pulls)
        case events.PushReceived():
            assert view.alone or event.progress is None, (
                f"{event} skips rounds, although the shards run different models"
            )
            worker = worker._replace(pushed=max(worker.pushed, event.progress or 0) + 1, stop=event.stop)
            if event.stop is not None:
                worker = worker._replace(last_stop=event.stop.superstep)
        case events.PullRequested():
            worker = worker._replace(asks=True, deferred=True)
        case events.PullRepeated():
            worker = worker._replace(asks=True, deferred=False)
        case events.TimerFired():
            worker = worker._replace(deferred=False)
        case events.WorkerFenced():
            worker = worker._replace(fenced=True)
        case _:
            worker = WorkerView("left")
    return view._replace(workers=put(view.workers, event.worker, worker))
