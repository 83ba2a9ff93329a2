"""`barrier`, `reduce`, `evaluating`, `save` and `is_main`: what scripts do together, or once for all workers."""

from __future__ import annotations

import copy
import math
import numbers
import os
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..core.joint_batch import ITEM_BYTES, LIMIT_BYTES, combine
from ..core.messages import LONGEST_PATH, MOST_WORDS, Contributed, Warned, WorkingDirectory
from ..core.requests import COORDINATOR, Send
from ..errors import UsageError
from ..files import Unfinished
from .metrics import metrics_of
from .session import OfSession, Session, current, hold_job_model
from .training import WorkerTraining, training_of

Value = TypeVar("Value")


def barrier() -> None:
    """Wait until all other workers have called `barrier()`, too.

    The function does not wait for a worker that has finished or is lost. Outside a run, `barrier` returns immediately.

    All workers must make the same calls of `barrier` and `reduce`, in the same order. Call them between two iterations.
    Under `bsp`, call them after the same number of iterations: if a worker waits for a second worker that cannot finish
    its iteration without the first, the run ends with an error that names both. Under some sync models, such as `ssp`,
    workers may differ in their number of iterations, but a worker may still have to wait for slower workers. Under such
    a model, a worker that waits in `barrier` sends pushes without a gradient, as inside `evaluating`, and continues
    with the newest weights.

    Raises:
        UsageError: the workers' calls differ, or the call was made inside `optimizer.editing()`.
        WeightsChangedError: weights have been changed since the last step.

    Example:
        >>> import paceline
        >>> if paceline.is_main():
        ...     words = "the data that worker 0 downloads".split()
        >>> paceline.barrier()
    """
    session = current()
    paths = array("d", NO_PATHS if session is None else path_numbers(session))
    sums = _combined("barrier()", "sum", paths, 1.0)
    if session is not None:
        warn_of_paths(session, sums)


def reduce(value: Value, op: Literal["mean", "sum"] = "mean", *, weight: float | None = None) -> Value:
    """Return the mean or the sum of a value over all workers. Every worker receives the same result.

    The function waits until all other workers have called it, as `barrier` does, and the rules for `barrier` apply. The
    result contains the values of all workers that have not finished and are not lost. The result is computed in
    float64, in the order of the workers' indices, so it does not depend on which worker arrives first.

    Args:
        value: a number, a tensor, or a dictionary of numbers and tensors with the same keys and shapes in all
            workers; at most 1 MiB as float64.
        op: "mean" or "sum".
        weight: the weight of this worker's value in the mean, for example the number of samples that it describes.
            Default: 1 for each worker. If all weights are 0, the mean is NaN.

    Returns:
        A value of the same kind. A floating-point tensor keeps its dtype; the mean of an integer tensor has torch's
        default dtype. The sum of integers is an integer.

    Raises:
        UsageError: `value`, `op` or `weight` cannot be used, the workers' calls differ, or the call was made inside
            `optimizer.editing()`.
        WeightsChangedError: weights have been changed since the last step.

    Example:
        >>> import paceline
        >>> paceline.reduce({"loss": 0.5, "correct": 12}, "sum")
        {'loss': 0.5, 'correct': 12}
    """
    _require_operation(op, weight)
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        raise UsageError(f"reduce() got a dictionary with the keys {list(value)}, expected strings.")
    entries = value if isinstance(value, Mapping) else {None: value}
    names = sorted(entries)
    for name in names:
        _require_real(name, entries[name])
    count = sum(_count(entries[name]) for name in names)
    if count * ITEM_BYTES > LIMIT_BYTES:
        raise UsageError(
            f"reduce() got {count} numbers, expected at most {LIMIT_BYTES // ITEM_BYTES}. Use it for metrics; "
            "gradients and weights are exchanged by step()."
        )
    flat = array("d", [number for name in names for number in _flat(entries[name])])
    shapes = ", ".join(_described(name, entries[name]) for name in names)
    call = f"reduce(op={op!r}) of {shapes if shapes else 'nothing'}"
    if len(call) > MOST_WORDS:
        raise UsageError(
            f"reduce() got {len(names)} keys with {sum(map(len, names))} characters. Use fewer or shorter keys."
        )
    combined = _combined(call, op, flat, 1.0 if weight is None else float(weight))
    results = {}
    for name in names:
        size = _count(entries[name])
        results[name], combined = _like(entries[name], combined[:size], op), combined[size:]
    if isinstance(value, Mapping):
        return {name: results[name] for name in value}  # type: ignore[return-value]
    return results[None]  # type: ignore[no-any-return]


