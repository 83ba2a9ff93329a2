"""Simulates candidate sync models for a live run in a separate process, so that the run does not wait.

`main` reads the observations of the run from standard input, and writes the results to standard output. See
`sim.simulate`.
"""

from __future__ import annotations

import os
import sys

import msgspec

from ..core.requests import Situation
from .simulate import prospects, simulate

NICENESS = 10  # the workers' computations come first


def main() -> None:
    """Read the observations, and write the results."""
    os.nice(NICENESS)
    situation = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Situation)
    sys.stdout.buffer.write(msgspec.msgpack.encode(prospects(situation, simulate)))
