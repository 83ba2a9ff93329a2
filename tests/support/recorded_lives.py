"""Lives of cores: everything that a host calls and sets, so that it can be called and set again at other cores.

`recorded` records the lives of all workers, servers and coordinators that are made meanwhile, for example by a
simulation. Whatever their hosts do is legal, so each life is a legal one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from paceline.core.coordinator import Coordinator
from paceline.core.data_feed import DataFeed
from paceline.core.guard import Guard
from paceline.core.lease import DrawnBatch
from paceline.core.messages import Message
from paceline.core.server import Server
from paceline.core.worker import Worker

__all__ = ["Call", "Core", "Life", "recorded", "result_of"]

Core = Worker | Server | Coordinator

TOUCHED = (Worker, Server, Coordinator, DataFeed, DrawnBatch)
"""The classes of which hosts call methods and set attributes."""


class Call(NamedTuple):
    """Something that a host has done to a core.

    Attributes:
        part: names of the attributes that lead from the core to the object that was called.
        name: name of the method, or of the attribute that was set.
        arguments: arguments of the method; None if an attribute was set.
        value: what the method has returned or raised, or the value that was set.
    """

    part: tuple[str, ...]
    name: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None
    value: Any

    @property
    def kind(self) -> tuple[object, ...]:
        """What is called, the types of the arguments, and what a message contains."""
        found: list[object] = [*self.part, self.name]
        for argument in self.arguments[0] if self.arguments is not None else ():
            found.append(type(argument))
            if isinstance(argument, Message):
                contents = {name: getattr(argument, name) for name in argument.__struct_fields__}
                found += [
                    name for name, each in contents.items() if each and not isinstance(each, int | float)
                ]
        return tuple(found)

    def repeat(self, core: Core) -> Any:
        """Do the same to another core, and return what this has returned or raised."""
        thing: Any = functools.reduce(getattr, self.part, core)
        if self.arguments is None:
            setattr(thing, self.name, self.value)
            return self.value
        arguments, options = self.arguments
        return result_of(lambda: getattr(thing, self.name)(*arguments, **options))


def result_of(call: Callable[[], object]) -> object:
    """Return what a call returns or, as text, what it raises."""
    try:
        return call()
    except Exception as error:
        return repr(error)


class Life:
    """One core, and all that was done to it."""

    def __init__(self, core: Core, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.core = core
        self.calls: list[Call] = []
        self._arguments = arguments
        self._options = options

    def make(self) -> Any:
        """Return a core as it was at the beginning. It records nothing."""
        options = {
            name: copy.deepcopy(value) if name == "guard" else value for name, value in self._options.items()
        }
        return type(self.core)(*self._arguments, **options)

    def path(self, thing: object) -> tuple[str, ...] | None:
        """Return the names of the attributes that lead from the core to a part; None if it is not a part of it."""
        if thing is self.core:
            return ()
        if isinstance(self.core, Worker):
            data = vars(self.core).get("data")
            if thing is data:
                return ("data",)
            if data is not None and thing is vars(data).get("newest"):
                return ("data", "newest")
        return None


@contextlib.contextmanager
def recorded() -> Iterator[list[Life]]:
    """Record the lives of all cores that are made meanwhile."""
    lives: list[Life] = []
    depth = 0

    def told(kind: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal depth
            outermost = not depth
            found = (life_of(self) if name != "__init__" else None) if outermost else None
            if outermost and name == "__init__" and isinstance(self, Core):
                # A recorder belongs to the host, and a guard changes.
                own = {key: each for key, each in options.items() if key not in ("recorder", "recorder_of")}
                if isinstance(guard := own.get("guard"), Guard):
                    own["guard"] = copy.deepcopy(guard)
                lives.append(Life(self, arguments, own))
            depth += 1
            try:
                value = method(self, *arguments, **options)
            except Exception as error:
                if found is not None:
                    found[0].calls.append(Call(found[1], name, (arguments, options), repr(error)))
                raise
            finally:
                depth -= 1
            if found is not None and name == "__setattr__":
                found[0].calls.append(Call(found[1], arguments[0], None, arguments[1]))
            elif found is not None:
                # A host may extend the list of requests.
                kept = list(value) if isinstance(value, list) else value
                found[0].calls.append(Call(found[1], name, (arguments, options), kept))
            return value

        return call

    def life_of(thing: object) -> tuple[Life, tuple[str, ...]] | None:
        for life in reversed(lives):
            if (path := life.path(thing)) is not None:
                return life, path
        return None

    with pytest.MonkeyPatch.context() as patch:
        for kind in TOUCHED:
            methods = {
                name: each
                for name, each in vars(kind).items()
                if callable(each) and not isinstance(each, type)
            }
            for name, method in methods.items():
                if name in ("__init__",) or not name.startswith("__"):
                    patch.setattr(kind, name, told(kind, name, method))
            patch.setattr(kind, "__setattr__", told(kind, "__setattr__", object.__setattr__), raising=False)
        yield lives
