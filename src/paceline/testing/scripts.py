"""Scripted tests: texts that contain commands for a state machine and the expected result of each command.

A line that starts with ">" is a command. The indented lines below a command are its result. Other lines are prose.

    > shard SYNC                     start with a new state machine of a shard
    > job SYNC | planner SYNC        start with a new state machine of the coordinator
    > at SECONDS                     set the current time for the following events
    > join WORKER [iteration=N]
    > push WORKER ITERATION [empty] [stop=SUPERSTEP members=W,W,...] [change=NUMBER to=SYNC members=W,W,...]
    > pull WORKER ITERATION
    > again WORKER ITERATION         repeat a pull
    > timer WORKER ITERATION         fire a timer
    > notify WORKER ITERATION [superstep=SUPERSTEP] [change=NUMBER]      report the end of an iteration
    > started WORKER ITERATION       report the start of an iteration
    > request WORKER NUMBER SYNC     request a change of the model
    > lose WORKER
    > finish WORKER
    > who waits                      list the workers that have an unanswered pull
    > which model                    show the model in force
"""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import assert_never

from ..core.job_sync import JobSync
from ..core.shard import ShardSync
from ..errors import InvalidEventError
from ..sync import parse
from ..sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    PublishChange,
    PublishPlan,
    ReportFault,
    RestartWorker,
    SetTimer,
)
from ..sync.events import (
    AnyEvent,
    Change,
    IterationFinished,
    IterationStarted,
    PullRepeated,
    PullRequested,
    PushReceived,
    Stop,
    SyncRequested,
    TimerFired,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)
from ..sync.ticks import TICKS_PER_S, in_ticks


def play(script: str) -> str:
    """Execute the commands in a script, and return the script with the actual result of each command.

    A test compares the returned text with the script.

    >>> print(play("> shard bsp\\n> join 0\\n> push 0 0\\n> pull 0 0"))
    > shard bsp
    > join 0
        nothing
    > push 0 0
        hold 0:0
        apply the mean of 0:0
    > pull 0 0
        answer 0:0
    <BLANKLINE>
    """
    return rewritten(script, _Stage().perform)


def rewritten(script: str, perform: Callable[[str], list[str]]) -> str:
    """Return a script with the actual result of each command. `perform` executes one command."""
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith(">"):
            lines.append(line)
            lines += [f"    {result}" for result in perform(line.removeprefix(">").strip())]
        elif not line.startswith("    "):
            lines.append(line)
    return "\n".join(lines) + "\n"


class _Stage:
    """Executes the commands of one script, and stores its state machine and the current time."""

    def __init__(self) -> None:
        self._machine: ShardSync | JobSync | None = None
        self._now_ticks = 0
        self._waiting: dict[int, int] = {}  # worker -> iteration of its unanswered pull

    def perform(self, command: str) -> list[str]:
        """Execute one command and return its result as a list of lines."""
        match command.split():
            case ["shard", sync]:
                self._machine, self._now_ticks, self._waiting = ShardSync(parse(sync)), 0, {}
                return []
            case ["job" | "planner", sync]:
                self._machine, self._now_ticks, self._waiting = JobSync(sync), 0, {}
                return []
            case ["at", now_s]:
                now_ticks = in_ticks(float(now_s))
                if now_ticks < self._now_ticks:
                    raise ValueError(f"the time cannot go back from {_seconds(self._now_ticks)} to {now_s} s")
                self._now_ticks = now_ticks
                return []
            case ["who", "waits"]:
                waiting = sorted(self._waiting.items())
                return [f"{worker} after {iteration}" for worker, iteration in waiting] or ["nobody"]
            case ["which", "model"] if self._machine is not None:
                return [str(self._machine.sync)]
            case [verb, *words]:
                return self._tell(self._event(verb, words))
            case _:
                raise ValueError(f"not a command: {command!r}")

    def _event(self, verb: str, words: list[str]) -> AnyEvent:
        now_ticks = self._now_ticks
        numbers = [int(word) for word in words if word.isdigit()]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        members = tuple(map(int, options["members"].split(","))) if "members" in options else ()
        number = int(options["change"]) if "change" in options else None
        match verb, numbers:
            case "join", [worker]:
                return WorkerJoined(
                    now_ticks=now_ticks, worker=worker, iteration=int(options.get("iteration", 0))
                )
            case "push", [worker, iteration]:
                stop = None
                if "stop" in options:
                    stop = Stop(superstep=int(options["stop"]), members=members)
                return PushReceived(
                    now_ticks=now_ticks,
                    worker=worker,
                    iteration=iteration,
                    empty="empty" in words,
                    stop=stop,
                    change=Change(number=number, members=members, sync=options["to"]) if number else None,
                )
            case "pull", [worker, iteration]:
                return PullRequested(now_ticks=now_ticks, worker=worker, iteration=iteration)
            case "again", [worker, iteration]:
                return PullRepeated(now_ticks=now_ticks, worker=worker, iteration=iteration)
            case "timer", [worker, iteration]:
                return TimerFired(now_ticks=now_ticks, worker=worker, iteration=iteration)
            case "notify", [worker, iteration]:
                superstep = int(options["superstep"]) if "superstep" in options else None
                return IterationFinished(
                    now_ticks=now_ticks,
                    worker=worker,
                    iteration=iteration,
                    superstep=superstep,
                    change=number,
                )
            case "started", [worker, iteration]:
                return IterationStarted(now_ticks=now_ticks, worker=worker, iteration=iteration)
            case "request", [worker, count]:
                return SyncRequested(
                    now_ticks=now_ticks, worker=worker, source="script", number=count, sync=words[-1]
                )
            case "lose", [worker]:
                return WorkerLost(now_ticks=now_ticks, worker=worker)
            case "finish", [worker]:
                return WorkerFinished(now_ticks=now_ticks, worker=worker)
            case _:
                raise ValueError(f"not a command: {' '.join([verb, *words])!r}")

    def _tell(self, event: AnyEvent) -> list[str]:
        if self._machine is None:
            raise ValueError("a script must begin with `shard SYNC` or `job SYNC`")
        try:
            actions = self._machine.handle(event)
        except InvalidEventError as error:
            return [f"refused: {error}"]
        finally:
            self._machine.validate()
        if isinstance(event, PullRequested):
            self._waiting[event.worker] = event.iteration
        if isinstance(event, WorkerLost | WorkerFinished):
            self._waiting.pop(event.worker, None)
        for action in actions:
            if isinstance(action, AnswerPull) and not isinstance(event, PullRepeated):
                asked = self._waiting.pop(action.worker, None)
                assert asked == action.iteration, (
                    f"{action} names the wrong iteration: the unanswered pull is for iteration {asked}"
                )
        return [_text(action) for action in actions] or ["nothing"]


