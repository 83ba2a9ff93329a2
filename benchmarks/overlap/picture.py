"""Draws a picture that shows how pushes and answers overlap in one iteration.

For each worker and shard, the picture shows when the push was in flight, when the worker waited, and when the shard
answered. With overlap synchronization, shards send answers while other pushes are still arriving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.look.timelines import new_figure
from paceline.sync.actions import AnswerPull
from paceline.sync.events import PushReceived
from paceline.trace.recording import IterationRecord, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPUTING = "#BBBBBB"
PUSHING = "#0072B2"
WAITING = "#F0E442"
ANSWERING = "#009E73"

WIDTH_INCHES = 11.0
PANEL_HEIGHT_INCHES = 2.7
GAP = 0.16  # fraction of a worker's row that is left empty, as a gap before the next row


class Exchange(msgspec.Struct, frozen=True):
    """The pushes and pulls of one iteration. All times are in seconds since the first worker began the iteration."""

    # For each worker, the time at which its whole gradient was ready. Parts of the gradient may have been sent earlier.
    computed_s: tuple[float, ...]
    # For each worker, the time at which it had received the weights from all shards.
    answered_s: tuple[float, ...]
    # For each shard and worker, the time at which the push had arrived completely.
    received_s: tuple[tuple[float, ...], ...]
    # For each shard and worker, the time at which the shard began to send the answer.
    released_s: tuple[tuple[float, ...], ...]

    @property
    def overlap_s(self) -> float:
        """Time from the first answer to the arrival of the last push; 0 if all pushes arrived before any answer."""
        first_s = min(min(shard) for shard in self.released_s)
        return max(0.0, max(max(shard) for shard in self.received_s) - first_s)


def exchange_of(
    records: Sequence[Sequence[IterationRecord]], shards: Sequence[Trace], iteration: int
) -> Exchange:
    """Read one iteration from the workers' records and the shards' traces. The run must not have lost a worker."""
    rows = [next(r for r in worker if r.iteration == iteration) for worker in records]
    zero_s = min(row.begun_s for row in rows)
    received: list[tuple[float, ...]] = []
    released: list[tuple[float, ...]] = []
    for trace in shards:
        arrived: dict[int, float] = {}
        left: dict[int, float] = {}
        for entry in trace.entries:
            event = entry.event
            if isinstance(event, PushReceived) and event.iteration == iteration:
                arrived[event.worker] = trace.time_s(entry) - zero_s
            for action in entry.actions:
                if isinstance(action, AnswerPull) and action.iteration == iteration:
                    left[action.worker] = trace.time_s(entry) - zero_s
        received.append(tuple(arrived[worker] for worker in range(len(rows))))
        released.append(tuple(left[worker] for worker in range(len(rows))))
    return Exchange(
        tuple(row.computed_s - zero_s for row in rows),
        tuple(row.answered_s - zero_s for row in rows),
        tuple(received),
        tuple(released),
    )


def overlap_picture(title: str, note: str, exchanges: Mapping[str, Exchange]) -> Figure:
    """Draw one panel per setting. All panels have the same time axis.

    Args:
        title: title of the figure.
        note: smaller text below the title. It describes the links.
        exchanges: name of a setting -> one iteration in this setting.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(WIDTH_INCHES, PANEL_HEIGHT_INCHES * len(exchanges) + 1.0)
    figure.suptitle(f"{title}\n", fontsize=14, fontweight="bold")
    figure.text(0.5, 0.955, note, ha="center", fontsize=9.5)
    panels = figure.subplots(len(exchanges), 1, squeeze=False, sharex=True)[:, 0]
    for panel, (label, exchange) in zip(panels, exchanges.items(), strict=True):
        draw_exchange(panel, exchange)
        panel.set_title(label, loc="left", fontsize=10, fontweight="bold")
    longest_s = max(max(exchange.answered_s) for exchange in exchanges.values())
    panels[-1].set_xlim(0.0, longest_s * 1.01)
    panels[-1].set_xlabel("seconds since the iteration began")
    _explain(panels[0])
    return figure


def draw_exchange(axes: Axes, exchange: Exchange) -> None:
    """Draw a row for each worker and, within it, a lane for each shard. Worker 0 and shard 0 are at the top."""
    workers, shards = len(exchange.answered_s), len(exchange.received_s)
    lane = (1 - GAP) / shards
    for worker in range(workers):
        top = worker - (1 - GAP) / 2
        computed_s, answered_s = exchange.computed_s[worker], exchange.answered_s[worker]
        axes.broken_barh([(0.0, computed_s)], (top, 1 - GAP), facecolor=COMPUTING)
        for shard in range(shards):
            received_s = exchange.received_s[shard][worker]
            released_s = exchange.released_s[shard][worker]
            pushing = (min(computed_s, received_s), abs(received_s - computed_s))
            spans = [pushing, (received_s, released_s - received_s), (released_s, answered_s - released_s)]
            axes.broken_barh(
                spans,
                (top + shard * lane, lane),
                facecolor=(PUSHING, WAITING, ANSWERING),
                edgecolor="white",
                linewidth=0.6 if shards <= 8 else 0.2,
            )
    axes.set_ylim(workers - 0.5, -0.5)
    axes.set_yticks(range(workers), [f"worker {worker}" for worker in range(workers)])
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _explain(panel: Axes) -> None:
    """Above the first panel, draw a legend that explains the colors."""
    from matplotlib.patches import Patch

    meanings = {
        COMPUTING: "computing",
        PUSHING: "push in flight",
        WAITING: "waiting for other pushes",
        ANSWERING: "answered: weights in flight or received",
    }
    panel.legend(
        handles=[Patch(facecolor=color, label=label) for color, label in meanings.items()],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=4,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
    )