def _combined(call: str, op: Literal["mean", "sum"], values: array[float], weight: float) -> array[float]:
    """Combine the values of all workers."""
    session = current()
    content = values.tobytes()
    if session is None:
        combined = combine({0: Contributed(call, 1, op, content, weight)})
    else:
        combined = (training_of(session) or session).combine(call, op, content, weight)
    if combined.refused:
        raise UsageError(f"The workers' calls differ: {combined.refused}")
    return array("d", combined.numbers)


def _require_operation(op: str, weight: float | None) -> None:
    if op not in ("mean", "sum"):
        raise UsageError(f'reduce() got op={op!r}, expected "mean" or "sum".')
    if weight is None:
        return
    usable = isinstance(weight, numbers.Real) and math.isfinite(weight) and weight >= 0
    if op == "sum" or not usable:
        raise UsageError(
            f"reduce() got weight={weight!r}, expected a number >= 0 for a mean, and no weight for a sum."
        )


def _require_real(name: str | None, value: object) -> None:
    real = not value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, numbers.Real)
    if not real:
        where = "" if name is None else f" under the key {name!r}"
        raise UsageError(
            f"reduce() got {value!r}{where}, expected a number, a tensor, or a dictionary of numbers and tensors."
        )


def _count(value: object) -> int:
    """Return how many numbers a value consists of."""
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _flat(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        flat: list[float] = value.detach().cpu().to(torch.float64).reshape(-1).tolist()
        return flat
    return [float(value)]


def _described(name: str | None, value: object) -> str:
    kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "a number"
    return kind if name is None else f"{name!r}: {kind}"


def _like(value: Any, combined: array[float], op: str) -> Any:
    """Return the combined numbers as a value of the same kind as `value`."""
    if isinstance(value, torch.Tensor):
        result = torch.tensor(combined, dtype=torch.float64).reshape(value.shape)
        if value.is_floating_point():
            dtype = value.dtype
        elif op == "mean":
            dtype = torch.get_default_dtype()
        else:
            dtype = torch.int64 if value.dtype == torch.bool else value.dtype
        return result.to(dtype).to(value.device)
    [number] = combined
    return int(number) if op == "sum" and isinstance(value, numbers.Integral) else number


# -- `evaluating`, with which one worker evaluates the model while the others go on training -----------------

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def evaluating(model: Model) -> Iterator[Model]:
    """Return a context for evaluating the model between two iterations, without stopping the other workers.

    At the beginning of the context, the worker fetches the current weights from the servers. The target of the `with`
    statement is a copy of the model with these weights, in evaluation mode. Training does not change this copy. The
    BatchNorm statistics of the copy are those of all workers together, as in the weights that the run saves. If an
    optimizer has a method `eval()`, as schedule-free optimizers do, the copy has the weights that this method gives.

    If other workers may have to wait for this worker, as under `bsp`, this worker goes on pushing inside the context,
    on a background thread and about as often as usual. These pushes count as progress, but contain no gradient, so they
    do not affect averages. After the context, the worker continues with the newest weights. In virtual time, an
    evaluation takes only the time of the messages that fetch the weights before and after the evaluation. Outside a
    run, and before the first forward pass of training, the copy has the weights of the given model. But in a worker
    that joins a run in progress, the copy has the job's weights even before this pass.

    In the context, use only the copy, because the weights of the model change. If the worker is to evaluate on all
    data, use a loader that is not distributed.

    Args:
        model: the model, or a part of it.

    Raises:
        UsageError: `model` is not a module, or `step()` or `evaluating()` was called inside the context.
        WeightsChangedError: weights have been changed since the last step.
        PeerLostError: the run ended during the evaluation. Raised at the end of the context.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> if paceline.is_main():
        ...     with paceline.evaluating(model) as snapshot, torch.no_grad():
        ...         loss = snapshot(torch.ones(4, 2)).square().mean()
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"evaluating() got {model!r}, expected a torch.nn.Module: the model, or a part of it."
        )
    session = current()
    training = training_of(session)
    if training is None:
        hold_job_model(session, newest=True)
        with metrics_of(session).evaluation(session) if session is not None else nullcontext():
            yield copy.deepcopy(model).eval()
        return
    training.require_not_idle("evaluating()")
    training.refresh()
    snapshot = copy.deepcopy(model).eval()
    values = _pooled_by_memory(training) | _evaluated_by_memory(training, training.with_modes(training=False))
    _copy_into(model, snapshot, values)
    assert session is not None
    with metrics_of(session).evaluation(session), training.idle():
        yield snapshot


@contextmanager
def evaluating_in_place(session: Session) -> Iterator[None]:
    """Return a context in which a script evaluates its own model, with the newest weights of the job.

    In this context, the model has the BatchNorm statistics of all workers together. In contrast to `evaluating`, other
    workers may have to wait for this worker, and the script need not use a copy.

    Args:
        session: the session of the worker.
    """
    training = training_of(session)
    pooled: Mapping[str, torch.Tensor] = {}
    if training is None:
        hold_job_model(session, newest=True)
    else:
        training.refresh()
        pooled = training.pooled_buffers()
    buffers = training.buffers() if training is not None and pooled else {}
    own = {name: buffer.clone() for name, buffer in buffers.items()}
    _set_buffers(buffers, pooled)
    try:
        with metrics_of(session).evaluation(session):
            yield
    finally:
        _set_buffers(buffers, own)


@torch.no_grad()
def _set_buffers(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(values[name])


# -- `save`, which writes a file once for all workers, and the statistics of all workers in what is saved ----


Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def save(obj: object, path: str | os.PathLike[str]) -> str:
    """Write an object to a file once, in the main worker, as `torch.save` does. Return the absolute path of the file.

    The main worker is worker 0 until it is lost (see `is_main`). This call asks the coordinator which worker is the
    main worker now. So another worker writes as soon as it has become the main worker. All other workers write nothing,
    and a worker that has been taken out of the run writes nothing, either. The file appears under its name only when it
    is complete, so a process that reads the file during the call finds either the earlier file or the new one. The
    other workers do not wait: a worker that reads the file calls `barrier()` first, as all workers must.

    Under data parallelism, each worker has its own BatchNorm statistics. If `obj` contains these statistics of the
    trained model, or other buffers, the file contains the values of all workers together, as in the weights that the
    run saves. The buffers are recognized in a module and in nested dictionaries, lists and tuples (but not in named
    tuples), by the memory that they share with the model, as in `model.state_dict()`; a copy, such as
    `copy.deepcopy(model.state_dict())`, is saved as it is. If an optimizer has a method `eval()`, as schedule-free
    optimizers do, its weights are recognized in the same way and replaced by the weights for evaluation. The weights
    are not replaced if `obj` contains the `state_dict()` of an optimizer, because such a state belongs to the weights
    in training.

    Args:
        obj: the object, for example `model.state_dict()`.
        path: name of the file. Its directory must exist. If each worker has a working directory of its own, as Hydra
            may give it, a relative path refers to the working directory that the first main worker had when training
            began. A script that changes the directory later must do so in all workers in the same way.

    Returns:
        The absolute path of the file, from which all workers can read it. The path is the same in all workers if
        they give the same absolute path. If they give a relative path and have different working directories, the paths
        may differ in two cases: before training begins, and on machines without common folders. A `barrier()` after the
        call notices if the paths differ, and a warning names the file.

    Raises:
        UsageError: the file cannot be written. An earlier file of this name is unchanged.
        PeerLostError: the run has ended.

    Example:
        >>> import paceline, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = paceline.save(model.state_dict(), f"{folder}/model.pt")
        ...     paceline.barrier()  # before other workers read the file
        ...     model.load_state_dict(torch.load(path))
        <All keys matched successfully>
    """
    session = current()
    writes = session is None or session.is_main_now()
    place = own = os.path.abspath(path)
    if session is not None:
        place = _place_for_all(session, path, writes=writes)
        saved = saved_at(session)
        saved.path, saved.own = place, own
        if not writes:
            return place
    training = training_of(session)
    if training is None:
        hold_job_model(session)
    else:
        values = _pooled_by_memory(training)
        if not _has_optimizer(obj):
            values |= _evaluated_by_memory(training, training.with_modes())
        obj = _replaced(obj, values) if values else obj
    _write(obj, place, lambda: session is None or session.is_main_now())
    return place


def _place_for_all(session: Session, path: str | os.PathLike[str], *, writes: bool) -> str:
    """Return the absolute path of a file that is saved once for all workers.

    A relative path refers to the working directory of the first main worker. If this worker's directory has changed
    since training began, this worker's own path is returned, because later changes in other workers are not known. This
    worker's own path is also returned if this machine does not have the first main worker's directory.

    Args:
        session: the session of this worker.
        path: the path that the script gives.
        writes: True if this worker is to write the file. In this case, the path in the first main worker's directory is
            returned only if the folder of the file exists.
    """
    own, core = os.path.abspath(path), session.core
    there = core.started.directory if core.started is not None else None
    if os.path.isabs(path) or there is None or core.directory is None or core.directory.path != os.getcwd():
        return own
    place = os.path.abspath(os.path.join(there.path, path))
    known_here = has_directory(there) and (not writes or os.path.isdir(os.path.dirname(place)))
    return place if known_here else own


class SavedAt:
    """The paths of the file that the script of one worker has saved last.

    Attributes:
        path: the absolute path, which is the same for all workers if possible; "" if no file has been saved since the
            last barrier.
        own: the absolute path in this worker's own working directory; "" if no file has been saved since the last
            barrier.
        warned: True once a warning has said that paths differ.
    """

    def __init__(self) -> None:
        self.path = self.own = ""
        self.warned = False


saved_at = OfSession(lambda _: SavedAt())
"""Returns the paths of the file that the script of a session's worker has saved last."""


def path_numbers(session: Session) -> list[float]:
    """Return numbers whose sums over the workers tell whether all have named the same path. See `warn_of_paths`."""
    saved = saved_at(session)
    checksums = [
        1 + zlib.crc32(path.encode(errors="replace")) % 2**16 for path in (saved.path, saved.own) if path
    ]
    return [float(bool(saved.path)), *(float(n**power) for n in checksums or [0, 0] for power in (1, 2))]


NO_PATHS = (0.0,) * 5
"""The result of `path_numbers` if no file has been saved."""


def warn_of_paths(session: Session, sums: Sequence[float]) -> None:
    """Warn once, in the main worker, if the workers have named different paths in their last calls of `save`.

    Args:
        session: the session of this worker.
        sums: the sums of `path_numbers` over all workers.
    """
    saved = saved_at(session)
    path, saved.path, saved.own = saved.path, "", ""
    workers, *of_paths = map(int, sums)
    # The numbers of all workers are equal if their variance is zero.
    same, same_own = (workers * second == first**2 for first, second in (of_paths[:2], of_paths[2:]))
    if (same and same_own) or saved.warned:
        return
    saved.warned = True  # in all workers, so that a later main worker does not warn again
    if not path or session.main_worker != session.worker:
        return
    if same:
        text = (
            "the workers have different working directories. A relative path of paceline.save() refers to the "
            f"directory of the first main worker: {path}. Read the file from the path that paceline.save() returns."
        )
    else:
        text = (
            "the workers have given paceline.save() different paths, as if each had a folder of its own. The file is "
            f"only at the path of worker {session.worker}: {path}. Give all workers the same folder: with Hydra, "
            "for example, by hydra.run.dir=outputs/NAME on the command line."
        )
    session.exchange(lambda: [Send(COORDINATOR, Warned(text))])


def checkpoint() -> None:
    """Ask for a checkpoint of the whole job now, from which `paceline run --resume` can go on.

    Either every worker makes this call at the same place of its script, or a single worker makes it. The n-th calls of
    all workers are one request. Calls of workers that were lost, or were asked to leave, no longer count. The call does
    not wait: the checkpoint is written while training goes on, and has the state that the job has when its shards are
    cut (see docs/how-to/resume.md). A request that comes while a checkpoint is being written is carried out after that
    checkpoint. In a simulation, the job is cut, and the cut is in `SimResult.cuts`. Outside a run, the call does
    nothing.

    Raises:
        PeerLostError: the run has ended.

    Example:
        >>> import paceline
        >>> for epoch in paceline.epochs(2):
        ...     pass  # train
        ...     paceline.checkpoint()
    """
    session = current()
    if session is not None:
        session.request_checkpoint()


def with_joint_statistics(obj: Any) -> Any:
    """Return an object, such as a `state_dict()`, with the BatchNorm statistics of all workers together. See `save`."""
    training = training_of(current())
    values = _pooled_by_memory(training) if training is not None else {}
    return _replaced(obj, values) if values else obj


def _write(obj: object, path: str | os.PathLike[str], is_valid: Callable[[], bool]) -> None:
    """Write an object to a file, which is either complete or as it was before.

    Nothing is written if `is_valid` returns False after the object was saved: while this process was suspended, another
    worker may have become the main worker.
    """
    unfinished = Unfinished(Path(os.path.realpath(path)))
    try:
        with unfinished.place.open("xb") as file:
            torch.save(obj, file)
        unfinished.finish(is_valid)
    except BaseException as error:
        unfinished.discard()
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and not isinstance(error, pickle.PicklingError):
            raise UsageError(
                f"paceline.save() cannot write {os.fspath(path)!r}: {cause.strerror or cause}. Choose a file in an "
                "existing directory that you may write to, on a disk with enough space."
            ) from error
        raise


def _evaluated_by_memory(training: WorkerTraining, sets: Sequence[int]) -> dict[Key, torch.Tensor]:
    """For these parameter sets, return the weights for evaluation, keyed by the memory of this worker's own weights."""
    found = training.fetch_evaluated(sets)
    return {_key(own): found[i] for i, own in enumerate(training.parameters) if i in found and own.numel()}


def _has_optimizer(obj: Any) -> bool:
    """Return True if an object contains the `state_dict()` of an optimizer."""
    if isinstance(obj, dict):
        return "param_groups" in obj or any(map(_has_optimizer, obj.values()))
    return type(obj) in (list, tuple) and any(map(_has_optimizer, obj))


def _pooled_by_memory(training: WorkerTraining) -> dict[Key, torch.Tensor]:
    """Return the buffers that are pooled over the workers, keyed by the memory of this worker's own buffers."""
    pooled = training.pooled_buffers()
    if not pooled:
        return {}
    return {_key(own): pooled[name].to(own.device) for name, own in training.buffers().items() if own.numel()}


def _key(tensor: torch.Tensor) -> Key:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _copy_into(model: nn.Module, twin: nn.Module, values: Mapping[Key, torch.Tensor]) -> None:
    """Set tensors of `twin`, a copy of `model`, to other values.

    `values` maps the key of a tensor of `model` (see `_key`) to the value for the copy of this tensor in `twin`.
    """
    if not values:
        return
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, tensor in [*twin.named_buffers(), *twin.named_parameters()]:
            if (value := values.get(_key(own[name]))) is not None:
                tensor.copy_(value)


def _replaced(obj: Any, values: Mapping[Key, torch.Tensor]) -> Any:
    """Return an object in which tensors are replaced by other tensors. The original object is unchanged.

    `values` maps the key of a tensor (see `_key`) to the tensor that replaces it.
    """
    if isinstance(obj, torch.Tensor):
        return values.get(_key(obj), obj) if obj.layout == torch.strided else obj
    if isinstance(obj, nn.Module):
        if not any(_key(tensor) in values for tensor in [*obj.buffers(), *obj.parameters()]):
            return obj
        twin = copy.deepcopy(obj)
        _copy_into(obj, twin, values)
        return twin
    if isinstance(obj, dict):
        changed = {key: new for key, value in obj.items() if (new := _replaced(value, values)) is not value}
        if not changed:
            return obj
        new_dict = copy.copy(obj)
        new_dict.update(changed)
        return new_dict
    if type(obj) in (list, tuple):
        items = [_replaced(value, values) for value in obj]
        return obj if all(new is old for new, old in zip(items, obj, strict=True)) else type(obj)(items)
    return obj


# -- `is_main`: whether this worker writes files and messages for the whole run, and in which directory ------
#
# Another worker becomes the main worker when the earlier main worker is lost (see `core.members`). A script
# that asks several times in an epoch, for example before and after an evaluation, relies on getting the same
# answer. So the answer changes only when an epoch begins.
#
# The workers may have different working directories, on different machines. Relative paths of files refer to
# the directory of the first main worker, on machines that have this directory.


def is_main() -> bool:
    """Return True in the worker that writes files and messages for the whole run.

    This is worker 0 at first. If the main worker is lost, or leaves before its script has ended, the worker with the
    lowest index of those that take part becomes the main worker, and remains the main worker even if worker 0 joins
    again. In a loop over `epochs`, the result changes only when an epoch begins or the loop ends; outside of such a
    loop, only when a pass over a distributed loader begins. So do not store the result for use in later epochs. For a
    task that must not move to another worker, use `worker_index() == 0`. Outside a run, the result is True.

    Example:
        >>> import paceline
        >>> if paceline.is_main():
        ...     print("epoch 1")
        epoch 1
    """
    session = current()
    return session is None or _main.get(session, session.main_worker) == session.worker


def update_main(session: Session) -> None:
    """Set the result of `is_main` until the next call of `update_main`, from what this worker knows now."""
    _main[session] = session.main_worker


_main: WeakKeyDictionary[Session, int] = WeakKeyDictionary()


def working_directory() -> WorkingDirectory | None:
    """Return the working directory of this process; None if it has been removed, or if its path is not valid text.

    Example:
        >>> here = working_directory()
        >>> here is not None and has_directory(here)
        True
    """
    try:
        path = os.getcwd()
        path.encode()
        number = _number_of(path)
    except (OSError, UnicodeEncodeError):
        return None
    return WorkingDirectory(path, number) if len(path) <= LONGEST_PATH else None


def has_directory(directory: WorkingDirectory) -> bool:
    """Return True if this machine has a process's working directory, and not another directory with the same path."""
    try:
        return os.path.isabs(directory.path) and _number_of(directory.path) == directory.number
    except (OSError, ValueError):
        return False


def _number_of(path: str) -> int:
    return os.stat(path).st_ino & (2**62 - 1)
