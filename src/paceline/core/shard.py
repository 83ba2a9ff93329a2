"""A shard without its tensors: it runs the sync model, counts updates, records events, and returns requests."""

from __future__ import annotations

from collections.abc import Sequence, Set

from ..errors import InternalError, InvalidEventError
from ..sync import SyncModel
from ..sync.actions import AnswerPull, ApplyMean, ApplyPush, DropPush, HoldPush, ReportFault, SetTimer
from ..sync.events import AnyEvent
from .entry import Entry, EntryRecorder
from .messages import Answer, FaultReported
from .requests import COORDINATOR, Apply, Discard, Preserve, Request, Send, Timer, worker_peer
from .shard_sync import ShardSync
from .versions import Versions

__all__ = ["Shard"]


class Shard:
    """A shard's part of the protocol: it turns the events at the shard into requests to the host.

    Args:
        index: index of the shard.
        models: the first sync model of the run, or one for each shard.
        seed: random seed for the run, used by the sync model.
        readers: the workers that can read the weights in the server's memory.
        recorder: receives each event and its actions; None to record nothing.

    Attributes:
        index: index of the shard.
        sync: runs the sync model, and replaces it when the model changes.
    """

    def __init__(
        self,
        index: int,
        models: Sequence[SyncModel],
        seed: int = 0,
        readers: Set[int] = frozenset(),
        recorder: EntryRecorder | None = None,
    ) -> None:
        self.index = index
        self.sync = ShardSync(models[index if len(models) > 1 else 0], seed, index)
        self._first = models
        self._readers = readers
        self._recorder = recorder
        self._versions = Versions()
        self._held: set[tuple[int, int]] = set()  # (worker, iteration) of held pushes that were not copied

    @property
    def version(self) -> int:
        """The number of updates that have been applied."""
        return self._versions.version

    def handle(self, event: AnyEvent) -> list[Request]:
        """Process one event and return the requests to the host.

        Raises:
            InvalidEventError: the event is not allowed. The state is unchanged, and the refusal is recorded.
        """
        try:
            actions = self.sync.handle(event)
        except InvalidEventError as error:
            self._record(Entry(event, [], str(error), self.version))
            raise
        versions, counts, index = self._versions, self.sync.counts, self.index
        versions.note(event)
        requests: list[Request] = []
        staleness: list[tuple[int, int, int]] = []
        gap = 0
        for action in actions:
            if type(action) is AnswerPull:
                worker, iteration = action.worker, action.iteration
                versions.answered(worker)
                gap = max(gap, counts.gap(worker))
                if (worker, iteration) in self._held:
                    self._held.remove((worker, iteration))
                    requests.append(Preserve(index, worker, iteration))
                requests.append(Send(worker_peer(worker), self._answer(worker, iteration, action.v_train)))
            elif type(action) is ApplyPush:
                key = action.worker, action.iteration
                staleness.append(versions.apply_one(key))
                requests.append(Apply(index, (key,), action.scale))
            elif type(action) is ApplyMean:
                staleness += versions.apply(action.pushes)
                self._held.difference_update(action.pushes)
                requests.append(Apply(index, action.pushes, 1.0 / len(action.pushes)))
            elif type(action) is HoldPush:
                self._held.add((action.worker, action.iteration))
            elif type(action) is DropPush:
                versions.drop(action.worker, action.iteration)
                requests.append(Discard(index, action.worker, action.iteration))
            elif type(action) is SetTimer:
                requests.append(Timer(action.due_s, action.worker, action.iteration, index))
            elif type(action) is ReportFault:
                faulted = FaultReported(index, action.reason, action.traceback, action.sync)
                requests.append(Send(COORDINATOR, faulted))
            else:
                raise InternalError(f"a shard cannot carry out {action}", (event,))
        self._record(Entry(event, actions, None, versions.version, staleness, gap))
        return requests

    def welcome(self, worker: int) -> Send:
        """Return the request that sends a worker its first weights."""
        return Send(worker_peer(worker), self._answer(worker, -1, None))

    def _answer(self, worker: int, iteration: int, v_train: int | None) -> Answer:
        in_place = worker in self._readers and self._lockstep
        return Answer(self.index, iteration, self._versions.version, v_train, in_place)

    @property
    def _lockstep(self) -> bool:
        """True if workers may read the weights in the server's memory, without a copy.

        The result must be the same at all shards, because a worker reads either all slices in this way or none.
        Therefore it depends on the models that were given for all shards, not on the model to which a single shard
        has fallen back after a condition has failed.
        """
        return all(model.lockstep for model in self.sync.changed_to or self._first)

    def _record(self, entry: Entry) -> None:
        if self._recorder is not None:
            self._recorder.record(entry)
