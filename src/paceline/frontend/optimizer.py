"""The front end for an optimizer: one line around the one that a script already has.

`DistributedOptimizer` is a real subclass of `torch.optim.Optimizer` that shares the wrapped optimizer's
parameter groups, so learning-rate schedulers, gradient clipping and whatever else works on groups goes on
working. In a run, `step()` pushes the gradient to the servers, which run the wrapped optimizer's class with
its hyper-parameters on their slices, and pulls the weights. In a script that runs by itself, `step()` is the
wrapped optimizer's own.

It never learns where it runs: it speaks to a `Session`.
"""

from __future__ import annotations

import gc
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar, overload
from weakref import ref

import msgspec
import torch
from torch import nn

from ..core.layout import Layout, Parameter, ShardSlice
from ..core.model_spec import BufferSpec, ModelSpec, OptimizerSpec
from ..errors import ConfigurationError, NonFiniteGradientError, UsageError, WeightsChangedError
from ..shard.lars import LARS
from ..shard.optimizers import PER_PARAMETER_STATE, read_groups, require_elementwise
from ..shard.store import Vectors
from .gradients import Gradients
from .hooks import remove_after, weakly
from .restart import Restartable
from .session import Session, current

__all__ = ["DistributedOptimizer"]

Loss = TypeVar("Loss")

log = logging.getLogger("paceline.frontend.optimizer")

SCALAR_DTYPES = {torch.float64: torch.float64}
"""Default dtype -> what torch.optim keeps its counts in, if not float32; `load_state_dict` casts some of them."""

LEAST_NORM = 1e-12
"""Of weights, where a gradient's significance is its norm over theirs: they may all be zero."""

PROBE_SIZE = 16_384  # elements of each vector of weights that are compared from step to step
COMPARED_SIZE = 65_536  # elements of a buffer that are


class DistributedOptimizer(torch.optim.Optimizer):
    """Data-parallel training of the model whose parameters an optimizer holds.

    Args:
        optimizer: a `torch.optim` optimizer that treats every element by itself (SGD, Adam, AdamW, Adagrad,
            RMSprop, ...), or `paceline.LARS`. It stays the place where hyper-parameters live; do not step it
            yourself.
        model: the module to train. Found by itself, unless more than one module holds the parameters.

    Raises:
        ConfigurationError: the optimizer cannot run on slices of the parameters, or its parameters cannot be
            trained here.
        UsageError: another one trains in this process already.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()  # alone, as here, it is the wrapped optimizer's own step
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, model: nn.Module | None = None) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("The optimizer is a DistributedOptimizer already.")
        self._kind = require_elementwise(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapped = optimizer
        self._share_groups()
        self._model = model
        self._session = current()
        self._trained: Trained | None = None  # from the first step of a run on
        if self._session is not None:
            _require_first(self._session)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration: push the gradient, pull the weights.

        Args:
            closure: clears the gradients, computes the loss, calls `backward()` and returns the loss; PyTorch's
                own idiom. Without one, the gradients are those that the parameters have.

        Returns:
            what the closure returned, whatever it is. If it is a number or a tensor of one element, it is shown and
            recorded as the loss.

        Raises:
            NonFiniteGradientError: a gradient holds NaN or inf; nothing was sent.
            WeightsChangedError: weights were edited or moved since the last step.
            UsageError: the groups do not hold the parameters any more that they held when training began.
        """
        if self._session is None:
            return self._wrapped.step(closure)
        if self.param_groups is not self._wrapped.param_groups:
            raise UsageError(
                "The wrapped optimizer got other parameter groups behind the DistributedOptimizer's back; call "
                "load_state_dict() on the DistributedOptimizer instead."
            )
        stale = False
        if self._trained is not None:
            self._trained.require_same([p for group in self.param_groups for p in group["params"]])
        else:
            self._trained, replaced = self._begin(self._session)
            stale = replaced and closure is None  # its gradient was computed on weights that are nobody's now
        loss: Any = None
        if closure is None:
            self._session.hold_back(droppable=False)  # it has been computed: too late to drop it
        else:
            with torch.enable_grad():
                loss = self._trained.compute(self._session, closure)
        self._trained.commit(self._session, read_groups(self._wrapped), _as_number(loss), stale)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, fetched from the servers; in the form of the wrapped optimizer's own."""
        own = self._wrapped.state_dict()
        if self._session is not None and self._trained is not None:
            own["state"] = self._trained.assemble_state(self._session.fetch_state())
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state. In a run, before the first step: worker 0's goes to the servers then."""
        self._require_not_begun("load_state_dict()")
        self._wrapped.load_state_dict(state_dict)
        self._share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before the first step."""
        if "_wrapped" not in self.__dict__:  # called by torch's constructor, which collects the groups
            super().add_param_group(param_group)
            return
        if self._trained is not None:
            tensors = param_group["params"]
            added = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            names = ", ".join(map(self._trained.describe, added))
            self._require_not_begun("add_param_group()", f" Not added: {names}.")
        self._wrapped.add_param_group(param_group)

    def _share_groups(self) -> None:
        self.param_groups = self._wrapped.param_groups
        self.state = self._wrapped.state

    def _require_not_begun(self, call: str, what: str = "") -> None:
        if self._session is not None and self._trained is not None:
            raise UsageError(f"{call} must come before the first step: the servers hold the state now.{what}")

    def _begin(self, session: Session) -> tuple[Trained, bool]:
        """Take part in the run. Also says whether this worker's weights were replaced by other ones."""
        _require_first(session)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        model = self._model if self._model is not None else find_model(parameters)
        scale = self._wrapped.scale_gradients if isinstance(self._wrapped, LARS) else None
        trained = Trained(model, parameters, scale)
        group_of = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        optimizer = OptimizerSpec(self._kind, read_groups(self._wrapped), tuple(group_of))
        publisher = session.begin(ModelSpec(trained.layout, optimizer, trained.buffer_specs))
        return trained, trained.bind(session, publisher, self._wrapped.state)


