"""Keyframes: the state of a core as plain values, from which the replay of a trace can begin.

The decisions of a core depend only on its state and its events. So a trace whose beginning was deleted can be
replayed from a keyframe: a description of the core's state that was taken between two events.

A keyframe is written when a segment of a trace begins (see `trace.recording`), as a part of the segment's header. A
keyframe consists of plain values, and reading it executes no code of the objects that it describes. The values are
put into a new core, which was constructed for the model in force. Functions, such as the conditions of a model, are
not written, because the new core has its own functions. A sync model is written in the notation of the command line.

Only objects of the packages in `PURE`, which do no input or output, and of modules that define the user's models, are
written. If a user's model keeps anything else in its state, such as an open file, no keyframe can be made, and the
segment says so.
"""

from __future__ import annotations

import math
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from typing import Any

import msgspec

from ..core.coordinator import Coordinator
from ..core.shard import Shard
from ..errors import ConfigurationError
from ..state import fields_of, own_names
from ..sync import SyncModel
from ..sync.notation import parse

PURE = ("paceline.core.", "paceline.sync.", "paceline.zipline.")

MOST_BITS = 63  # integers with more bits are written as text

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)

COLLECTIONS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
COLLECTION_OF = {name: kind for kind, name in COLLECTIONS.items()}


