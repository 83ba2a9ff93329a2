"""A shard's part of the protocol, without tensors: it runs the sync model, counts updates, and records events."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import msgspec

from ..errors import InternalError, InvalidEventError
from ..plugins.failures import blame
from ..state import stateful
from ..sync import SyncModel
from ..sync.actions import AnswerPull, ApplyMean, ApplyPush, DropPush, HoldPush, ReportFault, SetTimer
from ..sync.events import (
    AnyEvent,
    Clip,
    MeanClipped,
    PullRepeated,
    PullRequested,
    PushReceived,
    RateTempered,
    RecordedEvent,
    WorkerFinished,
    WorkerLost,
)
from ..sync.model import agree_on_means
from ..sync.ticks import TICKS_PER_S
from ..sync.translation import Standing
from .changes.edits import Edits
from .data.drawn_at_shard import DrawnAtShard
from .protocol.entry import Entry, EntryRecorder
from .protocol.lease import PackedPushed
from .protocol.messages import Answer, CutAgreed, CutTaken, FaultReported, LastPush, MeanMissing, ShardState
from .protocol.requests import (
    COORDINATOR,
    Apply,
    Discard,
    Preserve,
    Request,
    Send,
    TakeCut,
    Timer,
    worker_peer,
)
from .sync.clipped_means import ClippedMeans
from .sync.shard_sync import ShardSync
from .sync.standing import StandingEstimator
from .sync.versions import Versions

__all__ = ["BEGINNING", "Shard"]

INFINITE = float("inf")

MOST_ROUNDS = 64
"""Number of rounds after that of a cut for which a shard waits until the scripts ask for their next batches."""

Key = tuple[int, int]
"""A push: (worker, iteration)."""


class Details(NamedTuple):
    """What a shard needs to know about a push until it is applied or dropped.

    Attributes:
        samples: number of samples over which the gradient is averaged; None if it is unknown.
        repeated: True if these samples were counted with an earlier push.
        clip: set if the script clips the gradient that is applied.
    """

    samples: int | None
    repeated: bool
    clip: Clip | None


UNKNOWN = Details(None, False, None)

BEGINNING = ShardState()
"""The state of a shard whose weights are the initial ones."""

WHOLE_UPDATE = Standing(1.0)
"""The standing of an update that uses its hyper-parameters as they are."""


class _Outcome(NamedTuple):
    """What follows from one event.

    Attributes:
        model: the sync model that has decided. The event may have replaced it already.
        requests: the requests to the host.
        staleness: (worker, iteration, staleness) of each push that is applied.
        standings: the standing of each update, if hyper-parameters are translated.
    """

    model: SyncModel
    requests: list[Request]
    staleness: list[tuple[int, int, int]]
    standings: list[Standing | None]


@stateful(
    decides="sync samples clipped standing drawn _versions _held _details _edits _asked _cut _to_mark _orphans",
    fixed="index _first _readers _recorder _usual_samples _replays",
    about={
        "samples": "staleness",
        "_versions": "staleness",
        "drawn": "cuts",
        "_cut": "cuts",
        "_to_mark": "cuts",
        "_orphans": "cuts",
    },
)
class Shard:
    """The core of one shard: it runs the sync model and turns the events at the shard into requests to the host.

    Args:
        index: index of the shard.
        models: the first sync model of the run, or one model for each shard.
        seed: random seed for the run, used by the sync model.
        readers: the workers that can read the weights directly from the server's memory.
        recorder: receives each event and its actions; None to record nothing.
        usual_samples: usual number of samples in a push. A push that is applied on arrival is scaled by its number of
            samples divided by this number. None to disable this scaling.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
        translated: True to translate the hyper-parameters of each update (see `paceline.sync.translation`). The
            gradients are then not scaled by their numbers of samples, because the share of the update contains them.
        state: how far the weights have come with which the shard begins.
        replays: True if the events are those of a trace. They then say how many workers were present at once, because
            the beginning of the trace does not.

    Attributes:
        index: index of the shard.
        sync: runs the sync model, and replaces it when the model changes.
        samples: number of samples in all pushes that were received and not dropped; pushes with an unknown number
            of samples are not counted.
        clipped: holds back requests until means can be clipped.
        standing: estimates the standing of each update; None if hyper-parameters are not translated.
        drawn: what the workers had drawn before their pushes.
    """

    def __init__(
        self,
        index: int,
        models: Sequence[SyncModel],
        seed: int = 0,
        readers: Set[int] = frozenset(),
        recorder: EntryRecorder | None = None,
        usual_samples: int | None = None,
        ticks_per_s: int = TICKS_PER_S,
        translated: bool = False,
        state: ShardState = BEGINNING,
        replays: bool = False,
    ) -> None:
        self.index = index
        self.sync = ShardSync(models[index if len(models) > 1 else 0], seed, index, ticks_per_s)
        self.sync.at_once = state.at_once
        self.samples = state.samples
        self.drawn = DrawnAtShard()
        self._replays = replays
        self._first = models
        self._readers = readers
        self._recorder = recorder
        self._versions = Versions(state.version)
        self._held: set[Key] = set()  # held pushes whose gradients have not been copied
        self._usual_samples = usual_samples
        # details of the pushes that are neither applied nor dropped yet, except for those without any
        self._details: dict[Key, Details] = {}
        self.clipped = ClippedMeans()
        self.standing = StandingEstimator() if translated else None
        self._edits = Edits(index)
        # pushes that other shards have measured in a mean, of which the coordinator asks whether they are in one here
        self._asked: list[tuple[Key, ...]] = []
        self._cut: CutAgreed | None = None  # the cut that is yet to be made here
        self._orphans: set[Key] = set()  # pushes that were held when their workers left
        self._to_mark: dict[int, int] = {}  # worker -> number of a cut of which its next answer tells it

    @property
    def version(self) -> int:
        """The number of updates that have been applied, not counting means that have yet to be clipped."""
        return self._versions.version - self.clipped.kept_updates

    def waits(self) -> dict[int, str]:
        """Return, for each worker that waits for an answer, a description of what the answer waits for."""
        norm = "the norms that the other shards compute in order to clip the joint gradient"
        return dict.fromkeys(self.clipped.kept_answers, norm) | self.sync.waits()

    @property
    def round(self) -> int:
        """Number of rounds that all live workers have completed."""
        return self.sync.counts.slowest

    def staleness(self) -> tuple[tuple[int, int], ...]:
        """Return (worker, number of updates since it has received the weights) of each live worker."""
        return tuple((worker, self._versions.missed(worker)) for worker in sorted(self._versions.workers))

    def handle(self, event: RecordedEvent, drawn: tuple[PackedPushed, ...] = ()) -> list[Request]:
        """Process one event and return the requests to the host.

        Args:
            event: the event.
            drawn: what the worker had drawn before this push. See `Commit`.

        Raises:
            InvalidEventError: the event is not allowed. The state is unchanged, and the refusal is recorded.
            UserCodeError: a sync model of the user failed, or returned actions that cannot be carried out.
        """
        if isinstance(event, MeanClipped):
            return self._clip_mean(event)
        if isinstance(event, RateTempered):
            return self._temper(event)
        try:
            return self._decide(event, drawn)
        except Exception as error:
            blame(self.sync.sync, f"shard {self.index}", event, error)

    def _decide(self, event: AnyEvent, drawn: tuple[PackedPushed, ...]) -> list[Request]:
        """Let the sync model decide about an event, and return the requests that carry out its actions."""
        try:
            if self.clipped.measured:
                self._require_answered(event)
            if self.sync.needs_staleness and type(event) is PushReceived:
                event = msgspec.structs.replace(event, staleness=self._versions.missed(event.worker))
            if type(event) is PushReceived and not self._replays and self.sync.sync.needs_at_once:
                event = msgspec.structs.replace(event, at_once=self.sync.at_once)
            outcome = _Outcome(self.sync.sync, [], [], [])
            if self._cut is not None and drawn and drawn != self.drawn.last(event.worker):
                self._cut_if_due(outcome.requests, asked=True)
            actions = self.sync.handle(event)
        except InvalidEventError as error:
            self._record(Entry(event, [], str(error), self.version))
            raise
        if type(event) is not PullRequested:
            self._note(event)
        if drawn and type(event) is PushReceived:
            self.drawn.received(event.worker, event.iteration, drawn, self._versions.unapplied)
        edits = (
            type(event) is PullRepeated
            and event.edit is not None
            and self._edits.name(event.worker, event.edit)
        )
        requests = outcome.requests
        gap = 0
        for action in actions:
            if type(action) is AnswerPull:
                if self._cut is not None:
                    self._cut_if_due(requests)
                if (ahead := self.sync.counts.gap(action.worker)) > gap:
                    gap = ahead
                self._answer_pull(action, edits, requests)
            elif type(action) is ApplyPush:
                self._apply_push(action, outcome)
            elif type(action) is ApplyMean:
                self._apply_mean(action, outcome)
            elif type(action) is HoldPush:
                self._held.add((action.worker, action.iteration))
            elif type(action) is DropPush:
                self._drop_push(action, requests, torn=type(event) is WorkerLost)
            elif type(action) is SetTimer:
                requests.append(Timer(action.due_ticks, action.worker, action.iteration, self.index))
            elif type(action) is ReportFault:
                faulted = FaultReported(self.index, action.reason, action.traceback, action.sync)
                requests.append(Send(COORDINATOR, faulted))
            else:
                raise InternalError(f"a shard cannot carry out {action}", (event,))
        if self._cut is not None:
            self._cut_if_due(requests)
        standings = outcome.standings if any(outcome.standings) else []
        self._record(Entry(event, actions, None, self._versions.version, outcome.staleness, gap, standings))
        if self.clipped.measured:
            if type(event) is WorkerLost or type(event) is WorkerFinished:
                self.clipped.leave(event.worker)
            requests = self.clipped.pass_on(requests)
        return requests + self._replies() if self._asked else requests

    def cut(self, cut: CutAgreed) -> list[Request]:
        """Cut the shard as soon as it has completed the round of the cut, or soon if the cut has no round."""
        requests: list[Request] = []
        self._cut = cut
        self._cut_if_due(requests)
        return self.clipped.pass_on(requests) if self.clipped.measured else requests

    def give_up_cut(self) -> None:
        """Make no cut, unless it has been made already."""
        self._cut = None

    def ask(self, pushes: tuple[Key, ...]) -> list[Request]:
        """Reply with a `MeanMissing`, now or later, if this shard will not measure a mean with any of the pushes."""
        self._asked.append(pushes)
        return self._replies()

    def may_clip(self, worker: int) -> bool:
        """Return True if a worker may clip the gradient that is applied (see `SyncModel.agrees_on_means`)."""
        in_model = worker in self.sync.counts.count
        return not in_model or agree_on_means(self.sync.changed_to or self._first)

    def welcome(self, worker: int) -> Send:
        """Return the request that sends a worker its first weights."""
        return Send(worker_peer(worker), self._answer(worker, -1, None))

    @property
    def _awaits_ask(self) -> bool:
        """True if the shard is cut as soon as the scripts have asked for their next batches."""
        return (
            self._cut is not None
            and self._cut.round is not None
            and self.round >= self._cut.round
            and self.drawn.known
        )

    def _cut_if_due(self, requests: list[Request], *, asked: bool = False) -> None:
        """Add the requests that cut the shard, if the time has come.

        In lockstep, all shards have made the same updates after the same round. A script may push several times for
        one batch, and only when it asks for its next one can its state be taken. So the shard waits for the first
        push with data that was drawn later, and is cut before this push. Meanwhile, answers tell the workers of the
        cut. If no worker is live, none of them makes a further update. A held push of a worker that has left counts
        as used already, or will be settled.

        Args:
            requests: the requests to which those are added.
            asked: True if the next push has newly drawn data. A script that asks for no further batches, for example
                because it keeps them in a list, is not waited for after some rounds.
        """
        cut, versions = self._cut, self._versions
        assert cut is not None
        labels = self.sync.order.label
        if self.sync.machine.frozen or any(map(versions.is_unapplied, self._orphans)):
            return
        if cut.round is not None and labels:
            patient = self.round < cut.round + MOST_ROUNDS
            if self.round < cut.round or (self._awaits_ask and patient and not asked):
                return
        self._cut = None
        held: dict[int, int] = {}  # worker -> label of its first push that is held
        samples = self.samples
        for worker, iteration in versions.unapplied:
            held[worker] = min(iteration, held.get(worker, iteration))
            details = self._details.get((worker, iteration), UNKNOWN)
            if details.samples is not None and not details.repeated:
                samples -= details.samples
        last = {worker: held.get(worker, label) - 1 for worker, label in sorted(labels.items())}
        taken = CutTaken(
            cut.number,
            self.index,
            ShardState(versions.version, samples, self.sync.at_once),
            versions.pushes(),
            tuple(LastPush(worker, label, self.drawn.until(worker, label)) for worker, label in last.items()),
        )
        requests += [TakeCut(self.index, cut.number), Send(COORDINATOR, taken)]
        if self.index == 0 and not asked:
            self._to_mark = dict.fromkeys(last, cut.number)

    def _note(self, event: AnyEvent) -> None:
        """Record what an event other than a pull says about a push, or about a worker that leaves."""
        self._versions.note(event)
        if self.standing is not None:
            self.standing.note(event)
        if type(event) is PushReceived:
            if event.samples is not None or event.clip is not None:
                key = event.worker, event.iteration
                self._details[key] = Details(event.samples, event.repeated, event.clip)
                if event.samples is not None and not event.repeated:
                    self.samples += event.samples
            if event.edit is not None:
                self._edits.receive((event.worker, event.iteration), event.edit)
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            self._edits.leave(event.worker)
            self._to_mark.pop(event.worker, None)
            held = {push for push in self._versions.unapplied if push[0] == event.worker}
            self._orphans = {push for push in self._orphans if self._versions.is_unapplied(push)} | held

    def _answer_pull(self, action: AnswerPull, edits: bool, requests: list[Request]) -> None:
        worker, iteration = action.worker, action.iteration
        self._versions.answered(worker)
        if self.standing is not None:
            self.standing.answered(worker)
        if self._held and (worker, iteration) in self._held:
            self._held.remove((worker, iteration))
            requests.append(Preserve(self.index, worker, iteration))
        answer = self._answer(worker, iteration, action.v_train, edits=edits)
        requests.append(Send(worker_peer(worker), answer))

    def _apply_push(self, action: ApplyPush, outcome: _Outcome) -> None:
        key = action.worker, action.iteration
        if self._edits.pending and key in self._edits.pending:
            self._forget(key)
            outcome.requests.extend(self._edits.carry_out([key]))
            return
        outcome.staleness.append(self._versions.apply_one(key))
        standing = self._standing((key,), outcome)
        scale = action.scale
        if not 0.0 < scale < INFINITE:
            raise InternalError(f"{action} has the scale {scale}, expected a finite number > 0")
        if self._details and (details := self._details.pop(key, None)) is not None:
            if details.samples is not None and self._usual_samples and not self._translates(outcome.model):
                scale *= details.samples / self._usual_samples
            if details.clip is not None:
                scale *= details.clip.factor
        outcome.requests.append(Apply(self.index, (key,), (scale,), standing))

    def _apply_mean(self, action: ApplyMean, outcome: _Outcome) -> None:
        """Apply the mean of the gradients, and then carry out the edits of the same round."""
        self._held.difference_update(action.pushes)
        pushes: tuple[Key, ...] = action.pushes
        edited = [push for push in pushes if push in self._edits.pending] if self._edits.pending else []
        if edited:
            pushes = tuple(push for push in pushes if push not in edited)
        if pushes:
            outcome.staleness.extend(self._versions.apply(pushes))
            details = [self._details.pop(push, UNKNOWN) for push in pushes]
            update = Apply(self.index, pushes, _mean_scales(details), self._standing(pushes, outcome))
            max_norm = _max_norm(pushes, details)
            updates = [update] if max_norm is None else self.clipped.measure(update, max_norm)
            outcome.requests.extend(updates)
        if edited:
            for push in edited:
                self._forget(push)
            outcome.requests.extend(self._edits.carry_out(edited))

    def _drop_push(self, action: DropPush, requests: list[Request], *, torn: bool) -> None:
        """Discard a push. An edit is carried out instead, unless it is `torn`: some shards have not received it."""
        key = action.worker, action.iteration
        self._versions.lost += torn
        self._forget(key, counts=not torn and key not in self._edits.pending)
        self._held.discard(key)
        if key in self._edits.pending:
            requests += self._edits.discard(key) if torn else self._edits.carry_out([key])
            return
        details = self._details.pop(key, UNKNOWN)
        if details.samples is not None and not details.repeated:
            self.samples -= details.samples
            if not torn:
                self._versions.dropped_samples += details.samples
        requests.append(Discard(self.index, *key))

    def _forget(self, push: Key, *, counts: bool = False) -> None:
        """Record that a push is not applied. If it `counts`, the next update makes up for it."""
        self._versions.drop(*push)
        if self.standing is not None:
            self.standing.drop(push, counts=counts)

    def _translates(self, model: SyncModel) -> bool:
        """Return True if the hyper-parameters of this model's updates are translated."""
        return self.standing is not None and not model.scales_pushes

    def _standing(self, pushes: Sequence[Key], outcome: _Outcome) -> Standing | None:
        """Return the standing of an update; None to use its hyper-parameters as they are."""
        if self.standing is None:
            return None
        standing = self.standing.apply(pushes, outcome.model)
        translated = self._translates(outcome.model) and standing != WHOLE_UPDATE
        outcome.standings.append(standing if translated else None)
        return outcome.standings[-1]

    def _answer(self, worker: int, iteration: int, v_train: int | None, *, edits: bool = False) -> Answer:
        in_place = worker in self._readers and self._lockstep
        version = self._versions.version
        answer = Answer(self.index, iteration, version, v_train, in_place, self.samples, edits)
        return answer if self._cut is None and not self._to_mark else self._marked(answer, worker)

    def _marked(self, answer: Answer, worker: int) -> Answer:
        """Return an answer that tells its worker of the cut that is in progress, or was made last."""
        number = self._to_mark.pop(worker, 0)
        if self._cut is not None and not self.index and self._awaits_ask:
            number = self._cut.number
        return msgspec.structs.replace(answer, cut=number) if number else answer

    def _require_answered(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if a worker pushes or pulls although its last answer is kept.

        The sync model has answered that pull, so `Order` does not notice.
        """
        sends = isinstance(event, PushReceived | PullRequested | PullRepeated)
        if sends and event.worker in self.clipped.kept_answers:
            kind = type(event).__name__
            raise InvalidEventError(f"worker {event.worker} sent a {kind} before its pull was answered")

    def _clip_mean(self, event: MeanClipped) -> list[Request]:
        try:
            requests = self.clipped.clip(event.pushes, event.factor)
        except InvalidEventError as error:
            self._record(Entry(event, [], str(error), self._versions.version))
            raise
        self._record(Entry(event, version=self._versions.version))
        return requests

    def _temper(self, event: RateTempered) -> list[Request]:
        if self.standing is not None:
            self.standing.temper = event.factor
        self._record(Entry(event, version=self._versions.version))
        return []

    def _replies(self) -> list[Request]:
        """Return a reply for each mean that is certain to be missing here, and forget those that need no reply."""
        missing = [pushes for pushes in self._asked if not any(map(self._may_average, pushes))]
        self._asked = [
            pushes for pushes in self._asked if pushes not in missing and not self.clipped.contain(pushes)
        ]
        return [
            Send(COORDINATOR, MeanMissing(self.index, pushes))
            for pushes in missing
            if not self.clipped.contain(pushes)
        ]

    def _may_average(self, push: Key) -> bool:
        """Return True if a push has been received and not applied yet, or may still be received."""
        worker, iteration = push
        return (
            self._versions.is_unapplied(push) or self.sync.order.label.get(worker, iteration + 1) <= iteration
        )

    @property
    def _lockstep(self) -> bool:
        """True if workers may read the weights directly from the server's memory, instead of copying them.

        The result must be the same at all shards, because a worker reads either all slices in this way or none.
        Therefore it depends on the models that were given for all shards, not on the model to which a single shard
        has fallen back after a condition has failed.
        """
        return all(model.lockstep for model in self.sync.changed_to or self._first)

    def _record(self, entry: Entry) -> None:
        if self._recorder is not None:
            self._recorder.record(entry)


def _mean_scales(details: Sequence[Details]) -> tuple[float, ...]:
    """Return the factor of each push in a mean: its share of all samples.

    If the number of samples of any push is unknown, all factors are equal.
    """
    counts = [each.samples for each in details if each.samples is not None]
    if len(counts) < len(details) or min(counts) == max(counts):
        return (1.0 / len(details),) * len(details)
    return tuple(count / sum(counts) for count in counts)


def _max_norm(pushes: Sequence[Key], details: Sequence[Details]) -> float | None:
    """Return the largest norm of a mean; None if the mean is not clipped.

    The mean is clipped if any of its workers clips. If they pass different norms, the norm from the most advanced
    worker is used, as for hyper-parameters.
    """
    clips = [(push, each.clip) for push, each in zip(pushes, details, strict=True) if each.clip is not None]
    if not clips:
        return None
    _, clip = max(clips, key=lambda each: (each[0][1], -each[0][0]))
    return clip.max_norm
