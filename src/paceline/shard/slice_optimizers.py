"""Runs the user's optimizer on one shard's slice. Each update uses one push or the mean of several pushes.

Two implementations perform the same updates as torch's own optimizers:

    `FusedOptimizer`  SGD, Adam and AdamW in all their variants, in single and double precision. The state is stored
                      in flat vectors, like the weights. An update makes one pass over the slice, in chunks that fit
                      in the CPU cache, and needs no temporary vectors that are as long as the slice.
    `TorchOptimizer`  all other classes, and other dtypes. Runs the class's own code per segment. If the class needs
                      whole tensors, segments are whole tensors in their own shapes.

A missing gradient is not the same as a gradient of zero: if a parameter has no gradient, the optimizer does not
change the parameter, its momentum or its step count. So `FusedOptimizer` divides its slice into
*segment runs*: neighboring segments of one parameter group that have taken the same number of steps. It updates each
segment run as a whole, and splits a segment run when a push has gradients for only some of the segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch

from ..core.layout import HyperParameters, OptimizerSpec, ShardSlice, aligned, dtype_of, item_bytes
from ..errors import ConfigurationError, UserCodeError, first_line
from ..sync.plugins import user_traceback
from ..sync.translation import FAMILIES, NORMALIZED, WHOLE, Family, Fraction
from .device_queue import SliceOnDevice
from .foreign import changed_groups, copied, evaluated, groups_without_parameters, has_modes
from .optimizers import OF_TORCH, make_optimizer, segments_of_state, take_step
from .vectors import NESTED, NUMBER, Vectors, entries_of, segment_views, tensors_of

Kernel = Callable[..., object]
"""Function of (weights, gradient, *state) that updates a chunk of the weights and of the state in place."""

HOST = torch.device("cpu")

CHUNK_BYTES = 512 * 1024
"""Size of the chunks that an update processes one after the other: small enough for the CPU cache."""


class SliceOptimizer(Protocol):
    """The optimizer of one shard, which updates the shard's weights and stores its optimizer state."""

    def step(
        self,
        gradients: Sequence[Vectors],
        scales: Sequence[float],
        present: bytes,
        groups: tuple[HyperParameters, ...],
        fraction: Fraction = WHOLE,
    ) -> None:
        """Update the weights with the sum of the gradients, multiplied by their scales and added in the order given.

        Args:
            gradients: this slice's part of each push's gradient. The gradients are not modified.
            scales: the factor of each gradient, for example 1 / n for the mean of n gradients.
            present: one byte per parameter of the layout: 0 if none of the gradients contains the parameter.
            groups: the hyper-parameters of each group.
            fraction: the fraction of a step to take (see `paceline.sync.translation`).
        """

    def state(self) -> Vectors:
        """Return the optimizer's state: "<segment>/<key>" -> tensor."""

    def load_state(self, state: Vectors) -> None:
        """Restore the optimizer's state from a result of `state()`.

        Raises:
            ProtocolError: the state does not match the segments of this slice.
        """

    def evaluated(self) -> Vectors | None:
        """Return the weights for evaluation, in new vectors; None if the weights that are trained are also those for
        evaluation.
        """

    def groups(self) -> tuple[HyperParameters, ...]:
        """Return the hyper-parameters of each group as the last step has set them."""

    def weights_changed(self) -> None:
        """Record that something other than a step has changed the weights."""

    def counters(self) -> tuple[HyperParameters, ...]:
        """Return the entries that the optimizer itself has changed in each group. See `core.layout.Counters`."""

    def load_counters(self, counters: Sequence[HyperParameters]) -> None:
        """Take over the counters of an optimizer of the same class.

        Args:
            counters: the `counters()` of an optimizer whose groups are the first groups of this optimizer.
        """

    def take_over(self, before: SliceOptimizer) -> None:
        """Take over what another optimizer keeps besides its state and its counters.

        Args:
            before: the other optimizer, which is no longer used. Its segments are the first segments of this slice.
        """


def optimizer_of_slice(
    spec: OptimizerSpec, bounds: ShardSlice, weights: Vectors, device: torch.device = HOST
) -> SliceOptimizer:
    """Return the optimizer for a slice. The optimizer updates `weights` in place.

    Args:
        spec: the description of the optimizer.
        bounds: the slice.
        weights: the weights, in the memory of the host.
        device: the device on which an optimizer that needs whole tensors makes its steps. Other optimizers make their
            steps on the host.
    """
    if spec.name in FUSED and set(map(dtype_of, weights)) <= {"float32", "float64"}:
        return FusedOptimizer(spec, bounds, weights)
    return TorchOptimizer(spec, bounds, weights, device if spec.whole else HOST)


