"""The perceptron on the digits with other optimizers: whether each family's hyper-parameters can be translated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.layout import HyperParameters
from paceline.shard.foreign import register_elementwise, use_sources
from paceline.shard.optimizer_sources import OptimizerSources, class_name
from paceline.shard.optimizers import ELEMENTWISE

from ..ensembles.problems import hyper_parameters
from .digits import DigitsMLP


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


class OtherOptimizer(DigitsMLP):
    """The perceptron with another optimizer than SGD with momentum 0.9.

    Args:
        label: the part of the problem's name that stands for the optimizer.
        kind: class of the optimizer.
        rates: learning rates among which the one for bsp is chosen, ascending.
        settings: other hyper-parameters.
    """

    def __init__(
        self, label: str, kind: type[torch.optim.Optimizer], rates: Sequence[float], **settings: Any
    ) -> None:
        super().__init__()
        self.name = f"digits-mlp-{label}"
        self.rates = tuple(rates)  # type: ignore[assignment]
        self._kind, self._fixed = kind, settings
        self.optimizer = kind.__name__ if kind in ELEMENTWISE.values() else class_name(kind)
        if ":" in self.optimizer:
            use_sources(OptimizerSources(packages=(kind.__module__,)))

    def settings(self, rate: float, progress: float) -> HyperParameters:
        """Return the hyper-parameters of the optimizer."""
        return hyper_parameters(self._kind, rate, **self._fixed)


def _doubled(first: float) -> tuple[float, ...]:
    return tuple(first * 2**k for k in range(7))


FAMILIES: dict[str, Callable[[], OtherOptimizer]] = {
    f"digits-mlp-{label}": partial(OtherOptimizer, label, kind, rates, **settings)
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
