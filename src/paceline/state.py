"""The state of a core as a value: it can be compared, printed, and given to another core.

A *core* is an object that decides without I/O: a worker, a server, the coordinator, or the state machine of a sync
model. A core consists of *parts*, which are objects with attributes of their own. The attributes of cores and parts are
plain and mutable. Each attribute, here called a *field*, has one of three meanings:

    decides   the field may determine what the core does from now on. A field decides unless its class declares
              another meaning
    history   the field is only shown or recorded. No request to the host depends on it
    fixed     the field is given when the object is made, and never assigned again: configuration, functions,
              and recorders

Three operations use these meanings:

- `snapshot` returns all fields that decide and all history as one immutable value;
- `restore` sets a new core, which was made with the same configuration, to the state of a snapshot. From then on, the
  new core does what the original core does;
- an `Outlook` returns a value that is equal for two cores that behave alike from now on. The exhaustive search compares
  these values.

The decorator `stateful` declares which fields are history or fixed. So a new attribute decides until the class declares
another meaning. This default is always safe. In a class without this decorator, such as a user's sync model, the fields
that hold functions are fixed: a function may refer to the object, and a new object has functions of its own. `makes`
names the method with which an object makes a part that its constructor does not make.

A run calls none of these operations: the declarations are tables that only these operations read.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from fractions import Fraction
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from .errors import InternalError

Kind = TypeVar("Kind", bound=type)

Mark = Literal["decides", "history", "fixed"]

Subject = Literal["returns", "staleness", "factors", "connections", "scripts", "cuts"]
"""The subjects of the fields that decide neither when a push is applied nor when a worker continues:

