"""`paceline simulate`: a cluster, some sync models, and what is shown and kept of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from ..report.canvas import save
from ..report.picture import timelines_picture
from ..report.ranking import ranking_picture, ranking_table, sweep_picture
from ..report.timeline import timeline_of
from ..sim import Cluster, simulate
from .clusters import describe
from .process_pool import TellCount
from .ranking import Figures, rank, sweep

__all__ = ["STAR", "compare", "explore", "show_faults"]

STAR = "*: no other model here has both more gradients per second and less staleness"
MOST_DRAWN = 16  # workers in a picture of timelines
SHOWN_ITERATIONS = 12  # of the slowest worker, in one


def show_faults(rows: Iterable[Figures], console: Console) -> None:
    """Say of which models conditions have failed: their rows are those of what the shards went on with."""
    for row in rows:
        for fault in row.faults:
            console.print(f"{row.sync}: {fault.splitlines()[0]}", style="red", markup=False, highlight=False)


def compare(
    cluster: Cluster,
    syncs: Sequence[str],
    *,
    iterations: int,
    seed: int,
    shards: int | None,
    out: Path,
    console: Console,
    tell: TellCount,
) -> list[Figures]:
    """Rank some models; print the table, keep it as JSON, draw two pictures."""
    rows = rank(cluster, syncs, iterations=iterations, seed=seed, shards=shards, tell=tell)
    until_s = rows[0].until_s
    note = f"{describe(cluster)}; {until_s:.4g} virtual seconds, in which bsp does {iterations} iterations"
    console.print(ranking_table(cluster.name, rows, f"{note}\n{STAR}"))
    show_faults(rows, console)
    _keep(out / "ranking.json", rows)
    save(ranking_picture(cluster.name, note, rows), out / "ranking.png")
    if cluster.workers <= MOST_DRAWN:
        slowest_s = max(cluster.compute(worker).typical_s for worker in range(cluster.workers))
        shown_s = SHOWN_ITERATIONS * (slowest_s or 1.0)
        timelines = {}
        for sync in syncs:
            result = simulate(cluster, sync, None, seed, until_s=2 * shown_s, shards=shards, record=True)
            if any(result.records):  # else nobody has come to the end of an iteration
                timelines[sync] = timeline_of(result.records, result.trace[0])
        if timelines:
            save(timelines_picture(timelines, shown_s), out / "timelines.png")
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
    """Try each value of a key; print the table, keep it as JSON, draw the curves."""
    points = sweep(cluster, syncs, key, values, iterations=iterations, seed=seed, shards=shards, tell=tell)
    rows = [row for _, row in points]
    console.print(ranking_table(cluster.name, rows, describe(cluster)))
    show_faults(rows, console)
    _keep(out / "sweep.json", rows)
    lines: dict[str, list[tuple[float, Figures]]] = {}
    for value, row in points:
        lines.setdefault(row.sync.partition(":")[0], []).append((value, row))
    save(sweep_picture(f"{cluster.name}: {key}", key, lines), out / "sweep.png")
    return rows


def _keep(path: Path, rows: Sequence[Figures]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
