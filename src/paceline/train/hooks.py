"""Hooks on parameters and on torch's modules, and their uses: computations that can be aborted, and clipping.

The hooks are removed when the session is freed.

torch stores a tensor's hooks in C++, where Python's garbage collector cannot see them. As long as the tensor exists,
so do all objects to which its hooks refer. If such an object also refers to the tensor, the object and the tensor are
never freed. Therefore these hooks hold only weak references to their objects. After a run, no hooks remain on the
model.

A hook that is registered on a module is copied, saved and compiled with the module, but the copy is not trained.
Therefore, a session registers no hooks on modules. Instead, it uses hooks for all modules of the process. Hooks on
parameters are used, because torch does not copy them.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, finalize

import torch
from torch import nn
from torch.nn import utils
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.utils.hooks import RemovableHandle

from ..shard.vectors import squared_norm
from .generator_states import GeneratorStates, generators_lock
from .job_model import JointModel
from .session import OfSession, Session, current


class Weakly:
    """Calls a bound method, or does nothing if the method's object no longer exists."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        if (living := self._reference()) is not None:
            living(*arguments)


class _Watch:
    """Calls methods of the current session for all modules of the process, with one hook for all sessions.

    Args:
        register: torch's function that registers a hook for all modules.
    """

    def __init__(self, register: Callable[[Callable[..., None]], RemovableHandle]) -> None:
        self._register = register
        self._methods = OfSession[OrderedDict[int, Weakly]](lambda _: OrderedDict())
        self._handle: RemovableHandle | None = None  # the hook's handle, if there are methods to call
        self._lock = threading.RLock()  # each session may have a thread of its own

    def add(self, session: Session, method: Callable[..., None]) -> RemovableHandle:
        """Call a bound method whenever a module runs in the session's worker, until the returned handle is removed."""
        with self._lock:
            methods = self._methods(session)
            handle = _WatchHandle(methods)
            handle.watch = self
            methods[handle.id] = Weakly(method)
            if self._handle is None:
                # A compiled module warns that a global hook may be called twice, which is harmless here.
                warnings.filterwarnings(
                    "ignore", message="Using `torch.compile.module.` when there are global hooks"
                )
                self._handle = self._register(self._call)
        remove_after(session, [handle])
        return handle

    def end_if_unused(self) -> None:
        """Remove the hook if no session has a method to call."""
        with self._lock:
            # While the methods are looked at, the garbage collector may free a session and so call this method.
            unused = not any(self._methods)
            if unused and self._handle is not None:
                handle, self._handle = self._handle, None
                handle.remove()

    def _call(self, *arguments: object) -> None:
        # Without this check, torch would compile the calls of the methods, or refuse to compile the module.
        if torch.compiler.is_compiling() or (session := current()) is None:
            return
        for method in tuple(self._methods(session).values()):
            method(*arguments)


class _WatchHandle(RemovableHandle):
    watch: _Watch

    def remove(self) -> None:
        super().remove()
        self.watch.end_if_unused()


def before_each_forward(session: Session, method: Callable[[nn.Module, object], None]) -> RemovableHandle:
    """Call a bound method with each module that is about to run in the session's worker, and with its inputs.

    The method is referenced weakly, and is not called for the parts of a compiled module.

    Returns:
        A handle, with which the method can be removed before the session is freed.
    """
    return _before_forward.add(session, method)


def after_each_forward(session: Session, method: Callable[[nn.Module, object, object], None]) -> None:
    """Call a bound method with each module that has run in the session's worker, and with its inputs and output.

    The method is referenced weakly, and is not called for the parts of a compiled module.
    """
    _after_forward.add(session, method)


def before_each_load(session: Session, method: Callable[[nn.Module], None]) -> None:
    """While the session exists, call a bound method with each module of this process that is about to load weights.

    The method is referenced weakly, and is called for each part of a module that loads a `state_dict`.
    """
    _watch_loading()
    handle = RemovableHandle(_before_loads)
    _before_loads[handle.id] = Weakly(method)
    remove_after(session, [handle])


