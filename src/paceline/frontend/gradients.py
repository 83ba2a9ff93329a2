"""The gradients of a worker, stored in the stager's flat vectors.

Autograd chooses the memory in which it accumulates a gradient, so each gradient is *adopted*: it is copied to its
place in the flat vector, and this place becomes the parameter's `.grad`.

Gradients are checked for NaN and inf when they are committed, because until then a script may edit them, and such
edits cannot be detected. The dot product of a vector with itself reveals NaN and inf 35 times faster than `isfinite`,
but it can also overflow. So if the dot product is not finite, each gradient is checked with `isfinite`. These checks
read the session's vectors, which are in the memory of the host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch

from ..core.protocol.layout import Layout, of_set
from ..shard.vectors import Vectors, parameter_views, squared_norm
from .capturing import require_not_capturing
from .hooks import Weakly, remove_after
from .loss_scaling import Scales, scales_of
from .session import Session
from .staging import Stager, is_at, move_into
from .weights import move_to_device, shape_change_outside_step

__all__ = ["Gradients"]

log = logging.getLogger("paceline.frontend.gradients")


class Gradients:
    """Moves the gradients of a model's trained parameters into flat vectors.

    Args:
        layout: layout of the parameters in the flat vectors.
        parameters: the parameters, in the order of the layout.
        stager: the stager, whose flat vectors for the gradients are filled with zeros.
        pushed: the session's flat vectors for the gradients.
        pushes_rows: see `Session.pushes_rows`.
        computed: called with the index of a parameter when a gradient of it has been computed.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        stager: Stager,
        pushed: Vectors,
        pushes_rows: Callable[[int], bool],
        computed: Callable[[int], None],
    ) -> None:
        self._layout = layout
        self._parameters = parameters
        self._stager = stager
        self._vectors = stager.gradients
        self._pushed = pushed
        self._views = parameter_views(layout, stager.gradients)
        # What becomes `.grad`: other tensors of the same memory, because a script may move them to other memory, as
        # `model.cpu()` does.
        self._lent = [view.detach() for view in self._views]
        self._written = [False] * len(self._views)  # True for each view that may contain nonzero values
        # True for each parameter of which a gradient has been accumulated since the last push
        self._accumulated_since_push = [False] * len(self._views)
        self._pushes_rows = pushes_rows
        self._computed = computed
        self._warned_of_sparse = False

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
            raise shape_change_outside_step(self._layout.parameters[index], gradient.shape)
        if gradient.device != view.device:
            raise move_to_device(self._layout.parameters[index], view.device, gradient.device)
        self._written[index] = True
        if gradient.requires_grad:
            # It was computed with create_graph=True. The script may still use its graph, so it remains `.grad`.
            move_into(view, gradient.detach())
            return True
        if gradient.is_sparse and not self._pushes_rows(index):
            self._warn_of_sparse(index)
        if gradient is self._lent[index] and is_at(gradient, view):
            return True
        move_into(view, gradient)
        if not is_at(self._lent[index], view):
            self._lent[index] = view.detach()
        if gradient is not self._lent[index]:
            parameter.grad = self._lent[index]
        return True

    def adopt_all(self, indices: Sequence[int]) -> bytes:
        """Adopt the gradients of the parameters with these indices.

        Return one byte per parameter of the layout: 1 if it is one of these and has a gradient, else 0.
        """
        present = bytearray(len(self._parameters))
        for index in indices:
            present[index] = self.adopt(index)
        return bytes(present)

    def not_accumulated(self, indices: Sequence[int]) -> list[int]:
        """Return those of these parameters of which no gradient has been accumulated since the last push."""
        return [index for index in indices if not self._accumulated_since_push[index]]

    def adopt_as_accumulated(self, session: Session, indices: Container[int], *, final: bool) -> None:
        """While the session exists, adopt each gradient as soon as autograd has accumulated it.

        Args:
            session: the session, which is notified of each gradient if it sends gradients early.
            indices: the indices of the parameters whose gradients are adopted.
            final: False if gradients are scaled before they are pushed. In this case the session is not notified.
                If the script scales its losses, the step divides the gradients, so none is moved early.
        """
        accumulated = Weakly(self._accumulated)
        owner, scales = ref(session), scales_of(session)
        remove_after(
            session,
            [
                parameter.register_post_accumulate_grad_hook(
                    partial(accumulated, index, owner, scales, final)
                )
                for index, parameter in enumerate(self._parameters)
                if index in indices and parameter.requires_grad
            ],
        )

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

        The norm is NaN or inf if an element is. The name is None if there is no such parameter.

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
        """Multiply the gradients of a parameter set by a factor, in place; those of all sets if it is None."""
        for vector in of_set(self._vectors, set_index).values():
            vector.mul_(factor)

    def begin_next(self) -> None:
        """Record that the gradients that are accumulated from now on belong to the next push."""
        self._accumulated_since_push = [False] * len(self._views)
        self._stager.begin_next()

    def _accumulated(
        self, index: int, owner: ref[Session], scales: Scales, final: bool, parameter: torch.Tensor
    ) -> None:
        if not parameter.is_cpu:
            require_not_capturing("A gradient was computed")
        self._computed(index)
        gradient = parameter.grad
        has_graph = gradient is not None and gradient.requires_grad
        # Without create_graph=True, autograd adds to a gradient in place. So this is the first one, or a later one
        # after the script has dropped what was accumulated before, as zero_grad() does.
        is_first = gradient is not self._lent[index] and gradient is not None and not has_graph
        if not has_graph:  # a gradient with a graph is copied at the step
            self.adopt(index)
        session = owner()
        if session is None:
            return
        if is_first and self._accumulated_since_push[index]:
            session.core.data.drop()
            self.begin_next()
        self._accumulated_since_push[index] = True
        session.core.data.accumulate()
        if scales.used or has_graph:
            return
        arrived = self._stager.gradient_ready(index)
        if final and session.sends_early:
            for each in arrived:
                session.gradient_ready(each)

    def _warn_of_sparse(self, index: int) -> None:
        if not self._warned_of_sparse:
            self._warned_of_sparse = True
            log.warning(
                "the gradient of %r is sparse; it is converted to a dense gradient, with zeros in the missing rows. "
                "Create the layer with sparse=False to avoid the conversion.",
                self._layout.parameters[index].names[0],
            )