returns       the labels of a worker that joins again
staleness     the numbers of updates that answers contain
factors       the factors by which gradients are multiplied
connections   whether a server waits for the end of a connection before it reports a lost worker
scripts       which script writes files, and which calls scripts may make
cuts          what a cut of the job contains
"""

ATOMS = (int, str, bool, float, bytes, type(None), Fraction)
ATOM_TYPES = frozenset(ATOMS)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)
CODE = (*FUNCTIONS, type)
PLAIN = (*ATOMS, *CODE)
WHOLES = (*PLAIN, tuple, msgspec.Struct)


class Field(NamedTuple):
    """The meaning of one field of an object.

    Attributes:
        name: the name of the attribute.
        mark: whether the field decides, is history, or is fixed.
        about: the only subject that the field decides about; "" if there is none.
        maker: name of the method that makes the part in this field. If the field is a dict of parts, the method
            receives the key. "" if there is no such method.
    """

    name: str
    mark: Mark = "decides"
    about: str = ""
    maker: str = ""


DECLARED: dict[type, dict[str, Field]] = {}
"""Class -> the fields that it declares, by name, without those of its base classes."""


def stateful(
    *, history: str = "", fixed: str = "", about: Mapping[str, Subject] = {}, makes: Mapping[str, str] = {}
) -> Callable[[Kind], Kind]:
    """Return a class decorator that declares the meaning of the fields of the class.

    The names in a string are separated by spaces. A class may also have a method `outlook(most_workers)` for fields of
    which only a part decides. The method returns a mapping from the names of these fields to the values that are
    compared instead of the fields.

    Args:
        history: fields on which no request depends.
        fixed: fields that are given when the object is made.
        about: field that decides -> the only subject that it decides about.
        makes: field that decides -> name of the method that makes the part in this field. The method may use the
            attributes that the constructor sets before this field.

    >>> @stateful(history="seen", fixed="limit")
    ... class Queue:
    ...     def __init__(self, limit):
    ...         self.limit, self.waiting, self.seen = limit, [], 0
    >>> queue, other = Queue(2), Queue(2)
    >>> queue.waiting.append("a")
    >>> queue.seen = 5
    >>> snapshot(queue)
    Queue(waiting=['a'], seen=5)
    >>> restore(other, snapshot(queue))
    >>> other.waiting, other.seen
    (['a'], 5)
    >>> other.seen = 6
    >>> Outlook()(queue) == Outlook()(other), snapshot(queue) == snapshot(other)
    (True, False)
    """
    marks: dict[str, Mark] = {
        **dict.fromkeys([*about, *makes], "decides"),
        **dict.fromkeys(history.split(), "history"),
        **dict.fromkeys(fixed.split(), "fixed"),
    }

    def declare(kind: Kind) -> Kind:
        DECLARED[kind] = {
            name: Field(name, mark, about.get(name, ""), makes.get(name, "")) for name, mark in marks.items()
        }
        _declared.cache_clear()
        return kind

    return declare


# -- fields -----------------------------------------------------------------------------------------------


@cache
def _declared(kind: type) -> dict[str, Field]:
    """Return, by name, the fields that a class and its base classes declare."""
    bases = reversed(kind.__mro__)
    return {name: field for base in bases for name, field in DECLARED.get(base, {}).items()}


def own_names(thing: object) -> list[str]:
    """Return the names of all attributes of an object."""
    kind: type = type(thing)
    slots = [name for name in _slots_of(kind) if hasattr(thing, name)]
    return [*getattr(thing, "__dict__", ()), *slots]


@cache
def _slots_of(kind: type) -> list[str]:
    """Return the names of the slots of a class and its base classes."""
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def fields_of(thing: object) -> Iterator[tuple[Field, Any]]:
    """Yield the fields of an object with their values, in the order in which its constructor sets them."""
    kind: type = type(thing)
    declared, is_declared = _declared(kind), kind in DECLARED
    for name in own_names(thing):
        value = getattr(thing, name)
        yield declared.get(name) or _usual(name, is_declared or not isinstance(value, FUNCTIONS)), value


@cache
def _usual(name: str, decides: bool) -> Field:
    """Return a field that no class declares."""
    return Field(name, "decides" if decides else "fixed")


def parts(core: object) -> Iterator[object]:
    """Yield a core and all parts of its state, each of them once."""
    seen: dict[int, object] = {}
    todo = [core]
    while todo:
        thing = todo.pop()
        if type(thing) in ATOM_TYPES:
            continue
        if isinstance(thing, Mapping):
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, tuple | list | deque | set | frozenset):
            todo += thing
        elif _is_part(thing) and id(thing) not in seen:
            seen[id(thing)] = thing
            todo += [value for field, value in fields_of(thing) if field.mark != "fixed"]
            yield thing


def _is_part(thing: object) -> bool:
    """Return True if an object is a part: it is mutable, and has attributes of its own."""
    if isinstance(thing, WHOLES) or _is_generator(thing):
        return False
    return type(thing) in DECLARED or hasattr(thing, "__dict__")


def _is_generator(thing: object) -> bool:
    """Return True for a generator of random numbers, as in the module `random`."""
    return hasattr(thing, "getstate") and hasattr(thing, "setstate")


# -- snapshots --------------------------------------------------------------------------------------------


class StatePart(msgspec.Struct, frozen=True):
    """The state of a core or of one of its parts.

    Attributes:
        kind: the class of the object.
        number: number of parts that come before this part in the snapshot.
        fields: (name, value) of each field that is not fixed.
    """

    kind: type
    number: int
    fields: tuple[tuple[str, Hashable], ...]

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{name}={value!r}' for name, value in self.fields)})"


class Again(msgspec.Struct, frozen=True):
    """A part that the snapshot contains already.

    Attributes:
        number: the number of the part.
    """

    number: int

    def __repr__(self) -> str:
        return f"<part {self.number}>"


class Items(msgspec.Struct, frozen=True):
    """The state of a collection or of a random number generator.

    Attributes:
        kind: the class of the collection.
        items: the items of the collection, which are (key, value) for a dict; for a generator, its state.
        given: the argument of the constructor: the maximum length of a deque, or the default factory of a dict.
    """

    kind: type
    items: Hashable
    given: Hashable = None

    def __repr__(self) -> str:
        items: Any = self.items
        if issubclass(self.kind, dict):
            return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in items) + "}"
        if self.kind is set:
            return "{" + ", ".join(map(repr, items)) + "}" if items else "set()"
        return "[" + ", ".join(map(repr, items)) + "]"


class Unhashable:
    """A wrapper that gives a hash to a frozen struct that has none. The struct's lists and dicts are never changed."""

    __slots__ = ("struct",)

    def __init__(self, struct: msgspec.Struct) -> None:
        self.struct = struct

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable) and self.struct == other.struct

    def __hash__(self) -> int:
        return hash(type(self.struct))

    def __repr__(self) -> str:
        return repr(self.struct)


