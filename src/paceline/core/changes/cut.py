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
(`SaveCut`). A worker learns of a cut from its answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...state import stateful
from ..machines.losses import Loss
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
from ..protocol.requests import Request, Send, server_peer

__all__ = ["Cut", "cut_pushes"]


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
