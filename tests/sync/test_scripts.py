"""Scripted interactions with golden output: `scripts/*.txt`, one story each.

A line that starts with ">" is a command; the indented lines under it are what came of it. Everything else is prose.

    > shard SYNC | planner SYNC      a new machine; everything before it is forgotten
    > job SYNC                       likewise: the coordinator's, through all changes
    > at SECONDS                     what later events carry as their time
    > join WORKER [iteration=N]
    > push WORKER ITERATION [empty] [stop=SUPERSTEP members=W,W,...] [change=NUMBER to=SYNC members=W,W,...]
    > pull WORKER ITERATION | again WORKER ITERATION
    > timer WORKER ITERATION         one that was set is due
    > notify WORKER ITERATION [superstep=SUPERSTEP] [change=NUMBER]
    > started WORKER ITERATION
    > request WORKER NUMBER SYNC
    > lose WORKER | finish WORKER
    > who waits                      of those who have asked for weights
    > which model                    is in force

PACELINE_REWRITE_SCRIPTS=1 writes what comes out now into the files. Commit the difference only if you understand why
each line of it has changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import assert_never

import pytest

from paceline.core.job_sync import JobSync
from paceline.core.shard_sync import ShardSync
from paceline.errors import InvalidEventError
from paceline.sync import Machine, parse
from paceline.sync.actions import (
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
from paceline.sync.events import (
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

SCRIPTS = sorted(Path(__file__).with_name("scripts").glob("*.txt"))


class Stage:
    """What a script acts on."""

    def __init__(self) -> None:
        self._machine: Machine | None = None
        self._now_s = 0.0
        self._waiting: dict[int, int] = {}  # worker -> the iteration after which it waits

    def perform(self, command: str) -> list[str]:
        """Carry out one command; what came of it, in words."""
        match command.split():
            case ["shard", sync]:
                self.__init__()  # type: ignore[misc]
                self._machine = ShardSync(parse(sync))
                return []
            case ["job" | "planner", sync]:
                self.__init__()  # type: ignore[misc]
                self._machine = JobSync(sync)
                return []
            case ["at", now_s]:
                assert float(now_s) >= self._now_s
                self._now_s = float(now_s)
                return []
            case ["who", "waits"]:
                return [
                    f"{worker} after {iteration}" for worker, iteration in sorted(self._waiting.items())
                ] or ["nobody"]
            case ["which", "model"]:
                assert isinstance(self._machine, ShardSync | JobSync)
                return [str(self._machine.sync)]
            case [verb, *words]:
                return self._tell(self._event(verb, words))
            case _:
                raise ValueError(f"not a command: {command!r}")

    def _event(self, verb: str, words: list[str]) -> AnyEvent:
        now_s = self._now_s
        numbers = [int(word) for word in words if word.isdigit()]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        members = tuple(map(int, options["members"].split(","))) if "members" in options else ()
        number = int(options["change"]) if "change" in options else None
        match verb, numbers:
            case "join", [worker]:
                return WorkerJoined(now_s=now_s, worker=worker, iteration=int(options.get("iteration", 0)))
            case "push", [worker, iteration]:
                stop = None
                if "stop" in options:
                    stop = Stop(superstep=int(options["stop"]), members=members)
                return PushReceived(
                    now_s=now_s,
                    worker=worker,
                    iteration=iteration,
                    empty="empty" in words,
                    stop=stop,
                    change=Change(number=number, members=members, sync=options["to"]) if number else None,
                )
            case "pull", [worker, iteration]:
                return PullRequested(now_s=now_s, worker=worker, iteration=iteration)
            case "again", [worker, iteration]:
                return PullRepeated(now_s=now_s, worker=worker, iteration=iteration)
            case "timer", [worker, iteration]:
                return TimerFired(now_s=now_s, worker=worker, iteration=iteration)
            case "notify", [worker, iteration]:
                superstep = int(options["superstep"]) if "superstep" in options else None
                return IterationFinished(
                    now_s=now_s, worker=worker, iteration=iteration, superstep=superstep, change=number
                )
            case "started", [worker, iteration]:
                return IterationStarted(now_s=now_s, worker=worker, iteration=iteration)
            case "request", [worker, count]:
                return SyncRequested(
                    now_s=now_s, worker=worker, source="script", number=count, sync=words[-1]
                )
            case "lose", [worker]:
                return WorkerLost(now_s=now_s, worker=worker)
            case "finish", [worker]:
                return WorkerFinished(now_s=now_s, worker=worker)
            case _:
                raise ValueError(f"not a command: {verb} {words}")

    def _tell(self, event: AnyEvent) -> list[str]:
        assert self._machine is not None, "a script begins with a machine"
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
                assert self._waiting.pop(action.worker) == action.iteration
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
            return f"plan superstep {plan.superstep}: {stops}; wait {plan.wait_s:g} s, barrier {plan.barrier_s:g} s"
        case SetTimer(worker, iteration, due_s):
            return f"timer for {worker}:{iteration} at {due_s:g} s"
        case RestartWorker(worker, iteration):
            return f"restart {worker}:{iteration}"
        case PublishChange(change):
            members = ",".join(map(str, change.members))
            return f"change {change.number} to {change.sync}, members {members}"
        case ReportFault(reason, _, sync):
            return f"fault: {reason}; from now on {sync}"
        case _:
            assert_never(action)


def play(script: str) -> str:
    """The script with what comes out now."""
    stage = Stage()
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith(">"):
            lines.append(line)
            lines += [f"    {result}" for result in stage.perform(line.removeprefix(">").strip())]
        elif not line.startswith("    "):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_story_goes_as_written(path: Path) -> None:
    script = path.read_text()
    played = play(script)
    if os.environ.get("PACELINE_REWRITE_SCRIPTS"):
        path.write_text(played)
    else:
        assert played == script


def test_there_are_stories_of_every_model() -> None:
    assert {path.stem for path in SCRIPTS} >= {
        "bsp",
        "asp",
        "ssp",
        "elastic-bsp-shard",
        "elastic-bsp-planner",
        "naive-waiting",
        "spec-sync",
        "change-at-a-shard",
        "change-at-the-coordinator",
    }
    assert all("refused:" in path.read_text() for path in SCRIPTS)
