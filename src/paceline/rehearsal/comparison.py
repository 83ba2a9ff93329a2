"""`paceline simulate`: comparisons of sync models on a cluster, with their tables, pictures and JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from ..errors import RunFailedError
from ..files import write_json
from ..launcher.output import print_sentence
from ..report.canvas import can_draw, save
from ..report.picture import timelines_picture
from ..report.ranking import ranking_picture, ranking_table, sweep_picture
from ..report.timeline import timeline_of
from ..sim import Cluster, Dataset, simulate
from .clusters import describe, describe_data
from .process_pool import TellCount
from .ranking import Figures, rank, sweep

__all__ = ["STAR", "compare", "explore", "require_results", "show_faults"]

STAR = "*: no model is better in speed or staleness without being worse in the other"
MOST_DRAWN = 16  # timelines are drawn for clusters with at most this many workers
SHOWN_ITERATIONS = 12  # length of the timelines, in iterations of the slowest worker


def show_faults(rows: Iterable[Figures], console: Console) -> None:
    """Print which models failed or applied too little, which conditions failed, and which models took over."""
    for row in rows:
        for fault in [row.failure, row.unapplied, *(fault.splitlines()[0] for fault in row.faults)]:
            if fault:
                print_sentence(console, f"{row.name}: {fault}", style="red")


def require_results(rows: Sequence[Figures]) -> None:
    """Raise `RunFailedError` if the simulation of every model has failed."""
    if all(row.failure for row in rows):
        raise RunFailedError("every simulation", "\n".join(f"{row.name}: {row.failure}" for row in rows))


def compare(
    cluster: Cluster,
    syncs: Sequence[str],
    *,
    iterations: int,
    seed: int,
    shards: int | None,
    data: Dataset | None,
    out: Path,
    console: Console,
    tell: TellCount,
) -> list[Figures]:
    """Rank sync models. Print a table, and save the results as JSON and as pictures (ranking, timelines).

    Without matplotlib, no pictures are saved.
    """
    rows = rank(cluster, syncs, iterations=iterations, seed=seed, shards=shards, data=data, tell=tell)
    require_results(rows)
    note = f"{describe(cluster)}; " + (
        describe_data(data, cluster.workers)
        if data is not None
        else f"{rows[0].until_s:.4g} virtual seconds, in which bsp completes {iterations} iterations"
    )
    console.print(ranking_table(cluster.name, rows, f"{note}\n{STAR}"))
    show_faults(rows, console)
    write_json(out / "ranking.json", rows)
    if not can_draw():
        return rows
    save(ranking_picture(cluster.name, note, [row for row in rows if not row.failure]), out / "ranking.png")
    if cluster.workers <= MOST_DRAWN:
        slowest_s = max(cluster.compute(worker).typical_s for worker in range(cluster.workers))
        whole_s = max(row.until_s for row in rows)
        shown_s = min(SHOWN_ITERATIONS * (slowest_s or 1.0), whole_s)
        timelines = {}
        failed = {row.sync for row in rows if row.failure}
        for sync in (sync for sync in syncs if sync not in failed):
            result = simulate(cluster, sync, None, seed, until_s=2 * shown_s, shards=shards, record=True)
            shard_traces = [trace for trace in result.trace if trace.header.host == "shard"]
            if any(result.records):  # there is no timeline if no worker has finished an iteration
                timelines[sync] = timeline_of(result.records, shard_traces)
        if timelines:
            save(timelines_picture(timelines, shown_s, whole_s), out / "timelines.png")
    return rows


def explore(
    cluster: Cluster,
    syncs: Sequence[str],
    key: str,
    values: Sequence[float],
    *,
    iterations: int,
    seed: int,
    shards: int | None,
    out: Path,
    console: Console,
    tell: TellCount,
) -> list[Figures]:
    """Compare different values of a parameter. Print a table, and save the results as JSON and as a picture.

    Without matplotlib, no picture is saved.
    """
    points = sweep(cluster, syncs, key, values, iterations=iterations, seed=seed, shards=shards, tell=tell)
    rows = [row for _, row in points]
    require_results(rows)
    console.print(ranking_table(cluster.name, rows, describe(cluster)))
    show_faults(rows, console)
    write_json(out / "sweep.json", rows)
    if not can_draw():
        return rows
    lines: dict[str, list[tuple[float, Figures]]] = {}
    for value, row in ((value, row) for value, row in points if not row.failure):
        lines.setdefault(row.sync.partition(":")[0], []).append((value, row))
    save(sweep_picture(f"{cluster.name}: {key}", key, lines), out / "sweep.png")
    return rows
