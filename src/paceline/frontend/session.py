"""The interface through which a training script takes part in a run.

The front end (`DistributedOptimizer`, `distribute`) depends only on a `Session`, so it works in the same way in a
process of a live run and on a thread of a simulation. Without a session, a script runs as one ordinary process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.metrics.time_spent import Stopwatch
from ..core.metrics.unsent_metrics import Noted, Settled
from ..core.protocol.layout import ShardSlice
from ..core.protocol.lease import BatchSizing, Split
from ..core.protocol.messages import Combined, LoopPosition, Observation
from ..core.protocol.model_spec import BufferSpec, FrozenSpec, ModelSpec
from ..core.protocol.requests import Request
from ..core.worker import Worker
from ..errors import ConfigurationError
from ..shard.vectors import Vectors
from ..sync import SyncModel
from ..sync.events import Clip
from ..sync.schedule import read_schedule

__all__ = [
    "Callbacks",
    "Servers",
    "Session",
    "Step",
    "current",
    "install",
    "set_sync",
    "worker_count",
    "worker_index",
]


class Step(NamedTuple):
    """What a step of the optimizer pushes besides the gradients.

    Attributes:
        present: one byte per parameter: 1 if the parameter has a gradient, else 0.
        groups: hyper-parameters of the optimizer's parameter groups, encoded with msgpack.
        empty: True to push without a gradient. The iteration still counts as progress.
        significance: |g| / |w|: the L2 norm of the unscaled gradient divided by the L2 norm of the weights at which
            it was computed; None if it is not needed.
        buffers: index -> buffer, for the buffers that have changed since the last push.
        logged: what the script has logged since the last push.
        clip: set if the script clips the gradient that is applied.
        clipped: True if the script has clipped this worker's own gradient.
        set_index: the parameter set that is pushed and pulled; None for all sets.
        observed: what was seen of the push, for the guard of the run.
    """

    present: bytes
    groups: bytes
    empty: bool
    significance: float | None
    buffers: Mapping[int, torch.Tensor]
    logged: Settled
    clip: Clip | None
    clipped: bool
    set_index: int | None
    observed: Observation | None


@dataclass(slots=True)
class Callbacks:
    """What a session calls in the front end, which sets these functions.

    Attributes:
        before_exchange: called before the session sends `gradients`, or requests new `weights`. Afterwards, nothing
            else uses this memory until the answer.
        on_arrived: called during `commit` when a part of the new `weights` has arrived, with the name of the vector
            and the range of its elements; None for nothing. The range begins where the part that a shard sends
            begins, and grows. The session changes these elements only after the next `before_exchange`.
        frozen: returns the bytes of this worker's frozen parameter with a digest, in parts; None if there is none.
            Set before `begin`, and before `extend`.
        on_moved: called after the session has moved `weights` to other memory.
        state: returns what the script holds (see `worker_state`). Its argument is True if the script has ended.
            Called while the script waits in a call of all workers, at the beginning of `idle`, and in `finish`.
        on_finish: called when the script ends. Returns a warning, or "".
    """

    before_exchange: Callable[[], object] = lambda: None
    on_arrived: Callable[[str, int, int], object] | None = None
    frozen: Callable[[str], Iterable[memoryview] | None] = lambda digest: None
    on_moved: Callable[[], object] = lambda: None
    state: Callable[[bool], Sequence[memoryview]] | None = None
    on_finish: Callable[[], str] = str


class Servers(ABC):
    """What a worker requests from the servers besides pushes and pulls."""

    @abstractmethod
    def fetch_model(self, digest: Callable[[FrozenSpec], str]) -> Mapping[str, torch.Tensor] | None:
        """Return the job's weights, and its buffers pooled over the workers, by their names in the `state_dict`.

        A worker that joins a run in progress may call this before `begin`. It takes no part in the run until then, so
        no other worker waits for it.

        Args:
            digest: function that returns the digest of this worker's value of a frozen parameter; "" if it has none.
                The job's values are included where they differ.

        Returns:
            None if the run is only beginning, so that there is no model to read.
        """

    @abstractmethod
    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        """Return each shard with its optimizer state, which maps "<segment>/<key>" to a tensor.

        May be called before `begin`, like `fetch_model`. The result is then empty if the run is only beginning.
        """

    @abstractmethod
    def fetch_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the model's buffers, pooled over the workers, by their names in the `state_dict`."""

    @abstractmethod
    def fetch_initial_buffers(
        self, specs: Sequence[BufferSpec], own: Sequence[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return the initializer's values of the buffers that were added last, by their names in the `state_dict`.

        In a worker that has just joined a run in progress, these are all buffers, pooled over the other workers.

        Args:
            specs: these buffers.
            own: this worker's own values of these buffers. If they are equal, the result may be {}.
        """

    @abstractmethod
    def fetch_frozen(self, specs: Sequence[FrozenSpec]) -> Mapping[str, torch.Tensor]:
        """Return the run's values of those of these frozen parameters whose own digests are others, by name.

        Raises:
            ConfigurationError: no worker of the run has these values any more.
        """

    @abstractmethod
    def keep_states(self, position: LoopPosition, states: Sequence[memoryview]) -> None:
        """Send the states of tracked objects, taken at this position, to the server of shard 0.

        Their memory may change after this call.
        """

    @abstractmethod
    def fetch_states(self, address: str) -> tuple[LoopPosition, bytes | bytearray] | None:
        """Return the states that were kept last, with their position; None if there are none.

        Args:
            address: the address of the server of shard 0. The session need not be connected to it yet.
        """

    @abstractmethod
    def keep_worker_state(self, state: Sequence[memoryview]) -> None:
        """Send what the script of this worker holds to the coordinator, for the cut for which it is wanted.

        Its memory may change after this call.

        Args:
            state: the bytes of the state. See `worker_state`.
        """

    @abstractmethod
    def fetch_worker_states(self) -> tuple[bytes | bytearray | None, bytes | bytearray | None]:
        """Return what scripts held at the cut with which the run has begun, for a worker of a resumed run.

        May be called before `begin`, like `fetch_model`.

        Returns:
            The state of the worker with this index, and that of the lowest index; None for what is not known. The
            former is None as well if this index has been used in this run before.
        """


class Session(ABC):
    """The interface through which one worker takes part in a run.

    The order of the calls is: `fetch_model` and `fetch_state`, if needed; `begin`; then `initialize` if this worker
    is the initializer, otherwise `await_first_weights`; then `hold_back` and `commit` once per iteration; then
    `finish`. From `begin` on, only these methods and `pull_again`, `refresh`, `sit_out`, `idle`, `combine` and
    `extend` change the weights, and `finish` may move the weights to other memory. The caller may change
    `gradients` at any time except during `commit`.

    Attributes:
        worker: index of this worker.
        workers: number of workers.
        split: how an epoch is divided among the workers by default.
        batch: "equal" if all workers have batches of the same size by default, "balanced" if their sizes follow the
            workers' speeds.
        joint_batch: True if the batch size of a loader is by default that of the joint batch of all workers.
        seed: the run's seed.
        device: the device that is assigned to this worker; the CPU if none is.
        skips_nan: True if gradients with NaN or inf are not pushed, False if such gradients stop the run.
        resumed: number of the cut with which the run has begun; 0 if it is not resumed.
        core: the protocol of this worker. The front end reads what the worker knows of the run, which changes between
            iterations, and uses its data feed. It calls no method that returns requests, except in `exchange`.
        servers: what the worker requests from the servers besides pushes and pulls.
        weights: dtype -> flat vector of the weights. Filled by `begin`.
        gradients: dtype -> flat vector of the gradients. Filled by `begin`.
        callbacks: what the session calls in the front end.
    """

    servers: Servers

    def __init__(
        self,
        core: Worker,
        *,
        worker: int,
        workers: int,
        split: Split,
        batch: BatchSizing,
        joint_batch: bool,
        seed: int,
        device: str,
        skips_nan: bool,
        resumed: int = 0,
    ) -> None:
        self.core = core
        self.worker = worker
        self.workers = workers
        self.split = split
        self.batch = batch
        self.joint_batch = joint_batch
        self.seed = seed
        self.device = torch.device(device)
        self.skips_nan = skips_nan
        self.resumed = resumed
        self.weights: Vectors = {}
        self.gradients: Vectors = {}
        self.callbacks = Callbacks()

    @property
    @abstractmethod
    def now_s(self) -> float:
        """The current time in seconds, on the clock of the run."""

    @property
    @abstractmethod
    def observes(self) -> bool:
        """True if `commit` should be told what was seen of the push. May change between iterations."""

    @property
    @abstractmethod
    def rounds_weights(self) -> bool:
        """True if weights may be rounded on their way to this worker, and so differ from those of the servers.

        The weights that `refresh` pulls are not rounded.
        """

    @property
    def main_worker(self) -> int:
        """Index of the main worker, as far as this worker has been told; -1 for nobody."""
        return self.core.main_worker

    @property
    def cut(self) -> int:
        """Number of the cut for which the state of this worker is wanted; 0 for none. See `Worker.cut`."""
        return self.core.cut

    @property
    def sends_early(self) -> bool:
        """True if `gradient_ready` must be called for each gradient as soon as it is computed."""
        return False

    @abstractmethod
    def is_main_now(self) -> bool:
        """Ask the coordinator, and return True if this worker is the main worker now."""

    @abstractmethod
    def begin(self, model: ModelSpec) -> bool:
        """Register the model, then wait for the other workers. Return True if this worker is the initializer.

        Raises:
            ConfigurationError: this worker may not take part in the run.
        """

    @abstractmethod
    def initialize(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        """Send the initial model, from which all workers start, to the servers.

        Only the initializer calls this method. The initial weights are taken from `weights`.

        Args:
            buffers: the values of the model's buffers.
            state_of: function that returns a shard's part of the initial optimizer state.
        """

    @abstractmethod
    def await_first_weights(self) -> None:
        """Wait until `weights` holds the initializer's weights."""

    @abstractmethod
    def extend(
        self,
        model: ModelSpec,
        weights: Vectors,
        buffers: Sequence[torch.Tensor],
        state_of: Callable[[ShardSlice], Vectors],
    ) -> str:
        """Extend the model by parameters that the script has added, together with all other workers.

        Wait until all live workers have made this call. Then replace `weights` and `gradients` by vectors of the
        extended layout; the weights are the newest ones of all parameters, the gradients are zero. Meanwhile, the
        worker may push without a gradient, as in `combine`.

        Args:
            model: the extended model.
            weights: name -> flat vector with the initial weights of the new parameters. Those of one worker are used.
            buffers: the values of the buffers that the model did not have before.
            state_of: function that returns a shard's part of the new parameters' initial optimizer state.

        Returns:
            "", or the reason why the model was not extended: the workers' calls differ.
        """

    def weights_edited(self) -> bool | None:
        """Return True if the script has changed `weights` since the last pull, None if this is not known."""
        return None

    def restore_weights(self) -> bool:
        """Undo all changes by the script to `weights` since the last pull. Return False if this is not possible."""
        return False

    def gradient_ready(self, parameter: int) -> None:
        """Tell the session that `gradients` contains a parameter's gradient, which may change until `commit`."""
        raise NotImplementedError  # only a session that sends early needs it

    def pushes_rows(self, parameter: int) -> bool:
        """Tell the session that a parameter's gradients are sparse. Return True if only their rows are pushed."""
        return False

    @abstractmethod
    def restart_ordered(self) -> bool:
        """Return True if the current computation must be aborted. Called repeatedly during a computation."""

    @abstractmethod
    def hold_back(self, *, droppable: bool) -> bool:
        """Tell the session that all gradients are computed.

        If the worker emulates a slower machine, the additional time passes in this method or in `commit`.

        Args:
            droppable: True if the computation can still be aborted and restarted.

        Returns:
            False if the computation must be aborted; always True if `droppable` is False.
        """

    @abstractmethod
    def pull_again(self) -> None:
        """Pull the weights again after the computation of this iteration was aborted."""

    @abstractmethod
    def refresh(self) -> None:
        """Pull the current weights between two iterations, without a push. This does not wait for other workers."""

    @abstractmethod
    def sit_out(self) -> None:
        """Push without a gradient and pull, because this worker has no part in a joint batch of the others."""

    @abstractmethod
    def idle(self) -> AbstractContextManager[None]:
        """Return a context in which the script does not train, and in which no other worker waits for this one.

        The weights may change at any time in this context. Only the methods for data and `fetch_state` may be called.
        If the run fails meanwhile, the error is raised at the end of the context.
        """

    @abstractmethod
    def begin_edit(self) -> bool:
        """Pull the newest weights for an edit by the script. Return True if this worker's edit is the one to push."""

    @abstractmethod
    def push_edit(self, present: bytes, *, buffers: Mapping[int, torch.Tensor]) -> None:
        """End the iteration with the script's edit, and pull the new weights.

        If this worker's edit is the one to push, `gradients` contains the new values of the edited parameters.

        Args:
            present: one byte per parameter: 1 if the parameter was edited, else 0.
            buffers: index -> buffer, for the buffers that have changed since the last push.
        """

    @abstractmethod
    def exchange(self, ask: Callable[[], Sequence[Request]]) -> None:
        """Send requests to the coordinator, and wait until the data feed has no unanswered request.

        Args:
            ask: function that returns the requests. While it is called, no other thread uses the connections, so all
                requests that the feed considers unanswered have been sent.
        """

    def watched(self) -> tuple[Stopwatch, int] | None:
        """Return the stopwatch of this worker, and the current time in ticks.

        None if the time of what this thread does now is not measured, or is outside of training in any case.
        """
        return None

    def epoch_begins(self, epoch: int) -> None:
        """Tell the session that this worker begins a pass over its part of the data. Epochs are counted from 0."""
        self.core.reach_epoch(epoch)

    @abstractmethod
    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        """Request a change of the sync model. See `set_sync`."""

    @abstractmethod
    def request_checkpoint(self) -> None:
        """Ask for a checkpoint of the job, and do not wait for it. See `paceline.checkpoint`."""

    @abstractmethod
    def commit(self, step: Step) -> None:
        """Push `gradients` to every shard and pull the new weights. On return, `weights` holds the new weights."""

    @abstractmethod
    def observe(self, observed: Observation, noted: Sequence[Noted] = ()) -> None:
        """Report at once what was seen of a push, and what the script has logged if no other push follows."""

    @abstractmethod
    def combine(
        self, call: str, op: Literal["mean", "sum"] = "sum", numbers: bytes = b"", weight: float = 1.0
    ) -> Combined:
        """Wait until all other workers have made the same call, and return its result.

        If this worker is in training and the sync model does not keep all workers in lockstep, it may push without a
        gradient and pull meanwhile, because other workers may wait for it.

        Args:
            call: the call and the structure of its argument, in words; the same in all workers.
            op: how the numbers are combined.
            numbers: the numbers to combine, as native float64.
            weight: the weight of the numbers in a mean.
        """

    @abstractmethod
    def finish(self) -> None:
        """Leave the run. After this call, no other worker waits for this worker."""


class _OfThread(threading.local):
    """The session of each thread. Threads without one find the class attribute, which is faster than no attribute."""

    session: Session | None = None


_of_process: Session | None = None
_of_thread = _OfThread()


def current() -> Session | None:
    """Return the session of this thread; if it has none, the session of this process; None outside a run."""
    return _of_thread.session or _of_process


def install(session: Session | None, *, for_thread: bool = False) -> None:
    """Set the session of this process or, if `for_thread` is True, only the session of this thread."""
    global _of_process
    if for_thread:
        _of_thread.session = session
    else:
        _of_process = session


def worker_index() -> int:
    """Return the index of the worker that runs this script, counted from 0.

    Outside a run, the index is 0.

    Example:
        >>> import paceline
        >>> print("this is worker", paceline.worker_index())
        this is worker 0
    """
    session = current()
    return 0 if session is None else session.worker


def worker_count() -> int:
    """Return the number of workers in the run.

    Outside a run, the number is 1.

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

    Either every worker or a single worker may call this function. If all workers call this function, the n-th calls
    of all workers count as one request, and the first of these calls starts the change. Each worker's next push is
    then its last under the old model. The new model takes effect when all workers have made their last push under the
    old model. No push is lost. Outside a run, the call has no effect.

    Args:
        sync: a sync model, its notation (for example "ssp:staleness=3"), or a list with one model per shard.
        shard: index of the shard whose model changes. Default: None, which changes the model of all shards.

    Raises:
        ConfigurationError: the notation is invalid, or the model cannot be used in this run.

    Example:
        >>> import paceline
        >>> paceline.set_sync("elastic-bsp:lookahead=15")
    """
    if read_schedule(sync).auto:
        raise ConfigurationError(
            "sync is 'auto', which chooses the models of a whole run: start the run with --sync auto. set_sync() "
            "needs a model, for example 'elastic-bsp:lookahead=15'."
        )
    session = current()
    if session is not None:
        session.request_sync(sync, shard)
