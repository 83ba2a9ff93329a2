"""The main worker: the one that writes files and messages, and the one that takes its place when it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.coordinator import Coordinator
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec
from paceline.core.members import NOBODY
from paceline.core.messages import (
    ChangePublished,
    IterationFinished,
    IterationStarted,
    MainChosen,
    MainRequested,
    Ready,
    Register,
    SyncRequested,
    WorkerFinished,
)
from paceline.core.requests import Request, Send, server_peer, worker_peer
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, Presence, simulate
from paceline.sync import parse
from paceline.sync.schedule import Schedule, ScheduleStep
from tests.support.live import await_that, mark, run_program
from tests.support.marks import chaos, thorough
from tests.support.served import Served, output

__all__ = ["mark"]

MODEL = ModelSpec(Layout((), (), {}), OptimizerSpec("", (), ()), ())


# -- at the coordinator -----------------------------------------------------------------------------------


def begun(workers: int = 3, *, absent: tuple[int, ...] = (), pause_below: int = 0) -> Coordinator:
    """Return a coordinator whose run is in progress with all workers that are not absent."""
    schedule = Schedule((ScheduleStep((parse("asp"),)),))
    core = Coordinator(schedule, workers=workers, servers=1, shards=1, late=absent, pause_below=pause_below)
    core.connected(server_peer(0), 0)
    first = [worker for worker in range(workers) if worker not in absent]
    for worker in first:
        core.connected(worker_peer(worker), 0)
    for worker in first:
        core.handle(worker_peer(worker), Register(MODEL), 0)
    core.handle(server_peer(0), Ready(), 0)
    return core


def told(requests: list[Request]) -> dict[int, int]:
    """Return who has been told which worker is the main worker."""
    return {
        request.to.index: request.message.worker
        for request in requests
        if isinstance(request, Send) and isinstance(request.message, MainChosen)
    }


def test_the_first_worker_that_is_present_takes_the_place_of_a_lost_one() -> None:
    core = begun()
    assert core.main.worker == 0
    assert told(core.disconnected(worker_peer(2), 0)) == {}
    assert told(core.disconnected(worker_peer(0), 0)) == {1: 1}
    assert core.main.worker == 1


def test_nobody_takes_the_place_of_a_worker_whose_script_has_ended() -> None:
    core = begun()
    assert told(core.handle(worker_peer(0), WorkerFinished(), 0)) == {}
    assert core.main.worker == 0


def test_the_index_of_a_main_worker_whose_script_has_ended_is_not_used_again() -> None:
    """A worker with this index would write the files again, and would not know what its predecessor has written."""
    core = begun()
    for worker in range(2):
        core.handle(worker_peer(worker), WorkerFinished(), 0)
        core.disconnected(worker_peer(worker), 0)
    with pytest.raises(ConfigurationError, match="at most 3 workers and 2 of them have joined"):
        core.invite(2)
    assert core.invite(1, [0]) == {1: 1}


def test_another_worker_takes_the_place_of_one_that_was_asked_to_leave() -> None:
    core = begun()
    assert told(core.handle(worker_peer(0), WorkerFinished(early=True), 0)) == {1: 1, 2: 1}


@pytest.mark.parametrize(
    ("goodbye", "is_new"),
    [(None, True), (WorkerFinished(early=True), True), (WorkerFinished(), False)],
    ids=["lost", "asked to leave", "finished"],
)
def test_the_first_requests_of_the_worker_that_takes_the_place_of_another_are_new(
    goodbye: WorkerFinished | None, is_new: bool
) -> None:
    core = begun()
    assert core.request_checkpoint(0, 1)
    assert changed(core.handle(worker_peer(0), SyncRequested("script", 0, "bsp"), 0)) == {0, 1, 2}
    for worker in range(3):
        core.handle(worker_peer(worker), IterationFinished(iteration=0, change=1), 0)
    core.handle(worker_peer(1), IterationStarted(1), 0)
    if goodbye is None:
        core.disconnected(worker_peer(0), 0)
    else:
        core.handle(worker_peer(0), goodbye, 0)
    assert core.request_checkpoint(1, 1) == is_new
    requests = core.handle(worker_peer(1), SyncRequested("script", 0, "asp"), 0)
    assert changed(requests) == ({1, 2} if is_new else set())


def changed(requests: list[Request]) -> set[int]:
    """Return who has been told of a change of the sync model."""
    return {
        request.to.index
        for request in requests
        if isinstance(request, Send) and isinstance(request.message, ChangePublished)
    }


def test_the_nth_requests_of_all_workers_for_a_checkpoint_are_one() -> None:
    core = begun()
    made = [core.request_checkpoint(worker, number) for number in (1, 2) for worker in range(3)]
    assert made == [True, False, False, True, False, False]


def test_a_worker_that_returns_is_told_that_another_one_is_the_main_worker() -> None:
    core = begun()
    core.disconnected(worker_peer(0), 0)
    core.losses.open.clear()
    assert core.invite(1, [0]) == {0: 1}
    core.connected(worker_peer(0), 0, incarnation=1)
    assert told(core.handle(worker_peer(0), MainRequested(), 0)) == {0: 1}


def test_if_nobody_is_left_the_next_worker_to_join_becomes_the_main_worker() -> None:
    core = begun(2, pause_below=1)
    for worker in range(2):
        core.disconnected(worker_peer(worker), 0)
    assert core.main.worker == NOBODY
    assert core.main.joined(1)
    assert core.main.worker == 1


def test_if_nobody_is_left_before_training_begins_it_is_worker_0_again() -> None:
    core = Coordinator(
        Schedule((ScheduleStep((parse("asp"),)),)), workers=2, servers=1, shards=1, late=(0, 1)
    )
    core.invite(1)
    core.connected(worker_peer(0), 0)
    core.disconnected(worker_peer(0), 0)
    assert core.main.worker == 0


def test_a_run_that_begins_without_worker_0_has_another_main_worker() -> None:
    assert begun(absent=(0,)).main.worker == 1


# -- in virtual time --------------------------------------------------------------------------------------


def train(seen: list[tuple[int, int, int, bool]], folder: Path, numbers: Any, split: Any) -> None:
    """Note (life, worker, epoch, whether it is the main worker) for each epoch of each worker, and save a file."""
    index = paceline.worker_index()
    life = sum(1 for each in seen if each[1] == index and each[2] == -1)
    seen.append((life, index, -1, paceline.is_main()))
    model = nn.Linear(1, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    loader = DataLoader(TensorDataset(torch.ones(48, 1)), batch_size=4)
    for epoch in numbers(6):
        answers = set()
        for (x,) in paceline.distribute(loader, split=split):
            answers.add(paceline.is_main())
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        answers.add(paceline.is_main())
        assert len(answers) == 1, "it changes within an epoch"
        seen.append((life, index, epoch, answers.pop()))
        paceline.save((life, index, epoch), folder / f"{life}-{index}-{epoch}.pt")


@pytest.mark.parametrize(
    ("numbers", "split", "sync"),
    [
        (paceline.epochs, "static", "bsp"),
        (paceline.epochs, "dynamic", "asp"),
        (range, "static", "asp"),
        *thorough(
            (paceline.epochs, "static", "asp"),
            (paceline.epochs, "dynamic", "bsp"),
            (range, "static", "bsp"),
            (range, "dynamic", "asp"),
            (range, "dynamic", "bsp"),
        ),
    ],
)
def test_files_and_messages_go_on_when_worker_0_is_lost_and_stay_with_the_new_writer_when_it_returns(
    sync: str, split: str, numbers: Any, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, int, bool]] = []
    presence = {0: Presence(lost_at_s=9.5, back_after_s=6.0)}
    cluster = Cluster(compute_s=[1.0, 1.0, 1.0], presence=presence)
    simulate(cluster, sync, train_fn=lambda: train(seen, tmp_path, numbers, split))

    assert {(life, worker) for life, worker, _, main in seen if main} == {(0, 0), (0, 1)}
    by_worker_1 = [epoch for _, worker, epoch, main in seen if worker == 1 and main]
    assert by_worker_1[0] <= 3, "from the epoch after the loss on"
    assert by_worker_1 == [*range(by_worker_1[0], 6)]
    saved = sorted(tuple(torch.load(path)) for path in tmp_path.iterdir())
    assert {(life, worker) for life, worker, _ in saved} == {(0, 0), (0, 1)}
    assert {epoch for *_, epoch in saved} == {*range(6)}


# -- live -------------------------------------------------------------------------------------------------

SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
best = float("inf")
for epoch in paceline.epochs(8):
    if epoch == 2 and paceline.worker_index() == 0 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        time.sleep(PAUSE_S)
    if paceline.is_main():
        with paceline.evaluating(model) as snapshot, torch.no_grad():
            loss = float(torch.nn.functional.mse_loss(snapshot(x), x.sum(dim=1, keepdim=True)))
        print(f"worker {paceline.worker_index()}, epoch {epoch}: {loss:.4f}", flush=True)
    paceline.save({"epoch": epoch, "model": model.state_dict()}, "checkpoint.pt")
    Path(f"epoch-{paceline.worker_index()}-{epoch}").touch()
    while epoch >= 4 and "wait" in sys.argv and not Path("enough").exists():
        time.sleep(0.01)
if paceline.is_main():
    print(f"worker {paceline.worker_index()} says that training has ended", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("sync", ["bsp", *chaos("asp")])
def test_the_output_and_the_checkpoints_of_a_run_go_on_without_worker_0(sync: str, mark: str) -> None:
    # With these pauses, the loss is noticed long before training ends. Under bsp, nobody goes on before it is.
    Path("train.py").write_text(SCRIPT.replace("PAUSE_S", "0.02" if sync == "bsp" else "0.05"))
    command = ["-m", "paceline", "run", "-n", "3", "--sync", sync, "--run-dir", "run", "train.py"]
    ended = run_program(*command)

    assert ended.returncode == 0, ended.stderr
    assert "worker 0, epoch 1: " in ended.stdout
    assert "worker 1, epoch 7: " in ended.stdout
    assert "worker 1 says that training has ended" in ended.stdout
    assert "worker 2" not in ended.stdout
    messages = " ".join(ended.stderr.split())
    assert "worker 1 is the main worker now" in messages
    assert "because worker 0 was lost" in messages
    assert torch.load("checkpoint.pt")["epoch"] == 7
    summary = json.loads(Path("run", "summary.json").read_text())
    assert summary["main_worker"] == 1
    assert "worker 1 at the end" in ended.stdout + ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize("sync", chaos("asp", "bsp"))
def test_a_worker_0_that_returns_prints_and_overwrites_nothing(sync: str, mark: str) -> None:
    """Both wait after their fifth epoch until worker 0 has returned. Under bsp, it is ahead of worker 1 then."""
    served = Served("--workers", "2", "--sync", sync)
    Path("train.py").write_text(SCRIPT.replace("PAUSE_S", "0.05"))
    both = [served.join("wait"), served.join("wait")]
    await_that(Path("killed").exists, "worker 0 is killed")
    returned = served.join("wait")
    await_that(lambda: list(Path().glob("epoch-0-[4-7]")), "worker 0 has returned")
    saved = torch.load("checkpoint.pt")["epoch"]
    watched = run_program("-m", "paceline", "status", served.address, "--json", "--secret-file", "run/secret")
    shown = run_program("-m", "paceline", "status", served.address, "--secret-file", "run/secret")
    Path("enough").touch()
    ends = [output(program) for program in (*both, returned)]
    summary = served.summary()

    assert sorted(code for code, *_ in ends) == [0, 0, 1], ends
    [stays] = [stdout for _, stdout, _ in ends[:2] if "worker 1, epoch 7: " in stdout]
    assert "worker 1 says that training has ended" in stays
    code, stdout, stderr = ends[2]
    assert (code, "epoch" in stdout, "says" in stdout) == (0, False, False), (stdout, stderr)
    assert saved >= 2, "worker 1 has saved the epoch in which worker 0 was killed"
    assert torch.load("checkpoint.pt")["epoch"] == 7
    assert json.loads(watched.stdout)["main_worker"] == 1, watched.stderr
    assert "worker 1 is the main worker" in shown.stdout
    assert summary["main_worker"] == 1
    assert "worker 1 is the main worker now; paceline.is_main() says so from the next epoch on" in " ".join(
        served.messages.split()
    )
