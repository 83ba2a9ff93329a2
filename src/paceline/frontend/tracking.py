"""`track`, which names objects whose state belongs to the job, such as a scheduler or averaged weights.

The states are sent to the server of shard 0 at the end of each epoch (see `paceline.epochs` and
`core.data.loop_positions`). A worker that joins a run in progress loads them when its loop begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UsageError
from ..shard.states import decode_states, encode_states
from .lr_schedules import JobScheduler
from .of_session import OfSession
from .optimizer import DistributedOptimizer
from .session import Session, current

__all__ = [
    "Stateful",
    "encoded_states",
    "has_tracked",
    "hyper_parameters",
    "load_states",
    "set_hyper_parameters",
    "set_state",
    "state_of",
    "track",
]

SCHEDULERS = (JobScheduler, LRScheduler)


class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def track(**objects: Stateful) -> None:
    """Let the state of some objects belong to the job, so that a worker that joins late continues with it.

    A worker that joins a run in progress runs the script from its first line. It gets the weights and the model's
    buffers from the job, but other objects of the script are new in it: a learning-rate scheduler, averaged weights,
    a loss scaler. Name these objects after you have created them, and before the loop over `paceline.epochs`:

    - At the end of each epoch, one worker sends their states to a server: the worker with the lowest index of those
      that are in training. If this worker is lost, the next one does so from the next epoch on. The states at the end
      of the loop are sent by the first worker that ends it, and again by workers with lower indices, so they are not
      lost with any worker.
    - A worker that joins late loads the states when its loop over `paceline.epochs` begins. For a scheduler, it also
      takes over the hyper-parameters that the scheduler has set, such as the learning rate. The states are those at
      the beginning of the epoch in progress. A scheduler that is stepped in every iteration then follows the job's
      position in the epoch if it was prepared with `paceline.prepare`.
    - The run saves the states that it has kept last in `tracked.pt` in its run directory, with the number of epochs
      that were complete. `torch.load` reads this file.

    The objects of the other workers are not changed. Outside a run, the function only checks the objects.

    Args:
        objects: objects with the methods `state_dict()` and `load_state_dict()`, by names of your choice. States may
            consist of numbers, strings, None, tensors and NumPy arrays, in dictionaries, lists and tuples; together,
            they have at most 1 GiB.

    Raises:
        UsageError: an object has no state, its state cannot be sent or is too large, its name is in use, or it is a
            distributed optimizer.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        >>> ema = torch.optim.swa_utils.AveragedModel(model)
        >>> paceline.track(scheduler=scheduler, ema=ema)
    """
    session = current()
    tracked = _of(session).objects if session is not None else {}
    for name, thing in objects.items():
        missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(thing, m, None))]
        if missing:
            raise UsageError(
                f"track() got {name}={type(thing).__name__}, which has no method {' and no method '.join(missing)}()."
            )
        if isinstance(thing, DistributedOptimizer):
            raise UsageError(
                f"track() got {name}={type(thing).__name__}, but the state of a distributed optimizer is kept by the "
                "servers. Track only what the script keeps itself, such as a scheduler."
            )
        if tracked.get(name, thing) is not thing:
            raise UsageError(
                f"track() got {name}=..., but another object is tracked under this name. Choose another name."
            )
    encode_states({**_states(tracked), **_states(objects)})
    if session is not None:
        tracked.update(objects)
        _load_into(objects, _of(session).kept)


def has_tracked(session: Session) -> bool:
    """Return True if the script tracks objects."""
    return bool(_of(session).objects)


def encoded_states(session: Session) -> list[memoryview]:
    """Return the bytes of the states of all tracked objects."""
    return encode_states(_states(_of(session).objects))


def load_states(session: Session, data: bytes | bytearray) -> None:
    """Load the states that the job has kept into the tracked objects, and later into those that are tracked later.

    Raises:
        ProtocolError: the bytes are not those of states.
        UsageError: the job does not track an object that this script tracks, or the state of another object.
    """
    tracked = _of(session)
    tracked.kept = decode_states(data)
    _load_into(tracked.objects, tracked.kept)


class _Tracked:
    """The objects that a script tracks.

    Attributes:
        objects: name -> object.
        kept: name -> state, for a worker that has joined late; None for other workers.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        self.kept: Mapping[str, Any] | None = None


_of = OfSession(lambda _: _Tracked())


def _states(objects: Mapping[str, Stateful]) -> dict[str, object]:
    return {name: state_of(thing) for name, thing in objects.items()}


def state_of(thing: Any) -> dict[str, object]:
    """Return the state of an object and, for a scheduler, what it has set in its optimizer."""
    state = {"state": thing.state_dict()}
    if isinstance(thing, SCHEDULERS):
        state["groups"] = hyper_parameters(thing.optimizer)
    if isinstance(thing, JobScheduler):
        state["place"] = thing.place
    return state


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the hyper-parameters in each parameter group of an optimizer, including those of schedulers."""
    return [
        {key: value for key, value in group.items() if _is_hyper_parameter(key, value)}
        for group in optimizer.param_groups
    ]


def _is_hyper_parameter(key: str, value: object) -> bool:
    return key != "params" and isinstance(value, bool | int | float | str | tuple | torch.Tensor | None)


def _load_into(objects: Mapping[str, Stateful], kept: Mapping[str, Any] | None) -> None:
    if kept is None:
        return
    for name, thing in objects.items():
        if name not in kept:
            raise UsageError(
                f"this worker has joined late, and its script tracks {name!r}, but the job tracks only "
                f"{', '.join(map(repr, kept)) or 'nothing'}. All workers must run the same script."
            )
        try:
            set_state(thing, kept[name])
        except Exception as error:
            why = " ".join(str(error).split())
            raise UsageError(
                f"this worker has joined late, and the object that its script tracks as {name!r} does not accept the "
                f"state that the job has kept: {why} All workers must run the same script with the same arguments."
            ) from error


def set_state(thing: Any, state: Mapping[str, Any]) -> None:
    """Load a state that `state_of` has returned into an object."""
    thing.load_state_dict(state["state"])
    if isinstance(thing, JobScheduler):
        thing.place = state["place"]
    if isinstance(thing, SCHEDULERS):
        groups, expected = len(thing.optimizer.param_groups), len(state["groups"])
        if groups != expected:
            raise ValueError(f"its optimizer has {groups} parameter groups, expected {expected}.")
        set_hyper_parameters(thing.optimizer, state["groups"])


def set_hyper_parameters(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set hyper-parameters that `hyper_parameters` has returned, in the parameter groups that an optimizer has."""
    for group, values in zip(optimizer.param_groups, groups, strict=False):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
