"""Notices when a state machine reads a clock or a global random generator.

The decisions of a state machine may depend on its events alone. A machine that reads a clock decides differently in a
live run, in virtual time and in a replay. A machine that draws from a global generator decides differently at each
shard. Two machines that receive the same events rarely differ because of a clock, so the calls are watched.
"""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["forbidden"]

CLOCKS = (
    time.time,
    time.time_ns,
    time.monotonic,
    time.monotonic_ns,
    time.perf_counter,
    time.perf_counter_ns,
    time.process_time,
    time.process_time_ns,
    time.localtime,
    time.gmtime,
    datetime.datetime.now,
    datetime.datetime.utcnow,
    datetime.date.today,
)
TIME = "reads a clock; use event.now_ticks, and self.ticks_per_s"
CHANCE = "draws from a global random generator; use paceline.sync.draws.uniform(seed, worker, iteration)"


@contextmanager
def forbidden() -> Iterator[None]:
    """Within this context, raise `AssertionError` in whoever reads a clock or a global random generator."""
    functions: dict[object, str] = {**dict.fromkeys(CLOCKS, TIME), os.urandom: CHANCE}
    own = id(random._inst)
    before = _states()

    def watch(frame: FrameType, event: str, called: object) -> None:
        if event != "c_call":
            return
        why = functions.get(called)
        if why is None and id(getattr(called, "__self__", None)) == own:
            why = CHANCE
        if why is not None:
            raise AssertionError(f"{getattr(called, '__qualname__', called)}() {why}")

    profile, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # callbacks of the garbage collector, which others have added, may read clocks
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(profile)
        if collects:
            gc.enable()
    for name, state in _states().items():
        assert before.get(name) in (None, state), f"{name}: the model {CHANCE}"


def _states() -> dict[str, bytes]:
    """Return the states of the global generators whose functions Python does not show to a profiler."""
    states = {}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        states["numpy.random"] = pickle.dumps(numpy.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states
