"""Computations that can be aborted midway and restarted, as SpecSync requires.

While a closure runs, hooks repeatedly ask the session whether to abort the computation: before each module's
`forward()`, and whenever a parameter's gradient is ready. To abort, a hook raises a private exception that ends the
closure. Then the state from before the closure ran is restored: the model's buffers, the states of the random
generators, and the gradients to which the closure was adding. The worker pulls the new weights, and the closure runs
again on the same batch. A closure that catches `BaseException` is aborted only when it returns.

A device computes what it has been given, even if the closure is aborted meanwhile. So each hook first waits until the
device has computed what was started before the last hook.

The random generators are torch's default ones, that of each accelerator that is in use included, Python's `random`,
and NumPy's global one if NumPy has been imported.
Other side effects of a closure, such as incrementing a counter or drawing from another generator, are repeated.

Full backward hooks are not used, because they break modules that modify their inputs in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .generator_states import GeneratorStates, generators_lock
from .hooks import Weakly, before_each_forward, remove_after
from .joint_model import JointModel
from .session import Session

__all__ = ["Restartable"]


class _Aborted(BaseException):
    """Raised to end a closure. This is a `BaseException`, so that a script's `except Exception` does not catch it."""


class Restartable:
    """Runs closures, and aborts and restarts them on orders from the session.

    Args:
        model: the model that the closures use.
        parameters: the trained parameters.
        session: this worker's session.
        keep_close: function that waits for the device (see `Stager.keep_close`).
        pulled: function that is called after new weights have been pulled for a restart.
    """

    def __init__(
        self,
        model: nn.Module | JointModel,
        parameters: Sequence[torch.Tensor],
        session: Session,
        keep_close: Callable[[], None],
        pulled: Callable[[], None],
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._session = session
        self._keep_close = keep_close
        self._pulled = pulled
        self._before: _Before | None = None  # the state to restore; None while no closure runs
        before_each_forward(session, self._before_forward)
        after = Weakly(self._after_gradient)
        remove_after(
            session, [p.register_post_accumulate_grad_hook(after) for p in parameters if p.requires_grad]
        )

    def run(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, restarting it after each abort, and return its result."""
        while True:
            self._before = _Before(self._model, self._parameters)
            try:
                result = closure()
                if self._session.hold_back(droppable=True):
                    return result
            except _Aborted:
                pass
            finally:
                before, self._before = self._before, None
            before.restore()
            self._session.pull_again()
            self._pulled()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if self._before is not None:
            self._before.keep_gradients()
            self._abort_if_ordered()

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        # Existing gradients are copied when the first module runs. Until then, do not abort the computation: there
        # would be no copies from which to restore the gradients.
        if self._before is not None and self._before.has_gradients:
            self._abort_if_ordered()

    def _abort_if_ordered(self) -> None:
        self._keep_close()
        if self._session.restart_ordered():
            raise _Aborted


class _Before:
    """The buffers, gradients and generator states from before a closure runs, to be restored after an abort.

    Attributes:
        has_gradients: True if the gradients can be restored.
    """

    def __init__(self, model: nn.Module | JointModel, parameters: Sequence[torch.Tensor]) -> None:
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._parameters = parameters
        self._gradients: list[torch.Tensor | None] = [None] * len(parameters)
        with generators_lock:
            self._generators = GeneratorStates()
        self.has_gradients = all(parameter.grad is None for parameter in parameters)

    def keep_gradients(self) -> None:
        """Copy the existing gradients before the first module runs, because the closure may add to them."""
        if not self.has_gradients:
            self._gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
            self.has_gradients = True

    def restore(self) -> None:
        """Restore the buffers, the gradients and the random generators."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        with generators_lock:
            self._generators.give_back()
