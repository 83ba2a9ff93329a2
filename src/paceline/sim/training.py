"""Training in virtual time: real gradients, computed one after another in the order in which virtual time says.

Each worker's function runs on a thread of its own, exactly one of them at a time (`Strand`), with random generators
of its own. What it does between two calls of its session takes no virtual time; the session lets the time pass that
the cluster says, and what the worker pushes and pulls are tensors of real shards.

Shared by all workers, as threads of one process share everything else: modules and their globals, torch's default
dtype and number of threads, the current directory, open files. What the wall clock says means nothing here.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch

from ..core.layout import ShardSlice
from ..core.model_spec import ModelSpec, first_difference
from ..core.worker import Worker
from ..errors import RunFailedError, first_line
from ..frontend.generators import GeneratorStates
from ..frontend.session import install
from ..runtime.reader import WeightsSnapshot, named_weights
from ..shard.groups import GroupsReader
from ..shard.slots import BufferSlots
from ..shard.store import Push, Store, Vectors
from ..shard.vectors import torch_dtype
from ..sync import AnySyncModel, SyncModel
from ..sync.draws import uniform
from ..sync.schedule import Schedule, read_schedule
from .job import Job
from .strand import Strand

__all__ = ["Training", "computed_by"]

GENERATORS = 1 << 16  # what the seeds of the workers' generators are drawn for


class Training:
    """The workers' functions of one job, and the weights that they train. The job's `Driver`.

    Args:
        function: what every worker runs.
        workers: how many there are.
        schedule: of the job.
        seed: of the run.
        skips_nan: see `Session`.
        slicing: "even" or "by-parameter".
        overlap: "shards" or "off".
        shards: how many.

    Attributes:
        job: the job, from `attach` on.
        model: what is trained, from `register` on.
        stores: the stores of the shards, from `make_stores` on.
    """

    def __init__(
        self,
        function: Callable[[], object],
        *,
        workers: int,
        schedule: Schedule,
        seed: int,
        skips_nan: bool,
        slicing: str,
        overlap: str,
        shards: int,
    ) -> None:
        self.workers = workers
        self.schedule = schedule
        self.overlap = overlap
        self.seed = seed
        self.skips_nan = skips_nan
        self.stores: list[Store] = []
        self.model: ModelSpec
        self.slices: tuple[ShardSlice, ...] = ()
        self.job: Job
        self._function = function
        self._slicing = slicing
        self._count = shards
        self._sessions: dict[int, VirtualSession] = {}
        self._lives = [0] * workers
        self._slots: BufferSlots  # from `make_stores` on
        self._publisher = -1
        self._running: VirtualSession | None = None  # whose generators are in place
        self._outside: GeneratorStates | None = None

    def __enter__(self) -> Training:
        self._outside = GeneratorStates()
        self._main = sys.modules["__main__"]
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a pool for each worker's thread would be more threads than cores
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions.values():
            session.end()
        # Whatever is large is free when its last user is gone, and need not wait for the garbage collector, which
        # counts objects and knows nothing of their size.
        self._sessions.clear()
        self._running = None
        self.stores.clear()
        torch.set_num_threads(self._threads)
        if self._outside is not None:
            self._outside.give_back()
        sys.modules["__main__"] = self._main

    # -- the beginning ------------------------------------------------------------------------------------

    def make_stores(self, first: Sequence[int]) -> list[Store]:
        """Have the workers that are there from the beginning say what they train; make the stores of the shards.

        Raises:
            RunFailedError: a function failed, or trains nothing.
        """
        for worker in first:
            self._start(worker)
        registered = [worker for worker in first if self._sessions[worker].model is not None]
        if not registered:
            raise RunFailedError(
                "the run",
                "no worker ever called step() on a paceline.DistributedOptimizer, so nothing was trained",
            )
        publisher = registered[0]
        model = self._sessions[publisher].model
        assert model is not None
        self.model = model
        self.slices = model.layout.sliced(self._count, self._slicing)
        self._publisher = publisher
        self._resume(self._sessions[publisher])  # it publishes, and pauses again
        return self.stores

    def start_stores(
        self, vectors: Vectors, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]
    ) -> None:
        """The publisher's first weights are here."""
        self._slots = BufferSlots(self.model.buffers, [tensor.clone() for tensor in buffers])
        for bounds in self.slices:
            weights = {d: vectors[d][start:stop].clone() for d, (start, stop) in bounds.bounds.items()}
            store = Store(bounds, weights, self.model.optimizer)
            store.load_optimizer_state(state_of(bounds))
            self.stores.append(store)

    def model_of(self, worker: int) -> ModelSpec:
        """Return what a worker trains that is there from the beginning."""
        return self._sessions[worker].model or self.model

    # -- the driver ---------------------------------------------------------------------------------------

    def joined(self, worker: int) -> None:
        if worker not in self._sessions:
            self._start(worker)
        session = self._sessions[worker]
        session.joined = True
        if session.strand.ended:
            self.job.finish(worker)
            return
        assert session.model is not None
        if difference := first_difference(self.model, session.model):
            publisher = f"worker {self._publisher}"
            raise RunFailedError(f"worker {worker}", f"its model differs from {publisher}'s: {difference}")
        if worker != self._publisher or not session.weights:
            session.allocate(self.model)
        for shard in range(len(self.stores)):
            self.sent(worker, shard)
        self._resume(session)

    def computed(self, worker: int) -> None:
        session = self._sessions[worker]
        if session.commit_waits is None:
            self._resume(session, True)
        else:  # its function has nothing to say until it is answered
            session.commit_waits()

    def aborted(self, worker: int) -> None:
        self._resume(self._sessions[worker], False)

    def answered(self, worker: int) -> None:
        self._resume(self._sessions[worker])

    def sent(self, worker: int, shard: int) -> None:
        session = self._sessions.get(worker)
        if session is not None and session.weights:
            for dtype, (start, stop) in self.slices[shard].bounds.items():
                session.weights[dtype][start:stop] = self.stores[shard].weights[dtype]

    def lost(self, worker: int) -> None:
        session = self._sessions.pop(worker)
        self._swap_generators(session)
        session.end()

    # -- what sessions ask --------------------------------------------------------------------------------

    def keep_buffers(self, worker: int, buffers: Mapping[int, torch.Tensor]) -> None:
        """Some of a worker's buffers have come with its commit."""
        self._slots.put(worker, {index: tensor.clone() for index, tensor in buffers.items()})

    def snapshot(self) -> WeightsSnapshot:
        """The model as it is at the shards."""
        vectors = {
            dtype: torch.empty(size, dtype=torch_dtype(dtype))
            for dtype, size in self.model.layout.sizes.items()
        }
        for store in self.stores:
            for dtype, (start, stop) in store.bounds.bounds.items():
                vectors[dtype][start:stop] = store.weights[dtype]
        state = named_weights(self.model.layout, vectors)
        state |= {name: tensor.clone() for name, tensor in self._slots.pooled().items()}
        versions = self.job.versions
        return WeightsSnapshot(state, versions)

    # -- threads ------------------------------------------------------------------------------------------

    def _start(self, worker: int) -> None:
        """Run a worker's function until it says what it trains, or is over."""
        seed = int(uniform(self.seed, worker, GENERATORS, self._lives[worker]) * 2**53)
        self._lives[worker] += 1
        session = VirtualSession(self, worker, seed)
        self._sessions[worker] = session

        def run() -> None:
            install(session, for_thread=True)
            self._function()

        session.strand = Strand(run, f"paceline worker {worker}")
        self._resume(session)

    def _resume(self, session: VirtualSession, message: object = None) -> None:
        """Let a worker's function go on until it next speaks to its session."""
        self._swap_generators(session)
        session.strand.resume(message)
        if session.strand.error is not None:
            error = session.strand.error
            if isinstance(error, KeyboardInterrupt):
                raise error
            if isinstance(error, SystemExit):
                raise RunFailedError(
                    f"worker {session.worker}", f"the script ended with exit code {error.code}"
                )
            raise RunFailedError(
                f"worker {session.worker}", first_line(error), "".join(traceback.format_exception(error))
            ) from error
        if session.strand.ended and session.joined:
            self.job.finish(session.worker)

    def _swap_generators(self, session: VirtualSession) -> None:
        if self._running is not session:
            if self._running is not None:
                self._running.generators = GeneratorStates()
                self._running.main = sys.modules["__main__"]
            self._running = session
            if session.generators is None:
                session.generators = GeneratorStates.seeded(session.generator_seed)
            session.generators.give_back()
            sys.modules["__main__"] = session.main


