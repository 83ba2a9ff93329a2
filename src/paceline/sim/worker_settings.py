"""Settings for individual workers that differ from the rest of the cluster.

They are about a worker's presence, its connection, and what its script does besides training.
"""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec

from ..errors import ConfigurationError
from ..sync.ticks import Seconds
from .times import Times

__all__ = ["Link", "Outside", "Presence"]


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """The times at which a worker joins and is lost. By default, a worker is present during the whole run.

    Attributes:
        joins_at_s: virtual time at which the worker joins, in seconds.
        lost_at_s: virtual time at which the worker is lost, in seconds; None if it is not lost at a fixed time.
        preempted_every_s: mean of the random time between joining and being lost, in seconds; None if the worker is
            not lost at random times.
        back_after_s: time after which a lost worker joins again, in seconds; None if it does not join again.
    """

    joins_at_s: Seconds = 0.0
    lost_at_s: Seconds | None = None
    preempted_every_s: float | None = None
    back_after_s: Seconds | None = None

    def __post_init__(self) -> None:
        for name, least in (("joins_at_s", 0.0), ("lost_at_s", self.joins_at_s), ("back_after_s", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float | Fraction)
            if value is not None and not (number and math.isfinite(value) and value >= least):
                raise ConfigurationError(
                    f"{name} is {value!r}, expected a number of seconds >= {float(least):g}."
                )
        every_s = self.preempted_every_s
        if every_s is not None and not (math.isfinite(every_s) and every_s > 0):
            raise ConfigurationError(f"preempted_every_s is {every_s:g}, expected a number of seconds > 0.")
        if self.lost_at_s is not None and every_s is not None:
            raise ConfigurationError(
                "lost_at_s and preempted_every_s are both given, but a worker is lost either at a fixed time or at "
                "random times. Omit one of them."
            )
        if self.back_after_s is not None and self.lost_at_s is None and every_s is None:
            raise ConfigurationError(
                "back_after_s is given for a worker that is never lost. Also give lost_at_s or preempted_every_s."
            )


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for one worker's network connection, where they differ from the cluster's settings.

    Attributes:
        bandwidth_bps: bandwidth of the worker's network interface, in bits per second in each direction; None for
            the cluster's bandwidth.
        to_server_s: latency of messages that the worker sends; None for the cluster's latency.
        from_server_s: latency of messages that the worker receives; None for the cluster's latency.
    """

    bandwidth_bps: float | None = None
    to_server_s: Times | None = None
    from_server_s: Times | None = None


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker's script is outside of training, for example because it evaluates or saves the model.

    Unlike a computation, this does not take longer with a larger batch.

    Attributes:
        each_s: time before each iteration, except for what lies between two epochs.
        epoch_s: time at the end of each epoch, in a simulation with data.
        without_epochs_s: time before each iteration in a simulation without data, in which there are no epochs; None
            for `each_s`.
    """

    each_s: Times = 0.0
    epoch_s: Times = 0.0
    without_epochs_s: Times | None = None
