"""Notices the first forward pass in which a script uses given parameters to compute gradients.

Workers must have the same weights before they compute their first gradients. Until then, a script may edit its weights,
and may wrap or compile its model. A script may also call only a part of the model. So a hook on one module would not be
enough. Instead, a *global* hook of torch is called before every module's `forward()`, and is removed as soon as it has
seen the pass that it waits for. A model that is copied, saved or compiled before training therefore contains no hook.

A *dispatch mode* of torch sees each operation. Most modes carry the operations out, such as CUDA's sanitizer and
`FlopCounterMode`, and a pass in such a mode counts like any other. A few modes of torch itself only record the
operations or imitate their results.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from .session import OfSession, Session, current

IMITATING = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
"""The kinds of dispatch modes that do not carry out the operations, as for `make_fx` and `FakeTensorMode`."""


def builds_graph(session: Session) -> bool:
    """Return True if operations of this session's worker are now recorded in a graph that `backward()` can use."""
    return torch.is_grad_enabled() and computes(session)


def can_compute_gradients(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module is about to run in this session's worker, and may compute gradients of the parameters.

    Passes without gradients do not count. Passes in which torch compiles, traces or imitates operations do not count,
    either, because torch would record that the weights are replaced.
    """
    return builds_graph(session) and _holds(module, parameters)


def may_look(session: Session, module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if a module with one of the parameters is about to run in this worker, without gradients."""
    return not torch.is_grad_enabled() and computes(session) and _holds(module, parameters)


def computes(session: Session) -> bool:
    """Return True if torch carries out this worker's operations, instead of compiling, tracing or imitating them."""
    if torch.compiler.is_compiling() or current() is not session:
        return False
    return torch._C._get_tracing_state() is None and not imitates()


def imitates() -> bool:
    """Return True if a dispatch mode records or imitates operations instead of carrying them out."""
    return _get_current_dispatch_mode() is not None and any(map(torch._C._get_dispatch_mode, IMITATING))


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Return a context whose operations no dispatch mode and no transform of `torch.func` sees.

    For example, selective activation checkpointing counts the operations of a forward pass, and must find the same
    operations when it repeats the pass. `torch.func.jacrev` refuses a function that changes the weights.
    """
    with temporarily_clear_interpreter_stack(), ExitStack() as modes:
        while _get_current_dispatch_mode() is not None:
            modes.enter_context(_pop_mode_temporarily())
        yield


def _holds(module: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    held = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in held for parameter in parameters)


# -- A guess at the loss of a script that logs none: the tensor on which it calls `backward()` ---------------
#
# The function `torch.autograd.backward` is wrapped during a run; `Tensor.backward` calls it as well. After
# the gradients have been computed, the wrapper looks at the arguments, and does nothing else. The loss that
# the wrapper finds is a guess, and is shown as a guess, because the tensor on which `backward()` is called
# may be a scaled loss or one of several losses. A wrong loss is worse than no loss. So guessing ends, for the
# rest of the run, as soon as the script
#
# - calls `backward()` several times between two steps, as with gradient accumulation, where each loss is only a part;
# - trains several parameter sets, or passes a closure to `step()`, so that the closure's result is the loss;
# - scales a loss with a `GradScaler` (see `gradients.py`).
#
# A call inside of another call, as in activation checkpointing, belongs to the outer call.

BACKWARD = torch.autograd.backward

GUESSING_INTERVAL_S = 0.002
"""Minimum time between two guesses, because a guess takes almost as long as the shortest steps."""


class Guess:
    """The calls of `backward()` that the script of one worker has made since its last step.

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
        self._calls_outside = 0  # number of calls outside of a closure
        self._loss: float | torch.Tensor | None = None  # the tensor of the last call, if it may be a loss
        self._guessed_s = -math.inf

    def give_up(self) -> None:
        """End guessing."""
        self._off, self._loss = True, None

    def accumulates(self) -> bool:
        """Return True if the gradient of the coming step is a sum of which the step's closure has computed only a part.

        The result of the closure is then not the loss. For example, Lightning divides each loss whose gradient it
        accumulates by the number of these losses.
        """
        return self._calls_outside > 0

    def take(self, *, usable: bool) -> float | None:
        """Return the loss of the coming step; None if it cannot be guessed, or if the last guess was a moment ago.

        Args:
            usable: False if the tensor on which the script calls `backward()` is not the loss.
        """
        calls, self._calls, self._calls_outside = self._calls, 0, 0
        loss, self._loss = self._loss, None
        if calls > 1 or not usable:
            self.give_up()
        return None if loss is None or self._off else read(loss)

    def note(self, session: Session, *arguments: Any, **options: Any) -> None:
        """Record that a session's worker has called `torch.autograd.backward`, which has computed the gradients."""
        self.computes = True
        self._calls += 1
        self._calls_outside += not self.in_closure
        if self._off:
            return
        self._loss, now_s = None, session.now_s
        if now_s - self._guessed_s >= GUESSING_INTERVAL_S:
            self._loss, self._guessed_s = _loss_of(*arguments, **options), now_s


guess_of = OfSession(lambda _: Guess())
"""Returns the calls of `backward()` that the script of a session's worker has made."""


def watch_backward() -> None:
    """Wrap `torch.autograd.backward`, so that the loss is guessed if a script logs no loss."""
    torch.autograd.backward = _backward


def unwatch_backward() -> None:
    """Restore `torch.autograd.backward`."""
    torch.autograd.backward = BACKWARD


def _loss_of(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> float | torch.Tensor | None:
    """Return the loss if the arguments of `torch.autograd.backward` are those for a single loss; else None."""
    if type(tensors) is not torch.Tensor:
        if not isinstance(tensors, Sequence) or len(tensors) != 1 or type(tensors[0]) is not torch.Tensor:
            return None
        tensors = tensors[0]
    if grad_tensors is not None or tensors.numel() != 1:
        return None
    return keep(tensors)


# -- Keeps `torch.compile` from tracing functions that talk to servers ---------------------------------------
#
# If a script compiles a function that calls `backward()` and `step()`, torch would also trace the functions
# that `backward()` and `step()` call. Tracing these functions would take half a minute, and would lead only
# to graph breaks. Instead, the graph ends before the call, and a new graph begins after the call. torch does
# the same at those of its own methods that are not traced.
#
# `torch.compiler.disable` imports `torch._dynamo`, which takes as long as importing torch. Nothing is traced
# before something else has imported `torch._dynamo`, so `disable` is called only then.


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that does the same as `function`, but is not traced by `torch.compile`."""
    called = function

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        nonlocal called
        if called is function and "torch._dynamo" in sys.modules:
            called = torch.compiler.disable(function)
        return called(*arguments, **options)

    return call


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


# -- Values of tensors that are read later, so that the script does not wait for a device now ----------------


def keep(tensor: torch.Tensor) -> float | torch.Tensor:
    """Return the number in a tensor of one element. If the tensor is not on the CPU, return a copy on its device.

    Raises:
        RuntimeError: the number cannot be read.
    """
    if _is_at_hand(tensor):
        return float(tensor.item())
    return tensor.detach().clone()


def read(kept: float | torch.Tensor) -> float:
    """Return the number that `keep` has kept."""
    return float(kept.item()) if isinstance(kept, torch.Tensor) else kept


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Return True if a tensor can be read without waiting, or cannot be copied in the ordinary way."""
    return tensor.is_cpu or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
