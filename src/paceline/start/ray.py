"""A run whose processes are placed by Ray.

The driver asks Ray for one placement group. The group has one bundle of resources for the coordinator and the servers,
and one bundle for each of the minimum number of workers. Ray reserves all bundles or none. Each further worker is a
separate request, which Ray fulfills when there are resources, perhaps because Ray has added a node. Each bundle and
each further request is a *place* for one program: a thin actor starts the program (see `ray_program`), which serves the
run or joins it. The actors do nothing else. The rest is as in a run that `paceline serve` and `paceline join` have
started.

If an actor dies, or its worker is lost or leaves, the driver requests the place again, and the worker joins as a new
incarnation. Before Ray takes away a node, it lists the node as draining, but sends no signal to the processes there.
So the driver looks at this list, and lets the workers on draining nodes leave.

If the node of the program that serves the run sees the run directory, the program works in this directory, so that
checkpoints outlive the driver and the node. If a server is lost, the program continues the run from its newest
checkpoint without help from the driver. If the program itself is lost, the driver requests all places anew, and the run
goes on from its newest checkpoint. If the node does not see the run directory, the program works in a directory of its
own. In this case, the driver copies to this node the checkpoint with which the run begins. At the end of the run, the
driver fetches the files that the program has written.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from rich.console import Console
from safetensors.torch import load_file

from ..checkpoints.manifest import files_in, origin_of
from ..core.liveness import Clocks
from ..errors import ConfigurationError, PeerLostError, RunFailedError
from ..files import Unfinished
from ..run.job import CHECKPOINTS, Job, ResumedFrom, claim_run_dir
from ..run.resuming import newest_of
from ..run.run_lock import FILE_NAME, RunLock, is_lock, run_in
from ..trace.report import NAME
from ..words import counted
from .local import Rejoins
from .processes.interruption import Interruption
from .ray_program import END_TIMEOUT_S, LEAVE_TIMEOUT_S, HostReport, RayHost
from .results import RunResult, command_of, make_room, write_summary
from .run import RestartPolicy, server_payload_of, take_lock
from .terminal import StandardStreams, print_sentence

POLL_INTERVAL_S = 0.1
DRAIN_INTERVAL_S = 1.0
# Time after which the user is told that Ray has not placed the run yet.
PLACEMENT_S = 10.0
# Maximum time to wait for the workers' programs to end after the run is over.
GRACE_S = 15.0
# Maximum time to wait for an answer of an actor that may be dead.
ANSWER_TIMEOUT_S = 10.0
CHUNK_BYTES = 16 * 2**20
THREADS = 8  # maximum number of methods of an actor that run at the same time

LEAVING = "Ray is about to take away the node"
LOST = "the actor with its coordinator and its servers was lost"


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        ConfigurationError: Ray is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigurationError(
            "engine is 'ray', but ray is not installed: pip install paceline[ray]"
        ) from error
    return ray


def start_on_ray(
    job: Job,
    worker_payload: bytes,
    path: Sequence[str],
    *,
    resources: Mapping[str, float],
    console: Console,
    snapshot_every_s: float | None,
    show_all: bool,
    source: str,
    force: bool = False,
) -> RunResult:
    """Start a run on the Ray cluster, wait until it has ended, and return the result. See `launch`.

    If this program is not connected to a cluster, it is connected until the run has ended.

    Args:
        job: the configuration of the run.
        worker_payload: the module search path and the training function.
        path: module search path from which the servers import user-defined conditions.
        resources: resources of each worker.
        console: console for messages.
        snapshot_every_s: see `launch`.
        show_all: see `launch`.
        source: see `Asked`.
        force: see `start`.
    """
    ray = import_ray()
    server_payload = server_payload_of(job, path)
    connected = ray.is_initialized()
    if not connected:
        ray.init()
    try:
        with Interruption() as interruption:
            job, lock = take_lock(claim_run_dir(job), interruption, force=force)
            with lock:
                run = RayRun(ray, job, resources, console, interruption, lock)
                try:
                    return run.carry_out(worker_payload, server_payload, snapshot_every_s, show_all, source)
                finally:
                    run.close()
    finally:
        if not connected:
            ray.shutdown()


class _Place:
    """A place for a program: an actor, which Ray has created or will create, and what has become of it.

    Args:
        name: name of the place in messages.
        options: where and with which resources Ray creates the actor.

    Attributes:
        actor: the actor; None if there is none at present.
        node: id of the node on which the actor runs; "" until the actor has been created.
        address: address of this node.
        folder: directory of the program's files on this node: the run directory, if the program serves the run and
            its node sees this directory; else a directory of its own.
        joining: True once the program has been told to join the run.
        leaving: True once the program has been asked to leave.
        over: True if no further actors are requested for this place.
        due_s: time on the monotonic clock from which an actor is requested.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self.options = options
        self.rejoins = Rejoins()
        self.over = False
        self.due_s = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget the actor."""
        self.actor: Any = None
        self.node = self.address = self.folder = ""
        self.joining = self.leaving = False


class RayRun:
    """Carries out one run on a Ray cluster.

    Args:
        ray: the module `ray`.
        job: the configuration of the run, with its run directory on this machine.
        resources: resources of each worker.
        console: console for messages.
        interruption: counter of the signals that ask the run to end.
        lock: the lock on the run directory.
    """

    def __init__(
        self,
        ray: Any,
        job: Job,
        resources: Mapping[str, float],
        console: Console,
        interruption: Interruption,
        lock: RunLock,
    ) -> None:
        self._ray = ray
        self._lock = lock
        self._job = job
        self._console = console
        self._interruption = interruption
        self._actor_class = ray.remote(RayHost)
        bundles = [{"CPU": float(job.servers)}, *[dict(resources)] * job.least]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        in_group = [self._options(bundle, index) for index, bundle in enumerate(bundles)]
        further = [self._options(resources)] * (job.workers - job.least)
        self._server = _Place("the place of the servers", in_group[0])
        self._workers = [
            _Place(f"place {index} for a worker", options)
            for index, options in enumerate([*in_group[1:], *further])
        ]
        # pending answer of an actor -> its place, and the method that was called
        self._asked: dict[Any, tuple[_Place, str]] = {}
        self._ends: list[Any] = []  # answers of the actors whose programs are ending
        self._coordinator = ""  # address of the coordinator, once this is known
        self._joined = False  # True once a worker has joined
        self._ending = False  # True once a worker has finished or has failed
        self._failure: RunFailedError | ConfigurationError | None = None
        self._ended: HostReport | None = None  # how the run has ended
        self._restarts = RestartPolicy()
        self._interrupted = ""  # why the run was interrupted, as a sentence
        # A node that sees this file sees the run directory.
        self._mark = Path(job.run_dir, f".seen-{secrets.token_hex(8)}")
        self._drains_s = 0.0
        # Measures for how long the run has been waiting for Ray to place it.
        self._unplaced: Clocks[str] = Clocks(time.monotonic(), gap_s=1.0)
        self._told = False  # True if the user has been told of this wait

    def carry_out(
        self,
        worker_payload: bytes,
        server_payload: bytes,
        snapshot_every_s: float | None,
        show_all: bool,
        source: str,
    ) -> RunResult:
        """Request the actors, wait for the end of the run, and return the result. See `launch` for the exceptions."""
        self._payload = self._ray.put(worker_payload)
        self._server_payload = server_payload
        self._snapshot_every_s, self._show_all, self._source = snapshot_every_s, show_all, source
        self._request(self._server)
        asked = 0
        while self._ended is None:
            self._request_workers()
            self._await_answers()
            self._look_at_placement()
            self._look_at_nodes()
            if self._lock.lost:  # `close` ends all programs immediately
                raise RunFailedError("the launcher", self._lock.lost)
            if self._interruption.count > asked:
                asked = self._interruption.count
                self._end_run()
                if self._interruption.hurried() or not self._coordinator:
                    raise self._interruption.exception("all processes of the run have ended", {})
            if not (self._ending or self._failure) and all(place.over for place in self._workers):
                self._fail(
                    RunFailedError("the run", "every worker was lost so often that it is not requested again")
                )
        deadline_s = time.monotonic() + GRACE_S
        while any(place.joining for place in self._workers) and time.monotonic() < deadline_s:
            self._await_answers()
        return self._result(self._ended)

    def close(self) -> None:
        """End all programs and actors of the run that still exist."""
        for place in [self._server, *self._workers]:
            self._drop(place, at_once=self._interruption.hurried() or bool(self._lock.lost))
        self._mark.unlink(missing_ok=True)
        if self._ends:
            self._ray.wait(self._ends, num_returns=len(self._ends), timeout=END_TIMEOUT_S + ANSWER_TIMEOUT_S)
        self._ray.util.remove_placement_group(self._group)

    # -- places -------------------------------------------------------------------------------------------

    def _options(self, resources: Mapping[str, float], bundle: int | None = None) -> dict[str, Any]:
        """Return the options of an actor. Without the index of a bundle, the actor is not in the placement group."""
        named = {"CPU", "GPU", "memory"}  # Ray has a separate option for each of these
        others = {name: amount for name, amount in resources.items() if name not in named}
        options: dict[str, Any] = {
            "num_cpus": resources.get("CPU", 0.0),
            "num_gpus": resources.get("GPU", 0.0),
            "resources": others,
            **({"memory": resources["memory"]} if "memory" in resources else {}),
            "max_concurrency": THREADS,
            "max_restarts": 0,
        }
        if bundle is not None:
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            options["scheduling_strategy"] = strategy(self._group, placement_group_bundle_index=bundle)
        return options

    def _request(self, place: _Place) -> None:
        place.actor = self._actor_class.options(**place.options).remote()
        if place is self._server:
            self._mark.touch()
            self._ask(place, "place", str(self._mark))
        else:
            self._ask(place, "place")

    def _request_workers(self) -> None:
        for place in self._workers:
            if place.actor is None and not place.over and time.monotonic() >= place.due_s:
                self._request(place)

    def _ask(self, place: _Place, method: str, *arguments: object) -> None:
        """Call a method of the actor of a place. `_await_answers` handles the answer."""
        self._asked[getattr(place.actor, method).remote(*arguments)] = place, method

    def _drop(self, place: _Place, at_once: bool = False) -> None:
        """Let the program and the actor of a place end, or withdraw the request if there is no actor yet."""
        self._asked = {answer: asked for answer, asked in self._asked.items() if asked[0] is not place}
        if place.node:
            self._ends.append(place.actor.end.remote(at_once))
        elif place.actor is not None:
            self._ray.kill(place.actor)
        place.clear()

    # -- during the run -----------------------------------------------------------------------------------

    def _await_answers(self) -> None:
        """Wait for a short time for answers of the actors, and handle them."""
        if not self._asked:
            time.sleep(POLL_INTERVAL_S)
            return
        errors = self._ray.exceptions
        # The actor is also lost if Ray's memory monitor has killed it, or if the node that holds its answer has died.
        losses = (errors.RayActorError, errors.OutOfMemoryError, errors.ObjectLostError)
        ready, _ = self._ray.wait(
            list(self._asked), num_returns=1, timeout=POLL_INTERVAL_S, fetch_local=False
        )
        for answer in ready:
            place, method = self._asked.pop(answer)
            try:
                value = self._ray.get(answer)
            except losses as error:
                self._lost(place, str(error).partition("\n")[0])
                continue
            if method == "place":
                place.node, place.address, place.folder = value
                self._begin(place)
            elif method == "hear" and value is None:
                self._lost(place, "its program has ended")
            elif method == "hear":
                self._handle(place, pickle.loads(value))

    def _begin(self, place: _Place) -> None:
        """Send the order to an actor that has been created, if the order can be carried out already."""
        if place is self._server:
            self._mark.unlink(missing_ok=True)
            self._order(
                place,
                self._server_payload,
                job=self._job_at(place),
                host=place.address,
                snapshot_every_s=self._snapshot_every_s,
                command=command_of(),
                source=self._source,
                interrupted=self._interrupted,
                lock_token=self._lock.token,
            )
        elif self._coordinator and place.node and not place.joining:
            place.joining = True
            streams = StandardStreams(show_all=self._show_all)
            self._order(
                place, self._payload, address=self._coordinator, token=self._job.token, streams=streams
            )

    def _order(self, place: _Place, payload: Any, **options: Any) -> None:
        """Let the program of a place serve the run, or join it."""
        order = place is self._server, self._console.quiet, options
        place.actor.order.remote(pickle.dumps(order), payload)
        self._ask(place, "hear")

    def _handle(self, place: _Place, report: HostReport) -> None:
        if report.how == "served":
            self._coordinator = report.words
            self._ask(place, "hear")
            for worker in self._workers:
                self._begin(worker)
            return
        self._collect(place)
        if place is self._server:
            self._ended = report
            return
        self._joined = self._joined or report.how != "refused"
        if report.how == "refused" and not self._joined:
            self._fail(ConfigurationError(f"a worker cannot join the run: {report.words}"))
        if report.how in ("finished", "failed"):
            # The run ends soon, because a worker has finished or has failed. In both cases, the coordinator knows why.
            self._ending = True
            for each in self._workers:
                each.over = True
                if not each.joining:
                    self._drop(each)
            self._drop(place)
        else:
            self._request_again(place, f"its worker {_HOW[report.how]}", report.words)

    def _lost(self, place: _Place, reason: str) -> None:
        """Go on without an actor that has died, or whose program has ended without a report."""
        if place is self._server:
            self._go_on(RunFailedError("the run", f"{LOST}: {reason}"))
            return
        self._request_again(place, "its actor was lost", reason)

    def _go_on(self, loss: RunFailedError) -> None:
        """Serve the run anew, from its newest checkpoint, after the place with its servers was lost.

        Raises:
            RunFailedError: the run does not go on.
        """
        self._drop(self._server, at_once=True)
        if self._failure is not None or self._interruption.asked:
            raise self._failure or loss
        for place in self._workers:
            if place.joining:
                self._collect(place)
            self._drop(place, at_once=True)
        self._await_end_of_server()
        resumed = self._newest(loss)
        self._job = self._restarts.next(self._job, resumed)
        self._interrupted = f"{loss.reason.rstrip('.')}."
        self._coordinator, self._joined, self._ending = "", False, False
        for place in self._workers:
            place.over, place.due_s = False, 0.0
        self._say(f"{self._interrupted} The run goes on from checkpoint {Path(resumed.path).name}.")
        self._request(self._server)

    def _await_end_of_server(self) -> None:
        """Wait until a program that has lost its actor no longer writes to the run directory."""
        run_dir, deadline_s = Path(self._job.run_dir), time.monotonic() + LEAVE_TIMEOUT_S
        while (run_dir / FILE_NAME).exists() and time.monotonic() < deadline_s:
            with contextlib.suppress(ConfigurationError):  # the program is on another machine
                try:
                    run_in(run_dir)
                except PeerLostError:  # the program has ended
                    return
            time.sleep(POLL_INTERVAL_S)

    def _newest(self, loss: RunFailedError) -> ResumedFrom:
        """Return the checkpoint with which the run goes on after the place with its servers was lost.

        Raises:
            RunFailedError: the run does not go on. The error is `loss`, with a note that says why, or what the user can
                do.
        """
        job = self._job
        place = job.checkpoint_dir or str(Path(job.run_dir, CHECKPOINTS))
        try:
            found = newest_of(job)
        except ConfigurationError as error:
            loss.add_note(str(error))
            raise loss from None
        if found.checkpoint is None:
            loss.add_note(
                f"the run could not go on by itself, because there is no whole checkpoint in {place} "
                f"(--checkpoint-every). {' '.join(found.faults)}".rstrip(". ")
            )
            raise loss
        if (resumed := self._restarts.resumed(job, found)) is None:
            path = found.checkpoint.path
            loss.add_note(
                f'checkpoint {path.name} is whole; to go on from it: paceline.launch(..., resume="{job.run_dir}")'
            )
            raise loss
        return resumed

    def _job_at(self, place: _Place) -> Job:
        """Return the configuration of the run for the place that serves it.

        If the node of this place does not see the run directory, the files with which the run begins are copied to the
        node.
        """
        job, run_dir = self._job, Path(self._job.run_dir)
        if job.resumed is None or place.folder == str(run_dir):
            return structs.replace(job, run_dir=place.folder)
        checkpoint = Path(job.resumed.path)
        there = Path(CHECKPOINTS, origin_of(checkpoint))
        files = {str(there / path.relative_to(checkpoint)): path for path in files_in(checkpoint)}
        if (described := run_dir / NAME).exists():
            files[NAME] = described
        for name, path in files.items():
            with path.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    self._ray.get(place.actor.write.remote(name, data))
        make_room(job)
        copied = structs.replace(job.resumed, path=str(Path(place.folder, there)))
        return structs.replace(job, run_dir=place.folder, resumed=copied)

    def _request_again(self, place: _Place, what: str, reason: str) -> None:
        """Request a place again after a pause, unless this has been done too often or the run is ending."""
        self._drop(place)
        if place.over or self._ended is not None or self._failure is not None or self._interruption.asked:
            place.over = True
            return
        pause_s = place.rejoins.pause_s()
        place.over = pause_s is None
        place.due_s = time.monotonic() + (pause_s or 0.0)
        then = "not requested again" if pause_s is None else f"requested again in {pause_s:g} s"
        self._say(f"{place.name}: {what}{f': {reason}' if reason else ''}; {then}")

    def _look_at_placement(self) -> None:
        """If Ray has not placed the run yet, tell the user."""
        now_s = time.monotonic()
        pausing = sum(place.actor is None and now_s < place.due_s for place in self._workers)
        placed = self._server.node and sum(map(_placed, self._workers)) + pausing >= self._job.least
        self._unplaced.look(now_s)
        unplaced_s = self._unplaced.hold("unplaced", now_s, holds=not placed)
        self._told = self._told and not placed
        if unplaced_s is not None and unplaced_s > PLACEMENT_S and not self._told:
            self._told = True
            total = self._ray.cluster_resources()
            needs = " and ".join(_listed(bundle) for bundle in self._group.bundle_specs)
            self._say(
                f"Ray has not placed {counted(self._job.servers, 'server')} and {counted(self._job.least, 'worker')} "
                f"yet: they need {needs} at the same time, and the cluster has {_listed(total)}, of which other "
                "programs may use a part"
            )

    def _look_at_nodes(self) -> None:
        """If Ray is about to take away a node, let the program on this node leave."""
        now_s = time.monotonic()
        if now_s < self._drains_s:
            return
        self._drains_s = now_s + DRAIN_INTERVAL_S
        draining = self._draining()
        if self._server.node in draining and self._failure is None and not self._server.leaving:
            self._server.leaving = True
            failure = RunFailedError("the run", f"{LEAVING} that serves it")
            try:
                resumed = self._newest(failure)
            except RunFailedError:
                self._fail(failure)
            else:
                name = Path(resumed.path).name
                self._say(
                    f"{LEAVING} that serves the run. The run will go on from its newest checkpoint (at present {name})"
                )
        for place in self._workers:
            if place.joining and not place.leaving and place.node in draining:
                place.leaving = True
                self._say(f"{place.name}: {LEAVING}, so the worker leaves")
                place.actor.signal.remote(signal.SIGTERM)

    def _draining(self) -> set[str]:
        """Return the ids of the nodes that Ray is about to take away. Ray has no public function for this."""
        with contextlib.suppress(Exception):
            return set(self._ray._private.state.state.get_draining_nodes())
        return set()

    def _fail(self, failure: RunFailedError | ConfigurationError) -> None:
        """End the run because of a failure that the coordinator does not know of."""
        self._failure = failure
        if self._coordinator:
            self._end_run()
        else:
            raise failure

    def _end_run(self) -> None:
        """Let the run end in an orderly way, as Ctrl-C does. A second call ends it without waiting for anything."""
        if self._server.node:
            self._server.actor.signal.remote(signal.SIGINT)

    # -- results ------------------------------------------------------------------------------------------

    def _collect(self, place: _Place) -> None:
        """After a program has ended, copy its files to the run directory."""
        actor, get = place.actor, self._ray.get
        try:
            for name, size in get(actor.files.remote(), timeout=ANSWER_TIMEOUT_S):
                if is_lock(name):  # a file of the lock on the program's directory
                    continue
                target = Path(self._job.run_dir, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with Unfinished(target) as unfinished:
                    # A worker that has joined again continues the log of its earlier incarnation, so the log is
                    # appended to the existing file.
                    if place is not self._server and target.exists():
                        shutil.copyfile(target, unfinished)
                    with unfinished.open("ab") as file:
                        for offset in range(0, size, CHUNK_BYTES):
                            file.write(get(actor.read.remote(name, offset, CHUNK_BYTES)))
        except (OSError, self._ray.exceptions.RayError) as error:
            self._say(f"{place.name}: its files could not be copied to {self._job.run_dir}: {error}")

    def _result(self, ended: HostReport) -> RunResult:
        """Return the result of the run, or raise its failure."""
        folder, run_dir = self._server.folder, Path(self._job.run_dir)
        if (failure := ended.error) is not None:
            failure.__notes__ = [
                note.replace(folder, str(run_dir)) for note in getattr(failure, "__notes__", [])
            ]
            raise failure
        assert ended.result is not None
        summary, snapshots, problems = ended.result
        if summary:
            text = msgspec.json.encode(summary).decode().replace(folder, str(run_dir))
            summary = msgspec.json.decode(text)
            problems = [*problems, *filter(None, [write_summary(summary, run_dir)])]
        weights = run_dir / "weights.safetensors"
        if self._failure is not None:
            if weights.exists():
                self._failure.add_note(f"the weights at the time of the failure were saved to {weights}")
            raise self._failure
        if ended.how == "interrupted":
            if weights.exists():
                self._say(f"the weights at the time of the signal were saved to {weights}")
            raise self._interruption.exception("all processes of the run have ended", summary)
        if not weights.exists():
            failure = RunFailedError("the run", f"it has finished, but its weights are not in {run_dir}")
            for problem in problems:
                failure.add_note(problem)
            raise failure
        return RunResult(load_file(weights), summary, run_dir, snapshots, tuple(problems))

    def _say(self, line: str) -> None:
        print_sentence(self._console, line)


_HOW = {"left": "has left", "lost": "was lost", "refused": "was refused"}


def _placed(place: _Place) -> bool:
    return place.node != "" or place.over


def _listed(resources: Mapping[str, float]) -> str:
    """Return the amounts of resources that users name, for example "4 CPU, 1 GPU"."""
    named = (name for name in sorted(resources) if not name.startswith(("node:", "memory", "object_store")))
    return ", ".join(f"{resources[name]:g} {name}" for name in named)
