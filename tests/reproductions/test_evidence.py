"""The comparison of sync models: schedules, expected losses, batched training and tuning."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import paceline
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, SimResult, simulate
from paceline.studies.statistics import compare_samples
from reproductions.evidence.batched import Weights, train
from reproductions.evidence.commands import run_study
from reproductions.evidence.on_networks import STUDIES
from reproductions.evidence.on_quadratics import QUADRATICS
from reproductions.evidence.places import CONTENDERS, PLACES, Variant
from reproductions.evidence.protocol import EVALUATION_SEEDS, TUNING_SEEDS, Outcome, tuned
from reproductions.evidence.protocol import Setting as RunSetting
from reproductions.evidence.quadratics import CURVATURES, expected_losses, noise_of
from reproductions.evidence.schedules import Gradient, Schedule, record, schedule_of
from reproductions.evidence.study import make_cell, missing, read_cells, run
from reproductions.grid_search import Point
from tests.support.marks import thorough

UNEQUAL = Cluster(compute_s=[1.0, 1.3, 1.9, 3.1])
SHORT = msgspec.structs.replace(PLACES["steady 4x, 4 workers"], until_s=25.0)
ITERATIONS = 12
SAMPLES = 4000

REPRESENTATIVES = ("bsp", "asp:push_scale=n/tau", "elastic-bsp:lookahead=3")
"""A barrier of all workers, no barrier but a scale of each push, and barriers that are planned."""

OTHERS = ("ssp:staleness=1", "rennala:batch=3", "ringmaster:threshold=4")


class Rows:
    """Least squares on random rows: a small problem with a nonlinear gradient in two parameters."""

    def initial(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return {
            "first": torch.randn(5, 4, generator=generator, dtype=torch.float64),
            "second": torch.randn(4, generator=generator, dtype=torch.float64),
        }

    def batch(self, seed: int, gradient: Gradient) -> tuple[Tensor, Tensor]:
        return rows(seed, gradient.worker, gradient.iteration)

    def loss(self, weights: Weights, *batch: Tensor) -> Tensor:
        x, y = batch
        return (torch.tanh(x @ weights["first"]) @ weights["second"] - y).square().mean()

    def validation(self, weights: Weights) -> Tensor:
        return self.loss(weights, *rows(-1, 0, 0))


def rows(seed: int, worker: int, iteration: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * (seed + 1) + 100 * worker + iteration)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return x, x.sum(dim=1).sin()


def trained(sync: str, rate: float, momentum: float, seed: int) -> SimResult:
    """Simulate a run whose script trains `Rows`."""

    def script() -> None:
        model = nn.Module()
        for name, value in Rows().initial(seed).items():
            model.register_parameter(name, nn.Parameter(value))
        weights = dict(model.named_parameters())
        sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        optimizer = paceline.DistributedOptimizer(sgd, model=model)
        for iteration in range(ITERATIONS):
            optimizer.zero_grad()
            Rows().loss(dict(weights), *rows(seed, paceline.worker_index(), iteration)).backward()
            optimizer.step()

    return simulate(UNEQUAL, sync, train_fn=script, record=True, hyperparameters="raw")


@pytest.mark.parametrize("sync", [*REPRESENTATIVES, *thorough(*OTHERS)])
def test_batched_training_gives_the_weights_of_a_simulated_run(sync: str) -> None:
    rates, momenta = (0.05, 0.02, 0.05), (0.0, 0.9, 0.5)
    seed = 2
    runs = [trained(sync, *pair, seed) for pair in zip(rates, momenta, strict=True)]
    schedule = schedule_of(runs[0].trace[0])
    assert schedule == schedule_of(runs[2].trace[0]), "the schedule must not depend on the weights"
    *_, batched = train(Rows(), schedule, rates, momenta, seed)
    for index, result in enumerate(runs):
        assert result.state_dict is not None
        for name, value in result.state_dict.items():
            assert torch.allclose(batched[name][index], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sync", [*REPRESENTATIVES, *OTHERS, "drop-stragglers:quorum=3", "spec-sync"])
def test_the_expected_loss_is_the_mean_over_many_runs(sync: str) -> None:
    """Within 3 standard errors, for the recorded delays."""
    schedule = record(SHORT, Variant(sync), seed=3)
    noise = noise_of(0.3)
    for rate, momentum in ((0.2, 0.0), (0.05, 0.9)):
        expected = expected_losses(schedule, np.array([rate]), np.array([momentum])).at(noise)[-1, 0]
        losses = sampled_losses(schedule, rate, momentum, noise)
        assert abs(losses.mean() - expected) <= 3 * losses.std() / math.sqrt(SAMPLES)


def test_the_expected_loss_with_balanced_batches_counts_their_sizes() -> None:
    schedule = record(SHORT, Variant("bsp", "balanced"), seed=3)
    assert {round(g.share, 2) for g in schedule.updates[-1].gradients} != {1.0}
    expected = expected_losses(schedule, np.array([0.3]), np.array([0.5])).at(1.0)[-1, 0]
    losses = sampled_losses(schedule, 0.3, 0.5, 1.0)
    assert abs(losses.mean() - expected) <= 3 * losses.std() / math.sqrt(SAMPLES)


def sampled_losses(schedule: Schedule, rate: float, momentum: float, noise: float) -> np.ndarray:
    """Return the losses of independent runs along the schedule."""
    draw = np.random.default_rng(7)
    shape = (SAMPLES, len(CURVATURES))
    versions = [np.broadcast_to(np.sqrt(2 / (CURVATURES * len(CURVATURES))), shape)]
    velocity = np.zeros(shape)
    for update in schedule.updates:
        velocity = momentum * velocity
        for gradient in update.gradients:
            deviation = np.sqrt(noise * CURVATURES / gradient.share)
            velocity += gradient.weight * (
                CURVATURES * versions[gradient.read] + deviation * draw.standard_normal(shape)
            )
        versions.append(versions[-1] - rate * velocity)
    losses: np.ndarray = (0.5 * CURVATURES * versions[-1] ** 2).sum(axis=1)
    return losses


# -- protocol and statistics -----------------------------------------------------------------------------------


def test_the_tuning_extends_lines_until_the_best_rate_is_inside_and_rejects_what_diverges() -> None:
    tried: set[Point] = set()

    def outcomes(point: Point) -> list[Outcome]:
        tried.add(point)
        loss = abs(point.step - 9) + 1.0 + point.momentum
        return [Outcome(loss, loss, diverged=seed == 2 and point.step == 9) for seed in range(3)]

    best, count = tuned(outcomes, variants=2, middle=-2, budget=18)
    assert best == Point(0.0, 8, 0)  # step 9 diverges with one of the seeds
    assert count == len(tried)
    assert {point.variant for point in tried} == {0, 1}


def test_a_study_is_resumed_cell_by_cell(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    place = msgspec.structs.replace(PLACES["steady 4x, 4 workers"], until_s=40.0)
    contenders = tuple(CONTENDERS[name] for name in ("bsp", "asp"))
    study = msgspec.structs.replace(QUADRATICS, places=(place,), contenders=contenders)
    run(msgspec.structs.replace(study, contenders=contenders[:1]), path, silent)
    first = path.read_bytes()
    assert [contender.name for _, contender in missing(study, path)] == ["asp"]
    run(study, path, silent)
    assert path.read_bytes().startswith(first)
    assert missing(study, path) == []
    bsp, asp = read_cells(path)
    found = asp.found["0.1 each"]["time to 0.3"]
    assert len(found.results) == len(EVALUATION_SEEDS) == 16
    assert found.tried >= 48
    assert not compare_samples(found.values, bsp.found["0.1 each"]["time to 0.3"].values).tie
    assert set(EVALUATION_SEEDS).isdisjoint(TUNING_SEEDS)


def silent(what: str, share: float, slow: bool = False) -> None:
    """Ignore the progress."""


@pytest.mark.thorough
def test_balanced_batches_change_nothing_at_equal_gradients() -> None:
    """A check of the whole protocol: the updates are those of BSP, and only their times differ."""
    place = msgspec.structs.replace(PLACES["steady 4x, 4 workers"], until_s=60.0)
    study = msgspec.structs.replace(QUADRATICS, places=(place,))
    bsp, balanced = (make_cell(study, place, CONTENDERS[name]) for name in ("bsp", "bsp balanced"))
    for batches in QUADRATICS.batches:
        one, other = (cell.found[batches]["loss at equal gradients"].values for cell in (bsp, balanced))
        assert one == pytest.approx(other, rel=0.02)


RESULTS = Path(__file__).parents[2] / "reproductions" / "results" / "evidence-quadratics.jsonl"


def test_the_stored_results_are_complete() -> None:
    cells = {(cell.place, cell.contender) for cell in read_cells(RESULTS)}
    assert cells == {(place, contender) for place in PLACES for contender in CONTENDERS}


@pytest.mark.parametrize(
    ("place", "contender"),
    [("steady 4x, 4 workers", "bsp"), ("jitter, 4 workers", "bsp balanced")],
)
@pytest.mark.thorough
def test_the_stored_results_are_repeatable(place: str, contender: str) -> None:
    cells = {(cell.place, cell.contender): cell for cell in read_cells(RESULTS)}
    again = make_cell(QUADRATICS, PLACES[place], CONTENDERS[contender])
    for batches, found in cells[place, contender].found.items():
        for measure, stored in found.items():
            repeated = again.found[batches][measure]
            assert (repeated.sync, repeated.momentum, repeated.rate) == (
                stored.sync,
                stored.momentum,
                stored.rate,
            )
            assert repeated.values == pytest.approx(stored.values, rel=1e-3)


LONGEST = "text-transformer"


@pytest.mark.parametrize("name", [*(name for name in STUDIES if name != LONGEST), *thorough(LONGEST)])
def test_the_studies_on_data_train_and_evaluate(name: str) -> None:
    """With few gradients, and for one setting only."""
    study = STUDIES[name]
    place = msgspec.structs.replace(study.places[0], until_s=6.0)
    variant = study.contenders[1].variants(place.workers)[0]
    setting = RunSetting("constant", 0.5, -8)
    measured = study.measure(place, variant, 0, [setting])
    outcome = measured.outcome(Point(0.5, -8), "fixed", study.measures[0])
    assert not outcome.diverged
    assert 0 < outcome.final < 12


def test_an_estimate_starts_nothing(tmp_path: Path) -> None:
    console = Console(record=True, width=100)
    path = tmp_path / "evidence.jsonl"
    run_study("text-transformer", [], ["bsp"], path, console, only_estimate=True)
    assert "2 of 2 results are missing: about" in console.export_text()
    assert not path.exists()
    with pytest.raises(ConfigurationError, match="did you mean 'quadratics'"):
        run_study("quadratic", [], [], path, console, only_estimate=True)
