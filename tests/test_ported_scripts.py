"""Scripts in the style of public ones, each ported to Paceline by a few lines."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.sim import Cluster, SimResult, simulate
from paceline.trace import replay

from . import live

FOLDER = Path(__file__).parent / "ported_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))

# These scripts draw random numbers for each sample, so several workers do not compute what one process computes.
NOISY = ("actor_critic", "gan", "vae")
EXACT = [name for name in SCRIPTS if name not in NOISY]

# In a run, the order of these scripts' data depends on the run's seed.
SHUFFLED = ("image_classifier", "mingpt_trainer")

WITH_CLOSURE = ("time_series",)  # SpecSync can abort the computations of these scripts

# The losses of these scripts are not guessed: they have a closure, or log what would be guessed wrong.
LOGGED = ("gan", "gpt", "time_series")

ACCUMULATING = ("gpt",)

BATCH = 4  # of each worker
EQUAL = Cluster(compute_s=[1.0, 1.0], servers=2)
UNEQUAL = Cluster(compute_s=[1.0, 1.0, 2.5], servers=2, latency_s=0.01)
ONE = Cluster(compute_s=[1.0])

Variables = dict[str, Any]
"""The global variables of a script when it has ended."""


@pytest.fixture(autouse=True)
def in_double_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


def alone(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> Variables:
    """Run a script, in the calling worker or as one ordinary process."""
    path = str(FOLDER / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, str(batch)])
    return runpy.run_path(path, run_name="__main__")


def simulated(
    name: str,
    cluster: Cluster,
    sync: str,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    record: bool = False,
) -> tuple[SimResult, list[list[float]]]:
    """Run a script in each worker of a simulated cluster. Return the result and each worker's losses."""
    losses: dict[int, list[float]] = {}

    def train() -> None:
        losses[paceline.worker_index()] = alone(name, batch, monkeypatch)["losses"]

    result = simulate(cluster, sync, train_fn=train, seed=5, record=record)
    return result, [losses[worker] for worker in range(cluster.workers)]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in SHUFFLED])
def test_one_worker_computes_what_the_script_alone_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(name, BATCH, monkeypatch)["losses"]
    _, [actual] = simulated(name, ONE, "bsp", BATCH, monkeypatch)
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_two_workers_under_bsp_equal_one_process_on_the_joint_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, [expected] = simulated(name, ONE, "bsp", 2 * BATCH, monkeypatch)
    joint, parts = simulated(name, EQUAL, "bsp", BATCH, monkeypatch)
    assert [fmean(losses) for losses in zip(*parts, strict=True)] == pytest.approx(expected, rel=1e-7)
    assert joint.state_dict is not None
    assert whole.state_dict is not None
    for key, tensor in whole.state_dict.items():
        torch.testing.assert_close(joint.state_dict[key], tensor, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_a_loss_and_a_history(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, parts = simulated(name, EQUAL, "bsp", BATCH, monkeypatch)
    loss = result.history["loss"]
    assert loss.kind == "mean"
    assert loss.guessed == (name not in LOGGED)
    assert len(loss.values) > 5
    assert all(math.isfinite(value) for value in loss.values)
    if name not in (*ACCUMULATING, *NOISY):
        means = [fmean(losses) for losses in zip(*parts, strict=True)]
        assert loss.values == pytest.approx(means[: len(loss.values)])


@pytest.mark.parametrize("sync", ["asp", "elastic-bsp:lookahead=4", "spec-sync"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_unequal_workers_train_under_relaxed_models(
    name: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, parts = simulated(name, UNEQUAL, sync, BATCH, monkeypatch, record=True)
    assert all(math.isfinite(loss) for losses in parts for loss in losses)
    assert fmean(fmean(losses[-3:]) for losses in parts) < fmean(fmean(losses[:3]) for losses in parts)
    assert (result.restarts > 0) == (sync == "spec-sync" and name in WITH_CLOSURE)
    for trace in result.trace:
        assert replay(trace) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "sync"), [("language_model", "bsp"), ("gpt", "asp"), ("unfreeze", "elastic-bsp")]
)
def test_a_script_trains_in_processes(
    name: str, sync: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(FOLDER / f"{name}.py")
    options = ("--workers", "2", "--servers", "2", "--sync", sync, "--run-dir", "run")
    ended = live.run_program("-m", "paceline", "run", *options, script, str(BATCH))
    assert ended.returncode == 0, ended.stderr
    trained = load_file(tmp_path / "run" / "weights.safetensors")
    torch.set_default_dtype(torch.float32)  # as in the processes
    expected = alone(name, 2 * BATCH, monkeypatch)["model"].state_dict()
    assert trained.keys() == expected.keys()
    if sync == "bsp":
        for key, tensor in expected.items():
            torch.testing.assert_close(trained[key], tensor, rtol=1e-3, atol=1e-4)
