"""The report of a run is read from its directory, whatever the run was, and whatever is left of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline import simulate
from paceline.errors import ConfigurationError
from paceline.look.page import page_of
from paceline.look.run_reading import ReportReader, marks_of, read_report
from paceline.sim import Cluster, Presence, SimResult
from paceline.sync.events import WorkerFinished, WorkerJoined, WorkerLost
from paceline.sync.ticks import in_ticks
from paceline.trace import Entry
from paceline.trace.activity import Activity
from paceline.trace.activity_cells import KINDS
from paceline.trace.digest import Digest
from paceline.trace.report import ReportedSetting, RunFile, RunReport, write_run_file

MARKUP = "<img src=x onerror=alert(1)>"
DESCRIBED = RunFile(
    version="1.0",
    begun_at="2026-01-01T12:00:00+00:00",
    command="paceline run train.py",
    folder="/home",
    settings=(ReportedSetting("--sync", "bsp", True), ReportedSetting("--batch", "equal", True)),
    sync="bsp",
    workers=4,
    servers=2,
    shards=2,
)

Run = tuple[Path, SimResult]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("simulated") / MARKUP
    cluster = Cluster(
        compute_s=[1.0, 1.0, 1.0, 3.0],
        servers=2,
        latency_s=0.01,
        presence={1: Presence(lost_at_s=40.0), 2: Presence(joins_at_s=10.0)},
    )
    result = simulate(cluster, "bsp@0,asp@15", iterations=30, record=True)
    return result.save(folder), result


@pytest.fixture
def run(original: Run, tmp_path: Path) -> Run:
    """A copy, which a test may damage."""
    shutil.copytree(original[0], tmp_path / MARKUP)
    return tmp_path / MARKUP, original[1]


def require_shown(report: RunReport) -> None:
    """Check that the report can be sent and shown."""
    assert json.loads(msgspec.json.encode(report))["name"] == report.name
    page = page_of([report])
    assert MARKUP not in page
    assert report.headline


def test_the_report_of_a_simulation_agrees_with_its_statistics(run: Run) -> None:
    folder, result = run
    report = read_report(folder)
    require_shown(report)
    assert (report.name, report.state, report.duration_s) == (MARKUP, "finished", result.measures.duration_s)
    assert [each.iterations for each in report.workers] == list(result.measures.iterations.values())
    for each in report.workers:
        use = result.time_use[each.worker]
        assert each.time_s == {kind: getattr(use, f"{kind}_s") for kind in KINDS}
    assert [model.sync for model in report.models] == ["bsp", "asp"]
    assert sum(model.updates for model in report.models) == result.updates
    staleness: dict[int, int] = {}
    for model in report.models:
        for updates, count in model.staleness:
            staleness[updates] = staleness.get(updates, 0) + count
    assert staleness == result.staleness
    assert report.pushes == msgspec.to_builtins(result.measures.pushes)
    assert [mark.kind for mark in report.marks if mark.kind != "finished"] == ["joined", "lost", "model"]
    assert report.workers[1].fate == "lost"
    assert report.causes[0].words.startswith("Workers 0 to 2 waited ")
    assert "for worker 3, whose batches take 3 times as long" in report.causes[0].words
    assert report.progress[-1][2] == result.updates
    assert report.timeline is not None
    assert report.timeline.workers == (0, 1, 2, 3)
    assert sum(len(spans.begun) for spans in report.timeline.spans) == sum(
        result.measures.iterations.values()
    )


def test_a_run_without_a_summary_was_cut_off_unless_it_is_in_progress(run: Run) -> None:
    folder, _ = run
    whole = read_report(folder)
    (folder / "summary.json").unlink()
    write_run_file(DESCRIBED, folder)
    report = read_report(folder)
    require_shown(report)
    assert report.state == "cut off"
    assert report.headline.startswith("The run was cut off after ")
    assert report.command == "paceline run train.py"
    assert report.settings == DESCRIBED.settings
    assert [each.iterations for each in report.workers] == [each.iterations for each in whole.workers]
    assert report.figures["duration"] == whole.figures["duration"]
    assert report.pushes == whole.pushes
    for each, known in zip(report.workers, whole.workers, strict=True):
        assert each.time_s["waiting"] == pytest.approx(known.time_s["waiting"], abs=0.1)
    assert "for worker 3, whose batches take 3 times as long" in report.causes[0].words
    assert any("its launcher was killed" in note or "was killed" in note for note in report.notes)
    assert read_report(folder, in_progress=lambda run_dir: True).state == "running"


def test_a_failed_run_says_why(run: Run) -> None:
    folder, _ = run
    summary = json.loads((folder / "summary.json").read_text())
    failed = {**summary, "ended": "failed", "failure": f"worker 1 failed: {MARKUP}"}
    (folder / "summary.json").write_text(json.dumps(failed))
    report = read_report(folder)
    require_shown(report)
    assert report.headline.startswith("The run failed after ")
    assert f"worker 1 failed: {MARKUP}." in report.headline


def remove(pattern: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return act


def write(name: str, content: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).write_text(content)

    return act


def spoil(name: str, part: float, junk: bytes) -> Callable[[Path], None]:
    """Return a function that replaces the end of a file by junk."""

    def act(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * part)] + junk)

    return act


def pipe(name: str) -> Callable[[Path], None]:
    """Return a function that puts a pipe in the place of a file. A reader that opened it would wait for ever."""

    def act(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return act


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (remove("trace-*.jsonl"), "There are no traces of the shards"),
        (remove("trace-shard-1.jsonl"), "The run directory contains only 1 of 2 traces of shards"),
        (remove("trace-coordinator.jsonl"), ""),
        (remove("worker-*.jsonl"), "There are no records of workers 0 to 3"),
        (remove("worker-2.jsonl"), "There are no records of worker 2"),
        (spoil("trace-shard-0.jsonl", 0.5, b""), ""),
        (spoil("trace-shard-0.jsonl", 0.5, b"\n{]\n"), "trace-shard-0.jsonl"),
        (spoil("trace-shard-1.jsonl", 0.5, b"\n\xff\xfe\n"), "trace-shard-1.jsonl"),
        (spoil("worker-1.jsonl", 0.3, b"\nnull\n"), "worker-1.jsonl"),
        (spoil("worker-1.jsonl", 0.0, b""), ""),
        (spoil("trace-shard-0.jsonl", 0.0, b"\x00"), "trace"),
        (write("summary.json", "{"), "summary.json cannot be read"),
        (write("summary.json", "[]"), "summary.json cannot be read"),
        (write("summary.json", '{"ended": "finished"}'), ""),
        (write("run.json", '{"format": 1}'), "run.json cannot be read"),
        (write("clock-1.jsonl", "nonsense\n"), "clock-1.jsonl"),
        (write("metrics.jsonl", "nonsense\n"), "metrics.jsonl cannot be read"),
        (pipe("summary.json"), "summary.json cannot be read"),
        (pipe("run.json"), "run.json cannot be read"),
        (pipe("clock-1.jsonl"), "clock-1.jsonl"),
        (pipe("metrics.jsonl"), "metrics.jsonl cannot be read"),
        (pipe("running.json"), ""),
        (pipe("trace-shard-0.jsonl"), "trace-shard-0.jsonl"),
        (pipe("trace-coordinator.jsonl"), "trace-coordinator.jsonl"),
        (pipe("worker-1.jsonl"), "worker-1.jsonl"),
    ],
)
def test_what_is_missing_or_damaged_is_noted(damage: Callable[[Path], None], note: str, run: Run) -> None:
    damage(run[0])
    report = read_report(run[0])
    require_shown(report)
    assert any(note in each for each in report.notes), report.notes


def test_a_run_directory_can_be_read_while_it_grows(run: Run, tmp_path: Path) -> None:
    folder, _ = run
    whole = read_report(folder)
    files = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    grown = tmp_path / "grown" / MARKUP
    grown.mkdir(parents=True)
    write_run_file(DESCRIBED, grown)
    reader = ReportReader(grown, in_progress=lambda run_dir: True)
    assert reader.read().workers == ()
    for part in (0.2, 0.5, 0.9, 1.0):
        for name, data in files.items():
            (grown / name).write_bytes(data[: int(len(data) * part)])
        report = reader.read(now_s=1000.0)
        assert report.now_s == 1000.0
    shutil.copy(folder / "summary.json", grown)
    report = reader.read()
    assert report.state == "finished"
    assert report.workers == whole.workers
    assert report.models == whole.models
    assert report.causes == whole.causes


def test_a_trace_without_a_header_is_noted_only_until_its_header_is_written(run: Run) -> None:
    folder, _ = run
    whole = read_report(folder)
    trace = folder / "trace-shard-0.jsonl"
    data = trace.read_bytes()
    trace.write_bytes(b"")
    reader = ReportReader(folder)
    assert any("trace-shard-0.jsonl is not a Paceline trace" in note for note in reader.read().notes)
    trace.write_bytes(data)
    assert reader.read().notes == whole.notes


def test_traces_that_begin_later_are_read_too(run: Run) -> None:
    folder, _ = run
    whole = read_report(folder)
    trace = (folder / "trace-shard-1.jsonl").read_bytes()
    (folder / "trace-shard-1.jsonl").unlink()
    reader = ReportReader(folder)
    assert any("only 1 of 2" in note for note in reader.read().notes)
    (folder / "trace-shard-1.jsonl").write_bytes(trace)
    report = reader.read()
    assert report.notes == whole.notes
    assert report.models == whole.models


def test_an_index_that_was_used_again_shows_how_its_last_worker_has_left(run: Run) -> None:
    folder, _ = run
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    early = {"worker": 0, "incarnation": 0, "fate": "left", "cause": "it was asked to", "returned": True}
    path.write_text(json.dumps(summary | {"left": [0], "departures": [early]}))
    [worker] = [each for each in read_report(folder).workers if each.worker == 0]
    assert (worker.fate, worker.why) == ("finished", "")
    path.write_text(json.dumps(summary | {"left": [0], "departures": [early | {"returned": False}]}))
    [worker] = [each for each in read_report(folder).workers if each.worker == 0]
    assert (worker.fate, worker.why) == ("left", "it was asked to")


def test_the_marks_tell_a_worker_that_left_early_from_one_that_finished_later() -> None:
    activity = Activity(1)
    shard = activity.at_shard(0)
    for joined_s in (1, 5):
        shard.record(Entry(WorkerJoined(now_ticks=in_ticks(joined_s), worker=3, pulls=True), version=0))
        shard.record(Entry(WorkerFinished(now_ticks=in_ticks(joined_s + 1), worker=3), version=0))
    assert [mark.kind for mark in marks_of(activity, (), [3])] == ["joined", "left", "joined", "finished"]


def test_a_lost_worker_is_marked_with_its_own_cause_even_if_earlier_losses_are_unknown() -> None:
    activity = Activity(1)
    shard = activity.at_shard(0)
    for at_s in (1, 2):
        shard.record(Entry(WorkerLost(now_ticks=in_ticks(at_s), worker=3), version=0))
    departures = [{"worker": 3, "fate": "lost", "cause": cause} for cause in ("too early", "first", "second")]
    assert [mark.words for mark in marks_of(activity, departures, [])] == [
        "worker 3 was lost: first",
        "worker 3 was lost: second",
    ]


@pytest.mark.parametrize("name", ["worker-notes.jsonl", "worker-0-copy.jsonl"])
def test_a_file_of_the_script_is_not_taken_for_the_records_of_a_worker(name: str, run: Run) -> None:
    folder, _ = run
    before = read_report(folder)
    (folder / name).write_text("{}\n")
    assert read_report(folder) == before
    digest = Digest(folder, only_statistics=True)
    assert digest.advance()
    assert digest.meter.measures().updates == before.progress[-1][2]


def test_metrics_may_be_nan(run: Run) -> None:
    folder, _ = run
    lines: list[dict[str, Any]] = [
        {"name": MARKUP, "kind": "mean", "time_s": 1.0, "samples": 32, "updates": 1, "value": "NaN"},
        {"name": MARKUP, "kind": "mean", "time_s": 2.0, "samples": 64, "updates": 2, "value": "Infinity"},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = read_report(folder)
    require_shown(report)
    assert [str(point.value) for point in report.metrics[0].points] == ["nan", "inf"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "does not exist; give the directory of a run."),
        (lambda folder: folder.write_text(""), "is not a directory; give the directory of a run."),
        (lambda folder: folder.mkdir(), "is not the directory of a run"),
    ],
)
def test_a_directory_that_is_no_run_is_refused(
    make: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "none")
    with pytest.raises(ConfigurationError, match=words):
        read_report(tmp_path / "none")
