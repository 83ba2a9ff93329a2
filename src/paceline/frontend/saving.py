"""`save`, which writes a file once for all workers, and the statistics of all workers in what is saved."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.protocol.messages import Warned
from ..core.protocol.requests import COORDINATOR, Send
from ..errors import UsageError
from ..files import Unfinished
from .is_main import has_directory
from .newcomer import hold_job_model
from .of_session import OfSession
from .session import Session, current
from .training import WorkerTraining, training_of

__all__ = ["NO_PATHS", "checkpoint", "path_numbers", "pool_buffers", "save", "warn_of_paths"]

log = logging.getLogger("paceline.frontend.saving")

Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def save(obj: object, path: str | os.PathLike[str]) -> str:
    """Write an object to a file once, in the main worker, as `torch.save` does. Return the absolute path of the file.

    The main worker is worker 0 until it is lost (see `is_main`). This call asks which worker it is now. So another
    worker writes as soon as it has become the main worker. The other workers write nothing, nor does a worker that
    has been taken out of the run. The file appears under its name only when it is complete, so a process that reads
    it meanwhile finds either the earlier file or the new one. The other workers do not wait: a worker that reads the
    file calls `barrier()` first, as all workers must.

    Under data parallelism, each worker has its own BatchNorm statistics. Where `obj` contains such buffers of the
    trained model, the file contains the statistics of all workers together, as in the weights that the run saves. The
    buffers are recognized in a module and in nested dictionaries, lists and tuples (but not in named tuples), by the
    memory that they share with the model, as in `model.state_dict()`; a copy, such as
    `copy.deepcopy(model.state_dict())`, is saved as it is.

    Args:
        obj: the object, for example `model.state_dict()`.
        path: name of the file. Its directory must exist. If each worker has a working directory of its own, as Hydra
            may give it, a relative path is meant in that of the first main worker: the directory in which its process
            was when training began. A script that changes the directory later must do so in all workers alike.

    Returns:
        The absolute path of the file, the same in all workers, from which they read it. The paths differ if the
        workers give different absolute paths, and if they have different working directories before training begins
        or on machines without common folders. A `barrier()` after the call notices this, and a warning names the
        file.

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
    training = training_of(session) if session is not None else None
    if training is None:
        hold_job_model(session)
    elif pooled := _pooled_by_memory(training):
        obj = _replaced(obj, pooled)
    _write(obj, place, lambda: session is None or session.is_main_now())
    return place


def _place_for_all(session: Session, path: str | os.PathLike[str], *, writes: bool) -> str:
    """Return the absolute path of a file that is saved once for all workers.

    A relative path is meant in the working directory of the first main worker. Two working directories only stand for
    each other if both are those with which training has begun: nothing is known of later changes in other workers. If
    this machine does not have the directory, this worker's own path is returned.

    Args:
        session: the session of this worker.
        path: the path that the script gives.
        writes: True if this worker is to write the file. Its folder must then exist.
    """
    own, core = os.path.abspath(path), session.core
    there = core.started.directory if core.started is not None else None
    if os.path.isabs(path) or there is None or core.directory is None or core.directory.path != os.getcwd():
        return own
    place = os.path.abspath(os.path.join(there.path, path))
    known_here = has_directory(there) and (not writes or os.path.isdir(os.path.dirname(place)))
    return place if known_here else own


class SavedAt:
    """Where the script of one worker has wanted its last file to be saved.

    Attributes:
        path: the absolute path, which is the same for all workers if possible; "" if no file has been saved since the
            last barrier.
        own: the absolute path in this worker's own working directory; "" likewise.
        warned: True once a warning has said that paths differ.
    """

    def __init__(self) -> None:
        self.path = self.own = ""
        self.warned = False


saved_at = OfSession(lambda _: SavedAt())
"""Returns where the script of a session's worker has saved its last file."""


def path_numbers(session: Session) -> list[float]:
    """Return numbers whose sums over the workers tell whether all have named the same path. See `warn_of_paths`."""
    saved = saved_at(session)
    numbers = [
        1 + zlib.crc32(path.encode(errors="replace")) % 2**16 for path in (saved.path, saved.own) if path
    ]
    return [float(bool(saved.path)), *(float(n**power) for n in numbers or [0, 0] for power in (1, 2))]


