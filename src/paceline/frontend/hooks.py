"""Hooks on a model's parameters and modules that last as long as a session.

Torch holds the hooks of a tensor in C++, out of reach of Python's garbage collector. Everything that such a hook
refers to lives as long as the tensor; if it refers to the tensor in turn, neither is ever freed. So these hooks refer
to their object weakly, and are removed with the session: a model that outlives its run has no hooks left on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, finalize

from torch.utils.hooks import RemovableHandle

from .session import Session

__all__ = ["remove_after", "weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method while its object is alive, and does nothing afterwards."""
    reference = WeakMethod(method)

    def call(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            living(*arguments)

    return call


def remove_after(session: Session, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks when the session is garbage-collected."""
    finalize(session, _remove, tuple(handles)).atexit = False


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
