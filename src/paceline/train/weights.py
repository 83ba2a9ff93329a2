"""A model's parameters as views of flat vectors, the stager of weights and gradients, and the detection of edits.

Once training has begun, the servers hold the weights, and a worker's weights may change only inside `step()` and
`editing()`: any other edit would make the worker diverge silently. Most edits change a parameter's version counter,
memory address or strides. In-place edits through `.data` change none of the three, so a sample of the weights is also
compared with a copy.

An edit is no error if the weights are restored before the step. Scripts make such edits to compute a second gradient at
other weights (sharpness-aware minimization, adversarial training), or to evaluate averaged weights. The values are
compared with the truth, which is the weights of the last pull. The truth is at hand in the servers' memory if the
worker reads its weights there, and in the session's memory if the parameters are on another device. Otherwise, it may
be at hand in a sample that contains all elements, or in a copy. A copy in every step would cost too much. So copies are
made for the first few steps, before a call of `load_state_dict`, and in each step once a script has restored its
weights. Without the truth, a large parameter on the CPU that was edited in place counts as changed.

Between `eval()` and `train()` of an optimizer with modes (see `shard.foreign`), its parameters are *apart*: in other
memory, with the weights for evaluation. The script may not edit parameters that are apart, and pulls do not change
them.

A script that adds something to its weights and subtracts it again restores the weights only up to rounding. The
remaining difference is no error, either, if it is within the rounding error of the weights at which the script has
computed the gradient. The script then continues with the weights of the last pull.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping, Sequence
from typing import Protocol
from weakref import finalize

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..core.layout import Layout, Parameter, Range, dtype_of, item_bytes, of_set
from ..errors import WeightsChangedError
from ..shard.device_queue import DeviceQueue, Ticket, queue_of
from ..shard.vectors import Vectors, bits, dtype_name, parameter_views, same, torch_dtype
from .device import EarlyCopies
from .session import Session

SAMPLE_SIZE = 16_384
"""Before each push, at most this number of evenly spaced elements of each flat vector are compared with a copy."""


WATCHED_PULLS = 3
"""After this number of pulls, it is known whether a script restores its weights in each step."""


class Weights:
    """A model's trained parameters, as views of flat vectors.

    Args:
        layout: layout of the parameters in the flat vectors.
        parameters: the parameters, in the order of the layout.
    """

    def __init__(self, layout: Layout, parameters: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._stager: Stager
        self._views: list[torch.Tensor] = []
        self._versions: list[int] = []  # version counter of each parameter when the last step ended
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []  # (view of a sample, copy of the sample)
        self._complete = False  # True if the samples contain all elements
        self._kept: list[torch.Tensor] | None = None  # copy of each parameter as of the last pull
        self._pulls = 0
        self._restores = False  # True if the script has changed its weights and restored them
        # True if the script has computed gradients with other weights, or has restored its weights only up to rounding
        self._subtracts = False
        # index -> copy of a parameter with which a gradient was computed, if the copy may differ from the last pull
        self._used: dict[int, torch.Tensor] = {}
        # index -> version counter of each parameter that `set_apart` has set to other values
        self._apart: dict[int, int] = {}

    def copy_to(self, vectors: Vectors) -> None:
        """Copy the values of the parameters into flat vectors. Parameters whose vector is not given are left out."""
        places = zip(self._parameters, self._layout.parameters, self._layout.offsets, strict=True)
        for parameter, described, offset in places:
            if described.vector in vectors:
                view = vectors[described.vector][offset : offset + described.size]
                view.copy_(parameter.detach().reshape(-1))

    def use(self, stager: Stager) -> list[int]:
        """Point each parameter at its part of the stager's vectors.

        Return the indices of the parameters whose values change. An autograd graph that holds a parameter stays usable
        unless the values of this parameter change.
        """
        self._stager = stager
        vectors = stager.weights
        self._views = parameter_views(self._layout, vectors)
        changed = []
        here = [index for index in range(len(self._parameters)) if index not in self._apart]
        for index in here:
            true = stager.true_values(index)
            if not same(self._parameters[index], self._views[index] if true is None else true):
                changed.append(index)
        point_at([self._parameters[index] for index in here], [self._views[index] for index in here])
        for index in changed:
            torch.autograd.graph.increment_version(self._parameters[index])
        # A sample is superfluous if the stager notices all edits.
        watched = vectors.values() if stager.weights_edited() is None else ()
        sampled = [bits(v)[:: -(-v.numel() // SAMPLE_SIZE)] for v in watched if v.numel()]
        self._samples = [(part, part.clone()) for part in sampled]
        self._complete = all(vector.numel() <= SAMPLE_SIZE for vector in vectors.values())
        return changed

    def mark_pulled(self, set_index: int | None = None, indices: Sequence[int] | None = None) -> None:
        """Take over the weights of the last pull.

        Args:
            set_index: the parameter set that was pulled; None for all sets.
            indices: the parameters that were pulled; None for all parameters.
        """
        self._stager.weights_pulled(set_index)
        indices = range(len(self._parameters)) if indices is None else indices
        pulled = [self._parameters[index] for index in indices if index not in self._apart]
        # Tell autograd that the weights have changed, because it cannot detect that a pull has written to them.
        torch.autograd.graph.increment_version(pulled)
        self.mark()

    def mark(self) -> None:
        """Record the current weights as those with which later checks compare."""
        # Inside `torch.autocast`, torch keeps copies of weights in a lower precision until the context ends. Discard
        # these copies, because they are outdated.
        torch.clear_autocast_cache()
        self._pulls += 1
        keeps = (self._restores or self._pulls <= WATCHED_PULLS) and not self._truth_at_hand
        self._kept = self.copies() if keeps else None
        self._used.clear()
        self._mark()

    def copies(self) -> list[torch.Tensor]:
        """Return a copy of each parameter."""
        parts = {dtype: vector.clone() for dtype, vector in self._stager.weights.items()}
        return parameter_views(self._layout, parts)

    def keep(self) -> None:
        """Keep a copy of the weights until the next pull, unless the truth is at hand anyway.

        Called before `load_state_dict()` changes the weights, so that values that stay the same are no error.
        """
        unknown = self._kept is None and not self._truth_at_hand
        if unknown and not self._suspects() and not self._sample_differs():
            self._kept = self.copies()

    def note_gradients(self, ids: Container[int]) -> None:
        """Record that gradients of the parameters with these `id` have been computed with the present values."""
        watches = self._subtracts or self._pulls <= WATCHED_PULLS
        for index in range(len(self._parameters)) if watches else self._suspects():
            if id(self._parameters[index]) in ids:
                self._used[index] = self._parameters[index].detach().clone()

    def require_unchanged(self, *, anywhere: bool = False) -> None:
        """Check that the weights are those of the last pull. Undo moves to other memory.

        Args:
            anywhere: True if the parameters may also be on another device.

        Raises:
            WeightsChangedError: the values, the shape, the dtype or the device of a parameter were changed, or the
                parameter was edited, and its earlier values are no longer known.
        """
        moved = [] if self._are_in_place() else self._moved(anywhere=anywhere)
        edited = self._stager.weights_edited()
        suspects = self._suspects()
        differs = edited or self._sample_differs()
        if not (moved or suspects or differs):
            # The script may have restored other weights exactly, and may restore them only up to rounding later.
            used = self._used.items()
            self._subtracts = self._subtracts or any(not same(value, self._views[at]) for at, value in used)
            return
        if moved or edited is None or edited:
            present = [parameter.detach().clone() for parameter in self._parameters]
            if self._bring_back():
                self._require_restored(present, moved, suspects)
            else:
                self._require_probably_restored(moved, suspects, differs=differs)
            point_at([self._parameters[index] for index in moved], [self._views[index] for index in moved])
            self._restores = self._restores or bool(suspects or differs)
        self._mark()

    def set_apart(self, values: Mapping[int, torch.Tensor]) -> None:
        """Set parameters to other values, in memory that no pull changes, until `put_back`.

        Args:
            values: index of each parameter -> its values, in memory that nothing else uses.
        """
        parameters = [self._parameters[index] for index in values]
        point_at(parameters, list(values.values()))
        self._invalidate(parameters)
        self._apart |= {index: self._parameters[index]._version for index in values}

    def put_back(self, indices: Sequence[int]) -> None:
        """Undo `set_apart`: set these parameters back to the values of the last pull.

        Raises:
            WeightsChangedError: a parameter was edited meanwhile.
        """
        self._require_unedited_apart()
        parameters = [self._parameters[index] for index in indices]
        point_at(parameters, [self._views[index] for index in indices])
        self._invalidate(parameters)
        for index, parameter in zip(indices, parameters, strict=True):
            del self._apart[index]
            self._versions[index] = parameter._version

    def _invalidate(self, parameters: Sequence[torch.Tensor]) -> None:
        """Tell autograd and `torch.autocast` that parameters have other values."""
        torch.autograd.graph.increment_version(parameters)
        torch.clear_autocast_cache()

    def _require_unedited_apart(self) -> None:
        for index, version in self._apart.items():
            if self._parameters[index]._version != version:
                raise change_error(self._layout.parameters[index], "was edited after the optimizer's eval(),")

    def _are_in_place(self) -> bool:
        """Return True if each parameter is in its part of the vectors. This check takes a tenth of the time of
        `_moved`.
        """
        try:
            return all(map(torch.Tensor.is_set_to, self._parameters, self._views))
        except RuntimeError:  # torch cannot compare parameters on this device, or of this format
            return False

    def _moved(self, *, anywhere: bool) -> list[int]:
        """Return the parameters that are in other memory."""
        moved = []
        for index, parameter in enumerate(self._parameters):
            if index in self._apart:
                continue
            view = self._views[index]
            if parameter.shape != view.shape:
                raise shape_error(self._layout.parameters[index], parameter.shape)
            elsewhere = parameter.device != view.device
            if elsewhere and not anywhere:
                raise device_error(self._layout.parameters[index], view.device, parameter.device)
            if elsewhere or not is_at(parameter, view):
                moved.append(index)
        return moved

    @property
    def _truth_at_hand(self) -> bool:
        """True if the weights of the last pull can be restored without a copy of them."""
        stager = self._stager
        return self._complete or stager.weights_edited() is not None or stager.true_values(0) is not None

    def _bring_back(self) -> bool:
        """Set the views to the weights of the last pull. Return False if these are not known."""
        if self._kept is not None:
            _set(self._views, self._kept)
        elif self._complete and self._samples:
            for part, copy in self._samples:
                part.copy_(copy)
        else:
            return self._stager.restore_weights()
        return True

    def _require_restored(
        self, present: Sequence[torch.Tensor], moved: Sequence[int], suspects: Sequence[int]
    ) -> None:
        """Check that the parameters had the values that the views have now, at least up to rounding."""
        rounded = []
        for index, value in enumerate(present):
            view = self._views[index]
            if index in self._apart or (value.dtype == view.dtype and same(value, view)):
                continue
            if not self._is_rounded(index, value):
                kept = dict.fromkeys(moved)  # the values of these parameters are in other memory
                own = [self._views[at] if at in kept else value for at, value in enumerate(present)]
                _set(self._views, own)
                raise self._error_of_edit(index, moved, suspects)
            rounded.append(index)
        for index in rounded:
            torch.autograd.graph.increment_version(self._parameters[index])
            self._subtracts = True

    def _is_rounded(self, index: int, value: torch.Tensor) -> bool:
        """Return True if a value differs from the truth only by the rounding of an addition and a subtraction."""
        true, used = self._views[index], self._used.get(index)
        if used is None or value.dtype != true.dtype or value.device != true.device or same(used, true):
            return False
        error = torch.finfo(true.dtype).eps * (used.abs() + true.abs())
        return bool(((value - true).abs() <= error).all())

    def _require_probably_restored(
        self, moved: Sequence[int], suspects: Sequence[int], *, differs: bool
    ) -> None:
        """Check the weights as far as possible if the weights of the last pull are not known."""
        for index in moved:
            parameter, view = self._parameters[index], self._views[index]
            equal = parameter.dtype == view.dtype and same(parameter, view)
            if not equal and (not differs or parameter.dtype != view.dtype):
                raise self._error_of_edit(index, moved, suspects)
            if not equal:  # the parameter was edited in place before it was moved
                view.copy_(parameter.detach())
        if self._sample_differs():
            raise self._error_of_edit(suspects[0] if suspects else -1, moved, suspects)
        if suspects:
            raise change_error(
                self._layout.parameters[suspects[0]], "was edited, perhaps without a change of its values,"
            )

    def _error_of_edit(
        self, index: int, moved: Sequence[int], suspects: Sequence[int]
    ) -> WeightsChangedError:
        """Return the error for a parameter that differs from the last pull.

        `index` is -1 if it is not known which parameter differs.
        """
        if index in moved:
            change = "was moved or replaced (model.to(...), .data = ...)"
        elif index in suspects:
            change = "was edited"
        else:
            return WeightsChangedError(f"Weights were edited through .data {OUTSIDE_STEP}")
        return change_error(self._layout.parameters[index], change)

    def changed_since(self, before: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the new values of each parameter that differs from these values, by index.

        Raises:
            WeightsChangedError: the shape or the dtype of a parameter differs.
        """
        changed = {}
        for index, (parameter, old) in enumerate(zip(self._parameters, before, strict=True)):
            described = self._layout.parameters[index]
            if parameter.shape != old.shape or parameter.dtype != old.dtype:
                raise WeightsChangedError(
                    f"Parameter {described.names[0]!r} was {described.dtype}{list(old.shape)} when training began, "
                    f"but editing() has left it as {dtype_name(parameter.dtype)}{list(parameter.shape)}. An edit may "
                    "change values, but not shapes or dtypes."
                )
            if not same(parameter, old):
                changed[index] = parameter.detach()
        return changed

    def keep_in(self, vectors: Vectors, values: Sequence[torch.Tensor]) -> None:
        """Set the parameters to these values, in their present memory, which a graph may hold, and in `vectors`."""
        for views in (self._views, parameter_views(self._layout, vectors)):
            _set(views, values)

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """Point each parameter at its part of the flat vectors again, and set it to the given values."""
        point_at(self._parameters, self._views)
        _set(self._views, values)
        self._stager.weights_edited()  # discards private copies of the servers' memory, which now equal this memory

    def give_back(self, values: Sequence[torch.Tensor]) -> None:
        """Set the parameters back to the values of the last pull after an edit in this worker alone.

        An autograd graph that holds a changed parameter can no longer be used.
        """
        changed = [
            parameter
            for parameter, value in zip(self._parameters, values, strict=True)
            if parameter.shape != value.shape or parameter.dtype != value.dtype or not same(parameter, value)
        ]
        self.restore(values)
        for parameter in changed:
            torch.autograd.graph.increment_version(parameter)
        self._mark()

    def change_after_training(self) -> str:
        """Describe a change of the weights after the last step; return "" if there is none."""
        try:
            self._require_unedited_apart()
            self.require_unchanged(anywhere=True)  # a script may end with model.cpu()
        except WeightsChangedError as error:
            change = str(error).partition(" outside step() ")[0]
            return (
                f"{change} after the last step, outside `with optimizer.editing():`. The weights that the run saves "
                "do not contain this change."
            )
        return ""

    def _mark(self) -> None:
        self._versions = [parameter._version for parameter in self._parameters]
        for part, copy in self._samples:
            copy.copy_(part)

    def _suspects(self) -> list[int]:
        """Return the parameters whose version counters have changed since the last pull."""
        versions = [parameter._version for parameter in self._parameters]
        if versions == self._versions:
            return []
        return [
            index
            for index, version in enumerate(versions)
            if version != self._versions[index] and index not in self._apart
        ]

    def _sample_differs(self) -> bool:
        return not all(torch.equal(part, copy) for part, copy in self._samples)


