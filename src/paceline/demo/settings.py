"""The settings that the demo compares, and the training task that all of them share."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..core.protocol.lease import BatchSizing
from ..report.names import run_name
from ..sync import PullState

__all__ = [
    "EVERY_SETTING",
    "OWN_BEST",
    "SETTINGS",
    "TRANSLATED",
    "Problem",
    "Setting",
    "within_two_of_the_slowest",
]


Hyperparameters = Literal["raw", "translated"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The training task, which is the same for all sync models.

    A worker's computation takes a few milliseconds, much less than the minimum iteration times, so even two cores are
    mostly idle. Thus, the timing depends on the emulated machines, not on the real one.

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
    """A sync model, the sizes of the workers' batches, and the hyper-parameters.

    Without staleness, raw and translated hyper-parameters are the same.

    Attributes:
        sync: the sync model, in the notation of `--sync`.
        learning_rate: learning rate of SGD.
        momentum: momentum of SGD; 0 disables it.
        batch: sizes of the workers' batches: "equal" or "balanced".
        hyperparameters: "translated" if the learning rate and momentum are those of a joint batch, or "raw" if they
            were found for this sync model. See `paceline.launch`.
    """

    sync: str
    learning_rate: float
    momentum: float
    batch: BatchSizing = "equal"
    hyperparameters: Hyperparameters = "raw"

    @property
    def name(self) -> str:
        """The name of the sync model, marked if the batches are balanced or the hyper-parameters translated."""
        return run_name(self.sync, self.batch, self.hyperparameters)

    def __str__(self) -> str:
        return f"{self.name}, learning rate {self.learning_rate:g}, momentum {self.momentum:g}"


def within_two_of_the_slowest(state: PullState) -> bool:
    """Answer a pull (return True) if the worker is at most two iterations ahead of the slowest worker."""
    return state.gap <= 2


OWN_BEST = (
    Setting("bsp", learning_rate=0.14, momentum=0.9),
    Setting("bsp", learning_rate=0.14, momentum=0.9, batch="balanced"),
    Setting("ssp:staleness=3", learning_rate=0.0088, momentum=0.9),
    Setting("asp", learning_rate=0.14, momentum=0.0),
    Setting("elastic-bsp:lookahead=15", learning_rate=0.14, momentum=0.0),
)
"""Each sync model with the best learning rate and momentum that a search found for it.

BSP makes the same updates with equal and with balanced batches, so both settings have the same learning rate and
momentum.

The search (`make tune`) tries momentum 0 and 0.9, each with a grid of learning rates that is extended until the best
point lies inside the grid. All points are measured with one seed. The best few and their neighbors are measured with
three seeds and compared by their median time to the target. `docs/demo.md` describes the conditions of the search.
"""

_bsp, _balanced, _ssp, _asp, _elastic = OWN_BEST

TRANSLATED = tuple(
    msgspec.structs.replace(_bsp, sync=setting.sync, hyperparameters="translated")
    for setting in (_ssp, _asp, _elastic)
)
"""The other sync models with the hyper-parameters of BSP, as a user has them who changes only `--sync`."""

SETTINGS = (_bsp, _balanced, *TRANSLATED, _ssp, _asp, _elastic)
"""The settings of the demo: first those with the hyper-parameters of BSP, then each model with its own best ones."""


def _like(setting: Setting, sync: str) -> Setting:
    """Return a setting for another sync model, with the learning rate and momentum of the given setting."""
    return msgspec.structs.replace(setting, sync=sync)


EVERY_SETTING = (
    _bsp,
    _balanced,
    _like(_bsp, "drop-stragglers:quorum=3"),
    _ssp,
    _like(_ssp, "ssp:staleness=3,execution=lazy"),
    _like(_ssp, "ssp:staleness=5"),
    _like(_ssp, "pssp:staleness=3,probability=0.333333"),
    _like(_ssp, "dynamic-pssp:staleness=3"),
    _like(_ssp, "dssp:lower=3,upper=15"),
    _like(_ssp, "dsps:lower=1,upper=15"),
    _like(_ssp, "conditions:pull=paceline.demo.settings:within_two_of_the_slowest"),
    _asp,
    _like(_asp, "naive-waiting:delay_s=0.004"),
    _like(_asp, "spec-sync"),
    _like(_asp, "spec-sync:abort_time_s=0.01,abort_rate=0.2"),
    _like(_ssp, "spec-sync:base=ssp:staleness=3"),
    _elastic,
)
"""The settings of `paceline demo --all`, each with a learning rate and momentum.

All hyper-parameters are raw. A model that is not in `OWN_BEST` uses the learning rate and momentum of a similar
model: BSP for models that average gradients, SSP for models that bound staleness, and ASP for all others.
PSSP(3, 1/3) and SSP(5) have the same regret bound (FluentPS, Theorem 1: s + 1/c - 1).
"""
