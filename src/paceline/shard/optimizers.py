"""The optimizers that can run on slices of the parameters, and their hyper-parameters and states as plain data.

An *elementwise* optimizer updates each element independently, so it gives the same result on any slice of the flat
vectors. A *tensorwise* optimizer updates each tensor independently, so servers that hold whole tensors can run it.
`ELEMENTWISE` and `TENSORWISE` list those of torch, and `REFUSED` says why its other optimizers are rejected before
training begins. Classes of other packages are tested (see `foreign`). Paceline's own LARS needs whole tensors only to
scale the gradients, so the workers scale the gradients and the servers run SGD.

Hyper-parameters are sent with every push as plain data; `read_groups` reads them from the user's optimizer.

Below: the states of optimizers as slices, the states of tracked objects as bytes, and how `torch._dynamo` stays out.
"""

from __future__ import annotations

import functools
import inspect
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ..core.layout import HyperParameter, HyperParameters, Layout, ShardSlice
from ..core.messages import MOST_STATES_BYTES
from ..errors import ConfigurationError, ProtocolError, UsageError
from .foreign import Tested, build, class_of, has_modes, look_inside, try_foreign
from .lars import LARS
from .optimizer_sources import class_name
from .vectors import Vectors, dtype_name, lent_bytes

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
}
"""The optimizer classes of torch that the servers can run on slices, by name."""

