"""The interface through which a training script takes part in a run.

The front end (`DistributedOptimizer`, `distribute`) uses a `Session` and does not depend on where the script runs: in
a process of a live run, or on a thread of a simulation. Without a session, a script runs as one ordinary process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ..core.layout import ShardSlice
from ..core.model_spec import ModelSpec
from ..shard.vectors import Vectors
from ..sync import SyncModel
from ..sync.schedule import read_schedule

__all__ = ["Session", "current", "install", "set_sync", "worker_count", "worker_index"]


class Session(Protocol):
    """The interface through which one worker takes part in a run.

    Methods are called in this order: `begin`, then `initialize` on the initializer and `await_first_weights` on the
    other workers, then `hold_back` and `commit` once per iteration, then `finish`. The weights change only inside
    these calls and `pull_again`, and `finish` may move them to other memory. The caller may change `gradients` at any
    time except during `commit`.

    Attributes:
        worker: index of this worker.
        workers: number of workers.
        seed: the run's seed.
        needs_significance: True if pushes must include |g| / |w|, see `commit`. May change between iterations.
        may_restart: True if a computation may be aborted and restarted. May change between iterations.
        skips_nan: True if a gradient with NaN or inf is not pushed, False if it stops the run.
        iteration: number of iterations that this worker has committed.
        weights: dtype -> flat vector of the weights. Filled by `begin`.
        gradients: dtype -> flat vector of the gradients. Filled by `begin`.
        on_moved: function that the session calls after it has replaced `weights` by vectors in other memory.
        sends_early: True if `gradient_ready` must be called for each gradient as soon as it is computed.
    """

    worker: int
    workers: int
    seed: int
    skips_nan: bool
    weights: Vectors
    gradients: Vectors
    on_moved: Callable[[], None]

    @property
    def sends_early(self) -> bool: ...

    @property
    def iteration(self) -> int: ...

    @property
    def needs_significance(self) -> bool: ...

    @property
    def may_restart(self) -> bool: ...

    def begin(self, model: ModelSpec) -> bool:
        """Register the model to train and wait for the other workers. Return True if this worker is the initializer.

        Raises:
            ConfigurationError: this worker may not take part in the run.
        """
        ...

    def initialize(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        """Send the initial model, from which all workers start, to the servers.

        Only the initializer calls this method. The initial weights are taken from `weights`.

        Args:
            buffers: the tensors that no optimizer trains.
            state_of: returns a shard's part of the initial optimizer state.
        """
        ...

    def await_first_weights(self) -> None:
        """Wait until `weights` holds the weights of the initializer."""
        ...

    def weights_edited(self) -> bool:
        """Return True if the script is known to have written to `weights` since the last pull."""
        ...

    def gradient_ready(self, parameter: int) -> None:
        """Announce that a parameter's gradient is in `gradients`. The gradient may still change until `commit`."""
        ...

    def restart_ordered(self) -> bool:
        """Return True if the current computation must be aborted. This is called between any two layers."""
        ...

    def hold_back(self, *, droppable: bool) -> bool:
        """Announce that all gradients are computed.

        If a slower machine is emulated, the additional time passes here or in `commit`.

        Args:
            droppable: True if the computation can still be aborted and restarted.

        Returns:
            False if the computation must be aborted; always True if `droppable` is False.
        """
        ...

    def pull_again(self) -> None:
        """Pull the weights again, after the computation of this iteration was aborted."""
        ...

    def epoch_begins(self, epoch: int) -> None:
        """Announce that this worker begins a pass over its part of the data. Epochs are counted from 0."""
        ...

    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        """Request a change of the sync model. See `set_sync`."""
        ...

    def commit(
        self,
        present: bytes,
        groups: bytes,
        *,
        empty: bool,
        significance: float | None,
        buffers: Mapping[int, torch.Tensor],
        loss: float | None,
    ) -> None:
        """Push `gradients` to every shard and pull the new weights. On return, `weights` holds the new weights.

        Args:
            present: one byte per parameter: 1 if it has a gradient, 0 if not.
            groups: hyper-parameters of the groups, encoded with msgpack.
            empty: True to leave out the gradient. The iteration still counts as progress.
            significance: |g| / |w|, with the L2 norms of the unscaled gradient and of the weights on which it was
                computed; None if it is not needed.
            buffers: index -> buffer, for the buffers that have changed.
            loss: the loss to show and record, if known.
        """
        ...

    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        """Return each shard with its optimizer state, "<segment>/<key>" -> tensor."""
        ...

    def finish(self) -> None:
        """Leave the run. From now on, no worker waits for this worker."""
        ...


_of_process: Session | None = None
_of_thread = threading.local()


def current() -> Session | None:
    """Return the session of this thread, or else of this process; None in a script that runs by itself."""
    session: Session | None = getattr(_of_thread, "session", None)
    return session or _of_process


def install(session: Session | None, *, for_thread: bool = False) -> None:
    """Set the session of this process; if `for_thread` is True, only the session of this thread."""
    global _of_process
    if for_thread:
        _of_thread.session = session
    else:
        _of_process = session


def worker_index() -> int:
    """Return the index of the worker that runs this script, counted from 0.

    In a script that was not started by Paceline, the index is 0.

    Example:
        >>> import paceline
        >>> if paceline.worker_index() == 0:
        ...     print("saving a checkpoint")
        saving a checkpoint
    """
    session = current()
    return 0 if session is None else session.worker


def worker_count() -> int:
    """Return the number of workers in the run.

    In a script that runs by itself, the number is 1.

    Example:
        >>> import paceline
        >>> files = ["a.txt", "b.txt", "c.txt"]
        >>> files[paceline.worker_index() :: paceline.worker_count()]
        ['a.txt', 'b.txt', 'c.txt']
    """
    session = current()
    return 1 if session is None else session.workers


def set_sync(sync: str | SyncModel | Sequence[SyncModel], *, shard: int | None = None) -> None:
    """Change the synchronization model during a run.

    Either every worker or a single worker may call this function. The n-th calls of all workers request the same
    change, and the first of these calls starts it. The next push of each worker is its last push
    under the old model. The new model begins when all workers have made this push, and no push is lost. In a script
    that runs by itself, the call has no effect.

    Args:
        sync: a sync model, its notation (for example "ssp:staleness=3"), or a list with one model per shard.
        shard: index of the only shard to change. Default: None, which changes all shards.

    Raises:
        ConfigurationError: the notation is invalid, or the model cannot be used in this run.

    Example:
        >>> import paceline
        >>> paceline.set_sync("elastic-bsp:lookahead=15")
    """
    read_schedule(sync)
    session = current()
    if session is not None:
        session.request_sync(sync, shard)
