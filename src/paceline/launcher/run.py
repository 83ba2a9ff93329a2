"""One run, from the start of its processes to the end of the last one.

The order of an end, however it has come about: the cause is found; workers that still run are ended, if the run has
failed or was interrupted; the weights are collected and saved; servers write their traces and end; the rest of what a
run leaves behind is written. A second Ctrl-C skips what still takes time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import cloudpickle
from rich.console import Console

from ..errors import ConfigurationError, PacelineError, RunFailedError
from ..runtime.coordinator import Coordinator
from ..runtime.job import Job, claim_run_dir
from ..runtime.reader import Reader, WeightsSnapshot
from ..sync import Conditions
from ..sync.user_conditions import local_conditions
from .interruption import Interruption
from .local import LocalEngine, Placement
from .progress import Progress
from .results import RunResult, save_weights, summarize, write_summary
from .waiting import Waiting

__all__ = ["start"]

log = logging.getLogger("paceline.run")

POLL_INTERVAL_S = 0.05
CAUSE_TIMEOUT_S = 5.0  # from the first consequence of a failure on: for the process that caused it to end
ANSWER_TIMEOUT_S = 5.0  # without a byte of a server's weights
GRACE_S = 10.0  # for processes that have nothing left to do
LAST_WORDS_S = 0.5  # for servers of a run that has failed: to write their traces


def start(
    job: Job,
    worker_arguments: Sequence[str],
    worker_input: bytes,
    path: Sequence[str],
    *,
    console: Console,
    snapshot_every_s: float | None = None,
    placement: Placement | None = None,
) -> RunResult:
    """Start the processes of a run, wait for its end, collect. See `launch`.

    Args:
        job: the run; its directory is made here, when nothing can be refused any more.
        worker_arguments: of each worker's process.
        worker_input: what it finds on its standard input.
        path: where the servers look for modules with conditions.
        console: for the progress.
        snapshot_every_s: see `launch`.
        placement: see `launch`.
    """
    if placement is None:
        placement = Placement.on_loopback(job)
    else:
        placement.require_for(job)
    server_input = _for_servers(job, path)
    listener = Coordinator.listen_for(job, placement.coordinator)
    try:
        job = claim_run_dir(job)
    except ConfigurationError:
        listener[0].close()
        raise
    with Interruption() as interruption:
        run = Run(job, Coordinator(job, *listener), placement, console, interruption, snapshot_every_s)
        return run.carry_out(worker_arguments, worker_input, server_input)


def _for_servers(job: Job, path: Sequence[str]) -> bytes:
    """What servers are handed: where modules are looked for, and the conditions that cannot be imported."""
    models = [model for step in job.sync.steps for model in step.models if isinstance(model, Conditions)]
    names = {name for model in models for name in (model.pull, model.push) if name in local_conditions}
    conditions = {name: local_conditions[name] for name in names}
    try:
        return bytes(cloudpickle.dumps(list(path)) + cloudpickle.dumps(conditions))
    except (TypeError, pickle.PicklingError, RuntimeError) as error:
        raise ConfigurationError(
            f"a condition, or something that it refers to, cannot be sent to the servers: {error}. Define it in a "
            "module."
        ) from error


class Run:
    """One run and all that belongs to it.

    Args:
        job: the run.
        coordinator: of it; not started yet.
        placement: of its processes.
        console: for the progress.
        interruption: says when a signal asks for the end.
        snapshot_every_s: see `launch`.
    """

    def __init__(
        self,
        job: Job,
        coordinator: Coordinator,
        placement: Placement,
        console: Console,
        interruption: Interruption,
        snapshot_every_s: float | None,
    ) -> None:
        self._job = job
        self._run_dir = Path(job.run_dir)
        self._coordinator = coordinator
        self._console = console
        self._interruption = interruption
        self._progress = Progress(coordinator, console)
        self._engine = LocalEngine(
            job, coordinator.address, placement, self._progress.print, coordinator.worker_ended
        )
        self._waiting = Waiting(coordinator, self._engine, job.stall_timeout_s, self._say)
        self._sampler = Sampler(coordinator, snapshot_every_s) if snapshot_every_s else None
        self._weights: WeightsSnapshot | None = None
        self._weights_path: Path | None = None
        self._notes: list[str] = []  # what went wrong at the end without ending the run

    def carry_out(
        self, worker_arguments: Sequence[str], worker_input: bytes, server_input: bytes
    ) -> RunResult:
        """Start the processes, wait, and return what the run made.

        Raises:
            RunFailedError: a process has failed; none is left running.
            KeyboardInterrupt: Ctrl-C; none is left running.
            Terminated: SIGTERM or SIGHUP; none is left running.
        """
        engine, coordinator = self._engine, self._coordinator
        coordinator.start()
        left = []
        with self._progress:
            try:
                try:
                    engine.start(worker_arguments, worker_input, server_input)
                except OSError as error:
                    raise RunFailedError("the launcher", f"it cannot start a process: {error}") from error
                if self._sampler is not None:
                    self._sampler.start()
                failure = self._await_end()
                early = failure is not None or self._interruption.asked
                if early:
                    engine.end(engine.workers, grace_s=0.0, hurried=self._interruption.hurried)
                if self._sampler is not None:
                    self._sampler.stop()
                self._keep_weights()
            except BaseException:
                early = True
                raise
            finally:
                grace_s = LAST_WORDS_S if early or self._notes else GRACE_S
                coordinator.stop(grace_s, self._interruption.hurried)
                everybody = [*engine.workers, *engine.servers]
                left = engine.end(everybody, grace_s=grace_s, hurried=self._interruption.hurried)
        for worker, process in enumerate(engine.workers):
            if process.ending:  # the coordinator, which would note it, has stopped
                coordinator.core.endings.setdefault(worker, process.ending)
        for process in left:
            self._notes.append(f"{process.name} (process {process.id}) was killed, but has not ended yet")
        if failure is not None:
            raise self._explained(failure)
        if self._interruption.asked:
            raise self._interrupted()
        return self._result()

    # -- while it goes on ---------------------------------------------------------------------------------

    def _await_end(self) -> RunFailedError | None:
        """Wait until the run is over or is to end. Return why it has failed, if it has."""
        engine, coordinator = self._engine, self._coordinator
        while not coordinator.over.wait(POLL_INTERVAL_S):
            self._progress.update()
            if self._interruption.asked:
                return None
            if engine.failed_server() or engine.failed_worker():
                break
            if standstill := self._waiting.look():
                coordinator.fail(RunFailedError("the run", standstill))
        return self._failure()

    def _failure(self) -> RunFailedError | None:
        """The first failure there was, its cause before its consequences."""
        engine, coordinator = self._engine, self._coordinator
        deadline_s = time.monotonic() + CAUSE_TIMEOUT_S
        while not (self._cause_is_known() or self._interruption.asked) and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        told = coordinator.failure
        by_server = told if told is not None and told.process.startswith("server") else engine.failed_server()
        if by_server is None and coordinator.gone_servers:
            name = f"server {coordinator.gone_servers[0]}"
            by_server = RunFailedError(name, "its connection has ended, and its process has not")
        if by_server is not None and not (coordinator.core.everybody_left and coordinator.core.finished):
            return by_server  # afterwards nobody needs the servers any more, but for their weights
        if told is not None and told is not by_server:
            return told
        if worker := engine.failed_worker():
            return worker
        if len(coordinator.core.lost) == self._job.workers:
            return RunFailedError("the run", f"every worker was lost{self._losses()}")
        if not coordinator.started.is_set():
            return RunFailedError(
                "the run",
                "no worker ever called step() on a paceline.DistributedOptimizer, so nothing was trained"
                + self._losses(),
            )
        return None

    def _cause_is_known(self) -> bool:
        """False while what is known can only be the consequence of something that is about to be known."""
        engine, coordinator = self._engine, self._coordinator
        if coordinator.failure is not None or engine.failed_server():
            return True
        if coordinator.gone_servers or coordinator.core.cut_off:
            return False  # the process that they miss is about to end
        if any(worker not in coordinator.core.endings for worker in coordinator.core.lost):
            return False  # its connection has ended, and the process is about to
        failed = [w for w, process in enumerate(engine.workers) if (process.exit_code or 0) > 0]
        return all(
            coordinator.core.fate(worker) for worker in failed
        )  # else its own report is yet to be read

    def _losses(self) -> str:
        """How each lost worker ended, a line each."""
        coordinator = self._coordinator
        return "".join(
            f"\n  worker {worker}: {coordinator.ending(worker)}" for worker in coordinator.core.lost
        )

    # -- its end ------------------------------------------------------------------------------------------

    def _keep_weights(self) -> None:
        """Collect the weights, if there are any, and save them."""
        if not self._coordinator.started.is_set() or self._interruption.hurried():
            return
        collection = self._coordinator.collect()
        while not collection.finished.wait(POLL_INTERVAL_S):
            self._progress.update()
            if time.monotonic() - collection.heard_s > ANSWER_TIMEOUT_S or self._interruption.hurried():
                break
        missing = collection.missing
        servers = sorted({shard % self._job.servers for shard in missing})
        self._coordinator.end_collection(servers)
        self._weights = collection.result()
        for server in servers:
            process = self._engine.process("server", server)
            how = (
                process.ending or f"it did not answer when the weights were read; its process {process.state}"
            )
            where = "" if self._weights.absent else "; its part of them was read from shared memory"
            self._notes.append(f"{process.name}: {how}{where}")
            process.kill()
        self._weights_path, said = save_weights(self._weights, self._run_dir)
        self._notes += said

    def _result(self) -> RunResult:
        coordinator, weights = self._coordinator, self._weights
        if weights is None or weights.absent or self._weights_path is None:
            what = self._notes[0] if self._notes else "the weights could not be read"
            raise self._explained(RunFailedError("the run", what))
        for worker in coordinator.core.lost:
            self._say(
                f"worker {worker} was lost: {coordinator.ending(worker)}. The others went on without it."
            )
        crashed = [index for index, process in enumerate(self._engine.workers) if process.crashed]
        faults = [*coordinator.core.faults, *self._notes]
        summary = summarize(coordinator, faults, crashed, self._weights_path)
        if said := write_summary(summary, self._run_dir):
            self._notes.append(said)
            summary["faults"].append(said)
        for fault in summary["faults"]:
            self._say(f"note: {fault}")
        snapshots = self._sampler.taken if self._sampler is not None else []
        return RunResult(weights.state_dict, summary, self._run_dir, snapshots, tuple(self._notes))

    def _explained(self, failure: RunFailedError) -> RunFailedError:
        """The failure, with notes on where to look and where the weights are."""
        for note in [*self._coordinator.core.faults, *self._notes]:
            if note != failure.reason:
                failure.add_note(note)
        log_path = self._run_dir / f"{failure.process.replace(' ', '-')}.log"
        what = f"{failure.process}'s output is in {log_path}" if log_path.exists() else f"see {self._run_dir}"
        failure.add_note(what)
        if self._weights_path is not None:
            failure.add_note(f"the weights as they were then are in {self._weights_path}")
        return failure

    def _interrupted(self) -> BaseException:
        for note in self._notes:
            self._say(f"note: {note}")
        if self._weights_path is not None:
            self._say(f"the weights as they were then are in {self._weights_path}")
        alive = [p for p in [*self._engine.workers, *self._engine.servers] if p.exit_code is None]
        words = "every process of the run has been ended"
        if alive:
            words = "the run has been ended, but for " + ", ".join(
                f"{p.name} (process {p.id})" for p in alive
            )
        return self._interruption.exception(words)

    def _say(self, line: str) -> None:
        """Print a line, or log it where nothing is to be printed."""
        if self._console.quiet:
            log.warning("%s", line)
        else:
            self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


class Sampler:
    """Takes a snapshot of the weights at every multiple of an interval, on a thread of its own."""

    def __init__(self, coordinator: Coordinator, interval_s: float) -> None:
        self.taken: list[tuple[float, WeightsSnapshot]] = []
        self._coordinator = coordinator
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)

    def start(self) -> None:
        """Begin when training does."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more. One that a server does not answer is not waited for."""
        self._stopped.set()
        self._thread.join(ANSWER_TIMEOUT_S)

    def _run(self) -> None:
        coordinator = self._coordinator
        while not coordinator.started.wait(POLL_INTERVAL_S):
            if self._stopped.is_set() or coordinator.over.is_set():
                return
        # A server that is gone ends this quietly: the run itself says what has failed.
        with contextlib.suppress(PacelineError), _reader(coordinator) as reader:
            tick = 0
            while True:
                due_s = coordinator.started_s + tick * self._interval_s
                if self._stopped.wait(max(0.0, due_s - coordinator.job.now_s())) or coordinator.over.is_set():
                    return
                snapshot = reader.read()
                now_s = coordinator.job.now_s() - coordinator.started_s
                self.taken.append((now_s, snapshot))
                tick = max(tick + 1, math.ceil(now_s / self._interval_s))  # what was missed is missed


def _reader(coordinator: Coordinator) -> contextlib.closing[Reader]:
    assert coordinator.core.model is not None
    return contextlib.closing(
        Reader.connect(coordinator.core.model, coordinator.core.shards, coordinator.job.token)
    )
