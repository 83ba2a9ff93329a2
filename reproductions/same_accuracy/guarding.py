"""The guard of each run of an ensemble, as in a real run (see `paceline.core.guard`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from paceline.core.guard import Guard, GuardVerdict
from paceline.core.messages import Observation
from paceline.sync.schedule import read_schedule
from paceline.sync.translation import Standing

from ..ensembles.schedules import Schedule
from ..ensembles.training import Setting

SAMPLED = 8192
"""Number of weights, evenly spaced, from which their norm is estimated."""


class Guards:
    """Observes an ensemble.

    Args:
        schedule: the schedule of the ensemble.
        settings: the hyper-parameters.
        seeds: number of seeds.
        corrects_delay: False to translate the hyper-parameters as if no gradient were delayed.

    Attributes:
        told: for each run, True if its user has been told that training goes wrong. A gradient with NaN or inf
            counts, because by default it ends the run with an error.
    """

    def __init__(
        self, schedule: Schedule, settings: Sequence[Setting], seeds: int, *, corrects_delay: bool = True
    ) -> None:
        self._corrects_delay = corrects_delay
        self._sync = schedule.sync
        self._lockstep = all(model.lockstep for model in read_schedule(schedule.sync).first)
        self._workers = schedule.batches.keys()
        self._guards = [Guard("tell") for _ in settings for _ in range(seeds)]
        self.told = [False] * len(self._guards)

    def observe(self, worker: int, updates: int, losses: Tensor, gradients: Tensor, weights: Tensor) -> None:
        """Let the guard of each run judge a push."""
        sample = weights[:, :: -(-weights.shape[1] // SAMPLED)]
        scale = math.sqrt(weights.shape[1] / sample.shape[1])
        seen = zip(
            self._guards,
            losses.tolist(),
            torch.linalg.vector_norm(gradients, dim=1).tolist(),
            (torch.linalg.vector_norm(sample, dim=1) * scale).tolist(),
            strict=True,
        )
        for run, (guard, loss, gradient, size) in enumerate(seen):
            if self.told[run]:
                continue  # nothing new can follow
            verdicts = guard.take(
                worker,
                Observation(updates, loss, gradient, size),
                present=self._workers,
                sync=self._sync,
                lockstep=self._lockstep,
            )
            if verdicts:
                self.told[run] |= any(map(_warns, verdicts))
            elif not math.isfinite(gradient):
                self.told[run] = True

    def standing(self, run: int, standing: Standing) -> Standing:
        """Return the standing with which a run makes an update."""
        return standing if self._corrects_delay else msgspec.structs.replace(standing, delay=0.0)


def _warns(verdict: GuardVerdict) -> bool:
    """Return True if a verdict is about the training, and not about one of the workers."""
    return not verdict.words.startswith("Worker ")
