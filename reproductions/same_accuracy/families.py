"""Problems with other optimizers: whether each family's hyper-parameters can be translated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from schedulefree import AdamWScheduleFree

from paceline.shard.foreign import register_elementwise, use_sources
from paceline.shard.optimizer_sources import OptimizerSources, class_name
from paceline.shard.optimizers import OF_TORCH

from ..ensembles.problems import Orders, Part, Problem, Weights, hyper_parameters
from .digits import DigitsCNN, DigitsMLP
from .text import TextGPT, rising_and_falling


@register_elementwise
class Lion(torch.optim.Optimizer):
    """Moves each weight by the sign of an average.

    It stands for optimizers that are not torch's, of which Paceline knows nothing. Source: Chen et al., "Symbolic
    discovery of optimization algorithms", 2023.
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move all weights."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                weight.sub_(torch.lerp(weight.grad, average, first).sign_(), alpha=group["lr"])
                average.lerp_(weight.grad, 1 - second)


Schedule = Callable[[float, float], float]
"""Function of the first rate, and of the part of the run that is over, that returns the learning rate."""

AROUND: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
"""The hyper-parameters of AdamW beside Muon."""


class Others:
    """A problem with other optimizers than its own.

    Muon trains only the matrices inside the network, and AdamW, with a fifth of Muon's rate, everything else.

    Args:
        base: the problem.
        label: the part of the problem's name that stands for the optimizer.
        kind: class of the optimizer.
        rates: learning rates from which the rate for bsp is chosen, ascending.
        schedule: the schedule of the rates.
        inside: pattern of the names of the matrices inside the network.
        settings: other hyper-parameters.
    """

    def __init__(
        self,
        base: Problem,
        label: str,
        kind: type[torch.optim.Optimizer],
        rates: Sequence[float],
        schedule: Schedule,
        inside: str = "",
        **settings: Any,
    ) -> None:
        self.name, self.rates = f"{base.name}-{label}", tuple(rates)
        self.higher_is_better, self.chance, self.samples = base.higher_is_better, base.chance, base.samples
        self.joint_batch, self.epochs = base.joint_batch, base.epochs
        self.data, self.losses, self.quality = base.data, base.losses, base.quality
        self._initial = base.initial
        names = list(base.initial(0))
        first = [name for name in names if kind is not torch.optim.Muon or re.fullmatch(inside, name)]
        self._names = list(dict.fromkeys([*first, *names]))
        self.optimizer = kind.__name__ if kind in OF_TORCH.values() else class_name(kind)
        if ":" in self.optimizer:
            use_sources(OptimizerSources(packages=(kind.__module__,)))

        def settings_of(kind: Callable[..., torch.optim.Optimizer], part: float, **fixed: Any) -> Any:
            return lambda rate, progress: hyper_parameters(kind, part * schedule(rate, progress), **fixed)

        self.settings = settings_of(kind, 1.0, **settings)
        around = Part("AdamW", range(len(first), len(names)), settings_of(torch.optim.AdamW, 0.2, **AROUND))
        own = Part(self.optimizer, range(len(first)), self.settings)
        self.parts = (own, around) if around.parameters else (own,)

    def initial(self, seed: int) -> Weights:
        """Return the initial parameters, those of the first optimizer before the others."""
        weights = self._initial(seed)
        return {name: weights[name] for name in self._names}


class EvenCNN(DigitsCNN):
    """The convolutional network on as many images as eleven joint batches contain."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 11 * self.joint_batch
        self._orders = Orders(self.samples)


class SmallGPT(TextGPT):
    """The GPT with two layers, half the width and 120 joint steps, because Muon takes long."""

    name = "small-gpt"
    width, layers = 32, 2
    joint_batch, samples = 64, 7680


def _doubled(first: float) -> tuple[float, ...]:
    return tuple(first * 2**k for k in range(7))


def _constant(rate: float, progress: float) -> float:
    return rate


def _made(base: Callable[[], Problem], *arguments: Any, **settings: Any) -> Problem:
    return Others(base(), *arguments, **settings)


FAMILIES: dict[str, Callable[[], Problem]] = {
    f"digits-mlp-{label}": partial(_made, DigitsMLP, label, kind, rates, _constant, **settings)
    for label, kind, rates, settings in (
        ("plain", torch.optim.SGD, _doubled(0.0625), {}),
        (
            "nesterov",
            torch.optim.SGD,
            _doubled(0.0125),
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.001},
        ),
        ("slow", torch.optim.SGD, _doubled(0.0025), {"momentum": 0.98}),
        ("adam", torch.optim.Adam, _doubled(0.001), {}),
        ("adamw", torch.optim.AdamW, _doubled(0.001), {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        ("rmsprop", torch.optim.RMSprop, _doubled(0.0003), {}),
        ("adagrad", torch.optim.Adagrad, _doubled(0.003), {}),
        ("nadam", torch.optim.NAdam, _doubled(0.001), {}),
        ("adamax", torch.optim.Adamax, _doubled(0.001), {}),
        ("lion", Lion, _doubled(0.0003), {}),
    )
}
"""The problems by name."""

NORMALIZED: dict[str, Callable[[], Problem]] = {
    f"{base.name}-{label}": partial(_made, base, label, kind, _doubled(first)[:4], schedule, inside)
    for label, kind, schedule, of_cnn, of_gpt in (
        ("muon", torch.optim.Muon, rising_and_falling, 0.025, 0.03),
        ("adafactor", torch.optim.Adafactor, rising_and_falling, 0.04, 0.05),
        ("lion", Lion, rising_and_falling, 0.0025, 0.002),
        ("schedule-free", AdamWScheduleFree, _constant, 0.005, 0.005),
    )
    for base, inside, first in (
        (EvenCNN, "first|second", of_cnn),
        (SmallGPT, r"\d\.(attention|mixed|wide|narrow)", of_gpt),
    )
}
"""The problems by name: optimizers whose updates do not become longer with the gradient, and a schedule-free one."""
