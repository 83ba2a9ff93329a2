"""The interface through which a training script takes part in a run.

The front end (`DistributedOptimizer`, `distribute`) depends only on a `Session`, so it works in the same way in a
process of a live run and on a thread of a simulation. Without a session, a script runs as one ordinary process.

The second half of this file holds the values that the front end keeps for each session, in particular for a script that
is resumed, and for a worker that joins late.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.layout import BufferSpec, FrozenSpec, HyperParameters, ModelSpec, ShardSlice
from ..core.lease import BatchSizing, Split
from ..core.messages import Combined, LoopPosition, Observation
from ..core.metrics import Noted, Settled, Stopwatch
from ..core.requests import Request
from ..core.worker import Worker
from ..errors import ConfigurationError
from ..shard.vectors import Vectors, digest_of, dtype_name
from ..sync import SyncModel
from ..sync.events import PushFlags
from ..sync.schedule import read_schedule
from .job_model import JointModel, ParameterSet, TrainedModel, any_lazy


class TrainingStep(NamedTuple):
    """The values that a step of the optimizer pushes besides the gradients.

    Attributes:
        present: one byte per parameter: 1 if the parameter has a gradient, else 0.
        groups: hyper-parameters of the optimizer's parameter groups, encoded with msgpack.
        flags: the flags of the push, as far as the script decides them.
        buffers: index -> buffer, for the buffers that have changed since the last push.
        logged: what the script has logged since the last push.
        observed: the observation of the push for the guard of the run; None if the guard needs none.
    """

    present: bytes
    groups: bytes
    flags: PushFlags
    buffers: Mapping[int, torch.Tensor]
    logged: Settled
    observed: Observation | None


@dataclass(slots=True)
class Callbacks:
    """The functions of the front end that a session calls. The front end sets them.

    Attributes:
        before_exchange: called before the session sends `gradients`, or requests new `weights`. From then until the
            answer, only the session uses this memory.
        on_arrived: called during `commit` when a part of the new `weights` has arrived, with the name of the vector and
            the range of its elements; None to be told nothing. Each range begins at the first element that a shard
            sends, and grows from call to call. The session does not change these elements again before the next
            `before_exchange`.
        frozen: returns the bytes of this worker's frozen parameter with a given digest, in parts; None if no parameter
            has it. Set before `begin`, and before `extend`.
        on_moved: called after the session has moved `weights` to other memory.
        state: returns the state of the script (see `worker_state`). Its argument is True if the script has ended.
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
    """The requests of a worker to the servers, besides pushes and pulls."""

    @abstractmethod
    def fetch_model(self, digest: Callable[[FrozenSpec], str]) -> Mapping[str, torch.Tensor] | None:
        """Return the job's weights, and its buffers pooled over the workers, by their names in the `state_dict`.

        A worker that joins a run in progress may call this before `begin`. Until `begin`, the worker takes no part in
        the run, so no other worker waits for it.

        Args:
            digest: function that returns the digest of this worker's value of a frozen parameter; "" if this worker has
                no such parameter. The result includes the job's values of those frozen parameters whose digests differ.

        Returns:
            None if the run is only beginning, so that there is no model to read.
        """

    @abstractmethod
    def fetch_evaluated(self) -> Mapping[str, torch.Tensor]:
        """Return the current weights for evaluation, by their names in the `state_dict`, in new memory.

        These weights differ from the weights in training if an optimizer has modes (see `shard.foreign`). May be called
        between two iterations, and in `idle`.
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

        A worker that has just joined a run in progress gets all buffers, pooled over the other workers.

        Args:
            specs: the buffers.
            own: this worker's own values of these buffers. If these values equal the initializer's, the result may be
                {}.
        """

    @abstractmethod
    def fetch_frozen(self, specs: Sequence[FrozenSpec]) -> Mapping[str, torch.Tensor]:
        """Return the run's values of frozen parameters, by name.

        Only parameters whose digests in the run differ from the digests in `specs` are returned.

        Raises:
            ConfigurationError: no worker of the run has these values any more.
        """

    @abstractmethod
    def keep_states(self, position: LoopPosition, states: Sequence[memoryview]) -> None:
        """Send the states of tracked objects, taken at this position, to the server of shard 0.

        The memory of `states` may change after this call.
        """

    @abstractmethod
    def fetch_states(self, address: str) -> tuple[LoopPosition, bytes | bytearray] | None:
        """Return the states that were kept last, with their position; None if there are none.

        Args:
            address: the address of the server of shard 0; "" if there is no such server yet. The session need not be
                connected to this server.
        """

    @abstractmethod
    def keep_worker_state(self, state: Sequence[memoryview]) -> None:
        """Send the state of this worker's script to the coordinator, for the cut that needs this state.

        The memory of `state` may change after this call.

        Args:
            state: the bytes of the state. See `worker_state`.
        """

    @abstractmethod
    def fetch_worker_states(self) -> tuple[bytes | bytearray | None, bytes | bytearray | None]:
        """Return the states that scripts had at the cut from which this run has been resumed.

        May be called before `begin`, like `fetch_model`.

        Returns:
            The state of the worker with this worker's index, and the state of the main worker or, if this is not known,
            of the worker with the lowest index; None for a state that is not known. The first state is also None if
            this index has been used in this run before.
        """