OUTSIDE_STEP = (
    "outside step() after training had started. Since the first forward pass with gradients enabled, the servers "
    "hold the weights. Make such changes before that pass, or in all workers inside `with optimizer.editing():`, "
    "which makes them known to the servers. If the script restores the weights before the next step, put the change "
    "and the restoring inside `with optimizer.editing(private=True):`."
)


def change_error(parameter: Parameter, change: str) -> WeightsChangedError:
    """Return the error for a parameter that was changed outside `step()`."""
    return WeightsChangedError(f"Parameter {parameter.names[0]!r} {change} {OUTSIDE_STEP}")


def device_error(parameter: Parameter, before: torch.device, now: torch.device) -> WeightsChangedError:
    """Return the error for a parameter that is on another device than when training began."""
    return WeightsChangedError(
        f"Parameter {parameter.names[0]!r} was moved from {before} to {now} after training had started. A worker "
        "trains on one device: move the model there before its first forward pass. If you move it elsewhere, for "
        "example to save it, move it back before the next forward pass."
    )


def shape_error(parameter: Parameter, shape: torch.Size) -> WeightsChangedError:
    """Return the error for a parameter whose shape, or whose gradient's shape, has changed since training began."""
    return WeightsChangedError(
        f"Parameter {parameter.names[0]!r} was changed from shape {list(parameter.shape)} to {list(shape)} outside "
        "step() after training had started. Change shapes only before the first forward pass."
    )


