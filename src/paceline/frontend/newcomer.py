"""The job's model in a worker that joins a run in progress, until this worker trains.

A worker takes part in the job from its first gradient on: it then registers its model, and other workers may wait for
its pushes. A worker that joins late may have no batch in its first epoch, while its script looks at the model: the
script evaluates it, saves it, or averages its weights. Until the worker takes part, it therefore *reads* the job's
weights, buffers and optimizer state, as an observer for which no worker waits, and copies them into its own model.

The script cannot be asked when it will look. So the model is read when the script's loop over the epochs or its first
pass over a distributed loader begins, and before every call that shows weights: a forward pass without gradients,
`evaluating`, `save`, and the optimizer's `state_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.protocol.model_spec import FrozenSpec
from ..shard.digests import digest_of
from ..shard.optimizer_state import join_state
from ..shard.vectors import dtype_name
from .joint_model import JointModel
from .lazy import any_lazy
from .of_session import OfSession
from .parameter_sets import ParameterSet, Trained
from .session import Session

__all__ = [
    "Untrained",
    "add_untrained",
    "are_trained",
    "begins_with_the_run",
    "came_late",
    "hold_job_model",
    "job_state",
    "untrained",
]


class Untrained(Protocol):
    """An optimizer of the script with parameters that are not trained yet."""

    def models(self) -> tuple[nn.Module, ...]:
        """Return the modules that hold the parameters."""

    def parameter_set(self) -> ParameterSet:
        """Return what the optimizer trains."""


class _Newcomer:
    """What is known of a worker that has not trained yet.

    Attributes:
        optimizers: the optimizers with parameters that are not trained yet, in the order in which they were created,
            or in which parameters were added to them.
        in_progress: True if the run was in progress when the worker came; None while this is not known.
        held: the number of optimizers whose models hold the job's weights.
        digests: the digests of the frozen parameters of these models, by name.
    """

    def __init__(self) -> None:
        self.optimizers: list[ref[Any]] = []
        self.in_progress: bool | None = None
        self.held = 0
        self.digests: dict[str, str] = {}


def add_untrained(session: Session, optimizer: Untrained) -> None:
    """Note that an optimizer has parameters that are not trained yet."""
    _of(session).optimizers.append(ref(optimizer))


def untrained(session: Session) -> list[Any]:
    """Return the optimizers with parameters that are not trained yet."""
    return [optimizer for each in _of(session).optimizers if (optimizer := each()) is not None]


def are_trained(session: Session, trained: Sequence[Untrained]) -> None:
    """Note that all parameters of these optimizers are trained from now on."""
    optimizers = _of(session).optimizers
    optimizers[:] = [each for each in optimizers if all(each() is not optimizer for optimizer in trained)]


def begins_with_the_run(session: Session) -> None:
    """Note that a worker takes part from the beginning of the run, so that its own weights may be the job's."""
    _of(session).in_progress = False


def came_late(session: Session) -> bool:
    """Return True if a worker is known to have joined a run in progress."""
    return _of(session).in_progress is True


def hold_job_model(session: Session | None, *, newest: bool = False) -> None:
    """If a worker joins a run in progress and has not trained yet, set its models to the job's weights and buffers.

    Tensors that the job's model does not have, or has with another shape or dtype, are not changed. If the worker
    trains such a model, it is refused.

    Args:
        session: the session of the worker; None outside a run.
        newest: True to read the weights again if the models hold earlier weights of the job.
    """
    if session is None:
        return
    newcomer, optimizers = _of(session), untrained(session)
    if newcomer.in_progress is False or not optimizers or session.weights:
        return
    if newcomer.held == len(optimizers) and not newest:
        return
    tensors = JointModel([model for optimizer in optimizers for model in optimizer.models()]).tensors()

    def digest(spec: FrozenSpec) -> str:
        known = newcomer.digests
        if spec.name not in known and _fits(tensors.get(spec.name), spec):
            known[spec.name] = digest_of(tensors[spec.name])
        return known.get(spec.name, "")

    state = session.servers.fetch_model(digest)
    newcomer.in_progress = state is not None
    if state is not None:
        newcomer.held = len(optimizers)
        newcomer.digests |= {name: digest_of(state[name]) for name in newcomer.digests if name in state}
        _copy(state, tensors)


def job_state(session: Session, optimizer: Untrained) -> dict[int, dict[str, Any]] | None:
    """Return the job's state of an optimizer, as the "state" entry of a `state_dict()`.

    Returns:
        The state; None if the worker takes part from the beginning of the run, or if it does not train the model of
        the job and will be refused.
    """
    hold_job_model(session)
    if not _of(session).in_progress or not (shards := session.servers.fetch_state()):
        return None
    optimizers = untrained(session)
    sets = [each.parameter_set() for each in optimizers]
    if any(any_lazy(each.parameters) for each in sets):
        return None
    trained = Trained.of(sets)
    sizes: Counter[int] = Counter()
    for shard, _ in shards:
        for segment in shard.segments:
            sizes[segment.parameter] += segment.stop - segment.start
    if sizes != Counter({index: each.size for index, each in enumerate(trained.spec.layout.parameters)}):
        return None
    state = join_state(trained.spec.layout, shards)
    members = trained.members[optimizers.index(optimizer)]
    return {position: state[index] for position, index in enumerate(members) if index in state}


def _fits(tensor: torch.Tensor | None, spec: FrozenSpec) -> bool:
    """Return True if a tensor of this worker could have the value of a frozen parameter of the job."""
    return (
        tensor is not None
        and not is_lazy(tensor)
        and (tuple(tensor.shape), dtype_name(tensor.dtype)) == (spec.shape, spec.dtype)
    )


@torch.no_grad()
def _copy(state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        value = state.get(name)
        if value is None or is_lazy(tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            continue
        tensor.copy_(value)


_of = OfSession(lambda _: _Newcomer())
