"""The states of the objects that a script tracks, and of schedulers with what they have set. See `tracking`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UsageError
from .lr_schedules import JobScheduler
from .of_session import OfSession
from .session import Session
from .stateful import Stateful

__all__ = [
    "LATE",
    "RESUMED",
    "Tracked",
    "has_tracked",
    "hyper_parameters",
    "load_states",
    "set_hyper_parameters",
    "set_state",
    "state_of",
    "tracked_of",
    "tracked_states",
]

SCHEDULERS = (JobScheduler, LRScheduler)


def has_tracked(session: Session) -> bool:
    """Return True if the script tracks objects."""
    return bool(tracked_of(session).objects)


def tracked_states(session: Session) -> dict[str, object]:
    """Return the states of all tracked objects, by name."""
    return {name: state_of(thing) for name, thing in tracked_of(session).objects.items()}


class _Source(NamedTuple):
    """Where states come from that are loaded into tracked objects, in words for an error.

    Attributes:
        reason: why they are loaded.
        remedy: what to do if the objects do not accept them.
    """

    reason: str
    remedy: str


LATE = _Source("this worker has joined late", "All workers must run the same script")
RESUMED = _Source("this run is resumed", "Resume it with the same script")


def load_states(session: Session, states: Mapping[str, Any], source: _Source = LATE) -> None:
    """Load the states that the job has kept into the tracked objects, and later into those that are tracked later.

    Args:
        session: the session of the worker.
        states: the states by name. See `tracked_states`.
        source: where they come from.

    Raises:
        UsageError: the job does not track an object that this script tracks, or the state of another object.
    """
    tracked = tracked_of(session)
    tracked.kept, tracked.source = states, source
    tracked.load_into(tracked.objects)


class Tracked:
    """The objects that a script tracks.

    Attributes:
        objects: name -> object.
        kept: name -> state, for a worker that has joined late or is resumed; None for other workers.
        source: where these states come from.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        self.kept: Mapping[str, Any] | None = None
        self.source = LATE

    def load_into(self, objects: Mapping[str, Stateful]) -> None:
        """Load the states that the job has kept, if there are any, into these objects."""
        kept, (reason, remedy) = self.kept, self.source
        if kept is None:
            return
        for name, thing in objects.items():
            if name not in kept:
                raise UsageError(
                    f"{reason}, and its script tracks {name!r}, but the job tracks only "
                    f"{', '.join(map(repr, kept)) or 'nothing'}. {remedy}."
                )
            try:
                set_state(thing, kept[name])
            except Exception as error:
                why = " ".join(str(error).split())
                raise UsageError(
                    f"{reason}, and the object that its script tracks as {name!r} does not accept the state that the "
                    f"job has kept: {why} {remedy}, with the same arguments."
                ) from error


tracked_of = OfSession(lambda _: Tracked())
"""Returns what the script of a session's worker tracks."""


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
