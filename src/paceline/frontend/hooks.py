"""Hooks on a model's parameters and modules, which are removed when the session is freed.

torch stores the hooks of a tensor in C++, where Python's garbage collector does not find them. Every object to which
such a hook refers exists as long as the tensor. If the object also refers to the tensor, neither of them is ever
freed. So the hooks refer to their object weakly. After a run, no hooks are left on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, finalize

from torch.utils.hooks import RemovableHandle

from .session import Session

__all__ = ["remove_after", "weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method while the method's object exists, and does nothing afterwards."""
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
