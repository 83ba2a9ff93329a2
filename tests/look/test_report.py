"""Pictures and tables: what is drawn, not only that something is."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.lab.ranking import EVERY_MODEL, rank
from paceline.look.summary import LossCurve, loss_picture, summary_rows
from paceline.look.tables import TrialOutcome, comparison_table, medians, ranking_picture
from paceline.look.timelines import COLOURS, activity_of, new_figure, save, timelines_picture
from paceline.sim import Cluster, Uniform, simulate
from paceline.words import COMPUTING, TRANSFER, WAITING, WASTED
from tests.support.marks import thorough

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
LOSSES = [LossCurve("bsp", [(0.0, 2.3), (1.0, 0.9), (2.0, 0.4)]), LossCurve("asp", [(0.0, 2.3), (1.0, 0.5)])]


def outcome(**changes: object) -> TrialOutcome:
    plain = TrialOutcome(
        sync="bsp",
        learning_rate=0.1,
        momentum=0.9,
        seeds=(0,),
        target_accuracy=0.95,
        time_to_target_s=8.5,
        final_accuracy=0.975,
        updates_per_s=16.0,
        gradients_per_s=64.0,
        samples_per_s=2048.0,
        waiting_share=0.5,
        mean_staleness=0.0,
        max_staleness=0,
        emulated="--pace 0.02,0.06 (minimum seconds per iteration)",
    )
    return msgspec.structs.replace(plain, **changes)


def xs(line: Line2D) -> tuple[float, ...]:
    return tuple(np.asarray(line.get_xdata(), dtype=float).tolist())


def ys(line: Line2D) -> tuple[float, ...]:
    return tuple(np.asarray(line.get_ydata(), dtype=float).tolist())


def test_medians_are_taken_figure_by_figure() -> None:
    several = [
        outcome(seeds=(0,), time_to_target_s=8.0, final_accuracy=0.97, max_staleness=3),
        outcome(seeds=(1,), time_to_target_s=7.0, final_accuracy=0.98, max_staleness=9),
        outcome(seeds=(2,), time_to_target_s=None, final_accuracy=0.91, max_staleness=4),
    ]
    middle = medians(several)
    assert middle.seeds == (0, 1, 2)
    assert middle.time_to_target_s == 8.0  # never counts as later than any time
    assert middle.final_accuracy == 0.97
    assert middle.max_staleness == 9  # the largest of all


def test_median_of_runs_that_mostly_never_reached_the_target_is_never() -> None:
    assert (
        medians([outcome(time_to_target_s=None), outcome(time_to_target_s=None), outcome()]).time_to_target_s
        is None
    )


def test_table_shows_every_figure_within_eighty_columns() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(
            comparison_table(
                [
                    outcome(),
                    outcome(
                        sync="elastic-bsp:lookahead=15",
                        learning_rate=0.0125,
                        time_to_target_s=None,
                        samples_per_s=4742.4,
                        mean_staleness=12.34,
                        max_staleness=123,
                    ),
                ]
            )
        )
    text = capture.get()
    for shown in ("8.50", "97.5%", "2048.0", "50.0%", "0.1, 0.9", "lookahead=15", "0.0125, 0.9"):
        assert shown in text
    assert "never" in text
    assert "4742.4" in text
    assert "samples" in text
    assert "(updates)" in text
    assert "12.3, 123" in text
    assert "emulated: --pace 0.02,0.06 (minimum seconds per iteration)" in text
    assert "…" not in text


def test_runs_of_which_one_has_no_known_samples_are_compared_by_gradients() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(comparison_table([outcome(), outcome(sync="asp", samples_per_s=0.0)]))
    text = capture.get()
    assert "gradients" in text
    assert "64.0" in text
    assert "2048.0" not in text


SUMMARY = {
    "ended": "finished",
    "sync": "bsp",
    "shards": 2,
    "emulated": "--pace 0.02,0.06 (minimum seconds per iteration)",
    "duration_s": 10.0,
    "iterations": {"0": 100, "1": 100},
    "updates": 100,
    "updates_per_s": 10.0,
    "gradients": 200,
    "gradients_per_s": 20.0,
    "samples": 6400,
    "samples_per_s": 640.0,
    "worker_samples": {"0": 4800, "1": 1600},
    "waiting_share": 0.25,
    "idle_s": {"0": 0.01, "1": 0.0},
    "idle_share": 0.001,
    "dropped_pushes": 0,
    "restarts": 0,
    "wasted_s": 0.0,
    "mean_staleness": 0.0,
    "max_staleness": 0,
    "max_gap": 0,
    "unapplied": 0,
    "ledger": {"pushes": {"applied": 0, "averaged": 200, "dropped": 0, "refused": 0, "lost": 0}},
}


def test_the_summary_gives_speed_in_samples_and_says_what_is_in_an_update() -> None:
    assert summary_rows(SUMMARY) == {
        "sync": "bsp",
        "duration": "10.0 s",
        "samples": "6400 (640.0 per second)",
        "fairness": "a worker's share of the updates is 25.0% to 75.0% (Jain's index "
        "0.80; 1 if all shares are equal)",
        "per worker": "4800, 1600 samples",
        "updates": "100 (2 gradients each, on average)",
        "waiting": "25.0% of the workers' time",
        "staleness": "mean 0.00, maximum 0 (in updates)",
        "gap": "maximum 0 (in iterations)",
        "emulated": "--pace 0.02,0.06 (minimum seconds per iteration)",
    }


@pytest.mark.parametrize(("predicted_s", "predicted"), [(None, ""), (3.14, ", predicted 3.14 s")])
def test_the_summary_gives_the_cost_of_synchronization_and_what_was_predicted(
    predicted_s: float | None, predicted: str
) -> None:
    cost = {"barriers": 12, "sync_cost_s": 4.25, "predicted_sync_cost_s": predicted_s}
    rows = summary_rows({**SUMMARY, **cost})
    assert rows["barriers"] == f"12, whose longest waits add up to 4.25 s (c_sync{predicted})"
    assert "barriers" not in summary_rows({**SUMMARY, **cost, "barriers": 0})


def test_without_known_samples_the_summary_gives_speed_in_gradients() -> None:
    unknown = {"samples": 0, "samples_per_s": 0.0, "worker_samples": {"0": 0, "1": 0}}
    rows = summary_rows({**SUMMARY, **unknown, "updates": 200})
    assert rows["gradients"] == "200 (20.0 per second)"
    assert rows["updates"] == "200 (1 gradient each, on average)"
    assert "samples" not in rows
    assert "per worker" not in rows


def test_the_samples_of_many_workers_are_summarized() -> None:
    rows = summary_rows({**SUMMARY, "worker_samples": {str(worker): 10 * worker for worker in range(20)}})
    assert rows["per worker"] == "0 to 190 samples, median 95"


def test_the_summary_says_who_was_idle_and_what_was_dropped_or_restarted() -> None:
    lost = {"dropped_pushes": 3, "restarts": 2, "wasted_s": 0.5}
    rows = summary_rows({**SUMMARY, **lost, "idle_s": {"0": 4.0, "1": 0.0}, "idle_share": 0.2})
    assert rows["idle"] == "1 worker finished up to 4.0 s before the last worker (20.0% of the workers' time)"
    assert rows["left out"] == "3 of 400 pushes to 2 shards (no usable gradient, or too late)"
    assert rows["restarts"] == "2"
    assert rows["wasted"] == "0.5 s of computation (aborted, or lost with a worker)"
    assert "paused" not in rows


def test_the_summary_says_for_how_long_workers_were_paused() -> None:
    rows = summary_rows({**SUMMARY, "paused_share": 0.5})
    assert rows["paused"] == "50.0% of the workers' time, because the run had too few workers"


def test_a_summary_without_statistics_has_what_is_known() -> None:
    bare = {"sync": "asp", "emulated": "", "ended": "finished"}
    assert summary_rows(bare) == {"sync": "asp"}
    assert summary_rows({**bare, "ended": "interrupted"}) == {"sync": "asp", "ended": "interrupted"}


def test_a_picture_is_saved_with_its_title(tmp_path: Path) -> None:
    figure = loss_picture("A title", "emulated: so and so", LOSSES)
    assert figure.axes[0].get_title() == "emulated: so and so"
    save(figure, tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(PNG_SIGNATURE)
    assert len(data) > 30_000


@pytest.mark.parametrize("workers", [8, *thorough(2, 40)])
@pytest.mark.usefixtures("one_core")
def test_each_color_has_one_meaning_and_no_labels_overlap(workers: int) -> None:
    cluster = Cluster(compute_s=[Uniform(low=0.8, high=1.2)] * (workers - 1) + [3.0], latency_s=0.05)
    rows = rank(cluster, EVERY_MODEL, iterations=20)
    ranking = ranking_picture("A cluster", "a long note " * 30, rows)
    result = simulate(cluster, "spec-sync", 10, record=True)
    activity = activity_of(result.records, result.trace)
    timelines = timelines_picture({"spec-sync": activity}, 20.0, 20.0)
    meanings: dict[str, set[str]] = {}
    for figure in (ranking, timelines):
        figure.draw_without_rendering()
        for axes in figure.axes:
            legend = axes.get_legend()
            if legend is not None:
                words = [text.get_text().partition(",")[0] for text in legend.get_texts()]
                for patch, meaning in zip(legend.get_patches(), words, strict=False):  # the barrier is a line
                    meanings.setdefault(to_hex(patch.get_facecolor()).upper(), set()).add(meaning)
            for texts in (axes.texts, axes.get_yticklabels(), axes.get_xticklabels()):
                boxes = [text.get_window_extent() for text in texts if text.get_text()]
                assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert meanings == {
        COMPUTING: {"computing"},
        TRANSFER: {"transferring data"},
        WASTED: {"aborted or lost computations"},
        WAITING: {"waiting"},
    }
    assert not meanings.keys() & set(COLOURS)
    [note] = [text for text in ranking.texts if text.get_text().startswith("a long note")]
    boxes = [text.get_window_extent() for text in (note, ranking.axes[0].title)]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.width < ranking.bbox.width for box in boxes)


def bars_in(axes: Axes) -> dict[str, list[tuple[float, float, int]]]:
    """Return the beginning, the end and the row of each bar, by its color."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection):
            color = to_hex(np.asarray(collection.get_facecolor(), dtype=float)[0]).upper()
            for path in collection.get_paths():
                box = path.get_extents()
                place = round(float(box.x0), 4), round(float(box.x1), 4), round(float(box.y0 + box.y1) / 2)
                found.setdefault(color, []).append(place)
    return found


