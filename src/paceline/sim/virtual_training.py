"""Training in virtual time: real gradients are computed one after another, in the order of virtual time.

The training function of each worker runs on its own thread (`PausableThread`) with its own random generators. Only
one of these threads runs at any time. Virtual time passes only while a function waits in a call to its session. The
session simulates the cluster's compute and message times, but pushes to and pulls from real shards.

The workers share everything else that the threads of a process share: modules and their globals, torch's default
dtype and number of threads, the current directory, and open files. The wall clock has no effect on a simulation.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch

from ..core.guard import DIVERGED
from ..core.job_cut import JobCut
from ..core.joint_batch import combine
from ..core.layout import (
    BufferSpec,
    FrozenSpec,
    HyperParameters,
    ModelSpec,
    ShardSlice,
    WireFormat,
    absent_ranges,
    encoded_bytes,
    first_difference,
    of_set,
)
from ..core.lease import BatchSizing
from ..core.messages import Answer, Combined, Contributed, KeepWorkerState, LoopPosition, Observation, Warned
from ..core.metrics import Noted, Settled, Stopwatch
from ..core.requests import COORDINATOR, CompleteCut, Request, Send
from ..core.standstill import unable_to_begin
from ..core.worker import Worker
from ..errors import RunFailedError, UsageError, first_line
from ..shard.codecs import BaseSender, Sender
from ..shard.store import BufferSlots, Push, Store, WeightsSnapshot, named_weights
from ..shard.vectors import GroupsReader, Vectors, sliced, torch_dtype, unpack
from ..sync import SyncModel
from ..sync.draws import uniform
from ..sync.plugins import script_traceback
from ..sync.schedule import Schedule, read_schedule
from ..train.generator_states import GeneratorStates
from ..train.metrics import metrics_of
from ..train.session import Callbacks, Servers, Session, TrainingStep, install
from ..train.training import unwatch_script, watch_script
from .simulated_cuts import CutShard, SimCut
from .simulated_job import Driver, VirtualJob

INDEX_BYTES = 8  # size of the index of a row in a sparse gradient
GENERATORS = 1 << 16  # part of the key from which the seeds of the workers' generators are derived


class Training(Driver):
    """The job's `Driver`: runs the training functions of the workers, and stores the trained weights.

    Args:
        function: training function that every worker runs.
        workers: number of workers.
        schedule: schedule of the job.
        seed: random seed for the run.
        skips_nan: see `Session`.
        observes: see `Session`.
        slicing: see `ModelSpec.sliced`.
        overlap: "shards" or "off".
        shards: number of shards.
        batch: "equal" or "balanced". See `Session`.
        joint_batch: see `Session`.
        wire: the format in which gradients and weights travel.
        resumed: the cut with which the run begins; None to begin with the initial weights of a worker.

    Attributes:
        cuts: the cuts that have been made.
        job: the simulated job. Must be set before `VirtualJob.run` is called.
        model: description of the trained model. Set by `make_stores`.
        stores: the store of each shard. Set by `make_stores`.
        states: the position in the training loops and the states of tracked objects that a worker has stored last.
    """

    def __init__(
        self,
        function: Callable[[], object],
        *,
        workers: int,
        schedule: Schedule,
        seed: int,
        skips_nan: bool,
        observes: bool,
        slicing: str,
        overlap: str,
        shards: int,
        batch: BatchSizing,
        joint_batch: bool,
        wire: WireFormat,
        resumed: SimCut | None = None,
    ) -> None:
        self.workers = workers
        self.resumed = resumed
        self.cuts: list[SimCut] = []
        self.wire = wire
        self.batch = batch
        self.joint_batch = joint_batch
        self.schedule = schedule
        self.overlap = overlap
        self.seed = seed
        self.skips_nan = skips_nan
        self.observes = observes
        self.stores: list[Store] = []
        self.states: tuple[LoopPosition, bytes] | None = None
        self.model: ModelSpec
        self.slices: tuple[ShardSlice, ...] = ()
        self.job: VirtualJob
        self._function = function
        self._slicing = slicing
        self._count = shards
        self._sessions: dict[int, VirtualSession] = {}
        # Worker whose script has not begun yet -> shard -> weights that the shard has sent to the worker.
        self._first_weights: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        self._lives = [0] * workers
        self._slots: BufferSlots  # set by `make_stores`
        self._frozen: dict[str, torch.Tensor] = {}  # the frozen parameters, by name
        self._initializer = -1
        # shard -> the base of its weights, if these travel as differences
        self._bases: dict[int, BaseSender] = {}
        self._copies: dict[int, dict[int, CutShard]] = {}  # number of a cut -> shard -> its copy
        self._copied: dict[str, torch.Tensor] = {}  # the buffers and frozen parameters of the last cut
        # number of a cut -> (worker, label) -> the state of the script
        self._states_of: defaultdict[int, dict[tuple[int, int], bytes]] = defaultdict(dict)
        self._saved: SimCut  # the cut that was made last
        self._running: VirtualSession | None = None  # the session whose random generators are active
        self._outside: GeneratorStates | None = None  # states of the caller's random generators

    def __enter__(self) -> Training:
        self._outside = GeneratorStates()
        self._main = sys.modules["__main__"]
        self._threads = torch.get_num_threads()
        watch_script()
        # If torch used more threads, each worker would get a pool of them, and the threads would outnumber the cores.
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as steps:  # all steps are taken, even if a function cannot be stopped
            steps.callback(self._give_back)
            for session in self._sessions.values():
                steps.callback(session.end)

    def _give_back(self) -> None:
        """Release the memory of the run, and restore what the run has changed in this process."""
        # Release all large tensors now. The garbage collector might collect them late, because it counts objects and
        # ignores their sizes.
        self._sessions.clear()
        self._running = None
        self.stores.clear()
        torch.set_num_threads(self._threads)
        unwatch_script()
        if self._outside is not None:
            self._outside.give_back()
        sys.modules["__main__"] = self._main

    # -- start --------------------------------------------------------------------------------------------

    def make_stores(self, first: Sequence[int]) -> list[Store]:
        """Run the functions of the initial workers until they register their models, and create the shards' stores.

        Args:
            first: the workers that are present from the beginning.

        Raises:
            RunFailedError: a function failed, or no function trains a model.
        """
        if self.resumed is not None:
            self._load(self.resumed)
        for worker in first:
            self._start(worker)
        self._end_calls()
        registered = [worker for worker in first if self._sessions[worker].model is not None]
        if not registered:
            raise RunFailedError(
                "the run",
                "no worker ever called step() on a paceline.DistributedOptimizer, so nothing was trained",
            )
        initializer = registered[0]
        model = self._sessions[initializer].model
        assert model is not None
        if self.resumed is not None:
            if self.resumed.job.contains(model) or not self.resumed.job.is_extended_by(model):
                return self.stores
            self.stores.clear()  # these stores lack parameters of the model
        self.model = model
        self.slices = self.sliced(model)
        self._initializer = initializer
        self._resume(self._sessions[initializer])  # the session calls `start_stores`
        return self.stores

    def _end_calls(self) -> None:
        """Let the initial workers pass the barriers and reductions before their first step.

        Raises:
            RunFailedError: a worker waits for a worker that has ended or has reached its first step.
        """
        while combined := [each for each in self._sessions.values() if each.combined_early]:
            for session in combined:
                self._resume(session)
        if gathered := self.job.coordinator.collectives.waiting:
            live = [worker for worker, session in self._sessions.items() if not session.strand.ended]
            raise RunFailedError("the run", unable_to_begin(live, gathered))

    def model_extended(self, initializer: int) -> None:
        model, slices = self.job.coordinator.model, self.job.coordinator.slices
        assert model is not None
        vectors, buffers, state_of = self._sessions[initializer].initial
        for index, bounds in enumerate(slices):
            before = self.stores[index]
            weights = {
                name: vectors[name][start:stop].clone() if name in vectors else before.weights[name]
                for name, (start, stop) in bounds.bounds.items()
            }
            store = Store(bounds, weights, model.optimizers_over_layout)
            store.take_over(before, state_of(bounds), len(model.layout.parameters))
            self.stores[index] = store
        added = zip(model.buffers_beyond(self.model), buffers, strict=True)
        self._slots.extend(model.buffers, {spec.name: tensor.clone() for spec, tensor in added})
        self._frozen = self._frozen_of(self._sessions[initializer], model)
        self.model, self.slices = model, slices

    def extended(self, worker: int) -> None:
        self._sessions[worker].allocate(self.model)

    def _frozen_of(self, session: VirtualSession, model: ModelSpec) -> dict[str, torch.Tensor]:
        """Return a worker's frozen parameters, by name: the run's tensors where there are any, otherwise copies."""
        known = {spec.name: self._frozen[spec.name] for spec in model.frozen if spec.name in self._frozen}
        new = [spec for spec in model.frozen if spec.name not in known]
        return known | {
            spec.name: unpack(spec, b"".join(session.callbacks.frozen(spec.digest) or ())) for spec in new
        }

    def start_stores(
        self, vectors: Vectors, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]
    ) -> None:
        """Create the stores from the initializer's initial weights, buffers and optimizer state."""
        named = dict(zip(self.model.buffers, buffers, strict=True))
        known = {} if self.resumed is None else self.resumed.tensors
        self._slots = BufferSlots(
            self.model.buffers, [known.get(spec.name, tensor).clone() for spec, tensor in named.items()]
        )
        self._frozen = self._frozen_of(self._sessions[self._initializer], self.model)
        for bounds in self.slices:
            weights = {d: vectors[d][start:stop].clone() for d, (start, stop) in bounds.bounds.items()}
            state = state_of(bounds)
            if self.resumed is not None:
                state = state | self.resumed.put_into(self.model.layout, bounds, weights)
            store = Store(bounds, weights, self.model.optimizers_over_layout)
            store.load_optimizer_state(state)
            self.stores.append(store)

    def _load(self, cut: SimCut) -> None:
        """Create the stores from a cut."""
        self.model = model = cut.job.model
        self.slices = self.sliced(model)
        self._slots = BufferSlots(model.buffers, [cut.tensors[spec.name].clone() for spec in model.buffers])
        self._frozen = {spec.name: cut.tensors[spec.name].clone() for spec in model.frozen}
        for bounds in self.slices:
            store = Store(bounds, cut.weights(bounds), model.optimizers_over_layout)
            store.load_optimizer_state(cut.optimizer_state(bounds))
            self.stores.append(store)

    def sliced(self, model: ModelSpec) -> tuple[ShardSlice, ...]:
        """Return the slice of each shard."""
        return model.sliced(self._count, self._slicing, self.wire.block)

    def model_of(self, worker: int) -> ModelSpec:
        """Return the model of a worker that is present from the beginning."""
        return self._sessions[worker].model or self.model

    # -- the driver ---------------------------------------------------------------------------------------

    def joined(self, worker: int) -> None:
        if worker not in self._sessions:
            self._start(worker)
        session = self._sessions[worker]
        session.joined = True
        if session.strand.ended:
            self._finish(session)
            return
        assert session.model is not None
        if self.model.layout.parameters[-1].part:
            raise RunFailedError(
                f"worker {worker}",
                "it joins a run whose script has added parameters after training had begun. A simulation supports "
                "this only for workers that are present from the beginning.",
            )
        if difference := first_difference(self.model, session.model):
            initializer = f"worker {self._initializer}"
            raise RunFailedError(f"worker {worker}", f"its model differs from {initializer}'s: {difference}")
        if worker != self._initializer or not session.weights:
            session.allocate(self.model)
        sent = self._first_weights.pop(worker, {})
        for shard, store in enumerate(self.stores):
            weights = sent.get(shard, store.weights)
            for vector, (start, stop) in self.slices[shard].bounds.items():
                session.weights[vector][start:stop] = weights[vector]
        self._resume(session)

    def computed(self, worker: int) -> None:
        session = self._sessions[worker]
        if session.commit_waits is None:
            self._resume(session, True)
        else:  # the function stays paused in `commit` until the pull after the push is answered
            session.commit_waits()

    def aborted(self, worker: int) -> None:
        self._resume(self._sessions[worker], False)

    def answered(self, worker: int) -> None:
        self._resume(self._sessions[worker])

    def passed(self, worker: int) -> None:
        self._resume(self._sessions[worker])

    def supplied(self, worker: int) -> None:
        session = self._sessions[worker]
        if session.awaits_data and not session.core.data.waiting:
            self._resume(session)

    def combined(self, worker: int) -> None:
        self._resume(self._sessions[worker])

    def sent(self, worker: int, answer: Answer) -> float:
        session, shard = self._sessions.get(worker), answer.shard
        pulls = session.pulls if session is not None else None
        weights = self._arriving(answer, pulls)
        if session is None:  # the worker joins a run in progress, and its script has not begun yet
            cloned = {vector: values.clone() for vector, values in weights.items()}
            self._first_weights.setdefault(worker, {})[shard] = cloned
        elif session.weights:
            bounds = of_set(self.slices[shard].bounds, pulls)
            for vector, (start, stop) in bounds.items():
                if vector in session.weights:  # else the worker does not know yet that the model was extended
                    session.weights[vector][start:stop] = weights[vector]
                    if session.commits and (told := session.callbacks.on_arrived) is not None:
                        told(vector, start, stop)
        return share_of_set(self.slices[shard], pulls, answer.codec)

    def _arriving(self, answer: Answer, part: int | None) -> Vectors:
        """Return the weights that an answer brings. `part` is the pulled parameter set; None for all sets."""
        weights = self.stores[answer.shard].weights
        if not answer.base:
            return weights if answer.codec == "float32" else Sender(answer.codec, weights).arriving()
        based = self._bases.get(answer.shard)
        if based is None or based.vectors is not weights:  # the store is new, because the model was extended
            based = self._bases[answer.shard] = BaseSender(self.wire.weights, weights)
        if based.numbers.get(part) != answer.base:
            based.advance(part, answer.base, of_set(weights, part))
        return weights | based.base

    def take_cut(self, shard: int, number: int) -> None:
        store = self.stores[shard]
        copy = CutShard(store.bounds, store.weights, store.optimizer_state())
        self._copies = {number: self._copies.get(number, {}) | {shard: copy}}
        if not shard:
            self._copied = self.pooled_buffers() | {name: each.clone() for name, each in self._frozen.items()}

    def save_cut(self, cut: JobCut) -> None:
        copies = self._copies[cut.number]
        shards = [copies[shard] for shard in sorted(copies)]
        self._saved = SimCut(cut, shards, self._copied, {})

    def complete_cut(self, request: CompleteCut) -> None:
        """Add a cut to the result, with the states of the scripts."""
        given = self._states_of[request.number]
        self._saved.complete(request.loop, {worker: given[worker, label] for worker, label in request.states})
        self.cuts.append(self._saved)

    def keep_worker_state(self, worker: int, message: KeepWorkerState, state: bytes) -> None:
        """Keep the state of a worker's script for a cut."""
        self._states_of[message.number][worker, message.iteration] = state

    def lost(self, worker: int) -> None:
        self._first_weights.pop(worker, None)
        session = self._sessions.pop(worker, None)
        if session is not None:
            self._swap_generators(session)
            session.end()

    # -- called by sessions -------------------------------------------------------------------------------

    def keep_buffers(self, worker: int, buffers: Mapping[int, torch.Tensor]) -> None:
        """Store the buffers that a worker sent with its commit."""
        self._slots.put(worker, {index: tensor.clone() for index, tensor in buffers.items()})

    def leave_out(self, worker: int) -> None:
        """Exclude the buffers of a worker from the pool, because the worker has left before it finished."""
        self._slots.leave_out(worker)

    def pooled_buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the model's buffers, pooled over the workers."""
        return {name: tensor.clone() for name, tensor in self._slots.pooled().items()}

    @property
    def initial_buffers(self) -> Mapping[str, torch.Tensor]:
        """The initial values of the buffers that were added last."""
        return self._slots.added

    def frozen_beyond(self, specs: Sequence[FrozenSpec]) -> dict[str, torch.Tensor]:
        """Return the run's frozen parameters whose values differ from those that `specs` describes."""
        own = {spec.name: spec.digest for spec in specs}
        return {
            spec.name: self._frozen[spec.name]
            for spec in self.model.frozen
            if own.get(spec.name, spec.digest) != spec.digest
        }

    def snapshot(self) -> WeightsSnapshot:
        """Return what `state_dict` returns, and the versions of all shards."""
        return WeightsSnapshot(self.state_dict(), self.job.versions)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the weights with which the model is evaluated, the frozen parameters, and the pooled buffers."""
        vectors = {
            dtype: torch.empty(size, dtype=torch_dtype(dtype))
            for dtype, size in self.model.layout.sizes.items()
        }
        for store in self.stores:
            weights = store.evaluated()
            for dtype, (start, stop) in store.bounds.bounds.items():
                vectors[dtype][start:stop] = weights[dtype]
        state = named_weights(self.model.layout, vectors)
        state |= self.pooled_buffers()
        return state | {name: tensor.clone() for name, tensor in self._frozen.items()}

    # -- threads ------------------------------------------------------------------------------------------

    def _start(self, worker: int) -> None:
        """Run a worker's function until it registers its model or ends."""
        seed = int(uniform(self.seed, worker, GENERATORS, self._lives[worker]) * 2**53)
        self._lives[worker] += 1
        session = VirtualSession(self, worker, seed)
        self._sessions[worker] = session

        def run() -> None:
            install(session, for_thread=True)
            self._function()

        session.strand = PausableThread(run, f"paceline worker {worker}")
        self._resume(session)

    def _resume(self, session: VirtualSession, message: object = None) -> None:
        """Let a worker's function continue until its session pauses it again or the function ends."""
        self._swap_generators(session)
        session.strand.resume(message)
        if session.strand.error is not None:
            error = session.strand.error
            if isinstance(error, KeyboardInterrupt) or _is_of_guard(error):
                raise error
            if isinstance(error, SystemExit):
                raise RunFailedError(
                    f"worker {session.worker}", f"the script ended with exit code {error.code}"
                )
            raise RunFailedError(
                f"worker {session.worker}", first_line(error), script_traceback(error)
            ) from error
        if session.strand.ended and session.joined:
            if session.core.owes_state and session.callbacks.state is not None:
                session.servers.keep_worker_state(session.callbacks.state(True))
            if warning := session.callbacks.on_finish():
                self.job.carry(session.worker, [Send(COORDINATOR, Warned(warning))], at_once=False)
            self._finish(session)

    def _finish(self, session: VirtualSession) -> None:
        """Let a worker whose function has ended leave the run."""
        self.job.log(session.worker, metrics_of(session).settle_rest(), ended=True)
        self.job.finish(session.worker)

    def _swap_generators(self, session: VirtualSession) -> None:
        if self._running is not session:
            if self._running is not None:
                assert self._running.generators is not None
                self._running.generators = self._running.generators.later(self._running.generator_seed)
                self._running.main = sys.modules["__main__"]
            self._running = session
            if session.generators is None:
                session.generators = GeneratorStates.seeded(session.generator_seed)
            session.generators.give_back()
            sys.modules["__main__"] = session.main


