"""The state of one worker's script between two batches, from which another run of the script can go on.

The weights and the states of the optimizers are at the servers. The script has the rest: the random generators, its
own buffers, the hyper-parameters that it has set, the states of its schedulers and loss scalers, and the objects that
it tracks. All of these fit together when the script asks for its next batch. At any earlier moment, a scheduler or an
average of the weights may not have made the step that follows `optimizer.step()`.

A script may also wait (in `barrier()`, in `reduce()`, or until other workers have added parameters), or evaluate the
model while the other workers go on. A cut of the job (see `core.job_cut`) does not wait until the script asks for its
next batch. So a script that waits gives its state while it waits. The state of a script that evaluates is copied at the
beginning of the evaluation. At all other times, no state is copied.

A resumed script runs from its first line and so creates the same objects. The states of these objects are replaced when
the script reaches the place at which its state was saved: when it asks the same loader for its first batch in the same
epoch. At this moment, the loader has drawn the seed of its processes. Changes that the script has made to these objects
earlier are overwritten. Buffers are replaced when training begins, which happens later: in the first forward pass.

Tracked objects are the same in all workers and may be large. So only the state of the main worker contains them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UsageError
from ..shard.vectors import decode_states, encode_states
from .generator_states import GeneratorStates, generators_lock
from .gradients import scales_of
from .loops import active_loop, latest_position
from .schedules import JobScheduler, prepared_schedulers
from .session import BatchSite, OfSession, Session, Stateful, resumption_of, untrained
from .sources import streams_of
from .training import training_of

log = logging.getLogger("paceline.train.worker_state")

ANYWHERE = BatchSite("", 0)
"""The place of a script without a distributed loader."""

MOST_STEPS = 64
"""After this number of steps without a further batch, a script is assumed to get its batches from elsewhere."""

NOT_USED = (
    "This run is resumed, so it goes on with the weights, the optimizer state and the place in the data of its own "
    "checkpoint. What the script has loaded by itself is not used."
)

OF_PLACE = ("place", "optimizers", "schedulers", "scalers", "loaded")
"""The entries of a state that follow the progress of training, and so belong to one place in the script."""

OF_ONE: dict[str, Any] = {"generators": None, "loader": None, "buffers": {}}
"""The entries of a state that belong to one worker, and the values that another worker uses instead."""


def capture(
    session: Session, place: BatchSite, loader: Mapping[str, Any] | None = None, *, tracked: bool = True
) -> list[memoryview]:
    """Return the state of a worker's script, as bytes. The memory of tensors on the CPU is not copied.

    Args:
        session: the session of the worker.
        place: where the script is.
        loader: the state of the loader from which the script asks for a batch; None if there is no loader.
        tracked: True to include the states of tracked objects.
    """
    training = training_of(session)
    with generators_lock:
        generators = GeneratorStates().content
    return encode_states(
        {
            "place": tuple(place),
            "generators": generators,
            "loader": {
                key: sendable(session, f"the {key} of a loader", each) for key, each in (loader or {}).items()
            },
            "buffers": training.described_buffers() if training is not None else {},
            "optimizers": [hyper_parameters(optimizer) for optimizer in _optimizers(session)],
            "schedulers": [
                sendable(session, f"the state of {each.kind}", state_of(each))
                for each in prepared_schedulers(session)
            ],
            "scalers": scales_of(session).states(),
            "loaded": training is not None and any(each.state for each in training.sets),
            "tracked": tracked_states(session) if tracked else None,
        }
    )


def at_boundary(
    session: Session, place: BatchSite, loader: Callable[[], Mapping[str, Any]] | None = None
) -> Callable[[], None]:
    """Record that the script of a worker is between two batches.

    If a cut of the job is in progress (see `core.job_cut`), `at_boundary` copies the script's state. The returned
    function gives this state to the job. Call the returned function when the script gets a further batch, because the
    script may then draw random numbers. Do not call it at the end of an epoch: an evaluation may follow the last
    batch, and the call that begins the evaluation then gives the state.

    A cut needs the state in which the script computes its next gradient. So the state is given again if the script asks
    for a batch at another place before it computes this gradient.

    Args:
        session: the session of the worker.
        place: where the script is.
        loader: method that returns the state of the loader from which the script asks for a batch; None if there is no
            loader.
    """
    kept = _kept(session)
    kept.place, kept.steps = place, 0
    # Do not keep the loader, and so its dataset, alive: a new dataset takes over the stream of an earlier dataset
    # only when the earlier dataset has been freed (see `DataStreams`).
    kept.loader = None if loader is None else WeakMethod(loader)
    if not session.cut or kept.last == (now := (session.cut, session.core.iteration, place)):
        return lambda: None
    state = state_now(session)

    def give() -> None:
        if session.cut:
            kept.last = now
            session.servers.keep_worker_state(state)

    return give


def after_step(session: Session) -> None:
    """Give the state of a worker's script after a step, if the job is cut and the script asks for no batches."""
    kept = _kept(session)
    kept.steps += 1
    if not session.cut or (latest_position(session) is not None and kept.steps < MOST_STEPS):
        return
    now = session.cut, session.core.iteration, kept.place
    if kept.last != now:
        kept.last = now
        session.servers.keep_worker_state(state_now(session))


