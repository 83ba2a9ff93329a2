"""Waiting for a message in a ring: look for a short while, then block.

Blocking and being woken costs tens of microseconds, more than a small step needs otherwise. So a host looks first,
and lets others have its core between two looks: that is right even where there are more processes than cores.
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
    """The streams whose rings have something to read; after a while without any, none."""
    until_s = time.perf_counter() + SPIN_S
    while True:
        ready = [stream for stream in streams if stream.ring_ready]
        if ready or time.perf_counter() > until_s:
            return ready
        os.sched_yield()


def fall_asleep(streams: Collection[Stream[Any]]) -> bool:
    """Have the other ends wake this one, which is about to block. False if one has just sent something."""
    for stream in streams:
        if not stream.fall_asleep():
            wake_up(streams)
            return False
    return True


def wake_up(streams: Collection[Stream[Any]]) -> None:
    """Look into the rings again."""
    for stream in streams:
        stream.wake_up()
