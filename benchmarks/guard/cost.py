"""What the guard costs per push: at the worker, whose step it delays, and at the coordinator."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from itertools import count

import msgspec
import torch

from paceline.core.guard import Guard
from paceline.core.messages import Message, Observation, Phase, PushesObserved, first_phase
from paceline.shard.vectors import sampled_norm
from paceline.wire.stream import Stream

MOST_US = 50.0  # goal: 1 % of a step of 5 ms, in microseconds
SIZE = 200_000  # number of weights
CALLS = 2000
WORKERS = 4


class Cost(msgspec.Struct, frozen=True):
    """The processor time of each part of the guard, in microseconds per push."""

    observe_us: float  # at the worker: the norm of the weights (the check for NaN also gives the norm of the gradient)
    report_us: float  # at the worker and the coordinator: a message for each push (in a run: for several)
    judge_us: float  # at the coordinator

    @property
    def total_us(self) -> float:
        """The sum of the three times."""
        return self.observe_us + self.report_us + self.judge_us


def measure_cost() -> Cost:
    """Measure on one thread what the guard costs per push, with a model of 200,000 weights and four workers.

    The processor time includes the time of threads that only wait for work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weights = torch.randn(SIZE)
    ends = socket.socketpair()
    worker: Stream[Message] = Stream(ends[0], first_phase("coordinator", "worker"))
    coordinator: Stream[Message] = Stream(ends[1], Phase("worker", "coordinator", "training"))
    report = PushesObserved((Observation(3, 1.0, 2.0, 3.0),))

    def exchange() -> None:
        worker.send(report)
        list(coordinator.receive())

    guard, updates = Guard("tell"), count()

    def judge() -> None:
        update = next(updates)
        seen = Observation(update, 1.0 + 0.01 * (update % 7), 1.0, 5.0)
        guard.take(update % WORKERS, seen, present=range(WORKERS), sync="asp", lockstep=False)

    try:
        return Cost(_time_us(lambda: sampled_norm([weights])), _time_us(exchange), _time_us(judge))
    finally:
        torch.set_num_threads(threads)
        worker.close()
        coordinator.close()


def _time_us(call: Callable[[], object]) -> float:
    for _ in range(CALLS // 10):
        call()
    begun_s = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - begun_s) / CALLS * 1e6
