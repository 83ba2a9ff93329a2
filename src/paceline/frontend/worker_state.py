"""What the script of one worker holds between two batches, so that another run of the script can go on from there.

The weights and the states of the optimizers are at the servers. The script has the rest: the random generators, its
own buffers, the hyper-parameters that it has set, the states of its schedulers and loss scalers, and the objects that
it tracks. All of these fit together when the script asks for its next batch. At any earlier moment, a scheduler or an
average of the weights may not have made the step that follows `optimizer.step()`.

A resumed script runs from its first line and so creates the same objects. Their states are replaced when the script
has reached the same place: when it asks for its next batch in the same epoch of the same loader, after the loader has
drawn the seed of its processes. Until then, whatever the script does to these objects is overwritten. Buffers are
replaced when training begins, which happens later: in the first forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..shard.states import decode_states, encode_states
from .generators import GeneratorStates, generators_lock
from .loss_scaling import scales_of
from .lr_schedules import prepared_schedulers
from .newcomer import untrained
from .resumption import Place, resumption_of
from .session import Session
from .tracking import hyper_parameters, load_states, set_hyper_parameters, set_state, state_of
from .training import training_of

__all__ = ["capture", "restore", "resume_with"]


def capture(session: Session, place: Place, generator: torch.Generator | None = None) -> list[memoryview]:
    """Return what the script of a worker holds, except for what it tracks, as bytes.

    Args:
        session: the session of the worker.
        place: where the script is.
        generator: the generator of the loader from which the script asks for a batch; None if it has none.
    """
    training = training_of(session)
    optimizers = [each.owner for each in training.sets] if training is not None else []
    with generators_lock:
        generators = GeneratorStates().content
    return encode_states(
        {
            "place": tuple(place),
            "generators": generators,
            "loader": generator.get_state() if generator is not None else None,
            "buffers": training.described_buffers() if training is not None else {},
            "optimizers": [hyper_parameters(optimizer) for optimizer in optimizers],
            "schedulers": [state_of(scheduler) for scheduler in prepared_schedulers(session)],
            "scalers": scales_of(session).states(),
        }
    )


def resume_with(session: Session, own: bytes | bytearray | None, tracked: bytes | bytearray | None) -> None:
    """Let the script of a worker go on from what it held in an earlier run. See `restore`.

    Args:
        session: the session of the worker.
        own: what `capture` has returned in the worker with the same index; None if there was no such worker.
        tracked: the states of the tracked objects; None if nothing was tracked.

    Raises:
        ProtocolError: the bytes are not those of states.
        UsageError: the script tracks other objects than it did.
    """
    if own is not None:
        resumption_of(session).begin(decode_states(own), tracked)
    if tracked is not None:
        load_states(session, tracked)


def restore(session: Session, place: Place, generator: torch.Generator | None = None) -> None:
    """Restore what the script of a worker held, if the script has reached the place where it was.

    Args:
        session: the session of the worker.
        place: where the script is.
        generator: the generator of the loader from which the script asks for a batch; None if it has none.
    """
    resumption = resumption_of(session)
    if not resumption.has_reached(place):
        return
    state, resumption.own = resumption.own, None
    assert state is not None
    if resumption.tracked is not None:
        load_states(session, resumption.tracked)
        resumption.tracked = None
    _restore_objects(session, state)
    if generator is not None and state["loader"] is not None:
        generator.set_state(state["loader"])
    with generators_lock:
        GeneratorStates.of(state["generators"]).give_back()


def _restore_objects(session: Session, state: Mapping[str, Any]) -> None:
    """Restore the states of schedulers and loss scalers, and the hyper-parameters of the optimizers.

    The script may have fewer of them here than it had, because it creates some of them later.
    """
    for scheduler, held in zip(prepared_schedulers(session), state["schedulers"], strict=False):
        set_state(scheduler, held)
    scales_of(session).resumed = list(state["scalers"])
    training = training_of(session)
    optimizers = [each.owner for each in training.sets] if training is not None else []
    for optimizer, groups in zip([*optimizers, *untrained(session)], state["optimizers"], strict=False):
        set_hyper_parameters(optimizer, groups)
