"""Waiting for a message in a ring: poll for a short time, then block.

Blocking and being woken takes tens of microseconds, which is more than all other work of a small step. So a process
polls first and yields its core between two polls, which also works well if there are more processes than cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

from ..wire.stream import Stream

__all__ = ["fall_asleep", "spin", "wake_up"]

SPIN_S = 200e-6


def spin(streams: Collection[Stream[Any]]) -> list[Stream[Any]]:
    """Poll until a ring contains a message, for a limited time. Return the streams whose rings contain messages."""
    until_s = time.perf_counter() + SPIN_S
    while True:
        ready = [stream for stream in streams if stream.ring_ready]
        if ready or time.perf_counter() > until_s:
            return ready
        os.sched_yield()


def fall_asleep(streams: Collection[Stream[Any]]) -> bool:
    """Announce to all peers that this process is about to block. Return False if a message has just arrived."""
    for stream in streams:
        if not stream.fall_asleep():
            wake_up(streams)
            return False
    return True


def wake_up(streams: Collection[Stream[Any]]) -> None:
    """Announce to all peers that this process polls the rings again."""
    for stream in streams:
        stream.wake_up()
