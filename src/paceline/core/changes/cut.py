"""How a job is cut while it goes on: with which updates, pushes and data a later run begins.

A cut treats every worker as if it were lost (see `core.machines.losses`), but on a copy of the ledger, while training
goes on. The coordinator asks the shards to cut themselves, and each of them reports which pushes of each worker its
weights contain:

    CutProposed   to each server, under a lockstep model
    CutOffered    from each server: the number of rounds that its shards have completed
    CutAgreed     to each server: cut each shard after this round or, under other models, at once
    CutTaken      for each shard: it has been cut

In lockstep, the updates of a round are the same at all shards, so no push is torn. A shard is cut when the scripts
ask for their next batches: just before the first push after the round that has newly drawn data. A shard that has
already completed the round makes another offer; the coordinator then agrees on another cut, with twice as many rounds
in between. Under other models, each shard is cut at a version of its own, so the last pushes of some workers may be
torn. They count as torn, and their data is not used again. Held pushes are returned with their data.

Nothing waits for a cut, and a cut waits for everything else: it begins when no reconfiguration is in progress and no
loss is open, and begins again with the next number if one of them begins before all shards have been cut. From the
beginning of a cut to its end, the ledger settles nothing, so it still knows what every worker has received.

What has been cut is copied by the hosts of the shards (`TakeCut`), and written by the host of the coordinator
(`SaveCut`). It is whole when every worker that is still present has given what its script holds (`CompleteCut`):

    KeepWorkerState   from a worker, which has learned of the cut from an answer
    StateWanted       to each worker that has not done so when all shards have been cut
    KeepWorkerState   from this worker, when its script asks for its next batch or waits in a call

Nothing else ends this wait, because without the state of a worker, its script cannot go on where it was. A worker
that leaves is no longer awaited. But only the main worker has the objects that the scripts track. If the main worker
leaves before it has given its state, the cut is abandoned (`AbandonCut`), and the job is cut again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...state import stateful
from ..machines.losses import Loss
from ..machines.main_worker import NOBODY
from ..protocol.job_cut import LoopCut
from ..protocol.lease import PackedPushed
from ..protocol.messages import (
    CutAgreed,
    CutOffered,
    CutProposed,
    CutTaken,
    LastPush,
    PushesReported,
)
from ..protocol.placement import Placement
from ..protocol.requests import CompleteCut, Request, Send, server_peer

__all__ = ["Cut", "Giving", "cut_pushes"]


MOST_LABELS = 4
"""Number of states of a worker that are remembered until all shards have been cut."""


@stateful(decides="number taken _placement _left _offers _margin _round")
class Cut:
    """The coordinator's part of a cut that is in progress.

    Args:
        number: number of the cut.
        placement: the servers of the shards.
        left: the workers that have left the run.

    Attributes:
        number: number of the cut. It increases while the cut is in progress.
        taken: shard -> what it has reported, for each shard that has been cut.
    """

    def __init__(self, number: int, placement: Placement, left: Collection[int]) -> None:
        self.number = number
        self.taken: dict[int, CutTaken] = {}
        self._placement = placement
        self._left = tuple(sorted(left))
        self._offers: dict[int, int] = {}  # server -> number of rounds
        self._margin = 1  # number of rounds that are added to the offers
        self._round: int | None = None

    def begin(self, *, lockstep: bool) -> list[Request]:
        """Ask the servers for offers or, unless the model keeps the workers in lockstep, to cut their shards."""
        if lockstep:
            return self._to_servers(CutProposed(self.number, self._left))
        return self._to_servers(CutAgreed(self.number, None, self._left))

    def offered(self, server: int, offer: CutOffered) -> list[Request]:
        """Handle an offer. When all servers have made one, agree on a round that no shard has completed."""
        if offer.number != self.number:
            return []
        self._offers[server] = offer.round
        if len(self._offers) < len(self._placement.servers):
            return []
        if self._round is not None:  # a shard has gone beyond this round
            self._margin *= 2
            self.number += 1
            self.taken.clear()
        self._round = max(self._offers.values()) + self._margin
        return self._to_servers(CutAgreed(self.number, self._round, self._left))

    def take(self, message: CutTaken) -> bool:
        """Handle a shard that has been cut. Return True if all shards have been."""
        if message.number == self.number:
            self.taken[message.shard] = message
        return len(self.taken) == len(self._placement.server_of)

    def last_pushes(self) -> list[dict[int, LastPush]]:
        """Return for each shard, in order, the last push of each worker that is part of the cut."""
        return [{push.worker: push for push in self.taken[shard].workers} for shard in sorted(self.taken)]

    def _to_servers(self, message: CutProposed | CutAgreed) -> list[Request]:
        return [Send(server_peer(server), message) for server in self._placement.servers]


@stateful(decides="number labels _main _given _loop")
class Giving:
    """What the workers give for a cut: the states of their scripts.

    A state belongs to the cut if it was taken after the worker's last push of the cut. The earliest of these counts.

    Args:
        number: number of the cut.

    Attributes:
        number: number of the cut.
        labels: worker -> label of its last push in the cut, for each worker that took part and has not left without
            a state; None until all shards have been cut.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.labels: dict[int, int] | None = None
        self._main = NOBODY
        # worker -> label of a state -> the place of the job in its loops when the state arrived
        self._given: dict[int, dict[int, LoopCut]] = {}
        self._loop = LoopCut()

    def begin(self, labels: Mapping[int, int], main: int, loop: LoopCut) -> None:
        """Record that all shards have been cut.

        Args:
            labels: worker -> label of its last push in the cut.
            main: the main worker.
            loop: the place of the job in its training loops now.
        """
        self.labels, self._main, self._loop = dict(labels), main, loop

    def give(self, worker: int, label: int, loop: LoopCut) -> None:
        """Record that a worker has given a state, when the job was at this place in its training loops."""
        given = self._given.setdefault(worker, {})
        given[label] = loop
        for earlier in sorted(given)[:-MOST_LABELS]:
            del given[earlier]

    def left(self, worker: int) -> bool:
        """Handle a worker that has left. Return True if the cut cannot be completed without its state."""
        if self.labels is None or worker not in self.awaited:
            return False
        del self.labels[worker]
        return worker == self._main

    @property
    def awaited(self) -> list[int]:
        """The workers that have not given a state yet."""
        return [worker for worker in self.labels or () if self._label_of(worker) is None]

    @property
    def completed(self) -> CompleteCut | None:
        """The request that completes the cut; None if a state is awaited."""
        if self.labels is None or self.awaited:
            return None
        states = tuple(
            (worker, label) for worker in sorted(self.labels) if (label := self._label_of(worker)) is not None
        )
        # The workers reach an epoch at different times. All of them go on where the first one was, which also has
        # what the scripts track. Those that were elsewhere get back its schedule (see `frontend.worker_state`).
        loop = self._given[states[0][0]][states[0][1]] if states else self._loop
        return CompleteCut(self.number, states, loop)

    def _label_of(self, worker: int) -> int | None:
        """Return the label of the state of a worker that belongs to the cut; None if there is none."""
        assert self.labels is not None
        least = self.labels[worker]
        return min((label for label in self._given.get(worker, ()) if label >= least), default=None)


def cut_pushes(
    last: Collection[Mapping[int, LastPush]],
) -> tuple[dict[int, int], dict[int, list[tuple[PackedPushed, PackedPushed]]], int]:
    """Decide which pushes are part of a cut, as if all workers were lost.

    Args:
        last: for each shard, the last push of each worker that is part of the cut. All shards have the same workers.

    Returns:
        For each worker, the label of its last push that is in the weights of all shards, and what it had drawn before
        (see `Loss.drawn`); and the number of torn pushes.
    """
    labels, drawn, torn = {}, {}, 0
    shards = dict(enumerate(last))
    for worker in shards[0]:
        loss = Loss(worker, 0, set(shards))
        for shard, pushes in shards.items():
            push = pushes[worker]
            loss.reported(shard, PushesReported(worker, 0, (push.iteration,), (False,), (push.drawn,)))
        labels[worker], drawn[worker] = loss.kept, loss.drawn
        torn += loss.torn
    return labels, drawn, torn
