"""Clusters that are generated: in what their workers differ, and how many workers there are.

A worker that is neither slow nor disturbed takes about 1 s for a gradient. So times in a study are in units of an
undisturbed gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from ..sim import Cluster, Link, LogNormal, Occasional, Times, Uniform

__all__ = ["GENERATORS", "Equal", "Generator", "Jitter", "Pauses", "SlowLinks", "Steady"]

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1)]


def near(mean_s: float) -> Uniform:
    """Return compute times that vary by up to 3 %."""
    return Uniform(low=0.97 * mean_s, high=1.03 * mean_s)


class Generator(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Base class of the kinds of clusters.

    Attributes:
        workers: number of workers.
        latency_s: latency of every message, in seconds.
    """

    workers: Count
    latency_s: Seconds = 0.02

    def times(self) -> tuple[Times, ...]:
        """Return the compute times of each worker."""
        return (near(1.0),) * self.workers

    def links(self) -> Mapping[int, Link]:
        """Return the workers whose network differs from that of the others."""
        return {}

    def cluster(self, name: str = "") -> Cluster:
        """Return the cluster."""
        return Cluster(compute_s=self.times(), latency_s=self.latency_s, links=self.links(), name=name)

    def some(self, share: float) -> int:
        """Return the number of workers that are a share of them, rounded down."""
        return int(share * self.workers)


class Equal(Generator, frozen=True, kw_only=True, tag="equal"):
    """Workers that are equally fast, up to random differences of 3 %."""


class Steady(Generator, frozen=True, kw_only=True, tag="steady"):
    """Some of the workers, the last ones, are always slower.

    Attributes:
        slower: how many times longer their gradients take.
        share: their share of the workers.
    """

    slower: Factor = 2.0
    share: Share = 0.25

    def times(self) -> tuple[Times, ...]:
        slow = self.some(self.share)
        return (near(1.0),) * (self.workers - slow) + (near(self.slower),) * slow


class Jitter(Generator, frozen=True, kw_only=True, tag="jitter"):
    """All times vary at random, log-normally.

    Attributes:
        sigma: standard deviation of the natural logarithm of a time.
    """

    sigma: Annotated[float, Meta(gt=0)] = 0.5

    def times(self) -> tuple[Times, ...]:
        return (LogNormal(median=1.0, sigma=self.sigma),) * self.workers


class Pauses(Generator, frozen=True, kw_only=True, tag="pauses"):
    """Each worker is slow for some time, now and then.

    Attributes:
        slower: how many times longer a gradient takes then.
        lasting_s: for how long, in seconds.
        every_s: once in how many seconds.
    """

    slower: Factor = 10.0
    lasting_s: Seconds = 5.0
    every_s: Seconds = 50.0

    def times(self) -> tuple[Times, ...]:
        slow = Occasional(base=near(1.0), factor=self.slower, lasting=self.lasting_s, every=self.every_s)
        return (slow,) * self.workers


class SlowLinks(Generator, frozen=True, kw_only=True, tag="slow-links"):
    """The messages of some of the workers, the last ones, take longer.

    Attributes:
        message_s: time for which their messages travel, in seconds.
        share: their share of the workers.
    """

    message_s: Seconds = 0.5
    share: Share = 0.25

    def links(self) -> Mapping[int, Link]:
        slow = Link(to_server_s=self.message_s, from_server_s=self.message_s)
        return {self.workers - 1 - index: slow for index in range(self.some(self.share))}


GENERATORS: Mapping[str, type[Generator]] = {
    str(kind.__struct_config__.tag): kind for kind in (Equal, Steady, Jitter, Pauses, SlowLinks)
}
"""The kinds of clusters by name."""
