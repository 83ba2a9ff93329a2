"""The order of an epoch is that of its seed, whatever else draws random numbers at the same time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import torch

from paceline.train.data import EpochOrder

SIZE = 40


def numbers() -> Iterator[tuple[float, float, float]]:
    """Yield numbers from all three generators. Other threads may run while each of them is drawn."""
    for _ in range(SIZE):
        time.sleep(1e-4)
        yield float(torch.rand(())), random.random(), float(np.random.rand())


def test_threads_that_draw_orders_do_not_disturb_each_other() -> None:
    alone = [EpochOrder(numbers, seed).items(0, SIZE) for seed in range(8)]
    barrier = Barrier(2)

    def drawn(seeds: range) -> list[list[tuple[float, float, float]]]:
        found = []
        for seed in seeds:
            barrier.wait()
            order = EpochOrder(numbers, seed, chunk=10)
            found.append([item for start in range(0, SIZE, 5) for item in order.items(start, 5)])
        return found

    with ThreadPoolExecutor(max_workers=2) as threads:
        even, odd = threads.map(drawn, [range(0, 8, 2), range(1, 8, 2)])
    assert [even, odd] == [alone[::2], alone[1::2]]


def test_a_draw_leaves_the_generators_as_they_were_even_if_threads_draw_at_the_same_time() -> None:
    def draw(seed: int) -> None:
        EpochOrder(numbers, seed, chunk=10).items(0, SIZE)

    torch.manual_seed(1)
    random.seed(1)
    expected = torch.random.get_rng_state(), random.getstate()
    with ThreadPoolExecutor(max_workers=3) as threads:
        list(threads.map(draw, range(6)))
    assert torch.equal(torch.random.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


def test_a_sampler_may_draw_another_order() -> None:
    def nested() -> Iterator[object]:
        inner = EpochOrder(numbers, 2, chunk=10)
        for start, item in enumerate(numbers()):
            yield item, inner.items(start, 1)[0]

    outer, inner = (EpochOrder(numbers, seed).items(0, SIZE) for seed in (1, 2))
    assert EpochOrder(nested, 1, chunk=7).items(0, SIZE) == list(zip(outer, inner, strict=True))


class Numbers:
    """An iterable that can go on from a state, as loaders can that are made for it."""

    def __init__(self) -> None:
        self.drawn = self._first = 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self.drawn, self._first = self._first, 0
        while self.drawn < SIZE:
            self.drawn += 1
            yield self.drawn, float(torch.rand(()))

    def load_state_dict(self, state: int) -> None:
        self._first = state


def test_an_order_goes_on_from_where_an_equal_one_was() -> None:
    first, second = Numbers(), Numbers()
    order = EpochOrder(lambda: first, 1, chunk=1)
    expected = order.items(0, SIZE)
    order = EpochOrder(lambda: first, 1, chunk=1)
    digest = order.digest()
    assert order.items(5, 2) == expected[5:7]
    resumed = EpochOrder(lambda: second, 1, chunk=1)
    second.load_state_dict(first.drawn)
    content = order.content
    assert content["position"] == first.drawn == 7
    resumed.go_on(content)
    assert resumed.digest() == digest
    assert second.drawn == 0, "nothing is drawn again"
    assert resumed.items(8, 3) == expected[8:11]
    assert resumed.items(2, 3) == expected[2:5], "an earlier position begins anew"
    assert resumed.items(5, SIZE) == expected[5:]