TENSORWISE: dict[str, type[torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
}
"""The optimizer classes of torch that the servers can run on whole tensors, by name. Old versions have no Muon."""

OF_TORCH = ELEMENTWISE | TENSORWISE

PER_PARAMETER_STATE = frozenset({"step", "eta", "mu", "mu_product"})
"""Keys of the state entries that hold one number per parameter. Other entries hold one number per element."""

REFUSED = {
    "LBFGS": Tested(
        "its step needs the inner products of whole gradients, and evaluates the closure several times",
        instead="Use Adam, or SGD with momentum",
    ),
    "SparseAdam": Tested(
        "it updates only the rows that occur in a sparse gradient, but gradients are pushed as dense vectors",
        instead="Use Adam, and create the embeddings with sparse=False",
    ),
}
"""Why the other optimizers of torch cannot run on the servers, and what to use instead."""

HARMLESS = frozenset(
    {
        *("__init__", "__module__", "__qualname__", "__doc__", "__repr__", "__annotations__", "__dict__"),
        *("__weakref__", "__slots__", "__orig_bases__", "__parameters__", "__firstlineno__"),
        *("__static_attributes__", "__getstate__", "__setstate__", "__reduce__", "__copy__", "__deepcopy__"),
        *("state_dict", "load_state_dict", "add_param_group", "zero_grad"),
    }
)
"""Attributes of an optimizer class that do not affect how it updates parameters from its hyper-parameters."""

IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that only select one of torch's implementations. The servers do not use the user's choice."""

AFTER_SCALING: HyperParameters = {"dampening": 0.0, "weight_decay": 0.0, "maximize": False}
"""Settings of the SGD optimizer that the servers run for LARS. The scaled gradients already include weight decay."""

PLAIN = frozenset({float, int, bool, type(None)})
"""Types of hyper-parameters that need no conversion."""


class ServerOptimizer(NamedTuple):
    """What the servers run for the script's optimizer.

    Attributes:
        name: a name in `OF_TORCH` for torch's classes and for subclasses that update in the same way, "SGD" for LARS,
            and "module:Class" for other classes.
        whole: True if it needs whole tensors.
    """

    name: str
    whole: bool = False


def server_optimizer(optimizer: torch.optim.Optimizer) -> ServerOptimizer:
    """Return what the servers run for this optimizer. Classes that are not of torch are tested first.

    Raises:
        ConfigurationError: the optimizer cannot run on the servers; the message says why.
    """
    kind = type(optimizer)
    if kind is LARS:
        return ServerOptimizer("SGD")
    if (name := torch_name(kind)) is not None:
        return ServerOptimizer(name, name in TENSORWISE)
    base = next((base for base in kind.__mro__ if base.__name__ in REFUSED and _is_of_torch(base)), None)
    tested = look_inside(optimizer) if base is None else REFUSED[base.__name__]
    if not tested.reason:
        tested = try_foreign(optimizer, read_groups(optimizer))
    if tested.reason:
        others = (
            "Optimizers that update each element or each tensor independently can run there, for example "
            f"{', '.join(OF_TORCH)} and paceline.LARS"
        )
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} cannot run on the servers, each of which holds a part of the "
            f"parameters: {tested.reason}. {tested.instead or others}. Outside a run, every optimizer works."
        )
    return ServerOptimizer(class_name(kind), tested.whole)


def torch_name(kind: type) -> str | None:
    """Return the name in `OF_TORCH` of the class that makes the same updates as `kind`; None if there is none.

    A subclass makes the same updates if it overrides none of its base's methods, except those in `HARMLESS`, and has
    no modes (see `foreign`).
    """
    for position, base in enumerate(kind.__mro__):
        if base is OF_TORCH.get(base.__name__):
            own = {name for cls in kind.__mro__[:position] for name in vars(cls)} - HARMLESS
            same = all(_function(kind, name) is _function(base, name) for name in own if hasattr(base, name))
            return base.__name__ if same and not has_modes(kind) else None
    return None


def read_groups(optimizer: torch.optim.Optimizer) -> tuple[HyperParameters, ...]:
    """Return the hyper-parameters of each group as plain data, for the optimizer class that the servers run.

    Raises:
        ConfigurationError: a hyper-parameter is not a number, a pair of numbers or None. An optimizer that is not one
            of torch's may also have strings, and tuples of any number of numbers.
    """
    rest: HyperParameters = {}
    keys: tuple[str, ...]
    convert = _read_value
    kind: Any = type(optimizer)
    if isinstance(optimizer, LARS):
        keys, rest = ("lr", "momentum", "nesterov"), AFTER_SCALING
    elif (known := _keys_of(kind)) is not None:
        keys = known
        if torch_name(kind) in TENSORWISE:
            convert = _read_foreign_value
    else:
        keys = tuple(key for key in optimizer.defaults if key not in IMPLEMENTATION_KEYS)
        convert = _read_foreign_value
    found = []
    for group in optimizer.param_groups:
        settings = rest.copy()
        for key in keys:
            value = group[key]
            # This runs in every step, and nearly all values are plain.
            settings[key] = value if type(value) in PLAIN else convert(key, value)
        found.append(settings)
    return tuple(found)


def make_optimizer(
    name: str, groups: Sequence[HyperParameters], parameters: Sequence[list[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Return a new optimizer of the class `name`. `parameters` has a list of tensors for each group."""
    settings: Any = [{**group, "params": tensors} for group, tensors in zip(groups, parameters, strict=True)]
    kind = OF_TORCH.get(name)
    if kind is None:
        return build(class_of(name), settings)
    defer_dynamo()  # the process that serves a run creates an optimizer while it writes a checkpoint
    # torch reads these hyper-parameters only from the constructor's defaults, not from the groups.
    defaults: Any = {key: groups[0][key] for key in ("lr", "initial_accumulator_value") if key in groups[0]}
    return kind(settings, **defaults)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, but without importing `torch._dynamo` if the optimizer is of one of torch's classes.

    Their `step` asks the compiler not to trace through `torch.no_grad()`, although nothing is compiled on a server.
    So the first call would import it, which takes as long as importing torch, while workers wait.
    """
    kind: Any = type(optimizer)
    step = _untraced_step(kind)
    if step is None:
        optimizer.step()
    else:
        with torch.no_grad():
            step(optimizer)


def rehearse(
    name: str, before: Sequence[HyperParameters], after: Sequence[HyperParameters], *, whole: bool
) -> None:
    """Check that torch can take a step with the hyper-parameters `before`, and then a step with `after`.

    Each step uses one parameter with a single element per group.

    Raises:
        Exception: any error that torch raises because it cannot take one of the two steps.
    """
    make_optimizer(name, after, [[specimen(whole=whole)] for _ in after])
    parameters = [specimen(whole=whole) for _ in before]
    optimizer = make_optimizer(name, before, [[parameter] for parameter in parameters])
    for settings in (before, after):
        for group, one, parameter in zip(optimizer.param_groups, settings, parameters, strict=True):
            group.update(one)
            parameter.grad = torch.ones_like(parameter)
        take_step(optimizer)


def specimen(*, whole: bool) -> torch.Tensor:
    """Return a parameter of one element. Optimizers that need whole tensors may accept matrices only, as Muon does."""
    return torch.zeros((1, 1) if whole else 1)


@functools.lru_cache(maxsize=64)
def _untraced_step(kind: Any) -> Callable[[torch.optim.Optimizer], object] | None:
    """Return the method `step` of a torch class, without what torch has wrapped around it; None for other classes."""
    return inspect.unwrap(kind.step) if kind in OF_TORCH.values() else None


@functools.lru_cache(maxsize=64)
def _keys_of(kind: Any) -> tuple[str, ...] | None:
    """Return the names of the hyper-parameters of a torch class or its subclass; None for any other class."""
    name = torch_name(kind)
    if name is None:
        return None
    known: Any = OF_TORCH[name]
    return tuple(
        key for key in known([specimen(whole=name in TENSORWISE)]).defaults if key not in IMPLEMENTATION_KEYS
    )


def _function(kind: type, name: str) -> Any:
    """Return an attribute of a class without the wrappers that torch puts around `step`."""
    return inspect.unwrap(getattr(kind, name))


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _read_value(key: str, value: Any) -> HyperParameter:
    if isinstance(value, torch.Tensor | np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tuple | list) and len(value) == 2:
        return (float(value[0]), float(value[1]))
    raise ConfigurationError(
        f"Hyper-parameter {key} is {value!r}; expected a number, a pair of numbers or None."
    )


def _read_foreign_value(key: str, value: Any) -> HyperParameter:
    """Return a hyper-parameter of a class that is not one of torch's: also a string, or a tuple of numbers."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple | list) and all(isinstance(v, int | float | np.number | None) for v in value):
        return tuple(None if each is None else float(each) for each in value)
    try:
        return _read_value(key, value)
    except (ConfigurationError, RuntimeError, ValueError):
        raise ConfigurationError(
            f"Hyper-parameter {key} is {value!r}, which cannot be sent to the servers; expected a number, text, "
            "None, or a tuple of numbers and None."
        ) from None


# -- Splits the state of an optimizer into one state per shard, and joins the states of all shards -----------
#
# The user's optimizer stores its state per parameter, but a shard holds segments of parameters. The state of
# a shard maps "<segment>/<key>" to a tensor, where <segment> is the position of the segment in the shard and
# <key> is torch's name for the entry, for example "0/momentum_buffer". Entries that are Python numbers, which
# only optimizers that are not torch's have, become tensors without dimensions under a marked key, for example
# "0/#steps".

# An optimizer state is rejected if it is larger than STATE_LIMIT_FACTOR times the shard's weights, plus
# STATE_SLACK_BYTES, because optimizers store only a few vectors as large as the weights.
STATE_LIMIT_FACTOR = 8
STATE_SLACK_BYTES = 16 * 1024 * 1024

NUMBER = "#"
"""First character of the keys of Python numbers."""


def slice_state(
    bounds: ShardSlice, parameters: Sequence[torch.Tensor], state: Mapping[Any, Mapping[str, Any]]
) -> Vectors:
    """Return the part of an optimizer's state that belongs to one shard.

    Args:
        bounds: the shard.
        parameters: the parameters, in the order of the layout.
        state: the optimizer's `state`: parameter -> key -> value. Values that are neither tensors nor numbers are
            omitted.
    """
    values: Vectors = {}
    single = PER_PARAMETER_STATE | {
        key
        for parameter, entries in state.items()
        for key, value in tensors_of(entries).items()
        if not value.dim() and parameter.dim()
    }
    for position, segment in enumerate(bounds.segments):
        for key, value in tensors_of(state.get(parameters[segment.parameter], {})).items():
            if key in PER_PARAMETER_STATE:
                value = value.to(_scalar_dtype())
            elif segment.shape is None and key not in single and key[0] != NUMBER:
                value = value.reshape(-1)[segment.offset :][: segment.stop - segment.start].clone()
            values[f"{position}/{key}"] = value
    return values


def tensors_of(entries: Mapping[str, Any]) -> Vectors:
    """Return those entries of one parameter's state that are tensors or numbers, as tensors."""
    return {
        key if isinstance(value, torch.Tensor) else f"{NUMBER}{key}": value
        if isinstance(value, torch.Tensor)
        else torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        for key, value in entries.items()
        if isinstance(value, torch.Tensor | int | float)
    }


def entry_of(key: str, value: torch.Tensor) -> dict[str, Any]:
    """Return an entry of one parameter's state, given its key and value in a result of `tensors_of`."""
    return {key[1:]: value.item()} if key.startswith(NUMBER) else {key: value}


def join_state(layout: Layout, fetched: Iterable[tuple[ShardSlice, Vectors]]) -> dict[int, dict[str, Any]]:
    """Join the states of all shards. The result has the format of the "state" entry of a `state_dict()`."""
    state: dict[int, dict[str, Any]] = {}
    for bounds, values in fetched:
        for name, value in values.items():
            position, _, key = name.partition("/")
            segment = bounds.segments[int(position)]
            parameter = layout.parameters[segment.parameter]
            entries = state.setdefault(segment.parameter, {})
            if key in PER_PARAMETER_STATE or not value.dim() or segment.shape is not None:
                entries.update(entry_of(key, value))
                continue
            whole = entries.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype))
            whole.view(-1)[segment.offset : segment.offset + value.numel()] = value
    return dict(sorted(state.items()))