class Keyframe(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a core between two events.

    Attributes:
        sync: the sync model in force, in the notation of the command line.
        workers: the live workers.
        state: the state as plain values; None if it cannot be written.
        why: why the state cannot be written, as a clause; "" if it was written.
    """

    sync: str
    workers: tuple[int, ...]
    state: Any = None
    why: str = ""


def keyframe_of(core: Shard | Coordinator, imports: Collection[str] = ()) -> Keyframe:
    """Return the state of a core, which must not be handling an event.

    Args:
        core: the core.
        imports: names of the modules that define the user's own models of the run.
    """
    own, sync, workers = _described(core)
    try:
        state = _Writer(imports).attributes(own)
        msgspec.json.encode(state)
    except Exception as error:  # an error in an object of the user must not end the run
        return Keyframe(sync=sync, workers=workers, why=str(error) or type(error).__name__)
    return Keyframe(sync=sync, workers=workers, state=state)


def fill(core: Shard | Coordinator, keyframe: Keyframe, imports: Collection[str] = ()) -> None:
    """Give a new core the state of a keyframe.

    Args:
        core: a core that was created for the model in force, `keyframe.sync`.
        keyframe: the keyframe, which has a state.
        imports: names of the modules that define the user's own models of the run, which have been imported.

    Raises:
        ConfigurationError: the keyframe does not fit the core.
    """
    try:
        _Reader(imports).fill(_described(core)[0], keyframe.state)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigurationError(f"a state in the trace cannot be restored: {error}") from error


def _described(core: Shard | Coordinator) -> tuple[object, str, tuple[int, ...]]:
    """Return the object that decides about the events of a core, the model in force, and the live workers."""
    if isinstance(core, Shard):
        return core, str(core.sync.sync), tuple(sorted(core.sync.order.phase))
    return core.job_sync, core.sync, tuple(sorted(core.job_sync.live))


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, except for functions and the recorder, which does not affect decisions."""
    fixed = {field.name for field, _ in fields_of(thing) if field.mark == "fixed"}
    for name in own_names(thing):
        if name != "_recorder":
            value = getattr(thing, name)
            if not isinstance(value, FUNCTIONS) and not (name in fixed and callable(value)):
                yield name, value


class _Writer:
    """Turns objects into plain values. An object that is met twice is written once."""

    def __init__(self, imports: Collection[str]) -> None:
        self._imports = imports
        self._numbers: dict[int, int] = {}  # id of an object -> its number
        self._met: list[object] = []  # keeps these objects alive, so that no other object gets the same id

    def attributes(self, thing: object) -> dict[str, Any]:
        """Return the attributes of an object, except for functions."""
        return {name: self.value(value) for name, value in _attributes(thing)}

    def value(self, value: Any) -> Any:
        """Return a plain value for a value of any kind.

        Raises:
            TypeError: the value cannot be written.
        """
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= MOST_BITS else ["int", str(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", str(value)]
        if kind is Fraction:
            return ["fraction", str(value)]
        if kind is random.Random:
            return ["random", self.value(value.getstate())]
        if kind in COLLECTIONS:
            return [COLLECTIONS[kind], *map(self.value, value)]
        if kind is dict:
            return ["dict", *([self.value(key), self.value(each)] for key, each in value.items())]
        if (number := self._numbers.get(id(value))) is not None:
            return ["met", number]
        if isinstance(value, SyncModel):
            return ["model", self._meet(value), str(value)]
        name = self._name(kind)
        if isinstance(value, tuple):
            return ["named", name, *map(self.value, value)]
        if isinstance(value, msgspec.Struct) and kind.__struct_config__.frozen:
            return ["struct", name, {key: self.value(getattr(value, key)) for key in kind.__struct_fields__}]
        return ["object", self._meet(value), name, self.attributes(value)]

    def _meet(self, thing: object) -> int:
        self._met.append(thing)
        return self._numbers.setdefault(id(thing), len(self._numbers))

    def _name(self, kind: type) -> str:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _class_of(name, self._imports) is not kind:
            raise TypeError(f"it contains a {kind.__module__}.{kind.__qualname__}")
        return name


class _Reader:
    """Restores objects from plain values."""

    def __init__(self, imports: Collection[str]) -> None:
        self._imports = imports
        self._met: dict[int, object] = {}

    def fill(self, thing: object, attributes: dict[str, Any]) -> None:
        """Set the attributes of an object.

        If an attribute already contains an object of the right class, this object is filled and not replaced, because
        a function may refer to it.
        """
        for name, plain in attributes.items():
            object.__setattr__(thing, name, self.value(plain, getattr(thing, name, None)))

    def value(self, plain: Any, present: object = None) -> Any:
        """Return the value that a plain value describes.

        If `present` is an object of the class that the plain value names, its attributes are set, and it is returned.
        """
        if not isinstance(plain, list):
            return plain
        tag, *rest = plain
        if tag in COLLECTION_OF:
            return COLLECTION_OF[tag](map(self.value, rest))
        match tag:
            case "dict":
                return {self.value(key): self.value(each) for key, each in rest}
            case "met":
                return self._met[rest[0]]
            case "model":
                self._met[rest[0]] = parse(rest[1])
                return self._met[rest[0]]
            case "object":
                number, name, attributes = rest
                kind = self._class(name)
                thing = self._met[number] = present if type(present) is kind else object.__new__(kind)
                self.fill(thing, attributes)
                return thing
            case "struct":
                fields = {key: self.value(each) for key, each in rest[1].items()}
                return self._class(rest[0], msgspec.Struct)(**fields)
            case "named":
                return tuple.__new__(self._class(rest[0], tuple), tuple(map(self.value, rest[1:])))
            case "random":
                generator = random.Random()
                generator.setstate(self.value(rest[0]))
                return generator
            case "int" | "float" | "fraction":
                read: dict[str, Callable[[str], object]] = {"int": int, "float": float, "fraction": Fraction}
                return read[tag](rest[0])
        raise ValueError(f"it contains {tag!r}, which is not known")

    def _class(self, name: str, base: type = object) -> Any:
        kind = _class_of(name, self._imports)
        if kind is None or not issubclass(kind, base):
            raise ValueError(f"it contains a {name.replace(':', '.')}, which is not part of a core")
        return kind


def _class_of(name: str, imports: Collection[str]) -> type | None:
    """Return the class with a name, "MODULE:CLASS"; None if objects of this class cannot be part of a core."""
    module, _, path = name.partition(":")
    if module in sys.modules and (module.startswith(PURE) or module in imports):
        return _class_in(module, path)
    if not module.startswith("paceline."):
        return None
    # An older keyframe names the module that contained the class at that time. Most classes are still in the same
    # folder.
    folders = tuple(folder for folder in PURE if module.startswith(folder)) or PURE
    known = (_class_in(each, path) for each in sorted(sys.modules) if each.startswith(folders))
    moved = [each for each in known if each is not None]
    return moved[0] if len(moved) == 1 else None


def _class_in(module: str, path: str) -> type | None:
    """Return a class that an imported module defines, by its qualified name; None if it defines no such class."""
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
    return (
        found
        if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, path)
        else None
    )
