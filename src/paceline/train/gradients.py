"""The gradients of a worker in the stager's flat vectors, the check of gradients, and scaled losses.

Autograd chooses the memory in which it accumulates a gradient. A large gradient is *adopted* by a hook as soon as it
has been accumulated: it is copied to its place in the flat vector while it is in the cache, and this place becomes
the parameter's `.grad`, so that no other memory is needed. Gradients that are sent or copied early are adopted as well.
All other gradients stay where they are until the step copies all of them in one call. The hook of such a gradient only
notes the parameter, and the noted parameters are looked at when the backward pass ends.

Gradients are checked for NaN and inf when they are committed, because until then a script may edit them, and such
edits cannot be detected. The dot product of a vector with itself reveals NaN and inf 35 times faster than `isfinite`,
but it can also overflow. So if the dot product is not finite, each gradient is checked with `isfinite`. These checks
read the session's vectors, which are in the memory of the host.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.amp import GradScaler

from ..core.layout import Layout, of_set
from ..core.messages import Warned
from ..core.requests import COORDINATOR, Send
from ..errors import UsageError
from ..shard.vectors import parameter_views, squared_norm
from .forward import guess_of
from .hooks import Weakly, remove_after
from .session import OfSession, Session, current
from .weights import Stager, device_error, is_at, move_into, shape_error

log = logging.getLogger("paceline.train.gradients")

LARGE_BYTES = 256 * 1024
"""Minimum size, in bytes, of a gradient that is adopted as soon as it has been accumulated."""


current_graph_task_id = torch._C._current_graph_task_id
queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Gradients:
    """Moves the gradients of a model's trained parameters into flat vectors.

    Args:
        layout: layout of the parameters in the flat vectors.
        parameters: the parameters, in the order of the layout.
        members: for each parameter set, the indices of the parameters that its optimizer trains.
        stager: the stager. Its flat vectors for the gradients must contain only zeros.
        session: the session, whose flat vectors for the gradients are pushed. It is notified of each gradient if it
            sends gradients early. If the script scales its losses, the step divides the gradients, so no gradient is
            sent or copied early.
        computed: called with the `id` of each parameter of which a gradient has been computed.
        final: False if gradients are scaled in place before they are pushed, so that no gradient is sent early.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        members: Sequence[Sequence[int]],
        stager: Stager,
        session: Session,
        computed: Callable[[Container[int]], None],
        *,
        final: bool,
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._members = members
        self._stager = stager
        self._session = session
        self._vectors = stager.gradients
        self._pushed = session.gradients
        self._views = parameter_views(layout, stager.gradients)
        # The tensors that become `.grad`. These tensors share the memory of the views, but are separate tensors,
        # because a script may move a `.grad` to other memory, as `model.cpu()` does.
        self._lent = [view.detach() for view in self._views]
        self._written = [False] * len(self._views)  # True for each view that may contain nonzero values
        self._final = final
        self._sends_early = session.sends_early and final
        self._early = stager.copies_early or self._sends_early
        self._computed = computed
        self._warned_of_sparse = False
        self._adopted = {
            index
            for index, view in enumerate(self._views)
            if self._early or not final or view.nbytes >= LARGE_BYTES
        }
        # the parameters of which a gradient has been accumulated since the last call of `computed`
        self._noted: list[torch.Tensor] = []
        self._note = note = _noting(self._noted, Weakly(self.computed))
        # `id` of each parameter whose gradient has been accumulated between the last push and the last call of
        # `computed` -> this gradient, to which autograd adds the next gradient in place; None for a gradient with a
        # graph, because autograd replaces such a gradient
        self._since_push: dict[int, torch.Tensor | None] = {}
        trained = {index for each in members for index in each if parameters[index].requires_grad}
        accumulated = Weakly(self._accumulated)
        remove_after(
            session,
            [
                parameters[index].register_post_accumulate_grad_hook(
                    partial(accumulated, index) if index in self._adopted else note
                )
                for index in sorted(trained)
            ],
        )

    def adopt(self, index: int) -> bool:
        """Move a parameter's gradient to the flat vector. If there is no gradient, write zeros and return False.

        Raises:
            WeightsChangedError: the gradient's shape or device is not the one that the parameter had when training
                began.
        """
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is None:
            if self._written[index]:
                view.zero_()
                self._written[index] = False
            return False
        if gradient.shape != view.shape:  # for some wrong shapes, copy_() would broadcast instead of failing
            raise shape_error(self._layout.parameters[index], gradient.shape)
        if gradient.device != view.device:
            raise device_error(self._layout.parameters[index], view.device, gradient.device)
        self._written[index] = True
        if gradient.requires_grad:  # it was computed with create_graph=True
            gradient = gradient.detach()
            if self._final:  # the script may still use the graph, so the tensor with the graph stays `.grad`
                move_into(view, gradient)
                return True
        if gradient.is_sparse:
            self._look_at_sparse(index)
        if gradient is self._lent[index] and is_at(gradient, view):
            return True
        move_into(view, gradient)
        if not is_at(self._lent[index], view):
            self._lent[index] = view.detach()
        if gradient is not self._lent[index]:
            parameter.grad = self._lent[index]
        return True

    def collect(self, set_index: int) -> bytes:
        """Copy the gradients of a parameter set to the flat vectors. Write zeros for a parameter without a gradient.

        Return one byte per parameter of the layout: 1 if the parameter belongs to the set and has a gradient, else 0.

        Raises:
            WeightsChangedError: see `adopt`.
        """
        present = bytearray(len(self._parameters))
        views, gradients = [], []
        for index in self._members[set_index]:
            gradient, view = self._parameters[index].grad, self._views[index]
            if (
                index in self._adopted
                or gradient is None
                or gradient.is_sparse
                or gradient.shape != view.shape
            ):
                present[index] = self.adopt(index)
            else:
                present[index] = self._written[index] = True
                views.append(view)
                gradients.append(gradient)
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, gradients)
        return bytes(present)

    def not_accumulated(self, set_index: int) -> list[int]:
        """Return those parameters of a set of which no gradient has been accumulated since the last push."""
        members, parameters, since_push = self._members[set_index], self._parameters, self._since_push
        return [index for index in members if id(parameters[index]) not in since_push]

    def computed(self) -> None:
        """After a backward pass, look at the gradients that have been accumulated since the last call."""
        noted = self._noted[:]
        del self._noted[: len(noted)]
        if not noted:
            return
        if not noted[0].is_cpu:
            require_not_capturing("A gradient was computed")
        gradients = [parameter.grad for parameter in noted]
        latest = {
            id(parameter): None if gradient is None or gradient.requires_grad else gradient
            for parameter, gradient in zip(noted, gradients, strict=True)
        }
        self._computed(latest.keys())
        before = self._since_push
        # If a parameter has another gradient tensor than before, the script has dropped the earlier one, as zero_grad()
        # does.
        if before and any(
            each is not None and before.get(key, each) is not each for key, each in latest.items()
        ):
            self._drop()
        self._since_push |= latest
        self._session.core.data.accumulate()

    @contextmanager
    def replaced_by(self, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Return a context in which the session's vectors contain these values instead of gradients."""
        gradients = {dtype: vector.clone() for dtype, vector in self._vectors.items()}
        for index, value in values.items():
            self._views[index].copy_(value)
        self._stager.deliver(None)
        try:
            yield
        finally:
            for dtype, vector in self._vectors.items():
                vector.copy_(gradients[dtype])

    def norm(self, set_index: int | None) -> tuple[float, str | None]:
        """Return the L2 norm of the gradients, and the name of the first parameter whose gradient is not finite.

        The session's vectors must contain the gradients (see `Stager.deliver`).

        The norm is NaN or inf if an element of a gradient is NaN or inf. The name is None if all gradients are finite.

        If `set_index` is not None, only the parameters of this set are checked.
        """
        vectors = of_set(self._pushed, set_index)
        square = sum(float(torch.dot(vector, vector)) for vector in vectors.values())
        if math.isfinite(square):
            return math.sqrt(square), None
        for parameter, view in zip(
            self._layout.parameters, parameter_views(self._layout, self._pushed), strict=True
        ):
            if parameter.vector in vectors and not bool(view.isfinite().all()):
                return math.nan, parameter.names[0]
        return math.sqrt(sum(squared_norm([vector]) for vector in vectors.values())), None

    def scale(self, factor: float, set_index: int | None) -> None:
        """Multiply the gradients of a parameter set, or of all sets if `set_index` is None, by a factor, in place."""
        for vector in of_set(self._vectors, set_index).values():
            vector.mul_(factor)

    def begin_next(self) -> None:
        """Record that the gradients that are accumulated from now on belong to the next push."""
        self._noted.clear()
        self._forget()

    def _drop(self) -> None:
        """Record that the script has dropped the gradients that were accumulated before this backward pass."""
        self._session.core.data.drop()
        self._forget()

    def _forget(self) -> None:
        self._since_push.clear()
        self._stager.begin_next()

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        """Adopt a gradient that has been accumulated."""
        if not parameter.is_cpu:
            require_not_capturing("A gradient was computed")
        self._note(parameter)
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad:  # a gradient with a graph is copied at the step
            return
        # The script has dropped the gradients that it had accumulated, so their early copies are outdated.
        if gradient is not self._lent[index] and id(parameter) in self._since_push:
            self._drop()
        self.adopt(index)
        if self._early and not scales_of(self._session).used:
            arrived = self._stager.gradient_ready(index)
            if self._sends_early:
                for each in arrived:
                    self._session.gradient_ready(each)

    def _look_at_sparse(self, index: int) -> None:
        """Tell the session that a gradient is sparse, and warn the user if the gradient is converted."""
        if not self._session.pushes_rows(index) and not self._warned_of_sparse:
            self._warned_of_sparse = True
            log.warning(
                "the gradient of %r is sparse; it is converted to a dense gradient, with zeros in the missing rows. "
                "Create the layer with sparse=False to avoid the conversion.",
                self._layout.parameters[index].names[0],
            )


def _noting(noted: list[torch.Tensor], computed: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook that notes parameters, and calls `computed` at the end of each backward pass that calls the hook.

    If a backward pass fails, `computed` is called when the next one begins.
    """
    last = -1

    def note(parameter: torch.Tensor) -> None:
        nonlocal last
        if (this := current_graph_task_id()) != last:
            last = this
            if noted:
                computed()
            queue_callback(computed)
        noted.append(parameter)

    return note


# -- Refuses to train while a graph of an accelerator's operations, such as a CUDA graph, is being captured
#
# A captured graph repeats the operations on the accelerator, and nothing else. So when the graph is replayed,
# no gradient is pushed and no weights are pulled. Without this check, the first copy to the memory of the
# host would fail, with an error of the driver.


def require_not_capturing(call: str) -> None:
    """Raise `UsageError` if the operations of the current stream are being captured.

    Args:
        call: what the script does.
    """
    if (is_capturing := _accelerators_check()) is not None and is_capturing():
        raise UsageError(
            f"{call} while a graph of the accelerator's operations was captured. Such a graph pushes no gradients "
            "and pulls no weights when it is replayed: call backward() and step() outside the graph."
        )


@functools.cache
def _accelerators_check() -> Callable[[], bool] | None:
    """Return torch's function that tells whether the current stream is being captured; None if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    check: Callable[[], bool] | None = getattr(
        torch.get_device_module(accelerator), "is_current_stream_capturing", None
    )
    return check


# -- Scaled losses: what `torch.amp.GradScaler` and `DistributedOptimizer` tell each other -------------------
#
# In mixed precision, a script multiplies its loss by a scale, so that small gradients do not become zero. The
# gradients are multiplied by the same scale, so they must be divided by it before they are pushed. Large
# gradients may overflow instead; the scaler then lowers its scale. Each worker has a scaler of its own, and
# the scales may differ.
#
# By default, `GradScaler.step` calls an optimizer's `step()` only if no gradient has overflowed. A worker
# whose gradients overflow would then make fewer iterations than the other workers, which would wait for it.
# But if an optimizer *supports scaled gradients*, the scaler always calls the optimizer's `step()`, and sets
# two attributes of the optimizer during the call:
#
# - `grad_scale`: the scale by which the gradients must be divided. `grad_scale` is missing or None if the
#   script has called `GradScaler.unscale_`, which has divided the gradients already.
# - `found_inf`: a number greater than 0 if a gradient contains NaN or inf.
#
# Between the script's calls of `scale` and `update`, the gradients are scaled, except those of optimizers for
# which the script has called `unscale_`. These three methods are wrapped during a run, so that functions that
# look at gradients before the step know the scale of these gradients. The wrappers have no other effect. The
# gradients that are pushed do not depend on the wrappers.

TOLD = "grad_scale", "found_inf"
"""The attributes that a scaler sets while it calls `step()`."""


class Scaling(NamedTuple):
    """The values that a scaler gives to an optimizer whose `step()` it calls.

    Attributes:
        scale: the scale by which the gradients must be divided.
        overflows: True if a gradient contains NaN or inf.
    """

    scale: float
    overflows: bool


def scaling_of(optimizer: torch.optim.Optimizer) -> Scaling | None:
    """Return the values that a scaler gives to an optimizer; None if no scaler is calling the optimizer's `step()`."""
    told = vars(optimizer)
    if "found_inf" not in told:
        return None
    scale = told.get("grad_scale")
    return Scaling(1.0 if scale is None else float(scale), bool(told["found_inf"]))


@contextmanager
def lent_scaling(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context in which a wrapped optimizer has the attributes that a scaler has set in its wrapper."""
    told: dict[str, Any] = {name: vars(optimizer)[name] for name in TOLD if name in vars(optimizer)}
    vars(wrapped).update(told)
    try:
        yield
    finally:
        for name in told:
            del vars(wrapped)[name]


@torch.no_grad()
def unscale(parameters: Iterable[torch.Tensor], scale: float) -> None:
    """Divide the gradients of the parameters by a scale, in place, as `GradScaler.unscale_` does."""
    if scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.detach().mul_(1.0 / scale)


MOST_OVERFLOWS = 32
"""Number of steps in a row with overflowing gradients before a warning. By then, a scale of 2**16 has become 2**-16."""

ALWAYS_OVERFLOWS = (
    f"the gradients have overflowed in {MOST_OVERFLOWS} steps in a row, although the GradScaler has lowered its "
    "scale each time. So the weights, the data or the loss contain NaN or inf. Log the loss; if all workers log "
    "this warning, lower the learning rate"
)
"""Warning about a worker whose gradients overflow at any scale."""


class OverflowWatch:
    """Warns once if the gradients of one optimizer overflow in each of many steps in a row.

    Args:
        session: this worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._in_a_row = 0
        self._said = False

    def look(self, *, overflows: bool) -> None:
        """Record whether the gradients of a step overflow."""
        self._in_a_row = self._in_a_row + 1 if overflows else 0
        if self._in_a_row == MOST_OVERFLOWS and not self._said:
            self._said = True
            self._session.exchange(lambda: [Send(COORDINATOR, Warned(ALWAYS_OVERFLOWS))])


class Scales:
    """The losses and gradients that the script of one worker has scaled.

    Attributes:
        used: True if the script has scaled a loss.
        scaler: the scaler that the script has used last; None if the script has called the scaler's `update` since
            then.
        unscaled: the `id` of each parameter whose gradient the script has unscaled since the last `update`.
        resumed: the states with which the next scalers begin, if the script goes on from an earlier run.
    """

    def __init__(self) -> None:
        self.used = False
        self.scaler: GradScaler | None = None
        self.unscaled: set[int] = set()
        self.resumed: list[dict[str, Any]] = []
        self._scalers: list[ref[GradScaler]] = []

    def scale(self, scaler: GradScaler) -> None:
        """Record that the script scales a loss.

        In a resumed run, a scaler that is used for the first time gets the state that it had in the earlier run.
        """
        self.used, self.scaler = True, scaler
        if all(each() is not scaler for each in self._scalers):
            self._scalers.append(ref(scaler))
            if self.resumed:
                scaler.load_state_dict(self.resumed.pop(0))

    def resume(self, states: Sequence[dict[str, Any]]) -> None:
        """Let the scalers go on from the states that `states` has returned in an earlier run."""
        scalers = [scaler for each in self._scalers if (scaler := each()) is not None]
        for scaler, state in zip(scalers, states, strict=False):
            scaler.load_state_dict(state)
        self.resumed = list(states[len(scalers) :])

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each scaler, in the order in which the script has first used the scalers."""
        return [scaler.state_dict() for each in self._scalers if (scaler := each()) is not None]

    def of(self, parameters: Iterable[torch.Tensor]) -> float:
        """Return the scale of the parameters' gradients; 1.0 if they are not scaled, as far as is known."""
        if self.scaler is None or any(id(each) in self.unscaled for each in parameters):
            return 1.0
        return float(self.scaler.get_scale())


scales_of = OfSession(lambda _: Scales())
"""Returns the losses and gradients that the script of a session's worker has scaled."""

SCALE, UNSCALE, UPDATE = GradScaler.scale, GradScaler.unscale_, GradScaler.update


def watch_scalers() -> None:
    """Wrap the methods of scalers, so that the scale of a gradient is known, and no scaled loss is shown."""
    _place(_scale, _unscale, _update)


def unwatch_scalers() -> None:
    """Restore the methods of scalers."""
    _place(SCALE, UNSCALE, UPDATE)


def _place(*methods: Callable[..., Any]) -> None:
    GradScaler.scale, GradScaler.unscale_, GradScaler.update = methods  # type: ignore[method-assign]


@functools.wraps(SCALE)
def _scale(self: GradScaler, outputs: Any) -> Any:
    if self.is_enabled() and (session := current()) is not None:
        scales_of(session).scale(self)
        guess_of(session).give_up()
    return SCALE(self, outputs)


@functools.wraps(UNSCALE)
def _unscale(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    UNSCALE(self, optimizer)
    if (session := current()) is not None:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        scales_of(session).unscaled.update(map(id, parameters))


@functools.wraps(UPDATE)
def _update(self: GradScaler, *arguments: Any, **options: Any) -> None:
    UPDATE(self, *arguments, **options)
    if (session := current()) is not None:
        scales = scales_of(session)
        scales.scaler = None
        scales.unscaled.clear()
