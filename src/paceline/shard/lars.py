"""LARS: a learning rate for each layer, in proportion to its weights and against its gradient.

Layer-wise adaptive rate scaling, from You, Gitman and Ginsburg, "Large batch training of convolutional networks"
(2017), which FluentPS trains with. For each parameter tensor, with its weights w and gradient g, L2 norms |.|,

    local  = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps);  1 where |w| or |g| is 0
    d      = local * (g + weight_decay * w)
    v      = momentum * v + d
    w      = w - lr * v;  with Nesterov's momentum w - lr * (d + momentum * v)

Norms are of whole tensors, and a server holds slices. So in a run each worker computes d, on the weights that it has
pulled, and pushes that in place of g; the servers run momentum SGD, which is element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch

from ..errors import ConfigurationError

__all__ = ["LARS"]

Loss = TypeVar("Loss", float, torch.Tensor)


class LARS(torch.optim.Optimizer):
    """Momentum SGD with a rate of its own for each parameter tensor. See the module for the formula.

    Works by itself, as any optimizer of torch, and in a `DistributedOptimizer`. There, under BSP, an iteration is
    the mean over the workers of each worker's own scaled gradient, then momentum SGD. With one worker that is
    exactly LARS; with several it is not LARS on the joint batch, whose gradient no worker knows: each scales by the
    norm of its own. After `step()` in a run `p.grad` may hold the scaled gradient d; by itself LARS leaves `p.grad`
    alone. Clear the gradients before each backward pass, as usual.

    Args:
        params: tensors, or groups of them, dense or with sparse gradients. A gradient of None: left alone.
        lr: the global rate; may change from step to step.
        momentum: in [0, 1).
        weight_decay: L2, inside the local rate and in d.
        trust_coefficient: the paper's eta: how far a layer trusts its own norms.
        eps: added below the fraction.
        nesterov: Nesterov's momentum; needs a momentum.

    Raises:
        ConfigurationError: a value out of its range, by name.

    Deviations from the paper: lr multiplies the velocity where the weights change, as in `torch.optim.SGD`, and not
    what enters it (the same, while lr is constant); there is an eps.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1, eps=0.0)
        >>> weight.grad = torch.tensor([0.0, 2.0])
        >>> optimizer.step()  # |w| is 5 and |g| is 2: the local rate is 0.25
        >>> weight.tolist()
        [3.0, 3.5]
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; torch's constructor does so with each one."""
        settings = {**self.defaults, **param_group}
        for name in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps"):
            if not settings[name] >= 0:
                raise ConfigurationError(f"{name} is {settings[name]}, expected a number of at least 0.")
        if settings["momentum"] >= 1:
            raise ConfigurationError(f"momentum is {settings['momentum']}, expected a number in [0, 1).")
        if settings["nesterov"] and not settings["momentum"]:
            raise ConfigurationError("nesterov is True and momentum 0: Nesterov's momentum needs one.")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what the closure did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                change = scaled_gradient(parameter, group)
                if momentum:
                    velocity = self.state[parameter].get("momentum_buffer")
                    if velocity is None:
                        velocity = self.state[parameter]["momentum_buffer"] = change.clone()
                    else:
                        velocity.mul_(momentum).add_(change)
                    change = change.add(velocity, alpha=momentum) if group["nesterov"] else velocity
                parameter.add_(change, alpha=-float(group["lr"]))
        return loss

    @torch.no_grad()
    def scale_gradients(self) -> None:
        """Replace each gradient by d, in place: what a worker does before it pushes."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.copy_(scaled_gradient(parameter, group))


def scaled_gradient(parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """d of the formula for one parameter that has a gradient: dense, in new memory, like the parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    decay = float(group["weight_decay"])
    # In double precision: the square of a large gradient would overflow single, let alone half.
    weights_norm = float(torch.linalg.vector_norm(parameter, dtype=torch.float64))
    gradient_norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    local = 1.0
    if weights_norm and gradient_norm:
        below = gradient_norm + decay * weights_norm + float(group["eps"])
        local = float(group["trust_coefficient"]) * weights_norm / below
    return gradient.add(parameter, alpha=decay).mul_(local) if decay else gradient.mul(local)
