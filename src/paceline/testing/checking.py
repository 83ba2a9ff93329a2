"""`check`, which tests a sync model with random events and searches all interleavings of small jobs for failures."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..sync import Conditions, SyncModel, parse
from ..sync.plugins import report_of_user_code
from .admission import UNKNOWN, Admission
from .promises import PROMISES, Oracle, random_events_are_handled, require_assertions
from .small_job import SmallJob
from .state_pools import State, Step


class CheckResult(NamedTuple):
    """The result of `check`.

    Attributes:
        sync: the model's notation, for example "asp".
        promises: number of promises that were tested with random events.
        states: number of states that the searches of small jobs have visited.
    """

    sync: str
    promises: int
    states: int

    def __str__(self) -> str:
        return (
            f"{self.sync} keeps {self.promises} promises under random events, and has no deadlock in {self.states:,} "
            "states of small jobs"
        )


def check(
    sync: SyncModel,
    rule: Admission | None = None,
    oracle: Oracle | None = None,
    *,
    agree: bool = False,
    workers: int = 2,
    shards: int = 2,
    iterations: int = 3,
) -> CheckResult:
    """Check that a sync model keeps the promises that every model must keep, and return what was tested.

    First, the state machines of the model receive random legal and illegal events. Then all interleavings of four
    small jobs are searched for failures. In the first job, a worker may be lost at any time. In the second job, a
    worker may join at any time. The third job may change from the model to BSP at any time, and the fourth job from
    BSP to the model. If the model says that it agrees on means (`SyncModel.agrees_on_means`), there is a fifth job:
    its script clips the gradient that is applied, and a worker may be lost. The jobs run the same code as a live run.

    Args:
        sync: the model, which must be registered (see `paceline.sync.register`).
        rule: the rule that determines which workers must wait and which may wait; checked in every state. By default,
            the models of this package have their own rules (see `admission`). Under other models, any worker may wait
            as long as there is no deadlock.
        oracle: if given, the model is also compared with this oracle while the model receives random events.
        agree: True to check also that all shards have averaged the same groups of pushes. This is always checked if
            the model says that it agrees on means. Leave it False for models that drop pushes by their order of
            arrival, because the order differs between shards.
        workers: number of workers in each small job.
        shards: number of shards in each small job; always 1 if the model can only run on one shard.
        iterations: number of iterations of each worker in the first small job. In the other jobs, each worker makes one
            iteration fewer. If the model uses staleness on several shards, one more iteration is left out of all jobs.
            At least one iteration remains. Each additional iteration makes the check take about ten times as long.

    Raises:
        AssertionError: the model breaks a promise. The message names the promise and lists the preceding events.
        ConfigurationError: Python runs without assertions.

    >>> from paceline.sync import ASP
    >>> print(check(ASP(), iterations=1))
    asp keeps 12 promises under random events, and has no deadlock in 3,746 states of small jobs
    """
    require_assertions()
    for promise in PROMISES:
        with _named(sync, promise.__name__.replace("_", " ")):
            promise(sync)
    if oracle is not None:
        with _named(sync, "the oracle agrees"):
            random_events_are_handled(sync, oracle)
    states = 0
    for name, job in _small_jobs(sync, rule, agree, workers, shards, iterations):
        with _named(sync, f"no interleaving fails in {name}"):
            states += explore(job)
    _show("")
    return CheckResult(str(sync), len(PROMISES) + (oracle is not None), states)


def _small_jobs(
    sync: SyncModel, rule: Admission | None, agree: bool, workers: int, shards: int, iterations: int
) -> Iterator[tuple[str, SmallJob]]:
    ours = type(sync).__module__.startswith("paceline.")
    if rule is None and isinstance(sync, Conditions):
        rule = UNKNOWN
    plans = sync.at_coordinator() is not None
    # Staleness differs with every order of the events at every shard, so models that use staleness have many
    # more states.
    stale = sync.needs_staleness and not sync.one_shard
    if sync.one_shard:
        shards = 1
    if stale:
        iterations = max(1, iterations - 1)

    def job(
        first: SyncModel | str,
        *,
        workers: int = workers,
        iterations: int = iterations,
        late: int = 0,
        losses: int = 0,
        changes: tuple[str, ...] = (),
        clips: bool = False,
    ) -> SmallJob:
        return SmallJob(
            parse(first) if isinstance(first, str) else first,
            rule,
            workers=workers,
            shards=shards,
            iterations=iterations,
            late=late,
            losses=losses,
            changes=changes,
            commits=True,
            any_plan=ours,
            agree=(agree or sync.agrees_on_means) and not late,
            symmetric=ours,
            clips=clips,
        )

    fewer = max(1, iterations - 1)
    yield "a job in which a worker may be lost", job(sync, losses=1)
    # If the coordinator runs a state machine, or staleness matters, there are many more interleavings, so this job
    # starts with one worker.
    yield (
        "a job in which a worker may join late",
        job(sync, late=1, workers=1 if plans or stale else workers, iterations=fewer),
    )
    yield "a job that changes from the model to BSP", job(sync, changes=("bsp",), iterations=fewer)
    yield "a job that changes from BSP to the model", job("bsp", changes=(str(sync),), iterations=fewer)
    if sync.agrees_on_means:
        yield "a job whose script clips the gradient", job(sync, losses=1, iterations=fewer, clips=True)


@contextmanager
def _named(sync: SyncModel, promise: str) -> Iterator[None]:
    """Show on the terminal which promise is being tested, and name the promise in the error message of a failure."""
    _show(f"{sync}: {promise}")
    try:
        yield
    except Exception as error:
        _show("")
        told = report_of_user_code(error) or (str(error) if isinstance(error, AssertionError) else "")
        text = f"{sync} breaks a promise: {promise}\n{told or str(error) or repr(error)}"
        raise AssertionError(text) from (None if told else error)


def _show(line: str) -> None:
    """Replace the last line on the terminal. If standard error is not a terminal, do nothing."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


