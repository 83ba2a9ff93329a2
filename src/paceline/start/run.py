"""A live run, from the start of its processes until all of them have ended.

Every run ends with the same steps. First, the reason for its end is determined. If the run failed or was
interrupted, the remaining workers are terminated. Then the weights are collected and saved, the servers write their
traces and exit, and the other results are written. A second Ctrl-C skips the steps that take time.

If a run that writes checkpoints is interrupted, the weights are saved before these steps. Then, while training goes on,
a checkpoint, the summary and the report are written. When the processes have ended, the summary and the report are
written again, with what has happened since.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from rich.console import Console

from ..core.guard import DIVERGED
from ..core.liveness import Clocks
from ..core.members import NOBODY
from ..core.messages import StepsTimed
from ..core.metrics import MetricHistory
from ..errors import ConfigurationError, RunFailedError
from ..look.show_process import Outlets
from ..look.step_cost import LEAST_SHARE
from ..run.agents import CLOCK_GAP_S, MachinesLeft
from ..run.coordinator import CoordinatorHost
from ..run.job import Job, ResumedFrom, claim_run_dir
from ..run.listener import Listener
from ..run.resuming import cut_of, earlier_run, find_resumed, keep_source, lineage_of, newest_of, resumed_with
from ..run.run_lock import RunLock, published
from ..shard.store import WeightsSnapshot, remove_frozen
from ..sync import Conditions
from ..sync.plugins import local_conditions
from ..trace.recording import EARLIER
from ..trace.report import RunFile, write_run_file
from ..trace.run_dir import REPORT, require_usable
from ..wire.memory import PassedSockets
from ..wire.preface import COORDINATOR
from ..words import counted
from .beside import Rehearsals, digesting, showing
from .display import ProgressDisplay
from .local import LocalEngine, ProcessPlacement
from .processes.devices import with_server_devices
from .processes.interruption import Interrupted, Interruption
from .processes.orders import payload_of_server
from .processes.program import Companion
from .processes.spawn import Starter
from .results import (
    Earlier,
    Keeper,
    RunResult,
    Sampler,
    averages_line,
    description_of,
    how_to_resume,
    make_room,
    samples_line,
    save_weights,
    server_device_line,
    step_cost_of,
    summarize,
    wire_line,
    write_report,
    write_summary,
)
from .terminal import Channels, StandardStreams, Terminal, print_sentence
from .waiting import Waiting

if TYPE_CHECKING:
    from ..checkpoints.reading import NewestCheckpoint


log = logging.getLogger("paceline.run")

POLL_INTERVAL_S = 0.05
# Maximum time to wait, after the first sign of a failure, for its cause to become known.
CAUSE_TIMEOUT_S = 10.0
# Time after which the terminal names a server that sends nothing while its weights are collected.
TELL_S = 5.0
# Maximum time to write a checkpoint after Ctrl-C or another signal. Slurm and Kubernetes kill processes after 30 s.
LAST_CHECKPOINT_S = 20.0
USUAL_NEWS = ("samples", "averages", "codecs", "device", "steps")  # the keys of news that are not warnings
GONE = {"lost": "was lost", "left": "has left"}
"""Fate of the earlier main worker -> a clause that says how this worker has left."""

# Maximum time to wait for processes to exit by themselves after a run.
GRACE_S = 10.0
# Maximum time to wait for processes to exit by themselves after a run that has failed.
FAILED_GRACE_S = 0.5


def start(
    job: Job,
    worker_arguments: Sequence[str],
    worker_payload: bytes,
    path: Sequence[str],
    *,
    console: Console,
    snapshot_every_s: float | None = None,
    placement: ProcessPlacement | None = None,
    starter: Starter | None = None,
    streams: StandardStreams | None = None,
    listening: Callable[[str, Job], None] = lambda address, job: None,
    patience_s: float | None = None,
    command: str = "",
    source: str = "",
    interrupted: str = "",
    outlets: Outlets | None = None,
    force: bool = False,
    lock_token: str = "",
) -> RunResult:
    """Start the processes of a run, wait until all of them have ended, and return the result. See `launch`.

    Args:
        job: the configuration of the run. The run directory is created here, after all arguments have been checked.
        worker_arguments: the script, module or function that each worker runs; see `ProcessOrder`.
        worker_payload: the objects that are sent to each worker.
        path: module search path from which the servers import user-defined conditions.
        console: console for the progress display.
        snapshot_every_s: see `launch`.
        placement: see `launch`.
        starter: starts the processes; by default, a new starter, which is closed at the end.
        streams: how the user wants to use the standard streams of the processes.
        listening: called once with the address of the coordinator and the configuration of the run.
        patience_s: if machines can join the run: number of seconds for which the run may have too few workers; None
            for no limit.
        command: the command line that repeats the run. Default: the command line of this process.
        source: the source of the script or of the training function; "" if it is unknown. The run directory keeps
            the source, to show how it has changed when the run is resumed.
        interrupted: if the run goes on by itself, a sentence that says why it was interrupted.
        outlets: where the run is shown while it goes on. If this function raises an error before it starts anything,
            the caller closes the outlets.
        force: True to use the run directory even if a run in progress holds it.
        lock_token: token of the lock on the run directory, if the parent process holds the lock.
    """
    if placement is None:
        placement = ProcessPlacement.on_loopback(job)
    else:
        placement.require_for(job)
    job = with_server_devices(job)
    server_payload = server_payload_of(job, path)
    restarts = RestartPolicy()
    announced = False  # True once `listening` was called: once is enough, because the address never changes
    # After the loss of a server, the run is started again in this loop. A signal between two starts ends the run, too.
    with Interruption(suspends=True) as interruption, contextlib.ExitStack() as held:
        lock: RunLock | None = None
        while True:
            sock, address = CoordinatorHost.listen_for(job, placement.coordinator)
            try:
                if lock is None:
                    job, lock = take_lock(claim_run_dir(job), interruption, force=force, token=lock_token)
                    held.enter_context(lock)
                earlier = None if job.resumed is None else make_room(job)
            except BaseException:
                sock.close()
                raise
            described = _describe(job, worker_arguments, command, source, earlier, interrupted)
            listener = Listener(sock, bytes.fromhex(job.mark)) if job.secure else None
            # A process that knows the address may connect immediately, so the listener must know the coordinator first.
            connections = sock if listener is None else PassedSockets(listener.receiver(COORDINATOR))
            if not announced:
                announced = True
                listening(address, job)
            streams = streams or StandardStreams()
            # If the output of all processes is shown, line by line, no process gets a terminal of its own.
            terminal = None if streams.show_all or job.joined else Terminal.here()
            with (
                showing(outlets or Outlets(), job, address, interruption) as page,
                published(Path(job.run_dir), address, job.token, page),
                terminal or contextlib.nullcontext(),
                starter or Starter(placement.prefixes()) as starter,
                listener or contextlib.nullcontext(),
                Rehearsals() as rehearsals,
            ):
                run = LiveRun(
                    job,
                    CoordinatorHost(job, connections, address, rehearsals),
                    placement,
                    starter,
                    console,
                    interruption,
                    snapshot_every_s,
                    streams,
                    terminal,
                    patience_s,
                    listener,
                    restarts,
                    described,
                    lock,
                )
                try:
                    return run.carry_out(worker_arguments, worker_payload, server_payload)
                except ServerLost as loss:
                    interrupted = loss.words
                    job = loss.next_life
            placement = placement.for_servers(job.local_servers)
            starter = None
            outlets = (outlets or Outlets()).opened_again()


def take_lock(job: Job, interruption: Interruption, *, force: bool, token: str = "") -> tuple[Job, RunLock]:
    """Take the lock on the run directory. Return the configuration (perhaps with a newer checkpoint) and the lock.

    Args:
        job: the configuration of the run, whose directory exists.
        interruption: counter of the signals that ask the run to end.
        force: see `start`.
        token: see `lock_token` of `start`.

    Raises:
        ConfigurationError: another run holds the directory, or has used it since `job` was made.
    """

    def look() -> None:
        if interruption.asked:
            raise interruption.exception("nothing was started", {})

    run_dir, resumed = Path(job.run_dir), job.resumed
    after = None if resumed is None else resumed.lock
    lock = RunLock.take(run_dir, force=force, after=after, token=token, look=look)
    try:
        if resumed is None:
            require_usable(run_dir)  # another run may have begun and ended meanwhile
        elif force:  # the run that has just ended may have written another checkpoint
            earlier = earlier_run(run_dir, force=True)
            resumed = find_resumed(earlier, run_dir, job.checkpoint_dir, trust=True)
            lineage, origin = lineage_of(earlier, run_dir, resumed)
            job = replace(job, seed=cut_of(resumed).seed, lineage=lineage, origin=origin)
    except BaseException:
        lock.release()
        raise
    return replace(job, resumed=None if resumed is None else replace(resumed, lock=None)), lock


def _describe(
    job: Job, program: Sequence[str], command: str, source: str, earlier: Earlier | None, interrupted: str
) -> RunFile:
    """Write `run.json`, and the source of the script. If the directory cannot be written, the run goes on.

    Args:
        job: the configuration of the run.
        program: the script, module or function that each worker runs; see `ProcessOrder`.
        command: see `start`.
        source: see `start`.
        earlier: what is known of the time before the run was resumed; None if it was not resumed.
        interrupted: why the run was interrupted, as a sentence; "" if a user has resumed the run.

    Returns:
        The content of `run.json`.
    """
    file = description_of(job, program, command)
    if earlier is not None:
        before = () if earlier.file is None else earlier.file.resumptions
        file = replace(file, resumptions=(*before, earlier.resumption(file, interrupted)))
        if earlier.file is not None and (interrupted or not file.command):
            file = replace(file, command=earlier.file.command)
    try:
        write_run_file(file, Path(job.run_dir))
        if source:
            keep_source(source, Path(job.run_dir))
    except OSError as error:
        log.warning("run.json cannot be written to %s: %s", job.run_dir, error.strerror or error)
    return file


def server_payload_of(job: Job, path: Sequence[str]) -> bytes:
    """Return the payload of the servers: the module search path and the conditions that cannot be imported."""
    models = [model for model in job.schedule.models if isinstance(model, Conditions)]
    names = {name for model in models for name in (model.pull, model.push) if name in local_conditions}
    conditions = {name: local_conditions[name] for name in names}
    try:
        return payload_of_server(path, conditions)
    except (TypeError, pickle.PicklingError, RuntimeError) as error:
        raise ConfigurationError(
            f"a condition, or an object that it refers to, cannot be sent to the servers: {error}. Define the "
            "condition in a module."
        ) from error


class LiveRun:
    """Carries out one run, with its coordinator, its processes and its progress display.

    Args:
        job: the configuration of the run.
        coordinator: the run's coordinator, which has not been started yet.
        placement: the machines of the processes.
        starter: starts the processes.
        console: console for the progress display.
        interruption: counter of the signals that ask the run to end.
        snapshot_every_s: see `launch`.
        streams: how the user wants to use the standard streams of the processes.
        terminal: the terminal that worker 0 uses, if any.
        patience_s: see `start`.
        listener: the listener of this machine, if its processes do not listen themselves.
        restarts: decides whether the run goes on after the loss of a server.
        described: the description of the run, as `run.json` contains it.
        lock: the lock on the run directory.
    """

    def __init__(
        self,
        job: Job,
        coordinator: CoordinatorHost,
        placement: ProcessPlacement,
        starter: Starter,
        console: Console,
        interruption: Interruption,
        snapshot_every_s: float | None,
        streams: StandardStreams,
        terminal: Terminal | None,
        patience_s: float | None,
        listener: Listener | None,
        restarts: RestartPolicy,
        described: RunFile,
        lock: RunLock,
    ) -> None:
        self._job = job
        self._lock = lock
        self._restarts = restarts
        self._command = described.command
        self._resumptions = described.resumptions
        self._run_dir = Path(job.run_dir)
        self._coordinator = coordinator
        self._placement = placement
        self._console = console
        self._interruption = interruption
        self._progress = ProgressDisplay(coordinator, console)
        self._terminal = terminal
        self._channels = Channels(streams, terminal, self._progress)
        self._engine = LocalEngine(
            job,
            coordinator.address,
            starter,
            self._channels,
            lambda worker, how: coordinator.call(coordinator.agents.note_end, worker, how),
            listener=listener,
        )
        self._waiting = Waiting(coordinator, self._engine, job.stall_timeout_s, self._say, terminal)
        again = bool(self._resumptions and self._resumptions[-1].why)
        shortage = ShortageWatch(coordinator, patience_s, self._say, again=again) if job.joined else None
        self._shortage = shortage
        self._sampler = Sampler(coordinator, snapshot_every_s) if snapshot_every_s else None
        self._keeper = Keeper(coordinator) if job.guard == "stop" else None
        # the program that digests the oldest traces; None until it is started
        self._digester: Companion | None = None
        self._digests = job.traces.kept == "recent"
        self._weights: WeightsSnapshot | None = None
        self._weights_path: Path | None = None
        self._which = "the weights at the time of the failure"  # which weights the file contains
        # Messages about problems that occurred while the run was shutting down.
        self._notes: list[str] = []
        self._program: list[
            str
        ] = []  # the script, module or function that each worker runs; see `ProcessOrder`
        self._main = 0  # the main worker that the user knows of
        self._told: set[object] = set()  # the keys of the news that the user has been told; see `_news`
        # the times of steps that `_news` has looked at
        self._timed: Mapping[int, StepsTimed] = {}
        self._newest: NewestCheckpoint | None = None  # the newest whole checkpoint, once a server was lost
        # (worker, incarnation) of the workers that had left before the launcher ended the rest
        self._left_before = set[tuple[int, int]]()

    def carry_out(
        self, worker_arguments: Sequence[str], worker_payload: bytes, server_payload: bytes
    ) -> RunResult:
        """Start the processes, wait for the end of the run, end all processes, and return the result.

        Raises:
            RunFailedError: a process has failed.
            Interrupted: Ctrl-C was pressed.
            Terminated: SIGTERM, SIGHUP or SIGQUIT was received.
            ServerLost: a server was lost, and the run is to go on from a checkpoint.
        """
        engine, coordinator = self._engine, self._coordinator
        self._program = list(worker_arguments)
        coordinator.start()
        left = []
        next_life: Job | None = None
        if self._resumptions:
            self._say(self._resumptions[-1].words)
        if (cut := coordinator.core.resumed) is not None and (begins := begins_anew(self._job, cut.sync)):
            self._say(begins)
        with self._progress:
            try:
                try:
                    of_servers = cycle(self._job.server_devices or [None])
                    for index, machine in enumerate(self._placement.servers):
                        coordinator.call(coordinator.watch.expect, "server", index)
                        engine.start("server", index, machine, server_payload, device=next(of_servers))
                    devices = self._job.devices or (None,) * len(self._placement.workers)
                    for index, machine in enumerate(self._placement.workers):
                        coordinator.call(coordinator.watch.expect, "worker", index)
                        engine.start(
                            "worker",
                            index,
                            machine,
                            worker_payload,
                            worker_arguments,
                            device=devices[index],
                        )
                except OSError as error:
                    raise RunFailedError("the launcher", f"a process cannot be started: {error}") from error
                for thread in (self._sampler, self._keeper):
                    if thread is not None:
                        thread.start()
                failure = self._await_end()
                if self._interruption.asked and failure is None and self._job.checkpoint_every_s:
                    self._write_last_checkpoint()
                if not self._interruption.asked:
                    next_life = self._next_life(failure)
                self._left_before = {each[:2] for each in coordinator.report.departed}
                reason = "" if failure is None else _reason(failure)
                if self._interruption.asked:
                    reason = reason or "it was interrupted on the machine that serves it"
                if next_life is None:
                    coordinator.call(coordinator.agents.dismiss, reason)
                elif next_life.resumed is not None:
                    checkpoint = Path(next_life.resumed.path).name
                    coordinator.call(
                        coordinator.agents.resume,
                        f"{reason.removesuffix('.')}; the run goes on from checkpoint {checkpoint}, and the script "
                        "begins again",
                    )
                early = bool(reason)
                if early:
                    engine.end(engine.workers.values(), grace_s=0.0, hurried=self._hurried)
                for thread in (self._sampler, self._keeper):
                    if thread is not None:
                        thread.stop(self._hurried)
                if next_life is None:
                    self._keep_weights(failure)
                    coordinator.call(coordinator.agents.dismiss, reason or self._weights_fault(), saved=True)
            except BaseException:
                early = True
                raise
            finally:
                gone = coordinator.gone_servers.copy()
                coordinator.stop(self._hurried)
                self._give_up(coordinator.gone_servers.keys() - gone.keys())
                self._end_digester()
                grace_s = FAILED_GRACE_S if early or self._notes else GRACE_S
                left = engine.end(engine.processes, grace_s=grace_s, hurried=self._hurried)
        # The coordinator has stopped and no longer records how processes end, so the launcher records it here.
        coordinator.conclude({worker: p.ending for worker, p in engine.workers.items() if p.ending})
        if self._lock.lost:  # the directory now belongs to another run
            raise RunFailedError("the launcher", self._lock.lost)
        remove_frozen(self._run_dir)
        for process in left:
            self._notes.append(f"{process.name} (process {process.id}) was killed, but has not ended yet")
        if failure is not None and next_life is not None:
            raise ServerLost(self._words_of(failure, next_life), next_life)
        if failure is not None:
            raise self._failed(failure)
        if self._interruption.asked:
            raise self._interrupted()
        if engine.interrupted:
            departed = coordinator.report.departed
            finished = {each.worker for each in departed if each.fate == "finished"}
            if finished <= set(engine.interrupted):
                raise self._interrupted(
                    "the scripts of all workers were interrupted by SIGINT, and have ended"
                )
            names = ", ".join(f"worker {index}" for index in engine.interrupted)
            self._notes.append(f"the script was interrupted by SIGINT, and ended early: {names}")
        return self._result()

    def _hurried(self) -> bool:
        """Return True if the run must end immediately, without writing anything more."""
        return self._interruption.hurried() or bool(self._lock.lost)

    # -- during the run -----------------------------------------------------------------------------------

    def _await_end(self) -> RunFailedError | None:
        """Wait until the run is over or must be ended. Return the failure of the run, or None if there is none."""
        engine, coordinator = self._engine, self._coordinator
        while not coordinator.over.wait(POLL_INTERVAL_S):
            self._progress.update()
            self._follow_main()
            self._tell()
            self._digest()
            if self._lock.lost:
                return RunFailedError("the launcher", self._lock.lost)
            if self._interruption.asked:
                return None
            if self._interruption.suspended and all(p.started for p in engine.processes):
                self._suspend()
            if engine.failed_server() or engine.failed_worker():
                break
            reason = self._waiting.look()
            if not reason and self._shortage is not None:
                reason = self._shortage.look()
            if reason:
                coordinator.fail(RunFailedError("the run", reason))
            elif self._shortage is not None and (loss := self._shortage.unreturned_server()) is not None:
                coordinator.fail(loss)
        self._tell()
        return self._failure()

    def _digest(self) -> None:
        """Start to digest the oldest traces if there are any."""
        if not (self._digests and self._digester is None and (self._run_dir / EARLIER).exists()):
            return
        try:
            self._digester = digesting(self._job)
        except OSError as error:
            self._digests = False
            self._notes.append(
                f"the oldest traces were not deleted, because no process could be started: {error}"
            )

    def _end_digester(self) -> None:
        program = self._digester
        if program is not None and program.end(self._hurried) and program.exit_code:
            why = program.last or f"the process has ended with code {program.exit_code}"
            self._notes.append(
                f"the oldest traces were not deleted, so they may occupy more space than they should: {why}"
            )

    def _tell(self) -> None:
        """Print all news that have not been printed yet."""
        for key, words in self._news():
            if words and key not in self._told:
                self._told.add(key)
                self._say(words, style="" if key in USUAL_NEWS else "yellow")

    def _news(self) -> Iterator[tuple[object, str]]:
        """Yield pairs (key, words): the news of a run in progress. Only the first pair with each key is printed."""
        report, checkpoints = self._coordinator.report, self._coordinator.checkpoints
        if report.started:
            yield "samples", samples_line(self._job, report.samples, self._program)
            yield "averages", averages_line(self._job, report.model)
            if "codecs" not in self._told and self._job.codecs():
                vectors = {vector for bounds, _ in report.shards for vector in bounds.bounds}
                codecs = self._job.codecs(vectors)
                yield "codecs", codecs and f"codecs between processes: {codecs}"
            yield "wire", wire_line(self._job, report.model)
            yield "device", server_device_line(self._job, report.model)
            if "steps" not in self._told and report.steps is not self._timed:
                self._timed = report.steps
                if any(
                    each.share >= LEAST_SHARE for each in report.steps.values()
                ):  # if the share of the steps is smaller, nothing is said
                    cost = step_cost_of(self._job, report)
                    yield "steps", "" if cost is None else cost.sentence()
        for each in report.departed:
            key = each.fate, each.worker, each.incarnation
            if each.fate == "lost" and each.explained and report.live:
                yield key, f"worker {each.worker} was lost: {each.cause}. The other workers go on without it."
            if each.fate == "left" and report.live:
                yield key, f"worker {each.worker} has left: {each.cause}. The other workers go on without it."
            if key in self._told and each.returned:
                yield ("returned", *key), f"worker {each.worker} has joined again"
        yield "hindrance", report.hindrance
        yield from enumerate(map(str, report.choices))
        saved = checkpoints.saved
        yield (checkpoints.fault, saved and saved.path), checkpoints.fault
        if (late := report.late_checkpoint) is not None:
            yield ("late", late.number), late.words

    def _follow_main(self) -> None:
        """If another worker has become the main worker, say so, and show its output."""
        report = self._coordinator.report
        before, now = self._main, report.main
        if before == now or now == NOBODY:
            return
        self._main = now
        self._channels.show(f"worker {now}")
        fates = {each.worker: each.fate for each in report.departed}
        gone = GONE.get(fates.get(before, ""))
        why = f", because worker {before} {gone}" if gone else ""
        self._say(
            f"worker {now} is the main worker now{why}; paceline.is_main() says so from the next epoch on"
        )

    def _suspend(self) -> None:
        """Stop all processes of the run and this process, until this process is continued."""
        processes = self._engine.processes
        self._progress.pause()
        if self._terminal is not None:
            self._terminal.pause()
        for process in processes:
            process.signal(signal.SIGSTOP)
        try:
            self._interruption.suspend()
        finally:
            if not self._lock.look():  # another process may have taken the directory meanwhile
                for process in processes:
                    process.signal(signal.SIGCONT)
            self._waiting.excuse()
            if self._terminal is not None:
                self._terminal.resume()
            self._progress.resume()

    def _failure(self) -> RunFailedError | None:
        """Return the failure of the run, or None. A failure that caused other failures takes precedence."""
        engine, coordinator = self._engine, self._coordinator
        deadline_s = time.monotonic() + CAUSE_TIMEOUT_S
        while not (self._cause_is_known() or self._interruption.asked) and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        reported = coordinator.failure
        is_of_server = reported is not None and reported.process.startswith("server")
        server_failure = reported if is_of_server else engine.failed_server()
        if server_failure is None and coordinator.gone_servers:
            index, reason = next(iter(coordinator.gone_servers.copy().items()))
            if index in engine.servers:
                reason += ", but its process is still running"
            server_failure = RunFailedError(f"server {index}", reason)
        # Once all workers have left, servers are needed only for their weights, so a failure of a server is ignored.
        report = coordinator.report
        some_finished = report.has_left("finished", "left")
        if server_failure is not None and not (report.everybody_left and some_finished):
            return server_failure
        if reported is not None and reported is not server_failure:
            return reported
        if worker := engine.failed_worker():
            return worker
        if report.everybody_left and not some_finished:
            return RunFailedError("the run", f"every worker was lost{self._losses()}")
        if not coordinator.started.is_set():
            return RunFailedError(
                "the run",
                "no worker called step() on a paceline.DistributedOptimizer, so nothing was trained; wrap "
                "the optimizer with paceline.prepare, and call step() on the optimizer that prepare returns; or "
                "use paceline.integrations, if a Trainer, an Accelerator or a Fabric makes the steps"
                + self._losses(),
            )
        return None

    def _cause_is_known(self) -> bool:
        """Return False if all known problems are consequences of a failure that is not known yet."""
        engine, coordinator = self._engine, self._coordinator
        reported = coordinator.failure is not None and not coordinator.cause_may_follow
        if reported or engine.failed_server():
            return True
        # A connection was lost, so the process at its other end is about to exit.
        report = coordinator.report
        if coordinator.gone_servers or report.cut_off:
            return False
        # The connection of a lost worker was closed, so its process is about to exit.
        if any(each.fate == "lost" and not each.explained for each in report.departed):
            return False
        # The coordinator may not have read the report of a failed worker yet.
        failed = [w for w, process in engine.workers.items() if (process.exit_code or 0) > 0]
        return report.live.isdisjoint(failed)

    def _losses(self) -> str:
        """Return a text that says why each worker was lost, one line per lost worker."""
        lost = (each for each in self._coordinator.report.departed if each.fate == "lost")
        return "".join(f"\n  worker {each.worker}: {each.cause}" for each in lost)

    def _next_life(self, failure: RunFailedError | None) -> Job | None:
        """Return the configuration with which the run goes on; None if the run ends."""
        if failure is None or not is_loss(failure):
            return None
        left = self._coordinator.settle()
        if self._job.on_server_loss == "resume":
            try:
                self._newest = newest_of(self._job)
            except ConfigurationError as error:
                self._notes.append(f"the run could not go on by itself: {error}")
        if self._newest is None:
            return None
        if (resumed := self._restarts.resumed(self._job, self._newest)) is None:
            return None
        job = self._job
        if job.joined:  # machines that have joined the run call its address again
            job = replace(job, port=int(self._coordinator.address.rpartition(":")[2]))
        return on_machines(self._restarts.next(job, resumed), left)

    def _words_of(self, failure: RunFailedError, next_life: Job) -> str:
        """Return, in sentences, what has happened, and where the servers of lost machines run from now on."""
        moved = self._job.remote_servers - next_life.remote_servers
        here = f" The machine that serves the run takes over {counted(moved, 'server')}." if moved else ""
        return f"{str(failure).removesuffix('.')}.{here}"

    # -- after the run ------------------------------------------------------------------------------------

    def _write_last_checkpoint(self) -> None:
        """Write a checkpoint of a run that a signal ends. This takes at most `LAST_CHECKPOINT_S`.

        The weights are saved first, because the sender of the signal may not wait for the checkpoint. Training goes on
        meanwhile, because a checkpoint needs the state that the scripts have between two batches.
        """
        coordinator, interruption = self._coordinator, self._interruption
        if not coordinator.started.is_set():
            return
        self._keep_weights(None)
        # Without workers, no cut can be made: the state of the scripts is in an earlier checkpoint.
        if self._hurried() or not coordinator.core.members.present:
            return
        # This makes a cut of the job now. The files of the checkpoint are written while summary and report are written.
        coordinator.call(coordinator.checkpoints.request_last)
        self._summary("interrupted")
        left_s = interruption.since_s + LAST_CHECKPOINT_S - time.monotonic()
        if left_s > 0 and not coordinator.checkpoints.last_ended:
            self._say(
                f"Writing a checkpoint before the run ends, for {left_s:.0f} s at most. Another Ctrl-C or signal "
                "ends the run without it."
            )
        while not (
            coordinator.checkpoints.last_ended
            or coordinator.over.is_set()
            or self._hurried()
            or time.monotonic() > interruption.since_s + LAST_CHECKPOINT_S
        ):
            time.sleep(POLL_INTERVAL_S)
            self._progress.update()
            self._tell()

    def _keep_weights(self, failure: RunFailedError | None) -> None:
        """Save the weights, if training has begun and the weights have not been saved yet.

        If the run has diverged, the last good weights are saved, if there are any. Otherwise, the present weights of
        the servers are saved.
        """
        if self._weights is not None or not self._coordinator.started.is_set() or self._hurried():
            return
        coordinator = self._coordinator
        diverged = failure is not None and failure.process == DIVERGED
        if diverged and self._keeper is not None and (good := self._keeper.good) is not None:
            self._which = f"the last good weights, of update {max(good.versions)},"
            self._weights = good
            self._weights_path, messages = save_weights(good, self._run_dir)
            self._notes += messages
            return
        collection = coordinator.collect()
        told: set[int] = set()
        while not collection.finished.wait(POLL_INTERVAL_S) and not self._hurried():
            self._progress.update()
            for server, quiet_s in coordinator.quiet_s().items():
                if quiet_s > TELL_S and server not in told:
                    told.add(server)
                    self._say(
                        f"Waiting for the weights of server {server}, which has sent nothing for {quiet_s:.0f} s. "
                        f"Ctrl-C {'again' if self._interruption.asked else 'twice'} ends the run without them."
                    )
        missing = {self._job.placement.server_of[shard] for shard in collection.missing}
        coordinator.end_collection("a second signal came before its weights had arrived")
        self._weights = collection.result().completed(self._run_dir)
        self._give_up(missing, "" if self._weights.absent else "; its part was read from shared memory")
        self._weights_path, messages = save_weights(self._weights, self._run_dir)
        self._notes += messages
        if left_out := len(self._weights.frozen):
            self._say(
                f"The saved weights lack {left_out} frozen parameters, which every worker has loaded itself."
            )

    def _give_up(self, servers: Iterable[int], then: str = "") -> None:
        """Note why servers are no longer awaited, and kill those that run on this machine."""
        for server in sorted(servers):
            how = self._coordinator.gone_servers.get(server, "it has not sent its weights")
            if (process := self._engine.servers.get(server)) is not None:
                how = process.ending or f"{how}; its process {process.state}"
                process.kill()
            self._notes.append(f"server {server}: {how}{then}")

    def _weights_fault(self) -> str:
        """Return why the weights have not been saved completely; "" if all have been saved."""
        if self._weights is None or self._weights.absent or self._weights_path is None:
            return self._notes[0] if self._notes else "the weights could not be read"
        return ""

    def _result(self) -> RunResult:
        coordinator = self._coordinator
        if fault := self._weights_fault():
            raise self._failed(RunFailedError("the run", fault))
        assert self._weights is not None
        assert self._weights_path is not None
        self._tell()
        for each in coordinator.report.departed:
            if each.fate == "lost" and ("lost", each.worker, each.incarnation) not in self._told:
                self._say(
                    f"worker {each.worker} was lost: {each.cause}. The other workers continued without it."
                )
        summary = self._summary("finished")
        for fault in summary["faults"]:
            self._say(f"note: {fault}")
        snapshots = self._sampler.taken if self._sampler is not None else []
        history = MetricHistory(coordinator.ask(coordinator.core.history.metrics))
        return RunResult(
            self._weights.state_dict, summary, self._run_dir, snapshots, tuple(self._notes), history
        )

    def _summary(self, ended: str, failure: str = "") -> dict[str, Any]:
        """Write the summary, and return it."""
        here = {index for index, process in self._engine.workers.items() if process.crashed}
        crashed = sorted(here | self._coordinator.agents.crashed)
        faults = [*self._coordinator.report.faults, *self._notes]
        hurried = self._hurried
        summary = summarize(
            self._coordinator, faults, crashed, self._weights_path, ended, failure, self._program, hurried
        )
        summary["resumptions"] = msgspec.to_builtins(list(self._resumptions))
        if problem := write_summary(summary, self._run_dir):
            self._notes.append(problem)
            summary["faults"].append(problem)
        elif not hurried() and (problem := write_report(self._run_dir, self._say, hurried)):
            self._say(f"note: {problem}")
        return summary

    def _failed(self, failure: RunFailedError) -> RunFailedError:
        """Write the summary of a run that has failed, and return the failure with its notes."""
        explained = self._explained(failure)
        if not self._hurried():
            try:
                self._summary("failed", str(failure))
            except Exception as error:  # the failure itself is more important
                failure.add_note(f"the summary of the run could not be written: {error!r}")
            if (report := self._run_dir / REPORT).exists():
                failure.add_note(f"the report of the run is {report}")
        return explained

    def _explained(self, failure: RunFailedError) -> RunFailedError:
        """Return the failure, with notes that state all problems and the paths of the log and the weights."""
        report = self._coordinator.report
        for note in [*report.faults, *report.findings, *self._notes]:
            if note != failure.reason:
                failure.add_note(note)
        for each in report.departed:
            worker, ending = each.worker, each.cause
            if (
                each.fate == "lost"
                and each[:2] in self._left_before
                and failure.process == f"worker {worker}"
                and not failure.traceback
                and ending not in failure.reason
            ):
                failure.add_note(f"worker {worker}: {ending}")
        log_path = self._run_dir / f"{failure.process.replace(' ', '-')}.log"
        if failure.machine:
            failure.add_note(
                f"the log of {failure.process} is on the machine {failure.machine}, which prints the path of the log"
            )
        elif log_path.exists():
            failure.add_note(f"the output of {failure.process} is in {log_path}")
        else:
            failure.add_note(f"the logs are in {self._run_dir}")
        if hint := self._how_to_resume():
            failure.add_note(hint)
        elif failure.process.startswith("server ") and self._job.on_server_loss == "resume":
            why = "it had not written a checkpoint yet (--checkpoint-every)"
            if self._newest is not None and self._newest.faults:
                why = f"none of its checkpoints is whole. {' '.join(self._newest.faults)}"
            failure.add_note(f"the run could not go on by itself, because {why}")
        if self._weights_path is not None:
            failure.add_note(f"{self._which} were saved to {self._weights_path}")
        return failure

    def _how_to_resume(self) -> str:
        """Return a clause that says from which checkpoint the run can be resumed; "" if there is none."""
        saved, resumed = self._coordinator.checkpoints.saved, self._job.resumed
        path = saved.path if saved is not None else None if resumed is None else Path(resumed.path)
        if self._newest is not None:
            path = None if self._newest.checkpoint is None else self._newest.checkpoint.path
        if path is None:
            return ""
        function, joined = self._program[:1] == ["function"], self._job.joined
        how = how_to_resume(self._command, self._run_dir, function=function, joined=joined)
        return f"checkpoint {path.name} is whole; to go on from it{how}"

    def _interrupted(self, scripts: str = "") -> BaseException:
        """Write the summary, and return the exception for the signal that ended the run.

        Args:
            scripts: a clause that says what has happened, if the signal has ended the scripts of the workers, but not
                the launcher; "" if the signal has ended the launcher.
        """
        summary: dict[str, Any] = {}
        faults = self._notes
        if not self._hurried():
            written = self._summary("interrupted")
            if self._weights_path is not None:
                summary, faults = written, written["faults"]
        for fault in faults:
            self._say(f"note: {fault}")
        if self._weights_path is not None:
            self._say(f"the weights at the time of the signal were saved to {self._weights_path}")
        if hint := self._how_to_resume():
            self._say(hint)
        if (report := self._run_dir / REPORT).exists():
            self._say(f"the report of the run is {report}")
        alive = [p for p in self._engine.processes if p.exit_code is None]
        message = scripts or "all processes of the run have ended"
        if alive:
            names = ", ".join(f"{p.name} (process {p.id})" for p in alive)
            message = f"all processes of the run have ended, except for {names}"
        return Interrupted(message, summary) if scripts else self._interruption.exception(message, summary)

    def _say(self, line: str, style: str = "yellow") -> None:
        """Print a line, or log it if the console is quiet."""
        if self._console.quiet:
            log.warning("%s", line)
        else:
            self._progress.begin_line()
            print_sentence(self._console, line, style=style)


def _reason(failure: RunFailedError) -> str:
    """Return the reason for a failure for the machines of the run, in words that continue "the run failed: "."""
    return failure.reason if failure.process == "the run" else str(failure)


# -- How a run goes on after it has lost a server: from its newest checkpoint, with all its processes started again

MOST_IN_VAIN = 3
"""Maximum number of times that a run goes on from the same checkpoint: a server may run out of memory each time."""


class ServerLost(Exception):
    """A run has lost a server, and goes on from a checkpoint.

    Attributes:
        words: what has happened, as a sentence.
        next_life: the configuration with which the run goes on.
    """

    def __init__(self, words: str, next_life: Job) -> None:
        super().__init__(words)
        self.words = words
        self.next_life = next_life


def is_loss(failure: RunFailedError) -> bool:
    """Return True if a run has failed because a server was lost, and not because of an exception in the server."""
    return failure.process.startswith("server ") and not failure.traceback


def on_machines(job: Job, left: MachinesLeft) -> Job:
    """Return a job that the remaining machines can begin. The serving machine takes over the servers of lost machines.

    The new minimum number of workers may be smaller than before, but the run continues only with at least
    `Job.pause_below` workers. A job that no machine can join stays as it is.

    Example:
        Of two machines with a worker and a server each, one is lost:

        >>> from paceline.run.job_options import make_job
        >>> job = make_job(workers=2, servers=3, remote_servers=2, joined=True, dry_run=True)
        >>> job = on_machines(job, MachinesLeft(workers=1, servers=1))
        >>> job.least, job.local_servers, job.remote_servers
        (1, 2, 1)
    """
    if not job.joined:
        return job
    least = max(1, job.pause_below, min(job.least, left.workers))
    return replace(job, least=least, remote_servers=min(job.remote_servers, left.servers))


def begins_anew(job: Job, before: str) -> str:
    """Return a warning if a resumed run begins with another sync model than its checkpoint has; "" otherwise.

    If the schedule names an epoch for the checkpoint's model, the result is "": this epoch has begun, so the run
    changes to this model immediately.

    Args:
        job: the configuration of the run.
        before: the sync model at the checkpoint, in the notation of the command line; "" if it is unknown.
    """
    first, *others = job.schedule.steps
    follows = any(step.sync == before for step in others if step.epoch is not None)
    if job.schedule.auto or follows or before in ("", first.sync):
        return ""
    return (
        f"The run begins with the sync model {first.sync}, and its schedule counts iterations from 0. At the "
        f"checkpoint, the model was {before}. To go on with that model, end the run, and resume it with --sync "
        f"'{before}'."
    )


class RestartPolicy:
    """Decides whether a run goes on by itself."""

    def __init__(self) -> None:
        self._times = 0  # how often in a row the run has gone on from the same checkpoint

    def resumed(self, job: Job, newest: NewestCheckpoint) -> ResumedFrom | None:
        """Return the checkpoint with which a run would go on after it has lost a server; None if the run would end.

        The checkpoint is checked as strictly as if a user resumed the run.

        Args:
            job: the configuration of the run.
            newest: the newest whole checkpoint of the run.
        """
        resumed = resumed_with(newest)
        in_vain = self._times >= MOST_IN_VAIN and _is_again(job, resumed)
        return None if job.on_server_loss != "resume" or in_vain else resumed

    def next(self, job: Job, resumed: ResumedFrom) -> Job:
        """Return the configuration with which a run goes on."""
        self._times = self._times + 1 if _is_again(job, resumed) else 1
        return replace(job, resumed=resumed, epoch_ns=time.monotonic_ns(), mark=secrets.token_hex(8))


def _is_again(job: Job, resumed: ResumedFrom | None) -> bool:
    """Return True if a run would go on from the checkpoint with which it has begun."""
    return resumed is not None and job.resumed is not None and resumed.path == job.resumed.path


# -- Says when a run waits for machines to join it, and gives up after a while if none does ------------------

# Time for which a run that goes on by itself waits for its machines to join it again. By default, `paceline join` tries
# to reach the coordinator for the same time (--wait).
RETURN_TIMEOUT_S = 60.0
SHORTAGE, LIFE = "shortage", "life"


class ShortageWatch:
    """Watches whether enough workers take part in a run that machines can join. Call `look` often.

    Args:
        coordinator: the coordinator of the run.
        patience_s: number of seconds for which the run may have too few workers; None for no limit.
        say: a function that prints a line.
        again: True if the run has gone on by itself after the loss of a server, so that machines join it again.
    """

    def __init__(
        self,
        coordinator: CoordinatorHost,
        patience_s: float | None,
        say: Callable[[str], None],
        *,
        again: bool = False,
    ) -> None:
        self._coordinator = coordinator
        self._patience_s = patience_s
        self._say = say
        self._again = again
        # One clock measures how long workers have been missing; the other measures the time since the last start.
        self._clocks: Clocks[str] = Clocks(time.monotonic(), gap_s=CLOCK_GAP_S)
        self._clocks.begin(LIFE, time.monotonic())
        self._paused = False
        self._vacant = 0  # number of servers for which the run was last said to be waiting

    def look(self) -> str:
        """Check the number of workers. Return why the run must end, or "" if it need not end."""
        now_s, report = time.monotonic(), self._coordinator.report
        shortage = report.shortage
        self._clocks.look(now_s)
        short_s = self._clocks.hold(SHORTAGE, now_s, holds=shortage != "")
        begun = report.model is not None
        self._look_for_servers()
        if self._paused != (begun and shortage != ""):
            self._paused = not self._paused
            if self._paused:
                self._say(f"the run is paused: it has {shortage}; it continues when more workers have joined")
            else:
                self._say("the run continues")
        if self._patience_s is None or short_s is None or short_s < self._patience_s:
            return ""
        brought = self._coordinator.job.remote_servers - len(report.vacant)
        if not (report.live or report.departed or brought):
            return (
                f"no machine has joined it within {self._patience_s:g} s (--wait). Wait longer, and look at what "
                "`paceline join` prints on the other machines"
            )
        return (
            f"it has {shortage}, and has waited for {self._patience_s:g} s (--wait). Let more machines join, or "
            "start the run with a smaller minimum (--workers MIN:MAX)"
        )

    def unreturned_server(self) -> RunFailedError | None:
        """Return a failure if the machine of a lost server should have joined the run again by now; None otherwise."""
        vacant = self._coordinator.report.vacant
        waited_s = self._clocks.waited_s(LIFE, time.monotonic())
        if not (self._again and vacant) or waited_s is None or waited_s < RETURN_TIMEOUT_S:
            return None
        return RunFailedError(
            f"server {min(vacant)}", f"its machine has not joined the run again within {RETURN_TIMEOUT_S:g} s"
        )

    def _look_for_servers(self) -> None:
        """If the run cannot begin only because servers are missing, say how many."""
        report = self._coordinator.report
        vacant = len(report.vacant) if len(report.live) >= self._coordinator.job.least else 0
        if vacant and vacant != self._vacant:
            self._say(f"waiting for {counted(vacant, 'server')}: paceline join --servers {vacant} ...")
        self._vacant = vacant
