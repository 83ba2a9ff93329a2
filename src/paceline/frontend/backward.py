"""A guess at the loss of a script that logs none: the tensor on which it calls `backward()`.

The function `torch.autograd.backward` is wrapped during a run; `Tensor.backward` calls it as well. The wrapper
changes nothing: it looks at the arguments after the gradients have been computed. What it sees is a guess, and is
shown as one, because the tensor may be a scaled loss or one of several. A wrong loss is worse than none. So nothing
is guessed any more, for the rest of the run, as soon as the script

- calls `backward()` several times between two steps, as with gradient accumulation, whose losses are parts;
- trains several parameter sets, or steps with a closure, whose result is the loss;
- scales a loss with a `GradScaler` (see `loss_scaling.py`).

A call inside of another one, as in activation checkpointing, belongs to the outer one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .first_forward import imitates
from .of_session import OfSession
from .readings import keep, read
from .session import Session, current
from .untraced import untraced

__all__ = ["Guess", "guess_of", "unwatch_backward", "watch_backward"]

BACKWARD = torch.autograd.backward

GUESSING_INTERVAL_S = 0.002
"""Minimum time between two guesses, because the shortest steps are not much longer than what a guess costs."""


class Guess:
    """What the script of one worker has called `backward()` on since its last step.

    Attributes:
        computes: True if the script has begun to compute the gradient of the coming step.
        in_closure: True while the closure of a step runs.
        in_call: True while gradients are computed.
    """

    def __init__(self) -> None:
        self.computes = False
        self.in_closure = False
        self.in_call = False
        self._off = False
        self._calls = 0
        self._calls_outside = 0  # those outside of a closure
        self._loss: float | torch.Tensor | None = None  # of the last call, if it may be a loss
        self._guessed_s = -math.inf

    def give_up(self) -> None:
        """Guess no loss any more."""
        self._off, self._loss = True, None

    def accumulates(self) -> bool:
        """Return True if the gradient of the step that follows is a sum to which its closure has only added.

        Lightning, for example, divides each of the losses of which it accumulates gradients by their number.
        """
        return self._calls_outside > 0

    def take(self, *, usable: bool) -> float | None:
        """Return the loss of the step that follows; None if it cannot be guessed, or was guessed a moment ago.

        Args:
            usable: False if the script trains in a way in which the tensor is not the loss.
        """
        calls, self._calls, self._calls_outside = self._calls, 0, 0
        loss, self._loss = self._loss, None
        if calls > 1 or not usable:
            self.give_up()
        return None if loss is None or self._off else read(loss)

    def note(self, session: Session, *arguments: Any, **options: Any) -> None:
        """Note a call of torch's function by a session's worker, which has computed the gradients."""
        self.computes = True
        self._calls += 1
        self._calls_outside += not self.in_closure
        if self._off:
            return
        self._loss, now_s = None, session.now_s
        if now_s - self._guessed_s >= GUESSING_INTERVAL_S:
            self._loss, self._guessed_s = _loss_of(*arguments, **options), now_s


guess_of = OfSession(lambda _: Guess())
"""Returns what the script of a session's worker has called `backward()` on."""


def watch_backward() -> None:
    """Wrap the function of torch, so that the losses of scripts that log none are guessed."""
    torch.autograd.backward = _backward


def unwatch_backward() -> None:
    """Restore the function of torch."""
    torch.autograd.backward = BACKWARD


def _loss_of(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> float | torch.Tensor | None:
    """Return the loss if the arguments of `torch.autograd.backward` are those for one; else None."""
    if type(tensors) is not torch.Tensor:
        if not isinstance(tensors, Sequence) or len(tensors) != 1 or type(tensors[0]) is not torch.Tensor:
            return None
        tensors = tensors[0]
    if grad_tensors is not None or tensors.numel() != 1:
        return None
    return keep(tensors)


@untraced
@functools.wraps(BACKWARD)
def _backward(*arguments: Any, **options: Any) -> None:
    session = current()
    if session is None or (guess := guess_of(session)).in_call or imitates():
        BACKWARD(*arguments, **options)
        return
    guess.in_call = True
    try:
        BACKWARD(*arguments, **options)
    finally:
        guess.in_call = False
    guess.note(session, *arguments, **options)
