"""What `launch` asks of an engine. An engine that this file adds is used like the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import paceline
from paceline.errors import RunFailedError
from paceline.look.show_process import Outlets
from paceline.run.job import LOOPBACK, Job
from paceline.start.launch import ENGINES, Asked, Local
from paceline.start.local import HostMachine, ProcessPlacement
from tests.support.told_apart import source_that_tells_apart

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("mark")]

NICENESS = 1


class Polite(Local):
    """All processes run on this machine, with a lower priority."""

    name = "polite"

    def options(self, asked: Asked) -> dict[str, Any]:
        return {**super().options(asked), "transport": "tcp"}

    def start(
        self, job: Job, payload: bytes, asked: Asked, console: Console, outlets: Outlets
    ) -> paceline.RunResult:
        machine = HostMachine(prefix=("nice", "-n", str(NICENESS)))
        placement = ProcessPlacement(LOOPBACK, (machine,) * job.servers, (machine,) * job.workers)
        return super().start(job, payload, asked._replace(placement=placement), console, outlets)


@pytest.fixture(autouse=True)
def polite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, Polite.name, Polite())


def test_an_engine_places_the_processes_of_a_run() -> None:
    def train() -> None:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        (model.weight.sum() * (paceline.worker_index() + 1)).backward()
        optimizer.step()
        Path(f"niceness-{paceline.worker_index()}").write_text(str(os.nice(0)))

    before = os.nice(0)
    result = paceline.launch(train, engine="polite", workers=2, servers=1, run_dir="run", progress=False)
    assert result.state_dict["weight"].tolist() == [[-1.5] * 4]
    assert [int(Path(f"niceness-{index}").read_text()) for index in (0, 1)] == [before + NICENESS] * 2


@pytest.mark.thorough
def test_the_launcher_hears_how_a_process_of_an_engine_has_ended() -> None:
    def fail() -> None:
        os._exit(3)

    with pytest.raises(RunFailedError, match=r"worker 0.*it ended with exit code 3"):
        paceline.launch(fail, engine="polite", workers=1, servers=1, run_dir="run", progress=False)


def test_only_an_engine_knows_its_name() -> None:
    """Everything else asks the engine."""
    assert source_that_tells_apart(ENGINES) == set()
