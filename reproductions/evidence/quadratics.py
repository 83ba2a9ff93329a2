"""Noisy quadratics: the expected loss of SGD with momentum, exactly, for a recorded schedule.

The loss is the sum of h x^2 / 2 over coordinates with curvature h. A worker's gradient is h x plus independent noise
with variance v h, as if the batches of a linear model had the covariance of the noise proportional to the curvature
(Zhang et al., "Which algorithmic choices matter at which batch sizes? Insights from a noisy quadratic model", NeurIPS
2019). All coordinates contribute equally to the initial loss, which is 1.

With delays, an update is x' = x - a u', u' = m u + sum of w (h x_r + noise), where x_r are the weights on which a
gradient was computed. This is linear in x, u and the x_r that are still needed, so the second moments of these
variables have an exact recursion, and with them the expected loss. The loss has two parts: one from the mean of x, and
one from the noise, which is proportional to v. So one recursion gives the loss for every size of the batches.

The *critical batch* is the size at which noise and curvature slow down a step equally (McCandlish et al., "An
empirical model of large-batch training", 2018): tr(H S) / (g' H g) for the covariance S of one sample's gradient.
Here, if the loss has fallen to f evenly in all coordinates, it is s J / (2 f), where s is the noise of one sample and
J the number of coordinates. `noise_of` uses f = `CRITICAL_AT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .schedules import Schedule

CURVATURES = np.geomspace(1.0, 1 / 64, 8)
CRITICAL_AT = 0.1


class Losses(NamedTuple):
    """The two parts of the expected loss after each update. Shape of each: (updates + 1, *shape of the settings).

    The expected loss is `of_mean + v * of_noise` for gradients with noise v.
    """

    of_mean: np.ndarray
    of_noise: np.ndarray

    def at(self, noise: float) -> np.ndarray:
        """Return the expected loss for gradients with this noise."""
        return self.of_mean + noise * self.of_noise


def noise_of(batch: float) -> float:
    """Return the noise v of a gradient from a batch of this size, in units of the critical batch.

    >>> round(noise_of(1.0), 3)
    0.025
    """
    return 2 * CRITICAL_AT / (len(CURVATURES) * batch)


def expected_losses(
    schedule: Schedule,
    rates: np.ndarray,
    momenta: np.ndarray,
    decay: np.ndarray | None = None,
) -> Losses:
    """Return the expected loss after each update, for many settings at once.

    Args:
        schedule: the schedule.
        rates: learning rate of each setting; an array of any shape.
        momenta: momentum of each setting, of the same shape.
        decay: factor of the learning rate, of shape (updates, *shape of the settings) or broadcastable to it; None
            for a constant rate.
    """
    h = CURVATURES
    shape = (*rates.shape, len(h))
    a0, m = rates[..., None], momenta[..., None]
    slots = _Slots(schedule)
    count = slots.count
    mean = np.zeros((count, *shape))
    mean[:] = np.sqrt(2 / (h * len(h)))
    velocity = np.zeros(shape)
    moment = np.zeros(
        (count, count, *shape)
    )  # E[x_i x_j] of the noise, in the slots i and j; slot 0 is current
    cross = np.zeros((count, *shape))  # E[u x_j]
    square = np.zeros(shape)  # E[u u]
    of_mean, of_noise = (np.empty((len(schedule.updates) + 1, *rates.shape)) for _ in range(2))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for k, update in enumerate(schedule.updates):
            of_mean[k] = 0.5 * (h * mean[0] ** 2).sum(-1)
            of_noise[k] = 0.5 * (h * moment[0, 0]).sum(-1)
            if (kept := slots.keep(k)) is not None:
                mean[kept] = mean[0]
                moment[kept] = moment[0]
                moment[:, kept] = moment[:, 0]
                moment[kept, kept] = moment[0, 0]
                cross[kept] = cross[0]
            a = a0 if decay is None else a0 * decay[k][..., None]
            weights = slots.weights(k)
            noise = sum(g.weight**2 / g.share for g in update.gradients) * h
            pulled_mean = sum(w * mean[i] for i, w in weights)
            pulled = sum(w * moment[i] for i, w in weights)
            pulled_cross = sum(w * cross[i] for i, w in weights)
            velocity = m * velocity + h * pulled_mean
            row = m * cross + h * pulled  # E[u' x_j] for every slot j
            pulled_row = sum(w * row[i] for i, w in weights)
            square = m * m * square + h * (m * pulled_cross + pulled_row) + noise
            mean[0] = mean[0] - a * velocity
            diagonal = moment[0, 0] - 2 * a * row[0] + a * a * square
            moment[0] -= a * row
            moment[:, 0] = moment[0]
            moment[0, 0] = diagonal
            cross = row
            cross[0] = row[0] - a * square
        of_mean[-1] = 0.5 * (h * mean[0] ** 2).sum(-1)
        of_noise[-1] = 0.5 * (h * moment[0, 0]).sum(-1)
    return Losses(of_mean, of_noise)


class _Slots:
    """The slots for the weights on which later gradients were computed. Slot 0 contains the current weights."""

    def __init__(self, schedule: Schedule) -> None:
        self._gradients = [update.gradients for update in schedule.updates]
        last: dict[int, int] = {}  # version -> the last later update that contains a gradient computed on it
        for k, gradients in enumerate(self._gradients):
            for gradient in gradients:
                if gradient.read < k:
                    last[gradient.read] = k
        free: list[int] = []
        count = 1
        self._slot: dict[int, int] = {}
        self._ends: dict[int, list[int]] = {}
        for k in range(len(self._gradients)):
            if k in last:
                if not free:
                    free.append(count)
                    count += 1
                self._slot[k] = free.pop()
                self._ends.setdefault(last[k], []).append(self._slot[k])
            free += self._ends.get(k, ())
        self.count = count

    def keep(self, version: int) -> int | None:
        """Return the slot to which the current weights must be copied before the update; None for no copy."""
        return self._slot.get(version)

    def weights(self, k: int) -> Sequence[tuple[int, float]]:
        """Return the sum of the weights of the gradients that were computed on each slot's weights."""
        total: dict[int, float] = {}
        for gradient in self._gradients[k]:
            slot = 0 if gradient.read == k else self._slot[gradient.read]
            total[slot] = total.get(slot, 0.0) + gradient.weight
        return list(total.items())
