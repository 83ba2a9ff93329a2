"""Exhaustive search through the states of a `SmallJob`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ..plugins.failures import report_of_user_code
from .small_job import SmallJob
from .state_pools import State, Step

__all__ = ["explore", "survey"]


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
    """
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

    If two states have the same hash, the second one is not visited. Among n states, the probability that any two have
    the same hash is about n^2 / 2^65 (10^-4 for 60 million states). If a check fails, the message lists a sequence of
    steps that is not necessarily the shortest. `progress` is called repeatedly with the number of states visited so
    far.
    """
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
