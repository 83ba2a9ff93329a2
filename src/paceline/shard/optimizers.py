"""The optimizers that servers can run, and the hyper-parameters and states of these optimizers as plain data.

An *elementwise* optimizer updates each element independently, so it gives the same result on any slice of the flat
vectors. A *tensorwise* optimizer updates each tensor independently, so servers that hold whole tensors can run it.
`ELEMENTWISE` and `TENSORWISE` list such optimizers of torch, and `REFUSED` says why torch's other optimizers are
rejected before training begins. Classes of other packages are tested (see `foreign`). Paceline's own LARS needs whole
tensors only to scale the gradients, so the workers scale the gradients and the servers run SGD.

Hyper-parameters are sent with every push as plain data; `read_groups` reads them from the user's optimizer.

The second half of this file contains the functions that divide the states of optimizers into slices, and those that
avoid the import of `torch._dynamo`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from ..core.layout import Counters, HyperParameter, HyperParameters, Layout, ShardSlice, item_bytes
from ..errors import ConfigurationError, ProtocolError
from .foreign import Acceptance, build, class_of, has_modes, look_inside, try_foreign
from .lars import LARS
from .optimizer_sources import class_name
from .vectors import NESTED, Vectors, bytes_of, entries_of, tensors_of

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

TENSORWISE_NAMES = ("Adafactor", "Muon")

TENSORWISE: dict[str, type[torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name) for name in TENSORWISE_NAMES if hasattr(torch.optim, name)
}
"""The optimizer classes of torch that the servers can run on whole tensors, by name. Old versions have no Muon."""

OF_TORCH = ELEMENTWISE | TENSORWISE

PER_PARAMETER_STATE = frozenset({"step", "eta", "mu", "mu_product"})
"""Keys of the state entries that hold one number per parameter. Other entries hold one number per element."""

REFUSED = {
    "LBFGS": Acceptance(
        "its step needs the inner products of whole gradients, and evaluates the closure several times",
        instead="Use Adam, or SGD with momentum",
    ),
    "SparseAdam": Acceptance(
        "it updates only the rows that occur in a sparse gradient, but gradients are pushed as dense vectors",
        instead="Use Adam, and create the embeddings with sparse=False",
    ),
}
"""Name of each other optimizer of torch -> why it cannot run on the servers, and what to use instead."""

HARMLESS = frozenset(
    {
        *("__init__", "__module__", "__qualname__", "__doc__", "__repr__", "__annotations__", "__dict__"),
        *("__weakref__", "__slots__", "__orig_bases__", "__parameters__", "__firstlineno__"),
        *("__static_attributes__", "__getstate__", "__setstate__", "__reduce__", "__copy__", "__deepcopy__"),
        *("state_dict", "load_state_dict", "add_param_group", "zero_grad"),
    }
)
"""Attributes that a subclass of an optimizer may override without changing the optimizer's updates."""

IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that only select one of torch's implementations. The servers do not use the user's choice."""

AFTER_SCALING: HyperParameters = {"dampening": 0.0, "weight_decay": 0.0, "maximize": False}
"""Settings of the SGD optimizer that the servers run for LARS. The scaled gradients already include weight decay."""

PLAIN = frozenset({float, int, bool, type(None)})
"""Types of hyper-parameters that need no conversion."""

OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""The entries that torch's schedulers add to parameter groups for their own use."""

NOT_SENT: Any = object()
"""Stands for a hyper-parameter that a group lacks, or that servers have by default."""

# optimizer -> the first result of `_further_keys`. It is kept so that every push contains the same settings.
_of_groups: WeakKeyDictionary[torch.optim.Optimizer, tuple[str, ...]] = WeakKeyDictionary()


class ServerOptimizer(NamedTuple):
    """The optimizer that the servers run for the script's optimizer.

    Attributes:
        name: a name in `OF_TORCH` for torch's classes and for subclasses that update in the same way, "SGD" for LARS,
            and "module:Class" for other classes.
        whole: True if the optimizer needs whole tensors.
    """

    name: str
    whole: bool = False


