"""A shard without its tensors: the order in which it asks the sync model, carries actions out and records them.

Single-threaded, without I/O and without a clock; it imports no torch, so that a rehearsal in which only times pass
starts at once. `Shard` adds the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from ..errors import InvalidEventError
from ..sync import AnySyncModel
from ..sync.actions import AnswerPull, AnyAction, ReportFault, SetTimer
from ..sync.events import AnyEvent
from .entry import Entry, EntryRecorder
from .shard_sync import ShardSync
from .versions import Versions

__all__ = ["BareShard", "ForHost"]

ForHost = AnswerPull | SetTimer | ReportFault
"""What a shard leaves to its host."""

_FOR_HOST = frozenset(get_args(ForHost))


class BareShard:
    """A shard without its tensors: the sync model decides, versions are counted, everything is recorded.

    It is all that a rehearsal needs where no gradients are computed, and what `Shard` adds the tensors to.

    Args:
        sync: the sync model to begin with.
        seed: the run's, from which the sync model draws.
        index: which shard.
        recorder: where each event and its actions go.

    Attributes:
        sync: the sync model through all its changes.
    """

    def __init__(
        self, sync: AnySyncModel, seed: int = 0, index: int = 0, recorder: EntryRecorder | None = None
    ) -> None:
        self.sync = ShardSync(sync, seed, index)
        self._recorder = recorder
        self._versions = Versions()

    @property
    def version(self) -> int:
        """How many updates have been applied."""
        return self._versions.version

    def handle(
        self,
        event: AnyEvent,
        push: object | None = None,
        host: Callable[[ForHost], None] = lambda action: None,
    ) -> None:
        """Take one event; carry out what the sync model asks for.

        Args:
            event: what happened.
            push: what was pushed, with a `PushReceived` that is not empty, where there are tensors.
            host: called with each action that is the host's, in order; for an `AnswerPull`, while the weights and
                `version` are what is to be sent.

        Raises:
            InvalidEventError: the contract does not allow the event; nothing has changed.
        """
        try:
            actions = self.sync.handle(event)
        except InvalidEventError as error:
            self._record(Entry(event, [], str(error), self.version))
            raise
        self._versions.note(event)
        self._take_in(event, push)
        staleness: list[tuple[int, int, int]] = []
        gap = 0
        for action in actions:
            self._carry_out(action)
            staleness += self._versions.carry_out(action)
            if type(action) is AnswerPull:
                gap = max(gap, self._gap(action.worker))
            if type(action) in _FOR_HOST:
                host(action)  # type: ignore[arg-type]  # which is what the line above says
        self._record(Entry(event, actions, None, self.version, staleness, gap))

    def _take_in(self, event: AnyEvent, push: object | None) -> None:
        """Keep what a push has brought."""

    def _carry_out(self, action: AnyAction) -> None:
        """Do what an action asks of the tensors."""

    def _gap(self, worker: int) -> int:
        """c_p - min c; 0 for a worker that has joined during a change and lives by no model yet."""
        counts = self.sync.counts
        return counts.gap(worker)

    def _record(self, entry: Entry) -> None:
        if self._recorder is not None:
            self._recorder.record(entry)