def state_now(session: Session, *, ended: bool = False) -> list[memoryview]:
    """Return the present state of a worker's script, between two batches or in a call. See `capture`.

    Args:
        session: the session of the worker.
        ended: True if the script has ended. The place of the script is then after its last epoch.
    """
    kept = _kept(session)
    place = kept.place
    if ended and place.stream:
        place = place._replace(epoch=place.epoch + 1)
    tracked = session.worker == session.main_worker
    loader = kept.loader() if kept.loader is not None else None
    return capture(session, place, loader() if loader is not None else None, tracked=tracked)


def begin_resumed(session: Session) -> None:
    """In a resumed run, take over the earlier state of the worker's script.

    Raises:
        UsageError: the script tracks other objects than in the earlier run.
    """
    resumption = resumption_of(session)
    if session.resumed and not resumption.begun:
        resumption.begun = True
        resume_with(session, *session.servers.fetch_worker_states())
        if any(optimizer.state for optimizer in untrained(session)):
            log.warning("%s", NOT_USED)
            if active_loop(session) is None:
                _skip_finished_passes(session, resumption.state)


def begin_late(session: Session, states: Mapping[str, Any]) -> None:
    """In a worker that joins a run in progress, take over the states of tracked objects that the job has kept.

    If the run is resumed, this worker does not use the states that scripts had in the earlier run.

    Args:
        session: the session of the worker.
        states: the states by name. See `tracked_states`.

    Raises:
        UsageError: the job does not track an object that this script tracks, or the object does not accept its state.
    """
    resumption = resumption_of(session)
    resumption.begun, resumption.state, resumption.buffers = True, None, {}
    load_states(session, states)


def _skip_finished_passes(session: Session, state: Mapping[str, Any] | None) -> None:
    """Count the passes that the earlier run has finished as skipped, because the resumed script does not make them.

    If a script loads the state of an optimizer only in a resumed run, its own loop then begins with a later epoch. If
    the script tells the loader the number of this epoch, no pass need be skipped here.
    """
    if state is None or state["loaded"]:
        return
    place, streams = BatchSite(*state["place"]), streams_of(session)
    if not dict(streams.passes).get(place.stream):
        streams.skip([(place.stream, place.epoch)])