def server_optimizer(optimizer: torch.optim.Optimizer) -> ServerOptimizer:
    """Return the optimizer that the servers run for this optimizer. Classes that are not torch's are tested first.

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
    """Return the name in `OF_TORCH` of the class that makes the same updates as `kind`; None if there is no such class.

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
        ConfigurationError: a hyper-parameter is not a number, a pair of numbers or None. Tensorwise optimizers, and
            optimizers that are not torch's, may also have strings, and tuples of any length.
    """
    rest: HyperParameters = {}
    keys: tuple[str, ...]
    convert: Callable[[str, Any], Any] = _read_value
    kind: Any = type(optimizer)
    if isinstance(optimizer, LARS):
        keys, rest = ("lr", "momentum", "nesterov"), AFTER_SCALING
    elif (known := _keys_of(kind)) is not None:
        keys = known
        if torch_name(kind) in TENSORWISE:
            convert = partial(_read_foreign_value, kind)
    else:
        keys = tuple(key for key in optimizer.defaults if key not in IMPLEMENTATION_KEYS)
        keys += _of_groups.setdefault(optimizer, _further_keys(optimizer))
        convert = partial(_read_foreign_value, kind)
    found = []
    for group in optimizer.param_groups:
        settings = rest.copy()
        for key in keys:
            value = group.get(key, NOT_SENT)
            # This loop runs in every step, and nearly all values need no conversion.
            value = value if type(value) in PLAIN else convert(key, value)
            if value is not NOT_SENT:
                settings[key] = value
        found.append(settings)
    return tuple(found)


def _further_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the plain entries of a script's groups that are not among the defaults of the optimizer.

    An optimizer may distinguish its groups by these entries, as the Muon of several packages does by `use_muon`.
    """
    known = {"params", *optimizer.defaults, *IMPLEMENTATION_KEYS, *OF_SCHEDULERS}
    return tuple(
        dict.fromkeys(
            key
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in known and type(value) in PLAIN | {str}
        )
    )


def class_of_torch(name: str) -> type[torch.optim.Optimizer]:
    """Return one of torch's classes.

    Raises:
        ConfigurationError: the installed version of torch does not have it. A worker may have another version.
    """
    if name not in OF_TORCH:
        raise ConfigurationError(
            f"torch {torch.__version__}, which is installed on the machine of a server, has no torch.optim.{name}, but "
            "a worker uses this optimizer. On the machine of the server, install a version of torch that has the "
            "optimizer, or use another optimizer in the script."
        )
    return OF_TORCH[name]


