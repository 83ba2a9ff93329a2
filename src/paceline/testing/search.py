"""Exhaustive search through the states of a `SmallJob`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from .small_job import SmallJob
from .states import State, Step

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
        most_states: maximum number of states. If there are more, a check fails.
        whole: True to search without the reductions of the job.
        ends: a set to which the states without next steps are added; one for all states that differ only in names.
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
            raise AssertionError("\n".join([*_way_to(state, came_from), label, repr(error)])) from error
        assert len(came_from) <= most_states, (
            "the job has too many states; choose fewer workers, shards or iterations"
        )
    return len(came_from)


def survey(job: SmallJob, progress: Callable[[int], None]) -> int:
    """Search like `explore`, but depth first and with less memory: store only a 64-bit hash of each visited state.

    Among n states, two have the same hash with a probability of about n^2 / 2^65 (10^-4 for 60 million states). In
    that case, the second of the two states is not visited. The message of a failure does not list the shortest
    sequence of steps. `progress` is called with the number of visited states.
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
