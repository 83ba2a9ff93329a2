"""Files that grow with a run are written in segments, digested and trimmed, and read back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.core.layout import round_robin
from paceline.core.messages import TracePart
from paceline.core.shard import Shard
from paceline.errors import ConfigurationError
from paceline.look.run_reading import ReportReader
from paceline.run.job import Job
from paceline.run.job_options import make_job
from paceline.run.traces import PART_BYTES, SegmentedFile, Segmenting, TraceFiles, parts_of, segmenting
from paceline.sim import Cluster, Presence, simulate
from paceline.sync import ASP
from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
from paceline.sync.ticks import in_ticks
from paceline.trace import Header, Recorder, Replay, Trace, read, read_run, replay
from paceline.trace.digest import Digest, trim
from paceline.trace.keyframes import keyframe_of
from paceline.trace.measures import Measures, measure
from paceline.trace.recording import (
    FileFollower,
    FilePosition,
    IterationRecord,
    KeptTraces,
    earlier_path,
    earlier_segments,
    held_files,
    last_line,
    read_records,
    record_files,
)

SYNCS = ["asp", "bsp", "elastic-bsp:lookahead=4", "bsp@0,elastic-bsp:lookahead=3@9,asp@30"]


def fail(text: str) -> None:
    raise AssertionError(text)


# -- writing ------------------------------------------------------------------------------------------------


def test_a_full_segment_is_moved_and_another_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    file = SegmentedFile(path, fail, Segmenting(10, None))
    begun = []
    for line in (b"one\n", b"two\n", b"three\n", b"four\n", b"five and six\n", b"seven\n"):
        file.write(line)
        begun.append(file.tend())
    assert begun == [False, False, True, False, True, False]
    file.close()
    assert [path.read_bytes() for path in earlier_segments(path).values()] == [
        b"one\ntwo\nthree\n",
        b"four\nfive and six\n",
    ]
    assert path.read_bytes() == b"seven\n"
    again = SegmentedFile(path, fail, Segmenting(10, None), append=True)
    again.write(b"eight\n")
    assert again.tend()
    again.close()
    assert list(earlier_segments(path)) == [0, 1, 2]
    assert held_files(tmp_path, "worker-*") == [path]


def test_a_file_that_is_kept_whole_is_only_flushed(tmp_path: Path) -> None:
    file = SegmentedFile(tmp_path / "file", fail, None)
    file.write(b"x" * 100)
    assert (tmp_path / "file").read_bytes() == b""
    assert not file.tend()
    assert (tmp_path / "file").read_bytes() == b"x" * 100
    file.close()


def test_on_another_machine_the_writer_deletes_the_oldest_segments(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    file = SegmentedFile(path, fail, Segmenting(1, 2))
    for number in range(7):
        file.write(b"%d\n" % number)
        assert file.tend()
    file.close()
    assert list(earlier_segments(path)) == [5, 6]
    follower = FileFollower(path, headed=False)
    assert list(follower.lines()) == [b"5\n", b"6\n"]
    assert follower.skipped


def test_a_segment_that_cannot_be_begun_leaves_the_run_going(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "earlier").write_text("a file where the folder should be")
    file = SegmentedFile(tmp_path / "worker-0.jsonl", said.append, Segmenting(1, None))
    file.write(b"one\n")
    assert not file.tend()
    file.write(b"two\n")
    assert not file.tend()
    file.close()
    assert said == [
        "worker-0.jsonl cannot be written and is incomplete: File exists. The run continues without this file."
    ]
    assert (tmp_path / "worker-0.jsonl").read_bytes() == b"one\n"


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (4, 1), (4, 4), (64, 1), (64, 16)])
def test_all_files_of_a_run_share_what_the_user_grants(workers: int, shards: int) -> None:
    job = msgspec.structs.replace(
        make_job(workers=4, servers=1, dry_run=True), workers=workers, shards=shards, servers=shards
    )

    def held(kind: str) -> int:
        found = segmenting(job, kind)  # type: ignore[arg-type]
        assert found is not None
        assert found.kept is None
        return 4 * found.size_bytes

    assert (
        shards * held("shard") + workers * held("worker") + held("coordinator") < 1.2 * job.traces.size_bytes
    )
    away = segmenting(job, "worker", machine=2)
    assert away is not None
    assert away.kept == 3
    assert segmenting(msgspec.structs.replace(job, traces=KeptTraces("full")), "shard") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "unknown traces 'some'"),
        ("recent:", "traces is 'recent:', expected a number of megabytes only for recent traces"),
        ("recent:0", "traces is 'recent:0'"),
        ("recent:1.5", "traces is 'recent:1.5'"),
        ("full:3", "traces is 'full:3'"),
    ],
)
def test_other_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_job(workers=1, servers=1, traces=text, dry_run=True)


def test_the_size_of_recent_traces_can_be_given() -> None:
    def of(traces: str) -> Job:
        return make_job(workers=1, servers=1, traces=traces, dry_run=True)

    assert (of("recent").traces.kept, of("recent").traces.size_bytes) == ("recent", 100_000_000)
    assert (of("recent:7").traces.kept, of("recent:7").traces.size_bytes) == ("recent", 7_000_000)
    assert [str(of(text).traces) for text in ("recent", "recent:7", "full")] == [
        "recent",
        "recent:7",
        "full",
    ]


# -- reading ------------------------------------------------------------------------------------------------


def written(path: Path, lines: list[bytes], moves: set[int]) -> Iterator[None]:
    """Write lines, and move the file as a run does after some of them. Yield after each step."""
    number = 0
    path.touch()
    for index, line in enumerate(lines):
        with path.open("ab") as file:
            file.write(line)
        yield
        if index in moves:
            earlier_path(path, number).parent.mkdir(exist_ok=True)
            path.rename(earlier_path(path, number))
            number += 1
            yield
            path.touch()
            yield


@settings(max_examples=60)
@given(moves=st.sets(st.integers(0, 19)), looks=st.lists(st.booleans(), min_size=80, max_size=80))
def test_a_reader_sees_every_line_once_while_the_file_is_written(
    moves: set[int], looks: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "worker-0.jsonl"
    lines = [b"%d\n" % number for number in range(20)]
    follower = FileFollower(path, headed=False)
    found: list[bytes] = []
    halfway: Iterator[bytes] = iter(())
    for _, look in zip(written(path, lines, moves), looks, strict=False):
        if look:
            halfway = halfway or follower.lines()
            if (line := next(halfway, None)) is None:
                halfway = follower.lines()
            else:
                found.append(line)
    found += halfway
    found += follower.lines()
    assert found == lines
    assert not follower.skipped
    assert list(FileFollower(path, headed=False, position=follower.position).lines()) == []


def test_an_incomplete_last_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    path.write_bytes(b"one\ntw")
    follower = FileFollower(path, headed=False)
    assert list(follower.lines()) == [b"one\n"]
    assert follower.position == FilePosition(0, 4)
    path.write_bytes(b"one\ntwo\n")
    assert list(follower.lines()) == [b"two\n"]


@pytest.mark.parametrize("before", [b"", b"one\n", b"1\n" * 20_000])
@pytest.mark.parametrize("line", [b"2", b"two" * 10_000])
def test_the_last_line_of_a_segment_is_found_from_its_end(before: bytes, line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "worker-0.000000.jsonl"
    path.write_bytes(before + line + b"\n")
    assert last_line(path) == line


def test_segments_before_a_gap_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    for _ in written(path, [b"%d\n" % number for number in range(6)], {0, 1, 2, 3}):
        pass
    earlier_path(path, 1).unlink()
    assert list(FileFollower(path, headed=False).lines()) == [b"2\n", b"3\n", b"4\n", b"5\n"]


# -- a run that is cut, and digested in pieces --------------------------------------------------------------


@cache
def made(sync: str, tmp: Path) -> tuple[list[Trace], list[list[IterationRecord]]]:
    """The traces and records of a simulated run with a worker that is lost and comes back."""
    cluster = Cluster(
        compute_s=[0.9, 1.0, 1.1, 3.0],
        servers=2,
        latency_s=0.001,
        presence={1: Presence(lost_at_s=9.0, back_after_s=5.0)},
    )
    result = simulate(cluster, sync, 60, record=True)
    return result.trace, list(result.records)


class CutRun:
    """Writes a run in segments of random sizes, in the order of time."""

    def __init__(self, run_dir: Path, sync: str, draw: random.Random) -> None:
        self.traces, self.records = made(sync, Path())
        self.draw = draw
        self.files: list[SegmentedFile] = []
        self.steps: list[tuple[float, int, object]] = []
        self.recorders: dict[int, tuple[Recorder, Replay]] = {}
        for trace in self.traces:
            name = "coordinator" if trace.header.host == "coordinator" else f"shard-{trace.header.index}"
            file = SegmentedFile(
                run_dir / f"trace-{name}.jsonl", fail, Segmenting(draw.randrange(200, 9000), None)
            )
            self.recorders[len(self.files)] = Recorder(file, trace.header), Replay(trace.header)
            self.steps += [(trace.time_s(entry), len(self.files), entry) for entry in trace.entries]
            self.files.append(file)
        for worker, records in enumerate(self.records):
            file = SegmentedFile(
                run_dir / f"worker-{worker}.jsonl", fail, Segmenting(draw.randrange(200, 4000), None)
            )
            self.steps += [(record.answered_s, len(self.files), record) for record in records]
            self.files.append(file)
        self.steps.sort(key=lambda step: (step[0], step[1] != len(self.traces) - 1))

    def write(self) -> Iterator[None]:
        """Write the run, and yield now and then."""
        for _, index, what in self.steps:
            if index in self.recorders:
                recorder, host = self.recorders[index]
                recorder.record(what)  # type: ignore[arg-type]
                host.take(what.event)  # type: ignore[attr-defined]
            else:
                self.files[index].write(msgspec.json.encode(what) + b"\n")
            if self.draw.random() < 0.2 and self.files[index].tend() and index in self.recorders:
                recorder.begin_segment(keyframe_of(host.core))
            if self.draw.random() < 0.02:
                for file in self.files:
                    file.flush()
                yield
        for file in self.files:
            file.close()


def measured(traces: list[Trace]) -> Measures:
    *shards, coordinator = traces
    return measure(shards, coordinator)


@settings(max_examples=4)
@given(sync=st.sampled_from(SYNCS), seed=st.integers(0, 2**30), kept=st.integers(1, 3))
def test_statistics_of_a_cut_run_are_those_of_the_whole_one(
    sync: str, seed: int, kept: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    draw = random.Random(seed)
    run = CutRun(run_dir, sync, draw)
    digest = None
    for _ in run.write():
        if digest is None or draw.random() < 0.2:  # the digesting process is started again
            digest = Digest(run_dir)
        trim(digest, kept, settled_s=-1.0)
        for path in [*held_files(run_dir, "trace-*"), *record_files(run_dir)]:
            assert len(earlier_segments(path)) <= kept + 1
    for only_statistics in (False, True):
        last = Digest(run_dir, only_statistics=only_statistics)
        assert last.left_out == []
        last.advance()
        assert last.meter.measures() == measured(run.traces)
        assert last.meter.staleness == last.meter.state.staleness
    whole = Digest(_whole(run, tmp_path_factory.mktemp("whole")))
    whole.advance()
    digested = _advanced(run_dir).activity.closed()
    for worker, own in whole.activity.closed().workers.items():
        cut = digested.workers[worker]
        assert cut.iterations == own.iterations
        assert cut.times_s == pytest.approx(own.times_s, abs=1e-6)
    for trace in read_run(run_dir):
        assert replay(trace) == []
        original = next(each for each in run.traces if _same(each, trace))
        assert trace.entries == original.entries[len(original.entries) - len(trace.entries) :]
    for held, records in zip(read_records(run_dir), run.records, strict=True):
        assert held == list(records)[len(records) - len(held) :]


def _same(one: Trace, other: Trace) -> bool:
    return (one.header.host, one.header.index) == (other.header.host, other.header.index)


def _advanced(run_dir: Path) -> Digest:
    digest = Digest(run_dir)
    digest.advance()
    return digest


def _whole(run: CutRun, run_dir: Path) -> Path:
    for trace in run.traces:
        name = "coordinator" if trace.header.host == "coordinator" else f"shard-{trace.header.index}"
        recorder = Recorder.to_path(run_dir / f"trace-{name}.jsonl", trace.header)
        for entry in trace.entries:
            recorder.record(entry)
        recorder.close()
    for worker, records in enumerate(run.records):
        lines = [msgspec.json.encode(record) + b"\n" for record in records]
        (run_dir / f"worker-{worker}.jsonl").write_bytes(b"".join(lines))
    return run_dir


def cut_run(run_dir: Path, sync: str = "asp") -> CutRun:
    run_dir.mkdir(exist_ok=True)
    run = CutRun(run_dir, sync, random.Random(1))
    for _ in run.write():
        trim(Digest(run_dir), 1, settled_s=-1.0)
    return run


def test_a_long_run_stays_within_its_bytes(tmp_path: Path) -> None:
    """The hosts' part of a run of 24,000 iterations that may take 2 MB: with everything, it would take 14 MB."""
    workers, iterations = 4, 6_000
    job = make_job(workers=workers, servers=1, traces="recent:2", dry_run=True)
    file = SegmentedFile(tmp_path / "trace-shard-0.jsonl", fail, segmenting(job, "shard"))
    recorder = Recorder(file, Header(sync="asp", host="shard", hyperparameters="translated"))
    shard = Shard(0, [ASP()], recorder=recorder, translated=True)
    logs = [
        SegmentedFile(tmp_path / f"worker-{worker}.jsonl", fail, segmenting(job, "worker"))
        for worker in range(workers)
    ]
    for worker in range(workers):
        shard.handle(WorkerJoined(now_ticks=0, worker=worker))
    sizes, states = [], []
    digest = None
    for iteration in range(iterations):
        now_s = iteration / 500
        for worker, log in enumerate(logs):
            now_ticks = in_ticks(now_s) + worker
            shard.handle(PushReceived(now_ticks=now_ticks, worker=worker, iteration=iteration, samples=8))
            shard.handle(PullRequested(now_ticks=now_ticks, worker=worker, iteration=iteration))
            record = IterationRecord(iteration, now_s, now_s, now_s + 0.0005, now_s + 0.001, 1.0, None)
            log.write(msgspec.json.encode(record) + b"\n")
        if iteration % 100 == 0:
            if file.tend():
                recorder.begin_segment(keyframe_of(shard))
            for log in logs:
                log.tend()
        if iteration % 500 == 499:
            digest = digest or Digest(tmp_path)
            trim(digest, settled_s=-1.0)
            state = tmp_path / "earlier" / "digest.msgpack"
            states.append(state.stat().st_size if state.exists() else 0)
            paths = [*tmp_path.glob("*.jsonl"), *(tmp_path / "earlier").glob("*.jsonl")]
            sizes.append(sum(path.stat().st_size for path in paths))
    for each in (file, *logs):
        each.close()
    assert max(sizes) < 1.5 * job.traces.size_bytes
    assert sizes[-1] > 0.5 * job.traces.size_bytes
    assert 0 < states[-1] < 2**20
    measures = _advanced(tmp_path).meter.measures()
    assert measures.gradients == workers * iterations
    assert measures.samples == 8 * workers * iterations
    assert measures.iterations == dict.fromkeys(range(workers), iterations)