class VirtualSession(Session):
    """The session of a simulated worker. See `paceline.train.session.Session`."""

    def __init__(self, training: Training, worker: int, generator_seed: int) -> None:
        core = training.job.workers[worker].core
        super().__init__(
            core,
            worker=worker,
            workers=training.workers,
            split="auto",
            batch=training.batch,
            joint_batch=training.joint_batch,
            seed=training.seed,
            device="cpu",
            skips_nan=training.skips_nan,
            resumed=training.resumed.job.number if training.resumed is not None else 0,
        )
        self.servers = VirtualServers(training, core, worker)
        self.strand: PausableThread
        self.model: ModelSpec | None = None
        # the initial weights, buffers and optimizer state of parameters that the script adds
        self.initial: tuple[Vectors, Sequence[torch.Tensor], Callable[[ShardSlice], Vectors]]
        self.joined = False  # True once the worker takes part in the job
        self.pulls: int | None = None  # the parameter set that is being pulled; None for all sets
        self.commits = False  # True while the function waits in `commit`
        self.awaits_data = False  # True while the function waits for answers to its requests for data
        self.generators: GeneratorStates | None = None
        self.generator_seed = generator_seed
        self.main = sys.modules["__main__"]  # another module if the function runs a script
        self._training = training
        self._epoch = -1
        # changes of the sync model that were requested before training began
        self._requests: list[tuple[Sequence[SyncModel], int | None]] = []
        # called after the compute time has passed, to send the commit
        self.commit_waits: Callable[[], None] | None = None
        self._passed = False  # True if the compute time of this iteration has passed
        self._gathered = False  # True while the function waits in a barrier or a reduction
        self._held_back = False  # True from `hold_back` until `commit`
        self._groups = GroupsReader()
        self._sparse: set[int] = set()  # the parameters whose gradients are sparse

    # -- the interface of a session -----------------------------------------------------------------------

    @property
    def main_worker(self) -> int:
        return self._training.job.coordinator.main.worker

    def is_main_now(self) -> bool:
        return self.main_worker == self.worker

    def begin(self, model: ModelSpec) -> bool:
        self.model = model
        self._pause()
        training = self._training
        if training.stores:
            return False
        self.allocate(model)
        return True

    def initialize(self, buffers: Sequence[torch.Tensor], state_of: Callable[[ShardSlice], Vectors]) -> None:
        self._training.start_stores(self.weights, buffers, state_of)
        self._pause()
        self._join()

    def await_first_weights(self) -> None:
        self._join()

    def extend(
        self,
        model: ModelSpec,
        weights: Vectors,
        buffers: Sequence[torch.Tensor],
        state_of: Callable[[ShardSlice], Vectors],
    ) -> str:
        self._leave_iteration()
        self.initial = weights, buffers, state_of
        self._training.job.propose(self.worker, model)
        self._pause()
        del self.initial
        return self.core.combined.refused if self.core.combined is not None else ""

    @property
    def observes(self) -> bool:
        return self._training.observes

    @property
    def encodes_weights(self) -> bool:
        return self._training.wire.weights != "float32"

    def pushes_rows(self, parameter: int) -> bool:
        self._sparse.add(parameter)
        return True

    def restart_ordered(self) -> bool:
        """Return True if the current computation must be aborted.

        The first call comes before the first module runs. It lets the whole compute time pass. So if the computation
        is aborted, its gradients are never computed.
        """
        self._end_uncommitted()
        if not self._passed:
            self._passed = self._pass_time()
            return not self._passed
        return False

    def hold_back(self, *, droppable: bool) -> bool:
        self._end_uncommitted()
        if droppable and self.core.may_restart:
            self._passed = self._passed or self._pass_time()
            self._held_back = self._passed
        else:
            # the compute time passes in `commit`, so that the function pauses only once
            self._held_back = True
        return self._held_back

    def pull_again(self) -> None:
        self.pulls = None
        self._drop_residuals()
        self._training.job.pull_again(self.worker)
        self._pause()

    def refresh(self) -> None:
        self._leave_iteration()
        self._drop_residuals()
        self._training.job.refresh(self.worker)
        self._pause()

    def begin_edit(self) -> bool:
        self._leave_iteration()
        if self._training.job.begin_edit(self.worker):
            self._pause()
        return self.core.edits

    def push_edit(self, present: bytes, *, buffers: Mapping[int, torch.Tensor]) -> None:
        self.strand.require_own_thread()
        training = self._training
        self.pulls = None
        pushes = self._pushes(present, (), exact=True) if self.core.edits else []
        self._drop_residuals()
        if buffers:
            training.keep_buffers(self.worker, buffers)
        training.job.push_edit(self.worker, pushes)
        self._pause()

    def sit_out(self) -> None:
        self._leave_iteration()
        self._drop_residuals()
        self._training.job.sit_out(self.worker)
        self._pause()

    def idle(self) -> AbstractContextManager[None]:
        return nullcontext()  # virtual time passes only in calls to the session

    def watched(self) -> tuple[Stopwatch, int] | None:
        if not self.joined:
            return None
        job = self._training.job
        return job.workers[self.worker].stopwatch, job.kernel.now_ticks

    def let_pass(self, length_s: float) -> None:
        """Let virtual time pass, as if the script took so long for what it does now."""
        self._training.job.let_pass(self.worker, length_s)
        self._pause()

    @property
    def now_s(self) -> float:
        return self._training.job.kernel.now_s

    def exchange(self, ask: Callable[[], Sequence[Request]]) -> None:
        self.strand.require_own_thread()
        self._training.job.carry(self.worker, ask(), at_once=not self.joined)
        if self.core.data.waiting:
            self.awaits_data = True
            watched = self.watched()
            before = None if watched is None else watched[0].enter("exchanging", watched[1])
            self._pause()
            if before is not None and (watched := self.watched()) is not None:
                watched[0].enter(before, watched[1])
            self.awaits_data = False

    def epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        if self.weights:
            self.core.reach_epoch(epoch)

    def request_sync(self, sync: str | SyncModel | Sequence[SyncModel], shard: int | None) -> None:
        schedule = read_schedule(sync)
        schedule.require_overlap(self._training.overlap)
        if self.weights:
            self._send_request(schedule.first, shard)
        else:
            self._requests.append((schedule.first, shard))

    def request_checkpoint(self) -> None:
        self._training.job.request_checkpoint(self.worker)

    def commit(self, step: TrainingStep) -> None:
        training, set_index = self._training, step.flags.set_index
        pushes: list[Push] = []
        if step.flags.empty:
            self._drop_residuals()
        else:
            pushes = self._pushes(step.present, self._groups.read(step.groups), set_index)
        shares = [self._share(bounds, set_index) for bounds in training.slices] if pushes else ()
        self.pulls = set_index

        def send() -> None:
            self._passed = self._held_back = False
            self.commit_waits = None
            if step.buffers:
                training.keep_buffers(self.worker, step.buffers)
            training.job.push(
                self.worker, step.flags, pushes, shares=shares, logged=step.logged, observed=step.observed
            )

        if self._passed:
            send()
        else:
            self.commit_waits = send
            training.job.compute(self.worker, droppable=False)
        self.commits = True
        self._pause()
        self.commits = False
        if (watched := self.watched()) is not None:
            watch, now_ticks = watched
            watch.enter(watch.after_step, now_ticks)

    def observe(self, observed: Observation, noted: Sequence[Noted] = ()) -> None:
        if noted:
            self._training.job.log(self.worker, Settled(noted), ended=True)
        # The function may be about to raise an exception, so no virtual time passes in which a message could arrive.
        self._training.job.carry(self.worker, self.core.observe(observed), at_once=True)

    def combine(
        self, call: str, op: Literal["mean", "sum"] = "sum", numbers: bytes = b"", weight: float = 1.0
    ) -> Combined:
        self.strand.require_own_thread()
        self._end_uncommitted()
        if not self.joined and self._training.stores:
            # This worker joins late. The other workers have made the calls before the first step, and do not repeat
            # these calls.
            return combine({self.worker: Contributed(call, 1, op, numbers, weight)})
        self._gathered = True
        self._training.job.combine(self.worker, call, op, numbers, weight, at_once=not self.joined)
        if self.core.combined is None or self.joined:
            self._pause()
        self._gathered = False
        assert self.core.combined is not None
        return self.core.combined

    @property
    def combined_early(self) -> bool:
        """True if the barrier or reduction in which the function waits before its first step has ended."""
        return self._gathered and not self.strand.ended and self.core.combined is not None

    def finish(self) -> None:
        pass  # the worker finishes when its function ends

    # -- called by `Training` -----------------------------------------------------------------------------

    def end(self) -> None:
        """End the function, and release the callbacks that refer back to this session."""
        self.strand.end()
        self.callbacks = Callbacks()
        self.commit_waits = None

    def allocate(self, model: ModelSpec) -> None:
        """Allocate the flat vectors for weights and gradients."""
        for vectors in (self.weights, self.gradients):
            for dtype, size in model.layout.sizes.items():
                vectors[dtype] = torch.zeros(size, dtype=torch_dtype(dtype))
        codec = self._training.wire.gradients
        self._senders = [
            Sender(codec, sliced(self.gradients, bounds)) for bounds in self._training.sliced(model)
        ]

    def _join(self) -> None:
        """Report the epoch, and request the changes of the sync model that had to wait for the initial weights."""
        if self._epoch >= 0:
            self.core.reach_epoch(self._epoch)
        for models, shard in self._requests:
            self._send_request(models, shard)
        self._requests = []

    def _send_request(self, models: Sequence[SyncModel], shard: int | None) -> None:
        self._training.job.request_sync(self.worker, models, shard)

    def _pushes(
        self,
        present: bytes,
        groups: tuple[HyperParameters, ...],
        set_index: int | None = None,
        *,
        exact: bool = False,
    ) -> list[Push]:
        """Return the push for each shard. If `exact` is True, the gradients are not encoded."""
        pushes = []
        for bounds, sender in zip(self._training.slices, self._senders, strict=True):
            vectors = of_set(sliced(self.gradients, bounds), set_index)
            if not exact:
                vectors = sender.arriving(vectors, absent_ranges(bounds, present))
            pushes.append(Push(vectors, present, groups, set_index or 0))
        return pushes

    def _drop_residuals(self) -> None:
        """Forget the residuals of the last encoded gradients, because the next gradient is left out."""
        for sender in self._senders:
            sender.drop()

    def _share(self, bounds: ShardSlice, set_index: int | None) -> float:
        """Return which share of a shard's bytes is pushed: a parameter set, with rows in place of sparse gradients."""
        codec = self._training.wire.gradients
        share = share_of_set(bounds, set_index, codec)
        if not self._sparse:
            return share
        own = bounds if set_index is None else bounds.of_set(set_index)
        saved = 0
        for segment in own.segments:
            if segment.parameter in self._sparse:
                begin = bounds.bounds[segment.dtype][0]
                values = self.gradients[segment.dtype][begin + segment.start : begin + segment.stop]
                shape = self._training.model.layout.parameters[segment.parameter].shape
                row_size = math.prod(shape[1:])
                rows = changed_rows(values, segment.offset, row_size)
                sent = rows * INDEX_BYTES + encoded_bytes(segment.dtype, rows * row_size, codec)
                saved += max(0, encoded_bytes(segment.dtype, values.numel(), codec) - sent)
        return share - saved / max(1, bounds.encoded_bytes(codec))

    def _leave_iteration(self) -> None:
        """Prepare for a call between two iterations, after which all parameter sets are pulled."""
        self.strand.require_own_thread()
        self._end_uncommitted()
        self.pulls = None

    def _end_uncommitted(self) -> None:
        """If `step()` raised an exception instead of committing, let the time of the computation pass."""
        if self._held_back:
            if not self._passed:
                self._pass_time(droppable=False)
            self._passed = self._held_back = False

    def _pause(self) -> Any:
        """Let virtual time pass. Return the result of `PausableThread.pause`."""
        self.callbacks.before_exchange()
        return self.strand.pause()

    def _pass_time(self, *, droppable: bool = True) -> bool:
        self._training.job.compute(self.worker, droppable=droppable)
        passed: bool = self._pause()
        return passed


