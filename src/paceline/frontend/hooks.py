"""Hooks on parameters and on torch's modules, which are removed when the session is freed.

torch stores a tensor's hooks in C++, where Python's garbage collector cannot see them. As long as the tensor exists,
so do all objects to which its hooks refer. If such an object also refers to the tensor, neither is ever freed.
Therefore these hooks hold only weak references to their objects. After a run, no hooks remain on the model.

A hook that is registered on a module is copied, saved and compiled with the module, and the copy is not trained.
Therefore no module has a hook of a session. Instead, a hook for all modules of the process is called. torch does not
copy the hooks of parameters.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, finalize

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .of_session import OfSession
from .session import Session, current

__all__ = [
    "Weakly",
    "after_each_forward",
    "before_each_forward",
    "before_each_load",
    "remove_after",
    "remove_now",
]


class Weakly:
    """Calls a bound method, or does nothing if the method's object no longer exists."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        living = self._reference()
        if living is not None:
            living(*arguments)


class _Watch:
    """Calls methods of the current session for all modules of the process, with one hook for all sessions.

    Args:
        register: torch's function that registers a hook for all modules.
    """

    def __init__(self, register: Callable[[Callable[..., None]], RemovableHandle]) -> None:
        self._register = register
        self._methods = OfSession[OrderedDict[int, Weakly]](lambda _: OrderedDict())
        self._handle: RemovableHandle | None = None  # of the hook, if there are methods to call
        self._lock = threading.RLock()  # several sessions may have a thread each

    def add(self, session: Session, method: Callable[..., None]) -> RemovableHandle:
        """Call a bound method while a module runs in the session's worker, until the result is removed."""
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
            handle = self._handle
            if unused and handle is not None:
                self._handle = None
                handle.remove()

    def _call(self, *arguments: object) -> None:
        # torch would compile the calls of the methods, or refuse to compile the module.
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

    The method is referenced weakly. It is not called for the parts of a compiled module.

    Returns:
        A handle, with which the method can be removed before the session is freed.
    """
    return _before_forward.add(session, method)


def after_each_forward(session: Session, method: Callable[[nn.Module, object, object], None]) -> None:
    """Call a bound method with each module that has run in the session's worker, and with its inputs and output.

    The method is referenced weakly. It is not called for the parts of a compiled module.
    """
    _after_forward.add(session, method)


def before_each_load(session: Session, method: Callable[[nn.Module], None]) -> None:
    """While the session exists, call a bound method with each module of this process that is about to load weights.

    The method is referenced weakly. It is called for each part of a module that loads a `state_dict`.
    """
    _watch_loading()
    handle = RemovableHandle(_before_loads)
    _before_loads[handle.id] = Weakly(method)
    remove_after(session, [handle])


@functools.cache
def _watch_loading() -> None:
    """Call the hooks in `_before_loads`, for which torch has no global hook, before any module loads weights."""
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
