"""Hooks on a model's parameters and modules, which are removed when the session is freed.

torch stores a tensor's hooks in C++, where Python's garbage collector cannot see them. As long as the tensor exists,
so do all objects to which its hooks refer. If such an object also refers to the tensor, neither is ever freed.
Therefore these hooks hold only weak references to their objects. After a run, no hooks remain on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, finalize

from torch.utils.hooks import RemovableHandle

from .session import Session

__all__ = ["remove_after", "weakly"]


class _Weakly:
    """Calls a bound method, or does nothing if the method's object no longer exists.

    A copy of a model, in memory or in a file, does not belong to the run. Its hooks do nothing, and a file that
    contains them can be read without Paceline.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        living = self._reference()
        if living is not None:
            living(*arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return getattr, ("", "format")  # the copy is `"".format`, which ignores its arguments


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method, or does nothing if the method's object no longer exists."""
    return _Weakly(method)


def remove_after(session: Session, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks when the session is garbage-collected."""
    finalize(session, _remove, tuple(handles)).atexit = False


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
