"""Waiting for a message in a ring: poll for a short time, then block.

Blocking and waking up takes tens of microseconds, longer than all other work in an iteration of a small model. So a
process polls first, and yields its CPU core after each poll so that other processes can run if there are few cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

from ..wire.stream import Stream

__all__ = ["SPIN_S", "fall_asleep", "spin", "wake_up"]

SPIN_S = 200e-6


def spin(streams: Collection[Stream[Any]], most_s: float = SPIN_S) -> list[Stream[Any]]:
    """Poll until a ring contains a message or `most_s` has passed. Return the streams whose rings have messages."""
    until_s = time.perf_counter() + most_s
    while True:
        ready = [stream for stream in streams if stream.ring_ready]
        if ready or time.perf_counter() > until_s:
            return ready
        os.sched_yield()


def fall_asleep(streams: Collection[Stream[Any]]) -> bool:
    """Announce to all peers that this process will block. Return False if a message has already arrived."""
    for stream in streams:
        if not stream.fall_asleep():
            wake_up(streams)
            return False
    return True


def wake_up(streams: Collection[Stream[Any]]) -> None:
    """Announce to all peers that this process is polling the rings again."""
    for stream in streams:
        stream.wake_up()
