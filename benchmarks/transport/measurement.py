"""Measures everything in the plan, round by round, and returns the results as rows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from paceline.cli.progress_bar import TellShare

from .fork_server import fork_server, measure_turn, one_thread_each
from .plan import Figures, TransportPlan, TransportRow, Turn, estimate_s, turns_of, work_s

__all__ = ["measure"]


def measure(
    plan: TransportPlan, tell: TellShare = lambda what, share, slow=False: None
) -> list[TransportRow]:
    """Measure everything in the plan, round by round.

    Args:
        plan: parameters of the benchmark.
        tell: progress callback, called before each turn.

    Raises:
        ConfigurationError: the plan is invalid. No process has been started.
        RunFailedError: a process failed. All other processes have been stopped.
    """
    plan.require_sound()
    turns = turns_of(plan)
    total_s, done_s = estimate_s(plan), 0.0
    found: dict[Turn, list[Figures]] = {turn: [] for turn in turns}
    # Contexts exit in reverse order, so the fork server ends before its directory is removed.
    with one_thread_each(), tempfile.TemporaryDirectory() as home, fork_server(Path(home)) as server:
        for number in range(plan.rounds):
            for turn in turns:
                tell(f"round {number + 1} of {plan.rounds}, {turn.name}", done_s / total_s, slow=True)
                out = Path(home, "turn")
                out.mkdir()
                found[turn].append(measure_turn(turn, out, server))
                shutil.rmtree(out)
                done_s += work_s(turn)
    return [row for turn, rounds in found.items() for row in rows_of(turn, rounds)]


def rows_of(turn: Turn, rounds: Sequence[Figures]) -> list[TransportRow]:
    """Return one row for each case of a turn, computed from the results of all rounds."""
    rows = []
    for system, transport, mode in turn.cases:
        figures_ms = [figures[mode] * 1e3 for figures in rounds]
        traffic_ms = [figures["traffic"] * 1e3 for figures in rounds if "traffic" in figures]
        fastest_ms = [figures["fastest"] * 1e3 for figures in rounds if "fastest" in figures]
        rows.append(
            TransportRow(
                system=system,
                transport=transport,
                mode=mode,
                size_mb=turn.size_mb,
                workers=turn.workers,
                median_ms=median(figures_ms),
                low_ms=min(figures_ms),
                high_ms=max(figures_ms),
                optimizer=turn.optimizer,
                traffic_ms=median(traffic_ms) if traffic_ms else None,
                fastest_ms=min(fastest_ms, default=None),
            )
        )
    return rows
