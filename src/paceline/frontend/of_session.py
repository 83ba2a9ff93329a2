"""Values that the front end keeps for each session, and that are freed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from .session import Session

__all__ = ["OfSession"]

Value = TypeVar("Value")


class OfSession(Generic[Value]):
    """A value for each session. It is made when it is first asked for, and exists as long as its session.

    A value may refer to other objects, but not to its session, which would then never be freed.

    Some values are asked for several times in each step. A process usually has one session, so the last session and
    its value are remembered, which is much faster than to look for it.

    Args:
        make: makes the value for a session.
    """

    def __init__(self, make: Callable[[Session], Value]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[Session, Value] = WeakKeyDictionary()
        self._last: tuple[ref[Session], ref[Value]] | None = (
            None  # replaced as a whole, because of other threads
        )

    def __call__(self, session: Session) -> Value:
        """Return the value of a session."""
        if (last := self._last) is not None and last[0]() is session and (value := last[1]()) is not None:
            return value
        value = self._values.get(session)
        if value is None:
            value = self._values.setdefault(session, self._make(session))
        self._last = ref(session), ref(value)
        return value

    def __iter__(self) -> Iterator[Value]:
        """Yield the values of all sessions."""
        return iter(list(self._values.values()))
