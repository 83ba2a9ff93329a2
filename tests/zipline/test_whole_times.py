"""For integers, `solve_periodic` is exact, however large they are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigurationError
from paceline.zipline import solve_periodic


def tried(last: list[int], interval: list[int], lookahead: int) -> tuple[int, int, list[int]]:
    """The canonical solution, from every end time as the barrier."""
    workers = list(zip(last, interval, strict=True))
    found = []
    for barrier in sorted({base + j * step for base, step in workers for j in range(1, lookahead + 1)}):
        picks = [min((barrier - base) // step, lookahead) for base, step in workers]
        if min(picks) >= 1:
            ends = [base + pick * step for pick, (base, step) in zip(picks, workers, strict=True)]
            found.append((max(ends) - min(ends), max(ends), [pick - 1 for pick in picks]))
    return min(found)


@settings(max_examples=150)
@given(data=st.data())
def test_the_solution_is_the_canonical_one_at_any_scale(data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1, 10**8, 2**53 - 1, 10**17, 10**15 + 7, 3 * 10**25]))
    off_by = data.draw(st.sampled_from([0, 0, 3]))
    times = st.tuples(
        st.tuples(st.integers(0, 40), st.integers(0, off_by)),
        st.tuples(st.integers(1, 40), st.integers(0, off_by)),
    )
    workers = data.draw(st.lists(times, min_size=1, max_size=6))
    origin = data.draw(st.sampled_from([0, -5, 10**30]))
    last = [origin + time * scale + more for (time, more), _ in workers]
    interval = [time * scale + more for _, (time, more) in workers]
    lookahead = data.draw(st.integers(1, 8))
    solution = solve_periodic(last, interval, lookahead)
    assert (solution.wait, solution.barrier, solution.picks.tolist()) == tried(last, interval, lookahead)
    assert type(solution.wait) is type(solution.barrier) is int


@pytest.mark.parametrize("workers", [50, 2000])
@pytest.mark.parametrize("kind", [list, np.array])
def test_many_workers_are_solved_as_with_floats_that_are_exact(workers: int, kind: type) -> None:
    draw = random.Random(workers)
    last = [draw.randrange(10**9) for _ in range(workers)]
    interval = [draw.randrange(10**9, 15 * 10**8) for _ in range(workers)]
    whole = solve_periodic(kind(last), kind(interval), 15)
    floats = solve_periodic(np.array(last, dtype=float), np.array(interval, dtype=float), 15)
    assert (whole.wait, whole.barrier) == (floats.wait, floats.barrier)
    assert (whole.picks == floats.picks).all()
    shifted = solve_periodic([time + 2**70 for time in last], interval, 15)
    assert (shifted.wait, shifted.barrier - 2**70) == (whole.wait, whole.barrier)


@pytest.mark.parametrize(
    ("last", "interval", "lookahead", "reason"),
    [
        ([0, 0], [1, 0], 3, "interval of worker 1 is 0"),
        ([0, 0], [1, -2], 3, "interval of worker 1 is -2"),
        ([0, 0], [1], 3, "shapes are"),
        ([[0, 0]], [[1, 1]], 3, "1-D arrays"),
        ([], [], 3, "at least one worker"),
        ([0], [1], 0, "lookahead must be an integer >= 1"),
        ([0], [1], 1.5, "lookahead must be an integer >= 1"),
    ],
)
def test_integers_that_make_no_sense_are_refused(
    last: list[int], interval: list[int], lookahead: int, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        solve_periodic(last, interval, lookahead)


def test_large_integers_are_exact_in_every_sequence_and_with_every_integer_as_lookahead() -> None:
    last, interval = [2**70, 2**70 + 3], [2**65 + 1, 2**65 + 7]
    for arguments in (
        (last, interval, 15),
        (tuple(last), tuple(interval), 15),
        (last, interval, np.int64(15)),
    ):
        solution = solve_periodic(*arguments)
        assert (solution.wait, solution.barrier) == (9, 2**70 + 2**65 + 10)