class Session(ABC):
    """The interface through which one worker takes part in a run.

    The order of the calls is: `fetch_model` and `fetch_state`, if needed; `begin`; then `initialize` if this worker
    is the initializer, otherwise `await_first_weights`; then `hold_back` and `commit` once per iteration; then
    `finish`. From `begin` on, only these methods and `pull_again`, `refresh`, `sit_out`, `idle`, `begin_edit`,
    `push_edit`, `restore_weights`, `combine` and `extend` change the weights, and `finish` may move the weights to
    other memory. The caller may change `gradients` at any time except during `commit`.

    Attributes:
        worker: index of this worker.
        workers: number of workers.
        split: how an epoch is divided among the workers by default.
        batch: "equal" if all workers have batches of the same size by default, "balanced" if the sizes follow the
            workers' speeds.
        joint_batch: True if the batch size of a loader is by default that of the joint batch of all workers.
        seed: the run's seed.
        device: the device that is assigned to this worker; the CPU if none is assigned.
        skips_nan: True if gradients with NaN or inf are not pushed, False if such gradients stop the run.
        resumed: number of the cut with which the run has begun; 0 if it is not resumed.
        core: the protocol of this worker. The front end reads from the core what the worker knows of the run, and uses
            the core's data feed. This knowledge changes between iterations. The front end may call methods that
            return requests, but only inside `exchange`.
        servers: the requests of the worker to the servers, besides pushes and pulls.
        weights: dtype -> flat vector of the weights. Filled by `begin`.
        gradients: dtype -> flat vector of the gradients. Filled by `begin`.
        callbacks: the functions of the front end that the session calls.
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
        """True if `commit` needs an observation of the push. May change between iterations."""

    @property
    @abstractmethod
    def encodes_weights(self) -> bool:
        """True if weights may be encoded on their way to this worker, and so differ from the weights of the servers.

        The weights that `refresh` pulls are not encoded.
        """

    @property
    def main_worker(self) -> int:
        """Index of the main worker, as far as this worker has been told; -1 for none."""
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
            weights: name -> flat vector with the initial weights of the new parameters. The job uses those of one
                worker.
            buffers: the values of the buffers that the model did not have before.
            state_of: function that returns a shard's part of the new parameters' initial optimizer state.

        Returns:
            "" if the model was extended; otherwise, a description of how the workers' calls differ.
        """

    def weights_edited(self) -> bool | None:
        """Return True if the script has changed `weights` since the last pull, None if this is not known."""
        return None

    def restore_weights(self) -> bool:
        """Undo all changes by the script to `weights` since the last pull. Return False if this is not possible."""
        return False

    def gradient_ready(self, parameter: int) -> None:
        """Tell the session that `gradients` contains a parameter's gradient, which may change until `commit`."""
        raise NotImplementedError  # only a session that sends early needs this method

    def pushes_rows(self, parameter: int) -> bool:
        """Tell the session that a parameter's gradients are sparse. Return True if only the rows in these gradients are
        pushed.
        """
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
        """Pull the current weights between two iterations, without a push and without waiting for other workers."""

    @abstractmethod
    def sit_out(self) -> None:
        """Push without a gradient, then pull, because this worker has no part in a joint batch of the other workers."""

    @abstractmethod
    def idle(self) -> AbstractContextManager[None]:
        """Return a context in which the script does not train, and in which no other worker waits for this one.

        The weights may change at any time in this context. `hold_back`, `commit`, `pull_again`, `refresh`, `sit_out`,
        `extend`, `begin_edit`, `push_edit` and `finish` must not be called. If the run fails meanwhile, the error is
        raised at the end of the context.
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

        None if the time that this thread spends now is not measured, or never counts as training.
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
    def commit(self, step: TrainingStep) -> None:
        """Push `gradients` to every shard and pull the new weights. On return, `weights` holds the new weights."""

    @abstractmethod
    def observe(self, observed: Observation, noted: Sequence[Noted] = ()) -> None:
        """Report the observation of a push immediately.

        If no push follows, `noted` contains the values that were logged since this push.
        """

    @abstractmethod
    def combine(
        self, call: str, op: Literal["mean", "sum"] = "sum", numbers: bytes = b"", weight: float = 1.0
    ) -> Combined:
        """Wait until all other workers have made the same call, and return its result.

        If this worker is in training and the sync model does not keep all workers in lockstep, this worker may
        meanwhile pull, and push without a gradient, because other workers may wait for its push.

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
    """The session of each thread. Threads without one use the class attribute, because failed look-ups are slow."""

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
    of all workers count as one request, and the first of these calls starts the change. Calls of workers that were
    lost, or were asked to leave, no longer count. After the request, each worker's next push is its last under the old
    model. The new model takes effect when all workers have made their last push under the old model. No push is lost.
    Outside a run, the call has no effect.

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


