"""What is unusual about one worker of a cluster: when it is there, and how it is connected."""

from __future__ import annotations

import math

import msgspec

from ..errors import ConfigurationError
from .times import Times

__all__ = ["Link", "Presence"]


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker is there. By default from the beginning to its end.

    Attributes:
        joins_at_s: when it joins.
        lost_at_s: when it is lost; None for never.
        preempted_every_s: mean time between one joining and the next loss, which chance decides; None for never.
        back_after_s: how long after a loss it joins anew; None for never.
    """

    joins_at_s: float = 0.0
    lost_at_s: float | None = None
    preempted_every_s: float | None = None
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("joins_at_s", 0.0), ("lost_at_s", self.joins_at_s), ("back_after_s", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float)
            if value is not None and not (number and math.isfinite(value) and value >= least):
                raise ConfigurationError(f"{name} is {value!r}, expected a number of seconds >= {least:g}.")
        every_s = self.preempted_every_s
        if every_s is not None and not (math.isfinite(every_s) and every_s > 0):
            raise ConfigurationError(f"preempted_every_s is {every_s:g}, expected a number of seconds > 0.")
        if self.lost_at_s is not None and every_s is not None:
            raise ConfigurationError(
                "lost_at_s and preempted_every_s are both given; a worker is lost at one time or at random."
            )
        if self.back_after_s is not None and self.lost_at_s is None and every_s is None:
            raise ConfigurationError("back_after_s is given for a worker that is never lost.")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker is connected, where that is not as the others are.

    Attributes:
        bandwidth_bps: of its card, bits per second in each direction; None as for all.
        to_server_s: latency of what it sends; None as for all.
        from_server_s: latency of what it is sent; None as for all.
    """

    bandwidth_bps: float | None = None
    to_server_s: Times | None = None
    from_server_s: Times | None = None
