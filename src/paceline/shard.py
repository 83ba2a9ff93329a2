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
import torch

from .errors import InternalError, InvalidEventError, ProtocolError
from .layout import ITEM_BYTES, ShardSlice
from .optimizers import (
    PER_PARAMETER_STATE,
    HyperParameters,
    OptimizerSpec,
    fill_momentum,
    implementation,
    make_optimizer,
)
from .sync import AnySyncModel
from .sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    ReportFault,
    SetTimer,
)
from .sync.changes import ShardSync
from .sync.events import AnyEvent, PushReceived
from .sync.versions import Versions
from .trace import Entry, Recorder

__all__ = ["ForHost", "Push", "Shard", "SliceTensors", "Vectors"]

Vectors = dict[str, torch.Tensor]
"""dtype -> a flat vector: a shard's slice of weights, or of a gradient."""

ForHost = AnswerPull | SetTimer | ReportFault
"""What a shard leaves to its host."""

CHUNK_BYTES = 256 * 1024  # of a mean: what is summed stays in the cache until it is divided


class SliceTensors:
    """A shard's slice of some flat vectors, and the same memory cut into the shard's segments.

    Attributes:
        vectors: dtype -> the slice.
        segments: one view for each segment of the shard, in order.
    """

    __slots__ = ("segments", "vectors")

    def __init__(self, bounds: ShardSlice, vectors: Vectors) -> None:
        self.vectors = vectors
        self.segments = [vectors[s.dtype][s.start : s.stop] for s in bounds.segments]


class Push(msgspec.Struct, frozen=True):
    """What one push brings to one shard.

    Attributes:
        gradient: the slice of the gradient. Read, never written; it must stay as it is until the push is
            applied or dropped.
        present: for each parameter of the layout, 1 if it had a gradient, 0 if it had none.
        groups: the parameter groups' hyper-parameters at the time of the push.
    """

    gradient: SliceTensors
    present: bytes
    groups: tuple[HyperParameters, ...]


