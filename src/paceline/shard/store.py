"""The tensors of one shard: its slice of the weights, the user's optimizer on that slice, and the stored pushes.

A store carries out requests from a server's core (see `paceline.core.requests`): it applies, discards or copies
pushes, each identified by (worker, iteration). A store does not depend on sync models, processes or time. A
simulation without gradients uses a `NullStore` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..core.layout import ShardSlice
from ..core.model_spec import HyperParameters, OptimizerSpec
from .slice_optimizers import optimizer_of_slice
from .vectors import Vectors, segment_views, squared_norm

__all__ = ["Push", "Store", "Vectors"]

Key = tuple[int, int]
"""Identifies a push: (worker, iteration)."""


class Push(msgspec.Struct, frozen=True):
    """The part of a push that is for one shard.

    Attributes:
        gradient: the shard's slice of the gradient or, if the push is an edit, of the new weights. The store does not
            modify the slice. The memory of the slice must not change until the push is applied, discarded or
            preserved.
        present: one byte per parameter of the layout: 1 if the parameter has a gradient, 0 if not.
        groups: the hyper-parameters of the parameter groups at the time of the push.
    """

    gradient: Vectors
    present: bytes
    groups: tuple[HyperParameters, ...]


class Store:
    """Holds the weights, the optimizer and the stored pushes of one shard, and applies pushes to the weights.

    Args:
        bounds: the shard's slice of the layout.
        weights: the shard's slice of the weights, per dtype. The store takes ownership of these vectors.
        optimizer: a description of the user's optimizer.
        before_update: function to call before each change to the weights.
    """

    def __init__(
        self,
        bounds: ShardSlice,
        weights: Vectors,
        optimizer: OptimizerSpec,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.bounds = bounds
        self.weights = weights
        self._before_update = before_update
        self._pushes: dict[Key, Push] = {}  # pushes that have been neither applied nor discarded
        self._edited: dict[int, int] = {}  # parameter -> highest number of the edits that have set it
        self._optimizer = optimizer_of_slice(optimizer, bounds, weights)

    def put(self, worker: int, iteration: int, push: Push) -> None:
        """Store a push until it is applied or discarded."""
        self._pushes[worker, iteration] = push

    def apply(self, pushes: Sequence[Key], scales: Sequence[float]) -> None:
        """Take one optimizer step with the sum of these pushes' gradients, each multiplied by its scale.

        The gradients are added in the order given. The step uses the hyper-parameters from the push with the highest
        iteration, and skips each parameter for which none of the pushes contains a gradient.
        """
        taken = [self._pushes.pop(key) for key in pushes]
        self._before_update()
        newest = max(range(len(pushes)), key=lambda i: (pushes[i][1], -pushes[i][0]))
        self._optimizer.step(
            [push.gradient for push in taken],
            scales,
            lambda parameter: any(push.present[parameter] for push in taken),
            taken[newest].groups,
        )

    def squared_norm(self, pushes: Sequence[Key], scales: Sequence[float]) -> float:
        """Return the squared L2 norm of the gradient with which `apply` would take a step, in double precision."""
        gradients = [self._pushes[key].gradient for key in pushes]
        return sum(squared_norm([each[dtype] for each in gradients], scales) for dtype in self.weights)

    def overwrite(self, worker: int, iteration: int, number: int) -> None:
        """Set each parameter that is present in a push to the push's values. The optimizer's state is unchanged.

        Parameters that an edit with a higher number has set remain unchanged.
        """
        push = self._pushes.pop((worker, iteration))
        self._before_update()
        parts = zip(
            self.bounds.segments,
            segment_views(self.bounds, self.weights),
            segment_views(self.bounds, push.gradient),
            strict=True,
        )
        for segment, weights, values in parts:
            parameter = segment.parameter
            if push.present[parameter] and self._edited.get(parameter, 0) <= number:
                weights.copy_(values)
                self._edited[parameter] = number

    def discard(self, worker: int, iteration: int) -> None:
        """Discard a push if it is stored."""
        self._pushes.pop((worker, iteration), None)

    def preserve(self, worker: int, iteration: int) -> None:
        """Copy the gradient of a push into the store's own memory."""
        push = self._pushes[worker, iteration]
        copied = {dtype: vector.clone() for dtype, vector in push.gradient.items()}
        self._pushes[worker, iteration] = msgspec.structs.replace(push, gradient=copied)

    def optimizer_state(self) -> Vectors:
        """Return the optimizer's state: "<segment>/<key>" -> tensor."""
        return self._optimizer.state()

    def load_optimizer_state(self, state: Vectors) -> None:
        """Restore a state returned by `optimizer_state()`. Raise `ProtocolError` if it does not fit this shard."""
        self._optimizer.load_state(state)
