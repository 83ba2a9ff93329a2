"""What is known about a run when the causes of its lost time are looked for (see `causes`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ..sync.effects import backup_quorum
from ..trace.findings import LEAST_S, LEAST_SHARE, Handout, hints_for, how_to_check, in_python
from .run_report import Cause, LinkTotal, WorkerReport

__all__ = ["Evidence"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a run when the causes are looked for.

    Attributes:
        state: see `RunReport`.
        failure: see `RunReport`.
        sync: the sync model or the schedule.
        lockstep: True if it keeps all workers in lockstep; see `SyncModel`.
        auto: True if the run chooses its models itself.
        duration_s: see `RunReport`.
        workers: all workers, with their times.
        unsplit: the workers whose transfers count as computing, because their records are missing.
        last_push_s: worker -> when its last push arrived.
        end_s: when the last worker left.
        links: the traffic between machines.
        samples: number of samples that all workers used; 0 if unknown.
        updates: number of updates.
        restarts: number of computations that were aborted; None if unknown.
        servers: number of servers.
        wire: format in which gradients and weights travelled; see `core.protocol.wire_format`.
        joined: True if machines have joined the run.
        handout: how the data was handed out.
        overlap: False if the run had the option `--overlap off`.
        program: what each worker ran, as in `Order.arguments`.
        run_dir: the run directory, to be named in commands; "" if workers have kept their records.
        noticed: what was noticed while the run was in progress, in sentences; see `find`.
        unapplied: a sentence about pushes that were never applied; "" if there is none.
        shortage: how many workers the run must have so that it does not pause; "" if it never pauses.
    """

    state: str
    failure: str = ""
    sync: str
    lockstep: bool = False
    auto: bool = False
    duration_s: float = 0.0
    workers: tuple[WorkerReport, ...] = ()
    unsplit: tuple[int, ...] = ()
    last_push_s: dict[int, float] = {}
    end_s: float = 0.0
    links: tuple[LinkTotal, ...] = ()
    samples: int = 0
    updates: int = 0
    restarts: int | None = None
    servers: int = 1
    wire: str = "float32"
    joined: bool = False
    handout: Handout = Handout()
    overlap: bool = True
    program: tuple[str, ...] = ()
    run_dir: str = ""
    noticed: tuple[str, ...] = ()
    unapplied: str = ""
    shortage: str = ""

    def total_s(self, *kinds: str, workers: Collection[int] | None = None) -> float:
        """Return the seconds that workers, by default all, have spent on these kinds of activity."""
        return sum(
            each.time_s.get(kind, 0.0)
            for each in self.workers
            if workers is None or each.worker in workers
            for kind in kinds
        )

    def present_s(self, workers: Collection[int] | None = None) -> float:
        """Return the seconds for which workers, by default all, took part in the run."""
        return self.total_s(
            "computing", "loading", "transfer", "waiting", "wasted", "paused", "outside", workers=workers
        )

    def per_iteration_s(self, kind: str) -> dict[int, float]:
        """Return, for each worker with an iteration, the mean seconds of this kind in each of its iterations."""
        return {
            each.worker: each.time_s.get(kind, 0.0) / each.iterations
            for each in self.workers
            if each.iterations
        }

    def matters(self, lost_s: float, share: float = LEAST_SHARE) -> bool:
        """True if so much time was lost that it is worth a sentence."""
        whole_s = self.present_s() + self.total_s("idle")
        return lost_s >= share * whole_s and lost_s >= LEAST_S * len(self.workers) > 0

    def share(self, lost_s: float) -> float:
        """Return lost time as a share of the time of all workers, from 0 to 1."""
        whole_s = self.present_s() + self.total_s("idle")
        return lost_s / whole_s if whole_s else 0.0

    def cause(self, words: str, brief: str, lost_s: float, remedies: Sequence[str]) -> Cause:
        """Return a cause, with its share of the workers' time."""
        python = self.program[:1] == ("function",)
        shown = tuple(in_python(hint) if python else hint for hint in remedies)
        return Cause(words, lost_s, self.share(lost_s), shown, brief)

    def hints(self, *, equal_shares: bool, slow: int, waited: bool) -> list[str]:
        """Return what helps against waiting and idle workers; see `hints_for`."""
        quorum = backup_quorum(len(self.workers), slow) if slow else None
        how = how_to_check(self.run_dir or None, self.program)
        return hints_for(
            self.lockstep, self.handout, self.overlap, equal_shares, waited, slow, quorum, how, self.auto
        )