# -- Values that the front end keeps for each session, and that are freed with it ----------------------------

Value = TypeVar("Value")


class OfSession(Generic[Value]):
    """A value for each session. The value is made when it is first requested, and exists as long as its session.

    A value may refer to other objects, but not to its session: with such a reference, the session would never be freed.

    Some values are requested several times in each step. A process usually has one session, so this object remembers
    the last session and its value. This is much faster than a look-up.

    Args:
        make: makes the value for a session.
    """

    def __init__(self, make: Callable[[Session], Value]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[Session, Value] = WeakKeyDictionary()
        # replaced as a whole, because other threads may read it at the same time
        self._last: tuple[ref[Session], ref[Value]] | None = None

    def __call__(self, session: Session) -> Value:
        """Return the value of a session."""
        if (last := self._last) is not None and last[0]() is session and (value := last[1]()) is not None:
            return value
        value = self._values.get(session)
        if value is None:
            value = self._values.setdefault(session, self._make(session))
        self._last = ref(session), ref(value)
        return value

    def __iter__(self) -> Iterator[Value]:
        """Yield the values of all sessions."""
        return iter(list(self._values.values()))


# -- Objects whose state can be saved and loaded, such as torch's schedulers, modules and some loaders -------

METHODS = ("state_dict", "load_state_dict")


class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


# -- The state that the script of a resumed run gets back, until it has reached the place of this state ------


class BatchSite(NamedTuple):
    """The place at which a script asks for its next batch.

    Attributes:
        stream: name of the stream of epochs (see `DataStream`) to which the batch belongs; "" if the script has no
            distributed loader.
        epoch: number of the epoch in this stream.
    """

    stream: str
    epoch: int


class _Resumption:
    """The state that a script gets back in a worker of a resumed run.

    Attributes:
        begun: True once the state has been asked for.
        state: the state of the script; None if there is nothing to restore, or nothing more to restore. See
            `worker_state`.
        restored: the state that was restored last, until the script gets a batch; None if there is no such state.
        repeats: True while the script repeats a batch in which its steps do nothing. See `repeated`.
        steps: number of these steps.
        buffers: the values of the buffers of this worker's model in the earlier run, by their descriptions; {} once
            training has begun.
    """

    def __init__(self) -> None:
        self.begun = False
        self.state: Mapping[str, Any] | None = None
        self.restored: Mapping[str, Any] | None = None
        self.repeats = False
        self.steps = 0
        self.buffers: Mapping[str, torch.Tensor] = {}

    def take_buffers(self, specs: Iterable[BufferSpec]) -> dict[str, torch.Tensor]:
        """Return and forget the values of these buffers in the earlier run, by name, as far as they are known."""
        had, self.buffers = self.buffers, {}
        return {spec.name: had[str(spec)] for spec in specs if str(spec) in had}

    def lies_beyond(self, place: BatchSite) -> bool:
        """True if the script was in a later epoch of the same stream when the state was taken."""
        return (
            self.state is not None
            and place.stream == self.state["place"][0]
            and place < BatchSite(*self.state["place"])
        )

    def take_at(self, place: BatchSite) -> Mapping[str, Any] | None:
        """Return and forget the state if the script has reached the place of the state; else return None."""
        if self.state is None:
            return None
        before = BatchSite(*self.state["place"])
        if place.stream != before.stream or place.epoch < before.epoch:
            return None
        state, self.state = self.state, None
        return state


resumption_of = OfSession(lambda _: _Resumption())
"""Returns the state that the script of a session's worker gets back."""


# -- The job's model in a worker that joins a run in progress, until this worker trains ----------------------
#
# A worker takes part in the job from its first gradient on: it then registers its model, and other workers
# may wait for its pushes. A worker that joins late may have no batch in its first epoch, while its script
# looks at the model: the script evaluates it, saves it, or averages its weights. Until the worker takes part,
# it therefore *reads* the job's weights, buffers and optimizer state, as an observer for which no worker
# waits, and copies them into its own model.
#
# It is not known in advance when the script will look at the model. So the model is read when the script's
# loop over the epochs or its first pass over a distributed loader begins, and before every call that shows
# weights: a forward pass without gradients, `evaluating`, `save`, and the optimizer's `state_dict`.


class Untrained(Protocol):
    """An optimizer of the script with parameters that are not trained yet."""

    def models(self) -> tuple[nn.Module, ...]:
        """Return the modules that hold the parameters."""

    def parameter_set(self) -> ParameterSet:
        """Return the parameter set that the optimizer trains."""


class _Newcomer:
    """A record of a worker that has not trained yet.

    Attributes:
        optimizers: the optimizers with parameters that are not trained yet, in the order in which they were created,
            or in which parameters were added to them.
        in_progress: True if the run was in progress when the worker joined; None while this is not known.
        held: the number of optimizers whose models hold the job's weights.
        digests: the digests of the frozen parameters of these models, by name.
    """

    def __init__(self) -> None:
        self.optimizers: list[ref[Any]] = []
        self.in_progress: bool | None = None
        self.held = 0
        self.digests: dict[str, str] = {}


def add_untrained(session: Session, optimizer: Untrained) -> None:
    """Record that an optimizer has parameters that are not trained yet."""
    _newcomer_of(session).optimizers.append(ref(optimizer))


def untrained(session: Session) -> list[Any]:
    """Return the optimizers with parameters that are not trained yet."""
    return [optimizer for each in _newcomer_of(session).optimizers if (optimizer := each()) is not None]


def are_trained(session: Session, trained: Sequence[Untrained]) -> None:
    """Record that all parameters of these optimizers are trained from now on."""
    optimizers = _newcomer_of(session).optimizers
    optimizers[:] = [each for each in optimizers if all(each() is not optimizer for optimizer in trained)]


def begins_with_the_run(session: Session) -> None:
    """Record that a worker takes part from the beginning of the run, so that its own weights may be the job's."""
    _newcomer_of(session).in_progress = False


def came_late(session: Session) -> bool:
    """Return True if a worker is known to have joined a run in progress."""
    return _newcomer_of(session).in_progress is True


def hold_job_model(session: Session | None, *, newest: bool = False) -> None:
    """If a worker joins a run in progress and has not trained yet, set its models to the job's weights and buffers.

    Tensors that the job's model does not have, or has with another shape or dtype, are not changed. A worker whose
    model has such tensors is refused when it begins to train.

    Args:
        session: the session of the worker; None outside a run.
        newest: True to read the weights again if the models hold earlier weights of the job.
    """
    if session is None:
        return
    newcomer, optimizers = _newcomer_of(session), untrained(session)
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


def job_state(
    session: Session, optimizer: Untrained
) -> tuple[dict[int, dict[str, Any]], Sequence[HyperParameters]] | None:
    """Return the job's state of an optimizer. See `TrainedModel.optimizer_of_job`.

    Returns:
        The state; None if the worker takes part from the beginning of the run, or if it does not train the model of
        the job and will be refused.
    """
    hold_job_model(session)
    if not _newcomer_of(session).in_progress or not (shards := session.servers.fetch_state()):
        return None
    optimizers = untrained(session)
    sets = [each.parameter_set() for each in optimizers]
    if any(any_lazy(each.parameters) for each in sets):
        return None
    trained = TrainedModel.of(sets)
    sizes: Counter[int] = Counter()
    for shard, _ in shards:
        for segment in shard.segments:
            sizes[segment.parameter] += segment.stop - segment.start
    if sizes != Counter({index: each.size for index, each in enumerate(trained.spec.layout.parameters)}):
        return None
    return trained.optimizer_of_job(optimizers.index(optimizer), shards)


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


_newcomer_of = OfSession(lambda _: _Newcomer())
