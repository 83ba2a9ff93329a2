"""Examples of every message, made from the types of its fields.

The fuzzers send them, and the tests of the protocol encode them. So a new message is covered without being named.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import inspect

from paceline.core.messages import ROWS, Message

__all__ = ["Known", "edited", "example", "flip", "kinds"]

Known = Mapping[str, Callable[[], object]]
"""Name of a field -> function that returns a value for it, in whatever message it is."""

SHARED_MEMORY = f"paceline-{'0' * 32}"  # the only text with a pattern


def kinds() -> list[type[Message]]:
    """Return the classes of all messages, sorted by name."""
    return sorted({row.message for row in ROWS}, key=lambda kind: kind.__name__)


def example(
    kind: type[Any], *, whole: bool = True, known: Known | None = None, choice: random.Random | None = None
) -> Any:
    """Return an object of a class of messages.

    Args:
        kind: the class.
        whole: False to leave out the fields that have default values.
        known: values of some fields.
        choice: chooses among the values that a field may have; the first one by default.
    """
    info = _type_info(cast(Hashable, kind))
    assert isinstance(info, inspect.StructType)
    return _struct(info, whole, known or {}, choice)


@cache
def _type_info(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _struct(info: inspect.StructType, whole: bool, known: Known, choice: random.Random | None) -> Any:
    fields = [field for field in info.fields if whole or field.required]
    return info.cls(
        **{
            field.name: known[field.name]()
            if field.name in known
            else _value(field.type, whole, known, choice)
            for field in fields
        }
    )


def _value(info: inspect.Type, whole: bool, known: Known, choice: random.Random | None) -> Any:
    """Return a value of a type."""

    def value(part: inspect.Type) -> Any:
        return _value(part, whole, known, choice)

    match info:
        case inspect.StructType():
            return _struct(info, whole, known, choice)
        case inspect.UnionType(types):
            some = [each for each in types if not isinstance(each, inspect.NoneType)]
            return value(choice.choice(types) if choice else some[0])
        case inspect.LiteralType(values):
            return choice.choice(values) if choice else values[0]
        case inspect.BoolType():
            return choice.random() < 0.5 if choice else True
        case inspect.IntType(ge=least):
            return choice.choice((0, 1, 2, 3, 7, 2**53)) if choice and not least else max(1, least or 0)
        case inspect.FloatType(gt=above):
            return choice.choice((0.5, 1.0)) if choice else 0.5 + (above or 0.0)
        case inspect.StrType(pattern=pattern):
            return SHARED_MEMORY if pattern else "x"
        case inspect.BytesType():
            return b"\1"
        case inspect.NoneType():
            return None
        case inspect.VarTupleType(item_type=item, min_length=least):
            return tuple(value(item) for _ in range(least or 1))
        case inspect.TupleType(item_types=items):
            return tuple(value(item) for item in items)
        case inspect.DictType(key_type=key, value_type=each):
            return {value(key): value(each)}
        case inspect.ListType(item_type=item):
            return [value(item)]
        case inspect.AnyType():
            return 1
        case _:
            raise NotImplementedError(info)


NUMBERS: list[object] = [
    -1,
    0,
    1,
    2,
    3,
    7,
    99,
    2**31,
    2**32,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
]

VALUES: list[object] = [
    *NUMBERS,
    *(math.nan, math.inf, -math.inf, -0.0, 1e-320, 1e300, 0.5),
    *("", "bsp", "x" * 2000, "\ud7ff", "local:f-0", "a:b", None, True, False),
    *(b"", b"\xff" * 9, b"\0" * 300),
    *([], [0] * 3000, [[[[[]]]]], [[0, 1]], {}, {"type": "Commit"}, {"lr": math.nan}),
]

SYNCS = [
    *("bsp", "asp", "ssp:staleness=1", "dssp:lower=1,upper=4", "dsps", "pssp:probability=0.5"),
    *("dynamic-pssp:alpha=significance", "drop-stragglers:quorum=2", "naive-waiting:delay_s=0.0001"),
    *("elastic-bsp:lookahead=3", "spec-sync:abort_time_s=0.001,abort_rate=0.1", "spec-sync"),
]

BAD_SYNCS = [
    *(
        "",
        "|",
        "bsp|",
        "bsp|asp|ssp",
        "bsp|elastic-bsp|bsp",
        "drop-stragglers:quorum=999",
        "ssp:staleness=-1",
    ),
    *("conditions:pull=os:getcwd", "conditions:pull=pyclbr:readmodule", "conditions:pull=local:f-0"),
    *(
        "dssp:lower=0,upper=1e18",
        "elastic-bsp:lookahead=1e300",
        "naive-waiting:delay_s=nan",
        "ssp:staleness=inf",
    ),
    *("spec-sync:base=" * 60, "bsp" + " " * 5000, "ssp:staleness=1e308", "pssp:probability=nan"),
]


def flip(data: bytes, choice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(choice.randrange(1, 4)):
        changed[choice.randrange(len(changed))] ^= 1 << choice.randrange(8)
    return bytes(changed)


def edited(message: Message, choice: random.Random) -> bytes:
    """The header with a field of another value or type, with one more, or with one less."""
    fields: dict[Any, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        key = choice.choice([*fields, "type"])
        match choice.randrange(8):
            case 0:
                fields.pop(key, None)
            case 1:
                fields[choice.choice(("extra", "", 7, "shard", "iteration"))] = choice.choice(VALUES)
            case 2 | 3 if isinstance(fields.get(key), list) and fields[key]:
                fields[key] = list(fields[key])
                fields[key][choice.randrange(len(fields[key]))] = choice.choice(VALUES)
            case 4 if isinstance(fields.get(key), bytes) and fields[key]:
                fields[key] = flip(fields[key], choice)
            case 5 if type(fields.get(key)) is int:
                fields[key] = choice.choice(NUMBERS)
            case 6 if isinstance(fields.get(key), str):
                fields[key] = choice.choice([*SYNCS, *BAD_SYNCS])
            case _:
                fields[key] = choice.choice(VALUES)
    if "type" in fields and choice.random() < 0.05:
        fields["type"] = choice.choice(("Finished", "Commit", "Bell", "Hello", "Nothing", "Pull", "Register"))
    with contextlib.suppress(TypeError, OverflowError):
        return msgspec.msgpack.encode(fields)
    return b"\xc1"
