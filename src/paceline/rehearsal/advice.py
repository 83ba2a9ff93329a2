"""`paceline advise`: what a run has shown of its machines, replayed under every sync model.

The cluster is what the run recorded. What the advice cannot know is how much staleness the loss bears, so it names
the best model for each answer to that question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ..errors import ConfigurationError
from ..report.ranking import ranking_table
from ..sim import Cluster, simulate
from ..sim.recorded import read_cluster_of_run
from ..sync.events import WorkerFinished, WorkerLost
from ..sync.schedule import read_schedule
from ..trace.recording import Trace, read
from .clusters import describe
from .comparison import STAR, show_faults
from .process_pool import TellCount
from .ranking import EVERY_MODEL, Figures, mark_front, rank

__all__ = ["Advice", "Report", "advise", "show"]

WORTH_IT = 1.1  # times as many gradients: less is not worth any staleness


class Advice(msgspec.Struct, frozen=True):
    """One recommendation.

    Attributes:
        wish: what it is for.
        sync: the model.
        reason: in a sentence.
        command: how to run it.
    """

    wish: str
    sync: str
    reason: str
    command: str


class Report(msgspec.Struct, frozen=True):
    """What a run came to, and what is advised.

    Attributes:
        sync: what the run had.
        measured_updates_per_s: by the run itself, while all workers were there.
        simulated_updates_per_s: by a simulation of it; how far the two differ is how far to trust the rest.
        rows: every model, most gradients first.
        advice: one for each wish.
    """

    sync: str
    measured_updates_per_s: float
    simulated_updates_per_s: float
    rows: list[Figures]
    advice: list[Advice]


def advise(
    run_dir: Path, syncs: Sequence[str] = EVERY_MODEL, tell: TellCount = lambda done, of, what: None
) -> Report:
    """Replay a run's machines under every model.

    Raises:
        ConfigurationError: there is no finished run in this directory.
    """
    summary = _summary(run_dir)
    if (logs := len(list(run_dir.glob("worker-*.jsonl")))) != summary["workers"]:
        raise ConfigurationError(
            f"{run_dir} has records of {logs} workers, and its summary speaks of {summary['workers']}."
        )
    cluster = read_cluster_of_run(run_dir)
    shards = cluster.servers
    iterations = max(20, min(int(count) for count in summary["iterations"].values()))
    own = summary["sync"]
    together_s, updates = _while_all_were_there(read(run_dir / "trace-shard-0.jsonl"))
    again = simulate(cluster, own, None, summary["seed"], until_s=together_s)
    rows = rank(cluster, _runnable(syncs, cluster, shards), iterations=iterations, tell=tell)
    return Report(
        sync=own,
        measured_updates_per_s=updates / together_s,
        simulated_updates_per_s=again.updates / together_s,
        rows=rows,
        advice=_advice(rows, summary),
    )


def _while_all_were_there(shard: Trace) -> tuple[float, int]:
    """How long it took until the first worker left, and the updates until then."""
    if not shard.entries:
        raise ConfigurationError(
            "the trace of shard 0 has nothing but a header: nothing happened in this run."
        )
    begun_s = shard.entries[0].event.now_s
    for entry in shard.entries:
        if isinstance(entry.event, WorkerFinished | WorkerLost) and entry.event.now_s > begun_s:
            return entry.event.now_s - begun_s, entry.version or 0
    return max(shard.entries[-1].event.now_s - begun_s, 1e-9), shard.entries[-1].version or 0


def _runnable(syncs: Sequence[str], cluster: Cluster, shards: int) -> list[str]:
    """Those models that such a job can have; bsp among them, which the others are compared with."""
    found = ["bsp"]
    for sync in syncs:
        try:
            read_schedule(sync).require_runnable(cluster.workers, shards)
        except ConfigurationError:
            continue
        if sync not in found:
            found.append(sync)
    return found


def _advice(rows: Sequence[Figures], summary: dict[str, Any]) -> list[Advice]:
    rows = [row for row in rows if not row.faults]  # the others are not what their names say
    [bsp] = [row for row in rows if row.sync == "bsp"]
    fastest = rows[0]
    bounded = [row for row in mark_front([row for row in rows if _bounded(row.sync)]) if row.front]
    middle = max(bounded, key=lambda row: row.gradients_per_s)
    picks = [
        ("no staleness at all", bsp),
        ("the most gradients with a bound on staleness, or barriers", middle),
        ("the most gradients, whatever the staleness", fastest),
    ]
    if fastest.gradients_per_s < WORTH_IT * bsp.gradients_per_s:
        picks = [("these machines are nearly equal", bsp)]
    advice: list[Advice] = []
    for wish, row in picks:
        if advice and advice[-1].sync == row.sync:
            advice[-1] = msgspec.structs.replace(advice[-1], wish=f"{advice[-1].wish}; {wish}")
            continue
        command = (
            f"paceline run --workers {summary['workers']} --servers {summary['servers']} --sync {row.sync}"
        )
        advice.append(Advice(wish, row.sync, _reason(row, bsp), f"{command} SCRIPT"))
    return advice


def _bounded(sync: str) -> bool:
    """Does the model promise a bound on how far ahead a worker gets, or restore barriers."""
    return sync.partition(":")[0] in ("bsp", "ssp", "dssp", "dsps", "elastic-bsp", "drop-stragglers")


def _reason(row: Figures, bsp: Figures) -> str:
    if row.sync == "bsp":
        return (
            f"every gradient is fresh; workers wait {row.waiting_share:.0%} of their time, which is what another "
            "model could save at most."
        )
    faster = row.gradients_per_s / bsp.gradients_per_s
    wasted = f", compute {row.wasted_share:.0%} in vain" if row.wasted_share >= 0.005 else ""
    return (
        f"{faster:.2f} times the gradients of bsp: workers wait {row.waiting_share:.0%} of their time instead of "
        f"{bsp.waiting_share:.0%}{wasted}; a gradient misses {row.mean_staleness:.1f} updates on average."
    )


def _summary(run_dir: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        read_schedule(summary["sync"])
        missing = {"workers", "servers", "seed", "iterations"} - summary.keys()
        if missing:
            raise KeyError(*sorted(missing))
        return summary
    except FileNotFoundError:
        raise ConfigurationError(
            f"{run_dir} holds no finished run: no summary.json is there. Give the directory that paceline run "
            "names at its end."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{run_dir / 'summary.json'} cannot be read: {error}") from error


def show(report: Report, cluster: Cluster, console: Console) -> None:
    """Print it."""
    off = (
        report.simulated_updates_per_s / report.measured_updates_per_s - 1
        if report.measured_updates_per_s
        else 0.0
    )
    caption = (
        f"{describe(cluster)}\n{STAR}\nthe run itself ({report.sync}): {report.measured_updates_per_s:.4g} updates "
        f"per s, simulated {report.simulated_updates_per_s:.4g} ({off:+.1%})"
    )
    console.print(ranking_table(f"what {cluster.name} would have been", report.rows, caption))
    show_faults(report.rows, console)
    for advice in report.advice:
        console.print(f"\n[bold]{advice.wish}[/]: {advice.sync}", highlight=False)
        console.print(f"  {advice.reason}", highlight=False)
        console.print(f"  {advice.command}", highlight=False, soft_wrap=True)
