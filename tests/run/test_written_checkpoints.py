"""Who writes a checkpoint while training goes on: servers that see its files, and the coordinator for the others."""

from __future__ import annotations

import itertools
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer
from paceline.checkpoints import buckets, manifest, writing
from paceline.checkpoints.reading import Checkpoint, newest_whole
from paceline.checkpoints.writing import ShardWriter, is_draft, shard_content
from paceline.core.job_cut import JobCut
from paceline.core.layout import StateEntries
from paceline.core.messages import (
    CopiesReserved,
    CutCopied,
    CutPiece,
    CutWritten,
    KeepWorkerState,
    Message,
    ShardState,
    WriteCut,
)
from paceline.run import checkpointing as checkpoints
from paceline.run import checkpointing as shard_copies
from paceline.run.checkpointing import Checkpoints, Completion
from paceline.run.job_options import make_job
from tests.support.live import await_that, of_the_run
from tests.support.marks import thorough
from tests.support.sharded import Shards, model_of

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

LR, MOMENTUM = 0.01, 0.5
SIZE = 300_000  # so that a shard has several pieces


@pytest.fixture(autouse=True)
def scripts_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "STATES_S", 0.0)


def whole(run_dir: Path, least: int = 1) -> Checkpoint | None:
    """Return the newest whole checkpoint if its number is at least `least`."""
    found = newest_whole(of_the_run(run_dir / "checkpoints")).checkpoint
    return found if found is not None and int(found.path.name) >= least else None