def _text(action: AnyAction) -> str:
    match action:
        case ApplyPush(worker, iteration, scale):
            return f"apply {worker}:{iteration}" + (f" at scale {scale}" if scale != 1 else "")
        case HoldPush(worker, iteration):
            return f"hold {worker}:{iteration}"
        case ApplyMean(pushes):
            return "apply the mean of " + " ".join(f"{worker}:{iteration}" for worker, iteration in pushes)
        case DropPush(worker, iteration):
            return f"drop {worker}:{iteration}"
        case AnswerPull(worker, iteration):
            return f"answer {worker}:{iteration}"
        case PublishPlan(plan):
            stops = ", ".join(f"{worker} stops with {iteration}" for worker, iteration in plan.stops)
            wait, barrier = _seconds(plan.wait_ticks), _seconds(plan.barrier_ticks)
            return f"plan superstep {plan.superstep}: {stops}; wait {wait}, barrier {barrier}"
        case SetTimer(worker, iteration, due_ticks):
            return f"timer for {worker}:{iteration} at {_seconds(due_ticks)}"
        case RestartWorker(worker, iteration, attempt):
            return f"restart {worker}:{iteration}" + (f" attempt {attempt}" if attempt else "")
        case PublishChange(change):
            members = ",".join(map(str, change.members))
            return f"change {change.number} to {change.sync}, members {members}"
        case ReportFault(reason, _, sync):
            return f"fault: {reason}; from now on {sync}"
        case _:
            assert_never(action)


def _seconds(ticks: int) -> str:
    return f"{ticks / TICKS_PER_S:g} s"


# -- Notices when a state machine reads a clock or a global random generator ---------------------------------
#
# The decisions of a state machine may depend on its events alone. A state machine that reads a clock
# decides differently in a live run, in virtual time and in a replay. A state machine that draws from a global
# generator decides differently at each shard. Two state machines that receive the same events rarely differ
# because of a clock, so comparing them would not reveal that they read a clock. Therefore, the calls are watched.

CLOCKS = (
    time.time,
    time.time_ns,
    time.monotonic,
    time.monotonic_ns,
    time.perf_counter,
    time.perf_counter_ns,
    time.process_time,
    time.process_time_ns,
    time.localtime,
    time.gmtime,
    datetime.datetime.now,
    datetime.datetime.utcnow,
    datetime.date.today,
)
TIME = "reads a clock; use event.now_ticks, and self.ticks_per_s"
CHANCE = "draws from a global random generator; use paceline.sync.draws.uniform(seed, worker, iteration)"


@contextmanager
def forbidden() -> Iterator[None]:
    """Within this context, raise `AssertionError` in all code that reads a clock or a global random generator."""
    functions: dict[object, str] = {**dict.fromkeys(CLOCKS, TIME), os.urandom: CHANCE}
    own = id(random._inst)
    before = _states()

    def watch(frame: FrameType, event: str, called: object) -> None:
        if event != "c_call":
            return
        why = functions.get(called)
        if why is None and id(getattr(called, "__self__", None)) == own:
            why = CHANCE
        if why is not None:
            raise AssertionError(f"{getattr(called, '__qualname__', called)}() {why}")

    profile, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # callbacks that other code has added to the garbage collector may read clocks
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(profile)
        if collects:
            gc.enable()
    for name, state in _states().items():
        assert before.get(name) in (None, state), f"{name}: the model {CHANCE}"


def _states() -> dict[str, bytes]:
    """Return the states of the global generators whose functions Python does not show to a profiler."""
    states = {}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        states["numpy.random"] = pickle.dumps(numpy.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states
