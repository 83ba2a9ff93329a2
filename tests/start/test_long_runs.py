"""What a run of any length needs at its end: memory that does not grow with the number of its iterations."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from paceline.run.coordinator import CoordinatorHost
from paceline.run.job_options import make_job
from paceline.sim import Cluster, Dataset, Presence, simulate
from paceline.start.results import summarize
from paceline.trace.recording import record_files, records_in, trace_files

T = TypeVar("T")

SHARDS = 2
SLACK_BYTES = 50_000  # what the allocator and dictionaries of a bounded size may differ by


def write_run(run_dir: Path, iterations: int, sync: str) -> None:
    """Write the files of a run with about this number of iterations per worker: 0.6 MB per 1000 of its updates."""
    cluster = Cluster(
        compute_s=[0.9, 1.0, 1.1, 3.0],
        servers=SHARDS,
        latency_s=0.001,
        presence={2: Presence(lost_at_s=20.0, back_after_s=5.0)},
    )
    data = Dataset(samples=8 * 3 * iterations, batch_size=8, split="dynamic")
    simulate(cluster, sync, data=data, run_dir=run_dir)


def traced(function: Callable[[], T]) -> tuple[T, int]:
    """What a function returns, and the most memory in bytes that Python objects occupied during the call."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = function()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@contextmanager
def ended_run(run_dir: Path, sync: str) -> Iterator[CoordinatorHost]:
    """The coordinator of a run whose files are in this directory."""
    job = make_job(workers=4, servers=SHARDS, sync=sync, run_dir=run_dir.parent / "job")
    coordinator = CoordinatorHost.listen(job)
    for file in run_dir.iterdir():  # only now, because a coordinator begins its own trace
        file.rename(Path(job.run_dir, file.name))
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("sync", ["asp", "elastic-bsp:lookahead=5"])
def test_the_memory_for_the_summary_does_not_grow_with_the_run(sync: str, tmp_path: Path) -> None:
    peaks = []
    for iterations in (50, 400, 1600):  # the first one imports what is imported late
        write_run(tmp_path / f"{iterations}" / "run", iterations, sync)
        with ended_run(tmp_path / f"{iterations}" / "run", sync) as coordinator:
            summarized = partial(summarize, coordinator, [], [], Path("weights.safetensors"), "finished")
            summary, peak = traced(summarized)
        peaks.append(peak)
        assert summary["faults"] == []
        assert summary["samples"] == 8 * 3 * iterations
    assert peaks[2] < peaks[1] + SLACK_BYTES, peaks


def test_traces_and_records_are_read_one_entry_at_a_time(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 400, "asp")
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "run").iterdir())

    def read() -> None:
        for trace in trace_files(tmp_path / "run"):
            assert sum(1 for _ in trace.entries) > 0
        for path in record_files(tmp_path / "run"):
            assert sum(1 for _ in records_in(path)) > 0

    assert traced(read)[1] < size_bytes / 10


def test_a_second_signal_skips_the_statistics(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 400, "asp")
    looks = iter([False, True])
    with ended_run(tmp_path / "run", "asp") as coordinator:
        weights = Path("weights.safetensors")
        summary = summarize(coordinator, [], [], weights, "interrupted", hurried=lambda: next(looks))
    assert "duration_s" not in summary
    assert summary["faults"] == [
        "the summary has no statistics, because a second signal has asked the run to end immediately"
    ]
