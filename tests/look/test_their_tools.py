"""TensorBoard's own reader and the parsers of prometheus-client read what is written for them."""

from __future__ import annotations

import asyncio
import base64
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from paceline.core.metrics import Metric, MetricPoint
from paceline.core.status import JobStatus, LinkStatus, WorkerStatus
from paceline.look.dashboard import LiveReport
from paceline.look.http import HttpResponse, Request
from paceline.look.openmetrics import MetricsPage
from paceline.look.tensorboard import TensorboardFiles, write_until
from paceline.trace.activity_cells import KINDS
from paceline.trace.report import ModelInForce, RunReport, TimelineReport, WaitingFor, WorkerReport

STATUS = JobStatus(
    "asp",
    1,
    8.0,
    (WorkerStatus(0, "a", "computing"), WorkerStatus(1, "b", "waiting"), WorkerStatus(2, "b", "computing")),
    progress=0.25,
    samples_per_s=64.0,
    links=(LinkStatus("a", 'b "quoted"\n', None, 4096),),
)


def loss(*values: float) -> Metric:
    points = [
        MetricPoint(time_s=k + 1.0, samples=64 * (k + 1), updates=k + 1, value=value)
        for k, value in enumerate(values)
    ]
    return Metric("loss", "mean", tuple(points))


def shares(*waiting: int) -> str:
    kinds = np.zeros((len(waiting), len(KINDS)), np.uint8)
    kinds[:, KINDS.index("waiting")] = waiting
    return base64.b64encode(kinds.tobytes()).decode()


def awaited(*workers: int) -> str:
    return base64.b64encode(np.array(workers, "<i2").tobytes()).decode()


ACCURACY_OF_1 = MetricPoint(2.0, 128, 2, 0.25, worker=1)
REPORT = RunReport(
    name="run <b>",
    run_dir="/runs/run",
    begun_at="2026-01-02T03:04:05+00:00",
    state="running",
    progress=((0.0, 0, 0), (4.0, 256, 4)),
    metrics=(
        loss(4.0, 3.0, 2.0, 1.0),
        Metric("accuracy", "point", (MetricPoint(2.0, 128, 2, 0.5, worker=0), ACCURACY_OF_1)),
    ),
    workers=(
        WorkerReport(worker=0, iterations=3, samples=192, time_s={"computing": 2.5, "waiting": 1.5}, awaited_s=0.25),
        WorkerReport(worker=1, iterations=1, samples=64, time_s={"computing": 4.0}, awaited_s=1.5),
    ),
    models=(
        ModelInForce(
            sync="asp",
            from_s=0.0,
            to_s=4.0,
            staleness=((0, 1), (3, 2), (1000, 1)),
            waiting=(WaitingFor("a push of worker 1", 1.5, 3, 1), WaitingFor("a timer", 0.25, 1)),
            wait_lengths=((0.256, 1), (0.512, 3)),
        ),
    ),
    timeline=TimelineReport(
        width_s=0.5,
        buckets=3,
        workers=(0, 1),
        shares=(shares(255, 51, 255), shares(0, 0, 0)),
        awaited=(awaited(1, 1, -1), awaited(-1, -1, -1)),
    ),
    live=STATUS,
    now_s=8.0,
)  # fmt: skip

LATER = structs.replace(
    REPORT,
    state="finished",
    progress=(*REPORT.progress, (6.0, 512, 8)),
    metrics=(loss(4.0, 3.0, 2.0, 1.5, math.nan),),
    models=(*REPORT.models, ModelInForce(sync="bsp", from_s=4.0, to_s=6.0, staleness=((0, 4),))),
    live=None,
    now_s=None,
)