@functools.cache
def _watch_loading() -> None:
    """Call the hooks in `_before_loads` before any module loads weights. torch has no global hook for this purpose."""
    load = nn.Module._load_from_state_dict

    @functools.wraps(load)
    def load_after_hooks(self: nn.Module, *arguments: Any, **options: Any) -> None:
        for hook in tuple(_before_loads.values()):
            hook(self)
        load(self, *arguments, **options)

    nn.Module._load_from_state_dict = load_after_hooks  # type: ignore[method-assign]


def remove_after(session: Session, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks when the session is garbage-collected."""
    added = tuple(handles)
    _handles.setdefault(session, []).extend(added)
    finalize(session, _remove, added).atexit = False


def remove_now(session: Session) -> None:
    """Remove all hooks that would be removed when the session is garbage-collected."""
    _remove(_handles.pop(session, []))


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_handles: WeakKeyDictionary[Session, list[RemovableHandle]] = WeakKeyDictionary()
_before_forward = _Watch(register_module_forward_pre_hook)
_after_forward = _Watch(register_module_forward_hook)
_before_loads: OrderedDict[int, Weakly] = OrderedDict()


# -- Computations that can be aborted midway and restarted, as SpecSync requires -----------------------------
#
# While a closure runs, hooks repeatedly ask the session whether to abort the computation: before each
# module's `forward()`, and whenever a parameter's gradient is ready. To abort, a hook raises a private
# exception that ends the closure. Then the state from before the closure ran is restored: the model's
# buffers, the states of the random generators, and the gradients to which the closure was adding. The worker
# pulls the new weights, and the closure runs again on the same batch. A closure that catches `BaseException`
# is aborted only when it returns.
#
# A device completes all work that it has been given, even if the closure is aborted meanwhile. So each hook
# first waits until the device has computed everything that was started before the previous hook.
#
# The random generators are torch's default generators (including that of each accelerator in use), Python's
# `random`, and NumPy's global generator if NumPy has been imported. Other side effects of a closure, such as
# incrementing a counter or drawing from another generator, are repeated.
#
# Full backward hooks are not used, because they break modules that modify their inputs in place.


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


# -- Clipping by a worker: the norm of its own gradient, and a watch on the clipping that torch offers -------
#
# `torch.nn.utils.clip_grad_norm_` clips a worker's own gradient, before the servers average it with the
# gradients of other workers. Such clipping is legal, but a script that was written for one process usually
# means to clip the joint gradient. Therefore the function is wrapped during a run: the next push says that
# its gradient was clipped, and the summary of the run mentions the clipping. The wrapper has no other effect.
# Scripts, and libraries such as Lightning, get the wrapper if they look up the function after the run has
# begun.

ORIGINAL = clip_grad.clip_grad_norm_


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of the gradients of all parameters together, in the precision that `l2_norm` uses."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return math.sqrt(sum(squared_norm([each.reshape(-1)]) for each in values))


def watch_clipping() -> None:
    """Wrap torch's function for clipping, so that `take_clipped` notices its calls."""
    _place(_clip)


def unwatch_clipping() -> None:
    """Restore torch's function for clipping."""
    _place(ORIGINAL)


def take_clipped(session: Session) -> bool:
    """Return True if the script has called torch's function since the last call of `take_clipped`."""
    if session not in _clipped:
        return False
    _clipped.remove(session)
    return True


_clipped: WeakSet[Session] = WeakSet()  # sessions whose scripts have clipped the gradient of the next push


@functools.wraps(ORIGINAL)
def _clip(*arguments: Any, **options: Any) -> Any:
    session = current()
    if session is not None:
        _clipped.add(session)
    return ORIGINAL(*arguments, **options)


def _place(function: Callable[..., Any]) -> None:
    # Scripts look up the function in `utils`, and torch itself looks up the function in `clip_grad`.
    for module in (utils, clip_grad):
        vars(module)[ORIGINAL.__name__] = function