def test_a_timeline_has_bars_where_workers_computed_and_waited_and_a_line_at_each_barrier() -> None:
    """Worker 0 computes for 1 s and worker 1 for 2 s. A message takes 0.1 s. What begins after 5 s is left out."""
    result = simulate(Cluster(compute_s=[1.0, 2.0], latency_s=0.1), "bsp", 4, record=True)
    activity = activity_of(result.records, result.trace)
    figure = timelines_picture({"bsp": activity, "again": activity}, until_s=5.0, whole_s=699.0)
    axes, below = figure.axes
    bars = bars_in(axes)
    assert bars[COMPUTING] == [(b, e, w) for b, e, w in bars[COMPUTING] if b < 5.0]
    assert sorted(bars[COMPUTING]) == [
        (0.0, 1.0, 0),
        (0.0, 2.0, 1),
        (2.2, 3.2, 0),
        (2.2, 4.2, 1),
        (4.4, 5.4, 0),
        (4.4, 6.4, 1),
    ]
    assert sorted(bars[WAITING]) == [(1.1, 2.1, 0), (3.3, 4.3, 0)]
    assert sorted(bars[TRANSFER])[:3] == [(1.0, 1.1, 0), (2.0, 2.1, 1), (2.1, 2.2, 0)]
    assert WASTED not in bars
    [barriers] = [each for each in axes.collections if isinstance(each, LineCollection)]
    assert [round(float(segment[0][0]), 4) for segment in barriers.get_segments()] == [2.1, 4.3]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["worker 0", "worker 1"]
    assert [each.get_title(loc="left") for each in figure.axes] == ["bsp", "again"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text().partition(",")[0] for text in legend.get_texts()] == [
        "computing",
        "transferring data",
        "aborted or lost computations",
        "waiting",
        "barrier",
    ]
    assert below.get_xlabel() == "virtual seconds since training began: the first 5 of 699 s"
    whole = timelines_picture({"bsp": activity}, until_s=0.5, whole_s=0.5)
    assert whole.axes[0].get_xlabel() == "virtual seconds since training began"


def test_missing_matplotlib_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'paceline\[report\]'"):
        new_figure(1, 1)


def test_no_setting_of_matplotlib_is_changed() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    loss_picture("t", "n", LOSSES)
    assert dict(matplotlib.rcParams) == before
