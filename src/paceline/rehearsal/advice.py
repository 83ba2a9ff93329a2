"""`paceline advise`: simulates the recorded machines of a run under every sync model, and recommends models.

The simulation does not show how staleness affects the loss. So there is one recommendation without staleness, one
with bounded staleness, and one with any staleness.
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

__all__ = ["Advice", "MachineReport", "advise", "show"]

WORTH_IT = 1.1  # minimum speedup over BSP, in gradients per second, that justifies staleness


class Advice(msgspec.Struct, frozen=True):
    """A recommended sync model, with the reason for the recommendation.

    Attributes:
        wish: the requirement that the model meets best.
        sync: the recommended model.
        reason: one sentence that explains the recommendation.
        command: command line that runs a script under the model.
    """

    wish: str
    sync: str
    reason: str
    command: str


class MachineReport(msgspec.Struct, frozen=True):
    """A comparison of all models on the machines of a run, with recommendations.

    Attributes:
        sync: sync model of the run.
        measured_updates_per_s: updates per second in the run while all workers were present.
        simulated_updates_per_s: updates per second in a simulation of the run. The difference from the measurement
            shows how accurate the other simulations are.
        rows: results of every model, sorted by gradients per second, descending.
        advice: the recommendations.
    """

    sync: str
    measured_updates_per_s: float
    simulated_updates_per_s: float
    rows: list[Figures]
    advice: list[Advice]


def advise(
    run_dir: Path, syncs: Sequence[str] = EVERY_MODEL, tell: TellCount = lambda done, of, what: None
) -> MachineReport:
    """Simulate the machines of a run under every model, and recommend models.

    Raises:
        ConfigurationError: the directory does not contain a finished run, or its files are damaged.
    """
    summary = _summary(run_dir)
    if (logs := len(list(run_dir.glob("worker-*.jsonl")))) != summary["workers"]:
        raise ConfigurationError(
            f"{run_dir} has records of {logs} workers, but summary.json lists {summary['workers']} workers."
        )
    cluster = read_cluster_of_run(run_dir)
    shards = cluster.servers
    iterations = max(20, min(int(count) for count in summary["iterations"].values()))
    own = summary["sync"]
    together_s, updates = _while_all_were_present(read(run_dir / "trace-shard-0.jsonl"))
    again = simulate(cluster, own, None, summary["seed"], until_s=together_s)
    rows = rank(cluster, _runnable(syncs, cluster, shards), iterations=iterations, tell=tell)
    return MachineReport(
        sync=own,
        measured_updates_per_s=updates / together_s,
        simulated_updates_per_s=again.updates / together_s,
        rows=rows,
        advice=_advice(rows, summary),
    )


def _while_all_were_present(shard: Trace) -> tuple[float, int]:
    """Return the seconds until the first worker left, and the number of updates in that time."""
    if not shard.entries:
        raise ConfigurationError(
            "the trace of shard 0 contains only a header, because the run recorded no events."
        )
    begun_s = shard.entries[0].event.now_s
    for entry in shard.entries:
        if isinstance(entry.event, WorkerFinished | WorkerLost) and entry.event.now_s > begun_s:
            return entry.event.now_s - begun_s, entry.version or 0
    return max(shard.entries[-1].event.now_s - begun_s, 1e-9), shard.entries[-1].version or 0


def _runnable(syncs: Sequence[str], cluster: Cluster, shards: int) -> list[str]:
    """Return bsp, which is the baseline, and the models that can run on this cluster."""
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
    # If a condition failed, another model replaced it during the simulation, so its results are left out.
    rows = [row for row in rows if not row.faults]
    [bsp] = [row for row in rows if row.sync == "bsp"]
    fastest = rows[0]
    bounded = [row for row in mark_front([row for row in rows if _bounded(row.sync)]) if row.front]
    middle = max(bounded, key=lambda row: row.gradients_per_s)
    picks = [
        ("no staleness at all", bsp),
        ("the most gradients, with bounded staleness or barriers", middle),
        ("the most gradients, with any staleness", fastest),
    ]
    if fastest.gradients_per_s < WORTH_IT * bsp.gradients_per_s:
        picks = [("these machines are about equally fast", bsp)]
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
    """Return True if the model limits how far ahead a worker may be, or has barriers."""
    return sync.partition(":")[0] in ("bsp", "ssp", "dssp", "dsps", "elastic-bsp", "drop-stragglers")


def _reason(row: Figures, bsp: Figures) -> str:
    if row.sync == "bsp":
        return (
            f"every gradient is fresh; workers wait {row.waiting_share:.0%} of their time, which is the most that "
            "another model could save."
        )
    faster = row.gradients_per_s / bsp.gradients_per_s
    wasted = f" and waste {row.wasted_share:.0%}" if row.wasted_share >= 0.005 else ""
    return (
        f"{faster:.2f} times as many gradients as bsp: workers wait {row.waiting_share:.0%} of their time instead of "
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
            f"{run_dir} does not contain a finished run: there is no summary.json. Give the directory that paceline "
            "run prints when it ends."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{run_dir / 'summary.json'} cannot be read: {error}") from error


def show(report: MachineReport, cluster: Cluster, console: Console) -> None:
    """Print a report: the table of all models and the recommendations."""
    off = (
        report.simulated_updates_per_s / report.measured_updates_per_s - 1
        if report.measured_updates_per_s
        else 0.0
    )
    caption = (
        f"{describe(cluster)}\n{STAR}\nthe run itself ({report.sync}): {report.measured_updates_per_s:.4g} updates "
        f"per s, simulated {report.simulated_updates_per_s:.4g} ({off:+.1%})"
    )
    console.print(ranking_table(f"{cluster.name}, simulated under each model", report.rows, caption))
    show_faults(report.rows, console)
    for advice in report.advice:
        console.print(f"\n[bold]{advice.wish}[/]: {advice.sync}", highlight=False)
        console.print(f"  {advice.reason}", highlight=False)
        console.print(f"  {advice.command}", highlight=False, soft_wrap=True)
