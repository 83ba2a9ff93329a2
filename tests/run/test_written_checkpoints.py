"""Who writes a checkpoint while training goes on: servers that see its files, and the coordinator for the others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer
from paceline.checkpoints.reading import Checkpoint, newest_whole
from paceline.checkpoints.writing import is_draft
from paceline.run import checkpointing as checkpoints
from paceline.run import checkpointing as shard_copies
from tests.support.live import await_that, of_the_run

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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("seen", [[True], [False], [True, False]], ids=str)
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


def test_a_bucket_that_cannot_be_written_costs_only_the_copy(
    run_on_threads: RunOnThreads, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run-1"
    bucket = tmp_path / "bucket"

    def train() -> None:
        bucket.write_text("no directory")
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