def segments_of_state(
    bounds: ShardSlice, state: Vectors, *, scalars: bool = False
) -> dict[str, tuple[int, str]]:
    """Split each name in a shard's state into a segment and a key: name -> (segment, key).

    Args:
        bounds: the shard.
        state: the state of the shard.
        scalars: True if any entry may have one number per parameter, False if only those in `PER_PARAMETER_STATE`.

    Raises:
        ProtocolError: a name or a shape matches no segment of this shard.
    """
    places = {}
    segments = {str(position): segment for position, segment in enumerate(bounds.segments)}
    for name, value in state.items():
        position, _, key = name.partition("/")
        segment = segments.get(position)
        fits = (
            segment is not None
            and key != ""
            and (
                (segment.shape is not None and key not in PER_PARAMETER_STATE)
                or tuple(value.shape)
                == (() if key in PER_PARAMETER_STATE else (segment.stop - segment.start,))
                or (scalars and not value.dim())
            )
        )
        if not fits:
            raise ProtocolError(
                f"optimizer state {name!r} of shape {list(value.shape)} matches no segment of this shard"
            )
        places[name] = int(position), key
    return places


def _scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim creates step counts. `load_state_dict()` can change their dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def require_plausible_state(shard: ShardSlice, size_bytes: int) -> None:
    """Raise `ProtocolError` if a shard's optimizer state of this size is larger than that of any optimizer."""
    limit_bytes = STATE_LIMIT_FACTOR * shard.size_bytes + STATE_SLACK_BYTES
    if size_bytes > limit_bytes:
        raise ProtocolError(f"an optimizer state has {size_bytes} bytes, expected at most {limit_bytes}")