class Trained:
    """A model's tensors, bound to a session's flat vectors.

    The parameters become views of the weights; each gradient is *adopted*: autograd accumulates wherever it
    likes, and a hook copies the result into the flat vector and assigns the view.

    Args:
        model: the module that they are of.
        parameters: what is trained, in the order of the optimizer's groups.
        scale: what is done to the gradients before they are pushed, in place; None for nothing.
    """

    def __init__(
        self, model: nn.Module, parameters: list[torch.Tensor], scale: Callable[[], None] | None = None
    ) -> None:
        self._parameters = parameters
        self._scale = scale
        names = _names(model)
        for index, parameter in enumerate(parameters):
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"The optimizer's parameter {index}, of shape {list(parameter.shape)}, is not one of the model's."
                )
            if parameter.device.type != "cpu":
                raise ConfigurationError(
                    f"Parameter {names[id(parameter)][0]!r} is on {parameter.device}; training is on the CPU so far."
                )
        self.layout = Layout.of(
            [Parameter(names[id(p)], tuple(p.shape), _dtype_name(p.dtype)) for p in parameters]
        )
        self._buffers = Buffers(model, set(map(id, parameters)))
        self.buffer_specs = self._buffers.specs
        self._weights: list[torch.Tensor] = []  # for each parameter, its place in the flat vectors
        self._gradients: Gradients | None = None  # from the beginning of a run
        self._warned_of_sparse = False
        self._versions: list[int] = []  # of each parameter, when the last step ended
        self._probes: list[tuple[torch.Tensor, torch.Tensor]] = []  # (some elements, a copy as they were)
        self._model = model
        self._restartable: Restartable | None = (
            None  # from the first time on that a computation may be dropped
        )

    def bind(self, session: Session, publisher: bool, state: Mapping[Any, Mapping[str, Any]]) -> bool:
        """Move the parameters into the flat vectors. True if this worker's weights were replaced."""
        self._gradients = Gradients(self.layout, session.gradients)
        if publisher:
            for parameter, place in zip(self._parameters, self._places(session.weights), strict=True):
                place.copy_(parameter.detach())
            session.publish(self._buffers.all(), lambda shard: self._slice_state(shard, state))
        else:
            session.await_first_weights()
        pairs = zip(self._parameters, self._places(session.weights), strict=True)
        replaced = not all(torch.equal(_bits(parameter), _bits(place)) for parameter, place in pairs)
        self._use(session.weights)
        session.on_moved = lambda: self._use(session.weights)
        adopt = weakly(self._adopt_and_tell)
        remove_after(
            session,
            [
                parameter.register_post_accumulate_grad_hook(partial(adopt, index, ref(session)))
                for index, parameter in enumerate(self._parameters)
                if parameter.requires_grad
            ],
        )
        self._buffers.changed()  # what they are now has been published
        self._remember()
        return replaced

    def _use(self, weights: Vectors) -> None:
        """Have the parameters be views of these vectors."""
        self._weights = self._places(weights)
        for parameter, place in zip(self._parameters, self._weights, strict=True):
            parameter.data = place
        some = [_bits(v)[:: -(-v.numel() // PROBE_SIZE)] for v in weights.values() if v.numel()]
        self._probes = [(part, part.clone()) for part in some]

    def require_same(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse groups that hold other parameters than when training began.

        Raises:
            UsageError: one was added, taken out or exchanged, by name.
        """
        for index, (now, then) in enumerate(zip_longest(parameters, self._parameters)):
            if now is then:
                continue
            what = f"{self.describe(now)} was added" if now is not None else f"{self.describe(then)} is gone"
            raise UsageError(
                f"The optimizer's groups hold other parameters than when training began: {what}, at place {index}. "
                "The servers train what there was at the first step; add or take out parameters before it."
            )

    def describe(self, parameter: torch.Tensor) -> str:
        """A parameter's name in the model, or its shape if it is not the model's."""
        names = _names(self._model).get(id(parameter))
        return repr(names[0]) if names else f"a tensor of shape {list(parameter.shape)}"

    def compute(self, session: Session, closure: Callable[[], Any]) -> Any:
        """Run a closure; more than once, if its computation is dropped. Weights are new each time."""
        if not session.may_restart:
            result = closure()
            session.hold_back(droppable=False)
            return result
        if self._restartable is None:
            remember = weakly(self._remember)
            self._restartable = Restartable(self._model, self._parameters, session, remember)
        return self._restartable.run(closure)

    def commit(
        self, session: Session, groups: tuple[Mapping[str, Any], ...], loss: float | None, stale: bool
    ) -> None:
        """One iteration of the session, with the gradients that the parameters have."""
        self._require_untouched(session)
        present = bytes(self._adopt(index) for index in range(len(self._parameters)))
        empty = stale
        if not stale and (bad := self._first_not_finite()) is not None:
            error = NonFiniteGradientError(session.worker, session.iteration, bad)
            if not session.skips_nan:
                raise error
            log.warning("worker %d, iteration %d: skipped, the gradient of %r is not finite", *error.args)
            empty = True
        significance = None
        if session.needs_significance and not empty:
            significance = _norm(session.gradients) / max(_norm(session.weights), LEAST_NORM)
        if self._scale is not None and not empty:
            self._scale()
        session.commit(
            present,
            msgspec.msgpack.encode(groups),
            empty=empty,
            significance=significance,
            buffers=self._buffers.changed(),
            loss=loss,
        )
        self._remember()

    def assemble_state(
        self, fetched: Iterable[tuple[ShardSlice, Vectors]]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """The servers' optimizer state, parameter by parameter, as torch's own state_dict has it."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        for shard, values in fetched:
            for name, value in values.items():
                position, _, key = name.partition("/")
                segment = shard.segments[int(position)]
                parameter = self.layout.parameters[segment.parameter]
                entries = state.setdefault(segment.parameter, {})
                if key in PER_PARAMETER_STATE:
                    entries[key] = value
                    continue
                whole = entries.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype))
                whole.view(-1)[segment.offset : segment.offset + value.numel()] = value
        return dict(sorted(state.items()))

    def _slice_state(self, shard: ShardSlice, state: Mapping[Any, Mapping[str, Any]]) -> Vectors:
        """The reverse: what of an optimizer's state belongs to one shard."""
        values: Vectors = {}
        for position, segment in enumerate(shard.segments):
            for key, value in state.get(self._parameters[segment.parameter], {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                length = segment.stop - segment.start
                values[f"{position}/{key}"] = (
                    value.to(SCALAR_DTYPES.get(torch.get_default_dtype(), torch.float32))
                    if key in PER_PARAMETER_STATE
                    else value.reshape(-1)[segment.offset : segment.offset + length].clone()
                )
        return values

    def _places(self, vectors: Vectors) -> list[torch.Tensor]:
        return [
            vectors[p.dtype][offset : offset + p.size].view(p.shape)
            for p, offset in zip(self.layout.parameters, self.layout.offsets, strict=True)
        ]

    def _adopt(self, index: int) -> bool:
        """Have a gradient lie at its place in the flat vector. False if there is none."""
        assert self._gradients is not None
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is not None:
            if gradient.shape != self._weights[index].shape:  # else the copy might broadcast
                self._refuse_shape(index, gradient.shape)
            if gradient.is_sparse:
                self._warn_of_sparse(index)
        place = self._gradients.adopt(index, gradient)
        if gradient is not place:
            parameter.grad = place
        return place is not None

    def _warn_of_sparse(self, index: int) -> None:
        """Say once that a sparse gradient saves nothing here."""
        if not self._warned_of_sparse:
            self._warned_of_sparse = True
            log.warning(
                "the gradient of %r is sparse; it is sent and applied as a dense one, rows without a gradient as "
                "zeros. Make it dense, with sparse=False, which saves the conversion.",
                self.layout.parameters[index].names[0],
            )

    def _adopt_and_tell(self, index: int, session: ref[Session], parameter: torch.Tensor) -> None:
        """Take a gradient that autograd has just accumulated, and tell the session if that may send it early."""
        self._adopt(index)
        living = session()
        # A gradient that is yet to be scaled is not what is pushed.
        if living is not None and living.sends_early and self._scale is None:
            living.gradient_ready(index)

    def _first_not_finite(self) -> str | None:
        """The name of the first parameter whose gradient holds NaN or inf."""
        assert self._gradients is not None
        index = self._gradients.first_not_finite()
        return self.layout.parameters[index].names[0] if index is not None else None

    def _remember(self) -> None:
        """Note what the weights are, so that an edit from outside is found before the next push."""
        for parameter in self._parameters:
            torch.autograd.graph.increment_version(parameter)  # for autograd: the weights are new
        self._versions = [parameter._version for parameter in self._parameters]
        for part, copy in self._probes:
            copy.copy_(part)

    def _refuse_shape(self, index: int, shape: torch.Size) -> NoReturn:
        then = list(self.layout.parameters[index].shape)
        self._refuse_change(index, f"was given the shape {list(shape)} in place of {then},")

    def _refuse_change(self, index: int, what: str) -> NoReturn:
        raise WeightsChangedError(
            f"Parameter {self.layout.parameters[index].names[0]!r} {what} outside step() after training "
            "had started. Do that before the first step; the servers hold the weights from then on."
        )

    def _require_untouched(self, session: Session) -> None:
        for index, parameter in enumerate(self._parameters):
            place = self._weights[index]
            if parameter.shape != place.shape:
                self._refuse_shape(index, parameter.shape)
            if (parameter.data_ptr() != place.data_ptr() and parameter.numel()) or (
                parameter.stride() != place.stride()
            ):
                self._refuse_change(index, "was moved or replaced (model.to(...), .data = ...)")
            if parameter._version != self._versions[index]:
                self._refuse_change(index, "was edited")
        if session.weights_edited() or not all(torch.equal(part, copy) for part, copy in self._probes):
            raise WeightsChangedError(
                "Weights were edited through .data outside step() after training had started. Do that before the "
                "first step; the servers hold the weights from then on."
            )


class Buffers:
    """The tensors of a model's `state_dict` that the optimizer does not train."""

    def __init__(self, model: nn.Module, trained: set[int]) -> None:
        self._model = model
        tensors = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and id(tensor) not in trained
        }
        self._names = list(tensors)
        self.specs = tuple(
            BufferSpec(name, tuple(t.shape), _dtype_name(t.dtype), isinstance(t, nn.Parameter))
            for name, t in tensors.items()
        )
        self._sent: dict[int, Sent] = {}

    def all(self) -> list[torch.Tensor]:
        """Each of them, in order."""
        return [self._get(index) for index in range(len(self._names))]

    def changed(self) -> dict[int, torch.Tensor]:
        """Those that have changed since the last call, by index. Parameters outside the optimizer never do."""
        found = {}
        for index, spec in enumerate(self.specs):
            if spec.fixed:
                continue
            tensor = self._get(index)
            if (tuple(tensor.shape), _dtype_name(tensor.dtype)) != (spec.shape, spec.dtype):
                raise UsageError(
                    f"Buffer {spec.name!r} has become {_dtype_name(tensor.dtype)}{list(tensor.shape)}; it was "
                    f"{spec.dtype}{list(spec.shape)} when training began, and must stay so."
                )
            if index not in self._sent or self._sent[index].differs_from(tensor):
                self._sent[index] = Sent(tensor)
                found[index] = tensor
        return found

    def _get(self, index: int) -> torch.Tensor:
        owner, _, name = self._names[index].rpartition(".")
        tensor = getattr(self._model.get_submodule(owner), name)
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach()


class Sent:
    """What a buffer was when it was last sent.

    A tensor's version counter tells most changes, but not BatchNorm's: its kernel writes the running statistics
    behind the counter's back. So buffers of up to `COMPARED_SIZE` elements are compared with a copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = (tensor.data_ptr(), tensor._version)
        self._copy = tensor.clone() if tensor.numel() <= COMPARED_SIZE else None

    def differs_from(self, tensor: torch.Tensor) -> bool:
        if (tensor.data_ptr(), tensor._version) != self._version:
            return True
        return self._copy is not None and not torch.equal(tensor, self._copy)


def find_model(parameters: list[torch.Tensor]) -> nn.Module:
    """The outermost live module that holds all of these parameters.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    wanted = {id(parameter) for parameter in parameters}
    holders = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), nn.Module) and wanted <= _parameters_of(candidate)
    ]
    inner = {id(sub) for holder in holders for sub in holder.modules() if sub is not holder}
    outermost = [holder for holder in holders if id(holder) not in inner]
    if len(outermost) == 1:
        model: nn.Module = getattr(outermost[0], "_orig_mod", outermost[0])  # torch.compile's wrapper
        return model
    found = "no module holds" if not outermost else f"{len(outermost)} modules hold"
    raise ConfigurationError(
        f"{found} all of the optimizer's parameters, so names for the weights cannot be told; pass "
        "DistributedOptimizer(optimizer, model=...), with several modules as model=torch.nn.ModuleDict({...})."
    )


def _parameters_of(module: nn.Module) -> set[int]:
    try:
        return {id(parameter) for parameter in module.parameters()}
    except AttributeError:  # its constructor has not finished, or has failed
        return set()


def _names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """The id of each parameter of a model -> its names."""
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _norm(vectors: Vectors) -> float:
    """The L2 norm of some vectors together."""
    return math.sqrt(
        sum(float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2 for v in vectors.values())
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself there."""
    return tensor.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_number(loss: object) -> float | None:
    """What a closure returned, as a number to show; None if it is no real number, nor a tensor of just one."""
    try:
        if isinstance(loss, torch.Tensor):
            loss = loss.item()
        return float(loss) if isinstance(loss, numbers.Real) else None
    except (RuntimeError, OverflowError):  # several elements, or no data (device meta); too large for a float
        return None


def _require_first(session: Session) -> None:
    if session.weights:
        raise UsageError(
            "A second DistributedOptimizer cannot train in the same process: the run has one model. Put all "
            "parameters into one optimizer, in groups."
        )
