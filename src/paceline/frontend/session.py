"""What the front end asks of whoever hosts a worker.

The front end (`DistributedOptimizer`, `distribute`) speaks to a `Session` and never learns where it runs: in a
process of a live run, or on a thread of a simulation. Without a session a script runs as one ordinary process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ..core.layout import ShardSlice
from ..core.model_spec import ModelSpec
from ..shard.store import Vectors
from ..sync import SyncModel
from ..sync.schedule import read_schedule

__all__ = ["Session", "current", "install", "set_sync"]


class Session(Protocol):
    """One worker's part in a run.

    The order of calls: `begin`, then `publish` on the publisher and `await_first_weights` on the others, then
    `hold_back` and `commit` once per iteration, then `finish`. `weights` change only inside these calls and
    `pull_again`, and `finish` may move them; `gradients` are the caller's until `commit`, and again once it has
    returned.

    Attributes:
        worker: this worker's index.
        workers: how many there are.
        seed: the run's.
        needs_significance: True if pushes are to carry |g| / |w|. May change from one iteration to the next.
        may_restart: True if a computation may be dropped and started anew. Likewise.
        skips_nan: True if a gradient with NaN or inf is to be left out instead of stopping the run.
        iteration: the number of iterations that this worker has committed.
        weights: dtype -> flat vector, from `begin` on.
        gradients: dtype -> flat vector, likewise.
        on_moved: called when `weights` has become other memory, which holds the weights from now on.
        sends_early: True if the session is to be told of gradients as they come, by `gradient_ready`.
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
        """Say what is to be trained; wait for the others. True if this worker is the publisher.

        Raises:
            ConfigurationError: this worker may not take part.
        """
        ...

    def publish(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        """Make `weights`, as they are now, everybody's; `state_of` gives the optimizer state to start from."""
        ...

    def await_first_weights(self) -> None:
        """Wait until `weights` holds the publisher's."""
        ...

    def weights_edited(self) -> bool:
        """True if it is known that somebody else has written into `weights` since they were pulled."""
        ...

    def gradient_ready(self, parameter: int) -> None:
        """The gradient of a parameter of the layout lies in `gradients`; it may still change until `commit`."""
        ...

    def restart_ordered(self) -> bool:
        """True if the computation at hand is to be dropped. Cheap: asked between any two layers."""
        ...

    def hold_back(self, *, droppable: bool) -> bool:
        """The gradient is ready; where a slower machine is emulated, let time pass, here or in `commit`. False if the
        computation is to be dropped instead: never if it is not droppable, as nobody would start it anew."""
        ...

    def pull_again(self) -> None:
        """Pull, after the computation of this iteration was dropped."""
        ...

    def epoch_begins(self, epoch: int) -> None:
        """This worker begins a pass over its part of the data, counted from 0."""
        ...

    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        """Ask for a change of the sync model. See `set_sync`."""
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
        """Push `gradients` to every shard and pull; when it returns, `weights` holds the answers.

        Args:
            present: for each parameter, 1 if it had a gradient.
            groups: msgpack of the groups' hyper-parameters.
            empty: leave the gradient out; the iteration counts as progress.
            significance: |g| / |w|, L2, the raw gradient over the weights it was computed on; if it is needed.
            buffers: index -> those buffers that have changed.
            loss: for the eyes of the user.
        """
        ...

    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        """Each shard with its optimizer state, "<segment>/<key>" -> tensor."""
        ...

    def finish(self) -> None:
        """Leave: this worker blocks nobody from now on."""
        ...


_of_process: Session | None = None
_of_thread = threading.local()


def current() -> Session | None:
    """The session of this thread, else of this process; None in a script that runs by itself."""
    session: Session | None = getattr(_of_thread, "session", None)
    return session or _of_process


def install(session: Session | None, *, for_thread: bool = False) -> None:
    """Set the session of this process, or of this thread only."""
    global _of_process
    if for_thread:
        _of_thread.session = session
    else:
        _of_process = session


def set_sync(sync: str | SyncModel | Sequence[SyncModel], *, shard: int | None = None) -> None:
    """Change the sync model of the run, from here on.

    All workers run the same script, so each may call this where it gets to, or one of them alone: the n-th call of
    any worker is the same change, made when the first one comes to it. Each worker ends the old model with its next
    push; the new one begins when all have. No push is lost. In a script that runs by itself, nothing happens.

    Args:
        sync: a model, its notation ("ssp:staleness=3"), or a list of one for each shard.
        shard: change this shard alone, from 0.

    Raises:
        ConfigurationError: no such model, or the run cannot have it.

    Example:
        >>> set_sync("elastic-bsp:lookahead=15")
    """
    read_schedule(sync)
    session = current()
    if session is not None:
        session.request_sync(sync, shard)