def make_optimizer(
    name: str, groups: Sequence[HyperParameters], parameters: Sequence[list[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Return a new optimizer of the class `name`. `parameters` has a list of tensors for each group."""
    settings: Any = [{**group, "params": tensors} for group, tensors in zip(groups, parameters, strict=True)]
    if ":" in name:
        return build(class_of(name), settings)
    kind = class_of_torch(name)
    defer_dynamo()  # the process that serves a run creates an optimizer while it writes a checkpoint
    # torch reads these hyper-parameters only from the constructor's defaults, not from the groups.
    defaults: Any = {key: groups[0][key] for key in ("lr", "initial_accumulator_value") if key in groups[0]}
    return kind(settings, **defaults)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, but without importing `torch._dynamo` if the optimizer is of one of torch's classes.

    The `step` of torch's classes asks the compiler not to trace through `torch.no_grad()`, although nothing is compiled
    on a server. So the first call would import `torch._dynamo`, which takes as long as importing torch, while workers
    wait.
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
    """Return the method `step` of a torch class, without the wrappers of torch; None for other classes."""
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


def _read_foreign_value(kind: Any, key: str, value: Any) -> Any:
    """Return a hyper-parameter of a tensorwise optimizer, or of a class that is not one of torch's.

    The value may also be a string or a tuple of numbers. A value of any other type is not sent if it is the default of
    the class.
    """
    if value is NOT_SENT:
        return NOT_SENT
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple | list) and all(isinstance(v, int | float | np.number | None) for v in value):
        return tuple(None if each is None else float(each) for each in value)
    try:
        return _read_value(key, value)
    except (ConfigurationError, RuntimeError, ValueError):
        default = _defaults_of(kind).get(key, NOT_SENT)
        if type(value) is type(default) and not isinstance(value, torch.Tensor) and value == default:
            return NOT_SENT
        raise ConfigurationError(
            f"Hyper-parameter {key} is {value!r}, which cannot be sent to the servers; expected a number, text, "
            "None, a tuple of numbers and None, or the default of the class."
        ) from None


@functools.lru_cache(maxsize=64)
def _defaults_of(kind: Any) -> dict[str, Any]:
    """Return the hyper-parameters that a class has by default; {} if one of them has no default."""
    try:
        return dict(kind([specimen(whole=True)]).defaults)
    except Exception:  # an optimizer may raise any exception
        return {}


# -- Splits the state of an optimizer into one state per shard, and joins the states of all shards -----------
#
# The user's optimizer stores its state per parameter, but a shard holds segments of parameters. The state of
# a shard maps "<segment>/<key>" to a tensor, where <segment> is the position of the segment in the shard and
# <key> is the name of a tensor in a result of `vectors.tensors_of`, for example "0/momentum_buffer". The
# numbers that an optimizer counts in its groups are in the entry `COUNTERS`.

# An optimizer state is rejected if it is larger than STATE_LIMIT_FACTOR times the shard's weights, plus
# STATE_SLACK_BYTES, because optimizers store only a few vectors as large as the weights and, for each dimension of a
# whole tensor, a few square matrices with as many rows as this dimension has elements.
STATE_LIMIT_FACTOR = 8
STATE_SLACK_BYTES = 16 * 1024 * 1024

COUNTERS = "counters"
"""Name of the entry of a shard's state that has the counters of all parameter sets, as bytes in MessagePack."""


def slice_state(
    bounds: ShardSlice, parameters: Sequence[torch.Tensor], state: Mapping[Any, Mapping[str, Any]]
) -> Vectors:
    """Return the part of an optimizer's state that belongs to one shard.

    Args:
        bounds: the shard.
        parameters: the parameters, in the order of the layout.
        state: the optimizer's `state`: parameter -> key -> value. Values that `tensors_of` leaves out are omitted.
    """
    values: Vectors = {}
    found = {parameter: tensors_of(entries) for parameter, entries in state.items()}
    single = {
        key
        for parameter, entries in found.items()
        for key, value in entries.items()
        if not value.dim() and parameter.dim()
    }
    for position, segment in enumerate(bounds.segments):
        for key, value in found.get(parameters[segment.parameter], {}).items():
            if key in PER_PARAMETER_STATE and not value.dim() and value.is_floating_point():
                value = value.to(_scalar_dtype())
            elif segment.shape is None and key not in single:
                value = value.reshape(-1)[segment.offset :][: segment.stop - segment.start].clone()
            values[f"{position}/{key}"] = value
    return values


def join_state(layout: Layout, fetched: Iterable[tuple[ShardSlice, Vectors]]) -> dict[int, dict[str, Any]]:
    """Join the states of all shards. The result has the format of the "state" entry of a `state_dict()`."""
    found: dict[int, Vectors] = {}
    for bounds, values in fetched:
        for name, (position, key) in segments_of_state(bounds, values, scalars=True).items():
            segment, value = bounds.segments[position], values[name]
            tensors = found.setdefault(segment.parameter, {})
            if not value.dim() or segment.shape is not None:
                tensors[key] = value
                continue
            shape = layout.parameters[segment.parameter].shape
            whole = tensors.setdefault(key, torch.zeros(shape, dtype=value.dtype))
            whole.view(-1)[segment.offset : segment.offset + value.numel()] = value
    return {index: entries_of(found[index]) for index in sorted(found)}


def segments_of_state(
    bounds: ShardSlice, state: Vectors, *, scalars: bool = False
) -> dict[str, tuple[int, str]]:
    """Split each name in a shard's state, except `COUNTERS`, into a segment and a key: name -> (segment, key).

    Args:
        bounds: the shard.
        state: the state of the shard.
        scalars: True if any entry may have one number per parameter. False if only the entries in `PER_PARAMETER_STATE`
            may have one number per parameter.

    Raises:
        ProtocolError: a name or a shape matches no segment of this shard.
    """
    places = {}
    segments = {str(position): segment for position, segment in enumerate(bounds.segments)}
    for name, value in state.items():
        if name == COUNTERS:
            continue
        position, _, key = name.partition("/")
        segment = segments.get(position)
        fits = (
            segment is not None
            and key != ""
            and (
                (segment.shape is not None and (scalars or key not in PER_PARAMETER_STATE))
                or (not value.dim() and (scalars or key in PER_PARAMETER_STATE))
                or (
                    value.shape == (segment.stop - segment.start,)
                    and (scalars or key not in PER_PARAMETER_STATE)
                )
            )
        )
        if not fits:
            raise ProtocolError(
                f"optimizer state {name!r} of shape {list(value.shape)} matches no segment of this shard"
            )
        places[name] = int(position), key
    return places


def vectors_in(state: Vectors) -> Vectors:
    """Return the tensors in a shard's state, sorted by name, without single numbers, counters and the descriptions of
    nested entries.
    """
    return {
        name: value
        for name, value in sorted(state.items())
        if value.dim() and name != COUNTERS and not name.partition("/")[2].startswith(NESTED)
    }


def with_counters(state: Vectors, counters: Sequence[Sequence[HyperParameters]]) -> Vectors:
    """Return the state of a shard together with the entries that each optimizer has changed in each of its groups."""
    if not any(itertools.chain(*counters)):
        return state
    return state | {
        COUNTERS: torch.frombuffer(bytearray(msgspec.msgpack.encode(counters)), dtype=torch.uint8)
    }


def counters_in(state: Vectors) -> Counters:
    """Return the counters of a shard, by parameter set and group; () if its state has none.

    Raises:
        ProtocolError: the entry is malformed.
    """
    if COUNTERS not in state:
        return ()
    try:
        return msgspec.msgpack.decode(bytes_of(state[COUNTERS]), type=Counters)
    except (msgspec.MsgspecError, RuntimeError) as error:
        raise ProtocolError(f"the counters of an optimizer cannot be read: {error}") from error


def _scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim creates step counts. `load_state_dict()` can change their dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def require_plausible_state(shard: ShardSlice, size_bytes: int) -> None:
    """Raise `ProtocolError` if a shard's optimizer state is larger than the state of any optimizer can be."""
    sides_bytes = sum(
        side * side * item_bytes(segment.dtype) for segment in shard.segments for side in segment.shape or ()
    )
    limit_bytes = STATE_LIMIT_FACTOR * (shard.size_bytes + sides_bytes) + STATE_SLACK_BYTES
    if size_bytes > limit_bytes:
        raise ProtocolError(f"an optimizer state has {size_bytes} bytes, expected at most {limit_bytes}")


# -- Keeps `torch._dynamo` from being imported before it has anything to do ----------------------------------
#
# Some methods of `torch.optim.Optimizer`, among them `add_param_group` and so the constructor, ask
# `torch._dynamo` not to trace them. The first call of such a method imports `torch._dynamo`, which takes as
# much time as importing torch itself. But nothing can be tracing before `torch._dynamo` has been imported, so
# the request has no effect before this import.

# In torch 2.13, a function that `torch._disable_dynamo` has wrapped looks up its untraced version in this
# attribute of the original function, and imports `torch._dynamo` only if the attribute is missing.
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
    """Return a function that calls `method` if `torch._dynamo` has been imported, and otherwise `original`."""

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return original(*args, **options)
        if getattr(original, UNTRACED, None) is call:
            delattr(original, UNTRACED)
        return method(*args, **options)

    return call
