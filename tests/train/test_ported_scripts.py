"""Scripts in the style of public ones, each ported to Paceline by a few lines."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.sim import Cluster, SimResult, simulate
from paceline.trace import replay
from tests.support import live
from tests.support.marks import thorough

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

LONG = ("gpt", "kfold")  # alone, these scripts take the longest

# name -> relative tolerance. The rates of `OneCycleLR` depend on the number of all steps minus 1, so a schedule of
# twice as many steps is not quite the same.
TOLERANCES = {"image_classifier": 0.05}

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
) -> tuple[SimResult, list[Variables]]:
    """Run a script in each worker of a simulated cluster. Return the result and each worker's variables."""
    variables: dict[int, Variables] = {}

    def train() -> None:
        variables[paceline.worker_index()] = alone(name, batch, monkeypatch)

    result = simulate(cluster, sync, train_fn=train, seed=5, record=record)
    return result, [variables[worker] for worker in range(cluster.workers)]


@cache
def two_workers_under_bsp(name: str) -> tuple[SimResult, list[Variables]]:
    """Return the result, and each worker's variables, of a run that several tests look at."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return simulated(name, EQUAL, "bsp", BATCH, monkeypatch)


def mean_losses(parts: list[Variables]) -> list[float]:
    """Return the mean over all workers of each iteration's loss."""
    return [fmean(losses) for losses in zip(*(part["losses"] for part in parts), strict=True)]


@pytest.mark.parametrize(
    "name", [*(name for name in SCRIPTS if name not in (*SHUFFLED, *LONG)), *thorough(*LONG)]
)
def test_one_worker_computes_what_the_script_alone_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(name, BATCH, monkeypatch)["losses"]
    _, [actual] = simulated(name, ONE, "bsp", BATCH, monkeypatch)
    assert actual["losses"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_two_workers_under_bsp_equal_one_process_on_the_joint_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerance = TOLERANCES.get(name, 1e-7)
    whole, [expected] = simulated(name, ONE, "bsp", 2 * BATCH, monkeypatch)
    joint, parts = two_workers_under_bsp(name)
    assert mean_losses(parts) == pytest.approx(expected["losses"], rel=tolerance)
    assert joint.state_dict is not None
    assert whole.state_dict is not None
    for key, tensor in whole.state_dict.items():
        torch.testing.assert_close(joint.state_dict[key], tensor, rtol=tolerance, atol=0.2 * tolerance)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_a_loss_and_a_history(name: str) -> None:
    result, parts = two_workers_under_bsp(name)
    loss = result.history["loss"]
    assert loss.kind == "mean"
    assert loss.guessed == (name not in LOGGED)
    assert len(loss.values) > 5
    assert all(math.isfinite(value) for value in loss.values)
    if name not in (*ACCUMULATING, *NOISY):
        assert loss.values == pytest.approx(mean_losses(parts)[: len(loss.values)])


RELAXED = ("asp", "elastic-bsp:lookahead=4", "spec-sync")
# Scripts with two optimizers, with weights that are reloaded, with parameters that are added, with data from a
# generator, and with a closure, which SpecSync may abort.
RELAXED_PAIRS = [
    ("gan", "elastic-bsp:lookahead=4"),
    ("language_model", "asp"),
    ("unfreeze", "asp"),
    ("recommender", "spec-sync"),
    ("time_series", "spec-sync"),
]


@pytest.mark.parametrize(
    ("name", "sync"),
    [*RELAXED_PAIRS, *thorough(*(pair for pair in product(SCRIPTS, RELAXED) if pair not in RELAXED_PAIRS))],
)
def test_unequal_workers_train_under_relaxed_models(
    name: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, parts = simulated(name, UNEQUAL, sync, BATCH, monkeypatch, record=True)
    losses = [part["losses"] for part in parts]
    assert all(math.isfinite(loss) for own in losses for loss in own)
    assert fmean(fmean(own[-3:]) for own in losses) < fmean(fmean(own[:3]) for own in losses)
    assert (result.restarts > 0) == (sync == "spec-sync" and name in WITH_CLOSURE)
    for trace in result.trace:
        assert replay(trace) == []


@pytest.mark.parametrize("sync", ["asp", *thorough("bsp")])
def test_all_workers_stop_early_after_the_same_epoch(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, parts = simulated("gpt", UNEQUAL, sync, BATCH, monkeypatch)
    [last] = {part["epoch"] for part in parts}
    assert last < parts[0]["EPOCHS"] - 1
    assert {part["waited"] for part in parts} == {parts[0]["PATIENCE"]}
    validation = result.history["validation_loss"].values
    assert len(validation) == last + 1
    assert min(validation) == pytest.approx(parts[0]["best"])
    assert min(validation) not in validation[-2:]


def test_a_moving_average_of_the_weights_is_tested_after_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, parts = simulated("image_classifier", EQUAL, "bsp", BATCH, monkeypatch)
    accuracy = result.history["accuracy"]
    assert accuracy.kind == "mean"
    assert len(accuracy.values) == parts[0]["EPOCHS"]
    assert accuracy.values[-1] == parts[0]["accuracy"] == parts[1]["accuracy"] > 0.75
    saved = torch.load(tmp_path / "classifier.pt")
    for part in parts:
        for key, tensor in part["averaged"].module.state_dict().items():
            assert torch.equal(saved[key], tensor)
            assert not torch.equal(part["model"].state_dict()[key], tensor)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "sync"), thorough(("language_model", "bsp"), ("gpt", "asp"), ("unfreeze", "elastic-bsp"))
)
def test_a_script_trains_in_processes(
    name: str, sync: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(FOLDER / f"{name}.py")
    options = ("--workers", "2", "--servers", "2", "--sync", sync, "--run-dir", "run")
    ended = live.run_program("-m", "paceline", "run", *options, script, str(BATCH))
    assert ended.returncode == 0, ended.stderr
    assert ("has distributed no loader" in ended.stdout + ended.stderr) == (name == "language_model")
    trained = load_file(tmp_path / "run" / "weights.safetensors")
    torch.set_default_dtype(torch.float32)  # as in the processes
    expected = alone(name, 2 * BATCH, monkeypatch)["model"].state_dict()
    assert trained.keys() == expected.keys()
    if sync == "bsp":
        for key, tensor in expected.items():
            torch.testing.assert_close(trained[key], tensor, rtol=1e-3, atol=1e-4)