def resume_with(session: Session, own: bytes | bytearray | None, main: bytes | bytearray | None) -> None:
    """Let the script of a worker go on from the state that it had in an earlier run. See `restore`.

    Args:
        session: the session of the worker.
        own: what `capture` has returned in the worker with the same index; None if there was no such worker.
        main: what `capture` has returned in the main worker; None if this is not known.

    Raises:
        ProtocolError: the bytes are not those of states.
        UsageError: the script tracks other objects than in the earlier run.
    """
    of_main: dict[str, Any] = {} if main is None else decode_states(main)
    if own is None:
        state = {**of_main, **OF_ONE}
    else:
        state = {**decode_states(own), "tracked": of_main.get("tracked")}
        if of_main and state["place"] != of_main["place"]:
            # The job goes on where the main worker was. This worker's own state belongs to another moment, so the main
            # worker's values replace those that belong to a place.
            state |= {key: of_main[key] for key in OF_PLACE} | {"loader": None}
    if "place" not in state:
        return
    resumption = resumption_of(session)
    resumption.state, resumption.buffers = state, state["buffers"]
    if state["tracked"] is not None:
        load_states(session, copy.deepcopy(state["tracked"]), RESUMED)


def restore(
    session: Session,
    place: BatchSite = ANYWHERE,
    go_on: Callable[[Mapping[str, Any]], None] = lambda loader: None,
) -> None:
    """Restore the state of a worker's script if the script has reached the place at which the state was taken.

    Args:
        session: the session of the worker.
        place: where the script is. Default: a script without a distributed loader.
        go_on: function that restores the state of the loader.

    Raises:
        UsageError: the script tracks other objects than in the earlier run.
    """
    resumption = resumption_of(session)
    if (state := resumption.take_at(place)) is not None:
        resumption.restored = state
        _put_back(session, {**state, "tracked": copy.deepcopy(state["tracked"])}, go_on)


@contextmanager
def repeated(session: Session, go_on: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Return a context in which a script repeats a batch only to set its variables again, or to begin to train.

    A run may be cut while its script evaluates the model after the last batch of an epoch. The resumed script comes to
    the evaluation again, although nothing is left of the epoch. The evaluation may use a variable that the script sets
    for each batch. So the script repeats one batch, in which its steps do nothing. At the end of the context, the state
    of the script is restored.

    A resumed run may also begin with a joint batch that is too small for all workers, because it is the rest of an
    epoch. A worker without a part in this joint batch repeats a batch, in which it begins to train.

    Args:
        session: the session of the worker.
        go_on: function that restores the state of the loader.
    """
    resumption = resumption_of(session)
    held = resumption.restored or resumption.state
    resumption.repeats = True
    try:
        yield
    finally:
        resumption.repeats = False
        if (training := training_of(session)) is not None:
            training.forget({} if held is None else held["buffers"])
        if resumption.restored is not None:
            _put_back(session, resumption.restored, go_on)


def _put_back(session: Session, state: Mapping[str, Any], go_on: Callable[[Mapping[str, Any]], None]) -> None:
    """Restore the states of the script's objects. See `restore`."""
    if state["tracked"] is not None:
        load_states(session, state["tracked"], RESUMED)
    # The script may have fewer of these objects now than it had, because it creates some of them later.
    for scheduler, held in zip(prepared_schedulers(session), state["schedulers"], strict=False):
        if held is not None:
            set_state(scheduler, held)
    scales_of(session).resume(state["scalers"])
    for optimizer, groups in zip(_optimizers(session), state["optimizers"], strict=False):
        set_hyper_parameters(optimizer, groups)
    if state["loader"]:
        go_on(state["loader"])
    if state["generators"] is not None:
        with generators_lock:
            GeneratorStates.of(state["generators"]).give_back()


def _optimizers(session: Session) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a script: first those whose parameters are trained, then the remaining ones."""
    training = training_of(session)
    return [*(each.owner for each in (training.sets if training is not None else ())), *untrained(session)]


def sendable(session: Session, name: str, state: Any) -> Any:
    """Return a state; None if it cannot be sent. A warning then says so once."""
    try:
        encode_states({name: state})
    except UsageError as error:
        if name not in (said := _said(session)):
            said.add(name)
            log.warning("A checkpoint of the run does not contain %s: %s", name, error)
        return None
    return state


class _Kept:
    """The place of a worker's script, and the state of the script that was given last.

    Attributes:
        last: the cut for which a state was given last, the iteration before which it was given, and its place; None if
            no state has been given.
        place: the place at which the script has last asked for a batch.
        loader: method that returns the state of the loader from which the script has last asked for a batch; None if
            there is no loader.
        steps: number of steps since the script has last asked for a batch.
    """

    def __init__(self) -> None:
        self.last: tuple[int, int, BatchSite] | None = None
        self.place = ANYWHERE
        self.loader: WeakMethod[Callable[[], Mapping[str, Any]]] | None = None
        self.steps = 0


_kept = OfSession(lambda _: _Kept())


class _Names(set[str]):
    """Names for which a warning was logged. A plain set cannot be a value of `OfSession`, which has weak references."""


_said = OfSession(lambda _: _Names())


# -- The states of the objects that a script tracks, and of schedulers with their settings. See `tracking`

SCHEDULERS = (JobScheduler, LRScheduler)


def has_tracked(session: Session) -> bool:
    """Return True if the script tracks objects."""
    return bool(tracked_of(session).objects)


def tracked_states(session: Session) -> dict[str, object]:
    """Return the states of all tracked objects, by name."""
    return {name: state_of(thing) for name, thing in tracked_of(session).objects.items()}


class _Source(NamedTuple):
    """The origin of states that are loaded into tracked objects, in words for an error message.

    Attributes:
        reason: why the states are loaded.
        remedy: what to do if the objects do not accept the states.
    """

    reason: str
    remedy: str


LATE = _Source("this worker has joined late", "All workers must run the same script")
RESUMED = _Source("this run is resumed", "Resume it with the same script")


def load_states(session: Session, states: Mapping[str, Any], source: _Source = LATE) -> None:
    """Restore the tracked objects, and objects that the script tracks later, from the states that the job has kept.

    Args:
        session: the session of the worker.
        states: the states by name. See `tracked_states`.
        source: where the states come from.

    Raises:
        UsageError: the job does not track an object that this script tracks, or the object does not accept its state.
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
        """Restore these objects from the states that the job has kept, if there are any."""
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
                    f"job has kept ({why}). {remedy}, with the same arguments."
                ) from error


