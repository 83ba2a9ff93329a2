"""Encodes and decodes the states of the objects that a script tracks, without pickling. See `paceline.track`.

Encoded states are a short header in MessagePack, followed by the bytes of all tensors and arrays. The header contains
the nested structure, in which every container and every tensor is a pair (kind, content), and the dtype and the shape
of each tensor. Nothing in the bytes can cause code to run.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from ..core.protocol.messages import MOST_STATES_BYTES
from ..errors import ProtocolError, UsageError
from .buffer_bytes import lent_bytes
from .vectors import dtype_name

__all__ = ["decode_states", "encode_states", "require_states"]

LENGTH = struct.Struct("<Q")
DEEPEST = 64
"""Maximum depth of nested containers."""

DTYPES = {
    dtype_name(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype_name(dtype).startswith(("q", "bits"))
}
ARRAYS = frozenset(
    ["bool", *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64))]
)
"""The dtypes of NumPy arrays that can be encoded: those that torch has, too."""

SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple}
MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}


MALFORMED = (
    *(AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError),
    *(msgspec.MsgspecError, struct.error),
)
"""The exceptions that bytes can cause that are not those of states. A `RecursionError` is a `RuntimeError`."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """The structure of the states, and the tensors to which it refers by their positions."""

    structure: Any
    tensors: tuple[_Tensor, ...]


def encode_states(states: Mapping[str, object]) -> list[memoryview]:
    """Return the bytes of some states. The bytes of tensors in CPU memory are not copied if they are contiguous.

    A state consists of numbers, strings, bytes, None, NumPy scalars (which are decoded as numbers), tensors and
    arrays, in dictionaries, lists and tuples.

    Args:
        states: the state of each object, by the name of the object.

    Raises:
        UsageError: a state contains something else, or the states are too large.

    Example:
        >>> decode_states(b"".join(encode_states({"ema": {"decay": 0.9, "steps": (1, 2)}})))
        {'ema': {'decay': 0.9, 'steps': (1, 2)}}
    """
    tensors: list[torch.Tensor] = []
    structure = {name: _structure(state, name, tensors, 0) for name, state in states.items()}
    described = tuple(_Tensor(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
    header = msgspec.msgpack.encode(_Header(structure, described))
    size_bytes = LENGTH.size + len(header) + sum(each.size_bytes for each in described)
    if size_bytes > MOST_STATES_BYTES:
        raise UsageError(
            f"the states of {', '.join(states)} have {size_bytes} bytes, expected at most {MOST_STATES_BYTES}. Track "
            "fewer objects, or smaller ones."
        )
    parts = [lent_bytes(tensor.contiguous().reshape(-1)) for tensor in tensors if tensor.numel()]
    return [memoryview(LENGTH.pack(len(header)) + header), *parts]


def _structure(value: Any, where: str, tensors: list[torch.Tensor], depth: int) -> Any:
    """Return a value as nested lists and plain values, and append the tensors in it to `tensors`."""
    kind = type(value).__name__
    if depth > DEEPEST:
        raise UsageError(f"{where} is nested more than {DEEPEST} levels deep, so it cannot be sent.")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if isinstance(value, int) and type(value) is int:
        if -(2**63) <= value < 2**64:
            return value
        raise UsageError(f"{where} is {value}, expected an integer of at most 64 bits.")
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and dtype_name(value.dtype) in DTYPES
    ):
        tensors.append(value.detach().resolve_conj().resolve_neg().cpu())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.ndarray) and value.dtype.name in ARRAYS:
        tensors.append(torch.from_numpy(value.astype(value.dtype.newbyteorder("="))))
        return ["array", len(tensors) - 1]
    if type(value) is torch.Size:
        kind = "tuple"
    elif type(value) not in (list, tuple, dict, OrderedDict, Counter):
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to other "
            "workers. A state_dict() may contain numbers, strings, None, tensors and NumPy arrays, in dictionaries, "
            "lists and tuples."
        )
    if kind in SEQUENCES:
        return [kind, [_structure(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]]
    items = []
    for key, each in value.items():
        if type(key) not in (str, int, float, bool, bytes, type(None)):
            raise UsageError(f"{where} has the key {key!r}, expected a string or a number.")
        items.append([key, _structure(each, f"{where}[{key!r}]", tensors, depth + 1)])
    return [kind, items]


def decode_states(data: bytes | bytearray | memoryview, *, arrays: bool = True) -> dict[str, Any]:
    """Return the states in some bytes.

    Args:
        data: the bytes.
        arrays: True to return NumPy arrays as arrays, False to return them as tensors.

    Raises:
        ProtocolError: the bytes are not those of states.
    """
    try:
        view = memoryview(data)
        (length,) = LENGTH.unpack_from(view)
        begin = LENGTH.size + length
        header = msgspec.msgpack.decode(view[LENGTH.size : begin], type=_Header)
        tensors = []
        for each in header.tensors:
            end = begin + each.size_bytes
            tensors.append(_tensor(each, view[begin:end]))
            begin = end
        if begin != len(view):
            raise ValueError(f"{len(view)} bytes, expected {begin}")
        return {str(name): _value(state, tensors, arrays) for name, state in header.structure.items()}
    except MALFORMED as error:
        raise ProtocolError(f"the states of tracked objects cannot be read: {error}") from error


def require_states(data: bytes | bytearray | memoryview) -> None:
    """Check that some bytes are those of states, without copying the values of tensors.

    Raises:
        ProtocolError: they are not.
    """
    try:
        view = memoryview(data)
        (length,) = LENGTH.unpack_from(view)
        header = msgspec.msgpack.decode(view[LENGTH.size : LENGTH.size + length], type=_Header)
        end = LENGTH.size + length + sum(each.size_bytes for each in header.tensors)
        if end != len(view) or any(min(each.shape, default=0) < 0 for each in header.tensors):
            raise ValueError(f"{len(view)} bytes, expected {end}")
        nothing = [torch.empty(0)] * len(header.tensors)
        {str(name): _value(state, nothing, arrays=False) for name, state in header.structure.items()}
    except MALFORMED as error:
        raise ProtocolError(f"the states of tracked objects cannot be read: {error}") from error


def _tensor(described: _Tensor, data: memoryview) -> torch.Tensor:
    dtype = DTYPES[described.dtype]
    if len(data) != described.size_bytes or min(described.shape, default=0) < 0:
        raise ValueError("a tensor is incomplete")
    if not data:
        return torch.empty(described.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(described.shape)


def _value(value: Any, tensors: Sequence[torch.Tensor], arrays: bool) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy() if arrays else tensors[content]
    if kind in SEQUENCES:
        return SEQUENCES[kind]([_value(each, tensors, arrays) for each in content])
    return MAPPINGS[kind]([(key, _value(each, tensors, arrays)) for key, each in content])
