"""Fractions of an optimizer's step: what they are equal to, for every optimizer class that the servers run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree

from paceline.core.layout import Layout, OptimizerSpec, Parameter
from paceline.shard.foreign import build
from paceline.shard.optimizer_sources import class_name
from paceline.shard.optimizers import ELEMENTWISE, read_groups
from paceline.shard.slice_optimizers import (
    HOST,
    FractionalSteps,
    FusedOptimizer,
    TorchOptimizer,
    optimizer_of_slice,
)
from paceline.sync.translation import FAMILIES, NORMALIZED, WHOLE, Family, Fraction, Standing, translate
from tests.support.store_training import SETTINGS as TENSORWISE
from tests.support.store_training import StoreTraining, tensorwise_model

SIZE = 24
EVERYONE = b"\x01"


def first_weights() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, SIZE, dtype=torch.float64)


def gradients(count: int, noise: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    signal = torch.linspace(0.5, -1.5, SIZE, dtype=torch.float64)
    return [
        signal + noise * torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(count)
    ]


def on_slice(kind: Any, name: str, settings: dict[str, Any]) -> tuple[Any, torch.Tensor, tuple[Any, ...]]:
    """Return an optimizer of a slice, its weights, and the hyper-parameters of its only group."""
    weights = first_weights()
    layout = Layout.of([Parameter(("p",), (SIZE,), "float64")])
    (bounds,) = layout.slice_evenly(1)
    groups = read_groups(ELEMENTWISE[name]([torch.zeros(1)], **settings))
    stored = {
        dtype: torch.zeros(stop - start, dtype=torch.float64)
        for dtype, (start, stop) in bounds.bounds.items()
    }
    stored["float64"][:SIZE] = weights
    return kind(OptimizerSpec(name, groups, (0,)), bounds, stored), stored["float64"], groups


def take(
    kind: Any, name: str, settings: dict[str, Any], each: Sequence[tuple[torch.Tensor, Fraction]]
) -> torch.Tensor:
    """Return the weights after some fractions of steps."""
    optimizer, weights, groups = on_slice(kind, name, settings)
    for gradient, fraction in each:
        vector = torch.zeros_like(weights)
        vector[:SIZE] = gradient
        optimizer.step([{"float64": vector}], [1.0], EVERYONE, groups, fraction)
    return weights[:SIZE].clone()


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
]
IDS = [f"{name}-{'-'.join(sorted(settings))}" for name, settings in SETTINGS]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_a_whole_fraction_is_torchs_own_step(name: str, settings: dict[str, Any]) -> None:
    weights = torch.nn.Parameter(first_weights())
    alone = ELEMENTWISE[name]([weights], **settings)
    for gradient in gradients(5):
        weights.grad = gradient.clone()
        alone.step()
    taken = take(optimizer_of_slice, name, settings, [(gradient, WHOLE) for gradient in gradients(5)])
    assert torch.equal(taken, weights.detach())


@pytest.mark.parametrize(
    ("name", "settings"),
    # Rprop only begins with the rate. Its steps are at least 1e-6.
    [each for each in SETTINGS if each[0] != "Rprop"],
    ids=[name for name in IDS if not name.startswith("Rprop")],
)
def test_a_rate_of_zero_moves_nothing(name: str, settings: dict[str, Any]) -> None:
    # A warm-up may begin with it, and a cosine may end with it.
    part = translate(Standing(share=1 / 4, delay=1.0))
    taken = take(optimizer_of_slice, name, {**settings, "lr": 0.0}, [(g, part) for g in gradients(3)])
    assert torch.equal(taken, first_weights())


LONG = ("NAdam", "RAdam", "ASGD")
"""Their steps take long, and they keep no other means than Adam does."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(*each, id=identifier, marks=[pytest.mark.thorough] if each[0] in LONG else [])
        for each, identifier in zip(SETTINGS, IDS, strict=True)
        # Rprop's rates grow by a factor with every step, so they grow more slowly in fractions of steps.
        if each[0] != "Rprop"
    ],
)
def test_many_small_fractions_are_about_as_far_as_whole_steps(name: str, settings: dict[str, Any]) -> None:
    # Without noise, 1600 fractions of 1/40 and 40 whole steps must move the weights about equally far.
    settings = {**settings, "lr": settings["lr"] / 10}
    (signal,) = gradients(1, noise=0.0)
    small = translate(Standing(share=1 / 40))
    parts = take(optimizer_of_slice, name, settings, [(signal, small)] * 1600)
    whole = take(optimizer_of_slice, name, settings, [(signal, WHOLE)] * 40)
    travel, expected = parts - first_weights(), whole - first_weights()
    assert float((travel - expected).norm()) < 0.12 * float(expected.norm())