# -- The stager: where a worker's parameters and gradients are, and how they get to and from the session's memory
#
# A session has its weights and gradients in flat vectors in the memory of the host. On the CPU, the
# parameters and their gradients are views of these vectors (`Aliasing`). On another device, the parameters
# and their gradients are views of flat vectors on this device, and `Copying` copies values between these
# vectors and those of the session. Only this module moves the script's weights
# and gradients to other memory.
#
# `Copying` copies gradients while the backward pass is still running (see `device.py`). Weights are copied to
# the device in pieces: some while the rest of a pull is still arriving, and the remaining ones after the
# pull. The device waits for these copies before it computes anything else, and the host waits for them before
# the session uses its memory again (`Callbacks.before_exchange`).

PIECE_BYTES = 4 * 1024 * 1024
"""Minimum size, in bytes, of a piece of the weights that is copied while later pieces are still arriving."""

LARGE_BYTES = 2 * 1024 * 1024
"""Minimum size, in bytes, of a gradient that is copied with `memmove`."""


class Stager(Protocol):
    """Moves weights and gradients between a worker's parameters and its session.

    Attributes:
        weights: the flat vectors of which the parameters are views.
        gradients: the flat vectors for their gradients.
        copies_early: True if `gradient_ready` already copies gradients during the backward pass.
    """

    weights: Vectors
    gradients: Vectors
    copies_early: bool

    def follow(self, weights: Vectors) -> None:
        """Use these vectors from now on as the session's weights, because the session has moved its weights to them."""

    def weights_pulled(self, set_index: int | None) -> None:
        """Copy the session's weights to the parameters of one parameter set, or of all sets if `set_index` is None."""

    def weights_edited(self) -> bool | None:
        """Return True if the script has changed `weights` since the last pull, None if this is not known."""

    def restore_weights(self) -> bool:
        """Undo all changes by the script to `weights` since the last pull. Return False if this is not possible."""

    def true_values(self, index: int) -> torch.Tensor | None:
        """Return a parameter's values as of the last pull, on any device; None if they are not known."""

    def gradient_ready(self, index: int) -> Sequence[int]:
        """Record that a gradient has been computed. The gradient may change until `deliver`.

        Returns:
            The parameters whose gradients have come into the session's vectors since the last call.
        """

    def await_gradients(self) -> None:
        """Wait until the gradients have been computed."""

    def keep_close(self) -> None:
        """Wait until the device has computed everything that was started before the previous call of this method.

        Work that a device has been given cannot be taken back. So a computation that may be aborted calls this method
        repeatedly.
        """

    def deliver(self, set_index: int | None) -> None:
        """Wait until the session's vectors contain the gradients of one set, or of all sets if `set_index` is None."""

    def begin_next(self) -> None:
        """Record that gradients that are computed from now on belong to the next push."""


