"""How a worker is lost: first it is fenced at every shard, then the coordinator decides which of its pushes count.

A worker that dies while it sends a push leaves a *torn* push, which some shards have received and others have not. A
shard alone cannot know whether a push that it holds is torn. So a loss has two phases:

    WorkerLost       to each server. From then on, it receives nothing more from this incarnation of the worker, and
                     its shards apply nothing that contains a held push of the worker
    PushesReported   from each server: the labels of the last pushes that its shards have received
    LossSettled      to each server that holds a push: a held push that every shard has received is kept, and any
                     other held push is dropped

A torn push that a shard has applied already, for example under ASP, remains applied there, and counts as torn. Shards
that hold no push of the worker wait for nobody: for them, the loss is settled at once. A server that notices a loss
before the coordinator does fences the worker by itself.

An incarnation that is lost before it takes part has pushed nothing. A server that has welcomed the incarnation may
still hold pushes of an earlier one, and reports them. They have been settled, so all of them are kept.
"""

from __future__ import annotations

from ...state import stateful
from ..protocol.lease import PackedPushed, Pushed
from ..protocol.messages import LossSettled, PushesReported
from ..protocol.requests import Request, Send, server_peer

__all__ = ["Loss", "Losses"]


@stateful(decides="_worker _incarnation _missing _received")
class Loss:
    """The coordinator's record of a lost worker, until all servers have reported its pushes.

    Args:
        worker: the lost worker.
        incarnation: how often the index of the worker had been used before.
        servers: the servers that have yet to report.

    Attributes:
        complete: True once all servers have reported.
    """

    def __init__(self, worker: int, incarnation: int, servers: set[int]) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._missing = servers
        self._received: dict[int, PushesReported] = {}

    @property
    def complete(self) -> bool:
        return not self._missing

    def reported(self, server: int, report: PushesReported) -> list[Request]:
        """Handle a server's report. After the last one, return the requests that settle the loss."""
        if report.incarnation != self._incarnation or server not in self._missing:
            return []
        self._missing.remove(server)
        self._received[server] = report
        if self._missing:
            return []
        settled = LossSettled(self._worker, self._incarnation, self.kept)
        return [Send(server_peer(each), settled) for each, sent in self._received.items() if any(sent.held)]

    @property
    def torn(self) -> bool:
        """True if some shards, but not all, have applied or dropped the worker's last push."""
        return any(
            last > self.kept and not held
            for report in self._received.values()
            for last, held in zip(report.last, report.held, strict=True)
        )

    @property
    def drawn(self) -> list[tuple[PackedPushed, PackedPushed]]:
        """For each loader, the batches in the worker's pushes at all shards, and at some shards.

        Both are equal unless a push is torn: a torn push that is only held is dropped.
        """
        reports = [
            list(map(Pushed.unpack, drawn)) for report in self._received.values() for drawn in report.drawn
        ]
        loaders = max(map(len, reports), default=0)
        padded = [(*drawn, *[Pushed(0, 0)] * (loaders - len(drawn))) for drawn in reports]
        torn = self.torn
        return [
            (min(each).packed, (max(each) if torn else min(each)).packed)
            for each in zip(*padded, strict=True)
        ]

    @property
    def kept(self) -> int:
        """The label of the last push of the worker that every shard has received; -1 if there is none."""
        return min((last for report in self._received.values() for last in report.last), default=-1)


@stateful(decides="open torn")
class Losses:
    """The losses that are not settled yet.

    Attributes:
        open: lost worker whose pushes some servers have yet to report -> its record.
        torn: number of pushes of lost workers that some shards, but not all, have applied.
    """

    def __init__(self) -> None:
        self.open: dict[int, Loss] = {}
        self.torn = 0

    def begin(self, worker: int, incarnation: int, servers: set[int]) -> None:
        """Record that a worker is lost. See `Loss`."""
        self.open[worker] = Loss(worker, incarnation, servers)

    def reported(
        self, server: int, report: PushesReported
    ) -> tuple[list[Request], list[tuple[PackedPushed, PackedPushed]] | None]:
        """Handle a server's report.

        Returns:
            The requests and, after the last report, the batches in the worker's pushes (see `Loss.drawn`); else None.
        """
        loss = self.open.get(report.worker)
        if loss is None:
            # This incarnation never took part. Whatever is held is from an earlier one, and has been settled.
            kept = max(report.last, default=-1)
            settled = LossSettled(report.worker, report.incarnation, kept)
            return [Send(server_peer(server), settled)] if any(report.held) else [], None
        requests = loss.reported(server, report)
        if not loss.complete:
            return requests, None
        del self.open[report.worker]
        self.torn += loss.torn
        return requests, loss.drawn
