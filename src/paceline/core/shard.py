"""A shard's part of the protocol, without tensors: it runs the sync model, counts updates, and records events."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec

from ..errors import InternalError, InvalidEventError
from ..state import DECLARED, restore, snapshot, stateful
from ..sync import SyncModel
from ..sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    ReportFault,
    SetTimer,
)
from ..sync.asp import ASP
from ..sync.bsp import BSP
from ..sync.events import (
    AnyEvent,
    Change,
    Clip,
    MeanClipped,
    PullRepeated,
    PullRequested,
    PushReceived,
    RateTempered,
    RecordedEvent,
    TimerFired,
    WorkerFenced,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.model import Counts, ShardMachine, agree_on_means, without_torn
from ..sync.notation import parse_shards
from ..sync.plugins import blame, blaming
from ..sync.ticks import TICKS_PER_S
from ..sync.translation import Standing
from .joint_batch import StandingEstimator
from .layout import CODECS, WireFormat
from .lease import PackedPushed
from .messages import (
    Answer,
    CutAgreed,
    CutTaken,
    FaultReported,
    LastPush,
    MeanMissing,
    PushCounts,
    ShardState,
)
from .order import Order
from .reconfiguration import Edits, Key
from .requests import (
    COORDINATOR,
    Apply,
    Discard,
    Entry,
    EntryRecorder,
    Measure,
    Preserve,
    Request,
    Send,
    TakeCut,
    Timer,
    worker_peer,
)

INFINITE = float("inf")

MOST_ROUNDS = 64
"""After the round of a cut, a shard waits at most this many rounds for scripts to ask for new batches."""


class Details(NamedTuple):
    """The properties of a push that a shard needs until the push is applied or dropped.

    Attributes:
        samples: number of samples over which the gradient is averaged; None if it is unknown.
        weight: weight of the gradient in a mean; None to use `samples`.
        counted: see `PushFlags`.
        clip: set if the script clips the gradient that is applied.
    """

    samples: int | None
    weight: float | None
    counted: int
    clip: Clip | None


UNKNOWN = Details(None, None, 0, None)

BEGINNING = ShardState()
"""The state of a shard whose weights are the initial ones."""

WHOLE_UPDATE = Standing(1.0)
"""The standing of an update that uses its hyper-parameters as they are."""


class _Outcome(msgspec.Struct):
    """The results of one event.

    Attributes:
        model: the sync model that has decided about the event. The shard may have replaced this model during the event.
        requests: the requests to the host.
        staleness: (worker, iteration, staleness) of each push that is applied.
        standings: the standing of each update, if hyper-parameters are translated.
    """

    model: SyncModel
    requests: list[Request] = []
    staleness: list[tuple[int, int, int]] = []
    standings: list[Standing | None] = []


@stateful(
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
            gradients are then not scaled by their numbers of samples, because `Standing.share` already depends on these
            numbers.
        state: the version and the counts of the weights with which the shard begins.
        replays: True if the events come from a trace. The number of workers that were present at the same time is then
            read from the pushes, because the beginning of a trace does not contain this number.
        wire: the codec of each direction.

    Attributes:
        index: index of the shard.
        sync: runs the sync model, and replaces it when the model changes.
        samples: number of samples in all pushes that were received and not dropped; pushes with an unknown number
            of samples are not counted.
        clipped: holds back requests until means can be clipped.
        standing: estimates the standing of each update; None if hyper-parameters are not translated.
        drawn: which data the workers had drawn before their pushes.
        bases: decides how weights travel; None if weights travel as they are.
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
        wire: WireFormat = WireFormat(),
    ) -> None:
        self.index = index
        first = models[index if len(models) > 1 else 0]
        self.sync = ShardSync(first, seed, index, ticks_per_s, alone=len(set(models)) == 1)
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
        # details of the pushes that are neither applied nor dropped yet, except for pushes without details
        self._details: dict[Key, Details] = {}
        self.clipped = ClippedMeans()
        self.standing = StandingEstimator() if translated else None
        self._edits = Edits(index)
        # the coordinator's questions, each with the pushes in a mean that another shard has measured
        self._asked: list[tuple[Key, ...]] = []
        self._cut: CutAgreed | None = None  # the cut that is yet to be made here
        # pushes that were held when their workers left; a cut waits until these pushes are applied or dropped
        self._orphans = set[Key]()
        # worker -> number of the cut that the next answer to the worker names
        self._to_mark: dict[int, int] = {}
        self.bases = None if wire.exact else Bases(wire)

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
        """Return (worker, number of updates since the worker received its weights) of each live worker."""
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
        cut = self._cut
        try:
            if self.clipped.measured:
                self._require_answered(event)
            if self.sync.needs_staleness and type(event) is PushReceived:
                event = msgspec.structs.replace(event, staleness=self._versions.missed(event.worker))
            if type(event) is PushReceived and not self._replays and self.sync.sync.needs_at_once:
                event = msgspec.structs.replace(event, at_once=self.sync.at_once)
            outcome = _Outcome(self.sync.sync)
            if cut is not None and drawn and drawn != self.drawn.last(event.worker):
                self._cut_if_due(outcome.requests, asked=True)
            actions = self.sync.handle(event)
        except InvalidEventError as error:
            self._cut = cut
            self._record(Entry(event, [], str(error), self.version))
            raise
        if type(event) is not PullRequested:
            self._note(event)
            if self.bases is not None:
                self.bases.note(event)
                if self.sync.sync != outcome.model:
                    self.bases.forget()
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
        """Cut the shard as soon as it has completed the round of the cut, or immediately if the cut has no round."""
        requests: list[Request] = []
        self._cut = cut
        self._cut_if_due(requests)
        return self.clipped.pass_on(requests) if self.clipped.measured else requests

    def give_up_cut(self) -> None:
        """Give up the cut that is yet to be made, if there is one."""
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
        """True if the shard delays its cut only until the scripts ask for their next batches."""
        return (
            self._cut is not None
            and self._cut.round is not None
            and self.round >= self._cut.round
            and self.drawn.known
        )

    def _cut_if_due(self, requests: list[Request], *, asked: bool = False) -> None:
        """Add the requests that cut the shard, if the cut is due.

        In lockstep, all shards have made the same updates after the same round. A script may push several times for
        one batch, and the state of the script can be taken only when the script asks for its next batch. So the shard
        is cut just before the first push with newly drawn data; until then, answers tell the workers of the cut. A
        shard without live workers is cut immediately. Held pushes of workers that have left delay the cut until they
        are applied or dropped.

        Args:
            requests: the list to which the requests are added.
            asked: True if the next push has newly drawn data. If a script asks for no further batches, for example
                because it keeps its batches in a list, the shard stops waiting after `MOST_ROUNDS` rounds.
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
            samples -= self._details.get((worker, iteration), UNKNOWN).counted
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
            if event.samples is not None or event.weight is not None or event.clip is not None:
                key, counted = (event.worker, event.iteration), event.counted
                self._details[key] = Details(event.samples, event.weight, counted, event.clip)
                self.samples += counted
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
        """Discard a push. If it contains an edit, carry out the edit unless it is `torn` (missing at some shards)."""
        key = action.worker, action.iteration
        self._versions.lost += torn
        self._forget(key, counts=not torn and key not in self._edits.pending)
        self._held.discard(key)
        if key in self._edits.pending:
            requests += self._edits.discard(key) if torn else self._edits.carry_out([key])
            return
        counted = self._details.pop(key, UNKNOWN).counted
        self.samples -= counted
        if not torn:
            self._versions.dropped_samples += counted
        requests.append(Discard(self.index, *key))

    def _forget(self, push: Key, *, counts: bool = False) -> None:
        """Record that a push is not applied. If `counts` is True, its share of the joint batch is not lost (see `drop`
        in `joint_batch`)."""
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
        next_edit = 0 if self.index else self._edits.next
        answer = Answer(
            self.index, iteration, version, v_train, in_place, self.samples, edits, next_edit=next_edit
        )
        if self.bases is not None and not in_place:
            codec, base = self.bases.choose(worker, version, common=self._lockstep)
            answer = msgspec.structs.replace(answer, codec=codec, base=base)
        return answer if self._cut is None and not self._to_mark else self._marked(answer, worker)

    def _marked(self, answer: Answer, worker: int) -> Answer:
        """Return the answer, with the number of a cut if the worker must be told of this cut."""
        number = self._to_mark.pop(worker, 0)
        if self._cut is not None and not self.index and self._awaits_ask:
            number = self._cut.number
        return msgspec.structs.replace(answer, cut=number) if number else answer

    def _require_answered(self, event: AnyEvent) -> None:
        """Raise `InvalidEventError` if a worker pushes or pulls although the answer to its last pull is held back.

        The sync model has answered the last pull, so `Order` does not notice that the worker is still waiting.
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
        """Reply to each question about a mean that is certain to be missing here.

        Forget the questions that were answered, and those about a mean that this shard has measured.
        """
        asked = [pushes for pushes in self._asked if not self.clipped.contain(pushes)]
        self._asked = [pushes for pushes in asked if any(map(self._may_average, pushes))]
        return [
            Send(COORDINATOR, MeanMissing(self.index, pushes))
            for pushes in asked
            if pushes not in self._asked
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
    """Return the factor of each push in a mean.

    The factor is the share of `Details.weight` in the sum over all pushes. If any of these weights is unknown, the
    factor is the share of the samples. If the number of samples of any push is unknown as well, all factors are equal.
    """
    for shares in ([each.weight for each in details], [each.samples for each in details]):
        known = [share for share in shares if share is not None]
        if len(known) == len(details):
            if min(known) == max(known):
                break
            return tuple(share / sum(known) for share in known)
    return (1.0 / len(details),) * len(details)


def _max_norm(pushes: Sequence[Key], details: Sequence[Details]) -> float | None:
    """Return the norm to which a mean is clipped; None if the mean is not clipped.

    The mean is clipped if the script of any worker with a push in the mean clips. If workers pass different norms, the
    norm from the most advanced worker is used, as for hyper-parameters.
    """
    clips = [(push, each.clip) for push, each in zip(pushes, details, strict=True) if each.clip is not None]
    if not clips:
        return None
    _, clip = max(clips, key=lambda each: (each[0][1], -each[0][0]))
    return clip.max_norm


# -- Runs the sync model of one shard, and replaces the model during the run ---------------------------------
#
# All shards must change the model at the same boundary, that is, after the same push of each worker. If two shards
# counted the progress of the workers from different iterations, the workers could block each other: worker 0 could wait
# for worker 1 at one shard, and worker 1 could wait for worker 0 at another shard. Therefore the workers determine the
# boundary. The coordinator publishes a change to all workers that are live at this time, the change's *members*. Each
# member flags its next push with the change, in the same way for all shards. This push is the worker's last push under
# the old model. No worker joins while a change is in progress: the coordinator lets a join wait for a change in
# progress, and a change wait for a join in progress. Every live worker is in one of two states:
#
#     in the model     the usual state
#     passed           the worker has sent its flagged push. The old model has processed that push and was then told
#                      that the worker has left, so the model no longer waits for the worker. The worker's pull waits
#                      until every other worker has passed, finished or been lost. Then the workers that have passed
#                      join the new model with equal counts, and their pulls are answered
#
# The flagged pushes themselves mark the boundary, so all shards agree on the boundary even if the
# coordinator's message arrives late. No push or pull goes through the coordinator. `JobSync` implements the
# coordinator's side.
#
# A worker that had left when the change was published is not a member. A shard may learn of the change before it learns
# that this worker has left. In this case, the shard also waits until it learns of the departure. Otherwise, the last
# push of the worker could belong to the old model at one shard, and to the new model at another shard.
#
# If a user-defined condition fails at a shard, only this shard falls back to the last model that worked. That model
# continues with the current counts. Pushes of lost workers that are held at this time, and that other shards may not
# have received, wait for the coordinator's verdict.
#
# Guarantee: If the run makes progress under both models, it also makes progress during the change. Each push is
# applied, averaged or dropped exactly once.


@stateful(about={"at_once": "factors"}, fixed="_seed _shard _ticks_per_s", makes={"_machine": "_new_machine"})
class ShardSync:
    """Runs the sync model of one shard, and replaces it when the model changes.

    Args:
        sync: the first model.
        seed: random seed for the run.
        shard: index of the shard.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
        alone: True if all shards begin with the same model.

    Attributes:
        sync: the model in force.
        needs_staleness: True if the model in force needs the staleness of each push.
        changed_to: the models of all shards after the last change that this shard completed; () before the first one.
        order: phases and labels of all live workers.
        at_once: the largest number of workers that have been present at the same time, under all models and in all
            runs of the job. Workers that wait for a change count as present.
    """

    def __init__(
        self,
        sync: SyncModel,
        seed: int = 0,
        shard: int = 0,
        ticks_per_s: int = TICKS_PER_S,
        *,
        alone: bool = True,
    ) -> None:
        self.sync = sync
        self.needs_staleness = sync.needs_staleness
        self.changed_to: tuple[SyncModel, ...] = ()
        self.order = Order()
        self.at_once = 0
        self._seed = seed
        self._shard = shard
        self._ticks_per_s = ticks_per_s
        self._alone = alone
        self._machine = self._new_machine()
        self._worked: SyncModel = BSP()  # the model to fall back to if a condition fails
        self._change: Change | None = None  # the change in progress
        self._changed = 0  # number of the last change that this shard completed
        self._passed: set[int] = set()  # workers that have passed the change in progress
        # The pushes of frozen workers (see `ShardMachine`) that a failed model held, and that the next model has not
        # taken over.
        self._orphans: list[Key] = []
        # workers that have passed a completed change but have not pulled yet; their pulls are answered on arrival
        self._to_pull: set[int] = set()

    @property
    def counts(self) -> Counts:
        """The push counts c_p of the workers that are in the model."""
        return self._machine.counts

    @property
    def machine(self) -> ShardMachine:
        """The state machine of the model."""
        return self._machine

    def last_iteration(self, worker: int) -> int:
        """Return the label of a live worker's last push."""
        return self.order.label[worker] - 1

    def entry(self, worker: int) -> tuple[int, int]:
        """Return the smallest label and the least c_p with which a worker could join now."""
        with self._blaming("entry"):
            return self.order.first_label(worker), self._machine.entry

    def holds(self, worker: int) -> bool:
        """Return True if a push of this worker is held, and other shards may not have received the push."""
        with self._blaming("holds"):
            return self._machine.holds(worker) or any(push[0] == worker for push in self._orphans)

    def may_join(self, count: int) -> bool:
        """Return True if a worker may still join with this c_p.

        No worker joins during a change. A join that is announced during a change was given up before the change began.
        """
        with self._blaming("may_join"):
            return self._change is None and self._machine.may_join(count)

    def waits(self) -> dict[int, str]:
        """Return, for each worker with a delayed pull, a description of what the pull waits for."""
        undescribed = f"the sync model {self.sync}, which does not describe its delayed pulls"
        waits = dict.fromkeys(filter(self._waiting, self.order.phase), undescribed)
        with self._blaming("waits"):
            waits |= self._machine.waits()
        if self._change is not None:
            boundary = f"workers {sorted(self.counts.count)} to reach the change to {self._change.sync}"
            waits |= {worker: boundary for worker in self._passed if self._waiting(worker)}
        return waits

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Process one event and return the resulting actions.

        Raises:
            InvalidEventError: the event is not allowed; the state is unchanged.
        """
        self.order.require(event)
        if type(event) is PushReceived and event.change is not None:
            self._require_boundary(event, event.change)
        if type(event) is WorkerJoined and self._change is not None:
            raise InvalidEventError(f"worker {event.worker} joined during change {self._change.number}")
        self._machine.check(event)
        self.order.advance(event)  # all checks have passed, so the event can no longer be refused
        if type(event) is WorkerJoined:
            self.at_once = max(self.at_once, len(self.order.phase))
        return self._take(event)

    def validate(self) -> None:
        """Check that the collections of workers are consistent; raise `InternalError` if they are not."""
        self._machine.validate()
        self.order.validate()
        modelled, live = self.counts.count.keys(), self.order.phase.keys()
        if modelled | self._passed != live or len(modelled) + len(self._passed) != len(live):
            raise InternalError(
                f"the live workers {set(live)} do not match those in the model {set(modelled)} and those that have "
                f"passed {self._passed}"
            )
        if self._change is None and self._passed:
            raise InternalError(f"no change is in progress, but workers {self._passed} wait for one")
        if self._change is not None and not (modelled or self._machine.frozen):
            raise InternalError(f"every worker has passed, but the change {self._change} is in progress")
        if not {worker for worker, _ in self._orphans} <= self._machine.frozen:
            raise InternalError(
                f"the pushes {self._orphans} are held, but not all of their workers are frozen"
            )
        if any(self.order.phase[worker] != "pushed" for worker in self._to_pull):
            raise InternalError(
                f"workers {self._to_pull} have yet to pull, but the phases are {self.order.phase}"
            )

    def bind_again(self) -> None:
        """Replace a copied state machine of a user's model by an equal new one: functions of a copy may refer to the
        original.

        A state machine that declares its fields is not replaced: its functions are its own methods, or do not refer to
        a state machine.
        """
        if type(self._machine) in DECLARED:
            return
        state, self._machine = snapshot(self._machine), self._new_machine()
        restore(self._machine, state)

    # -- one event ----------------------------------------------------------------------------------------

    def _require_boundary(self, push: PushReceived, change: Change) -> None:
        ended = f"worker {push.worker} made its last push before the model's change {change.number}"
        if push.worker not in change.members:
            raise InvalidEventError(f"{ended}, but the members of this change are {change.members}")
        if self._change is not None and change.number < self._change.number:
            raise InvalidEventError(f"{ended} during change {self._change.number}")

    def _take(self, event: AnyEvent) -> list[AnyAction]:
        match event:
            case PushReceived():
                actions = self._tell(event)
                return actions if event.change is None else actions + self._pass(event, event.change)
            case PullRequested():
                return self._pull(event)
            case PullRepeated():
                return [AnswerPull(event.worker, event.iteration - 1)]
            case TimerFired() | WorkerJoined():
                return self._tell(event)
            case WorkerFenced():
                if self.holds(event.worker):
                    self._machine.frozen.add(event.worker)
                return []
            case WorkerLost() | WorkerFinished():
                return self._leave(event)
            case _:
                raise InternalError(f"a shard cannot process the event {type(event).__name__}", (event,))

    def _pull(self, pull: PullRequested) -> list[AnyAction]:
        worker = pull.worker
        if worker in self._passed:
            return []  # the pull is answered when the change is complete
        if worker in self._to_pull:
            self._to_pull.remove(worker)
            return [self._answer(worker)]
        return self._tell(pull)

    def _leave(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        worker = event.worker
        actions: list[AnyAction] = []
        if worker in self._machine.frozen and isinstance(event, WorkerLost):
            actions += self._settle_orphans(worker, event.kept)
            actions += self._checked(self._machine.settle(worker, event.kept), event.now_ticks)
        if worker in self.counts.count:
            actions += self._tell(event)
        self._passed.discard(worker)
        self._to_pull.discard(worker)
        return actions + self._complete(event.now_ticks)

    def _settle_orphans(self, worker: int, kept: int | None) -> list[AnyAction]:
        """Apply or drop the pushes of a lost worker that a model held when it failed. See `ShardMachine.settle`."""
        own = [push for push in self._orphans if push[0] == worker]
        applied, dropped = without_torn(own, worker, kept)
        self._orphans = [push for push in self._orphans if push[0] != worker]
        means: list[AnyAction] = [ApplyMean(tuple(sorted(applied)))] if applied else []
        return means + dropped

    def _tell(self, event: AnyEvent) -> list[AnyAction]:
        """Pass an event to the model, and return the actions."""
        return self._checked(self._machine.handle(event), event.now_ticks)

    def _checked(self, actions: list[AnyAction], now_ticks: int) -> list[AnyAction]:
        """Return the model's actions. If a user's condition has failed, fall back to the last model that worked."""
        if (fault := self._machine.fault) is not None:
            self.sync = ASP() if self._worked.needs_plans else self._worked
            self.needs_staleness = self.sync.needs_staleness
            replacement = self._new_machine()
            actions.append(ReportFault(fault.reason, fault.traceback, str(self.sync)))
            replacement.frozen = frozen = self._machine.frozen
            handover = self._machine.hand_over()
            unsettled = [push for push in handover.held if push[0] in frozen]
            actions += replacement.take_over(handover, now_ticks)
            self._orphans += [push for push in unsettled if not replacement.holds(push[0])]
            self._machine, self._worked = replacement, BSP()
        for action in actions:
            if type(action) is AnswerPull:
                self.order.answered(action.worker)
        return actions

    # -- a change -----------------------------------------------------------------------------------------

    def _pass(self, push: PushReceived, change: Change) -> list[AnyAction]:
        """Record that a worker has made its last push under the old model."""
        if change.number <= self._changed:
            return []  # the change was completed without this worker, so no other worker waits for this one
        worker = push.worker
        if self._change is None or self._change.number < change.number:
            # A higher number means that the coordinator has published the change again, because all members that had
            # passed the earlier change were lost.
            self._change = change
        self._passed.add(worker)
        # The old model keeps the pushes of a worker that leaves, but no longer waits for the worker.
        actions = self._tell(WorkerFinished(now_ticks=push.now_ticks, worker=worker))
        return actions + self._complete(push.now_ticks)

    def _complete(self, now_ticks: int) -> list[AnyAction]:
        """Start the new model if every live worker has passed the boundary.

        No push of a lost worker may be held, because the old model must apply all held pushes.
        """
        change = self._change
        if change is None or self.counts.count or self._machine.frozen:
            return []
        models = parse_shards(change.sync)
        self._worked, self.sync = self.sync, models[self._shard if len(models) > 1 else 0]
        self._alone = len(set(models)) == 1
        self.needs_staleness = self.sync.needs_staleness
        self._machine = self._new_machine()
        answers: list[AnyAction] = []
        for worker, phase in sorted(self.order.phase.items()):
            self._tell(WorkerJoined(now_ticks=now_ticks, worker=worker, iteration=self.order.label[worker]))
            if phase == "waiting":
                answers.append(self._answer(worker))
            elif phase == "pushed":
                self._to_pull.add(worker)
        self._passed = set()
        self._change, self._changed, self.changed_to = None, change.number, models
        return answers

    def _new_machine(self) -> ShardMachine:
        with self._blaming("at_shard"):
            machine = self.sync.at_shard(self._seed, self._shard)
            machine.ticks_per_s = self._ticks_per_s
            machine.alone = self._alone
        return machine

    def _blaming(self, method: str) -> AbstractContextManager[None]:
        return blaming(self.sync, f"shard {self._shard}", method)

    def _waiting(self, worker: int) -> bool:
        return self.order.phase[worker] == "waiting"

    def _answer(self, worker: int) -> AnyAction:
        """Answer a pull without consulting the model."""
        self.order.answered(worker)
        return AnswerPull(worker, self.last_iteration(worker))


# -- Holds back a mean that is clipped, and all later requests of a shard, until the mean's factor is known ----
#
# The norm of a joint gradient is known only when every shard has computed its part of the mean. Therefore a
# shard first asks its host to measure the mean, and reports the squared norm to the coordinator
# (`core.joint_batch`). Until the coordinator returns the factor, the shard keeps the update and everything
# that its sync model decides afterwards, in order. So the model does not notice the delay: its events and
# actions are the same as without clipping. A worker whose answer is kept cannot push again, so a shard keeps
# at most a few requests for each worker.
#
# A push that is applied on arrival need not wait: it is multiplied by the factor that its worker has computed from its
# own gradient. The commit of the push contains this factor, and the norm to which a mean would be clipped.


@stateful()
class ClippedMeans:
    """The measured means of one shard, and the requests that wait for their factors.

    Attributes:
        measured: the pushes of each mean whose factor is unknown, in the order in which the means were measured.
    """

    def __init__(self) -> None:
        self.measured: list[tuple[Key, ...]] = []
        self._kept: deque[Request] = deque()

    @property
    def kept_updates(self) -> int:
        """The number of updates that are kept."""
        return sum(type(request) is Apply for request in self._kept)

    @property
    def kept_answers(self) -> set[int]:
        """The workers whose answers are kept."""
        return {
            request.to.index
            for request in self._kept
            if type(request) is Send and type(request.message) is Answer
        }

    def measure(self, update: Apply, max_norm: float) -> list[Request]:
        """Return the requests that measure a mean, and then apply it."""
        self.measured.append(update.pushes)
        return [Measure(update.shard, update.pushes, update.scales, max_norm), update]

    def pass_on(self, requests: Iterable[Request]) -> list[Request]:
        """Return the new requests of a shard that the host may carry out now, and keep the rest."""
        ready: list[Request] = []
        for request in requests:
            if type(request) is Measure or not (self._kept or self._waits(request)):
                ready.append(request)
            else:
                self._kept.append(request)
        return ready

    def clip(self, pushes: tuple[Key, ...], factor: float) -> list[Request]:
        """Multiply a measured mean by its factor. Return the requests that are no longer kept.

        Raises:
            InvalidEventError: no such mean was measured. The state is unchanged.
        """
        if pushes not in self.measured:
            raise InvalidEventError(f"a factor for the mean of the pushes {pushes}, which was not measured")
        self.measured.remove(pushes)
        self._kept = deque(
            _scaled(request, factor) if type(request) is Apply and request.pushes == pushes else request
            for request in self._kept
        )
        ready: list[Request] = []
        while self._kept and not self._waits(self._kept[0]):
            ready.append(self._kept.popleft())
        return ready

    def leave(self, worker: int) -> None:
        """Remove the answers to a worker that has left."""
        peer = worker_peer(worker)
        self._kept = deque(
            request for request in self._kept if not (type(request) is Send and request.to == peer)
        )

    def contain(self, pushes: Sequence[Key]) -> bool:
        """Return True if any of these pushes is in a mean whose factor is unknown."""
        return any(push in mean for mean in self.measured for push in pushes)

    def _waits(self, request: Request) -> bool:
        return type(request) is Apply and request.pushes in self.measured


def _scaled(update: Apply, factor: float) -> Apply:
    return msgspec.structs.replace(update, scales=tuple(scale * factor for scale in update.scales))


# -- The data that each worker's script had drawn before its pushes, as far as one shard knows ----------------
#
# A `Commit` says which data the script had drawn. If the worker is lost, the shard reports what was drawn before the
# worker's last push. If the job is cut, the shard reports what was drawn before the worker's last push whose effect is
# in the weights. So the shard keeps an entry for each held push, and the entry before the first held push.

Drawn = tuple[PackedPushed, ...]

MOST_ENTRIES = 16
"""If a worker has more entries than this, the entries that are no longer needed are forgotten."""


@stateful()
class DrawnAtShard:
    """The data that the workers had drawn before their pushes to one shard.

    >>> drawn = DrawnAtShard()
    >>> drawn.received(0, 0, (1,), unapplied=[])
    >>> drawn.received(0, 1, (2,), unapplied=[(0, 1)])
    >>> drawn.last(0), drawn.until(0, 0)
    ((2,), (1,))
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[tuple[int, Drawn]]] = {}  # worker -> (iteration, drawn), in order

    def received(self, worker: int, iteration: int, drawn: Drawn, unapplied: Collection[Key]) -> None:
        """Record a push. If the worker has many entries, forget those that no push in `unapplied` needs any more."""
        entries = self._entries.get(worker)
        if entries is None:
            entries = self._entries[worker] = []
        entries.append((iteration, drawn))
        if len(entries) > MOST_ENTRIES:
            while len(entries) > 1 and (worker, entries[1][0]) not in unapplied:
                del entries[0]

    @property
    def known(self) -> bool:
        """True if a live worker has drawn anything."""
        return bool(self._entries)

    def last(self, worker: int) -> Drawn:
        """Return what a worker had drawn before its last push; () if no push is recorded."""
        entries = self._entries.get(worker)
        return entries[-1][1] if entries else ()

    def until(self, worker: int, iteration: int) -> Drawn:
        """Return what a worker had drawn before its last push with at most this label; () if there is none."""
        return next(
            (drawn for label, drawn in reversed(self._entries.get(worker, ())) if label <= iteration), ()
        )

    def forget(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._entries.pop(worker, None)


# -- Computes the staleness of each push at a shard: how many updates its gradient does not take into account


@stateful(fixed="_first")
class Versions:
    """Counts the updates at one shard and computes the staleness of each push.

    Args:
        version: number of updates in the weights with which the shard begins.

    Attributes:
        version: number of updates that have been applied.
        lost: number of pushes that were dropped because their workers were lost.
        dropped_samples: number of samples in the pushes that were dropped for other reasons.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = self._first = version
        self.lost = self.dropped_samples = 0
        self._means = self._averaged = 0  # number of means, and of pushes in them
        self._dropped = 0  # number of pushes that are in no update, including lost ones
        self._pulled: dict[int, int] = {}  # live worker -> version of the worker's weights
        # push that is neither applied nor dropped yet -> version of the weights on which its gradient was computed
        self._computed_on: dict[Key, int] = {}

    @property
    def workers(self) -> Iterable[int]:
        """The live workers."""
        return self._pulled

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return the values on which requests depend.

        Instead of totals, these are the numbers of updates that the weights of each worker lack.
        """
        missed = {worker: self.missed(worker) for worker in self._pulled}
        counts = dict.fromkeys(("version", "lost", "dropped_samples", "_means", "_averaged", "_dropped"))
        return {**counts, "_pulled": missed, "_computed_on": self._computed_on.keys()}

    def note(self, event: AnyEvent) -> None:
        """Record an event that the model has accepted. Call this before recording the resulting actions."""
        if type(event) is PushReceived:
            self._computed_on[event.worker, event.iteration] = self._pulled[event.worker]
        elif type(event) is WorkerJoined:
            self._pulled[event.worker] = self.version
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            del self._pulled[event.worker]

    def answered(self, worker: int) -> None:
        """Record that a worker receives the current weights."""
        self._pulled[worker] = self.version

    def missed(self, worker: int) -> int:
        """Return the number of updates since a worker received its weights; 0 if the worker is not live."""
        return self.version - self._pulled.get(worker, self.version)

    @property
    def unapplied(self) -> Collection[Key]:
        """The pushes that have been received, and are neither applied nor dropped yet."""
        return self._computed_on.keys()

    def pushes(self) -> PushCounts:
        """Return what has become of all pushes. Pushes that are neither applied nor dropped count as lost."""
        return PushCounts(
            applied=self.version - self._first - self._means,
            averaged=self._averaged,
            dropped=self._dropped - self.lost,
            lost=self.lost + len(self._computed_on),
            dropped_samples=self.dropped_samples,
        )

    def is_unapplied(self, push: Key) -> bool:
        """Return True if a push has been received, and is neither applied nor dropped yet."""
        return push in self._computed_on

    def drop(self, worker: int, iteration: int) -> None:
        """Record that a push is dropped."""
        del self._computed_on[worker, iteration]
        self._dropped += 1

    def apply_one(self, push: Key) -> tuple[int, int, int]:
        """Record one update with a single push; return (worker, iteration, staleness) of the push."""
        missed = self.version - self._computed_on.pop(push)
        self.version += 1
        return (*push, missed)

    def apply(self, pushes: Iterable[Key]) -> list[tuple[int, int, int]]:
        """Record one update; return (worker, iteration, staleness) for each of its pushes."""
        staleness = [(*key, self.version - self._computed_on.pop(key)) for key in pushes]
        self.version += 1
        if len(staleness) > 1:  # the mean of a single push is the push itself
            self._means += 1
            self._averaged += len(staleness)
        return staleness


# -- Says how the weights of a shard travel: as they are, rounded, as a base, or as a difference to a base ---


@stateful(fixed="_wire")
class Bases:
    """Decides with which codec each answer of a shard travels, and knows which base each worker has (see `layout`).

    Bases are numbered. A base whose number follows that of the last base is encoded as the difference to the last base.
    If a number is left out, the next base is the weights themselves: no worker has a base with the number that was left
    out, so every worker receives the whole next base.

    Args:
        wire: the codec of each direction.

    Example:
        >>> bases = Bases(WireFormat.read("int4"))
        >>> [bases.choose(worker, version=7, common=True) for worker in (0, 1)]
        [('float32', 2), ('float32', 2)]
        >>> [bases.choose(worker, version=8, common=True) for worker in (0, 1, 2)]
        [('int4', 3), ('int4', 3), ('float32', 3)]
    """

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self._pulls: dict[
            int, tuple[int | None, bool]
        ] = {}  # worker -> (parameter set that the worker pulls, True if it pulls exact weights)
        # set -> (number of its last base, version of the weights in this base, or None if this number is left out)
        self._latest: dict[int | None, tuple[int, int | None]] = {}
        self._held: dict[
            tuple[int, int | None], int
        ] = {}  # (worker, set) -> number of the base that the worker has

    def note(self, event: AnyEvent) -> None:
        """Record an event that the sync model has accepted."""
        if type(event) is PushReceived:
            self._pulls[event.worker] = event.set_index, event.edit is not None
            if event.edit is not None:
                self.forget()
        elif type(event) is PullRepeated:  # the answer is encoded if the worker computes with the weights
            self._pulls[event.worker] = None, not event.restart or event.edit is not None
        elif type(event) is WorkerLost or type(event) is WorkerFinished:
            self.leave(event.worker)

    def leave(self, worker: int) -> None:
        """Record that a worker has no base, because it leaves, or connects again."""
        self._pulls.pop(worker, None)
        for key in [key for key in self._held if key[0] == worker]:
            del self._held[key]

    def forget(self) -> None:
        """Let the next base of each set be the weights themselves."""
        self._latest = {part: (number + 1, None) for part, (number, _) in self._latest.items()}

    def choose(self, worker: int, version: int, *, common: bool) -> tuple[str, int]:
        """Return the codec of an answer, and the number of its base; 0 if the answer uses no base.

        Args:
            worker: the worker that receives the answer.
            version: version of the weights.
            common: True if all workers read the same versions of the weights.
        """
        part, exact = self._pulls.get(worker, (None, False))
        codec = self._wire.codec_of_weights(common=common)
        # The base of all sets together is of no use once the sets have bases of their own.
        if exact or (part is None and self._latest.keys() - {None}):
            return "float32", 0
        if not CODECS[codec].based:
            return ("float32" if worker not in self._pulls else codec), 0
        number, encoded = self._latest.get(part, (1, None))
        if encoded != version:
            number += 1
            self._latest[part] = number, version
        held = self._held.get((worker, part))
        self._held[worker, part] = number
        return (codec if held == number - 1 else "float32"), number