# -- fused --------------------------------------------------------------------------------------------------


def _sgd_state(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if settings["momentum"] else ()


def _sgd_step(settings: Mapping[str, Any], steps: float) -> Kernel:
    lr = settings["lr"]
    if not settings["momentum"] and not settings["weight_decay"]:
        alpha = lr if settings["maximize"] else -lr
        return lambda weights, gradient: weights.add_(gradient, alpha=alpha)
    rest = {key: settings[key] for key in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}

    def kernel(weights: torch.Tensor, gradient: torch.Tensor, *momentum: torch.Tensor) -> None:
        torch._fused_sgd_([weights], [gradient], list(momentum), lr=lr, is_first_step=steps == 0, **rest)

    return kernel


def _adam_state(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if settings["amsgrad"] else ()))


def _adam_step(settings: Mapping[str, Any], steps: float) -> Kernel:
    decoupled = settings.get("decoupled_weight_decay", False)
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = settings["betas"]
    rest = {key: settings[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    step = torch.tensor(steps + 1.0)

    def kernel(
        weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, *squares: torch.Tensor
    ) -> None:
        square, *most = squares
        fused([weights], [gradient], [mean], [square], most, [step], beta1=beta1, beta2=beta2, **rest)

    return kernel


class FusedUpdate(NamedTuple):
    """The fused implementation of one optimizer class.

    Attributes:
        state_keys: function that returns the keys of the state vectors that the hyper-parameters require.
        kernel: function of (hyper-parameters, number of earlier steps) that returns the kernel of the next step.
        part: function of (hyper-parameters, number of earlier steps, fraction, memory for copies) that returns the
            kernel of a fraction of the next step. See `FractionalSteps`.
        counts_steps: True if the state includes the number of steps.
    """

    state_keys: Callable[[Mapping[str, Any]], tuple[str, ...]]
    kernel: Callable[[Mapping[str, Any], float], Kernel]
    part: Callable[[Mapping[str, Any], float, Fraction, Callable[[str], torch.Tensor]], Kernel]
    counts_steps: bool


DECOUPLED = {"decoupled_weight_decay": True}


def _adam_part(
    settings: Mapping[str, Any], steps: float, fraction: Fraction, scratch: Callable[[str], torch.Tensor]
) -> Kernel:
    """Return the kernel of a fraction of a step of Adam or AdamW.

    torch's kernel makes a whole step of the running mean, moves the weights by this mean, and leaves the mean in the
    state. Afterwards, the mean in the state is moved a part of the way back. The kernel corrects no bias here, because
    the running means of the gradient and of its square have different numbers of steps; the learning rate and epsilon
    contain the corrections instead.

    Args:
        settings: the hyper-parameters.
        steps: number of joint steps that were taken before.
        fraction: the fraction.
        scratch: returns memory for a copy of a chunk, by the name of the copy.
    """
    beta1, beta2 = settings["betas"]
    coupled = coupled_decay(settings)
    rest = {"eps": settings["eps"], "amsgrad": settings["amsgrad"], "maximize": settings["maximize"]}
    root = math.sqrt(1.0 - beta2 ** (steps + fraction.step))
    correction = root / (1.0 - beta1 ** (steps + 1.0))
    lr = fraction.weights * settings["lr"] * correction
    rest["eps"] *= root
    # torch multiplies the weights by 1 - lr * weight_decay, where lr is the corrected rate that is passed to it.
    decoupled = 0.0 if coupled else settings["weight_decay"] / correction
    kept = 1.0 - fraction.step * (1.0 - beta2)
    mean_weight = 1.0 - beta1**steps

    def take(
        weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, *squares: torch.Tensor
    ) -> None:
        count = weights.numel()
        if coupled:
            gradient = torch.add(gradient, weights, alpha=coupled, out=scratch("gradient")[:count])
        square, *most = squares
        use_joint_square(square, gradient, mean, mean_weight, kept, fraction.step)
        earlier = scratch("mean")[:count].copy_(mean)
        torch._fused_adamw_(
            [weights],
            [gradient],
            [mean],
            [square],
            most,
            [LATE],
            lr=lr,
            beta1=beta1,
            beta2=kept,
            weight_decay=decoupled,
            **rest,
        )
        torch.lerp(earlier, mean, fraction.means, out=mean)

    return take


def _sgd_part(
    settings: Mapping[str, Any], steps: float, fraction: Fraction, scratch: Callable[[str], torch.Tensor]
) -> Kernel:
    """Return the kernel of a fraction of a step of SGD. See `_adam_part` for the arguments.

    With the momentum m, the last velocity u, the dampening d, the gradient g and the learning rate h, a whole step
    computes the velocity v = m u + (1 - d) g. The step moves the weights by -h v, or by -h (g + m v) with Nesterov's
    momentum. Both have the form -h (a g + b u), where a and b depend on m and d.
    """
    momentum, damped = settings["momentum"], 1.0 - settings["dampening"]
    if not momentum:
        a, b = 1.0, 0.0
    elif settings["nesterov"]:
        a, b = 1.0 + momentum * damped, momentum**2
    else:
        a, b = damped, momentum
    distance = fraction.weights * settings["lr"]
    sign = -1.0 if settings["maximize"] else 1.0
    decay = settings["weight_decay"]

    def take(weights: torch.Tensor, gradient: torch.Tensor, *velocity: torch.Tensor) -> None:
        if decay:
            gradient = torch.add(
                gradient, weights, alpha=sign * decay, out=scratch("gradient")[: weights.numel()]
            )
        for each in velocity:
            weights.add_(each, alpha=-distance * b)
            each.mul_(1.0 - fraction.means * (1.0 - momentum)).add_(
                gradient, alpha=sign * fraction.means * damped
            )
        weights.add_(gradient, alpha=-distance * sign * a)

    return take


FUSED: dict[str, FusedUpdate] = {
    "SGD": FusedUpdate(_sgd_state, _sgd_step, _sgd_part, counts_steps=False),
    "Adam": FusedUpdate(_adam_state, _adam_step, _adam_part, counts_steps=True),
    "AdamW": FusedUpdate(
        _adam_state,
        lambda settings, *rest: _adam_step({**settings, **DECOUPLED}, *rest),
        lambda settings, *rest: _adam_part({**settings, **DECOUPLED}, *rest),
        counts_steps=True,
    ),
}


class SegmentRun:
    """Neighboring segments of one group that have taken the same number of steps and are updated together.

    Args:
        bounds: the shard.
        segments: positions of the segments in the shard.
        group: index of the parameter group.
        steps: number of optimizer steps that the segments have taken. After fractions of steps, it is not a whole
            number.

    Attributes:
        segments: positions of the segments in the shard.
        group: index of the parameter group.
        steps: number of optimizer steps that the segments have taken.
        dtype: dtype of the flat vector that contains the run.
        start: index of the run's first element in the vector.
        stop: index of the run's end in the vector, exclusive.
        views: key of a state vector -> chunks of the run's part of this vector. The key "" stands for the weights.
    """

    __slots__ = ("dtype", "group", "segments", "start", "steps", "stop", "views")

    def __init__(self, bounds: ShardSlice, segments: Sequence[int], group: int, steps: float) -> None:
        first, last = bounds.segments[segments[0]], bounds.segments[segments[-1]]
        self.segments = segments
        self.dtype, self.start = first.dtype, first.start
        # Include the padding after the last segment. The padding is zero and stays zero. Without the padding, kernels
        # would round the last elements differently if these did not fill a SIMD vector, so results would depend on the
        # slicing.
        self.stop = aligned(last.stop, first.dtype)
        self.group = group
        self.steps = steps
        self.views: dict[str, Sequence[torch.Tensor]] = {}

    def chunks(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return this run's part of a vector, divided into chunks."""
        size = CHUNK_BYTES // item_bytes(self.dtype)
        part = vector[self.start : self.stop]
        return (part,) if self.stop - self.start <= size else part.split(size)


class FusedOptimizer:
    """SGD, Adam or AdamW with its state in flat vectors. Each update makes a single pass over the slice.

    See the module docstring.
    """

    def __init__(self, spec: OptimizerSpec, bounds: ShardSlice, weights: Vectors) -> None:
        self._bounds = bounds
        self._weights = weights
        self._update = FUSED[spec.name]
        self._group_of = [spec.group_of[segment.parameter] for segment in bounds.segments]
        self._groups = spec.groups
        self._own = [*dict.fromkeys(segment.parameter for segment in bounds.segments)]
        # (key, dtype) -> state vector, as long as the weight vector of this dtype
        self._state: dict[tuple[str, str], torch.Tensor] = {}
        self._scratch = {
            dtype: torch.empty(min(vector.numel(), CHUNK_BYTES // item_bytes(dtype)), dtype=vector.dtype)
            for dtype, vector in weights.items()
        }
        # (key, dtype) -> memory for a copy of a chunk. Only fractions of steps use it.
        self._copies: dict[tuple[str, str], torch.Tensor] = {}
        self._runs = self._divide([0.0] * len(bounds.segments))

    def step(
        self,
        gradients: Sequence[Vectors],
        scales: Sequence[float],
        present: bytes,
        groups: tuple[HyperParameters, ...],
        fraction: Fraction = WHOLE,
    ) -> None:
        self._groups = groups
        if not all(map(present.__getitem__, self._own)):
            self._split(present)
        for run in self._runs:
            if present[self._bounds.segments[run.segments[0]].parameter]:
                self._step_run(run, gradients, scales, groups[run.group], fraction)

    def state(self) -> Vectors:
        state: Vectors = {}
        for run in self._runs:
            for position in run.segments if run.steps else ():
                if self._update.counts_steps:
                    state[f"{position}/step"] = torch.tensor(run.steps)
                # SGD counts only steps with momentum. Its velocity stays in the state even if momentum is 0 at present.
                for key in self._update.state_keys({**self._groups[run.group], "momentum": True}):
                    state[f"{position}/{key}"] = self._of_segment(key, position)
        return state

    def load_state(self, state: Vectors) -> None:
        steps = [0.0] * len(self._bounds.segments)
        for name, (position, key) in segments_of_state(self._bounds, state).items():
            value = state[name]
            if key == "step":
                steps[position] = float(value)
            else:
                self._of_segment(key, position).copy_(value)
                if not self._update.counts_steps:
                    steps[position] = 1.0
        self._runs = self._divide(steps)

    def evaluated(self) -> Vectors | None:
        return None

    def groups(self) -> tuple[HyperParameters, ...]:
        return self._groups

    def weights_changed(self) -> None:
        pass

    def counters(self) -> tuple[HyperParameters, ...]:
        return tuple({} for _ in self._groups)  # steps are counted in the state

    def load_counters(self, counters: Sequence[HyperParameters]) -> None:
        pass

    def take_over(self, before: SliceOptimizer) -> None:
        pass

    def _step_run(
        self,
        run: SegmentRun,
        gradients: Sequence[Vectors],
        scales: Sequence[float],
        settings: HyperParameters,
        fraction: Fraction,
    ) -> None:
        keys = self._update.state_keys(settings)
        kernel = self._kernel(run, settings, fraction)
        if keys:
            run.steps += fraction.step
        if "" not in run.views:
            run.views[""] = run.chunks(self._weights[run.dtype])
        for key in keys:
            if key not in run.views:
                run.views[key] = run.chunks(self._vector(key, run.dtype))
        targets = zip(run.views[""], *(run.views[key] for key in keys), strict=True)
        terms = [run.chunks(vectors[run.dtype]) for vectors in gradients]
        if len(terms) == 1 and scales[0] == 1.0:
            for gradient, (weights, *state) in zip(terms[0], targets, strict=True):
                kernel(weights, gradient, *state)
            return
        scratch = self._scratch[run.dtype]
        for (first, *others), (weights, *state) in zip(zip(*terms, strict=True), targets, strict=True):
            total = scratch[: first.numel()]
            torch.mul(first, scales[0], out=total)
            for other, scale in zip(others, scales[1:], strict=True):
                total.add_(other, alpha=scale)
            kernel(weights, total, *state)

    def _kernel(self, run: SegmentRun, settings: HyperParameters, fraction: Fraction) -> Kernel:
        """Return the kernel that updates the chunks of a run."""
        if fraction.whole:
            return self._update.kernel(settings, run.steps)
        return self._update.part(settings, run.steps, fraction, partial(self._copy, run.dtype))

    def _copy(self, dtype: str, key: str) -> torch.Tensor:
        """Return memory for a copy of a chunk."""
        if (key, dtype) not in self._copies:
            self._copies[key, dtype] = torch.empty_like(self._scratch[dtype])
        return self._copies[key, dtype]

    def _split(self, present: bytes) -> None:
        """Split the runs so that in each run, either all segments or none of them have a gradient."""
        segments = self._bounds.segments
        runs = []
        for run in self._runs:
            parts = [
                list(p) for _, p in groupby(run.segments, key=lambda p: present[segments[p].parameter] > 0)
            ]
            runs += (
                [run]
                if len(parts) == 1
                else [SegmentRun(self._bounds, p, run.group, run.steps) for p in parts]
            )
        self._runs = runs

    def _divide(self, steps: Sequence[float]) -> list[SegmentRun]:
        """Divide the slice into as few runs as possible, given the number of steps that each segment has taken."""
        kinds = groupby(
            range(len(steps)), key=lambda p: (self._bounds.segments[p].dtype, self._group_of[p], steps[p])
        )
        return [
            SegmentRun(self._bounds, list(positions), group, count) for (_, group, count), positions in kinds
        ]

    def _vector(self, key: str, dtype: str) -> torch.Tensor:
        if (key, dtype) not in self._state:
            self._state[key, dtype] = torch.zeros_like(self._weights[dtype])
        return self._state[key, dtype]

    def _of_segment(self, key: str, position: int) -> torch.Tensor:
        segment = self._bounds.segments[position]
        return self._vector(key, segment.dtype)[segment.start : segment.stop]


# -- by torch's own code ------------------------------------------------------------------------------------


class TorchOptimizer:
    """A torch optimizer with one tensor per segment. See the module docstring.

    If the optimizer makes its steps on a device, its parameters and its state are on this device. The tensors that it
    returns are on the host.

    Raises:
        ConfigurationError: the memory of the device is too small.
    """

    def __init__(
        self, spec: OptimizerSpec, bounds: ShardSlice, weights: Vectors, device: torch.device = HOST
    ) -> None:
        self._bounds = bounds
        self._mean = {dtype: torch.zeros_like(vector) for dtype, vector in weights.items()}
        self._device = device
        with self._fitting(spec.name):
            self._on_device = None if device == HOST else SliceOnDevice(weights, self._mean, device)
        self._weights = weights if self._on_device is None else self._on_device.weights
        self._parameters = self._shaped(self._weights)
        self._groups = spec.groups  # current hyper-parameters of the optimizer
        self._name, self._foreign = spec.name, spec.name not in OF_TORCH
        self._fractions = FractionalSteps(FAMILIES.get(spec.name, NORMALIZED))
        group_of = [spec.group_of[segment.parameter] for segment in bounds.segments]
        self._optimizer = make_optimizer(
            spec.name,
            spec.groups,
            [
                [p for p, of in zip(self._parameters, group_of, strict=True) if of == group]
                for group in range(len(spec.groups))
            ],
        )
        self._built = groups_without_parameters(self._optimizer)

    def step(
        self,
        gradients: Sequence[Vectors],
        scales: Sequence[float],
        present: bytes,
        groups: tuple[HyperParameters, ...],
        fraction: Fraction = WHOLE,
    ) -> None:
        if groups is not self._groups and groups != self._groups:
            for group, old, new in zip(self._optimizer.param_groups, self._groups, groups, strict=True):
                # Some optimizers count steps in their groups. Such entries change only in the server, never in the
                # worker.
                group.update({key: value for key, value in new.items() if old.get(key, self) != value})
            self._groups = groups
        gradient = gradients[0]
        if len(gradients) > 1 or scales[0] != 1.0:
            gradient = self._mean
            for dtype, total in gradient.items():
                torch.mul(gradients[0][dtype], scales[0], out=total)
                for other, scale in zip(gradients[1:], scales[1:], strict=True):
                    total.add_(other[dtype], alpha=scale)
        if self._on_device is not None:
            gradient = self._on_device.bring(gradient)
        parts = self._shaped(gradient)
        for parameter, part, segment in zip(self._parameters, parts, self._bounds.segments, strict=True):
            parameter.grad = part if present[segment.parameter] else None
        with self._user_code("in a step"):
            if fraction.whole:
                take_step(self._optimizer)
            else:
                self._fractions.take(self._optimizer, fraction)
        if self._on_device is not None:
            self._on_device.publish()

    def evaluated(self) -> Vectors | None:
        if not has_modes(type(self._optimizer)):
            return None
        vectors = {dtype: vector.clone() for dtype, vector in self._weights.items()}
        with self._user_code("in eval()"):
            evaluated(
                self._optimizer, dict(zip(map(id, self._parameters), self._shaped(vectors), strict=True))
            )
        return {dtype: vector.to(HOST) for dtype, vector in vectors.items()}

    @contextmanager
    def _user_code(self, where: str) -> Iterator[None]:
        """Return a context that reports exceptions of a class that is not torch's as errors in the user's code."""
        try:
            with self._fitting(self._name):
                yield
        except Exception as error:
            if not self._foreign or isinstance(error, ConfigurationError):
                raise
            raise UserCodeError(
                f"the optimizer {self._name} raised {first_line(error)} {where} on a server",
                user_traceback(error),
            ) from None

    def weights_changed(self) -> None:
        if self._on_device is not None:
            self._on_device.bring_weights()

    @contextmanager
    def _fitting(self, name: str) -> Iterator[None]:
        """Return a context that says what to do if the memory of the device is too small.

        Raises:
            ConfigurationError: the memory is too small.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                f"server_device is '{self._device}', whose memory is too small for the weights and the state of {name} "
                f"({first_line(error)}); use more servers on other devices, or server_device 'cpu'."
            ) from error

    def _shaped(self, vectors: Vectors) -> list[torch.Tensor]:
        """Return each segment's part of these vectors. The part of a whole parameter has the parameter's shape."""
        views = zip(segment_views(self._bounds, vectors), self._bounds.segments, strict=True)
        return [view if segment.shape is None else view.view(segment.shape) for view, segment in views]

    def state(self) -> Vectors:
        return {
            f"{position}/{name}": value.cpu()
            for position, parameter in enumerate(self._parameters)
            for name, value in tensors_of(self._optimizer.state.get(parameter, {})).items()
        }

    def load_state(self, state: Vectors) -> None:
        found: dict[int, Vectors] = {}
        for name, (position, key) in segments_of_state(self._bounds, state, scalars=self._foreign).items():
            # As in torch's own `load_state_dict`, numbers of steps stay on the host.
            on_host = key == "step" or key.startswith((NUMBER, NESTED))
            value = state[name].to(HOST if on_host else self._device, copy=True)
            found.setdefault(position, {})[key] = value
        for position, tensors in found.items():
            self._optimizer.state[self._parameters[position]].update(entries_of(tensors))

    def groups(self) -> tuple[HyperParameters, ...]:
        return self._groups

    def counters(self) -> tuple[HyperParameters, ...]:
        return changed_groups(self._optimizer, self._groups, self._built) if self._parameters else ()

    def load_counters(self, counters: Sequence[HyperParameters]) -> None:
        for group, counted in zip(self._optimizer.param_groups, counters, strict=False):
            group.update(counted)

    def take_over(self, before: SliceOptimizer) -> None:
        if isinstance(before, TorchOptimizer):  # a fused optimizer keeps nothing else
            successors = dict(zip(before._parameters, self._parameters, strict=False))
            self._fractions.take_over(before._fractions, successors)


# -- Fractions of an optimizer's step: see `paceline.sync.translation` for the reasons, and for the terms
#
# `FractionalSteps` takes a fraction of a step of any torch optimizer: it takes a whole step, and then moves
# the weights and the state back to the fraction. `FAMILIES` tells it which entries of the state are averages
# of the gradient, which entry is the running mean of squares, and whether the optimizer needs an averaged
# gradient.
#
# `_sgd_part` and `_adam_part` compute the same fractions on chunks of flat vectors, without copies of whole
# vectors.

MEAN_DECAY = 0.9
"""Decay per joint step of the running mean of the gradient that `FractionalSteps` keeps for optimizers that have no
such mean.
"""

FIRST_VALUES = {"mu": 1.0, "mu_product": 1.0}
"""Entry of the state of torch's optimizers -> its first value, if this value is not zero. Any other single number,
except the number of steps, begins with the value that the first step sets. For classes of other packages,
`_first_states` finds the vectors with which a state begins. A schedule-free optimizer, for example, begins with a copy
of the weights.
"""


def use_joint_square(
    square: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor | None,
    mean_weight: float,
    kept: float,
    share: float,
) -> None:
    """Change a running mean of squares so that the next step adds the estimate of the joint gradient's square to it.

    The step will compute `kept * square + (1 - kept) * gradient ** 2`, or `square + gradient ** 2` for a sum. After
    this change, the result is never negative.

    Args:
        square: the running mean of squares, which is changed; a sum if `kept` is 1. Same shape as the gradient.
        gradient: the gradient of the update.
        mean: running mean of the gradient that begins with zero; None if there is none yet.
        mean_weight: sum of the coefficients of the gradients in `mean`: less than 1 at the beginning.
        kept: the part of the running mean that the step keeps.
        share: the update's share of a joint batch.
    """
    if kept == 0.0:
        return  # the step uses the square of this gradient only
    factor = (1.0 - share) * (1.0 if kept == 1.0 else (1.0 - kept) / kept)
    if mean is not None and mean_weight > 0.0:
        square.addcmul_(mean, mean, value=factor / mean_weight**2)
    square.addcmul_(gradient, gradient, value=-factor)


def coupled_decay(settings: Mapping[str, Any]) -> float:
    """Return the factor with which an optimizer adds the weights to the gradient before it squares the sum.

    A fraction of a step is computed with this sum instead of the gradient, and with a decay of 0, because the estimate
    of the square needs the sum. The factor is negative if the objective is maximized; 0 if there is nothing to add.
    """
    if settings.get("decoupled_weight_decay", False):
        return 0.0
    decay = float(settings.get("weight_decay", 0.0))
    return -decay if settings.get("maximize", False) else decay


LATE = torch.tensor(1e9)
"""Number of steps after which the bias of an average is negligible, if the average's decay is below 1 - 1e-7."""


class FractionalSteps:
    """Takes fractions of the steps of a torch optimizer.

    Args:
        family: the family of the optimizer.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        # (place, key) of an integer counter -> the fraction of a step that has been made, but is not counted yet. The
        # place is the position of a parameter or, below 0, that of a group.
        self._ahead: dict[tuple[int, str], float] = {}
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        self._means: dict[torch.Tensor, torch.Tensor] = {}  # parameter -> running mean of its gradient
        self._mean_weights: dict[torch.Tensor, float] = {}

    def take(self, optimizer: torch.optim.Optimizer, fraction: Fraction) -> None:
        """Take a fraction of the optimizer's next step. Parameters without a gradient do not change.

        Args:
            optimizer: the optimizer. The attribute `grad` of its parameters contains the gradients.
            fraction: the fraction.
        """
        groups = optimizer.param_groups
        parameters = enumerate((group, parameter) for group in groups for parameter in group["params"])
        moving = [(place, *each) for place, each in parameters if each[1].grad is not None]
        for place, _, parameter in moving if self._family.averages else ():
            self._average(place, parameter, fraction.average)
        before = {place: self._saved(place, "", parameter.detach()) for place, _, parameter in moving}
        states = {
            place: {
                key: self._saved(place, key, value)
                for key, value in optimizer.state.get(parameter, {}).items()
            }
            for place, _, parameter in moving
        }
        if type(optimizer) not in OF_TORCH.values():
            new = [parameter for place, _, parameter in moving if not states[place]]
            first = _first_states(optimizer, new) if new else {}
            states |= {place: first[p] for place, _, p in moving if p in first}
        counters = [
            {key: value for key, value in group.items() if type(value) in (int, float)} for group in groups
        ]
        couples = self._family.square and not self._family.decoupled
        decays = [(group, group["weight_decay"]) for group in groups if couples and coupled_decay(group)]
        for _, group, parameter in moving if self._family.square else ():
            if couples and (decay := coupled_decay(group)):
                parameter.grad = parameter.grad.add(parameter.detach(), alpha=decay)
            self._use_joint_square(optimizer.state.get(parameter, {}), group, parameter, fraction)
        for group, _ in decays:
            group["weight_decay"] = 0.0
        try:
            take_step(optimizer)
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        with torch.no_grad():
            for place, _, parameter in moving:
                parameter.copy_(before[place].lerp_(parameter, fraction.weights))
                state = optimizer.state[parameter]
                for key, after in list(state.items()):
                    part = fraction.means if key in self._family.means else fraction.step
                    state[key] = self._between(place, key, states[place].get(key), after, part)
        for place, (group, earlier) in enumerate(zip(groups, counters, strict=True)):
            for key, value in earlier.items():
                if group[key] != value:
                    group[key] = self._between(-1 - place, key, value, group[key], fraction.step)

    def take_over(self, before: FractionalSteps, successors: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take over the running means of another object.

        Args:
            before: the other object, which is no longer used.
            successors: parameter of the other object -> the parameter that takes its place.
        """
        self._means = {
            successors[parameter]: mean.to(successors[parameter].device, copy=True)
            for parameter, mean in before._means.items()
        }
        self._mean_weights = {
            successors[parameter]: weight for parameter, weight in before._mean_weights.items()
        }

    def _average(self, place: int, parameter: torch.Tensor, part: float) -> None:
        """Replace the gradient by the running mean of the gradients, without bias, where `part` is the weight of the
        newest one.
        """
        gradient = parameter.grad
        assert gradient is not None
        mean = self._means.setdefault(parameter, torch.zeros_like(gradient))
        weight = self._mean_weights.get(parameter, 0.0)
        weight = self._mean_weights[parameter] = weight + part * (1.0 - weight)
        parameter.grad = self._saved(
            -1 - place, "", mean.lerp_(gradient, part / weight)
        )  # a copy of the mean, because the step may change the gradient

    def _saved(self, place: int, key: str, value: Any) -> Any:
        """Return a copy of an entry of the state, in memory that is used again for the next step."""
        if not isinstance(value, torch.Tensor):
            return value
        copy = self._copies.get((place, key))
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._copies[place, key] = torch.empty_like(value)
        return copy.copy_(value)

    def _use_joint_square(
        self, state: Mapping[str, Any], group: Mapping[str, Any], parameter: torch.Tensor, fraction: Fraction
    ) -> None:
        family = self._family
        gradient = parameter.grad
        assert gradient is not None
        square = state.get(family.square)
        if family.mean:
            mean = state.get(family.mean)
            weight = 1.0 - group["betas"][0] ** float(state.get("step", 0.0))
        else:
            mean, weight = self._means.get(parameter), self._mean_weights.get(parameter, 0.0)
        if square is not None:
            use_joint_square(square, gradient, mean, weight, family.kept(group), fraction.step)
        if not family.mean:
            if mean is None:
                mean = self._means[parameter] = torch.zeros_like(gradient)
            part = fraction.step * (1.0 - MEAN_DECAY)
            mean.lerp_(gradient, part)
            self._mean_weights[parameter] = weight + part * (1.0 - weight)

    def _between(self, place: int, key: str, before: Any, after: Any, part: float) -> Any:
        """Return the value of an entry of a state after a part of the way from `before` to `after`.

        A counter that is a whole number changes once the parts have added up to 1. Nested entries get the values that
        they have after the whole step, because a value in between may make no sense. For example, the mean of two bases
        of a vector space need not be a basis.
        """
        if isinstance(after, torch.Tensor) and after.is_floating_point():
            if before is None:
                if not after.dim() and key not in FIRST_VALUES and key != "step":
                    return after
                before = torch.full_like(after, FIRST_VALUES.get(key, 0.0))
            return after.copy_(before.to(after.dtype).lerp_(after, part))
        if isinstance(after, float) and isinstance(before, float):
            return before + part * (after - before)
        if isinstance(after, bool) or not isinstance(after, int | torch.Tensor) or isinstance(before, bool):
            return after
        if isinstance(after, torch.Tensor) and (after.dim() or after.dtype == torch.bool):
            return after
        first, last = int(before or 0), int(after)
        ahead = self._ahead.get((place, key), 0.0) + part * (last - first)
        whole = math.floor(ahead + 1e-9)
        self._ahead[place, key] = ahead - whole
        return after.fill_(first + whole) if isinstance(after, torch.Tensor) else first + whole


def _first_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the vectors with which the state of these parameters begins: the state after a step with zero gradients.

    Weight decay may move these vectors a little, but far less than a step does.
    """
    wanted = set(map(id, parameters))
    copies = {
        id(parameter): parameter.detach().clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, each in copies.items():
        each.grad = torch.zeros_like(each) if key in wanted else None
    tried = copied(optimizer, copies)
    take_step(tried)
    return {
        parameter: {
            key: value.nan_to_num(0.0, 0.0, 0.0)
            for key, value in tried.state[copies[id(parameter)]].items()
            if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point()
        }
        for parameter in parameters
    }
