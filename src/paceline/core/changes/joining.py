"""How a worker joins a run in progress: with the same label and the same c_p at every shard.

The coordinator decides alone, in two rounds of messages with the servers:

    JoinProposed     to each server
    JoinOffered      from each server: the label and the c_p with which the worker could join at its shards now; the
                     sync models determine the c_p (`ShardMachine.entry`)
    WorkerJoined     to each server: the worker joins, with the largest label and the largest c_p of all offers
    WorkerWelcomed   from each server. After the last one, the worker receives Started, and connects to the servers

The run goes on meanwhile. So a shard may have gone beyond the c_p when `WorkerJoined` arrives. Its server then sends
another `JoinOffered`, and the coordinator sends another `WorkerJoined`; at the servers that have accepted the earlier
one, the worker leaves and joins again. Each time, the coordinator doubles the number of rounds that it adds to the
offer, so the worker joins at last, however fast the run is. A c_p that is too large does no harm: only the worker
itself waits, until the other workers have reached it.

A server makes its offer when it has noticed the departure of all workers that have left according to the coordinator.
So the next incarnation of a worker joins only when the earlier one has left every shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ...state import stateful
from ..protocol.messages import JoinOffered, JoinProposed, WorkerJoined, WorkerWelcomed
from ..protocol.requests import Request, Send, server_peer

__all__ = ["Join"]


@stateful(decides="worker joined phase _incarnation _servers _offers _welcomed _margin")
class Join:
    """The coordinator's part of a join that is in progress.

    Args:
        worker: the worker that joins.
        incarnation: how often the index of the worker has been used before.
        servers: number of servers.

    Attributes:
        worker: the worker that joins.
        joined: the last message that was sent to all servers; None before the first one.
        phase: the phase of the join. See `paceline.core.changes.reconfiguration`.
    """

    def __init__(self, worker: int, incarnation: int, servers: int) -> None:
        self.worker = worker
        self.joined: WorkerJoined | None = None
        self.phase: Literal["proposed", "agreed", "in force"] = "proposed"
        self._incarnation = incarnation
        self._servers = servers
        self._offers: dict[int, JoinOffered] = {}  # server -> its last offer
        self._welcomed: set[int] = set()  # servers that have accepted `joined`
        self._margin = 0  # number of rounds that are added to the offers

    def begin(self, left: Iterable[int]) -> list[Request]:
        """Ask all servers for offers. `left` contains the workers that have left the run."""
        return self._to_servers(JoinProposed(self.worker, self._incarnation, tuple(sorted(left))))

    def offered(self, server: int, offer: JoinOffered, superstep: int) -> list[Request]:
        """Handle an offer. `superstep` is the first superstep that would wait for the worker."""
        if not self._concerns(offer):
            return []
        self._offers[server] = offer
        offers = self._offers.values()
        count = max(each.count for each in offers)
        if len(offers) < self._servers or (self.joined is not None and count <= self.joined.count):
            return []
        if self.joined is not None:
            self._margin = 2 * self._margin + 1
        iteration = max(each.iteration for each in offers)
        self.joined = WorkerJoined(self.worker, self._incarnation, iteration, count + self._margin, superstep)
        self.phase = "agreed"
        self._welcomed.clear()
        return self._to_servers(self.joined)

    def welcomed(self, server: int, message: WorkerWelcomed) -> None:
        """Handle a server's acknowledgment. After the last one, the join is in force."""
        if self.joined is not None and self._concerns(message) and message.count == self.joined.count:
            self._welcomed.add(server)
            if len(self._welcomed) == self._servers:
                self.phase = "in force"

    def _concerns(self, message: JoinOffered | WorkerWelcomed) -> bool:
        """Return True unless a server has sent the message about an earlier join, which has failed."""
        return (message.worker, message.incarnation) == (self.worker, self._incarnation)

    def _to_servers(self, message: JoinProposed | WorkerJoined) -> list[Request]:
        return [Send(server_peer(server), message) for server in range(self._servers)]
