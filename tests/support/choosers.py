"""Choosers for a `Network`: what happens next."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.sync.ticks import TICKS_PER_S
from tests.support.network import Network, Step

__all__ = ["Hostile", "Random"]


class Random:
    """Chooses at random. Some channels are slow, and time passes between the steps.

    Args:
        seed: random seed.
    """

    def __init__(self, seed: object) -> None:
        self.draws = random.Random(f"network {seed}")
        self._weights: dict[Step, float] = {}

    def __call__(self, network: Network, steps: Sequence[Step]) -> Step:
        network.now_ticks += self.draws.choice((0, 0, 1, TICKS_PER_S // 10))
        for step in steps:
            if step not in self._weights:
                self._weights[step] = self.draws.choice((1.0, 1.0, 1.0, 0.05))
        return self.draws.choices(steps, [self._weights[step] for step in steps])[0]


class Hostile(Random):
    """Chooses at random, with faults: see `Network.faults`.

    Args:
        seed: random seed.
        rate: probability of a fault in each step.
        most: maximum number of faults.
    """

    def __init__(self, seed: object, rate: float = 0.03, most: int = 6) -> None:
        super().__init__(seed)
        self._rate = rate
        self._left = most

    def __call__(self, network: Network, steps: Sequence[Step]) -> Step:
        draws = self.draws
        if not self._left or draws.random() >= self._rate:
            return super().__call__(network, steps)
        self._left -= 1
        faults = network.faults()
        kind = draws.choice(sorted({fault[0] for fault in faults}))
        fault = draws.choice([fault for fault in faults if fault[0] == kind])
        receivers = {"crash": ["c", *(server.name for server in network.servers)], "drop": fault[2:]}
        return *fault, *(f"{each}:{draws.randrange(3)}" for each in receivers.get(kind, ()))