class VirtualServers(Servers):
    """The requests of a simulated worker to the servers. See `paceline.train.session.Servers`."""

    def __init__(self, training: Training, core: Worker, worker: int) -> None:
        self._training = training
        self._core = core
        self._worker = worker

    def fetch_model(self, digest: Callable[[FrozenSpec], str]) -> Mapping[str, torch.Tensor] | None:
        return self._training.state_dict() if self._training.stores else None

    def fetch_evaluated(self) -> Mapping[str, torch.Tensor]:
        return self._training.state_dict()

    def fetch_buffers(self) -> Mapping[str, torch.Tensor]:
        return self._training.pooled_buffers()

    def fetch_initial_buffers(
        self, specs: Sequence[BufferSpec], own: Sequence[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        late = self._core.holds_job_weights and self._core.extended is None
        return self._training.pooled_buffers() if late else self._training.initial_buffers

    def fetch_frozen(self, specs: Sequence[FrozenSpec]) -> Mapping[str, torch.Tensor]:
        return self._training.frozen_beyond(specs)

    def keep_states(self, position: LoopPosition, states: Sequence[memoryview]) -> None:
        self._training.states = position, b"".join(states)

    def fetch_states(self, address: str) -> tuple[LoopPosition, bytes | bytearray] | None:
        return self._training.states

    def keep_worker_state(self, state: Sequence[memoryview]) -> None:
        message = self._core.give_state()
        self._training.keep_worker_state(self._worker, message, b"".join(state))
        self._training.job.carry(self._worker, [Send(COORDINATOR, message)], at_once=False)

    def fetch_worker_states(self) -> tuple[bytes | None, bytes | None]:
        resumed = self._training.resumed
        return (None, None) if resumed is None else resumed.states_for(self._worker)

    def fetch_state(self) -> list[tuple[ShardSlice, Vectors]]:
        return [
            (store.bounds, {key: value.clone() for key, value in store.optimizer_state().items()})
            for store in self._training.stores
        ]


def _is_of_guard(error: BaseException) -> bool:
    """Return True if the guard has ended the run because of what a worker has just reported."""
    return isinstance(error, RunFailedError) and error.process == DIVERGED


def changed_rows(values: torch.Tensor, offset: int, row_size: int) -> int:
    """Return the number of rows that are not zero.

    >>> values = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 3.0])
    >>> changed_rows(values, offset=0, row_size=2)
    2

    Args:
        values: consecutive elements of a flattened gradient. An incomplete row is counted as a whole row.
        offset: index of the first element within the gradient.
        row_size: number of elements per row.
    """
    rows: int = torch.unique_consecutive((values.nonzero().flatten() + offset) // row_size).numel()
    return rows


def share_of_set(bounds: ShardSlice, set_index: int | None, codec: str) -> float:
    """Return which share of a shard's encoded bytes belongs to a parameter set; 1.0 if `set_index` is None."""
    if set_index is None:
        return 1.0
    return bounds.of_set(set_index).encoded_bytes(codec) / max(1, bounds.encoded_bytes(codec))


def computed_by() -> str:
    """Describe what affects the last bits of gradients: torch's version, CPU capability and number of threads."""
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {threads} thread{'s' * (threads > 1)}"


# -- A blocking function that runs on its own thread and can be paused and resumed ---------------------------
#
# Threads are used instead of coroutines, because the user's function is ordinary blocking code, and because
# torch stores its modes (such as grad mode and autocast) per thread. Only one of the threads runs at any time: the
# thread that resumes such a function (a *strand*) waits until the strand pauses or ends.

PATIENCE = 100  # maximum number of times that a function may pause after it was told to end
CHECK_INTERVAL_S = 0.02  # time between two checks of whether the function has ended


class _Ended(BaseException):
    """Raised to end a strand's function. This is a `BaseException`, so `except Exception` does not catch it."""


class PausableThread:
    """Runs a function on a separate thread, and can pause and resume it.

    Args:
        function: the function to run.
        name: name of the thread.

    Attributes:
        ended: True if the function has ended.
        error: the exception that the function raised; None if there was no exception.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.ended = False
        self.error: BaseException | None = None
        # Each lock is acquired by one thread and released by the other. Semaphores would be slower, because they are
        # implemented in Python and consist of several locks.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._message: Any = None
        self._ending = False
        self._refusals = 0  # number of pauses of the function after it was told to end
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def resume(self, message: Any = None) -> None:
        """Let the function run until it pauses or ends. In the function, `pause` returns `message`.

        Ctrl-C may interrupt this method at any point. After that, only `end` may be called.
        """
        self._message = message
        self._go.release()
        self._back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> Any:
        """Pause until the strand is resumed. Return the message from `resume`. Call this only from the strand."""
        if not self._ending:
            self._back.release()
            self._go.acquire()
        if self._ending:
            self._refusals += 1
            # After so many attempts, the function cannot be stopped. So block it until the process exits.
            if self._refusals > PATIENCE:
                threading.Event().wait()
            raise _Ended
        return self._message

    def require_own_thread(self) -> None:
        """Raise `UsageError` unless the caller runs on the strand's thread. Only this thread can be paused."""
        if threading.current_thread() is not self._thread:
            raise UsageError(
                "In a simulation, call Paceline and iterate over its loaders only on the thread that runs the "
                "training function."
            )

    def end(self) -> None:
        """End the function by raising an exception in it at its current or next pause.

        After Ctrl-C, it is unknown which thread is running. This does not matter, because resuming the strand again
        is harmless here.

        Raises:
            UsageError: the function does not end.
        """
        self._ending = True
        while not self.ended and self._refusals <= PATIENCE:
            if self._go.locked():
                self._go.release()
            self._thread.join(CHECK_INTERVAL_S)
        if not self.ended:
            raise UsageError(
                f"{self._thread.name} cannot be stopped, because its function catches BaseException and continues. "
                "Catch only Exception."
            )
        self._thread.join()

    def _run(self, function: Callable[[], object]) -> None:
        self._go.acquire()
        try:
            if not self._ending:
                function()
        except _Ended:
            pass
        except SystemExit as end:
            self.error = end if end.code not in (None, 0) else None
        except BaseException as error:
            # The caller of `resume` handles the function's exceptions.
            self.error = error
        finally:
            self.ended = True
            if self._back.locked():
                self._back.release()
