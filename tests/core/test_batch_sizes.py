"""Batch sizes in proportion to speed: what is best, how soon the sizes settle, and that they do not oscillate."""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_sizes import STEPS, BatchSizes, BatchTime, divide_in_proportion, in_steps, step_of
from paceline.core.lease import divide_evenly
from tests.support.marks import thorough

BATCH = 16  # usual size of a worker's batch

times = st.lists(
    st.builds(BatchTime, st.floats(0.0, 2.0), st.floats(0.01, 5.0)),
    min_size=1,
    max_size=4,
)


def longest_s(times: list[BatchTime], sizes: list[int]) -> float:
    return max(time.of(size) for time, size in zip(times, sizes, strict=True))


@given(times, st.data())
def test_the_longest_time_is_as_short_as_possible(times: list[BatchTime], data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 6))
    least = data.draw(st.integers(1, most))
    total = data.draw(st.integers(least * len(times), most * len(times)))
    sizes = divide_in_proportion(total, times, least=least, most=most)
    assert sum(sizes) == total
    assert all(least <= size <= most for size in sizes)
    choices = product(range(least, most + 1), repeat=len(times))
    best_s = min(longest_s(times, list(choice)) for choice in choices if sum(choice) == total)
    assert longest_s(times, sizes) == pytest.approx(best_s)


def test_sizes_follow_the_speeds() -> None:
    fast, slow = BatchTime(0.0, 0.05 / BATCH), BatchTime(0.0, 0.15 / BATCH)
    assert divide_in_proportion(64, [fast, fast, fast, slow]) == [20, 19, 19, 6]
    assert divide_in_proportion(64, [fast, fast, fast, slow], most=18) == [18, 18, 18, 10]
    assert divide_in_proportion(64, [fast, fast, fast, BatchTime(5.0, 1.0)], least=2) == [21, 21, 20, 2]
    assert divide_evenly(10, 4) == [3, 3, 2, 2]


def test_times_that_differ_by_many_orders_of_magnitude_are_divided_at_once() -> None:
    """A worker may report any times, so the number of steps must not depend on them."""
    assert divide_in_proportion(2**54, [BatchTime(0.0, 1e-25), BatchTime(0.0, 1e9)]) == [2**54 - 1, 1]
    sizes = BatchSizes()
    for _ in range(4):
        for worker, seconds in enumerate((0.0, 1e9, 1.0)):
            sizes.observe(worker, 2**53 - worker, seconds)
    assert sum(sizes.of(range(3), 3 * 2**53).values()) == 3 * 2**53


class Parts(NamedTuple):
    """Sizes with their steps, and the bounds within which the sizes are."""

    sizes: list[int]
    steps: list[int]
    least: int
    most: int | None


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    least = draw(st.integers(1, 3))
    most = draw(st.none() | st.integers(least, 200))
    size = st.integers(least, most or 200)
    sizes = draw(st.lists(size, min_size=1, max_size=6))
    steps = draw(st.lists(st.sampled_from([1, 1, 4, 8, 10]), min_size=len(sizes), max_size=len(sizes)))
    return Parts(sizes, steps, least, most)


def stepped(parts: Parts) -> list[int]:
    return in_steps(parts.sizes, parts.steps, least=parts.least, most=parts.most)


@given(parts())
def test_sizes_in_steps_keep_their_sum_and_their_bounds(parts: Parts) -> None:
    found = stepped(parts)
    assert sum(found) == sum(parts.sizes)
    assert all(parts.least <= size <= (parts.most or size) for size in found)
    assert found == stepped(parts)


def is_coarse(before: int, after: int, step: int) -> bool:
    """Return True for a multiple of the step, and for a power of two in place of a size below the step."""
    return after % step == 0 or (before < step and after.bit_count() == 1)


@given(parts())
def test_all_sizes_but_one_are_multiples_of_their_steps(parts: Parts) -> None:
    found = stepped(parts)
    coarse = [is_coarse(*each) for each in zip(parts.sizes, found, parts.steps, strict=True)]
    takers = [size for size, step in zip(parts.sizes, parts.steps, strict=True) if step == 1]
    if parts.least == 1 and parts.most is None:
        # the others can take what remains, if rounding by a step or less leaves something for each of them
        assert coarse.count(False) <= (0 if takers and sum(takers) >= len(takers) + max(parts.steps) else 1)