def training(run_dir: Path, count: int = 1) -> None:
    """Train until the script has got as many checkpoints as it asks for, the first one in its third step."""
    model = nn.Linear(SIZE, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    wrapped = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer = DistributedOptimizer(wrapped, model=model)
    asked = 1
    for step in itertools.count():
        optimizer.zero_grad()
        model(torch.ones(1, SIZE, dtype=torch.float64)).backward()
        optimizer.step()
        if step == 2:
            paceline.checkpoint()
        if step > 2 and whole(run_dir, asked):
            if asked == count:
                return
            asked += 1
            paceline.checkpoint()


def expected(version: int) -> tuple[float, float]:
    """Return the weights and the momentum after a number of updates with gradients of 1."""
    weights = momentum = 0.0
    for _ in range(version):
        momentum = MOMENTUM * momentum + 1.0
        weights -= LR * momentum
    return weights, momentum


@pytest.mark.parametrize(
    ("seen", "transport"),
    [
        ([True, False], "shm"),
        ([False], "tcp"),
        *thorough(([True], "shm"), ([True], "tcp"), ([False], "shm"), ([True, False], "tcp")),
    ],
    ids=str,
)
def test_a_server_that_does_not_see_the_files_sends_its_copies(
    seen: Iterable[bool],
    transport: str,
    run_on_threads: RunOnThreads,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    answers = itertools.cycle(seen)
    monkeypatch.setattr(shard_copies, "is_draft", lambda path, token: next(answers))
    run_dir = tmp_path / "run-1"
    run_on_threads(lambda: training(run_dir), workers=1, servers=2, shards=3, transport=transport)
    checkpoint = whole(run_dir)
    assert checkpoint is not None
    [version] = set(checkpoint.manifest.versions)
    weights, momentum = expected(version)
    assert version >= 3
    torch.testing.assert_close(
        checkpoint.state_dict["weight"], torch.full((1, SIZE), weights, dtype=torch.float64)
    )
    torch.testing.assert_close(
        checkpoint.optimizers[0]["state"][0]["momentum_buffer"],
        torch.full((1, SIZE), momentum, dtype=torch.float64),
    )


def test_each_checkpoint_is_copied_to_the_bucket(run_on_threads: RunOnThreads, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket" / "run"
    run_dir = tmp_path / "run-1"
    (tmp_path / "bucket").mkdir()

    def train() -> None:
        (run_dir / "script.py").write_text("import paceline")
        training(run_dir)
        await_that(lambda: newest_whole(of_the_run(bucket)).checkpoint, "the copy is whole")

    run_on_threads(train, workers=1, servers=1, checkpoint_dir=f"file://{bucket}")
    [here, there] = [whole(run_dir), newest_whole(of_the_run(bucket)).checkpoint]
    assert here is not None
    assert there is not None
    assert here.manifest == there.manifest
    assert (
        there.path / "script.py"
    ).read_text() == "import paceline"  # needed to resume the run from the bucket


@pytest.mark.parametrize("reached", [False, *thorough(True)], ids=["unreachable", "reached"])
def test_a_bucket_that_cannot_be_written_costs_only_the_copy(
    reached: bool, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run-1"
    bucket = tmp_path / "bucket"

    def unreachable(url: str) -> Any:
        raise OSError("no route to host")

    def train() -> None:
        if reached:
            bucket.write_text("no directory")
        else:
            monkeypatch.setattr(buckets, "url_to_fs", unreachable)
        training(run_dir, 2)  # the second one begins when the first one has failed to be copied

    run = run_on_threads(train, workers=1, servers=1, checkpoint_dir=f"file://{bucket}/run")
    [fault] = run.faults
    assert f" cannot be copied to file://{bucket}/run: " in fault
    assert whole(run_dir) is not None


def test_a_directory_of_the_same_name_on_another_machine_is_not_the_draft(tmp_path: Path) -> None:
    assert not is_draft(tmp_path / "000001.partial", "token")
    (tmp_path / "draft.json").write_text('{"lineage": "paceline-0123456789abcdef", "token": "theirs"}')
    assert not is_draft(tmp_path, "ours")
    assert is_draft(tmp_path, "theirs")


@pytest.mark.parametrize(
    ("module", "fails"),
    [(writing, "lay_out"), *thorough((shard_copies, "available_bytes"), (shard_copies, "is_draft"))],
    ids=["files", "memory", "copies"],
)
def test_an_unexpected_error_costs_only_one_checkpoint(
    module: ModuleType,
    fails: str,
    run_on_threads: RunOnThreads,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    usual, calls = getattr(module, fails), itertools.count()

    def fails_once(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("not this time")
        return usual(*arguments)

    monkeypatch.setattr(module, fails, fails_once)
    run_dir = tmp_path / "run-1"
    run = run_on_threads(lambda: training(run_dir), workers=1, servers=1, checkpoint_every="0.2")
    [fault] = run.faults
    words = r"(No checkpoint was written|Checkpoint \d+ was not (written|completed))"
    assert re.fullmatch(rf"{words}: RuntimeError: not this time\.", fault)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs priorities of threads")
@pytest.mark.parametrize(("before", "after"), [(0, 10), (5, 15), (15, 19), (19, 19)])
def test_a_writer_always_yields_to_training_whatever_the_priority_of_its_process_is(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness = {threading.get_native_id(): before}

    def lower(which: int, thread: int, value: int) -> None:
        if value < niceness[thread]:
            raise PermissionError("only the administrator may raise a priority")
        niceness[thread] = value

    monkeypatch.setattr(os, "getpriority", lambda which, thread: niceness[thread])
    monkeypatch.setattr(os, "setpriority", lower)
    manifest.yield_to_training()
    assert [*niceness.values()] == [after]


def test_without_memory_for_a_copy_there_is_no_checkpoint_and_the_run_goes_on(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free_bytes = iter([1000])
    monkeypatch.setattr(shard_copies, "available_bytes", lambda: next(free_bytes, None))
    run_dir = tmp_path / "run-1"
    run = run_on_threads(lambda: training(run_dir), workers=1, servers=1, checkpoint_every="0.2")
    [fault] = run.faults
    # Before the first step, there is no state of the optimizer.
    why = r"a copy of shard 0 needs 0\.00(24|48) GB of memory, but only 1e-06 GB are available"
    assert re.fullmatch(rf"No checkpoint was written: {why}\.", fault)


# -- by hand --------------------------------------------------------------------------------------------------------


def small_shards() -> Shards:
    model = nn.Linear(100, 1)
    return Shards(model_of(model, [torch.optim.SGD(model.parameters(), lr=LR)]), 1, model)


def writer(
    run_dir: Path,
    call: Callable[[Callable[[], None]], None] = lambda function: None,
    tell: Callable[[int, Message], None] = lambda server, message: None,
) -> Checkpoints:
    job = make_job(workers=2, servers=1, run_dir=run_dir)
    return Checkpoints(job, tell, lambda: None, call, lambda words: None)


def cut_of(shards: Shards, number: int = 1) -> JobCut:
    slices, states = tuple(shards.slices), tuple(ShardState() for _ in shards.slices)
    return JobCut(
        number=number, elapsed_s=1.0, seed=7, sync="bsp", model=shards.model, slices=slices, shards=states
    )


def test_what_several_processes_send_at_the_same_time_is_not_mixed_up(tmp_path: Path) -> None:
    made, model = writer(tmp_path / "run"), small_shards().model
    state, piece = KeepWorkerState(0, 5), CutPiece(0, 1)
    states = [made.targets(worker, state, 1, model)[0] for worker in (0, 1)]
    pieces = [made.targets(server, piece, 1, model)[0] for server in (0, 1)]
    for sender in (0, 1):
        states[sender][:] = pieces[sender][:] = bytes([sender])
        made.keep(sender, state)
        made.arrived(sender, piece)
    assert made._states[0] == {0: {5: b"\0"}, 1: {5: b"\1"}}
    assert [made._answers.get_nowait().piece for _ in (0, 1)] == [b"\0", b"\1"]


@pytest.mark.parametrize("early", [False, True])
def test_after_a_checkpoint_that_is_abandoned_the_next_one_is_written(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early: the job has been cut again before the thread of the first checkpoint has ended."""

    def await_server(
        self: Checkpoints, cut: JobCut, entries: object, buffers: object, answers: Any, completion: object
    ) -> Path:
        checkpoints._await_answer(cut.number, answers)
        return Path(str(cut.number))

    monkeypatch.setattr(Checkpoints, "_write_files", await_server)
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    made, shards = writer(tmp_path / "run", calls.put), small_shards()

    def save(number: int) -> None:
        made.copied(CutCopied(number, 0, StateEntries({}, {}, ())))
        made.save(cut_of(shards, number))

    def end_thread() -> None:
        calls.get(timeout=60.0)()

    made.request_last()
    made.begin()
    made.reserved(0, CopiesReserved())
    save(1)
    made.complete(1, Completion("worker 0 has left"))
    if early:
        save(2)
    end_thread()
    assert made.fault == "Checkpoint 1 was not written: worker 0 has left."
    assert not made.last_ended
    made.request()
    assert not made.due(0.0)
    if not early:
        save(2)
    made.written(0, CutWritten(2))
    end_thread()
    assert made.last_ended
    assert made.saved is not None
    assert made.saved.path == Path("2")
    assert made.due(0.0)


def test_a_late_report_about_an_earlier_cut_does_not_spoil_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: queue.SimpleQueue[list[StateEntries]] = queue.SimpleQueue()
    monkeypatch.setattr(Checkpoints, "_write_files", lambda self, cut, entries, *others: found.put(entries))
    made, entries = writer(tmp_path / "run"), [StateEntries({}, {"step": ("int64", n)}, ()) for n in range(3)]
    made.copied(CutCopied(2, 0, entries[0]))
    made.copied(CutCopied(1, 1, entries[2]))  # its server has learned late that the job is cut again
    made.copied(CutCopied(2, 1, entries[1]))
    made.save(cut_of(small_shards(), 2))
    assert found.get(timeout=60.0) == entries[:2]


def test_a_run_that_ends_does_not_wait_until_a_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "BYTES_PER_S", 1e-3)
    monkeypatch.setattr(checkpoints, "CLOSING_S", 60.0)
    shards = small_shards()
    [store], [bounds] = shards.stores, shards.slices
    state = store.optimizer_state()
    entries = store.state_entries(state)

    def write(server: int, message: Message) -> None:
        assert isinstance(message, WriteCut)
        with ShardWriter(Path(message.path), message.token, bounds, entries) as opened:
            for part in shard_content(bounds, store.weights, state):
                opened.write(part)
        made.written(server, CutWritten(message.number))

    def call(function: Callable[[], None]) -> None:
        if isinstance(function, partial):  # not at the end of the thread
            function()

    made = writer(tmp_path / "run", call, write)
    made.copied(CutCopied(1, 0, entries))
    made.save(cut_of(shards))
    made.complete(1, Completion())
    folder = made._job.checkpoints
    await_that((folder / "000001.partial" / "workers").exists, "the checkpoint is about to be completed")
    made.close()
    assert list(folder.iterdir()) == []
    assert made.saved is None


@pytest.mark.parametrize("number", [0, 2, *thorough(1)], ids=["reserves", "writes", "completes"])
def test_a_thread_that_cannot_be_started_costs_only_one_checkpoint(
    number: int, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The threads of a checkpoint begin in the order of the numbers: 0 reserves, 1 completes, and 2 writes."""
    usual, count = threading.Thread.start, itertools.count()

    def start(thread: threading.Thread) -> None:
        if thread.name == "paceline-checkpoint" and next(count) == number:
            raise RuntimeError("can't start new thread")
        usual(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    run_dir = tmp_path / "run-1"
    run = run_on_threads(lambda: training(run_dir), workers=1, servers=1, checkpoint_every="0.2")
    [fault] = run.faults
    words = r"(No checkpoint was|Checkpoint \d+ was not) written: no thread can be started \(can't start new thread\)"
    assert re.fullmatch(rf"{words}; raise the limit on the number of processes \(ulimit -u\)\.", fault)
