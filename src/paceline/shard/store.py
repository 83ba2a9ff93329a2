"""One shard: its slice of the weights, the user's optimizer on that slice, and the sync model that decides.

Single-threaded, without I/O and without a clock. The host hands it events, together with the gradient that a
push brought, and a function that does what only the host can (answer a pull, set a timer, report a fault); the shard
asks its sync model and carries out the actions in order, so an update is applied before any pull that waits on it is
answered.

It knows nothing of processes, sockets or time, and the machine inside knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..core.layout import ShardSlice
from ..core.model_spec import HyperParameters, OptimizerSpec
from ..core.shard import BareShard, ForHost
from ..errors import InternalError
from ..sync import AnySyncModel
from ..sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    ReportFault,
    SetTimer,
)
from ..sync.events import AnyEvent, PushReceived
from ..trace.recording import EntryRecorder
from .slice_optimizers import optimizer_of_slice
from .vectors import Vectors

__all__ = ["ForHost", "Push", "Shard", "Vectors"]


class Push(msgspec.Struct, frozen=True):
    """What one push brings to one shard.

    Attributes:
        gradient: the slice of the gradient. Read, never written; it must stay as it is until the push is
            applied or dropped, or a pull of its worker is answered.
        present: for each parameter of the layout, 1 if it had a gradient, 0 if it had none.
        groups: the parameter groups' hyper-parameters at the time of the push.
    """

    gradient: Vectors
    present: bytes
    groups: tuple[HyperParameters, ...]

    def copied(self) -> Push:
        """The same push in memory of its own."""
        gradient = {dtype: vector.clone() for dtype, vector in self.gradient.items()}
        return msgspec.structs.replace(self, gradient=gradient)


class Shard(BareShard):
    """One shard.

    Args:
        bounds: which slice of the layout this is.
        weights: its weights, per dtype; owned by the shard from now on.
        optimizer: the user's optimizer as a value.
        sync: the sync model to begin with.
        seed: the run's, from which the sync model draws.
        recorder: where each event and its actions go.
        before_update: called when the weights are about to change.
    """

    def __init__(
        self,
        bounds: ShardSlice,
        weights: Vectors,
        optimizer: OptimizerSpec,
        sync: AnySyncModel,
        seed: int = 0,
        recorder: EntryRecorder | None = None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(sync, seed, bounds.index, recorder)
        self.bounds = bounds
        self.weights = weights
        self._before_update = before_update
        self._pushes: dict[tuple[int, int], Push] = {}  # (worker, iteration) -> one that is not yet done with
        self._optimizer = optimizer_of_slice(optimizer, bounds, weights)

    def optimizer_state(self) -> Vectors:
        """The optimizer's state: "<segment>/<key>" -> its tensor."""
        return self._optimizer.state()

    def load_optimizer_state(self, state: Vectors) -> None:
        """Restore what `optimizer_state` gave. Raises `ProtocolError` if it is not for these segments."""
        self._optimizer.load_state(state)

    def _take_in(self, event: AnyEvent, push: object | None) -> None:
        if isinstance(event, PushReceived) and not event.empty:
            if not isinstance(push, Push):
                raise InternalError(f"a push of worker {event.worker} came without its gradient", (event,))
            self._pushes[event.worker, event.iteration] = push

    def _carry_out(self, action: AnyAction) -> None:
        match action:
            case ApplyPush():
                self._apply([(action.worker, action.iteration)], action.scale)
            case ApplyMean():
                self._apply(action.pushes, 1.0 / len(action.pushes))
            case DropPush():
                self._pushes.pop((action.worker, action.iteration), None)
            case HoldPush():
                pass  # kept in _pushes until an ApplyMean names it
            case AnswerPull():
                key = action.worker, action.iteration
                if key in self._pushes:  # still held, and the worker will use its memory again
                    self._pushes[key] = self._pushes[key].copied()
            case SetTimer() | ReportFault():
                pass
            case _:
                raise InternalError(f"a shard cannot {action}")

    def _apply(self, keys: Sequence[tuple[int, int]], scale: float) -> None:
        """One optimizer step with the sum of some pushes, in the order given, times `scale`."""
        pushes = [self._pushes.pop(key) for key in keys]
        self._before_update()
        newest = max(range(len(keys)), key=lambda i: (keys[i][1], -keys[i][0]))  # the most advanced worker's
        self._optimizer.step(
            [push.gradient for push in pushes],
            scale,
            lambda parameter: any(push.present[parameter] for push in pushes),
            pushes[newest].groups,
        )
