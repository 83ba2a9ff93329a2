"""`python -m benchmarks overlap`: what it computes, shows, draws and refuses. No test checks how fast anything is."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba_array
from typer.testing import CliRunner

from benchmarks.commands import app_of
from benchmarks.harness import WARM_UP, Figures
from benchmarks.overlap import measurement
from benchmarks.overlap.measurement import (
    WIDTH,
    Found,
    Net,
    OverlapRow,
    figures_of,
    found_in,
    least_s,
    measure,
    picture,
    settings_of,
)
from benchmarks.overlap.namespaces import why_not
from benchmarks.overlap.picture import (
    ANSWERING,
    COMPUTING,
    PUSHING,
    WAITING,
    Exchange,
    draw_exchange,
    exchange_of,
)
from paceline.core.requests import Entry
from paceline.errors import ConfigurationError
from paceline.look.timelines import new_figure
from paceline.sync.actions import AnswerPull, ApplyMean, HoldPush
from paceline.sync.events import PullRequested, PushReceived
from paceline.sync.ticks import in_ticks
from paceline.trace.recording import Header, IterationRecord, Trace

needs_machines = pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")

# Two workers, two shards. Shard 0 has received both pushes at 0.3 s and answers; shard 1 receives the last at 0.6 s.
EXCHANGE = Exchange(
    computed_s=(0.1, 0.2),
    answered_s=(0.8, 0.9),
    received_s=((0.2, 0.3), (0.5, 0.6)),
    released_s=((0.3, 0.3), (0.6, 0.6)),
)


def record(iteration: int, begun_s: float, computed_s: float, answered_s: float) -> IterationRecord:
    return IterationRecord(iteration, begun_s, computed_s, computed_s, answered_s, None, None)


def shard(index: int, iteration: int, received_s: tuple[float, float]) -> Trace:
    """Return the trace of a shard under BSP. It answers both workers when it has received the second push."""
    first_s, second_s = received_s
    return Trace(
        Header(sync="bsp", host="shard", index=index),
        [
            Entry(
                PushReceived(now_ticks=in_ticks(first_s), worker=0, iteration=iteration),
                [HoldPush(0, iteration)],
            ),
            Entry(PullRequested(now_ticks=in_ticks(first_s), worker=0, iteration=iteration)),
            Entry(
                PushReceived(now_ticks=in_ticks(second_s), worker=1, iteration=iteration),
                [ApplyMean(((0, iteration), (1, iteration))), AnswerPull(0, iteration)],
            ),
            Entry(
                PullRequested(now_ticks=in_ticks(second_s), worker=1, iteration=iteration),
                [AnswerPull(1, iteration)],
            ),
        ],
    )


def found(communication_s: float) -> Found:
    return Found(communication_s, 0.01, 0.05, EXCHANGE)


def report() -> Figures[OverlapRow]:
    runs = [[found(1.0), found(3.0), found(2.0)], [found(1.5)] * 3, [found(0.2)] * 3]
    return figures_of(settings_of(8), runs, "no delay", 3)


def test_an_exchange_is_read_out_of_records_and_traces() -> None:
    # All times are 5 s later than in EXCHANGE, and there is an earlier iteration.
    records = [
        [record(6, 3.0, 4.0, 5.0), record(7, 5.0, 5.1, 5.8)],
        [record(6, 3.0, 4.0, 5.0), record(7, 5.0, 5.2, 5.9)],
    ]
    traces = [shard(0, 7, (5.2, 5.3)), shard(1, 7, (5.5, 5.6))]
    traces[0].entries[:0] = shard(0, 6, (4.1, 4.2)).entries
    read = exchange_of(records, traces, 7)
    assert read.computed_s == pytest.approx(EXCHANGE.computed_s)
    assert read.answered_s == pytest.approx(EXCHANGE.answered_s)
    for seen, expected in ((read.received_s, EXCHANGE.received_s), (read.released_s, EXCHANGE.released_s)):
        assert [pytest.approx(times) for times in seen] == list(expected)


def test_pulls_overlap_with_pushes_from_the_first_answer_to_the_last_arrival() -> None:
    assert EXCHANGE.overlap_s == pytest.approx(0.3)
    released_s = ((0.6, 0.6), (0.6, 0.6))  # all answers follow the last push
    together = Exchange(EXCHANGE.computed_s, EXCHANGE.answered_s, EXCHANGE.received_s, released_s)
    assert together.overlap_s == 0.0


def test_communication_is_an_iteration_without_its_bare_part_after_warming_up() -> None:
    begun_s = [
        0.0,
        9.0,
        10.0,
        11.0,
        13.0,
    ]  # the first two iterations are the warm-up, the others take 1, 2 and 4 s
    times = list(zip(begun_s, [*begun_s[1:], 17.0], strict=True))
    assert WARM_UP == 2
    records = [[record(i, begun, begun, end) for i, (begun, end) in enumerate(times)] for _ in range(2)]
    traces = [shard(0, i, (end, end)) for i, (_, end) in enumerate(times)]
    whole = Trace(traces[0].header, [entry for trace in traces for entry in trace.entries])
    seen = found_in(records, [whole], [0.5, 0.7], 0.1)
    assert seen.communication_s == pytest.approx(2.0 - 0.6)
    assert seen.bare_s == pytest.approx(0.6)
    assert seen.exchange.answered_s == (2.0, 2.0)  # the iteration in the middle


def test_rows_compare_medians_with_the_first_setting() -> None:
    first, second, third = report().rows
    assert (first.communication_ms, first.low_ms, first.high_ms) == (2000.0, 1000.0, 3000.0)
    assert (first.less, first.setting.paper_less) == (None, None)
    assert second.less == pytest.approx(0.25)
    assert third.less == pytest.approx(0.9)
    assert (second.setting.paper_less, third.setting.paper_less) == (0.86, 0.937)
    assert (third.setting.overlap, third.setting.slicing, third.setting.shards) == ("shards", "even", 8)


def test_by_parameter_one_server_has_nearly_everything() -> None:
    sizes = [parameter.numel() for parameter in Net(WIDTH).parameters()]
    assert max(sizes) / sum(sizes) > 0.85
    assert 25 < sum(sizes) * 4 / 2**20 < 50
    off, overlap, even = (least_s("1gbit", WIDTH, setting) for setting in settings_of(16))
    assert off == pytest.approx(overlap)  # with one shard per server, overlap cannot begin earlier
    assert even < off / 5
    assert least_s("1gbit", WIDTH, settings_of(64)[2]) < even


def test_the_table_shows_every_setting() -> None:
    assert report().cells()[2] == ["3 overlap, even, 8 shards", "200", "200 - 200", "50", "90.0%", "93.7%"]


def test_a_lane_shows_a_push_then_its_wait_then_its_answer() -> None:
    axes = new_figure(4.0, 2.0).subplots()
    draw_exchange(axes, EXCHANGE)
    bars = [bar for bar in axes.collections if isinstance(bar, PolyCollection)]
    assert len(bars) == 2 * (1 + 2)  # for each of two workers, the computation and a lane for each shard
    computing, lane, *_ = bars
    assert np.array_equal(computing.get_facecolor(), to_rgba_array([COMPUTING]))
    assert np.array_equal(lane.get_facecolor(), to_rgba_array([PUSHING, WAITING, ANSWERING]))
    across = [np.asarray(path.vertices)[:, 0] for path in lane.get_paths()]
    spans = [(corners.min(), corners.max()) for corners in across]
    assert [pytest.approx(span) for span in spans] == [(0.1, 0.2), (0.2, 0.3), (0.3, 0.8)]


def test_the_picture_has_a_panel_for_each_setting() -> None:
    figure = picture([report()])
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "1 overlap off, by parameter",
        "2 overlap, by parameter (25.0% less communication)",
        "3 overlap, even, 8 shards (90.0% less communication)",
    ]
    assert [panel.get_xlim()[1] for panel in figure.axes] == [pytest.approx(0.9 * 1.01)] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rate slow", "rate is 'slow'"),
        ("--rounds 0", "rounds is 0, expected a whole number >= 1"),
        ("--iterations 0", "iterations is 0"),
        ("--shards 3", "shards is 3, expected a whole number >= 4"),
        ("--picture /nowhere/at/all.png", "the folder does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CliRunner().invoke(app_of(["overlap"]), ["overlap", *options.split()], catch_exceptions=False)


@needs_machines
@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.usefixtures("machines_alone")
def test_a_small_run_gives_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "WORKERS", 2)
    monkeypatch.setattr(measurement, "SERVERS", 1)
    [figures] = measure(lambda what, share, slow=False: None, rounds=1, iterations=2, shards=4, width=32)
    assert [row.setting.shards for row in figures.rows] == [1, 1, 4]
    for row in figures.rows:
        assert row.bare_ms > 0
        assert row.low_ms == row.communication_ms == row.high_ms
        assert len(row.exchange.received_s) == row.setting.shards
        for received_s, released_s in zip(row.exchange.received_s, row.exchange.released_s, strict=True):
            assert max(received_s) <= min(released_s)  # under BSP all answers follow the last push
    assert figures.rows[0].exchange.overlap_s == 0.0  # overlap is off
