"""Hooks on a model's parameters and modules that last as long as a session.

Torch holds a tensor's hooks in C++, where Python's garbage collector does not look. Whatever such a hook refers to
lives as long as the tensor, and if that in turn refers to the tensor, both live for ever. So hooks refer to their
object weakly, and go when the session does: a model that outlives its run is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, finalize

from torch.utils.hooks import RemovableHandle

from .session import Session

__all__ = ["remove_after", "weakly"]


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a bound method as long as its object lives, and does nothing from then on."""
    reference = WeakMethod(method)

    def call(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            living(*arguments)

    return call


def remove_after(session: Session, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks when a session is gone."""
    finalize(session, _remove, tuple(handles)).atexit = False


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
