"""A model's trained parameters as views of the session's flat vectors, and the detection of edits to the weights.

Once training has begun, the servers hold the weights, and a worker's weights may change only inside `step()`: any
other edit would make the worker diverge silently. Most edits change a parameter's version counter, memory address or
strides. In-place edits through `.data` change none of the three, so a sample of the weights is also compared with a
copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.layout import Layout, Parameter
from ..errors import WeightsChangedError
from ..shard.vectors import Vectors, parameter_views
from .session import Session

__all__ = ["Weights", "change_outside_step", "shape_change_outside_step"]

SAMPLE_SIZE = 16_384
"""Before each push, at most this number of evenly spaced elements of each flat vector are compared with a copy."""


class Weights:
    """A model's trained parameters, as views of flat vectors.

    Args:
        layout: layout of the parameters in the flat vectors.
        parameters: the parameters, in the order of the layout.
    """

    def __init__(self, layout: Layout, parameters: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._views: list[torch.Tensor] = []
        self._versions: list[int] = []  # version counter of each parameter when the last step ended
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []  # (view of a sample, copy of the sample)

    def copy_to(self, vectors: Vectors) -> None:
        """Copy the values of the parameters into flat vectors."""
        for parameter, view in zip(self._parameters, parameter_views(self._layout, vectors), strict=True):
            view.copy_(parameter.detach())

    def equal(self, vectors: Vectors) -> bool:
        """Return True if the parameters have exactly the values in these flat vectors."""
        views = parameter_views(self._layout, vectors)
        return all(
            torch.equal(_bits(parameter), _bits(view))
            for parameter, view in zip(self._parameters, views, strict=True)
        )

    def use(self, vectors: Vectors) -> None:
        """Point each parameter at its part of these flat vectors."""
        self._views = parameter_views(self._layout, vectors)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        sampled = [_bits(v)[:: -(-v.numel() // SAMPLE_SIZE)] for v in vectors.values() if v.numel()]
        self._samples = [(part, part.clone()) for part in sampled]

    def mark_pulled(self) -> None:
        """Record the current weights as the result of the last pull."""
        for parameter in self._parameters:
            # Tell autograd that the weights have changed, because it cannot detect that a pull has written to them.
            torch.autograd.graph.increment_version(parameter)
        self._versions = [parameter._version for parameter in self._parameters]
        for part, copy in self._samples:
            copy.copy_(part)

    def require_unchanged(self, session: Session) -> None:
        """Check that nothing has changed the weights since the last pull.

        Raises:
            WeightsChangedError: a parameter was edited, moved or replaced, or its shape was changed.
        """
        for index, parameter in enumerate(self._parameters):
            view = self._views[index]
            if parameter.shape != view.shape:
                raise shape_change_outside_step(self._layout.parameters[index], parameter.shape)
            if (parameter.data_ptr() != view.data_ptr() and parameter.numel()) or (
                parameter.stride() != view.stride()
            ):
                raise change_outside_step(
                    self._layout.parameters[index], "was moved or replaced (model.to(...), .data = ...)"
                )
            if parameter._version != self._versions[index]:
                raise change_outside_step(self._layout.parameters[index], "was edited")
        if session.weights_edited() or not all(torch.equal(part, copy) for part, copy in self._samples):
            raise WeightsChangedError(f"Weights were edited through .data {OUTSIDE_STEP}")


OUTSIDE_STEP = (
    "outside step() after training had started. Change weights only before the first step: after that step, the "
    "servers hold the weights."
)


def change_outside_step(parameter: Parameter, change: str) -> WeightsChangedError:
    """Return the error for a parameter that was changed outside `step()`."""
    return WeightsChangedError(f"Parameter {parameter.names[0]!r} {change} {OUTSIDE_STEP}")


def shape_change_outside_step(parameter: Parameter, shape: torch.Size) -> WeightsChangedError:
    """Return the error for a parameter whose shape, or whose gradient's shape, has changed since training began."""
    return change_outside_step(parameter, f"was changed from shape {list(parameter.shape)} to {list(shape)}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as integers, so that NaN compares equal to NaN."""
    return tensor.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])