# -- TensorBoard ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own
def test_tensorboard_reads_metrics_speed_staleness_and_waiting(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = TensorboardFiles(tmp_path)
    files.write(REPORT)
    files.write(REPORT)  # nothing is new
    files.write(LATER)
    files.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "histograms": 0}).Reload()

    losses = events.Scalars("loss")
    assert [event.step for event in losses] == [64, 128, 192, 256, 320]
    assert [event.value for event in losses][:4] == [
        4.0,
        3.0,
        2.0,
        1.5,
    ]  # the last mean changed before it was written
    assert math.isnan(losses[4].value)
    assert losses[0].wall_time == pytest.approx(1767323045.0 + 1.0)
    assert [event.value for event in events.Scalars("accuracy")] == [0.5]
    assert [event.value for event in events.Scalars("accuracy/worker 1")] == [0.25]
    assert [(each.step, each.value) for each in events.Scalars("samples per second")] == [
        (256, 64.0),
        (512, 128.0),
    ]
    assert [each.value for each in events.Scalars("updates per second")] == [1.0, 2.0]

    first, second = events.Histograms("staleness (updates)")
    assert (first.step, first.histogram_value.num) == (256, 4)
    limits, counts = first.histogram_value.bucket_limit, first.histogram_value.bucket
    assert [(limit, n) for limit, n in zip(limits, counts, strict=True) if n] == [
        (0.5, 1),
        (3.5, 2),
        (1000.5, 1),
    ]
    assert (second.step, second.histogram_value.num) == (512, 4)  # only what has been added
    [waiting] = events.Histograms("waiting (seconds)")
    assert (waiting.histogram_value.max, waiting.histogram_value.num) == (0.512, 4)
    assert waiting.histogram_value.sum == pytest.approx(0.128 + 3 * 0.384)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_counts_updates_where_the_samples_are_unknown(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metric = Metric("loss", "mean", (MetricPoint(1.0, 0, 7, 0.5),))
    files = TensorboardFiles(tmp_path)
    files.write(structs.replace(LATER, begun_at="", progress=((1.0, 0, 7), (2.0, 0, 9)), metrics=(metric,)))
    files.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [7]
    # a resumed run begins with the updates that were made before
    assert [(event.step, event.value) for event in events.Scalars("updates per second")] == [(9, 2.0)]
    assert "samples per second" not in events.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore")
def test_the_last_report_is_written_at_the_end(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async def show() -> None:
        reports = iter([REPORT, LATER])
        live = LiveReport(lambda now_s: next(reports), lambda: None)
        over = asyncio.Event()
        task = asyncio.create_task(write_until(over, live, tmp_path))
        while not any(file.stat().st_size > 500 for file in tmp_path.iterdir()):
            await asyncio.sleep(0.01)
        await live.end()
        over.set()
        await task

    asyncio.run(show())
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [64, 128, 192, 256, 320]


# -- OpenMetrics ------------------------------------------------------------------------------------------------


def metrics_of(
    report: RunReport, accept: str = "application/openmetrics-text", path: str = "/metrics"
) -> HttpResponse:
    page = MetricsPage(LiveReport(lambda now_s: report, lambda: report.live))
    return asyncio.run(page.reply(Request("GET", path, "", {"accept": accept})))


@pytest.mark.parametrize(
    ("accept", "parse"), [("application/openmetrics-text", parse_openmetrics), ("", parse_prometheus)]
)
def test_the_parsers_read_the_metrics(accept: str, parse: object) -> None:
    answer = metrics_of(REPORT, accept)
    assert answer.headers["Content-Type"].startswith(accept or "text/plain")
    families = list(parse(answer.body.decode()))  # type: ignore[operator]
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["paceline_samples_total",] == 256
    assert values["paceline_updates_total",] == 4
    assert values["paceline_run_seconds",] == 8.0
    assert values["paceline_progress_ratio",] == 0.25
    assert values["paceline_samples_per_second",] == 64.0
    assert ("paceline_left_seconds",) not in values  # it is unknown
    assert values["paceline_worker_iterations_total", ("worker", "0")] == 3
    assert values["paceline_worker_samples_total", ("worker", "1")] == 64
    assert values["paceline_worker_seconds_total", ("use", "waiting"), ("worker", "0")] == 1.5
    assert values["paceline_awaited_seconds_total", ("worker", "1")] == 1.5
    waits = {key: value for key, value in values.items() if key[0] == "paceline_waiting_for_seconds"}
    assert waits == {
        ("paceline_waiting_for_seconds", ("awaited", "1"), ("worker", "0")): pytest.approx(0.5 + 0.1)
    }
    assert values["paceline_logged", ("name", "loss")] == 1.0
    assert values["paceline_workers", ("state", "computing")] == 2
    assert values["paceline_link_bytes_total", ("receiver", 'b "quoted"\n'), ("sender", "a")] == 4096
    assert values["paceline_staleness_updates_bucket", ("le", "2.0")] == 1
    assert values["paceline_staleness_updates_bucket", ("le", "3.0")] == 3
    assert values["paceline_staleness_updates_bucket", ("le", "+Inf")] == 4
    assert values["paceline_staleness_updates_sum",] == 1006
    assert values["paceline_wait_seconds_count",] == 4
    assert values["paceline_wait_seconds_bucket", ("le", "0.256")] == 1
    assert values["paceline_wait_seconds_sum",] == 1.75
    [info] = [key for key in values if key[0] == "paceline_run_info"]
    assert ("name", "run <b>") in info
    assert ("sync", "asp") in info


def test_a_run_of_which_nothing_is_known_yet_has_metrics() -> None:
    families = list(
        parse_openmetrics(metrics_of(RunReport(name="", run_dir="", state="running")).body.decode())
    )
    assert "paceline_samples" in {family.name for family in families}


def test_values_that_are_no_numbers_can_be_read() -> None:
    report = structs.replace(
        REPORT, metrics=(loss(math.nan), structs.replace(loss(math.inf), name='norm\\ "x"'))
    )
    values = {
        sample.labels["name"]: sample.value
        for family in parse_openmetrics(metrics_of(report).body.decode())
        for sample in family.samples
        if sample.name == "paceline_logged"
    }
    assert math.isnan(values["loss"])
    assert values['norm\\ "x"'] == math.inf


def test_a_counter_never_falls() -> None:
    loading = structs.replace(REPORT.workers[0], time_s={"computing": 1.0, "loading": 2.0})
    reports = [REPORT, structs.replace(REPORT, workers=(loading, *REPORT.workers[1:]))]
    before = REPORT.workers[0].time_s["computing"]
    assert before > 1.0

    async def computing_s(page: MetricsPage) -> float:
        answer = await page.reply(Request("GET", "/metrics", "", {"accept": "application/openmetrics-text"}))
        [value] = [
            sample.value
            for family in parse_openmetrics(answer.body.decode())
            for sample in family.samples
            if sample.name == "paceline_worker_seconds_total"
            and sample.labels == {"worker": "0", "use": "computing"}
        ]
        return float(value)

    async def both() -> list[float]:
        live = LiveReport(lambda now_s: reports.pop(0), lambda: None)
        page = MetricsPage(live)
        first = await computing_s(page)
        await live.end()
        return [first, await computing_s(page)]

    assert asyncio.run(both()) == [before, before]


def test_there_is_nothing_else() -> None:
    assert metrics_of(REPORT, path="/data").status == 404


# -- the report -------------------------------------------------------------------------------------------------


def test_a_report_is_made_when_somebody_asks_and_then_kept_for_a_while() -> None:
    made = 0

    def read(now_s: float | None) -> RunReport:
        nonlocal made
        made += 1
        return structs.replace(REPORT, name=str(made))

    async def show() -> None:
        live = LiveReport(read, lambda: STATUS)
        assert made == 0
        reports = await asyncio.gather(*(live.get() for _ in range(20)))
        assert {report.name for report in reports} == {"1"}
        assert (reports[0].live, reports[0].now_s) == (STATUS, 8.0)
        await live.end()
        last = await live.get()
        assert (last.name, made) == ("2", 2)

    asyncio.run(show())
