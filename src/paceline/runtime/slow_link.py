"""Finds out in the first iterations of a worker whether its link to the servers is too slow for the model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..wire.traffic import Sending

__all__ = ["SlowLink"]

FIRST = 5  # number of iterations that are not measured, because connections are slow in the beginning
LAST = 15  # number of iterations after which the measurement ends
LEAST_BYTES = 65_536  # the time for less data depends on the latency of the link, not on its rate
FACTOR = 2.0  # sending may take this many times as long as computing before the worker reports it


class SlowLink:
    """Compares the time for which gradients are on their way with the time that a worker computes. It does so once.

    Args:
        rounded: True if gradients are rounded on their way.

    Example:
        >>> watch = SlowLink()
        >>> for n in range(LAST):
        ...     warning = watch.iterated([Sending(sent=8_000_000 * n, busy_s=2.0 * n)], computing_s=0.1)
        >>> print(warning.partition(",")[0])
        the link to the servers is slow for this model: a gradient of 8 MB leaves at 4 MB/s

    Attributes:
        over: True once the measurement has ended.
    """

    def __init__(self, *, rounded: bool = False) -> None:
        self._rounding = "" if rounded else "--wire bf16, "
        self.over = False
        self._computing_s: list[float] = []
        self._before: Sequence[Sending] = ()

    def iterated(self, sendings: Sequence[Sending], computing_s: float) -> str:
        """Record an iteration. Return a warning at the end of the measurement if the link is too slow, else "".

        Args:
            sendings: what the connections to the servers have sent so far.
            computing_s: time that the worker took to compute the gradient, in seconds.
        """
        self._computing_s.append(computing_s)
        if len(self._computing_s) == FIRST:
            self._before = sendings
        if len(self._computing_s) < LAST:
            return ""
        self.over = True
        iterations = LAST - FIRST
        both = list(zip(self._before, sendings, strict=False))
        sent_bytes = sum(after.sent - before.sent for before, after in both) / iterations
        # The connections send at the same time.
        busy_s = max((after.busy_s - before.busy_s for before, after in both), default=0.0) / iterations
        usual_s = median(self._computing_s[FIRST:])
        if busy_s <= FACTOR * usual_s or sent_bytes < LEAST_BYTES:
            return ""
        return (
            f"the link to the servers is slow for this model: a gradient of {sent_bytes / 1e6:.3g} MB leaves at "
            f"{sent_bytes / busy_s / 1e6:.3g} MB/s, which takes {busy_s:.2g} s, and the computation of an iteration "
            f"takes {usual_s:.2g} s. Use a faster link, {self._rounding}larger batches, or servers on several "
            "machines."
        )