NO_PATHS = (0.0,) * 5
"""What `path_numbers` returns if no file has been saved."""


def warn_of_paths(session: Session, sums: Sequence[float]) -> None:
    """Warn once, in the main worker, if the workers have named different paths in their last calls of `save`.

    Args:
        session: the session of this worker.
        sums: the sums of `path_numbers` over all workers.
    """
    saved = saved_at(session)
    path, saved.path, saved.own = saved.path, "", ""
    workers, *of_paths = map(int, sums)
    # Equal numbers are those whose variance is zero.
    same, same_own = (workers * second == first**2 for first, second in (of_paths[:2], of_paths[2:]))
    if (same and same_own) or saved.warned:
        return
    saved.warned = True  # in all workers, so that a later main worker does not say it again
    if not path or session.main_worker != session.worker:
        return
    if same:
        text = (
            "the workers have different working directories. What paceline.save() writes by a relative path is in "
            f"that of the first main worker: {path}. A worker reads it from the path that paceline.save() returns."
        )
    else:
        text = (
            "the workers have given paceline.save() different paths, as if each had a folder of its own. The file is "
            f"only at the path of worker {session.worker}: {path}. Give all workers the same folder, with Hydra for "
            "example by hydra.run.dir=outputs/NAME on the command line."
        )
    log.warning("%s", text)
    session.exchange(lambda: [Send(COORDINATOR, Warned(text))])


def checkpoint() -> None:
    """Ask for a checkpoint of the whole job now, from which `paceline run --resume` can go on.

    Every worker makes this call at the same place of its script; the n-th calls of all workers are one request. The
    call does not wait: the checkpoint is made beside training, with what the job has when its shards are cut (see
    docs/resuming.md). A request that comes while a checkpoint is being written is carried out after it. In a
    simulation, the job is cut, and the cut is in `SimResult.cuts`. Outside a run, the call does nothing.

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


def _write(obj: object, path: str | os.PathLike[str], is_valid: Callable[[], bool]) -> None:
    """Write an object to a file, which is either complete or as it was before.

    Nothing is written if the object is not valid in the end: this process may have been suspended meanwhile.
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


def pool_buffers(training: WorkerTraining, model: nn.Module, twin: nn.Module) -> None:
    """Set the buffers of `twin`, a copy of `model`, to the statistics of all workers together."""
    if pooled := _pooled_by_memory(training):
        _pool_into(model, twin, pooled)


def _pooled_by_memory(training: WorkerTraining) -> dict[Key, torch.Tensor]:
    """Return the buffers that are pooled over the workers, by the memory of this worker's own buffers."""
    pooled = training.pooled_buffers()
    if not pooled:
        return {}
    return {_key(own): pooled[name].to(own.device) for name, own in training.buffers().items() if own.numel()}


def _key(tensor: torch.Tensor) -> Key:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _pool_into(model: nn.Module, twin: nn.Module, pooled: Mapping[Key, torch.Tensor]) -> None:
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, tensor in [*twin.named_buffers(), *twin.named_parameters()]:
            if (value := pooled.get(_key(own[name]))) is not None:
                tensor.copy_(value)


def _replaced(obj: Any, pooled: Mapping[Key, torch.Tensor]) -> Any:
    """Return the object with the pooled values of the buffers in it. The object itself is not changed."""
    if isinstance(obj, torch.Tensor):
        return pooled.get(_key(obj), obj) if obj.layout == torch.strided else obj
    if isinstance(obj, nn.Module):
        if not any(_key(buffer) in pooled for buffer in obj.buffers()):
            return obj
        twin = copy.deepcopy(obj)
        _pool_into(obj, twin, pooled)
        return twin
    if isinstance(obj, dict):
        changed = {key: new for key, value in obj.items() if (new := _replaced(value, pooled)) is not value}
        if not changed:
            return obj
        new_dict = copy.copy(obj)
        new_dict.update(changed)
        return new_dict
    if type(obj) in (list, tuple):
        items = [_replaced(value, pooled) for value in obj]
        return obj if all(new is old for new, old in zip(items, obj, strict=True)) else type(obj)(items)
    return obj
