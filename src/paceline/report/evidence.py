"""What is known about a run when the causes of its lost time are looked for (see `causes`).

The terminal and the report of a run that has ended look for the causes in the same evidence: the summary of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..core.protocol.lease import Split
from ..errors import ConfigurationError
from ..sync.effects import backup_quorum
from ..sync.schedule import read_schedule
from ..trace.findings import LEAST_S, LEAST_SHARE, Handout, hints_for, how_to_check, in_python
from ..trace.measures import PushCounts
from ..trace.unapplied import unapplied_pushes
from .run_report import KINDS, Cause, LinkTotal, WorkerReport
from .words import counted

__all__ = ["Evidence", "evidence_of", "handout_of", "links_of", "read_model", "shortage_of"]


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
        cores: number of cores that the processes of the run could use, if all ran on one machine; 0 if unknown.
        queued_s: worker -> seconds in which it could run, but had no core; {} if this is unknown.
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
    cores: int = 0
    queued_s: dict[int, float] = {}
    wire: str = "float32"
    joined: bool = False
    handout: Handout = Handout()
    overlap: bool = True
    program: tuple[str, ...] = ()
    run_dir: str = ""
    noticed: tuple[str, ...] = ()
    unapplied: str = ""
    shortage: str = ""

    @property
    def knows_computing(self) -> bool:
        """False if the script distributes no loader: all that it does between two steps then counts as computing."""
        return not self.program or self.handout.split is not None or self.samples > 0

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


def evidence_of(summary: Mapping[str, Any], run_dir: str) -> Evidence | None:
    """Return what the summary of a run says about lost time; None if it contains no statistics.

    Args:
        summary: the summary of a live run, as in `summary.json`.
        run_dir: the run directory.
    """
    if not summary.keys() >= {"time_use", "iterations", "awaited_s"}:
        return None
    links = links_of(summary)
    lockstep, auto = read_model(str(summary["sync"]))
    joined = bool(summary.get("joined", links))
    pushes = summary.get("ledger", {}).get("pushes", {})
    unapplied = ""
    if pushes and "unapplied" in summary:
        unapplied = unapplied_pushes(PushCounts(**pushes), summary["unapplied"])
    return Evidence(
        state=str(summary.get("ended", "finished")),
        failure=str(summary.get("failure", "")),
        sync=str(summary["sync"]),
        lockstep=lockstep,
        auto=auto,
        duration_s=summary["duration_s"],
        workers=_workers(summary),
        last_push_s={int(worker): at_s for worker, at_s in summary["last_push_s"].items()},
        end_s=summary["duration_s"],
        links=links,
        samples=summary.get("samples", 0),
        updates=summary.get("updates", 0),
        restarts=summary.get("restarts"),
        servers=int(summary.get("servers", 1)),
        cores=int(summary.get("cores", 0)),
        queued_s={int(worker): queued_s for worker, queued_s in summary.get("queued_s", {}).items()},
        wire=str(summary.get("wire", "float32")),
        joined=joined,
        handout=handout_of(summary),
        overlap=summary.get("overlap", "shards") == "shards",
        program=tuple(summary.get("program", ())),
        run_dir="" if joined else run_dir,
        noticed=tuple(summary.get("noticed", ())),
        unapplied=unapplied,
        shortage=shortage_of(summary),
    )


def _workers(summary: Mapping[str, Any]) -> tuple[WorkerReport, ...]:
    """Return the figures of each worker from which causes follow."""
    machines: Mapping[str, str] = summary.get("machines", {})
    samples: Mapping[str, int] = summary.get("worker_samples", {})
    left, lost = summary.get("left", ()), summary.get("lost_workers", ())
    found = []
    for worker, use in sorted(summary["time_use"].items(), key=lambda each: int(each[0])):
        index = int(worker)
        found.append(
            WorkerReport(
                worker=index,
                machine=machines.get(worker, ""),
                fate="lost" if index in lost else "left" if index in left else "finished",
                iterations=summary["iterations"].get(worker, 0),
                samples=samples.get(worker, 0),
                time_s={kind: use.get(f"{kind}_s", 0.0) for kind in KINDS},
                awaited_s=summary["awaited_s"].get(worker, 0.0),
            )
        )
    return tuple(found)


def links_of(summary: Mapping[str, Any]) -> tuple[LinkTotal, ...]:
    """Return the traffic between machines, according to a summary."""
    duration_s = summary.get("duration_s", 0.0)
    return tuple(
        LinkTotal(sender, receiver, total, total / duration_s if duration_s else None)
        for sender, receiver, total in summary.get("links", ())
    )


def handout_of(summary: Mapping[str, Any]) -> Handout:
    """Return how the data of a run was handed out, according to its summary."""
    split: Split | None = summary.get("split")
    return Handout(split, summary.get("batch") == "balanced", bool(summary.get("divisible", True)))


def shortage_of(summary: Mapping[str, Any]) -> str:
    """Return how many workers a run must have so that it does not pause; "" if its summary does not say this."""
    return counted(int(summary["least_workers"]), "worker") if "least_workers" in summary else ""


def read_model(sync: str) -> tuple[bool, bool]:
    """Return whether a schedule keeps all workers in lockstep, and whether the run chooses its models itself."""
    try:
        schedule = read_schedule(sync)
    except ConfigurationError:  # a model of the user, which is not imported for a report
        return False, False
    return all(model.lockstep for model in schedule.models), schedule.auto
