"""LARS (layer-wise adaptive rate scaling), the optimizer that FluentPS uses.

LARS needs the norms of whole tensors, but a server holds only slices. In a distributed run, each worker therefore
computes the scaled gradient d (see `LARS`) from the weights that it has pulled, and pushes d instead of the gradient.
The servers run momentum SGD, which updates each element independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch

from ..errors import ConfigurationError
from .vectors import l2_norm

Loss = TypeVar("Loss", float, torch.Tensor)


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (LARS): momentum SGD with a local learning rate for each parameter tensor.

    For each parameter tensor with weights w and gradient g,

        local  = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps);  1 where |w| or |g| is 0
        d      = local * (g + weight_decay * w)
        v      = momentum * v + d
        w      = w - lr * v;  with Nesterov momentum w - lr * (d + momentum * v)

    as in "Large batch training of convolutional networks" (You, Gitman and Ginsburg, 2017), with two deviations.
    First, lr multiplies the velocity v, as in `torch.optim.SGD`, whereas the paper multiplies d by lr. The results
    are the same while lr is constant. Second, eps is added to the denominator of the local rate.

    LARS can be used alone, like any torch optimizer, or inside `DistributedOptimizer`. Inside `DistributedOptimizer`
    under BSP, the update is momentum SGD with the mean of the workers' scaled gradients d. With one worker, this update
    is exactly LARS. With several workers, it differs from LARS on the joint batch, because each worker uses the norm of
    its own gradient. After `DistributedOptimizer.step()`, `p.grad` may contain d instead of the gradient, so clear the
    gradients before each backward pass, as usual. If LARS is used alone, it does not change `p.grad`.

    Args:
        params: parameters to optimize, or dicts that define parameter groups. Gradients may be dense or sparse;
            parameters without a gradient are not changed.
        lr: global learning rate. May change between steps.
        momentum: momentum factor, in [0, 1). Default: 0.9.
        weight_decay: factor of the L2 penalty, also used in the local rate. Default: 0.
        trust_coefficient: factor in the local rate, called eta in the paper. Default: 1e-3.
        eps: term added to the denominator of the local rate for numerical stability. Default: 1e-8.
        nesterov: True to use Nesterov momentum, which requires a momentum > 0. Default: False.

    Raises:
        ConfigurationError: a hyper-parameter is out of range.

    Example:
        >>> import paceline, torch
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = paceline.LARS([weight], lr=1.0, trust_coefficient=0.1, eps=0.0)
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
        """Add a group of parameters.

        Args:
            param_group: dict with the parameters ("params") and the hyper-parameters that differ from the defaults.

        Raises:
            ConfigurationError: a hyper-parameter is out of range.
        """
        settings = {**self.defaults, **param_group}
        for name in ("lr", "momentum", "weight_decay", "trust_coefficient", "eps"):
            if not settings[name] >= 0:
                raise ConfigurationError(f"{name} is {settings[name]}, expected a number >= 0.")
        if settings["momentum"] >= 1:
            raise ConfigurationError(f"momentum is {settings['momentum']}, expected a number in [0, 1).")
        if settings["nesterov"] and not settings["momentum"]:
            raise ConfigurationError(
                "nesterov is True but momentum is 0: Nesterov momentum requires a momentum > 0."
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: optional function that recomputes the gradients and returns the loss.

        Returns:
            The result of the closure; None if there is no closure.
        """
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
        """Replace each gradient with the scaled gradient d, in place. A worker calls this method before each push."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.copy_(scaled_gradient(parameter, group))


def scaled_gradient(parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the scaled gradient d of a parameter as a new dense tensor with the parameter's shape and dtype."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    decay = float(group["weight_decay"])
    # On the CPU, `l2_norm` computes in double precision, because the square of a large gradient overflows in single
    # precision.
    weights_norm = l2_norm(parameter)
    gradient_norm = l2_norm(gradient)
    local = 1.0
    if weights_norm and gradient_norm:
        below = gradient_norm + decay * weights_norm + float(group["eps"])
        local = float(group["trust_coefficient"]) * weights_norm / below
    return gradient.add(parameter, alpha=decay).mul_(local) if decay else gradient.mul(local)