# -- Encodes and decodes the states of the objects that a script tracks, without pickling. See `paceline.track`
#
# Encoded states are a short header in MessagePack, followed by the bytes of all tensors and arrays. The
# header contains the nested structure, in which every container and every tensor is a pair (kind, content),
# and the dtype and the shape of each tensor. Nothing in the bytes can cause code to run.

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
"""The exceptions that other bytes than those of states can cause. A `RecursionError` is a `RuntimeError`."""


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
    """Check that some bytes are those of states, without copying the values of tensors.

    Raises:
        ProtocolError: they are not.
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


# -- Keeps `torch._dynamo` from being imported before it has anything to do ----------------------------------
#
# Some methods of `torch.optim.Optimizer`, among them `add_param_group` and so the constructor, ask
# `torch._dynamo` not to trace them. The first call of such a method imports `torch._dynamo`, which takes as
# much time as importing torch itself. But nothing can be tracing while `torch._dynamo` has not been imported,
# so until then, the request has no effect.

# In torch 2.13, a function that `torch._disable_dynamo` has wrapped looks up its untraced version in this
# attribute of the original function, and imports `torch._dynamo` only if it is missing.
UNTRACED = "__dynamo_disable"


@functools.cache
def defer_dynamo() -> None:
    """Let optimizers be created and used without importing `torch._dynamo`, until something else imports it."""
    from torch.optim import Optimizer

    for method in list(vars(Optimizer).values()):
        original = getattr(method, "__wrapped__", None)
        code = getattr(method, "__code__", None)
        if original is not None and code is not None and UNTRACED in code.co_consts:
            setattr(original, UNTRACED, _deferred(method, original))


def _deferred(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the original, or the method if `torch._dynamo` has been imported."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return original(*args, **options)
        if getattr(original, UNTRACED, None) is call:
            delattr(original, UNTRACED)
        return method(*args, **options)

    return call
