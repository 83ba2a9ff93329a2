"""The places at which the contenders are compared, which are simulated clusters, and the contenders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from paceline.core.lease import BatchSizing
from paceline.sim import Cluster
from paceline.studies.description import Equal, Generator, Jitter, SlowLinks, Steady, StudyPauses


class Place(msgspec.Struct, frozen=True):
    """A simulated cluster. A worker that is neither slow nor disturbed takes about 1 s for a gradient."""

    kind: str  # in what the workers differ
    machines: Generator  # the workers
    until_s: float  # virtual time for which the cluster is simulated

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.machines.workers

    @property
    def name(self) -> str:
        """The name of the place: "steady 2x, 4 workers"."""
        return f"{self.kind}, {self.workers} workers"

    def cluster(self, fixed_share: float = 0.0) -> Cluster:
        """Return the cluster. See `Cluster` for the part of the compute time that is fixed."""
        return dataclasses.replace(self.machines.cluster(self.name), fixed_share=fixed_share)


UNTIL_S = {4: 480.0, 16: 240.0, 40: 120.0}

KINDS: dict[str, Callable[[int], Generator]] = {
    "steady 2x": lambda n: Steady(workers=n, slower=2.0),
    "steady 4x": lambda n: Steady(workers=n, slower=4.0),
    "jitter": lambda n: Jitter(workers=n),
    "pauses": lambda n: StudyPauses(workers=n),
    "slow links": lambda n: SlowLinks(workers=n),
    "equal": lambda n: Equal(workers=n),
}

PLACES = {
    place.name: place
    for place in (
        Place(kind, machines(n), UNTIL_S[n])
        for kind, machines in KINDS.items()
        for n in ((40,) if kind == "equal" else (4, 16))
    )
}
"""The places by name."""


class Variant(msgspec.Struct, frozen=True):
    """A sync model with its parameters."""

    sync: str  # the model, in the notation of the command line
    batch: BatchSizing = "equal"  # sizes of the workers' batches
    fixed_share: float = 0.0  # part of the compute time that does not depend on the size of a batch


class Contender(msgspec.Struct, frozen=True):
    """A model that is compared, and the values of its own parameters among which the tuning chooses."""

    name: str  # name in the tables
    variants: Callable[[int], tuple[Variant, ...]]  # function that maps the number of workers to the variants
    # True if an update is usually the mean of many gradients. Such models use larger learning rates, so their
    # tuning begins there.
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
