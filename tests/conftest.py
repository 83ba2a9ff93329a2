"""Fixtures for tests that train: a whole run on the threads of this process, over real sockets and memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from paceline.core.loader_ledger import PositionCounts
from paceline.core.metrics import MetricHistory
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job import Assignment
from paceline.run.job_options import make_job
from paceline.run.server import ServerHost
from paceline.run.worker import WorkerSession
from paceline.shard.optimizers import defer_dynamo
from paceline.sync import MODELS, parse
from paceline.sync import plugins as loading
from paceline.sync.ticks import TICKS_PER_S
from paceline.trace.activity_cells import TimeUse, time_use
from paceline.trace.measures import meter_of
from paceline.trace.recording import Trace, read_run
from paceline.train import session as sessions
from paceline.train.generator_states import generators_lock
from tests.support.copies import copied_pools
from tests.support.garbage import spare_what_exists
from tests.support.live import mark, require_whole_times
from tests.support.quick import LONG_FILES, QUICK, forbid_processes, is_quick
from tests.support.warm import WarmStarts

__all__ = ["copied_pools", "mark"]  # fixtures

settings.register_profile("paceline", deadline=None)  # no test fails by the clock
settings.load_profile("paceline")

CONFIG = tempfile.TemporaryDirectory(prefix="paceline-config-")

collect_ignore_glob = [
    "lab/checked_scripts/*",
    "train/ported_scripts/*",
    "support/failing_models.py",
]  # used by tests of their own


def pytest_configure() -> None:
    """Hear SIGINT and SIGQUIT, also in the background, where a shell has them ignored: some tests send them.

    The collection of tests creates objects that stay, so the garbage collector would search them in vain meanwhile.
    """
    gc.disable()
    defer_dynamo()  # as in a process of a run; otherwise, the first optimizer imports the compiler for a second
    # The key of this user stays as it is; the processes that tests start have the key of the tests.
    os.environ["XDG_CONFIG_HOME"] = CONFIG.name
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that fails because the installed torch is older than Muon."""
    try:
        return (yield)
    except Exception as error:
        if not hasattr(torch.optim, "Muon") and "Muon" in str(error):
            pytest.skip(f"torch {torch.__version__} has no Muon")
        raise


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In `make quick`, leave out the files that do not belong to it, before they are imported."""
    name = collection_path.name
    is_test = name.startswith("test_") and name.endswith(".py")
    return True if QUICK and is_test and not is_quick(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files come first, so that of several that are tested at once none ends long after the others."""
    place = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    spare_what_exists()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # tests make many objects that live as long as they run, and few cycles
    if QUICK:
        sys.addaudithook(forbid_processes)


@pytest.fixture(autouse=True, scope="session")
def warm_starts() -> Iterator[WarmStarts]:
    """Programs start warm; see `tests/support/warm.py`. With PACELINE_PLAIN_STARTS=1, all are executed."""
    starts = WarmStarts(dict(os.environ))
    starts.allowed = not os.environ.get("PACELINE_PLAIN_STARTS")
    yield starts
    starts.close()