@given(parts())
def test_sizes_stay_within_about_a_step_of_what_they_were(parts: Parts) -> None:
    largest = max(parts.steps)
    for before, after, step in zip(parts.sizes, stepped(parts), parts.steps, strict=True):
        assert abs(after - before) <= (largest * len(parts.sizes) if step == 1 else 2 * largest)


@given(parts())
def test_without_steps_sizes_stay_as_they_are(parts: Parts) -> None:
    ones = [1] * len(parts.sizes)
    assert in_steps(parts.sizes, ones, least=parts.least, most=parts.most) == parts.sizes


@given(parts(), st.randoms(use_true_random=False))
def test_sizes_in_steps_do_not_depend_on_the_order_of_the_workers(parts: Parts, draw: random.Random) -> None:
    order = list(range(len(parts.sizes)))
    draw.shuffle(order)
    sizes, steps = ([each[k] for k in order] for each in (parts.sizes, parts.steps))
    found = zip(parts.sizes, parts.steps, stepped(parts), strict=True)
    shuffled = stepped(parts._replace(sizes=sizes, steps=steps))
    assert sorted(found) == sorted(zip(sizes, steps, shuffled, strict=True))


@given(parts())
def test_sizes_in_steps_stay_as_they_are(parts: Parts) -> None:
    """So equal shares of devices stay equal, and nothing changes only because the sizes are computed again."""
    sizes = [max(1, size // step) * step for size, step in zip(parts.sizes, parts.steps, strict=True)]
    assert in_steps(sizes, parts.steps) == sizes


def test_sizes_of_any_magnitude_are_put_in_steps_at_once() -> None:
    """A worker may report any step."""
    sizes = [2**53, 2**52 + 1, 2**40 + 3, 7]
    assert sum(in_steps(sizes, [2**50, 2**53, 3, 1])) == sum(sizes)


@given(st.integers(1, 10_000))
def test_a_batch_has_at_least_eight_steps_or_steps_of_one(batch: int) -> None:
    step = step_of(batch)
    assert batch % step == 0
    assert step == 1 or batch // step >= STEPS


class Machines:
    """Workers whose times consist of a fixed and a proportional part, with uniform jitter."""

    def __init__(self, seed: int, workers: int, *, jitter: float, fixed: float) -> None:
        self.draw = random.Random(seed)
        self.jitter = jitter
        self.sizes = BatchSizes()
        self.speeds = [
            self.draw.choice([1, 1, 2, 3, 5]) * self.draw.uniform(0.8, 1.2) for _ in range(workers)
        ]
        self.fixed = [self.draw.uniform(0, fixed) for _ in range(workers)]
        self.changed: list[int] = []  # rounds with new sizes
        self.used: set[tuple[int, int]] = set()  # (worker, size)
        self.round = 0

    @property
    def times(self) -> list[BatchTime]:
        return [
            BatchTime(fixed * speed, (1 - fixed) * speed / BATCH)
            for fixed, speed in zip(self.fixed, self.speeds, strict=True)
        ]

    def run(self, rounds: int) -> int:
        """Run some rounds. Return the number of rounds until the longest time stays within the tolerance."""
        workers, total = range(len(self.speeds)), BATCH * len(self.speeds)
        best_s = longest_s(self.times, divide_in_proportion(total, self.times))
        settled = 0
        for number in range(rounds):
            before = self.sizes.changes
            sizes = dict(self.sizes.of(workers, total))
            assert sum(sizes.values()) == total
            self.used |= set(sizes.items())
            if self.sizes.changes > before:
                self.changed.append(self.round)
            if longest_s(self.times, list(sizes.values())) > best_s * (1.15 + self.jitter):
                settled = number + 1
            for worker, time in enumerate(self.times):
                noise = 1 + self.jitter * self.draw.uniform(-1, 1)
                self.sizes.observe(worker, sizes[worker], time.of(sizes[worker]) * noise)
            self.round += 1
        return settled


@pytest.mark.parametrize(
    ("workers", "jitter", "fixed"),
    [
        (2, 0.0, 0.0),
        (4, 0.05, 0.5),
        *thorough((4, 0.0, 0.0), (16, 0.0, 0.0)),
        *thorough((2, 0.0, 0.8), (4, 0.0, 0.8), (16, 0.0, 0.8)),
        *thorough((2, 0.05, 0.5), (16, 0.05, 0.5)),
    ],
)
def test_sizes_settle_within_20_rounds_at_the_start_and_after_a_change_of_speed(
    workers: int, jitter: float, fixed: float
) -> None:
    for seed in range(20):
        machines = Machines(seed, workers, jitter=jitter, fixed=fixed)
        assert machines.run(100) <= 20
        machines.speeds[machines.draw.randrange(workers)] *= machines.draw.choice([3, 1 / 3])
        assert machines.run(100) <= 20


@pytest.mark.parametrize("workers", [2, *thorough(4, 16)])
def test_sizes_do_not_oscillate_under_20_percent_jitter(workers: int) -> None:
    changes = []
    for seed in range(20):
        machines = Machines(seed, workers, jitter=0.2, fixed=0.3)
        machines.run(20)
        machines.changed.clear()
        machines.run(500)
        changes.append(len(machines.changed))
    assert max(changes) <= 10  # one in 50 rounds
    assert sum(changes) / len(changes) <= 5


def test_few_sizes_occur_on_devices_and_they_do_not_flap_between_two_steps() -> None:
    """A batch of 16 has steps of 2. The joint batch always is what the script asked for."""
    used, changes = [], []
    for seed in range(20):
        machines = Machines(seed, 4, jitter=0.2, fixed=0.3)
        machines.sizes.steps = {0: 2, 1: 2}
        machines.run(20)
        machines.changed.clear()
        machines.run(500)
        changes.append(len(machines.changed))
        for worker in (0, 1):
            sizes = {size for each, size in machines.used if each == worker}
            assert all(size == 1 or size % 2 == 0 for size in sizes)
            used.append(len(sizes))
    assert max(changes) <= 10
    assert sum(used) / len(used) <= 4


def test_equal_devices_keep_equal_sizes() -> None:
    machines = Machines(0, 4, jitter=0.02, fixed=0.0)
    machines.speeds = [1.0] * 4
    machines.sizes.steps = dict.fromkeys(range(4), step_of(BATCH))
    machines.run(200)
    assert machines.used == {(worker, BATCH) for worker in range(4)}


def test_equal_machines_keep_equal_sizes() -> None:
    machines = Machines(0, 4, jitter=0.02, fixed=0.0)
    machines.speeds = [1.0] * 4
    machines.run(200)
    assert machines.changed == []


def test_one_pause_changes_nothing() -> None:
    sizes = BatchSizes()
    for number in range(40):
        for worker, size in sizes.of(range(3), 48).items():
            sizes.observe(worker, size, 50.0 if worker == number % 3 and number % 10 == 5 else 1.0)
    assert sizes.changes == 0


def test_the_sizes_of_the_remaining_workers_are_found_again_when_one_leaves() -> None:
    machines = Machines(0, 3, jitter=0.0, fixed=0.0)
    machines.speeds = [1.0, 2.0, 4.0]
    machines.run(40)
    assert list(machines.sizes.of(range(3), 48).values()) == [28, 14, 6]
    machines.sizes.forget(0)
    assert dict(machines.sizes.of([1, 2], 48)) == {1: 32, 2: 16}
    assert dict(machines.sizes.of([1, 2, 3], 48)) == {1: 16, 2: 16, 3: 16}  # nothing is known about worker 3


def test_a_resumed_job_begins_with_the_best_sizes_of_the_earlier_run() -> None:
    machines = Machines(0, 3, jitter=0.0, fixed=0.2)
    machines.speeds = [1.0, 2.0, 4.0]
    machines.run(40)
    sizes = machines.sizes.divide(range(3), 48)
    assert len(set(sizes.values())) == 3
    assert BatchSizes(machines.sizes.cut()).of(range(3), 48) == sizes
