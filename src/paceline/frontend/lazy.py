"""Parameters and buffers that get their shape in the first forward pass.

Examples are the parameters of lazy modules, such as `torch.nn.LazyLinear`, and the buffers of observers for
quantization, which are empty before. Training begins with tensors that have shapes. So an optimizer that trains such
a model does not begin with its first forward pass, but with the step that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError

__all__ = ["any_empty_buffer", "any_lazy", "initialize", "require_initialized"]


def any_lazy(parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if some of the parameters have no shape yet."""
    return any(map(is_lazy, parameters))


def any_empty_buffer(models: Iterable[nn.Module]) -> bool:
    """Return True if some of the modules have a buffer without elements, whose shape the forward pass may set."""
    buffers = (buffer for model in models for buffer in model.buffers())
    return any(is_lazy(buffer) or buffer.numel() == 0 for buffer in buffers)


def initialize(models: Sequence[nn.Module], closure: Callable[[], object]) -> None:
    """Run a closure once for its forward pass, which initializes lazy parameters.

    The closure runs in evaluation mode, so it does not change running statistics, and dropout draws no numbers. Its
    gradients are discarded.
    """
    parts = {module: module.training for model in models for module in model.modules()}
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    for model in models:
        model.eval()
    try:
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            closure()
    finally:
        for module, training in parts.items():
            module.training = training
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def require_initialized(models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
    """Check that the parameters of an optimizer have shapes, because it takes a step.

    Raises:
        UsageError: a parameter has no shape.
    """
    lazy = {id(parameter) for parameter in parameters if is_lazy(parameter)}
    if not lazy:
        return
    names = [name for model in models for name, value in model.named_parameters() if id(value) in lazy]
    raise UsageError(
        f"Parameter {names[0] if names else ''!r} has no shape yet, because its lazy module has not run before the "
        "first step(). Run a forward pass of the whole model before the first step, for example "
        "`with torch.no_grad(): model(inputs)`."
    )
