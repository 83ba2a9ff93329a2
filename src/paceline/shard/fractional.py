"""Takes a fraction of an optimizer's step: see `paceline.sync.translation` for the reasons, and for the terms.

A whole step is taken on copies of the weights and of the state; then the originals move towards the copies. So this
module knows nothing of what an optimizer computes, except which entries of its state are averages of the gradient,
and which is the running mean of squares (`FAMILIES`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..sync.translation import Family, Fraction

__all__ = ["FractionalSteps", "fractional_kernel", "use_joint_square"]

Kernel = Callable[..., object]
"""Function of (weights, gradient, *state) that updates a chunk of the weights and of the state in place."""

MEAN_DECAY = 0.9
"""Decay, in joint steps, of the running mean of the gradient of optimizers that have none."""

FIRST_VALUES = {"mu": 1.0, "mu_product": 1.0}
"""Entries that do not begin with zero. Others with one number per parameter, like rates, begin as set."""


def use_joint_square(
    square: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor | None,
    mean_weight: float,
    kept: float,
    share: float,
) -> None:
    """Change a running mean of squares so that the next step adds the estimate of the joint gradient's square to it.

    The step will compute `kept * square + (1 - kept) * gradient ** 2`, or `square + gradient ** 2` for a sum. After
    this change, the result is never negative.

    Args:
        square: the running mean of squares, which is changed; a sum if `kept` is 1. Same shape as the gradient.
        gradient: the gradient of the update.
        mean: running mean of the gradient that begins with zero; None if there is none yet.
        mean_weight: sum of the weights of the gradients in `mean`: less than 1 at the beginning.
        kept: the part of the running mean that the step keeps.
        share: the update's share of a joint batch.
    """
    if kept == 0.0:
        return  # the step uses the square of this gradient only
    factor = (1.0 - share) * (1.0 if kept == 1.0 else (1.0 - kept) / kept)
    if mean is not None and mean_weight > 0.0:
        square.addcmul_(mean, mean, value=factor / mean_weight**2)
    square.addcmul_(gradient, gradient, value=-factor)


def coupled_decay(settings: Mapping[str, Any]) -> float:
    """Return the factor of the weights that an optimizer adds to the gradient, before it squares the sum.

    A fraction of a step adds them itself, with the decay taken out of the hyper-parameters, because the estimate of
    the square needs the same sum. The factor is negative if the objective is maximized; 0 if there is nothing to add.
    """
    if settings.get("decoupled_weight_decay", False):
        return 0.0
    decay = float(settings.get("weight_decay", 0.0))
    return -decay if settings.get("maximize", False) else decay


def fractional_kernel(
    kernel: Kernel,
    keys: Sequence[str],
    family: Family,
    settings: Mapping[str, Any],
    decay: float,
    steps: float,
    fraction: Fraction,
    scratch: Callable[[str], torch.Tensor],
) -> Kernel:
    """Return a kernel that takes a fraction of the step that `kernel` takes.

    Args:
        kernel: a kernel of one step.
        keys: keys of the state vectors that the kernels take, in order.
        family: the family of the optimizer.
        settings: the hyper-parameters of the step.
        decay: factor of the weights that is added to the gradient before the step; see `coupled_decay`.
        steps: number of joint steps that were taken before.
        fraction: the fraction.
        scratch: returns memory for a copy of a chunk, by the key of the vector; "" stands for the weights.
    """
    parts = [fraction.means if key in family.means else fraction.step for key in keys]
    mean_weight = 1.0 - settings["betas"][0] ** steps if family.mean else 0.0

    def take(weights: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor) -> None:
        count = weights.numel()
        if decay:
            gradient = torch.add(gradient, weights, alpha=decay, out=scratch("gradient")[:count])
        after = [scratch(key)[:count].copy_(each) for key, each in zip(keys, state, strict=True)]
        moved = scratch("")[:count].copy_(weights)
        if family.square:
            by_key = dict(zip(keys, after, strict=True))
            square, mean = by_key[family.square], by_key[family.mean]
            use_joint_square(square, gradient, mean, mean_weight, family.kept(settings), fraction.step)
        kernel(moved, gradient, *after)
        weights.lerp_(moved, fraction.weights)
        for each, new, part in zip(state, after, parts, strict=True):
            each.lerp_(new, part)

    return take


class FractionalSteps:
    """Takes fractions of the steps of a torch optimizer.

    Args:
        family: the family of the optimizer.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        # (where, key) -> the part of a step by which a counter, which is a whole number, is ahead
        self._ahead: dict[tuple[int, str], float] = {}
        self._means: dict[torch.Tensor, torch.Tensor] = {}  # parameter -> running mean of its gradient
        self._mean_weights: dict[torch.Tensor, float] = {}

    def take(
        self, optimizer: torch.optim.Optimizer, fraction: Fraction, take_step: Callable[[], object]
    ) -> None:
        """Take a fraction of the optimizer's next step. Parameters without a gradient are left as they are.

        Args:
            optimizer: the optimizer, whose parameters have their gradients.
            fraction: the fraction.
            take_step: function that takes a step with the optimizer.
        """
        groups = optimizer.param_groups
        everyone = enumerate((group, parameter) for group in groups for parameter in group["params"])
        moving = [(place, *each) for place, each in everyone if each[1].grad is not None]
        before = {place: parameter.detach().clone() for place, _, parameter in moving}
        states = {
            place: {key: _copy(value) for key, value in optimizer.state.get(parameter, {}).items()}
            for place, _, parameter in moving
        }
        counters = [{key: value for key, value in group.items() if type(value) is int} for group in groups]
        decays = [
            (group, group["weight_decay"]) for group in groups if self._family.square and coupled_decay(group)
        ]
        for _, group, parameter in moving if self._family.square else ():
            if decay := coupled_decay(group):
                parameter.grad = parameter.grad.add(parameter.detach(), alpha=decay)
            self._use_joint_square(optimizer.state.get(parameter, {}), group, parameter, fraction)
        for group, _ in decays:
            group["weight_decay"] = 0.0
        try:
            take_step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        with torch.no_grad():
            for place, _, parameter in moving:
                parameter.copy_(before[place].lerp_(parameter, fraction.weights))
                state = optimizer.state[parameter]
                for key, after in list(state.items()):
                    part = fraction.means if key in self._family.means else fraction.step
                    state[key] = self._between(place, key, states[place].get(key), after, part)
        for place, (group, earlier) in enumerate(zip(groups, counters, strict=True)):
            for key, value in earlier.items():
                if group[key] != value:
                    group[key] = self._between(-1 - place, key, value, group[key], fraction.step)

    def _use_joint_square(
        self, state: Mapping[str, Any], group: Mapping[str, Any], parameter: torch.Tensor, fraction: Fraction
    ) -> None:
        family = self._family
        gradient = parameter.grad
        assert gradient is not None
        square = state.get(family.square)
        if family.mean:
            mean = state.get(family.mean)
            weight = 1.0 - group["betas"][0] ** float(state.get("step", 0.0))
        else:
            mean, weight = self._means.get(parameter), self._mean_weights.get(parameter, 0.0)
        if square is not None:
            use_joint_square(square, gradient, mean, weight, family.kept(group), fraction.step)
        if not family.mean:
            if mean is None:
                mean = self._means[parameter] = torch.zeros_like(gradient)
            part = fraction.step * (1.0 - MEAN_DECAY)
            mean.lerp_(gradient, part)
            self._mean_weights[parameter] = weight + part * (1.0 - weight)

    def _between(self, place: int, key: str, before: Any, after: Any, part: float) -> Any:
        """Return the entry of a state that lies at a part of the way from `before` to `after`.

        Counters that are whole numbers move when enough parts have added up.
        """
        if isinstance(after, torch.Tensor) and after.is_floating_point():
            if before is None:
                if not after.dim() and key not in FIRST_VALUES and key != "step":
                    return after
                before = torch.full_like(after, FIRST_VALUES.get(key, 0.0))
            return after.copy_(before.to(after.dtype).lerp_(after, part))
        if isinstance(after, float) and isinstance(before, float):
            return before + part * (after - before)
        if isinstance(after, bool) or not isinstance(after, int | torch.Tensor) or isinstance(before, bool):
            return after
        if isinstance(after, torch.Tensor) and (after.dim() or after.dtype == torch.bool):
            return after
        first, last = int(before or 0), int(after)
        ahead = self._ahead.get((place, key), 0.0) + part * (last - first)
        whole = math.floor(ahead + 1e-9)
        self._ahead[place, key] = ahead - whole
        return after.fill_(first + whole) if isinstance(after, torch.Tensor) else first + whole


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
