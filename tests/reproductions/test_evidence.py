"""The comparison of sync models: schedules, expected losses, batched training, tuning and statistics."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.sim import Cluster, SimResult, simulate
from reproductions.evidence.batched import Setting, Weights, train
from reproductions.evidence.places import CONTENDERS, PLACES, Variant
from reproductions.evidence.quadratics import CURVATURES, expected_losses, noise_of
from reproductions.evidence.schedules import Gradient, Schedule, record, schedule_of

UNEQUAL = Cluster(compute_s=[1.0, 1.3, 1.9, 3.1])
SHORT = msgspec.structs.replace(PLACES["steady 4x, 4 workers"], until_s=25.0)
ITERATIONS = 12
SAMPLES = 4000

SYNCS = [
    "bsp",
    "asp:push_scale=n/tau",
    "ssp:staleness=1",
    "elastic-bsp:lookahead=3",
    "rennala:batch=3",
    "ringmaster:threshold=4",
]


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


def trained(sync: str, setting: Setting) -> SimResult:
    """Simulate a run whose script trains `Rows`."""

    def script() -> None:
        model = nn.Module()
        for name, value in Rows().initial(setting.seed).items():
            model.register_parameter(name, nn.Parameter(value))
        weights = dict(model.named_parameters())
        sgd = torch.optim.SGD(model.parameters(), lr=setting.rate, momentum=setting.momentum)
        optimizer = paceline.DistributedOptimizer(sgd, model=model)
        for iteration in range(ITERATIONS):
            optimizer.zero_grad()
            Rows().loss(weights, *rows(setting.seed, paceline.worker_index(), iteration)).backward()
            optimizer.step()

    return simulate(UNEQUAL, sync, train_fn=script, record=True)


@pytest.mark.parametrize("sync", SYNCS)
def test_batched_training_gives_the_weights_of_a_simulated_run(sync: str) -> None:
    settings = [Setting(0.05, 0.0, 1), Setting(0.02, 0.9, 1), Setting(0.05, 0.5, 2)]
    runs = [trained(sync, setting) for setting in settings]
    schedule = schedule_of(runs[0].trace[0])
    assert schedule == schedule_of(runs[2].trace[0]), "the schedule must not depend on the weights"
    *_, batched = train(Rows(), schedule, settings)
    for index, run in enumerate(runs):
        assert run.state_dict is not None
        for name, value in run.state_dict.items():
            assert torch.allclose(batched[name][index], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sync", [*SYNCS, "drop-stragglers:quorum=3", "spec-sync"])
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
    return (0.5 * CURVATURES * versions[-1] ** 2).sum(axis=1)
