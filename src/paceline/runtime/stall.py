"""Finds out when a run has come to a standstill: every worker waits, and nothing that is under way will change that.

No sync model of this package does that. Conditions that a user writes may: nothing makes them hold.
"""

from __future__ import annotations

from ..errors import DeadlineError, PeerLostError, ProtocolError
from ..wire.addresses import connect
from ..wire.messages import FetchWaits, FromServer, Hello, Waits
from ..wire.stream import Stream
from .coordinator import Coordinator

__all__ = ["StallWatch"]

SUSPICIOUS_S = 2.0  # that every worker waits, before the servers are asked
APART_S = 1.0  # between two answers that must be the same
TIMEOUT_S = 5.0


class StallWatch:
    """Watches one run. Call `look` often."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._since_s: float | None = None  # since when nobody computes
        self._asked_s = 0.0
        self._before: list[Waits] | None = None  # what the servers answered last time

    def look(self) -> str | None:
        """Who waits for what, if everybody does and will for ever; None if the run goes on."""
        coordinator = self._coordinator
        now_s = coordinator.job.now_s()
        live = {worker for worker in range(coordinator.job.workers) if not coordinator.fate(worker)}
        states = [coordinator.board[worker].state for worker in live if worker in coordinator.board]
        if not live or len(states) < len(live) or "computing" in states:
            self._since_s = self._before = None
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < SUSPICIOUS_S or now_s - self._asked_s < APART_S:
            return None
        self._asked_s = now_s
        before, self._before = self._before, self._ask()
        if self._before is None or self._before != before or any(waits.timers for waits in before):
            return None
        shards = [shard for waits in before for shard in waits.shards]
        if live - {worker for shard in shards for worker, _ in shard.pulls}:
            return None  # somebody is on the way: its pull was answered, or its push has yet to be heard
        lines = [
            f"  worker {worker}, after its iteration {iteration}, at shard {shard.shard} ({shard.sync}): for {reason}"
            for shard in shards
            for (worker, iteration), reason in zip(shard.pulls, shard.reasons, strict=True)
        ]
        return "every worker waits, and no condition will release any of them:\n" + "\n".join(sorted(lines))

    def _ask(self) -> list[Waits] | None:
        """Each server's answer; None if one does not give any: then that is what is wrong."""
        answers = []
        for address in sorted({address for _, address in self._coordinator.shards}):
            try:
                stream: Stream[FromServer] = Stream(connect(address), FromServer)
            except PeerLostError:
                return None
            try:
                stream.send(Hello(self._coordinator.job.token, "reader", 0))
                stream.send(FetchWaits())
                answer = stream.wait(TIMEOUT_S)
            except (PeerLostError, ProtocolError, DeadlineError):
                return None
            finally:
                stream.close()
            if not isinstance(answer, Waits):
                return None
            answers.append(answer)
        return answers
