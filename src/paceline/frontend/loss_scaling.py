"""Scaled losses: what `torch.amp.GradScaler` and `DistributedOptimizer` tell each other.

In mixed precision, a script multiplies its loss by a scale, so that small gradients do not become zero. The gradients
are multiplied by the same scale, so they must be divided by it before they are pushed. Large gradients may overflow
instead; the scaler then lowers its scale. Each worker has a scaler of its own, and the scales may differ.

By itself, `GradScaler.step` calls an optimizer's `step()` only if no gradient has overflowed. Then a worker whose
gradients overflow would make fewer iterations than the others, who would wait for it. But an optimizer that
*supports scaled gradients* is called in any case. The scaler sets two of its attributes during the call:

- `grad_scale`: the scale by which the gradients must be divided. It is missing or None if the script has called
  `GradScaler.unscale_`, which has divided them already.
- `found_inf`: a number greater than 0 if a gradient contains NaN or inf.

Between the script's calls of `scale` and `update`, the gradients are scaled, except those of optimizers for which it
has called `unscale_`. These three methods are wrapped during a run, so that methods that look at gradients before the
step know their scale. The wrappers change nothing else. What is pushed does not depend on them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.amp import GradScaler

from ..core.protocol.messages import Warned
from ..core.protocol.requests import COORDINATOR, Send
from .backward import guess_of
from .of_session import OfSession
from .session import Session, current

__all__ = [
    "OverflowWatch",
    "Scales",
    "Scaling",
    "lent_scaling",
    "scales_of",
    "scaling_of",
    "unscale",
    "unwatch_scalers",
    "watch_scalers",
]


TOLD = "grad_scale", "found_inf"
"""The attributes that a scaler sets while it calls `step()`."""


class Scaling(NamedTuple):
    """What a scaler tells an optimizer whose `step()` it calls.

    Attributes:
        scale: the scale by which the gradients must be divided.
        overflows: True if a gradient contains NaN or inf.
    """

    scale: float
    overflows: bool


def scaling_of(optimizer: torch.optim.Optimizer) -> Scaling | None:
    """Return what a scaler tells an optimizer; None unless a scaler is calling the optimizer's `step()`."""
    told = vars(optimizer)
    if "found_inf" not in told:
        return None
    scale = told.get("grad_scale")
    return Scaling(1.0 if scale is None else float(scale), bool(told["found_inf"]))


@contextmanager
def lent_scaling(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context in which a wrapped optimizer has the attributes that a scaler has set in its wrapper."""
    told: dict[str, Any] = {name: vars(optimizer)[name] for name in TOLD if name in vars(optimizer)}
    vars(wrapped).update(told)
    try:
        yield
    finally:
        for name in told:
            del vars(wrapped)[name]


@torch.no_grad()
def unscale(parameters: Iterable[torch.Tensor], scale: float) -> None:
    """Divide the gradients of the parameters by a scale, in place, as `GradScaler.unscale_` does."""
    if scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.detach().mul_(1.0 / scale)


log = logging.getLogger("paceline.frontend.loss_scaling")

MOST_OVERFLOWS = 32
"""Number of steps in a row whose gradients may overflow before it is said. By then, a scale of 2**16 is 2**-16."""

ALWAYS_OVERFLOWS = (
    f"the gradients have overflowed in {MOST_OVERFLOWS} steps in a row, although the GradScaler has lowered its "
    "scale each time. So the weights, the data or the loss contain NaN or inf. Log the loss; if all workers say "
    "this, lower the learning rate"
)
"""Warning about a worker whose gradients overflow whatever the scale is."""


class OverflowWatch:
    """Warns once if the gradients of one optimizer overflow in each of many steps in a row.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._in_a_row = 0
        self._said = False

    def look(self, *, overflows: bool) -> None:
        """Record whether the gradients of a step overflow."""
        self._in_a_row = self._in_a_row + 1 if overflows else 0
        if self._in_a_row == MOST_OVERFLOWS and not self._said:
            self._said = True
            log.warning("%s", ALWAYS_OVERFLOWS)
            self._session.exchange(lambda: [Send(COORDINATOR, Warned(ALWAYS_OVERFLOWS))])


class Scales:
    """What the script of one worker has scaled.

    Attributes:
        used: True if the script has scaled a loss.
        scaler: the scaler that the script has used last; None if the script has called its `update` since.
        unscaled: the `id` of each parameter whose gradient the script has unscaled since.
        resumed: the states with which the next scalers begin, if the script goes on from an earlier run.
    """

    def __init__(self) -> None:
        self.used = False
        self.scaler: GradScaler | None = None
        self.unscaled: set[int] = set()
        self.resumed: list[dict[str, Any]] = []
        self._scalers: list[ref[GradScaler]] = []

    def scale(self, scaler: GradScaler) -> None:
        """Record that the script scales a loss. The scaler's state is replaced if it is used for the first time."""
        self.used, self.scaler = True, scaler
        if all(each() is not scaler for each in self._scalers):
            self._scalers.append(ref(scaler))
            if self.resumed:
                scaler.load_state_dict(self.resumed.pop(0))

    def resume(self, states: Sequence[dict[str, Any]]) -> None:
        """Let the scalers go on from the states that `states` has returned in an earlier run."""
        scalers = [scaler for each in self._scalers if (scaler := each()) is not None]
        for scaler, state in zip(scalers, states, strict=False):
            scaler.load_state_dict(state)
        self.resumed = list(states[len(scalers) :])

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each scaler, in the order in which the script has used them first."""
        return [scaler.state_dict() for each in self._scalers if (scaler := each()) is not None]

    def of(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the scale of the parameters' gradients; 1.0 if they are not scaled, as far as it is known."""
        if self.scaler is None or any(id(each) in self.unscaled for each in parameters):
            return 1.0
        return float(self.scaler.get_scale())


scales_of = OfSession(lambda _: Scales())
"""Returns what the script of a session's worker has scaled."""

SCALE, UNSCALE, UPDATE = GradScaler.scale, GradScaler.unscale_, GradScaler.update


def watch_scalers() -> None:
    """Wrap the methods of scalers, so that the scale of a gradient is known, and no scaled loss is shown."""
    _place(_scale, _unscale, _update)


def unwatch_scalers() -> None:
    """Restore the methods of scalers."""
    _place(SCALE, UNSCALE, UPDATE)


def _place(*methods: Callable[..., Any]) -> None:
    GradScaler.scale, GradScaler.unscale_, GradScaler.update = methods  # type: ignore[method-assign]


@functools.wraps(SCALE)
def _scale(self: GradScaler, outputs: Any) -> Any:
    if self.is_enabled() and (session := current()) is not None:
        scales_of(session).scale(self)
        guess_of(session).give_up()
    return SCALE(self, outputs)


@functools.wraps(UNSCALE)
def _unscale(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    UNSCALE(self, optimizer)
    if (session := current()) is not None:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        scales_of(session).unscaled.update(map(id, parameters))


@functools.wraps(UPDATE)
def _update(self: GradScaler, *arguments: Any, **options: Any) -> None:
    UPDATE(self, *arguments, **options)
    if (session := current()) is not None:
        scales = scales_of(session)
        scales.scaler = None
        scales.unscaled.clear()
