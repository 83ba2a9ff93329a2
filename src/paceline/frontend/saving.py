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
from .newcomer import hold_job_model
from .of_session import OfSession
from .session import Session, current
from .training import WorkerTraining, training_of

__all__ = ["checkpoint", "path_numbers", "pool_buffers", "save", "warn_of_paths"]

log = logging.getLogger("paceline.frontend.saving")

Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """Write an object to a file once, in the main worker, as `torch.save` does. In other workers, do nothing.

    The main worker is worker 0 until it is lost (see `is_main`). This call asks which worker it is now. So another
    worker writes as soon as it has become the main worker, and a worker that has been taken out of the run writes
    nothing. The file appears under its name only when it is complete, so a process that reads it meanwhile finds
    either the earlier file or the new one. The other workers do not wait: a worker that reads the file calls
    `barrier()` first, as all workers must.

    Under data parallelism, each worker has its own BatchNorm statistics. Where `obj` contains such buffers of the
    trained model, the file contains the statistics of all workers together, as in the weights that the run saves. The
    buffers are recognized in a module and in nested dictionaries, lists and tuples (but not in named tuples), by the
    memory that they share with the model, as in `model.state_dict()`; a copy, such as
    `copy.deepcopy(model.state_dict())`, is saved as it is.

    Args:
        obj: the object, for example `model.state_dict()`.
        path: name of the file. Its directory must exist. The path is that of the main worker: if each worker has a
            working directory of its own, as Hydra may give it, the file is only in that of the main worker. A
            `barrier()` after the call notices this, and a warning names the file.

    Raises:
        UsageError: the file cannot be written. An earlier file of this name is unchanged.
        PeerLostError: the run has ended.

    Example:
        >>> import paceline, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paceline.save(model.state_dict(), f"{folder}/model.pt")
        ...     paceline.barrier()  # before other workers read the file
        ...     model.load_state_dict(torch.load(f"{folder}/model.pt"))
        <All keys matched successfully>
    """
    session = current()
    place = os.path.abspath(path)
    if session is not None:
        saved_at(session).path = place
        if not session.is_main_now():
            return
    training = training_of(session) if session is not None else None
    if training is None:
        hold_job_model(session)
    elif pooled := _pooled_by_memory(training):
        obj = _replaced(obj, pooled)
    _write(obj, place, lambda: session is None or session.is_main_now())


class SavedAt:
    """Where the script of one worker has wanted its last file to be saved.

    Attributes:
        path: the absolute path; "" if no file has been saved since the last barrier.
    """

    def __init__(self) -> None:
        self.path = ""
        self.warned = False


saved_at = OfSession(lambda _: SavedAt())
"""Returns where the script of a session's worker has saved its last file."""


def path_numbers(session: Session) -> list[float]:
    """Return numbers whose sums over the workers tell whether all have named the same path. See `warn_of_paths`."""
    path = saved_at(session).path
    number = 1 + zlib.crc32(path.encode(errors="replace")) % 2**16 if path else 0
    return [float(bool(path)), float(number), float(number**2)]


def warn_of_paths(session: Session, sums: Sequence[float]) -> None:
    """Warn once, in the main worker, if the workers have named different paths in their last calls of `save`.

    Args:
        session: the session of this worker.
        sums: the sums of `path_numbers` over all workers.
    """
    saved = saved_at(session)
    path, saved.path = saved.path, ""
    workers, first, second = map(int, sums)
    # Equal numbers are those whose variance is zero.
    if workers * second == first**2 or saved.warned or not path or session.main_worker != session.worker:
        return
    saved.warned = True
    text = (
        f"the workers have given paceline.save() different paths, as if each had a working directory of its own. The "
        f"file is only at the path of worker {session.worker}: {path}. Give all workers the same directory, with "
        "Hydra for example by hydra.run.dir=outputs/NAME on the command line."
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