@pytest.mark.parametrize(
    ("name", "settings"),
    [each for each in SETTINGS if each[0] in ("SGD", "Adam", "AdamW")],
    ids=[i for i, each in zip(IDS, SETTINGS, strict=True) if each[0] in ("SGD", "Adam", "AdamW")],
)
def test_both_implementations_take_the_same_fractions(name: str, settings: dict[str, Any]) -> None:
    fractions = [translate(Standing(1 / 4, delay)) for delay in (0.2, 0.5, 1.0, 1.0)] + [WHOLE]
    each = list(zip(gradients(5), fractions, strict=True))
    fused, torchs = (take(kind, name, settings, each) for kind in (FusedOptimizer, TorchOptimizer))
    # In its first step, torch's code creates the state. So SGD does not dampen the first gradient, and Adam's square
    # of the first gradient is not corrected.
    tolerance = 1e-12 if name == "SGD" and "dampening" not in settings else 0.1
    assert float((fused - torchs).abs().max()) <= tolerance


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=IDS)
def test_an_optimizer_that_takes_the_place_of_another_continues_its_fractions(
    name: str, settings: dict[str, Any]
) -> None:
    part = translate(Standing(share=1 / 4))
    expected = take(optimizer_of_slice, name, settings, [(gradient, part) for gradient in gradients(6)])
    optimizer, weights, groups = on_slice(optimizer_of_slice, name, settings)
    for gradient in gradients(6):
        before, earlier = optimizer, weights
        optimizer, weights, _ = on_slice(optimizer_of_slice, name, settings)
        weights.copy_(earlier)
        optimizer.load_state(before.state())
        optimizer.take_over(before)
        vector = torch.zeros_like(weights)
        vector[:SIZE] = gradient
        optimizer.step([{"float64": vector}], [1.0], EVERYONE, groups, part)
    torch.testing.assert_close(weights[:SIZE], expected)


@pytest.mark.parametrize("name", TENSORWISE)
def test_a_store_that_takes_the_place_of_another_continues_its_running_means(name: str) -> None:
    alone, before, after = (StoreTraining(tensorwise_model(name), HOST) for _ in range(3))
    for iteration in range(4):
        alone.step(iteration)
        before.step(iteration)
    after.go_on(before)
    for iteration in (4, 5):
        alone.step(iteration)
        after.step(iteration)
    for name, weights in after.weights.items():
        used = None if name == "float32" else 40  # AdamW's vector is followed by padding
        torch.testing.assert_close(weights[:used], alone.weights[name][:used])


def test_sgd_follows_the_equation() -> None:
    h, m, s, d = 0.1, 0.9, 0.25, 1.0
    fraction = translate(Standing(s, d))
    taken = take(
        FusedOptimizer, "SGD", {"lr": h, "momentum": m}, [(gradient, fraction) for gradient in gradients(9)]
    )
    weights, velocity = first_weights(), torch.zeros(SIZE, dtype=torch.float64)
    for gradient in gradients(9):
        weights -= s * h * (gradient + m * velocity)
        velocity += s / (1 + d / 2) * (gradient - (1 - m) * velocity)
    assert torch.allclose(taken, weights, rtol=0, atol=1e-12)


def test_a_momentum_of_a_single_push_is_spent_over_as_many_samples_as_in_one_process() -> None:
    h, m, s = 0.1, 0.9, 1 / 16
    zero = torch.zeros(SIZE, dtype=torch.float64)
    (gradient,) = gradients(1)
    fraction = translate(Standing(s))
    settings = {"lr": h, "momentum": m}
    for joint_steps in (1, 5, 10, 200):
        parts = [(gradient, fraction)] + [(zero, fraction)] * (16 * joint_steps)
        moved = (first_weights() - take(FusedOptimizer, "SGD", settings, parts)) / (h * gradient)
        expected = s * sum(m**k for k in range(joint_steps + 1))
        assert torch.allclose(moved, torch.full_like(moved, expected), rtol=0.04, atol=0)


def test_adam_divides_by_the_square_of_the_joint_gradient() -> None:
    # Each push has 16 times the variance of a joint gradient. Without the estimate, the steps would be up to 4 times
    # too short.
    joint = gradients(400, noise=1.0)
    pushes = gradients(400 * 16, noise=4.0)
    settings = {"lr": 1e-4}
    whole = take(FusedOptimizer, "Adam", settings, [(gradient, WHOLE) for gradient in joint])
    part = translate(Standing(1 / 16))
    parts = take(FusedOptimizer, "Adam", settings, [(gradient, part) for gradient in pushes])
    travel, expected = parts - first_weights(), whole - first_weights()
    assert 0.85 < float(travel.norm() / expected.norm()) < 1.15