def test_what_is_kept_describes_the_machines(tmp_path: Path) -> None:
    cut_run(tmp_path / "run")
    assert not read_run(tmp_path / "run")[0].header.is_whole
    cluster = Cluster.from_run(tmp_path / "run")
    assert cluster.name == "run (its last iterations)"
    assert cluster.compute(3).typical_s == pytest.approx(3.0)


def test_a_cut_trace_alone_has_no_statistics(tmp_path: Path) -> None:
    cut_run(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="the beginning of the trace of shard 0 was deleted"):
        measured(read_run(tmp_path / "run"))
    (tmp_path / "run" / "earlier" / "digest.msgpack").unlink()
    with pytest.raises(ConfigurationError, match="has only the end of the trace of shard 0"):
        Digest(tmp_path / "run")


def test_a_digest_that_is_damaged_is_named(tmp_path: Path) -> None:
    cut_run(tmp_path / "run")
    (tmp_path / "run" / "earlier" / "digest.msgpack").write_bytes(b"no digest")
    with pytest.raises(ConfigurationError, match=r"digest\.msgpack is damaged"):
        Digest(tmp_path / "run")


def test_what_was_deleted_unread_is_not_passed_over(tmp_path: Path) -> None:
    cut_run(tmp_path / "run")
    path = tmp_path / "run" / "trace-shard-1.jsonl"
    shutil.move(path, earlier_path(path, max(earlier_segments(path)) + 1))
    for number in list(earlier_segments(path))[:-1]:
        earlier_path(path, number).unlink()
    path.touch()
    with pytest.raises(
        ConfigurationError, match=r"a part of .*trace-shard-1\.jsonl was deleted before it was read"
    ):
        Digest(tmp_path / "run").advance()