class VirtualSession:
    """A worker's session. See `paceline.frontend.session.Session` for the contract."""

    def __init__(self, training: Training, worker: int, generator_seed: int) -> None:
        self.worker = worker
        self.workers = training.workers
        self.seed = training.seed
        self.skips_nan = training.skips_nan
        self.weights: Vectors = {}
        self.gradients: Vectors = {}
        self.on_moved: Callable[[], None] = lambda: None
        self.strand: Strand
        self.model: ModelSpec | None = None
        self.joined = False  # does it take part in the job
        self.generators: GeneratorStates | None = None
        self.generator_seed = generator_seed
        self.main = sys.modules["__main__"]  # a script of its own, where it is run as one
        self._training = training
        self._epoch = -1
        self._requests: list[tuple[Sequence[AnySyncModel], int | None]] = []  # made before training has begun
        self._passed = False  # is the time of this computation over
        self._held_back = False  # it is computed, and not committed yet
        self.commit_waits: Callable[[], None] | None = None  # sends what is committed when that time is over
        self._groups = GroupsReader()

    @property
    def _core(self) -> Worker:
        return self._training.job.workers[self.worker].core

    # -- the contract -------------------------------------------------------------------------------------

    def begin(self, model: ModelSpec) -> bool:
        self.model = model
        self.strand.pause()
        training = self._training
        if training.stores:
            return False
        self.allocate(model)
        return True

    def publish(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        self._training.start_stores(self.weights, buffers, state_of)
        self.strand.pause()
        self._join()

    def await_first_weights(self) -> None:
        self._join()

    @property
    def iteration(self) -> int:
        return self._core.iteration

    @property
    def sends_early(self) -> bool:
        return False

    def weights_edited(self) -> bool:
        return False

    def gradient_ready(self, parameter: int) -> None:
        pass

    @property
    def needs_significance(self) -> bool:
        return self._core.needs_significance

    @property
    def may_restart(self) -> bool:
        return self._core.may_restart

    def restart_ordered(self) -> bool:
        """Asked before the first layer, too: all the time passes there, so a gradient that is to be dropped is
        never computed."""
        self._leave_refused()
        if not self._passed:
            self._passed = self._pass_time()
            return not self._passed
        return False

    def hold_back(self, *, droppable: bool) -> bool:
        self._leave_refused()
        if droppable and self.may_restart:
            self._passed = self._passed or self._pass_time()
            self._held_back = self._passed
        else:
            self._held_back = True  # the time passes with the commit: the function pauses once and not twice
        return self._held_back

    def pull_again(self) -> None:
        self._training.job.pull_again(self.worker)
        self.strand.pause()

    def epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        if self.weights:
            self._core.reach_epoch(epoch)

    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        schedule = read_schedule(sync)
        schedule.require_overlap(self._training.overlap)
        if self.weights:
            self._ask(schedule.first, shard)
        else:
            self._requests.append((schedule.first, shard))

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
        training = self._training
        pushes: list[Push] = []
        if not empty:
            settings = self._groups.read(groups)
            pushes = [
                Push(
                    {d: self.gradients[d][start:stop] for d, (start, stop) in bounds.bounds.items()},
                    present,
                    settings,
                )
                for bounds in training.slices
            ]

        def send() -> None:
            self._passed = self._held_back = False
            self.commit_waits = None
            if buffers:
                training.keep_buffers(self.worker, buffers)
            training.job.push(self.worker, pushes, empty=empty, significance=significance, loss=loss)

        if self._passed:
            send()
        else:
            self.commit_waits = send
            training.job.compute(self.worker, droppable=False)
        self.strand.pause()

    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        return [
            (store.bounds, {key: value.clone() for key, value in store.optimizer_state().items()})
            for store in self._training.stores
        ]

    def finish(self) -> None:
        pass  # the end of the function says it

    # -- for the training ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Have its function be over, and let go of what refers back to this session."""
        self.strand.end()
        self.on_moved = lambda: None
        self.commit_waits = None

    def allocate(self, model: ModelSpec) -> None:
        """Make room for weights and gradients."""
        for vectors in (self.weights, self.gradients):
            for dtype, size in model.layout.sizes.items():
                vectors[dtype] = torch.zeros(size, dtype=torch_dtype(dtype))

    def _join(self) -> None:
        """The first weights are here, and so is what was to wait for that."""
        if self._epoch >= 0:
            self._core.reach_epoch(self._epoch)
        for models, shard in self._requests:
            self._ask(models, shard)
        self._requests = []

    def _ask(self, models: Sequence[AnySyncModel], shard: int | None) -> None:
        self._training.job.request_sync(self.worker, models, shard)

    def _leave_refused(self) -> None:
        """A computation begins. If `step()` has refused to commit the last one, that has taken its time as well."""
        if self._held_back:
            if not self._passed:
                self._pass_time(droppable=False)
            self._passed = self._held_back = False

    def _pass_time(self, *, droppable: bool = True) -> bool:
        self._training.job.compute(self.worker, droppable=droppable)
        passed: bool = self.strand.pause()
        return passed


def computed_by() -> str:
    """What the last bits of gradients depend on: the build of torch, what the processor can do, how many threads."""
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {threads} thread{'s' * (threads > 1)}"