def test_the_guards_factor_reduces_the_distance_and_leaves_the_state() -> None:
    settings = {"lr": 0.1, "momentum": 0.9}
    (gradient,) = gradients(1)
    full, half = (
        take(FusedOptimizer, "SGD", settings, [(gradient, translate(Standing(0.25, 1.0, temper)))])
        for temper in (1.0, 0.5)
    )
    assert torch.allclose(half - first_weights(), (full - first_weights()) / 2)


def test_translation_is_the_identity_for_a_joint_batch_without_delay_and_monotone() -> None:
    assert translate(Standing(1.0)) == WHOLE
    assert translate(Standing(1.0)).whole
    delays = [translate(Standing(0.25, d / 10)).means for d in range(40)]
    assert delays == sorted(delays, reverse=True)
    shares = [translate(Standing(1 / n, 1.0)) for n in range(1, 40)]
    assert [each.step for each in shares] == sorted((each.step for each in shares), reverse=True)
    for d in range(40):
        near, far = translate(Standing(0.25, d / 10)), translate(Standing(0.25, d / 10 + 1e-6))
        assert abs(near.means - far.means) < 1e-6


class Signs(torch.optim.Optimizer):
    """Moves each weight by the sign of its gradient, which it overwrites."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad.sign_(), alpha=group["lr"])


NORMALIZING: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda weights: torch.optim.Muon(weights, lr=0.1, weight_decay=0.0, momentum=0.9),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1, weight_decay=0.0),
    "own.module:Signs": lambda weights: Signs(weights, lr=0.1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("pushes", [4, 16])
@pytest.mark.parametrize("name", NORMALIZING)
def test_the_noise_of_pushes_does_not_shorten_normalized_updates(name: str, pushes: int) -> None:
    """Single pushes have more noise than a joint gradient, but must move the weights as far along the signal."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(8, 12, generator=generator)
    signal /= signal.norm()

    def travel(share: float, family: Family) -> float:
        weight = torch.nn.Parameter(torch.ones(8, 12))
        optimizer, parts = NORMALIZING[name]([weight]), FractionalSteps(family)
        for _ in range(round(100 / share)):
            noise = torch.randn(8, 12, generator=generator) * 0.2 / math.sqrt(share)
            weight.grad = given = signal + noise
            before = given.clone()
            parts.take(optimizer, Fraction(share, share, share))
            if share < 1 and family.averages:
                assert torch.equal(given, before)  # it belongs to the push
        return -float(((weight.detach() - 1) * signal).sum())

    kind = FAMILIES.get(name, NORMALIZED)
    expected = travel(1.0, kind)
    assert travel(1 / pushes, kind) == pytest.approx(expected, rel=0.07)
    assert travel(1 / pushes, Family()) < 0.9 * expected


@pytest.mark.thorough
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_decay_of_a_schedule_free_optimizer_is_no_part_of_the_squared_gradient(decay: float) -> None:
    """Small pushes with a constant gradient reach the squares, the weights and z of whole steps."""
    found = []
    for share in (1.0, 0.01):
        weight = torch.nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
        optimizer = build(AdamWScheduleFree, [{"params": [weight], "lr": 0.005, "weight_decay": decay}])
        parts = FractionalSteps(FAMILIES[class_name(AdamWScheduleFree)])
        for _ in range(round(100 / share)):
            weight.grad = torch.tensor([[0.5, -1.0, 2.0, 1e-3]], dtype=torch.float64)
            parts.take(optimizer, Fraction(share, share, share))
        found.append((weight.detach(), optimizer.state[weight]["z"], optimizer.state[weight]["exp_avg_sq"]))
    for whole, small in zip(*found, strict=True):
        torch.testing.assert_close(small, whole, rtol=0.06, atol=0.0)


def test_every_family_names_entries_of_its_optimizers_state() -> None:
    settings: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.1, "momentum": 0.9},
        "RMSprop": {"momentum": 0.9, "centered": True},
    }
    for name, kind in FAMILIES.items():
        weight = torch.nn.Parameter(torch.zeros(1, 1))
        module, _, own = name.rpartition(":")
        kind_of_optimizer = getattr(importlib.import_module(module or "torch.optim"), own)
        optimizer = build(kind_of_optimizer, [{"params": [weight], **settings.get(name, {})}])
        weight.grad = torch.ones(1, 1)
        optimizer.step()
        named = {*kind.means, *filter(None, (kind.square, kind.mean))}
        assert named <= optimizer.state[weight].keys()
        assert 0 < kind.kept(optimizer.param_groups[0]) <= 1
