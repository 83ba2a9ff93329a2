"""The protocol of a worker, without I/O: the messages that it sends and waits for, and the flags of its pushes.

    look          ModelRequested -> ModelDescribed from the coordinator (only before the worker registers)
    save          MainRequested -> MainChosen from the coordinator
    register      Register -> Started from the coordinator -> first weights from every shard
    iteration     compute -> Commit to every shard -> Answer from every shard -> compute the next iteration
                  with overlap off: Commit -> Committed from every shard -> AllCommitted -> PullAllowed
                  -> PullRequested -> Answer
    restart       RestartOrdered during a computation -> PullRepeated to every shard -> Answer from every shard
                  -> compute again
    calls         Contributed -> Combined from the coordinator
    extension     Contributed -> ModelExtended from the coordinator -> new connections -> all weights from every shard
    end           WorkerFinished to every server and to the coordinator

The host of this class moves bytes and tensors, runs the training script and determines how long a computation takes.
The class does not run the sync model; it only does what the model requires of workers. The class does not store the
index of the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import structs

from ..errors import ConfigurationError, ProtocolError, SyncRefusedError, TakenOutError
from ..state import stateful
from ..sync.events import Change, Edit, PushFlags, Stop, maker
from ..sync.model import SyncModel, agree_on_means
from ..sync.notation import notation, parse_shards, require_shards
from ..sync.plugins import require_importable
from ..sync.schedule import Schedule
from .data_feed import DataFeed
from .layout import ModelSpec, round_robin
from .messages import (
    MOST_OBSERVED,
    AllCommitted,
    Answer,
    ChangePublished,
    CheckpointRequested,
    Combined,
    Commit,
    Committed,
    Content,
    Contributed,
    DataGranted,
    InitialWeights,
    InitialWeightsRequested,
    IterationFinished,
    IterationStarted,
    KeepWorkerState,
    LoopEntered,
    MainChosen,
    MainRequested,
    Message,
    ModelDescribed,
    ModelExtended,
    ModelRequested,
    Observation,
    Paused,
    PlanPublished,
    PullAllowed,
    PullRepeated,
    PullRequested,
    PushesObserved,
    Refused,
    Register,
    RestartOrdered,
    Resumed,
    StandInAllowed,
    Started,
    StatesDecided,
    StateWanted,
    StoodIn,
    SyncRequested,
    TakenOut,
    TimeSpent,
    TrainingStopped,
    WorkerFinished,
    WorkingDirectory,
)
from .metrics import Noted, UnsentMetrics
from .requests import COORDINATOR, PROCEED, Abort, Request, Send, server_peer

ADDED = "DistributedOptimizer() or add_param_group() with parameters that are not trained yet"
"""The name of a call that extends the model, in messages to other workers."""

NO_RESTART = (-1, -1)

EMPTY = PushFlags(empty=True)

NO_EDIT = PushFlags(empty=True, warm_up=True)
"""The flags of a push in the place of an edit, by a worker whose edit does not count."""

_commit = maker(Commit, PushFlags, ("shard", "iteration", "content", "pulls", "drawn"))


@stateful(
    history="last_commit",
    fixed="placement stays_lockstep _schedule _workers _shards _servers _last_first _every_shard _overlap",
    about={"main_worker": "scripts", "asks_for_main": "scripts", "directory": "scripts"},
)
class Worker:
    """A worker of a run: it turns the steps of the training script and the received messages into requests.

    Args:
        schedule: the sync models of the job, and when they change.
        workers: number of workers.
        shards: number of shards.
        servers: number of servers. See `layout.round_robin`.
        overlap: False if no worker may pull until all workers have pushed to all shards.

    Attributes:
        iteration: label of the current iteration, which ends when all shards have answered the worker's pull.
        waiting_for: what the worker waits for: "start" (of training), "commits" (a `Committed` from every shard),
            "turn" (a `PullAllowed`) or "answers" (an `Answer` from every shard); "" if it does not wait.
        last_commit: the last commit that the worker has sent to shard 0; None before the first commit.
        left: True if the worker has finished and left the run.
        in_place: True if the last answer told the worker to read the weights directly from the servers' memory.
        described: the answer to the worker's last `ModelRequested`; None if it has not arrived.
        main_worker: the main worker, according to the last message that this worker has received about it.
        asks_for_main: True while a `MainRequested` has not been answered.
        directory: the working directory of this process when the worker registered; None if it is unknown.
        started: the `Started` message that the worker has received; None before training starts.
        needs_significance: True if each push must contain its `PushFlags.significance`.
        data: the leases that the worker has received, and what its script has drawn from them.
        may_restart: True if the sync model may order the worker to abort and restart an iteration.
        lockstep: True if the sync model keeps all workers in lockstep.
        stays_lockstep: True if every sync model of the schedule keeps all workers in lockstep.
        updates: number of updates that shard 0 had applied when it last answered; 0 before its first answer.
        samples: number of samples in all workers' pushes that shard 0 had received, and not dropped, when it last
            answered; 0 before its first answer.
        combined: the result of the worker's last barrier or reduction; None if it has not arrived.
        extended: the message that ends the worker's last extension; None if it has not arrived.
        extension: number of the last extension of the model that the worker has been told of; 0 if there is none.
        cut: number of the cut for which the state of the script is wanted; 0 if no state is wanted. Under lockstep
            models, the state is wanted before each push until the shards have been cut.
        asked: number of changes of the sync model that the script has requested.
        pulls_again: True while the worker waits for weights during an iteration, for example to restart it.
        change: the change of the model with which the worker flags its next push; None if there is none.
        placement: the servers of the shards.
    """

    def __init__(
        self, schedule: Schedule, *, workers: int, shards: int, servers: int, overlap: bool = True
    ) -> None:
        self.iteration = 0
        self.waiting_for = ""
        self.last_commit: Commit | None = None
        self.left = False
        self.in_place = False
        self.described: ModelDescribed | None = None
        self.main_worker = 0
        self.asks_for_main = False
        self.directory: WorkingDirectory | None = None
        self.started: Started | None = None
        self.data = DataFeed()
        self.data.workers = workers
        self.updates = self.samples = 0
        self.combined: Combined | None = None
        self.extended: ModelExtended | None = None
        self.extension = 0
        self.cut = 0
        self.asked = 0
        self.pulls_again = False
        self.change: Change | None = None
        self._schedule = schedule
        self._workers = workers
        self._shards = shards
        self.placement = round_robin(shards, servers)
        self._servers = [server_peer(server) for server in self.placement.server_of]  # server of each shard
        self._last_first = list(enumerate(self._servers))[::-1]
        self._every_shard = frozenset(range(shards))
        self._overlap = overlap
        self._awaited: set[int] = set()  # shards that have not yet sent what the worker waits for
        self._first = True  # True until the worker's first weights have arrived
        self._steps = list(enumerate(schedule.steps[1:]))  # steps of the schedule yet to be requested
        self._epoch = 0
        self._wanted = schedule.first  # models of all shards after all changes that the worker has requested
        self._calls = 0  # number of barriers and reductions that the script has called
        self._calls_since_step = 0  # number of these calls since the script's last step or start of an epoch
        self._checkpoints = 0  # number of checkpoints that the script has requested
        # number of a cut for which all shards have been cut, until the state of the script has been given; else 0
        self._wanted_state = 0
        self._given = 0  # number of the cut for which a state was given last
        self._early: list[Send] = []  # requests made before training began
        self._flagged: Change | None = None  # the flag of the push in flight
        # the next stop, and the iteration at or after which the worker stops
        self._plan: tuple[Stop, int] | None = None
        self._paused = False  # True while the run has too few workers
        # True once workers in lockstep may make the same step in different iterations
        self._uneven = False
        self._restart = NO_RESTART  # (iteration, attempt) that must be aborted
        self._attempt = 0  # number of times that the current iteration was restarted
        self._progress: int | None = None  # if the worker is late: the round from which it must continue
        self._clips = False  # True if the script clips the gradient that is applied
        self._edit: Edit | None = None  # the flag of the edit that the script is making
        # samples of the last push, if the script has several optimizers
        self._batch_samples: int | None = None
        self._edits_begun = 0  # number of the script's next edit
        self._observed: list[Observation] = []  # observations that were not sent to the coordinator yet
        self._unsent = UnsentMetrics()  # metrics that were not sent to the coordinator yet
        # True once the workers may have made different numbers of iterations: under a model that does not keep them
        # in lockstep, or because each of them has passed a change of the model in its own iteration.
        self._relaxed = False
        self.stays_lockstep = schedule.lockstep
        self._follow(schedule.first)

    @property
    def joined_late(self) -> bool:
        """True if the worker has joined a run in progress, in which no worker waits for initial weights."""
        return self.holds_job_weights and not self.resumed

    @property
    def holds_job_weights(self) -> bool:
        """True if the worker's first weights are those of the job, and not the initial weights of a worker."""
        return self.started is not None and self.started.initializer < 0

    @property
    def resumed(self) -> int:
        """Number of the cut that the run resumes; 0 if there is none, or if the worker has joined a run in progress."""
        return 0 if self.started is None else self.started.resumed

    @property
    def paused(self) -> bool:
        """True if the worker must not begin another iteration, because the run has too few workers.

        Before a change of the model, the worker begins one more iteration, because no worker joins before the change is
        made.
        """
        return self._paused and self.change is None

    @property
    def restart_ordered(self) -> bool:
        """True if the current computation must be aborted."""
        return self._restart[0] == self.iteration

    @property
    def stops_at(self) -> int | None:
        """The iteration at or after which the worker stops for a barrier; None if it has no plan."""
        return None if self._plan is None else self._plan[1]

    @property
    def edits(self) -> bool:
        """True if this worker is in the block of an edit, and pushes its edit."""
        return self._edit is not None

    @property
    def partly_served(self) -> bool:
        """True if some shards, but not all, have sent what the worker waits for."""
        return bool(self.waiting_for) and 0 < len(self._awaited) < self._shards

    @property
    def is_awaited(self) -> bool:
        """True if other workers may have to wait until this worker pushes."""
        return not self._independent or self.change is not None

    @property
    def may_stand_in(self) -> bool:
        """True if the worker may push without a gradient while its script waits in a barrier or a reduction.

        In lockstep, all scripts must make their calls after the same number of iterations, and no worker may go on
        without this worker. There are three exceptions. First, a worker that has pushed without a gradient, during an
        evaluation, makes its remaining steps later than the other workers. Second, some workers may have received more
        of the data that lost workers have returned. Third, a change of the model reaches the workers in different
        iterations. A worker that waits in a call must still pass the change, because the other workers wait for its
        flagged push. From then on, the workers have made different numbers of iterations.
        """
        return self.started is not None and (self._uneven or self._relaxed or self.change is not None)

    @property
    def asks_for_checkpoints(self) -> bool:
        """True if the script has requested a checkpoint."""
        return self._checkpoints > 0

    @property
    def owes_state(self) -> bool:
        """True if the worker has been told of a cut, and has not given the state of its script for this cut."""
        return self.cut != 0 and self.cut != self._given

    def awaits(self, shard: int) -> bool:
        """Return True if the worker waits for an answer from this shard."""
        return self.waiting_for == "answers" and shard in self._awaited

    def outlook(self, most_workers: int) -> dict[str, object]:
        """Return the values on which requests depend: of the content of `Started`, only `joined_late`."""
        return {"started": None if self.started is None else self.joined_late}

    # -- actions of the script ----------------------------------------------------------------------------

    def request_main(self) -> list[Request]:
        """Ask which worker is the main worker now."""
        self.asks_for_main = True
        return [Send(COORDINATOR, MainRequested())]

    def request_checkpoint(self) -> list[Request]:
        """Ask for a checkpoint. The run goes on meanwhile."""
        self._checkpoints += 1
        return [Send(COORDINATOR, CheckpointRequested(self._checkpoints))]

    def give_state(self) -> KeepWorkerState:
        """Return the message that gives the state of the script, for the cut for which the state is wanted."""
        self._given, self._wanted_state = self.cut, 0
        return KeepWorkerState(self.cut, self.iteration - 1)

    def request_model(self) -> list[Request]:
        """Ask for the model of the job before the script has trained. `described` is None until the answer arrives."""
        self.described = None
        return [Send(COORDINATOR, ModelRequested())]

    def register(self, model: ModelSpec, directory: WorkingDirectory | None = None) -> list[Request]:
        """Register the model that the script trains. The host calls this before the first gradient is computed.

        Args:
            model: the model.
            directory: the working directory of this process; None if it has none.
        """
        self.waiting_for = "start"
        self.directory = directory
        return [Send(COORDINATOR, Register(model, self.data.samples, directory))]

    def initialize(self) -> list[Request]:
        """Send every shard its initial weights. Only the initializer calls this."""
        return [Send(server, InitialWeights(shard)) for shard, server in enumerate(self._servers)]

    def push(
        self,
        flags: PushFlags = PushFlags(),
        contents: Sequence[Content] | None = None,
        *,
        busy_s: float | None = None,
        idle: bool = False,
    ) -> list[Request]:
        """Commit the current iteration to every shard.

        Args:
            flags: the properties of the push that the host knows.
            contents: content of the push for each shard; None in virtual time.
            busy_s: time that the worker took for the iteration, not including the time that it waited for other
                workers; None if it is unknown.
            idle: True if the script is not training at the moment. Data that the script has drawn then belongs to a
                later push.
        """
        requests = self._due() if self._steps else []
        iteration, plan = self.iteration, self._plan
        self._flagged, self.change = self.change, None
        self.cut = self._wanted_state
        stop = None
        if plan is not None and self._flagged is None and iteration >= plan[1]:
            stop, self._plan = plan[0], None
        progress, self._progress = self._progress, None
        data = self.data
        samples, again = None if idle else data.samples, False
        weight = None if idle else data.weight
        if flags.set_index is not None and not idle:
            # If another optimizer steps without a new batch, its push counts the samples of the previous batch again.
            if samples is None and not data.has_drawn:
                samples, again = self._batch_samples, self._batch_samples is not None
            self._batch_samples = samples
        if not idle:
            self._unsent.pushed(samples if weight is None else weight)
            self._calls_since_step = 0
        warm_up = flags.warm_up or (data.warm_up and not idle)
        ahead = data.push(None if flags.empty else busy_s) if data.used and not idle else []
        flags = structs.replace(
            flags,
            stop=stop,
            change=self._flagged,
            progress=progress,
            samples=samples,
            weight=weight,
            repeated=again,
            warm_up=warm_up,
        )
        # Every worker sends to the shards in descending order, because the last layers' gradients are ready first.
        for shard, server in self._last_first:
            content = contents[shard] if contents is not None else None
            self.last_commit = _commit(flags, shard, iteration, content, self._overlap, data.pushed)
            requests.append(Send(server, self.last_commit))
        if self._notifies or self._flagged is not None:
            finished = IterationFinished(
                iteration=iteration,
                superstep=stop.superstep if stop is not None else None,
                change=self._flagged.number if self._flagged is not None else None,
                attempt=self._attempt,
                warm_up=warm_up,
                outside_ticks=flags.outside_ticks,
            )
            requests.append(Send(COORDINATOR, finished))
        self._await("answers" if self._overlap else "commits")
        if ahead:
            requests += ahead
        return requests

    def observe(self, observed: Observation, *, report: bool = True) -> list[Request]:
        """Keep an observation about a push, for the guard of the run.

        Args:
            observed: the observation.
            report: True to send the coordinator all observations that are kept.
        """
        self._observed.append(observed)
        return self._report_observed() if report or len(self._observed) == MOST_OBSERVED else []

    def _report_observed(self) -> list[Request]:
        if not self._observed:
            return []
        observed, self._observed = tuple(self._observed), []
        return [Send(COORDINATOR, PushesObserved(observed))]

    def log(
        self, noted: Sequence[Noted], now_s: float, *, report: bool = True, ended: bool = False
    ) -> list[Request]:
        """Keep what the script has logged. Call this method after the push that follows.

        Args:
            noted: what the script has logged since the last call.
            now_s: the current time in seconds, on the clock that gave the times in `noted`.
            report: True to send the coordinator all metrics that are kept.
            ended: True if no push has followed, because the script has ended.
        """
        if noted:
            self._unsent.take(noted, ended=ended)
        return self._unsent.report(now_s) if report or self._unsent.fills_a_message else []

    def pull_again(self, *, restart: bool = True) -> list[Request]:
        """Pull the current weights again during an iteration. No shard delays its answer.

        Args:
            restart: True if the computation of the iteration was aborted and is restarted.
        """
        if restart:
            self._attempt = self._restart[1] + 1
        self._restart = NO_RESTART
        return self._repeat(restart=restart)

    def begin_edit(self) -> list[Request]:
        """Begin an edit of the weights. When the worker no longer waits, `edits` tells whether it pushes its edit.

        In lockstep, the worker has the newest weights. Otherwise, the worker pulls the newest weights.
        """
        number, self._edits_begun = self._edits_begun, self._edits_begun + 1
        if self.lockstep:
            self._edit = Edit(number=number, sole=False)
            return []
        return self._repeat(restart=False, edit=number)

    def stand_in(self, contents: Sequence[Content] | None = None) -> list[Request]:
        """Commit the current iteration without a gradient, because the script is not training at the moment."""
        return self.become_uneven() + self.push(EMPTY, contents, idle=True)

    def become_uneven(self) -> list[Request]:
        """Tell the coordinator that this worker makes its remaining steps earlier or later than the other workers."""
        if not self.lockstep or self._uneven:
            return []
        self._uneven = True
        return [Send(COORDINATOR, StoodIn())]

    def sit_out(self, contents: Sequence[Content] | None = None) -> list[Request]:
        """Commit the current iteration without a gradient, because the worker has no part in a joint batch.

        All workers make this iteration, so that they remain in lockstep.
        """
        return self.push(EMPTY, contents, idle=True)

    def push_edit(self, contents: Sequence[Content] | None = None) -> list[Request]:
        """Commit the current iteration: push the worker's edit, unless the edit of another worker counts."""
        edit, self._edit = self._edit, None
        # Models predict the durations of iterations with gradients. An edit takes much less time, so it is flagged as a
        # warm-up.
        flags = NO_EDIT if edit is None else PushFlags(edit=edit, warm_up=True)
        return self.push(flags, contents, idle=True)

    def cancel_edit(self) -> None:
        """End the block of an edit without a push."""
        self._edit = None

    def contribute(
        self, call: str, op: Literal["mean", "sum"], numbers: bytes, weight: float
    ) -> list[Request]:
        """Take part in a barrier or a reduction. `combined` is None until the call ends. See `Contributed`."""
        return self._call(call, op=op, numbers=numbers, weight=weight)

    def propose(self, model: ModelSpec) -> list[Request]:
        """Propose an extended model, because the script has added parameters.

        When all workers have proposed their extended models, `extended` is set. If the calls differ, `combined` is set
        instead.
        """
        return self._call(ADDED, model=model)

    def _call(self, call: str, **contents: Any) -> list[Request]:
        """Make a call that every worker must make."""
        self.combined = self.extended = None
        self._calls += 1
        since_step, self._calls_since_step = self._calls_since_step, self._calls_since_step + 1
        may_push = self.may_stand_in
        contribution = Contributed(call, self._calls, may_push=may_push, since_step=since_step, **contents)
        return [Send(COORDINATOR, contribution)]

    def await_extended_weights(self) -> None:
        """Wait for the weights of the extended model, which every shard sends when the worker has connected again."""
        self.pulls_again = True
        self._await("answers")

    def finish(self, *, early: bool = False, spent: TimeSpent | None = None) -> list[Request]:
        """Leave the run, because the script has finished or, if `early`, because the worker was asked to leave.

        The last of the requests sends the goodbye to the coordinator.
        """
        self.waiting_for, self.left = "", True
        goodbye = WorkerFinished(self.data.end(), early, spent)
        peers = [*dict.fromkeys(self._servers), COORDINATOR]
        return [*self._report_observed(), *(Send(peer, goodbye) for peer in peers)]

    def reach_epoch(self, epoch: int) -> None:
        """Record that the script begins an epoch (one pass over the worker's part of the data), counted from 0."""
        if epoch > self._epoch:
            self._epoch, self._calls_since_step = epoch, 0

    def require_clippable(self) -> None:
        """Record that the script clips the gradient that is applied.

        Raises:
            SyncRefusedError: the norm of this gradient is not known under the sync model in force, or under a model
                that the schedule or the script has requested.
        """
        for models in (self._models, self._wanted, *(step.models for _, step in self._steps)):
            _require_clippable(models)
        self._clips = True

    def request_sync(self, models: Sequence[SyncModel], shard: int | None = None) -> list[Request]:
        """Request, for the script, that all shards or one shard change to another sync model.

        Raises:
            ConfigurationError: the job cannot use this model, or chooses its models itself.
        """
        if self._schedule.auto:
            raise SyncRefusedError(
                f"the script requests the sync model {notation(models)}, but this run chooses its sync models itself "
                "(--sync auto). Remove the call of paceline.set_sync, or start the run with another --sync."
            )
        if shard is not None:
            if not 0 <= shard < self._shards or len(models) != 1:
                raise ConfigurationError(
                    f"shard is {shard}, expected a number from 0 to {self._shards - 1}; the number of sync models "
                    f"for this shard is {len(models)}, expected 1."
                )
            all_models = list(self._wanted) * (self._shards if len(self._wanted) == 1 else 1)
            all_models[shard] = models[0]
            models = all_models
        require_shards(models, self._shards)
        for model in models:
            model.require_runnable(self._workers)
            require_importable(model)
        if self._clips:
            _require_clippable(models)
        self._wanted = tuple(models)
        request = Send(COORDINATOR, SyncRequested("script", self.asked, notation(models)))
        self.asked += 1
        if self.started is None:
            self._early.append(request)
            return []
        return [request]

    # -- received messages --------------------------------------------------------------------------------

    def handle(self, message: Message) -> list[Request]:
        """Process a message and return the requests to the host.

        Raises:
            ConfigurationError: the coordinator has refused this worker.
            ProtocolError: workers do not receive messages of this type.
            TakenOutError: this worker is no longer part of the run.
        """
        match message:
            case Answer():
                if message.v_train is not None:
                    self._progress = max(message.v_train, self._progress or 0)
                self.in_place = message.in_place
                if message.edits and message.shard == 0:
                    self._edit = Edit(number=self._edits_begun - 1, sole=True)
                if message.shard == 0:
                    self.updates, self.samples = message.version, message.samples
                    if self._first and self.joined_late:
                        self._edits_begun = message.next_edit
                    if message.cut:
                        self.cut = message.cut
                return self._answered() if self._has_come(message.shard, "answers") else []
            case Committed():
                if not self._has_come(message.shard, "commits"):
                    return []
                self.waiting_for = "turn"
                return [Send(COORDINATOR, AllCommitted(self.iteration, self.updates))]
            case PullAllowed():
                return self._pull() if self.waiting_for == "turn" else []
            case PlanPublished():
                self._plan = message.stop, message.iteration
            case ChangePublished():
                self.change, self._plan = message.change, None
            case RestartOrdered():
                if message.iteration == self.iteration and message.attempt < self._attempt:
                    return []  # a later attempt is in progress already
                self._restart = message.iteration, message.attempt
                return [Abort(message.iteration)] if self.restart_ordered and not self.waiting_for else []
            case DataGranted() | LoopEntered() | StatesDecided():
                self.data.handle(message)
            case Combined():
                self.combined = message
            case MainChosen():
                self.main_worker, self.asks_for_main = message.worker, False
            case ModelDescribed():
                self.described = message
            case InitialWeightsRequested():
                return [Send(self._servers[message.shard], InitialWeights(message.shard))]
            case ModelExtended():
                self.extended, self.extension = message, message.number
            case StandInAllowed():
                self._uneven = True
            case StateWanted():
                self.cut = self._wanted_state = message.number
                self._given = 0  # an earlier state was taken before the last push of the cut
            case Paused():
                self._paused = True
            case Resumed():
                self._paused = False
            case TrainingStopped():
                self.data.stopped.add(message.loop)
            case Started():
                return self._start(message)
            case Refused():
                raise ConfigurationError(message.reason)
            case TakenOut():
                raise TakenOutError(
                    f"worker {message.worker} was taken out of the run: {message.reason}. The run continues without "
                    "it, and nothing that it has computed since then is used."
                )
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected by a worker")
        return []

    def _start(self, message: Started) -> list[Request]:
        self.started = message
        self.iteration, self.extension = message.iteration, message.extension
        self.main_worker = message.main_worker
        if message.sync:
            self._follow(parse_shards(message.sync))
        self._await("answers")
        early, self._early = self._early, []
        return [*early]

    def _await(self, what: str) -> None:
        self.waiting_for = what
        self._awaited = set(self._every_shard)

    def _has_come(self, shard: int, what: str) -> bool:
        """Record what a shard has sent. Return True if the worker has now received everything that it waits for."""
        if self.waiting_for != what:
            return False
        self._awaited.discard(shard)
        return not self._awaited

    def _repeat(self, *, restart: bool, edit: int | None = None) -> list[Request]:
        self.pulls_again = True
        self._await("answers")
        return [
            Send(server, PullRepeated(shard, iteration=self.iteration, restart=restart, edit=edit))
            for shard, server in enumerate(self._servers)
        ]

    def _pull(self) -> list[Request]:
        self._await("answers")
        return [
            Send(server, PullRequested(shard, self.iteration)) for shard, server in enumerate(self._servers)
        ]

    def _answered(self) -> list[Request]:
        """Continue when every shard has answered: start the first or next iteration, or restart the current one."""
        self.waiting_for = ""
        if self._first or self.pulls_again:
            first, self._first, self.pulls_again = self._first, False, False
            if first and self.joined_late and self.may_restart:
                return [Send(COORDINATOR, IterationStarted(self.iteration)), PROCEED]
            return [PROCEED]
        if self.data.used:
            self.data.answered()
        self.iteration += 1
        self._attempt = 0
        if self._flagged is not None:
            self._relaxed = True
            self._follow(parse_shards(self._flagged.sync))
            self._flagged = self._progress = None  # the new model counts rounds from 0 again
        elif not self.may_restart:
            return [PROCEED]
        return [Send(COORDINATOR, IterationStarted(self.iteration)), PROCEED]

    # -- the sync model -----------------------------------------------------------------------------------

    def _due(self) -> list[Request]:
        """Return a request for each step of the schedule that the worker has reached since the last call."""
        requests: list[Request] = []
        while self._steps:
            number, step = self._steps[0]
            reached, begin = (
                (self._epoch, step.epoch) if step.iteration is None else (self.iteration, step.iteration)
            )
            if begin is None or reached < begin:
                break
            self._steps.pop(0)
            self._wanted = step.models
            requests.append(Send(COORDINATOR, SyncRequested("schedule", number, step.sync)))
        return requests

    def _follow(self, models: Sequence[SyncModel]) -> None:
        """Store what these models require of workers."""
        self._models = tuple(models)
        self.needs_significance = any(model.needs_significance for model in models)
        self.may_restart = any(model.needs_starts for model in models)
        self._notifies = models[0].at_coordinator() is not None
        self.lockstep = all(model.lockstep for model in models)
        self._relaxed = self._relaxed or not self.lockstep
        self._independent = all(model.independent for model in models)


def _require_clippable(models: Sequence[SyncModel]) -> None:
    """Raise `SyncRefusedError` if the shards may disagree about the pushes in a mean under these models."""
    if not agree_on_means(models):
        raise SyncRefusedError(
            f"clip_grad_norm() needs the norm of the mean of the workers' gradients, but under {notation(models)}, "
            "each shard may average the gradients of a different set of workers, so there is no mean of all shards. "
            "Use bsp, elastic-bsp or a model that applies each gradient on arrival, such as asp, for all shards; or "
            "clip each worker's own gradient with torch.nn.utils.clip_grad_norm_()."
        )
