"""Runs with a guard, simulated and live: what is said, which worker is taken out, and which weights are kept."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import paceline
from paceline.errors import RunFailedError
from paceline.sim import Cluster, SimResult, simulate
from tests.support.marks import thorough

BOWL = """
import math

import torch
from torch import nn

import paceline


class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.ones(8))

    def forward(self):
        return 0.5 * self.place.square().sum()


def train(steps, rate, begin, later, poisoned=None, every=1):
    bowl = Bowl()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(bowl.parameters(), lr=rate))
    for step in range(steps):
        if step == begin:
            optimizer.param_groups[0]["lr"] = later

        def closure():
            optimizer.zero_grad()
            loss = bowl()
            if paceline.worker_index() == poisoned and step >= begin and step % every == 0:
                loss = loss * math.nan
            loss.backward()
            return loss

        optimizer.step(closure)
"""

FOUR = Cluster(compute_s=[1.0, 1.1, 0.9, 1.05], servers=2)
LIVE: dict[str, Any] = {"workers": 3, "servers": 2, "pace": [0.003] * 3, "progress": False}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The training function.

    Its arguments are the number of steps, the rate, the step at which everything changes, the later rate, the worker
    with NaN, and how often it has it.
    """
    (tmp_path / "bowl.py").write_text(BOWL)
    monkeypatch.syspath_prepend(str(tmp_path))
    function: Callable[..., None] = importlib.import_module("bowl").train
    return function


def simulated(train: Callable[..., None], *args: object, **options: Any) -> SimResult:
    return simulate(FOUR, options.pop("sync", "asp"), train_fn=train, args=args, **options)


# -- simulated -------------------------------------------------------------------------------------------------


def test_a_divergence_is_said_and_changes_no_update(train: Callable[..., None]) -> None:
    args = 150, 0.1, 50, 4.0
    told = simulated(train, *args, hyperparameters="translated")
    assert "Training diverges" in told.findings[0]
    off = simulated(train, *args, hyperparameters="translated", guard="off")
    assert told.state_dict is not None
    assert off.state_dict is not None
    assert torch.equal(told.state_dict["place"], off.state_dict["place"])
    assert told.state_dict["place"].norm() > 1e6


def test_a_healthy_run_is_the_same_with_and_without_a_guard(train: Callable[..., None]) -> None:
    for sync, steps in (("bsp", 60), ("asp", 30)):
        runs = [
            simulated(train, steps, 0.1, 0, 0.1, sync=sync, guard=guard, hyperparameters="translated")
            for guard in ("off", "tell", "temper", "stop")
        ]
        weights = [run.state_dict["place"] for run in runs if run.state_dict is not None]
        assert not any(run.findings for run in runs)
        assert all(torch.equal(each, weights[0]) for each in weights)


def test_raw_runs_send_nothing_to_the_guard(train: Callable[..., None]) -> None:
    quiet = simulated(train, 30, 0.1, 0, 0.1, hyperparameters="raw")
    observed = simulated(train, 30, 0.1, 0, 0.1, hyperparameters="raw", guard="tell")
    assert quiet.bytes_by_kind["control"] < observed.bytes_by_kind["control"]
    assert quiet.measures == observed.measures


def test_a_simulation_that_is_stopped_saves_the_last_good_weights(
    train: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError) as caught:
        simulated(train, 150, 0.1, 60, 4.0, guard="stop", run_dir=tmp_path / "run")

    assert caught.value.process == "training"
    assert "Training diverges" in caught.value.reason
    [note] = caught.value.__notes__
    assert note.endswith(f"were saved to {tmp_path / 'run' / 'weights.safetensors'}")
    assert safetensors.torch.load_file(tmp_path / "run" / "weights.safetensors")["place"].norm() < 1


@pytest.mark.parametrize("sync", ["asp", "drop-stragglers:quorum=3", *thorough("bsp", "elastic-bsp")])
def test_a_simulated_worker_that_keeps_sending_nan_is_taken_out(
    train: Callable[..., None], sync: str
) -> None:
    result = simulated(train, 60, 0.1, 20, 0.1, 2, sync=sync, on_nan="skip")

    assert [finding.partition(" has sent")[0] for finding in result.findings] == ["Worker 2", "Worker 2"]
    assert "The run continues without it." in result.findings[-1]
    iterations = result.measures.iterations
    assert iterations[2] == 30
    assert all(iterations[worker] == 60 for worker in (0, 1, 3))
    assert result.state_dict is not None
    assert result.state_dict["place"].norm() < 0.1


@pytest.mark.parametrize("guard", ["off", "tell"])
def test_a_simulated_worker_that_sends_nan_now_and_then_is_not_taken_out(
    train: Callable[..., None], guard: str
) -> None:
    result = simulated(train, 60, 0.1, 0, 0.1, 2, 2, on_nan="skip", guard=guard)
    assert not result.findings
    assert result.measures.iterations[2] == 60


def test_nan_stops_a_guarded_simulation_before_its_worker_fails(train: Callable[..., None]) -> None:
    with pytest.raises(RunFailedError, match=r"training failed: The gradient of 'place' contains NaN or inf"):
        simulated(train, 60, 0.1, 20, 0.1, 2, guard="stop")
    with pytest.raises(RunFailedError, match=r"worker 2 failed: .*NonFiniteGradientError"):
        simulated(train, 60, 0.1, 20, 0.1, 2, guard="tell")


# -- live ------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_run_that_is_stopped_keeps_the_last_good_weights(
    train: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError) as caught:
        paceline.launch(
            train, args=(10**6, 0.1, 250, 2.5), sync="bsp", guard="stop", run_dir=tmp_path / "run", **LIVE
        )

    assert caught.value.process == "training"
    assert "Training diverges" in caught.value.reason
    path = tmp_path / "run" / "weights.safetensors"
    assert any(
        "the last good weights, of update" in note and str(path) in note for note in caught.value.__notes__
    )
    assert safetensors.torch.load_file(path)["place"].norm() < 1


@pytest.mark.processes
def test_a_worker_that_keeps_sending_nan_is_taken_out_of_a_live_run(
    train: Callable[..., None], tmp_path: Path
) -> None:
    result = paceline.launch(
        train, args=(80, 0.1, 20, 0.1, 1), sync="asp", on_nan="skip", run_dir=tmp_path / "run", **LIVE
    )

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lost_workers"] == [1]
    assert "Worker 1 has sent NaN or inf 10 times in a row" in summary["losses"]["1"]
    assert "Worker 1 has sent NaN or inf 5 times in a row" in summary["findings"][0]
    assert math.isfinite(result.state_dict["place"].norm())
    assert result.state_dict["place"].norm() < 0.1