@pytest.fixture
def plain_starts(warm_starts: WarmStarts, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, all programs are executed."""
    monkeypatch.setattr(warm_starts, "allowed", False)


@pytest.fixture(autouse=True, scope="module")
def imported_so_far() -> None:
    """Spare the garbage collector what earlier tests have imported, such as the compiler of torch."""
    spare_what_exists()


@pytest.fixture(autouse=True)
def no_imports_of_other_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Modules that a test writes, and where they are, are unknown to later tests, which may use the same names."""
    # The processes of a pool import what this process has imported by name.
    monkeypatch.setattr(loading, "_imported", {})
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before, written = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations run in this process, as on a machine with one core: other processes import everything first."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)


@pytest.fixture
def machines_alone() -> Iterator[None]:
    """No other test makes machines out of namespaces meanwhile: whoever does removes what the killed have left."""
    with Path(tempfile.gettempdir(), "paceline-tests-machines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def own_models() -> Iterator[None]:
    """The sync models that a test registers, and their modules, are unknown to later tests."""
    before = dict(MODELS)
    yield
    for name in MODELS.keys() - before.keys():
        sys.modules.pop(MODELS.pop(name).__module__, None)
    parse.cache_clear()


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_models: None) -> Path:
    """A folder with the module `failing_models`, which is imported as a user's module is."""
    shutil.copy(Path(__file__).with_name("support") / "failing_models.py", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loading.load_models("", ["failing_models"])
    return tmp_path


@dataclass
class ThreadedRun:
    """What a run on threads left behind."""

    state_dict: dict[str, torch.Tensor]
    traces: list[Trace]
    run_dir: Path
    errors: dict[int, BaseException] = field(default_factory=dict)  # worker -> what its function raised
    faults: list[str] = field(default_factory=list)  # what the run's summary tells of problems
    results: dict[int, object] = field(default_factory=dict)  # worker -> what its function returned
    time_use: dict[int, TimeUse] = field(default_factory=dict)  # worker -> what it has spent its time on
    samples: dict[str, PositionCounts] = field(default_factory=dict)  # loader -> what became of its samples
    history: MetricHistory = field(default_factory=MetricHistory)  # what the function has logged
    servers: list[ServerHost] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # workers
    repeated_bases: int = 0  # how often a worker had come to another base than its server

    @property
    def shards(self) -> list[Trace]:
        return [trace for trace in self.traces if trace.header.host == "shard"]


RunOnThreads = Callable[..., ThreadedRun]


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Threads that are started meanwhile share the core of this one. Handing the interpreter's lock to a thread on
    another core costs a third of their CPU time. Only Linux can do this."""
    if not sys.platform.startswith("linux"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def run_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunOnThreads:
    """run_on_threads(function, workers=..., servers=..., sync=..., ...): the same hosts as a live run's, each on
    a thread of this process instead of a process of its own. `function()` trains; the session is its thread's.
    Raises what a worker raised, unless `keep_errors=True`. With `late`, the worker with the highest index joins the
    run when another one has set this event."""
    count = 0
    begin = _SingleProcessDataLoaderIter.__init__

    def begin_alone(self: Any, *args: Any, **options: Any) -> None:
        # A loader of worker 0 draws a seed from torch's default generator, which the threads share. Another worker may
        # be drawing its order from the same generator.
        with generators_lock:
            begin(self, *args, **options)

    monkeypatch.setattr(_SingleProcessDataLoaderIter, "__init__", begin_alone)

    @on_one_core()
    def run(
        function: Callable[[], object],
        *,
        keep_errors: bool = False,
        late: threading.Event | None = None,
        **options: Any,
    ) -> ThreadedRun:
        nonlocal count
        count += 1
        options = {"workers": 2, "servers": 1, "run_dir": tmp_path / f"run-{count}", **options}
        if late is not None:
            options |= {"transport": "tcp", "least": options["workers"] - 1, "joined": True}
        job = make_job(**options)
        coordinator = CoordinatorHost.listen(job)
        if late is not None:
            coordinator.core.invite(job.workers - 1)
        coordinator.start()
        outcome = ThreadedRun({}, [], Path(job.run_dir))
        crashes: list[BaseException] = []  # of servers: nothing that a worker does may cause one

        def serve(server: ServerHost) -> None:
            try:
                server.run()
            except BaseException as error:
                crashes.append(error)

        def work(index: int) -> None:
            place = Assignment(job=job, role="worker", index=index, coordinator=coordinator.address)
            session = WorkerSession.connect(place)
            sessions.install(session, for_thread=True)
            try:
                outcome.results[index] = function()
                session.finish()
            except BaseException as error:
                outcome.errors[index] = error
            finally:
                session.close()

        # Servers connect first: a worker that fails at once must not end the run before they are there.
        places = [
            Assignment(job=job, role="server", index=i, coordinator=coordinator.address)
            for i in range(job.servers)
        ]
        connected = [ServerHost.connect(place) for place in places]
        outcome.servers = connected
        servers = [threading.Thread(target=serve, args=(server,), daemon=True) for server in connected]
        workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(job.workers)]
        for thread in [*servers, *workers[: job.workers - (late is not None)]]:
            thread.start()
        try:
            if late is not None:
                assert late.wait(60.0), "the late worker was not called"
                invited: Future[dict[int, int]] = Future()
                coordinator.call(lambda: invited.set_result(coordinator.core.invite(1)))
                assert invited.result(30.0) == {job.workers - 1: 0}
                workers[-1].start()
            for thread in workers:
                thread.join(60.0)
                assert not thread.is_alive(), "a worker hangs"
            if coordinator.core.model is not None and outcome.results and not crashes:
                assert coordinator.over.wait(10.0), "a worker has not left"
                collection = coordinator.collect()
                assert collection.finished.wait(10.0), "the weights have not arrived"
                outcome.state_dict = collection.result().completed(outcome.run_dir).state_dict
        finally:
            coordinator.stop()
            for thread in servers:
                thread.join(10.0)
            if crashes:
                raise crashes[0]  # whatever else went wrong, this is why
        assert not any(thread.is_alive() for thread in servers), "a server hangs"
        outcome.faults = coordinator.core.faults
        outcome.lost = coordinator.core.members.lost
        outcome.repeated_bases = coordinator.core.repeated_bases
        outcome.samples = coordinator.core.data.counts()
        outcome.traces = read_run(Path(job.run_dir))
        outcome.history = MetricHistory(coordinator.core.history.metrics())
        if outcome.shards and len(outcome.shards) == job.shards:
            meter = meter_of(outcome.shards)
            assert meter is not None
            spent = coordinator.core.time_ledger.totals(job.now_ticks())
            outcome.time_use = time_use(meter.presences(), spent, TICKS_PER_S)
            require_whole_times(outcome.time_use, meter.measures())
        if outcome.errors and not keep_errors:
            raise next(iter(outcome.errors.values()))
        return outcome

    return run
