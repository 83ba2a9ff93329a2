"""The tensors of one shard: its slice of the weights, the user's optimizer on that slice, and the stored pushes.

A store carries out the requests of a server's core (see `paceline.core.requests`): it applies, discards or copies
pushes by their key (worker, iteration). It does not depend on sync models, processes or time. In virtual time without
gradients, it is replaced by a `NullStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..core.layout import ShardSlice
from ..core.model_spec import HyperParameters, OptimizerSpec
from .slice_optimizers import optimizer_of_slice
from .vectors import Vectors

__all__ = ["Push", "Store", "Vectors"]

Key = tuple[int, int]
"""A push: (worker, iteration)."""


class Push(msgspec.Struct, frozen=True):
    """The content of a push for one shard.

    Attributes:
        gradient: the slice of the gradient. The store does not write to it. Its memory must not change until the
            push is applied, discarded or preserved.
        present: for each parameter of the layout, 1 if it had a gradient, 0 if it had none.
        groups: the hyper-parameters of the parameter groups at the time of the push.
    """

    gradient: Vectors
    present: bytes
    groups: tuple[HyperParameters, ...]


class Store:
    """The tensors of one shard.

    Args:
        bounds: the slice of the layout.
        weights: the slice of the weights, per dtype. The store takes ownership of it.
        optimizer: the user's optimizer as a value.
        before_update: function that is called before each change of the weights.
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
        self._pushes: dict[Key, Push] = {}  # neither applied nor discarded
        self._optimizer = optimizer_of_slice(optimizer, bounds, weights)

    def put(self, worker: int, iteration: int, push: Push) -> None:
        """Store a push until it is applied or discarded."""
        self._pushes[worker, iteration] = push

    def apply(self, pushes: Sequence[Key], scale: float) -> None:
        """Take one optimizer step with the sum of some pushes, in the order given, times `scale`.

        The hyper-parameters are those of the most advanced worker among them. Parameters for which no push has a
        gradient are skipped.
        """
        taken = [self._pushes.pop(key) for key in pushes]
        self._before_update()
        newest = max(range(len(pushes)), key=lambda i: (pushes[i][1], -pushes[i][0]))
        self._optimizer.step(
            [push.gradient for push in taken],
            scale,
            lambda parameter: any(push.present[parameter] for push in taken),
            taken[newest].groups,
        )

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
        """Restore a state that `optimizer_state` returned. Raise `ProtocolError` if it is for other segments."""
        self._optimizer.load_state(state)
