"""`paceline simulate`: comparisons of sync models on a cluster, with their tables, pictures and JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from ..errors import RunFailedError
from ..files import write_json
from ..launcher.terminal.output import print_sentence
from ..report.canvas import can_draw, no_picture, save
from ..report.ranking_table import ranking_picture, ranking_table, sweep_picture
from ..report.timelines import activity_of, timelines_picture
from ..sim import Cluster, Dataset, simulate
from ..trace.findings import how_to_check
from .clusters import NO_CHANGES, Changes, describe, describe_data
from .process_pool import TellCount
from .ranking import Figures, rank
from .recommendation import Recommendation, WireVariant, candidates_of, recommend
from .sweeps import sweep
from .wire_variants import wire_variants

__all__ = [
    "STAR",
    "Comparison",
    "compare",
    "explore",
    "require_results",
    "show_faults",
    "show_recommendation",
]

NO_RECOMMENDATION = (
    'No model is recommended, because there are no results for bsp without "!", to compare with.'
)
STAR = "*: no model is better in speed or staleness without being worse in the other"
MOST_DRAWN = 16  # timelines are drawn for clusters with at most this many workers
SHOWN_ITERATIONS = 12  # length of the timelines, in iterations of the slowest worker


class Comparison(msgspec.Struct, frozen=True):
    """The results of a comparison, as `paceline simulate --json` prints them.

    Attributes:
        rows: the results for each model.
        recommendation: what they recommend; None if bsp, with which all others are compared, trains nothing.
    """

    rows: list[Figures]
    recommendation: Recommendation | None


def show_recommendation(recommendation: Recommendation | None, console: Console) -> None:
    """Print a recommendation and its command, which is not wrapped so that it can be copied."""
    if recommendation is None:
        print_sentence(console, f"\n{NO_RECOMMENDATION}")
        return
    print_sentence(console, f"\n{recommendation.text}")
    if recommendation.check:
        console.print("To check the accuracy, run:", highlight=False)
        console.print(f"  {recommendation.check}", highlight=False, markup=False, soft_wrap=True)


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
    wire: str = "float32",
    source: str = "CLUSTER",
    changes: Changes = NO_CHANGES,
    out: Path,
    console: Console,
    tell: TellCount,
) -> Comparison:
    """Rank sync models. Print a table and a recommendation, and save the results as JSON and as pictures.

    The pictures are the ranking and timelines. Without matplotlib, a sentence says that they are left out. `source`
    is the argument of the command that describes the cluster, and `changes` are its options that change it.
    """
    simulated = _Simulated(cluster, iterations, seed, shards, wire, data, tell)
    rows = simulated.ranked(syncs)
    require_results(rows)
    comparison = Comparison(rows, _recommendation(simulated, rows, source, changes))
    note = f"{describe(cluster)}; " + (
        describe_data(data, cluster.workers)
        if data is not None
        else f"{rows[0].until_s:.4g} virtual seconds, in which bsp completes {iterations} iterations"
    )
    console.print(ranking_table(cluster.name, rows, f"{note}\n{STAR}", console.width))
    show_faults(rows, console)
    show_recommendation(comparison.recommendation, console)
    write_json(out / "ranking.json", comparison)
    drawn = ["ranking.png", *(["timelines.png"] if cluster.workers <= MOST_DRAWN else [])]
    if not can_draw():
        print_sentence(console, no_picture(*drawn))
        return comparison
    rows = [row for row in rows if not row.failure]
    save(ranking_picture(cluster.name, note, rows), out / "ranking.png")
    if cluster.workers <= MOST_DRAWN:
        slowest_s = max(cluster.compute(worker).typical_s for worker in range(cluster.workers))
        whole_s = max(row.until_s for row in rows)
        shown_s = min(SHOWN_ITERATIONS * (slowest_s or 1.0), whole_s)
        timelines = {}
        for sync in (sync for sync in syncs if sync in {row.sync for row in rows}):
            result = simulate(
                cluster, sync, None, seed, until_s=2 * shown_s, shards=shards, wire=wire, record=True
            )
            if any(result.records):  # there is no timeline if no worker has finished an iteration
                timelines[sync] = activity_of(result.records, result.trace)
        if timelines:
            save(timelines_picture(timelines, shown_s, whole_s), out / "timelines.png")
    return comparison


class _Simulated(NamedTuple):
    """How the models of a comparison are simulated. See `rank`."""

    cluster: Cluster
    iterations: int
    seed: int
    shards: int | None
    wire: str
    data: Dataset | None
    tell: TellCount

    def ranked(self, syncs: Sequence[str]) -> list[Figures]:
        """Simulate models, and also bsp with balanced batches if bsp is among them."""
        return rank(self.cluster, syncs, balanced_bsp=True, iterations=self.iterations, **self._options())

    def wire_variants(self, rows: Sequence[Figures]) -> list[WireVariant]:
        """Simulate bsp with other transfers. `rows` contains bsp."""
        return wire_variants(self.cluster, rows, **self._options())

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "shards", "wire", "data", "tell")}


def _recommendation(
    simulated: _Simulated, rows: Sequence[Figures], source: str, changes: Changes
) -> Recommendation | None:
    """Return what the rows of a ranking recommend. If bsp is not among them, it is simulated for the comparison."""
    if not any(row.sync == "bsp" for row in rows):
        rows = [*simulated.ranked(["bsp"]), *rows]
    return recommend(
        candidates_of(rows),
        simulated.wire_variants(rows),
        servers=simulated.cluster.servers,
        check=lambda sync: how_to_check(source, ["script", "SCRIPT"], ("bsp", sync), changes.options),
    )


def explore(
    cluster: Cluster,
    syncs: Sequence[str],
    key: str,
    values: Sequence[float],
    *,
    iterations: int,
    seed: int,
    shards: int | None,
    wire: str = "float32",
    source: str = "CLUSTER",
    changes: Changes = NO_CHANGES,
    out: Path,
    console: Console,
    tell: TellCount,
) -> Comparison:
    """Compare different values of a parameter. Print a table and a recommendation, and save the results.

    Without matplotlib, a sentence says that the picture is left out. `source` is the argument of the command that
    describes the cluster, and `changes` are its options that change it.
    """
    points = sweep(
        cluster, syncs, key, values, iterations=iterations, seed=seed, shards=shards, wire=wire, tell=tell
    )
    rows = [row for _, row in points]
    require_results(rows)
    simulated = _Simulated(cluster, iterations, seed, shards, wire, None, tell)
    comparison = Comparison(rows, _recommendation(simulated, rows, source, changes))
    console.print(ranking_table(cluster.name, rows, describe(cluster), console.width))
    show_faults(rows, console)
    show_recommendation(comparison.recommendation, console)
    write_json(out / "sweep.json", comparison)
    if not can_draw():
        print_sentence(console, no_picture("sweep.png"))
        return comparison
    lines: dict[str, list[tuple[float, Figures]]] = {}
    for value, row in ((value, row) for value, row in points if not row.failure):
        lines.setdefault(row.sync.partition(":")[0], []).append((value, row))
    save(sweep_picture(f"{cluster.name}: {key}", key, lines), out / "sweep.png")
    return comparison
