"""Files that are complete or absent, on a disk that is full."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.layout import round_robin
from paceline.core.messages import TracePart
from paceline.errors import UsageError
from paceline.files import SYNC_BYTES, PatientWriter, Unfinished, write_json
from paceline.run import traces as best_effort
from paceline.run.traces import PART_BYTES, SegmentedFile, TraceFiles
from paceline.shard.store import WeightsSnapshot
from paceline.start.results import save_weights, write_summary
from paceline.wire.secure import new_secret, write_secret
from tests.conftest import RunOnThreads
from tests.support.small_disk import fill, small_disk

DISK_BYTES = 256 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with little room."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


def save_object(folder: Path) -> None:
    with pytest.raises(UsageError, match="No space left on device"):
        paceline.save({"weight": torch.ones(DISK_BYTES)}, folder / "model.pt")


def save_all_weights(folder: Path) -> None:
    path, messages = save_weights(WeightsSnapshot({"weight": torch.ones(DISK_BYTES)}, (1,)), folder)
    assert path is not None
    assert path.parent != folder
    assert "the weights cannot be saved to" in messages[0]
    path.unlink()
    path.parent.rmdir()


def save_summary(folder: Path) -> None:
    problem = write_summary({"ended": "finished", "more": "x" * DISK_BYTES}, folder)
    assert problem == f"summary.json cannot be written to {folder}: No space left on device"


def receive_trace(folder: Path) -> None:
    failures: list[str] = []
    traces = TraceFiles(folder, round_robin(shards=8, servers=1), failed=failures.append)
    for last in (False, True):
        [target] = traces.targets(TracePart(0, last), 0, PART_BYTES)
        target[:] = bytes(PART_BYTES)
        traces.arrived(TracePart(0, last))
    traces.close()
    assert failures == ["the trace of shard 0 cannot be written: No space left on device"]


def save_secret(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_secret(new_secret(), folder / "secret")


def save_picture(folder: Path) -> None:
    from paceline.look.timelines import new_figure, save

    figure = new_figure(20.0, 20.0)
    figure.text(0.5, 0.5, "a picture")
    with pytest.raises(OSError, match="No space left"):
        save(figure, folder / "picture.png")


WRITERS = [save_object, save_all_weights, save_summary, receive_trace, save_secret, save_picture]


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_has_no_part_of_a_file(write: Callable[[Path], None], disk: Path) -> None:
    fill(disk)
    write(disk)

    assert os.listdir(disk) == ["filler"]


def test_an_earlier_file_is_kept_if_the_disk_is_full(disk: Path) -> None:
    write_json(disk / "figures.json", [1])
    with pytest.raises(OSError, match="No space left"):
        write_json(disk / "figures.json", "x" * DISK_BYTES)

    assert os.listdir(disk) == ["figures.json"]
    assert (disk / "figures.json").read_bytes() == b"[\n  1\n]\n"


def test_states_that_do_not_fit_are_absent_and_the_run_says_so(
    disk: Path, run_on_threads: RunOnThreads
) -> None:
    def train() -> None:
        model = torch.nn.Linear(2, 1)
        large = torch.nn.Linear(DISK_BYTES, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        paceline.track(large=large)
        for _ in paceline.epochs(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    run = run_on_threads(train, workers=1, run_dir=disk / "run")

    assert sorted(path.name for path in run.run_dir.iterdir() if "track" in path.name) == []
    [fault] = run.faults
    assert "the states of tracked objects cannot be saved to" in fault


def test_a_writer_that_is_killed_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, [1])
    child = os.fork()
    if child == 0:
        with Unfinished(path) as place:
            place.write_text("[1, 2")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)

    assert path.read_text() == "[\n  1\n]\n"


def test_a_large_file_is_reported_part_by_part(tmp_path: Path) -> None:
    parts: list[int] = []
    path = tmp_path / "large"
    with path.open("wb") as file:
        writer = PatientWriter(file, lambda: parts.append(path.stat().st_size))
        assert writer.write(bytes(5)) == 5
        assert writer.write(memoryview(bytes(3 * SYNC_BYTES))) == 3 * SYNC_BYTES

    assert path.stat().st_size == 3 * SYNC_BYTES + 5
    assert parts == [SYNC_BYTES + 5, 2 * SYNC_BYTES + 5, 3 * SYNC_BYTES + 5]


def test_an_optional_file_is_written_at_once_unless_it_is_tended(tmp_path: Path) -> None:
    file = best_effort.BestEffortFile(tmp_path / "log", pytest.fail)
    file.write(b"a")
    assert (tmp_path / "log").read_bytes() == b"a"
    file.close()
    tended = SegmentedFile(tmp_path / "trace", pytest.fail, None)
    tended.write(b"a")
    assert (tmp_path / "trace").read_bytes() == b""
    tended.tend()
    assert (tmp_path / "trace").read_bytes() == b"a"
    tended.write(b"b")
    tended.close()
    assert (tmp_path / "trace").read_bytes() == b"ab"