# -- Exhaustive search through the states of a `SmallJob` ----------------------------------------------------


def explore(
    job: SmallJob,
    most_states: int = 5_000_000,
    *,
    whole: bool = False,
    ends: set[State] | None = None,
    visit: Callable[[State], object] | None = None,
) -> int:
    """Visit every reachable state, breadth first, and return the number of states.

    Args:
        job: the job to search.
        most_states: maximum number of states. A search that reaches more states fails.
        whole: True to search all states, without the reductions that the job makes.
        ends: a set to which the terminal states are added. Of the terminal states that differ only in the names of
            workers or shards, only one is added.
        visit: function that is called with every state.

    Raises:
        AssertionError: a check failed. The message lists the shortest sequence of steps that leads to the failure.
            Names of shards and workers may change along the way (see `SmallJob.canonical`).
        ConfigurationError: Python runs without assertions.
    """
    require_assertions()
    one_for_all = job.plain if whole else job.canonical
    first = one_for_all(job.first)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        label = ""
        try:
            if visit is not None:
                visit(state)
            steps, losses = job.steps(state) if whole else job.reduced_steps(state)
            if not steps:
                job.check_end(state)
                if ends is not None:
                    ends.add(job.canonical(state))
            for label, take in steps + losses:
                after = one_for_all(take())
                if after not in came_from:
                    came_from[after] = state, label
                    todo.append(after)
        except Exception as error:
            told = report_of_user_code(error)
            way = [*_way_to(state, came_from), label, told or repr(error)]
            raise AssertionError("\n".join(way)) from (None if told else error)
        assert len(came_from) <= most_states, (
            f"the job has more than {most_states:,} states; choose fewer workers, shards or iterations"
        )
    return len(came_from)


def survey(job: SmallJob, progress: Callable[[int], None]) -> int:
    """Search like `explore`, but depth first and with less memory: store only a 64-bit hash of each visited state.

    If two states have the same hash, the second state is not visited. Among n states, the probability that any two have
    the same hash is about n^2 / 2^65 (10^-4 for 60 million states). If a check fails, the message lists a sequence of
    steps that is not necessarily the shortest. `progress` is called repeatedly with the number of states visited so
    far.
    """
    require_assertions()
    state = job.canonical(job.first)
    known = {job.digest(state)}
    way: list[str] = []
    stack: list[Iterator[Step]] = []
    try:
        while True:
            steps, losses = job.reduced_steps(state)
            if not steps:
                job.check_end(state)
            stack.append(iter(steps + losses))
            way.append("")
            while stack:
                label, take = next(stack[-1], ("", None))
                way[-1] = label
                if take is None:
                    stack.pop()
                    way.pop()
                    continue
                state = job.canonical(take())
                number = job.digest(state)
                if number not in known:
                    known.add(number)
                    if len(known) % 200_000 == 0:
                        progress(len(known))
                    break
            else:
                return len(known)
    except Exception as error:
        raise AssertionError("\n".join([*way, repr(error)])) from error


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    labels: list[str] = []
    link = came_from[state]
    while link is not None:
        before, label = link
        labels.append(label)
        link = came_from[before]
    return labels[::-1]