def stager_of(layout: Layout, session: Session, device: torch.device) -> Stager:
    """Return the stager for parameters on a device."""
    if device.type == "cpu":
        return Aliasing(session)
    return Copying(layout, session, device, queue_of(device))


class Aliasing:
    """The stager of parameters that are views of the session's vectors."""

    copies_early = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self.weights = session.weights
        self.gradients = session.gradients

    def follow(self, weights: Vectors) -> None:
        self.weights = weights

    def weights_pulled(self, set_index: int | None) -> None:
        pass

    def weights_edited(self) -> bool | None:
        return self._session.weights_edited()

    def restore_weights(self) -> bool:
        return self._session.restore_weights()

    def true_values(self, index: int) -> torch.Tensor | None:
        return None

    def gradient_ready(self, index: int) -> Sequence[int]:
        return (index,)

    def await_gradients(self) -> None:
        pass

    def keep_close(self) -> None:
        pass

    def deliver(self, set_index: int | None) -> None:
        pass

    def begin_next(self) -> None:
        pass


class Copying:
    """The stager of parameters on a device.

    Args:
        layout: layout of the parameters in the flat vectors.
        session: the session.
        device: the device.
        queue: carries out the copies.
    """

    def __init__(self, layout: Layout, session: Session, device: torch.device, queue: DeviceQueue) -> None:
        self._queue = queue
        self._layout = layout
        self._sent = session.gradients
        self.weights = _on_device(layout, device)
        self.gradients = _on_device(layout, device)
        self._early = EarlyCopies(self.gradients, self._sent, layout, queue) if queue.overlaps else None
        self.copies_early = queue.overlaps
        self._session = session
        finalize(self, queue.register(list(self._sent.values()), only_read=False))
        self._unregister_weights: finalize[..., Copying] | None = None
        self.follow(session.weights)
        session.callbacks.before_exchange = queue.drain
        session.callbacks.on_arrived = self._weights_arrived

    def follow(self, weights: Vectors) -> None:
        self._queue.drain()
        if self._unregister_weights is not None:
            self._unregister_weights()
            self._unregister_weights = None
        memory = list(weights.values())
        self._unregister_weights = finalize(self, self._queue.register(memory, only_read=True))
        self._true = weights
        self._true_views = parameter_views(self._layout, weights)
        # (vector, index of the first element of a part that one shard sends) -> index of the first element of this part
        # that has not been copied
        self._copied: dict[tuple[str, int], int] = {}
        self.weights_pulled(None)

    def weights_pulled(self, set_index: int | None) -> None:
        vectors = of_set(self.weights, set_index)
        self._copy([piece for name in vectors for piece in self._rest_of(name)]).order()
        self._copied.clear()

    def _weights_arrived(self, name: str, start: int, stop: int) -> None:
        copied = self._copied.get((name, start), start)
        if (stop - copied) * item_bytes(name) >= PIECE_BYTES:
            self._copy([(name, copied, stop)])
            self._copied[name, start] = stop

    def _rest_of(self, name: str) -> list[Range]:
        """Return the ranges of a vector of the weights that have not been copied since the last pull began."""
        copied = sorted((start, stop) for (other, start), stop in self._copied.items() if other == name)
        starts = [0, *(stop for _, stop in copied)]
        stops = [*(start for start, _ in copied), len(self.weights[name])]
        return [(name, start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _copy(self, ranges: Sequence[Range]) -> Ticket:
        """Copy ranges of the session's weights to the device."""
        targets = [self.weights[name][start:stop] for name, start, stop in ranges]
        sources = [self._true[name][start:stop] for name, start, stop in ranges]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=self._queue.overlaps)

        return self._queue.submit(copy, writes=targets)

    def weights_edited(self) -> bool | None:
        return None

    def restore_weights(self) -> bool:
        self.weights_pulled(None)
        return True

    def true_values(self, index: int) -> torch.Tensor | None:
        return self._true_views[index]

    def gradient_ready(self, index: int) -> Sequence[int]:
        return () if self._early is None else self._early.ready(index)

    def await_gradients(self) -> None:
        self._queue.wait()

    def keep_close(self) -> None:
        self._queue.keep_close()

    def deliver(self, set_index: int | None) -> None:
        vectors = of_set(self.gradients, set_index)
        if self._early is None:
            rest = [(self._sent[name], vector) for name, vector in vectors.items()]
        else:
            rest = self._early.rest(vectors)

        def copy() -> None:
            for target, source in rest:
                target.copy_(source, non_blocking=self._queue.overlaps)

        self._queue.submit(copy, writes=[target for target, _ in rest])
        self._queue.drain()

    def begin_next(self) -> None:
        if self._early is not None:
            self._early.begin()


def _on_device(layout: Layout, device: torch.device) -> Vectors:
    return {
        name: torch.zeros(size, dtype=torch_dtype(dtype_of(name)), device=device)
        for name, size in layout.sizes.items()
    }


def _set(views: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Set each view to a value. A view that already has its value is not written, so its version stays the same."""
    for view, value in zip(views, values, strict=True):
        if not same(view, value):
            view.copy_(value)


def point_at(parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Point each parameter at a view, without a change of the parameter's version."""
    with _unsafe_preserve_version_counter(tuple(parameters)):
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view


def is_at(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if a tensor has the address and the strides of a view. Tensors without elements need no address."""
    return (tensor.data_ptr() == view.data_ptr() or not tensor.numel()) and tensor.stride() == view.stride()


def move_into(view: torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient of the same shape into a view, unless it is there already.

    Large gradients on the CPU are copied with `memmove`, which bypasses the cache for large blocks. A write through
    the cache would first read the memory to be overwritten, and caching the data would be useless, because another
    process reads it next.
    """
    if gradient.is_sparse:
        view.copy_(gradient.to_dense())
    elif gradient.data_ptr() != view.data_ptr():
        same_format = gradient.is_contiguous() and gradient.dtype == view.dtype
        if same_format and view.nbytes >= LARGE_BYTES and view.is_cpu and gradient.is_cpu:
            ctypes.memmove(view.data_ptr(), gradient.data_ptr(), view.nbytes)
        else:
            view.copy_(gradient)