tracked_of = OfSession(lambda _: Tracked())
"""Returns the objects that the script of a session's worker tracks."""


def state_of(thing: Any) -> dict[str, object]:
    """Return the state of an object and, for a scheduler, the hyper-parameters of its optimizer."""
    state = {"state": thing.state_dict()}
    if isinstance(thing, SCHEDULERS):
        state["groups"] = hyper_parameters(thing.optimizer)
    if isinstance(thing, JobScheduler):
        state["place"] = tuple(thing.place)
    return state


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the hyper-parameters in each parameter group of an optimizer, including entries of schedulers."""
    return [
        {key: value for key, value in group.items() if _is_hyper_parameter(key, value)}
        for group in optimizer.param_groups
    ]


def _is_hyper_parameter(key: str, value: object) -> bool:
    return key != "params" and isinstance(value, bool | int | float | str | tuple | torch.Tensor | None)


def set_state(thing: Any, state: Mapping[str, Any]) -> None:
    """Restore the state of an object from a result of `state_of`."""
    thing.load_state_dict(state["state"])
    if isinstance(thing, JobScheduler):
        thing.place = state["place"]
    if isinstance(thing, SCHEDULERS):
        groups, expected = len(thing.optimizer.param_groups), len(state["groups"])
        if groups != expected:
            raise ValueError(f"its optimizer has {groups} parameter groups, expected {expected}.")
        set_hyper_parameters(thing.optimizer, state["groups"])


def set_hyper_parameters(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Restore the hyper-parameters in the parameter groups of an optimizer from a result of `hyper_parameters`."""
    for group, values in zip(optimizer.param_groups, groups, strict=False):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
