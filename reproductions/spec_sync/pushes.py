"""Figure 3 of SpecSync: pushes of other workers after a pull."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from paceline.cli.console import TellShare
from paceline.look.timelines import COLOURS, new_figure
from paceline.sim import Cluster, simulate
from paceline.sync.actions import AnswerPull
from paceline.sync.events import PullRepeated, PushReceived
from paceline.trace.recording import Trace

from ..exhibit import Exhibit, Figure, Made, Options, beside
from ..papers import SPEC_SYNC, Quote
from ..verdicts import Measured
from .workloads import PAPER, TIMES


def pushes_after_pulls(shard: Trace, intervals: int, width_s: float) -> list[list[int]]:
    """For each pull, count the pushes of other workers in each interval after the answer to the pull.

    Returns:
        For each interval, a list with one count per pull. Pulls whose intervals end after the last push are omitted.
    """
    pushes = [
        (shard.time_s(entry), entry.event.worker)
        for entry in shard.entries
        if isinstance(entry.event, PushReceived)
    ]
    counts: list[list[int]] = [[] for _ in range(intervals)]
    end_s = pushes[-1][0]
    first = 0
    for entry in shard.entries:
        for action in entry.actions:
            if not isinstance(action, AnswerPull) or isinstance(entry.event, PullRepeated):
                continue
            begun_s = shard.time_s(entry)
            if begun_s + intervals * width_s > end_s:
                continue
            while first < len(pushes) and pushes[first][0] <= begun_s:
                first += 1
            found = [0] * intervals
            for at_s, worker in pushes[first:]:
                index = int((at_s - begun_s) // width_s)
                if index >= intervals:
                    break
                found[index] += worker != action.worker
            for interval, number in zip(counts, found, strict=True):
                interval.append(number)
    return counts


def figure_3(options: Options, tell: TellShare) -> Made:
    """Count the pushes of other workers in each second after a pull, under ASP on the paper's Cluster 1."""
    tell("asp on Cluster 1", 0.1)
    cluster = Cluster.preset("spec-sync-1")
    result = simulate(cluster, "asp", 10 if options.quick else 60, record=True)
    counts = pushes_after_pulls(result.trace[0], 14, 1.0)
    boxes = [_box(values) for values in counts]
    first_two = median(a + b for a, b in zip(counts[0], counts[1], strict=True))
    rows: dict[str, Sequence[tuple[Quote | None, str]]] = {
        f"{second}-{second + 1} s": [(None, "{:.0f} / {:.0f} / {:.0f}".format(*box[1:4]))]
        for second, box in enumerate(boxes)
    }
    share = 100 * first_two / cluster.workers
    within, included = (SPEC_SYNC.numbers[f"pushes-within-2-s{end}"] for end in ("", "-share"))
    rows["within 2 s, median"] = [(within, f"{first_two:g}")]
    rows["share of the workers"] = [(included, f"{share:g} %")]

    def draw() -> Figure:
        figure = new_figure(9.0, 4.0)
        axes = figure.subplots()
        axes.bxp(
            [
                {"med": b[2], "q1": b[1], "q3": b[3], "whislo": b[0], "whishi": b[4], "label": str(k + 1)}
                for k, b in enumerate(boxes)
            ],
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": COLOURS[5]},
            medianprops={"color": "black"},
        )
        axes.set(xlabel="second after the pull", ylabel="pushes of other workers")
        axes.set_title("SpecSync, Fig. 3: percentiles 25 to 75 (boxes) and 5 to 95 (whiskers)")
        return figure

    even = max(box[2] for box in boxes) - min(box[2] for box in boxes)
    return Made(
        tables=[beside(f"{PAPER}, Fig. 3: pushes after a pull, quartiles", rows, ["per second"])],
        figure=draw,
        data=boxes,
        measured={
            "pushes-within-2-s": Measured.exactly(first_two),
            "pushes-within-2-s-share": Measured.exactly(share),
        },
        notes=[f"In the paper, pushes arrive evenly. Here, the medians differ by at most {even:g}."],
    )


def _box(values: Sequence[int]) -> tuple[float, float, float, float, float]:
    """Return the 5th, 25th, 50th, 75th and 95th percentiles."""
    ordered = sorted(values)
    at = [
        ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.05, 0.25, 0.5, 0.75, 0.95)
    ]
    return at[0], at[1], at[2], at[3], at[4]


EXHIBITS = (
    Exhibit(
        name="specsync-fig3",
        title="pushes of other workers in each second after a pull",
        differs=TIMES,
        minutes=0.2,
        make=figure_3,
    ),
)
