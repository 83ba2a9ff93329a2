"""Tensors as plain data: flat vectors and views of their parts, hashes of frozen parameters, buffers and states."""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import torch

from ..core.layout import BufferSpec, HyperParameters, Layout, ShardSlice, dtype_of
from ..core.messages import MOST_STATES_BYTES
from ..errors import ProtocolError, UsageError

CHUNK = 128 * 1024
"""Number of elements that are converted to double precision at a time: few enough for the CPU cache."""

DIGESTED = 4096
"""Maximum number of elements of a tensor, evenly spaced, that enter a hash."""

SAMPLED = 8192
"""Maximum number of elements of a vector, evenly spaced, from which its norm is estimated."""

Vectors = dict[str, torch.Tensor]
"""Flat vectors by name (see `core.layout`): weights or gradients of a whole model or of one shard."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, for example "float32", or the dtype of the vector with this name."""
    dtype = getattr(torch, dtype_of(name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype, for example "float32"."""
    return str(dtype).removeprefix("torch.")


def tensors_over(vectors: Mapping[str, memoryview]) -> Vectors:
    """Return a flat tensor for each dtype. The tensors share the memory of the given bytes.

    A tensor over read-only memory must not be written to: torch does not know that the memory is read-only, so it would
    write to the memory, and the system would end the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return {
            dtype: torch.frombuffer(data, dtype=torch_dtype(dtype))
            if data.nbytes
            else torch.empty(0, dtype=torch_dtype(dtype))
            for dtype, data in vectors.items()
        }


def parameter_views(layout: Layout, vectors: Vectors) -> list[torch.Tensor]:
    """Return, for each parameter, a view of its part of a model's flat vectors, with the parameter's shape."""
    return [
        vectors[p.vector][offset : offset + p.size].view(p.shape)
        for p, offset in zip(layout.parameters, layout.offsets, strict=True)
    ]


def segment_views(bounds: ShardSlice, vectors: Vectors) -> list[torch.Tensor]:
    """Return, for each segment of a shard, a flat view of its part of the shard's vectors."""
    return [vectors[s.dtype][s.start : s.stop] for s in bounds.segments]


def l2_norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm of a tensor, in double precision; on accelerators, in single precision, except for float64."""
    dtype = torch.float64 if tensor.is_cpu or tensor.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def sliced(vectors: Vectors, shard: ShardSlice) -> Vectors:
    """Return views of a shard's slice of a model's flat vectors."""
    return {name: vectors[name][start:stop] for name, (start, stop) in shard.bounds.items()}


def squared_norm(vectors: Sequence[torch.Tensor], scales: Sequence[float] = (1.0,)) -> float:
    """Return the squared L2 norm of the sum of some flat vectors of equal length, each multiplied by its scale.

    The sum has the dtype of the vectors, and its squares are added in the precision that `l2_norm` uses.

    >>> squared_norm([torch.tensor([2.0, 6.0]), torch.tensor([4.0, 2.0])], [0.5, 0.5])
    25.0
    """
    square = 0.0
    chunk = CHUNK if vectors[0].is_cpu else max(1, vectors[0].numel())  # chunks are of use on the CPU only
    for first, *others in zip(*(vector.split(chunk) for vector in vectors), strict=True):
        total = first if not others and scales[0] == 1.0 else first * scales[0]
        for other, scale in zip(others, scales[1:], strict=True):
            total.add_(other, alpha=scale)
        square += l2_norm(total) ** 2
    return square


def sampled_norm(vectors: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm over the elements of some flat vectors, estimated from evenly spaced elements.

    The result is NaN or inf if one of these elements is NaN or inf. The time hardly depends on the sizes of the
    vectors.

    >>> sampled_norm([torch.tensor([2.0, 1.0]), torch.tensor([2.0])])
    3.0
    >>> sampled_norm([torch.full((10**6,), 0.5)])
    500.0
    """
    square = 0.0
    for vector in vectors:
        sample = vector[:: -(-vector.numel() // SAMPLED) or 1].to(torch.float64)
        square += float(torch.dot(sample, sample)) * (vector.numel() / max(1, sample.numel()))
    return math.sqrt(square)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of at most `DIGESTED` elements of each tensor; "" if all of these elements are zero.

    `digest_of` hashes all bytes.

    Example:
        >>> digest([torch.ones(3)]) == digest([torch.ones(3)]) != digest([torch.ones(2)])
        True
        >>> digest([torch.zeros(3)])
        ''
    """
    hashed, nonzero = blake2b(digest_size=8), False
    for tensor in tensors:
        values = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach().reshape(-1)
        sample = values[:: -(-values.numel() // DIGESTED) or 1].cpu().to(torch.float64)
        nonzero = nonzero or bool(sample.any())
        # hash a copy, because torch does not let a tensor grow once numpy() was called on it
        hashed.update(sample.clone().numpy().tobytes())
    return hashed.hexdigest() if nonzero else ""


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, so that NaN equals NaN. They may be on different devices."""
    return torch.equal(bits(tensor), bits(other).to(tensor.device))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as integers."""
    return tensor.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])


# -- Hashes of frozen parameters: those that no optimizer trains ---------------------------------------------
#
# Every worker loads the frozen parameters itself, for example from a checkpoint. So that a base model of
# gigabytes need not be sent, workers compare hashes, and a server keeps only the hashes. A value is sent only
# if a worker's hash differs.

CHUNK_BYTES = 16 * 2**20
"""Maximum size of the part of a tensor that is copied from a device at a time."""

DIGITS = 64
"""Number of hexadecimal digits of a digest."""


def chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Return the bytes of a tensor, in parts of at most `CHUNK_BYTES`. Parts of a contiguous CPU tensor are views."""
    values = tensor.detach().reshape(-1)
    for part in values.split(max(1, CHUNK_BYTES // values.itemsize)) if values.numel() else ():
        yield lent_bytes(part.cpu())


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 hash of the dtype, the shape and the bytes of a tensor, as hexadecimal digits.

    Example:
        >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2))
        True
        >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2, 1))
        False
    """
    hashed = sha256(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    for part in chunks(tensor):
        hashed.update(part)
    return hashed.hexdigest()


def digests_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the digest of each tensor. A tied tensor is hashed once. Several tensors are hashed at the same time."""
    distinct = {id(tensor): tensor for tensor in tensors}
    with ThreadPoolExecutor(torch.get_num_threads(), "paceline-digests") as pool:
        found = dict(zip(distinct, pool.map(digest_of, distinct.values()), strict=True))
    return [found[id(tensor)] for tensor in tensors]


# -- Decodes the hyper-parameters that every push carries ----------------------------------------------------

Groups = tuple[HyperParameters, ...]

_decoder = msgspec.msgpack.Decoder(Groups)


class GroupsReader:
    """Decodes and checks the hyper-parameters of the parameter groups. The result of the last decoding is cached.

    Args:
        check: function that raises `ProtocolError` if the optimizer cannot use the given hyper-parameters.
    """

    def __init__(self, check: Callable[[Groups], None] = lambda groups: None) -> None:
        self._check = check
        self._last: tuple[bytes, Groups] = b"", ()

    def read(self, encoded: bytes) -> Groups:
        """Return each group's hyper-parameters. Raise `ProtocolError` if they cannot be decoded or used."""
        if encoded != self._last[0]:
            try:
                groups = _decoder.decode(encoded)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"the hyper-parameters of a push cannot be decoded: {error}") from error
            self._check(groups)
            self._last = encoded, groups
        return self._last[1]


# -- Converts model buffers (tensors that no optimizer trains) to and from bytes, and pools the workers' copies
#
# Each worker computes its own copy of the buffers, such as BatchNorm's running statistics, and sends it with
# its pushes. The server stores each worker's copy separately. For evaluation, checkpoints and the final
# weights, the copies are *pooled*:
#
#     equal in all workers          unchanged, bit for bit; running_var only if running_mean is equal as well
#     running_mean                  mean over the workers
#     running_var                   mean of the variances plus the variance of the means: the variance over the batches
#                                   of all workers
#     other floating-point tensors  mean
#     integers, booleans            element-wise maximum, which suits counters and masks
#     other dtypes                  the copy of the worker with the lowest index

AVERAGED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
COUNTED = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


def packed_bytes(spec: BufferSpec) -> int:
    """Return the size of a buffer in bytes."""
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def pack(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the bytes of each tensor."""
    return [bytes_of(tensor.detach().contiguous().reshape(-1)) for tensor in tensors]


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of the bytes of all tensors."""
    found = 0
    for data in pack(tensors):
        found = crc32(data, found)
    return found


def bytes_of(vector: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor without copying them."""
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def lent_bytes(vector: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor of the script without copying them. The bytes must not be written to.

    `bytes_of` would call `numpy()`, after which torch no longer lets the script's tensor grow.
    """
    return memoryview(np.from_dlpack(vector.detach().view(torch.uint8)))  # type: ignore[arg-type]


def unpack(spec: BufferSpec, data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return a buffer with a copy of the bytes in `data`."""
    if not packed_bytes(spec):
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)


def pool(slots: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pool the buffers of all workers according to the rules above.

    Args:
        slots: one mapping from name to buffer per worker, in the order of the workers' indices. Must not be empty.
    """
    return {name: _pool_one(name, slots) for name in slots[0]}


def _pool_one(name: str, slots: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    copies = [slot[name] for slot in slots]
    if copies[0].dtype in AVERAGED:
        pooled = copies[0] if _same(copies) else torch.stack(copies).mean(0)
        name_of_mean = name.removesuffix("running_var") + "running_mean"
        if name.endswith("running_var") and name_of_mean in slots[0]:
            means = [slot[name_of_mean] for slot in slots]
            pooled = pooled if _same(means) else pooled + torch.stack(means).var(0, correction=0)
        return pooled
    if copies[0].dtype in COUNTED and not _same(copies):
        return torch.stack(copies).amax(0)
    return copies[0]


def _same(copies: Sequence[torch.Tensor]) -> bool:
    """Return True if all copies have the same bits. Comparing bits makes NaN equal to NaN."""
    first, *others = pack(copies)
    return all(other == first for other in others)


# -- Encodes and decodes the states of the objects that a script tracks, without pickling. See `paceline.track`
#
# Encoded states are a short header in MessagePack, followed by the bytes of all tensors and arrays. The
# header contains the dtype and the shape of each tensor, and the nested structure, in which every container
# and every tensor is a pair (kind, content). Nothing in the bytes can cause code to run.

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
"""The dtypes of NumPy arrays that can be encoded: those that torch has as well."""

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
"""The exceptions that decoding can raise if the bytes do not encode states. A `RecursionError` is a `RuntimeError`."""


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
    """Encode states, and return the bytes. The bytes of tensors in CPU memory are not copied if they are contiguous.

    A state consists of numbers, strings, bytes, None, NumPy scalars (which are decoded as numbers), tensors and
    arrays, in dictionaries, lists and tuples.

    Args:
        states: the state of each object, by the name of the object.

    Raises:
        UsageError: a state contains an object of another type, or the states are too large.

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
    if type(value) is int:
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
    """Return the states that these bytes encode.

    Args:
        data: the bytes.
        arrays: True to return NumPy arrays as arrays, False to return them as tensors.

    Raises:
        ProtocolError: the bytes are not those of states.
    """
    try:
        view = memoryview(data)
        header, begin = _read_header(view)
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
    """Check that these bytes encode states, without copying the values of tensors.

    Raises:
        ProtocolError: the bytes are not those of states.
    """
    try:
        view = memoryview(data)
        header, begin = _read_header(view)
        end = begin + sum(each.size_bytes for each in header.tensors)
        if end != len(view) or any(min(each.shape, default=0) < 0 for each in header.tensors):
            raise ValueError(f"{len(view)} bytes, expected {end}")
        nothing = [torch.empty(0)] * len(header.tensors)
        {str(name): _value(state, nothing, arrays=False) for name, state in header.structure.items()}
    except MALFORMED as error:
        raise ProtocolError(f"the states of tracked objects cannot be read: {error}") from error


def _read_header(view: memoryview) -> tuple[_Header, int]:
    """Return the header of encoded states, and where the bytes of the tensors begin."""
    (length,) = LENGTH.unpack_from(view)
    begin = LENGTH.size + length
    return msgspec.msgpack.decode(view[LENGTH.size : begin], type=_Header), begin


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


# -- The state of one parameter as tensors
#
# An entry of an optimizer's state is a tensor, a number, or a list, tuple or dictionary. The elements of a list, tuple
# or dictionary are entries of these kinds, strings, or None. `tensors_of` gives these entries the following names:
#
#     "momentum_buffer"   a tensor
#     "#steps"            a number, as a tensor without dimensions
#     "@Q"                a list, tuple or dictionary, without its tensors, as the bytes of a message in MessagePack
#     "Q/0", "Q/1"        the tensors in the list, tuple or dictionary "Q"

NUMBER, NESTED = "#", "@"


def tensors_of(entries: Mapping[str, Any]) -> Vectors:
    """Return the state of one parameter as tensors. Entries of other kinds than those above are left out."""
    found: Vectors = {}
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            found[key] = value
        elif isinstance(value, int | float):
            number = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
            found[f"{NUMBER}{key}"] = number
        elif isinstance(value, list | tuple | dict):
            inside: list[torch.Tensor] = []
            structure = msgspec.msgpack.encode(_structure(value, key, inside, 0))
            found[f"{NESTED}{key}"] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
            found |= {f"{key}/{index}": tensor for index, tensor in enumerate(inside)}
    return found


def entries_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of one parameter, given a result of `tensors_of`.

    Raises:
        ProtocolError: the tensors are not such a result.
    """
    entries: dict[str, Any] = {}
    try:
        for name, tensor in tensors.items():
            key = name[1:]
            if name.startswith(NUMBER):
                entries[key] = tensor.item()
            elif name.startswith(NESTED):
                inside = [
                    tensors[f"{key}/{index}"] for index in range(len(tensors)) if f"{key}/{index}" in tensors
                ]
                entries[key] = _value(msgspec.msgpack.decode(bytes_of(tensor)), inside, arrays=False)
            elif f"{NESTED}{name.rpartition('/')[0]}" not in tensors:
                entries[name] = tensor
    except MALFORMED as error:
        raise ProtocolError(f"the state of an optimizer cannot be read: {error}") from error
    return entries
