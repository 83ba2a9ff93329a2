"""The places at which the contenders are compared, which are simulated clusters, and the contenders."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline.core.lease import BatchSizing
from paceline.sim import Cluster, Link, LogNormal, Occasional, Times, Uniform

__all__ = ["CONTENDERS", "PLACES", "Contender", "Place", "Variant"]

LATENCY_S = 0.02
SLOW_LINK_S = 0.5


class Place(msgspec.Struct, frozen=True):
    """A simulated cluster. A worker that is neither slow nor disturbed takes about 1 s for a gradient.

    Attributes:
        kind: in what the workers differ.
        workers: number of workers.
        times: compute times for each worker.
        slow_links: number of workers, the last ones, whose messages take `SLOW_LINK_S` in each direction.
        until_s: virtual time for which the cluster is simulated.
    """

    kind: str
    workers: int
    times: tuple[Times, ...]
    slow_links: int
    until_s: float

    @property
    def name(self) -> str:
        """The name of the place: "steady 2x, 4 workers"."""
        return f"{self.kind}, {self.workers} workers"

    def cluster(self, fixed_share: float = 0.0) -> Cluster:
        """Return the cluster. See `Cluster` for the part of the compute time that is fixed."""
        slow = Link(to_server_s=SLOW_LINK_S, from_server_s=SLOW_LINK_S)
        return Cluster(
            compute_s=self.times,
            latency_s=LATENCY_S,
            links={self.workers - 1 - index: slow for index in range(self.slow_links)},
            fixed_share=fixed_share,
            name=self.name,
        )


def near(mean_s: float) -> Uniform:
    """Return compute times that vary by up to 3 %."""
    return Uniform(low=0.97 * mean_s, high=1.03 * mean_s)


def steady(factor: float) -> Callable[[int], tuple[Times, ...]]:
    """Return a function that maps a number of workers to compute times. A quarter of the workers are always slow."""
    return lambda n: (near(1.0),) * (n - n // 4) + (near(factor),) * (n // 4)


UNTIL_S = {4: 480.0, 16: 240.0, 40: 120.0}

KINDS: dict[str, Callable[[int], tuple[Times, ...]]] = {
    "steady 2x": steady(2.0),
    "steady 4x": steady(4.0),
    "jitter": lambda n: (LogNormal(median=1.0, sigma=0.5),) * n,
    "pauses": lambda n: (Occasional(base=near(1.0), factor=10.0, lasting=5.0, every=50.0),) * n,
    "slow links": lambda n: (near(1.0),) * n,
    "equal": lambda n: (near(1.0),) * n,
}

PLACES = {
    place.name: place
    for place in (
        Place(kind, n, times(n), n // 4 if kind == "slow links" else 0, UNTIL_S[n])
        for kind, times in KINDS.items()
        for n in ((40,) if kind == "equal" else (4, 16))
    )
}
"""The places by name."""


class Variant(msgspec.Struct, frozen=True):
    """A sync model with its parameters.

    Attributes:
        sync: the model, in the notation of the command line.
        batch: sizes of the workers' batches.
        fixed_share: part of the compute time that does not depend on the size of a batch.
    """

    sync: str
    batch: BatchSizing = "equal"
    fixed_share: float = 0.0


class Contender(msgspec.Struct, frozen=True):
    """A model that is compared, and the values of its own parameters among which the tuning chooses.

    Attributes:
        name: name in the tables.
        variants: function that maps the number of workers to the variants.
        averages: True if an update is usually the mean of many gradients. Such models use larger learning rates, so
            their tuning begins there.
    """

    name: str
    variants: Callable[[int], tuple[Variant, ...]]
    averages: bool = False


def always(*syncs: str) -> Callable[[int], tuple[Variant, ...]]:
    """Return a function that returns these models for any number of workers."""
    return lambda n: tuple(Variant(sync) for sync in syncs)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("bsp", always("bsp"), True),
        Contender("bsp balanced", lambda n: (Variant("bsp", "balanced"),), True),
        Contender("bsp balanced, half fixed", lambda n: (Variant("bsp", "balanced", 0.5),), True),
        Contender("asp", always("asp")),
        Contender("asp 1/tau", always("asp:push_scale=1/tau")),
        Contender("asp n/tau", always("asp:push_scale=n/tau")),
        Contender("ssp", always("ssp:staleness=1", "ssp:staleness=3", "ssp:staleness=10")),
        Contender("ssp lazy", always("ssp:staleness=1,execution=lazy", "ssp:staleness=3,execution=lazy")),
        Contender("dssp", always("dssp:lower=1,upper=5", "dssp:lower=3,upper=15")),
        Contender("dsps", always("dsps:lower=1,upper=15")),
        Contender("pssp", always("pssp:staleness=1,probability=0.5", "pssp:staleness=3,probability=0.1")),
        Contender("dynamic-pssp", always("dynamic-pssp:staleness=1", "dynamic-pssp:staleness=3")),
        Contender(
            "drop-stragglers",
            lambda n: tuple(Variant(f"drop-stragglers:quorum={q}") for q in (n // 2, n - n // 4, n - 1)),
            True,
        ),
        Contender("naive-waiting", always("naive-waiting:delay_s=0.1", "naive-waiting:delay_s=0.3")),
        Contender("elastic-bsp", always("elastic-bsp:lookahead=5", "elastic-bsp:lookahead=15")),
        Contender("spec-sync", always("spec-sync", "spec-sync:base=ssp:staleness=3")),
        Contender(
            "rennala", lambda n: tuple(Variant(f"rennala:batch={b}") for b in (n // 2, n, 2 * n)), True
        ),
        Contender(
            "ringmaster",
            lambda n: tuple(
                Variant(f"ringmaster:threshold={r}{stop}") for r in (n, 2 * n) for stop in ("", ",stop=true")
            ),
        ),
    )
}
"""The contenders by name. The first one is the baseline."""