class Shard:
    """One shard.

    Args:
        bounds: which slice of the layout this is.
        weights: its weights, per dtype; owned by the shard from now on.
        optimizer: the user's optimizer as a value.
        sync: the sync model to begin with.
        seed: the run's, from which the sync model draws.
        recorder: where each event and its actions go.

    Attributes:
        sync: the sync model through all its changes.
    """

    def __init__(
        self,
        bounds: ShardSlice,
        weights: Vectors,
        optimizer: OptimizerSpec,
        sync: AnySyncModel,
        seed: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.bounds = bounds
        self.weights = weights
        self.sync = ShardSync(sync, seed, bounds.index)
        self._recorder = recorder
        self._versions = Versions()
        self._pushes: dict[
            tuple[int, int], Push
        ] = {}  # (worker, iteration) -> a push that is not yet done with
        self._staleness: list[tuple[int, int, int]] = []  # of the pushes that the event at hand had applied
        self._mean = SliceTensors(
            bounds, {dtype: torch.zeros_like(vector) for dtype, vector in weights.items()}
        )
        self._parameters = SliceTensors(bounds, weights).segments
        self._name = optimizer.name
        self._groups = optimizer.groups  # the hyper-parameters that the optimizer has now
        group_of = [optimizer.group_of[segment.parameter] for segment in bounds.segments]
        self._optimizer = make_optimizer(
            optimizer.name,
            optimizer.groups,
            [
                [p for p, of in zip(self._parameters, group_of, strict=True) if of == group]
                for group in range(len(optimizer.groups))
            ],
        )

    @property
    def version(self) -> int:
        """How many updates have been applied."""
        return self._versions.version

    def handle(
        self,
        event: AnyEvent,
        push: Push | None = None,
        host: Callable[[ForHost], None] = lambda action: None,
    ) -> None:
        """Take one event; carry out what the sync model asks for.

        Args:
            event: what happened.
            push: what was pushed, with a `PushReceived` that is not empty.
            host: called with each action that is the host's, in order; for an `AnswerPull`, while `weights` and
                `version` are what is to be sent.

        Raises:
            InvalidEventError: the contract does not allow the event; nothing has changed.
        """
        try:
            actions = self.sync.handle(event)
        except InvalidEventError as error:
            self._record(event, [], str(error))
            raise
        self._note(event, push)
        for action in actions:
            self._perform(action, host)
        self._record(event, actions)

    def optimizer_state(self) -> Vectors:
        """The optimizer's state: "<segment>/<key>" -> its tensor."""
        return {
            f"{index}/{key}": value
            for index, parameter in enumerate(self._parameters)
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def load_optimizer_state(self, state: Vectors) -> None:
        """Restore what `optimizer_state` gave.

        Raises:
            ProtocolError: it is not for these segments.
        """
        parameters = {str(index): parameter for index, parameter in enumerate(self._parameters)}
        for name, value in state.items():
            index, _, key = name.partition("/")
            shape = () if key in PER_PARAMETER_STATE else getattr(parameters.get(index), "shape", None)
            if index not in parameters or tuple(value.shape) != shape:
                raise ProtocolError(f"state {name!r} of shape {list(value.shape)} fits no segment")
            self._optimizer.state[parameters[index]][key] = value.clone()

    def _note(self, event: AnyEvent, push: Push | None) -> None:
        self._versions.note(event)
        if isinstance(event, PushReceived) and not event.empty:
            if push is None:
                raise InternalError(f"a push of worker {event.worker} came without its gradient", (event,))
            self._pushes[event.worker, event.iteration] = push

    def _perform(self, action: AnyAction, host: Callable[[ForHost], None]) -> None:
        match action:
            case ApplyPush():
                self._apply([(action.worker, action.iteration)], action.scale)
            case ApplyMean():
                self._apply(action.pushes, 1.0 / len(action.pushes))
            case DropPush():
                self._pushes.pop((action.worker, action.iteration), None)
            case HoldPush():
                pass  # kept in _pushes until an ApplyMean names it
            case AnswerPull() | SetTimer() | ReportFault():
                pass
            case _:
                raise InternalError(f"a shard cannot {action}")
        self._staleness += self._versions.carry_out(action)
        if isinstance(action, ForHost):
            host(action)

    def _apply(self, keys: Sequence[tuple[int, int]], scale: float) -> None:
        """One optimizer step with the sum of some pushes, in the order given, times `scale`."""
        pushes = [self._pushes.pop(key) for key in keys]
        newest = max(range(len(keys)), key=lambda i: (keys[i][1], -keys[i][0]))  # the most advanced worker's
        self._use_groups(pushes[newest].groups)
        if len(pushes) == 1 and scale == 1.0:
            gradient = pushes[0].gradient
        else:
            gradient = self._mean
            for dtype, out in gradient.vectors.items():
                _scaled_sum(out, [push.gradient.vectors[dtype] for push in pushes], scale, ITEM_BYTES[dtype])
        for parameter, part, segment in zip(
            self._parameters, gradient.segments, self.bounds.segments, strict=True
        ):
            has_gradient = any(push.present[segment.parameter] for push in pushes)
            parameter.grad = part if has_gradient else None
        fill_momentum(self._optimizer)
        self._optimizer.step()

    def _use_groups(self, groups: tuple[HyperParameters, ...]) -> None:
        if groups is not self._groups and groups != self._groups:
            for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(settings | implementation(self._name, settings, group["params"]))
            self._groups = groups

    def _record(self, event: AnyEvent, actions: Sequence[AnyAction], refused: str | None = None) -> None:
        if self._recorder is not None:
            self._recorder.record(Entry(event, list(actions), refused, self.version, self._staleness))
        self._staleness = []


def _scaled_sum(out: torch.Tensor, terms: Sequence[torch.Tensor], scale: float, item_bytes: int) -> None:
    """out = scale * sum(terms), summed in the order given, one pass in chunks, without temporaries."""
    step = CHUNK_BYTES // item_bytes
    for start in range(0, out.numel(), step):
        chunk = out[start : start + step]
        torch.mul(terms[0][start : start + step], scale, out=chunk)
        for term in terms[1:]:
            chunk.add_(term[start : start + step], alpha=scale)
