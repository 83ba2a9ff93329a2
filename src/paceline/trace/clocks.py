"""The clocks of the machines of a run, for timelines that show events of several machines.

Each trace contains times on the clock of the machine that recorded it (`Trace.machine`). Machine 0 is the one
with the coordinator. For each other machine, the run directory contains a file `clock-<machine>.jsonl` with estimates
of the offset of the coordinator's clock (see `paceline.core.liveness`), recorded during the run. These estimates are
used to convert times to the coordinator's clock, with a bound on the error. Statistics of a run never need this
conversion, because they only subtract times of the same trace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec

from ..core.liveness import OffsetBounds
from ..core.messages import ClockOffset
from ..errors import ConfigurationError
from ..files import read_regular
from ..sync.ticks import TICKS_PER_S, in_ticks
from .recording import Sink

RECORD_INTERVAL_S = Fraction(3, 4)
"""Least time between two records of an offset. With two heartbeats per second, every other estimate is recorded."""


MOST_RECORDS = 20_000
"""Number of records after which the interval between two records grows. After 30 days, it is two minutes."""


class Moment(msgspec.Struct, frozen=True, order=True):
    """A time on the coordinator's clock.

    Attributes:
        ticks: the estimated time.
        bound_ticks: maximum error of the estimate.
    """

    ticks: int
    bound_ticks: int = 0


class MachineClock:
    """The clock of one machine, with the estimates of its offset.

    Args:
        offsets: the estimates in the order of their times; none for the clock of the coordinator itself.

    Example:
        >>> clock = MachineClock([ClockOffset(0, 30_000_000_000, 200_000)])
        >>> clock.on_coordinator(1_000_000)
        Moment(ticks=30001000000, bound_ticks=200700)
    """

    def __init__(self, offsets: Sequence[ClockOffset] = ()) -> None:
        self._bounds = [OffsetBounds.stated(offset) for offset in offsets]
        self._ticks = [bounds.at_ticks for bounds in self._bounds]

    def on_coordinator(self, at_ticks: int) -> Moment:
        """Return the time on the coordinator's clock at which this clock shows `at_ticks`."""
        if not self._bounds:
            return Moment(at_ticks)
        index = bisect_left(self._ticks, at_ticks)
        near = [bounds.at(at_ticks) for bounds in self._bounds[max(0, index - 1) : index + 1]]
        found = near[0].intersection(near[-1])
        if found is None:  # a clock has been set in between, at an unknown time
            least_ticks = min(bounds.least_ticks for bounds in near)
            found = OffsetBounds(at_ticks, least_ticks, max(bounds.most_ticks for bounds in near))
        return Moment(at_ticks + found.offset_ticks, found.bound_ticks)


class ClockRecorder:
    """Records the offset of one machine's clock to a file, about once per second; after some hours, less often.

    Args:
        file: the file, which is `clock-<machine>.jsonl` in the run directory.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).
    """

    def __init__(self, file: Sink, ticks_per_s: int = TICKS_PER_S) -> None:
        self._file = file
        self._interval_ticks = in_ticks(RECORD_INTERVAL_S, ticks_per_s)
        self._first_ticks: int | None = None
        self._last_ticks: int | None = None

    def record(self, offset: ClockOffset) -> None:
        """Record an estimate, unless the previous estimate was recorded a moment ago."""
        if self._first_ticks is None:
            self._first_ticks = offset.at_ticks
        if self._last_ticks is not None:
            usual = max(self._interval_ticks, (offset.at_ticks - self._first_ticks) // MOST_RECORDS)
            if 0 <= offset.at_ticks - self._last_ticks < usual:
                return
        self._last_ticks = offset.at_ticks
        self._file.write(bytearray(msgspec.json.encode(offset) + b"\n"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_clocks(run_dir: Path) -> dict[int, MachineClock]:
    """Return the clock of each machine in a run directory. A run on one machine has only machine 0.

    An incomplete last line, which a killed process may leave behind, is ignored.

    Raises:
        ConfigurationError: a file does not contain offsets.
    """
    clocks = {0: MachineClock()}
    decoder = msgspec.json.Decoder(ClockOffset)
    for path in run_dir.glob("clock-*.jsonl"):
        try:
            offsets = [decoder.decode(line) for line in read_regular(path).split(b"\n")[:-1]]
            offsets.sort(key=lambda offset: offset.at_ticks)
            clocks[int(path.stem.rpartition("-")[2])] = MachineClock(offsets)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ConfigurationError(f"{path} does not contain the offsets of a clock: {error}") from error
    return clocks


def clock_of(machine: int, clocks: Mapping[int, MachineClock]) -> MachineClock:
    """Return the clock of a machine.

    Raises:
        ConfigurationError: the offset of the clock is unknown.
    """
    if machine not in clocks:
        raise ConfigurationError(
            f"the offset of the clock of machine {machine} is unknown: the run directory has no file "
            f"clock-{machine}.jsonl."
        )
    return clocks[machine]


class Converter:
    """Converts times in seconds to the coordinator's clock.

    Args:
        clocks: machine -> its clock, as `read_clocks` returns it.
        strict: False to leave the times of a machine as they are if the offset of its clock is unknown.
        ticks_per_s: number of ticks per second (see `paceline.sync.ticks`).

    Attributes:
        clocks: see above.
        bound_s: maximum error of the times that were converted, in seconds.
        unknown: the machines with an unknown offset whose times were left as they are.
    """

    def __init__(
        self, clocks: Mapping[int, MachineClock], *, strict: bool = True, ticks_per_s: int = TICKS_PER_S
    ) -> None:
        self.clocks = clocks
        self.bound_s = 0.0
        self.unknown: set[int] = set()
        self._strict = strict
        self._ticks_per_s = ticks_per_s

    def added_s(self, at_s: float, machine: int | msgspec.UnsetType) -> float:
        """Return the seconds to add to the time `at_s` on a machine's clock to get the coordinator's time.

        Raises:
            ConfigurationError: the offset of the clock is unknown, and the converter is strict.
        """
        if machine is msgspec.UNSET or machine == 0:
            return 0.0
        if not self._strict and machine not in self.clocks:
            self.unknown.add(machine)
            return 0.0
        at_ticks = in_ticks(at_s, self._ticks_per_s)
        moment = clock_of(machine, self.clocks).on_coordinator(at_ticks)
        self.bound_s = max(self.bound_s, moment.bound_ticks / self._ticks_per_s)
        return (moment.ticks - at_ticks) / self._ticks_per_s
