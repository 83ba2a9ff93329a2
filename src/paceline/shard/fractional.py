"""Takes a fraction of an optimizer's step: see `paceline.sync.translation` for the reasons, and for the terms.

`FractionalSteps`  for any torch optimizer: takes a whole step, and then moves the weights and the state back to
                   the fraction. It knows nothing of what the optimizer computes, except which entries of its
                   state are averages of the gradient, and which is the running mean of squares (`FAMILIES`).
`sgd_kernel`, `adam_kernel`  compute the same directly on chunks of flat vectors, without copies of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..sync.translation import Family, Fraction

__all__ = ["FractionalSteps", "adam_kernel", "sgd_kernel"]

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


def sgd_kernel(
    settings: Mapping[str, Any], steps: float, fraction: Fraction, scratch: Callable[[str], torch.Tensor]
) -> Kernel:
    """Return the kernel of a fraction of a step of SGD. See `adam_kernel` for the arguments.

    A whole step computes the velocity v = m u + (1 - d) g, and moves the weights by -h v, or by -h (g + m v) with
    Nesterov's momentum. Both are -h (a g + b u).
    """
    momentum, damped = settings["momentum"], 1.0 - settings["dampening"]
    if not momentum:
        a, b = 1.0, 0.0
    elif settings["nesterov"]:
        a, b = 1.0 + momentum * damped, momentum**2
    else:
        a, b = damped, momentum
    distance = fraction.weights * settings["lr"]
    sign = -1.0 if settings["maximize"] else 1.0
    decay = settings["weight_decay"]

    def take(weights: torch.Tensor, gradient: torch.Tensor, *velocity: torch.Tensor) -> None:
        if decay:
            gradient = torch.add(
                gradient, weights, alpha=sign * decay, out=scratch("gradient")[: weights.numel()]
            )
        for each in velocity:
            weights.add_(each, alpha=-distance * b)
            each.mul_(1.0 - fraction.means * (1.0 - momentum)).add_(
                gradient, alpha=sign * fraction.means * damped
            )
        weights.add_(gradient, alpha=-distance * sign * a)

    return take


def adam_kernel(
    settings: Mapping[str, Any], steps: float, fraction: Fraction, scratch: Callable[[str], torch.Tensor]
) -> Kernel:
    """Return the kernel of a fraction of a step of Adam or AdamW.

    torch's kernel moves the weights by the mean of a whole step, and leaves this mean, of which the fraction is taken
    afterwards. It corrects no bias here, because the numbers of steps differ between the two averages; the learning
    rate and epsilon do so instead.

    Args:
        settings: the hyper-parameters.
        steps: number of joint steps that were taken before.
        fraction: the fraction.
        scratch: returns memory for a copy of a chunk, by the name of the copy.
    """
    beta1, beta2 = settings["betas"]
    coupled = coupled_decay(settings)
    rest = {"eps": settings["eps"], "amsgrad": settings["amsgrad"], "maximize": settings["maximize"]}
    root = math.sqrt(1.0 - beta2 ** (steps + fraction.step))
    correction = root / (1.0 - beta1 ** (steps + 1.0))
    lr = fraction.weights * settings["lr"] * correction
    rest["eps"] *= root
    # torch multiplies the weights by 1 - lr * weight_decay, with the corrected rate that it is given.
    decoupled = 0.0 if coupled else settings["weight_decay"] / correction
    kept = 1.0 - fraction.step * (1.0 - beta2)
    mean_weight = 1.0 - beta1**steps

    def take(
        weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, *squares: torch.Tensor
    ) -> None:
        count = weights.numel()
        if coupled:
            gradient = torch.add(gradient, weights, alpha=coupled, out=scratch("gradient")[:count])
        square, *most = squares
        use_joint_square(square, gradient, mean, mean_weight, kept, fraction.step)
        earlier = scratch("mean")[:count].copy_(mean)
        torch._fused_adamw_(
            [weights],
            [gradient],
            [mean],
            [square],
            most,
            [LATE],
            lr=lr,
            beta1=beta1,
            beta2=kept,
            weight_decay=decoupled,
            **rest,
        )
        torch.lerp(earlier, mean, fraction.means, out=mean)

    return take


LATE = torch.tensor(1e9)
"""Number of steps after which the bias of an average is negligible, if its decay is below 1 - 1e-7."""


class FractionalSteps:
    """Takes fractions of the steps of a torch optimizer.

    Args:
        family: the family of the optimizer.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        # (where, key) -> the part of a step by which a counter, which is a whole number, is ahead
        self._ahead: dict[tuple[int, str], float] = {}
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
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
        before = {place: self._saved(place, "", parameter.detach()) for place, _, parameter in moving}
        states = {
            place: {
                key: self._saved(place, key, value)
                for key, value in optimizer.state.get(parameter, {}).items()
            }
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

    def _saved(self, place: int, key: str, value: Any) -> Any:
        """Return a copy of an entry of the state, in memory that is used again for the next step."""
        if not isinstance(value, torch.Tensor):
            return value
        copy = self._copies.get((place, key))
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._copies[place, key] = torch.empty_like(value)
        return copy.copy_(value)

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
