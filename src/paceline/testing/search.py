"""Visits all states of a `SmallJob`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from .small_job import SmallJob
from .states import State, Step

__all__ = ["explore", "survey"]


def explore(
    cluster: SmallJob,
    most_states: int = 5_000_000,
    *,
    whole: bool = False,
    ends: set[State] | None = None,
    visit: Callable[[State], object] | None = None,
) -> int:
    """Visit every state that can be reached, nearest first; return how many there are.

    A check that fails is raised with the shortest way there (the names of shards and workers may change on it, see
    `SmallJob.canonical`). `whole` does without the reductions of `SmallJob.reduced_steps` and without other names;
    `ends` receives the last states, one for all that differ in names; `visit` is called with every state.
    """
    one_for_all = cluster.plain if whole else cluster.canonical
    first = one_for_all(cluster.first)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        state = todo.popleft()
        label = ""
        try:
            if visit is not None:
                visit(state)
            steps, losses = cluster.steps(state) if whole else cluster.reduced_steps(state)
            if not steps:
                cluster.check_end(state)
                if ends is not None:
                    ends.add(cluster.canonical(state))
            for label, take in steps + losses:
                after = one_for_all(take())
                if after not in came_from:
                    came_from[after] = state, label
                    todo.append(after)
        except Exception as error:
            raise AssertionError("\n".join([*_way_to(state, came_from), label, repr(error)])) from error
        assert len(came_from) <= most_states, "too big to be searched whole"
    return len(came_from)


def survey(cluster: SmallJob, progress: Callable[[int], None]) -> int:
    """As `explore`, in little memory: deepest first, with 64 bits kept of each state.

    Two states out of n have the same 64 bits with a probability of about n^2 / 2^65 (10^-4 for 60 million), and then
    the later one's future is not looked at. The way to a check that fails is not the shortest.
    """
    state = cluster.canonical(cluster.first)
    known = {cluster.digest(state)}
    way: list[str] = []
    stack: list[Iterator[Step]] = []
    try:
        while True:
            steps, losses = cluster.reduced_steps(state)
            if not steps:
                cluster.check_end(state)
            stack.append(iter(steps + losses))
            way.append("")
            while stack:
                label, take = next(stack[-1], ("", None))
                way[-1] = label
                if take is None:
                    stack.pop()
                    way.pop()
                    continue
                state = cluster.canonical(take())
                number = cluster.digest(state)
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
