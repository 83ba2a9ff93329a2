"""The settings that the demo compares, and the training task that all of them share."""

from __future__ import annotations

import msgspec

from ..sync import PullState

__all__ = ["EVERY_SETTING", "SETTINGS", "Problem", "Setting", "within_two_of_the_slowest"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The training task, which is the same for all sync models.

    The minimum iteration times are long compared with a worker's computation, which takes a few milliseconds and
    leaves two cores mostly idle. So the timing is determined by the emulated machines and not by the real one.

    Attributes:
        pace_s: minimum time of an iteration in seconds, for each worker.
        servers: number of servers.
        batch_size: images per worker and iteration.
        duration_s: training time in seconds.
        snapshot_every_s: time between two snapshots of the weights, in seconds.
        target_accuracy: target accuracy on the test images, from 0 to 1.
    """

    pace_s: tuple[float, ...] = (0.03, 0.03, 0.03, 0.09)
    servers: int = 2
    batch_size: int = 32
    duration_s: float = 16.0
    snapshot_every_s: float = 0.25
    target_accuracy: float = 0.95


class Setting(msgspec.Struct, frozen=True):
    """A sync model and its hyper-parameters.

    Attributes:
        sync: the sync model, in the notation of `--sync`.
        learning_rate: learning rate of SGD.
        momentum: momentum of SGD; 0 disables it.
    """

    sync: str
    learning_rate: float
    momentum: float

    def __str__(self) -> str:
        return f"{self.sync}, learning rate {self.learning_rate:g}, momentum {self.momentum:g}"


def within_two_of_the_slowest(state: PullState) -> bool:
    """Answer the pull (return True) if the worker is at most two iterations ahead of the slowest worker."""
    return state.gap <= 2


SETTINGS = (
    Setting("bsp", learning_rate=0.14, momentum=0.9),
    Setting("ssp:staleness=3", learning_rate=0.0088, momentum=0.9),
    Setting("asp", learning_rate=0.14, momentum=0.0),
    Setting("elastic-bsp:lookahead=15", learning_rate=0.14, momentum=0.0),
)
"""The four sync models of the demo, each with the best learning rate and momentum that a search found.

The search (`make tune`) tries momentum 0 and 0.9, each with a grid of learning rates that is extended until the best
point lies inside the grid. It runs all points with one seed, and compares the best few by their median time to the
target over three seeds. `docs/demo.md` describes the conditions under which these settings were found.
"""

_like_bsp, _like_ssp, _like_asp = (
    {"learning_rate": setting.learning_rate, "momentum": setting.momentum} for setting in SETTINGS[:3]
)

EVERY_SETTING = (
    SETTINGS[0],
    Setting("drop-stragglers:quorum=3", **_like_bsp),
    SETTINGS[1],
    Setting("ssp:staleness=3,execution=lazy", **_like_ssp),
    Setting("ssp:staleness=5", **_like_ssp),
    Setting("pssp:staleness=3,probability=0.333333", **_like_ssp),
    Setting("dynamic-pssp:staleness=3", **_like_ssp),
    Setting("dssp:lower=3,upper=15", **_like_ssp),
    Setting("dsps:lower=1,upper=15", **_like_ssp),
    Setting("conditions:pull=paceline.demo.settings:within_two_of_the_slowest", **_like_ssp),
    SETTINGS[2],
    Setting("naive-waiting:delay_s=0.004", **_like_asp),
    Setting("spec-sync", **_like_asp),
    Setting("spec-sync:abort_time_s=0.01,abort_rate=0.2", **_like_asp),
    Setting("spec-sync:base=ssp:staleness=3", **_like_ssp),
    SETTINGS[3],
)
"""The sync models of `paceline demo --all`, each with a learning rate and momentum.

A model that is not in `SETTINGS` uses the learning rate and momentum of a similar model: BSP for models that average
gradients, SSP for models that bound staleness, and ASP for all others. PSSP(3, 1/3) and SSP(5) have the same regret
bound (FluentPS, Theorem 1: s + 1/c - 1).
"""