def _hashable(struct: msgspec.Struct) -> Hashable:
    """Return a frozen struct or, if it has no hash, the struct in an `Unhashable`."""
    try:
        hash(struct)
    except TypeError:
        return Unhashable(struct)
    return struct


def snapshot(core: object) -> StatePart:
    """Return the state of a core as an immutable, hashable and printable value. The core must not be handling an event.

    Raises:
        TypeError: the core contains an object that cannot be a part of a value, such as an open file.
    """
    return _Taker().part(core)


class _Taker:
    """Turns objects into values. A part that occurs twice is contained once in the value."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # id of a part -> its number

    def part(self, thing: object) -> StatePart:
        number = self._numbers[id(thing)] = len(self._numbers)
        fields = [
            (field.name, self._value(value)) for field, value in fields_of(thing) if field.mark != "fixed"
        ]
        return StatePart(type(thing), number, tuple(fields))

    def _value(self, value: Any) -> Hashable:
        kind: type = type(value)
        if kind in ATOM_TYPES:
            return value  # type: ignore[no-any-return]
        if isinstance(value, tuple):
            return tuple.__new__(kind, map(self._value, value))
        if kind in (list, deque):
            return Items(kind, tuple(map(self._value, value)), getattr(value, "maxlen", None))
        if kind in (set, frozenset):
            items = frozenset(map(self._value, value))
            return items if kind is frozenset else Items(kind, items)
        if kind in (dict, OrderedDict, defaultdict):
            pairs = tuple((self._value(key), self._value(each)) for key, each in value.items())
            return Items(kind, pairs, getattr(value, "default_factory", None))
        if isinstance(value, msgspec.Struct):
            return _hashable(value)
        if isinstance(value, PLAIN):
            plain: Hashable = value
            return plain
        if _is_generator(value):
            return Items(kind, value.getstate())
        if (number := self._numbers.get(id(value))) is not None:
            return Again(number)
        if not _is_part(value):
            raise TypeError(f"the state contains a {kind.__module__}.{kind.__qualname__}")
        return self.part(value)


def restore(core: object, state: StatePart) -> None:
    """Give a core the state of a snapshot.

    Args:
        core: a new core, which was made with the same configuration as the core of the snapshot.
        state: the snapshot.
    """
    _Restorer().fill(core, state)


class _Restorer:
    """Fills objects with values."""

    def __init__(self) -> None:
        self._parts: dict[int, object] = {}  # number of a part -> the part

    def fill(self, thing: object, state: StatePart) -> None:
        """Set the fields of an object. A part that exists already is not replaced: other objects may refer to it."""
        kind: type = type(thing)
        if kind is not state.kind:
            raise InternalError(f"a {kind.__name__} cannot have the state of a {state.kind.__name__}")
        self._parts[state.number] = thing
        declared = _declared(kind)
        given = {name for name, _ in state.fields}
        for field, _ in list(fields_of(thing)):
            if field.mark != "fixed" and field.name not in given:
                delattr(thing, field.name)  # the attribute of the class is used again
        for name, value in state.fields:
            made_by = declared.get(name, Field(name)).maker
            maker = getattr(thing, made_by) if made_by else None
            setattr(thing, name, self._value(value, getattr(thing, name, None), maker))

    def _value(self, value: Any, present: Any = None, maker: Callable[..., object] | None = None) -> Any:
        if isinstance(value, StatePart):
            return self._part(value, present if maker is None else maker())
        if isinstance(value, Items):
            return self._items(value, present, maker)
        if isinstance(value, Again):
            return self._parts[value.number]
        if isinstance(value, Unhashable):
            return value.struct
        if isinstance(value, tuple):
            return tuple.__new__(type(value), map(self._value, value))
        if isinstance(value, frozenset):
            return frozenset(map(self._value, value))
        return value

    def _part(self, state: StatePart, present: object) -> object:
        thing = present if type(present) is state.kind else object.__new__(state.kind)
        self.fill(thing, state)
        return thing

    def _items(self, value: Items, present: Any, maker: Callable[..., object] | None) -> Any:
        kind, items = value.kind, value.items
        if _is_generator(kind):
            generator = kind()
            generator.setstate(items)
            return generator
        assert isinstance(items, tuple | frozenset)
        if issubclass(kind, dict):
            known = present if type(present) is kind else {}
            found: dict[Any, Any] = {}
            for key, each in items:
                key = self._value(key)
                found[key] = self._value(each, known.get(key), maker and partial(maker, key))
            contents: Any = found
        else:
            contents = [self._value(each) for each in items]
        if type(present) is not kind:
            given: Any = value.given
            present = deque(maxlen=given) if kind is deque else kind() if given is None else kind(given)
        present.clear()
        (present.extend if kind in (list, deque) else present.update)(contents)
        return present


# -- what is compared -------------------------------------------------------------------------------------


class Outlook:
    """Returns a value that is equal for two cores that behave alike from now on.

    The order of the entries of a dict is ignored. Fixed fields that are plain values are also compared, because the
    cores may have different configurations.

    Args:
        without: subjects that do not matter. A field is left out if it decides only about one of these subjects.
        most_workers: maximum number of workers of the run.
    """

    def __init__(self, without: Collection[Subject] = (), most_workers: int = 4) -> None:
        self._without = frozenset(without)
        self._most_workers = most_workers
        # class -> the attributes of its first object, and (name, True if fixed) of each field that is compared
        self._compared: dict[type, tuple[set[str], list[tuple[str, bool]]]] = {}
        self._met: dict[int, int] = {}  # id of a part of the core that is being looked at -> its number

    def __call__(self, core: object) -> Hashable:
        """Return the value of a core or a part."""
        self._met.clear()
        return self._part(core)

    def _part(self, thing: object) -> Hashable:
        kind = type(thing)
        if (number := self._met.get(id(thing))) is not None:
            return kind, number
        self._met[id(thing)] = len(self._met)
        if (known := self._compared.get(kind)) is None:
            known = self._compared[kind] = {*own_names(thing)}, self._fields(thing)
        names, compared = known
        views = getattr(thing, "outlook", None)
        shown: Mapping[str, object] = views(self._most_workers) if views is not None else {}
        found = [
            self._fixed(getattr(thing, name, None))
            if fixed
            else self._value(shown[name] if name in shown else getattr(thing, name, None))
            for name, fixed in compared
        ]
        if (
            not getattr(thing, "__dict__", {}).keys() <= names
        ):  # a class of the user may have class attributes
            late = [name for name, fixed in self._fields(thing) if not fixed and name not in names]
            found.append(frozenset((name, self._value(getattr(thing, name))) for name in late))
        return kind, *found

    def _fields(self, thing: object) -> list[tuple[str, bool]]:
        """Return (name, True if fixed) of each compared field of an object."""
        return sorted(
            (field.name, field.mark == "fixed")
            for field, _ in fields_of(thing)
            if field.mark != "history" and field.about not in self._without
        )

    def _fixed(self, value: object) -> Hashable:
        if isinstance(value, (*ATOMS, tuple)):
            return value
        return _hashable(value) if isinstance(value, msgspec.Struct) else None

    def _value(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in ATOM_TYPES:
            return value  # type: ignore[no-any-return]
        if kind is dict or isinstance(value, dict):
            return frozenset([(key, self._value(each)) for key, each in value.items()])
        if kind is list or isinstance(value, tuple | deque):
            return tuple([self._value(each) for each in value])
        if kind is set or kind is frozenset:
            return frozenset(value)
        if isinstance(value, msgspec.Struct):
            return _hashable(value)
        if isinstance(value, CODE):
            return None
        if _is_generator(value):
            return value.getstate()  # type: ignore[no-any-return]
        return self._part(value)