def test_a_report_that_is_overtaken_by_the_digest_goes_on_from_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = CutRun(tmp_path / "run", "asp", random.Random(2))
    writing = run.write()
    next(writing)
    assert not (tmp_path / "run" / "earlier" / "digest.msgpack").exists()
    reader = ReportReader(tmp_path / "run", in_progress=lambda run_dir: True)
    reader.read()
    for _ in writing:
        trim(Digest(tmp_path / "run"), 1, settled_s=-1.0)
    report = reader.read()
    assert {each.worker: each.iterations for each in report.workers} == measured(run.traces).iterations
    assert not [note for note in report.notes if "deleted" in note or "damaged" in note]


def test_a_killed_digest_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If segments are digested and cannot be deleted any more, they are not counted twice."""
    run = cut_run(tmp_path / "run")
    digest = _advanced(tmp_path / "run")
    digest.save()
    assert _advanced(tmp_path / "run").meter.measures() == measured(run.traces)


def test_a_trace_in_segments_is_sent_as_one(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    (tmp_path / "copy").mkdir()
    traces = TraceFiles(tmp_path / "copy", round_robin(shards=8, servers=2), failed=fail)
    for part, last in parts_of(tmp_path / "run" / "trace-shard-1.jsonl"):
        assert len(part) <= PART_BYTES
        message = TracePart(1, last)
        for memory in traces.targets(message, 1, len(part)):
            memory[:] = part
        traces.arrived(message)
    traces.close()
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["trace-shard-1.jsonl"]
    trace = read(tmp_path / "copy" / "trace-shard-1.jsonl")
    assert replay(trace) == []
    assert trace.entries == run.traces[1].entries[-len(trace.entries) :]


def test_shards_that_have_deleted_their_own_beginning_are_left_out(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    whole = _whole(run, tmp_path)
    cut = next(iter(earlier_segments(tmp_path / "run" / "trace-shard-1.jsonl").values()))
    shutil.copy(cut, whole / "trace-shard-1.jsonl")
    digest = _advanced(whole)
    assert (digest.shards, digest.left_out) == ([0], [1])
    assert digest.meter.measures().updates == measured(run.traces).updates


# -- live runs ----------------------------------------------------------------------------------------------


def train(steps: int, pause_s: float) -> None:
    import time

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(paceline.worker_index())
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
        time.sleep(pause_s)


@pytest.mark.thorough
def test_a_run_that_exceeds_its_bytes_keeps_its_statistics(tmp_path: Path) -> None:
    run = paceline.launch(
        train,
        args=(900, 0.01),
        workers=2,
        servers=1,
        sync="asp",
        traces="recent:1",
        run_dir=tmp_path / "run",
        progress=False,
    )
    trace = run.trace[0]
    assert not trace.header.is_whole
    assert replay(trace) == []
    assert run.summary["gradients"] == 1800
    assert run.summary["iterations"] == {"0": 900, "1": 900}
    assert not [fault for fault in run.summary["faults"] if "statistics" in fault or "oldest" in fault]


def test_a_run_without_traces_says_what_it_does_not_know(tmp_path: Path) -> None:
    run = paceline.launch(
        train,
        args=(5, 0.0),
        workers=2,
        servers=1,
        sync="asp",
        traces="off",
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert run.trace == []
    assert not [*run.run_dir.glob("trace-*"), *run.run_dir.glob("worker-*.jsonl")]
    assert "gradients" not in run.summary
    assert [fault for fault in run.summary["faults"] if "statistics" in fault] == [
        "the summary has no statistics, such as updates, gradients, staleness and waiting, because the run made no "
        "traces (--traces off)"
    ]
    with pytest.raises(ConfigurationError, match="made no traces"):
        Cluster.from_run(run.run_dir)
