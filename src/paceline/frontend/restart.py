"""A computation that may be dropped half-way and started anew, as SpecSync asks.

While a closure runs, hooks ask the session between any two layers whether its computation is to be dropped: before a
module's forward, and when a parameter's gradient is ready. If so, a private exception ends the closure; what it had
changed is given back (the model's buffers, the state of the random generators, gradients that it was accumulating
into); the worker pulls, and the closure runs again on the same batch. A closure that catches `BaseException` delays
this until its end.

Given back are torch's default generator, Python's `random`, and NumPy's global generator if NumPy is there. What a
closure does to anything else, such as a counter or a generator of its own, it does twice.

Full backward hooks are not used: they break modules that work in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .generators import GeneratorStates
from .hooks import remove_after, weakly
from .session import Session

__all__ = ["Restartable"]


class _Dropped(BaseException):
    """Ends a closure. Not an `Exception`, so that a script's own handlers let it through."""


class Restartable:
    """Runs closures, dropping and repeating a computation when the session says so.

    Args:
        model: whose buffers and modules these are.
        parameters: what is trained.
        session: this worker's.
        pulled: called when new weights have come in the middle of an iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[torch.Tensor],
        session: Session,
        pulled: Callable[[], None],
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._session = session
        self._pulled = pulled
        self._before: _Before | None = None  # what to give back; None while no closure runs
        before, after = weakly(self._before_forward), weakly(self._after_gradient)
        hooks = [module.register_forward_pre_hook(before) for module in model.modules()]
        hooks += [p.register_post_accumulate_grad_hook(after) for p in parameters if p.requires_grad]
        remove_after(session, hooks)

    def run(self, closure: Callable[[], Any]) -> Any:
        """Run a closure until it has come to its end; what it returned."""
        while True:
            self._before = _Before(self._model, self._parameters)
            try:
                result = closure()
                if self._session.hold_back(droppable=True):
                    return result
            except _Dropped:
                pass
            finally:
                before, self._before = self._before, None
            before.give_back()
            self._session.pull_again()
            self._pulled()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._before is not None:
            self._before.keep_gradients()
            self._drop_if_ordered()

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        # Without a forward before it, gradients that were there have been added to already, and cannot be given back.
        if self._before is not None and self._before.has_gradients:
            self._drop_if_ordered()

    def _drop_if_ordered(self) -> None:
        if self._session.restart_ordered():
            raise _Dropped


class _Before:
    """What was there before a closure ran.

    Attributes:
        has_gradients: True once it is certain that the gradients can be given back.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._parameters = parameters
        self._gradients: list[torch.Tensor | None] = [None] * len(parameters)
        self._generators = GeneratorStates()
        self.has_gradients = all(parameter.grad is None for parameter in parameters)

    def keep_gradients(self) -> None:
        """Copy those that are there when the first layer begins: the closure may be about to add to them."""
        if not self.has_gradients:
            self._gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
            self.has_gradients = True

    def give_back(self) -> None:
        """Have everything as it was."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._generators.give_back()
