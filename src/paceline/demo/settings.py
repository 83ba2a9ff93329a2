"""What the demo compares."""

from __future__ import annotations

import msgspec

from ..sync import PullState

__all__ = ["EVERY_SETTING", "SETTINGS", "Problem", "Setting", "within_two_of_the_slowest"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What all sync models are given alike.

    The pace is chosen such that a worker's own computation, a few milliseconds, leaves two cores mostly idle: the
    emulated machines decide on the timing, and not the real one.

    Attributes:
        pace_s: for each worker, the least time of an iteration.
        servers: how many.
        batch_size: images per worker and iteration.
        duration_s: of training.
        snapshot_every_s: the grid of times at which the weights are judged.
        target_accuracy: on the test images, from 0 to 1.
    """

    pace_s: tuple[float, ...] = (0.03, 0.03, 0.03, 0.09)
    servers: int = 2
    batch_size: int = 32
    duration_s: float = 16.0
    snapshot_every_s: float = 0.25
    target_accuracy: float = 0.95


class Setting(msgspec.Struct, frozen=True):
    """What a sync model runs with: its own best, or a candidate for that."""

    sync: str
    learning_rate: float
    momentum: float

    def __str__(self) -> str:
        return f"{self.sync}, learning rate {self.learning_rate:g}, momentum {self.momentum:g}"


def within_two_of_the_slowest(state: PullState) -> bool:
    """A sync model of one line, as a user would write it."""
    return state.gap <= 2


SETTINGS = (
    Setting("bsp", learning_rate=0.14, momentum=0.9),
    Setting("ssp:staleness=3", learning_rate=0.0088, momentum=0.9),
    Setting("asp", learning_rate=0.14, momentum=0.0),
    Setting("elastic-bsp:lookahead=15", learning_rate=0.14, momentum=0.0),
)
"""Each sync model's best by `paceline demo --tune`: momentum 0 and 0.9, each with its own grid of learning rates,
extended until the best point was inside it; the best few by one seed, then by the median of three. See
`docs/demo.md` for the conditions under which these were found."""

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
"""Every sync model. Those beside the four of `SETTINGS` run with what was found for the nearest of these: the models
that average like BSP, those that bound staleness like SSP, the others like ASP. PSSP(3, 1/3) is held against SSP(5),
which has the same regret bound (FluentPS, Theorem 1: s + 1/c - 1)."""
