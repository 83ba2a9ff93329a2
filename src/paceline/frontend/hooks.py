"""Hooks on a model's parameters and modules, which are removed when the session is freed.

torch stores a tensor's hooks in C++, where Python's garbage collector cannot see them. As long as the tensor exists,
so do all objects to which its hooks refer. If such an object also refers to the tensor, neither is ever freed.
Therefore these hooks hold only weak references to their objects. After a run, no hooks remain on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, finalize

from torch.utils.hooks import RemovableHandle

from .session import Session

__all__ = ["Weakly", "remove_after", "remove_now", "without_hooks"]


class Weakly:
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


def remove_after(session: Session, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks when the session is garbage-collected."""
    added = tuple(handles)
    _handles.setdefault(session, []).extend(added)
    finalize(session, _remove, added).atexit = False


def remove_now(session: Session) -> None:
    """Remove all hooks that would be removed when the session is garbage-collected."""
    _remove(_handles.pop(session, []))


@contextmanager
def without_hooks(session: Session) -> Iterator[None]:
    """Return a context in which the modules have no hooks of this session, so that none is written to a file.

    A file with such a hook could not be read by `torch.load(path, weights_only=True)`.
    """
    removed = []
    for handle in _handles.get(session, ()):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            removed.append((hooks, handle.id, hooks.pop(handle.id)))
    try:
        yield
    finally:
        for hooks, index, hook in removed:
            hooks[index] = hook


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_handles: WeakKeyDictionary[Session, list[RemovableHandle]] = WeakKeyDictionary()
