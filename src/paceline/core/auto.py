"""`--sync auto`: which sync model a run should use, decided from observations of the run, without I/O.

A run begins with bsp, and with balanced batches if its data can be divided into such batches. Neither changes the
result of training. Meanwhile, shard 0 observes how long the workers' cycles take (see `core.paces`). In the second half
of an epoch, unless the last simulation still holds, the host simulates a few epochs with these cycles under each
candidate (`Situation`, `Prospect`). At the beginning of the next epoch, the run changes its model if another model is
faster by enough:

    speed            samples per second that are applied, so dropped samples do not count
    candidates       bsp, and a few models that each suit another kind of difference between the workers' speeds
    value            the simulated speed of a candidate, multiplied by the ratio of its measured speed to its simulated
                     speed when the run last used this candidate
    change           to the candidate with the highest value, if an epoch would then take at least 10 % less time; of
                     candidates that are about equally fast, the one that changes training least
    judgment         the value of the model in force is its measured speed. If this value no longer exceeds that of bsp
                     by 3 %, the run changes back to bsp, and does not try the model again for some epochs. If the loss
                     of an epoch has risen by more than its noise under a model with stale gradients, all such models
                     are ruled out for good

The run changes its model at most once in an epoch. An *epoch* is one pass over the loader that has supplied the most
samples. A script that distributes no loader has no epochs; without epochs, each simulation is followed by a decision.

The decision enters the run as a `SyncRequested` event of the source "auto". So a replay repeats the decision without
this module, and the module need not record anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil, hypot, inf
from statistics import fmean, median, pstdev

import msgspec

from ..state import stateful
from ..sync.model import EFFECTS, Effect, backup_quorum, effect_of
from ..sync.notation import parse_shards
from .lease import DataOrder
from .loader_ledger import PositionCounts
from .messages import Observation, PacesObserved
from .requests import Situation

BASELINE = "bsp"
RELAXED = ("ssp:staleness=3", "elastic-bsp:lookahead=15", "asp")
"""Candidates with stale gradients, in the order of their staleness."""

LEAST_SAVING = 0.1  # share of the time per epoch that a change must save
# used instead of `LEAST_SAVING` for models with stale gradients, if the noise is too small to hide staleness
QUIET_SAVING = 0.3
QUIET = 0.05  # relative spread of the norms of the workers' gradients below which there is little noise
ALIKE = 0.03  # candidates whose speeds differ by at most this share are about equally fast
LEAST_GAIN = 0.03  # a model is kept only while it is faster than bsp by more than this share
PENALTY_EPOCHS = 8  # number of epochs for which a model that was not fast enough is not tried again
WINDOW = 128  # number of cycles of each worker that are simulated
LEAST_SEEN = 12  # number of cycles of every worker that are needed for a simulation
PART_OF_EPOCH = 0.6  # part of an epoch that must be applied before a simulation
STEADY = 0.08  # change of the measured speed above which a simulation is repeated
HOLDS_EPOCHS = 4  # number of epochs after which a simulation is repeated, although the speed is the same
PERIOD = 48  # number of cycles of each worker between two simulations, if there are no epochs
SLOW = 1.5  # a worker is slow if its cycles take this many times as long as those of the median worker
WORSE = 0.05  # relative rise of the mean loss that is always tolerated, however small the noise is
SIGMAS = 3.0  # a rise of the loss by at most this number of standard errors counts as noise


class Prospect(msgspec.Struct, frozen=True):
    """The result of a simulation of a candidate.

    Attributes:
        sync: the candidate.
        speed: applied samples per second; applied gradients per second if the number of samples is unknown.
    """

    sync: str
    speed: float


Planner = Callable[[Situation], Sequence[Prospect]]
"""A function that simulates the candidates."""


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A decision to change the sync model.

    Attributes:
        epoch: number of the epoch that begins with the change.
        before: the model before the change.
        after: the model after the change.
        saving: share of the time per epoch that the change is expected to save; negative if the change has another
            reason.
        effect: what the model does to the result of training (see `sync.model`).
        reason: why the model was changed, in one sentence.
    """

    epoch: int
    before: str
    after: str
    saving: float
    effect: Effect
    reason: str

    def __str__(self) -> str:
        promise = f" Under {self.after}, {EFFECTS[self.effect]}."
        return f"epoch {self.epoch}: from {self.before} to {self.after}. {self.reason}{promise}"


class _Point(msgspec.Struct, frozen=True):
    """The amount of data that shard 0 had applied at the time `now_s`, in samples or in gradients."""

    applied: int
    now_s: float


@stateful(fixed="_allowed")
class Auto:
    """Decides which sync model a run uses.

    Args:
        allowed: returns True if the run can use a model.
        stale: False if the run does not translate its hyper-parameters for models with stale gradients, so that such
            models are never used.

    Attributes:
        sync: the model in force.
        choices: all changes so far.
    """

    def __init__(self, allowed: Callable[[str], bool], *, stale: bool = True) -> None:
        self.sync = BASELINE
        self.choices: list[ModelChoice] = []
        self._begun: dict[str, int] = {}  # loader -> the latest epoch that any worker has begun
        self._allowed = allowed
        self._stale = stale
        self._clips = False
        # worker -> (number of samples, seconds) of each of its latest cycles, and of each of its latest computations
        self._cycles: dict[int, deque[tuple[int, float]]] = {}
        self._computed: dict[int, deque[tuple[int, float]]] = {}
        self._order: DataOrder | None = None
        self._epoch = 0
        self._counts = (0, 0)  # numbers of pushes and of batches so far
        self._latest: _Point | None = None
        self._since: _Point | None = None  # the first point in this epoch
        self._begun_at = 0  # amount of data applied before this epoch began
        self._simulated_at = 0  # amount of data applied before the last simulation
        self._simulated_in = -1  # epoch of the last simulation
        self._simulated_speed = 0.0  # the speed that was measured before the last simulation
        self._prospects: dict[str, float] = {}  # candidate -> the speed that was simulated in this epoch
        self._ratios: dict[str, float] = {}  # model -> measured speed, divided by the simulated speed
        self._barred: dict[str, float] = {}  # model -> epoch from which it may be tried again
        self._losses: list[float] = []  # of this epoch
        # number of updates -> norms of the gradients that were computed on the weights after these updates
        self._norms: dict[int, list[float]] = {}
        self._loss: tuple[float, float] | None = None  # mean and standard error of the last epoch

    @property
    def has_epochs(self) -> bool:
        """True if the script distributes a loader of known size."""
        return self._size is not None

    @property
    def _size(self) -> int | None:
        """Number of samples in an epoch; None if there are no epochs."""
        return None if self._order is None else self._order.size

    @property
    def is_undecided(self) -> bool:
        """True if there are no epochs, and no decision has followed the last simulation yet."""
        return not self.has_epochs and bool(self._prospects)

    @property
    def hindrance(self) -> str:
        """A sentence that says why batches are not balanced; "" if they are balanced, or if this is not known yet."""
        if self._latest is None or (self._order is not None and self._order.balanced):
            return ""
        what = (
            "distributes no loader"
            if self._order is None
            else "distributes a loader whose batches have fixed sizes"
        )
        return f"The script {what}, so batches cannot be balanced. Only other sync models can save time."

    @property
    def periods(self) -> int:
        """Number of the period between two simulations that begins now. Used if there are no epochs."""
        return self._epoch + 1

    # -- observations -------------------------------------------------------------------------------------

    def observe(self, message: PacesObserved, live: Collection[int]) -> Situation | None:
        """Take the observations of shard 0. Return the situation that is to be simulated now; None for no simulation.

        Args:
            message: the observations.
            live: the workers that take part.
        """
        for worker, cycles in message.cycles:
            self._cycles.setdefault(worker, deque(maxlen=WINDOW)).extend(cycles)
        self._cycles = {worker: cycles for worker, cycles in self._cycles.items() if worker in live}
        self._clips = self._clips or message.clips
        self._counts = message.pushes, message.batches
        applied = message.samples if self.has_epochs else message.pushes
        self._latest = _Point(applied, message.now_s)
        self._since = self._since or self._latest
        if self._simulated_in == self._epoch or not self._has_seen_enough(len(live)):
            return None
        if len(self._cycles) < len(live) or min(map(len, self._cycles.values()), default=0) < LEAST_SEEN:
            return None
        speed = self._measured() or 0.0
        if self._is_known(speed):
            return None
        self._simulated_at, self._simulated_in, self._simulated_speed = applied, self._epoch, speed
        return self._situation(len(live))

    def time(self, worker: int, times: Sequence[tuple[int, float]]) -> None:
        """Take the times of a worker's latest computations: (number of samples, seconds) of each."""
        self._computed.setdefault(worker, deque(maxlen=WINDOW)).extend(times)

    def is_next(self, loader: str, epoch: int, counts: Mapping[str, PositionCounts]) -> bool:
        """Record that a worker begins an epoch of a loader.

        Return True if no worker has begun this epoch before, and no other loader has supplied more samples.

        Args:
            loader: name of the loader.
            epoch: number of the epoch.
            counts: loader -> the number of its positions in each state.
        """
        if epoch <= self._begun.get(loader, -1):
            return False
        self._begun[loader] = epoch
        used = {name: each.used for name, each in counts.items()}
        return max(used.values(), default=0) <= used.get(loader, 0)

    def hear(self, seen: Observation) -> None:
        """Take what a worker has observed about one of its pushes."""
        if seen.loss is not None:
            self._losses.append(seen.loss)
        if self.sync == BASELINE and seen.gradient is not None and 0.0 < seen.gradient < inf:
            # Under bsp, gradients with the same number of updates were computed on the same weights.
            self._norms.setdefault(seen.updates, []).append(seen.gradient)
            if len(self._norms) > WINDOW:
                del self._norms[next(iter(self._norms))]

    def rehearsed(self, prospects: Sequence[Prospect]) -> None:
        """Take the results of a simulation, which are used for the decision at the beginning of the next epoch.

        If there are none, the simulation has failed. Without epochs, it is then repeated after another period.
        """
        if not (prospects or self.has_epochs):
            self._simulated_in = -1
        self._prospects = {each.sync: each.speed for each in prospects if each.speed > 0}

    def _has_seen_enough(self, workers: int) -> bool:
        """Return True if enough data was applied for a useful simulation."""
        assert self._latest is not None
        applied, size = self._latest.applied, self._size
        if not size:
            return applied - self._simulated_at >= PERIOD * workers
        # If epochs are too short for the first condition, there is one simulation for every two epochs.
        return applied - self._begun_at >= PART_OF_EPOCH * size or applied - self._simulated_at >= 2 * size

    def _is_known(self, speed: float) -> bool:
        """Return True if the last simulation is recent, and model and speed have not changed (much) since then."""
        changed_in = self.choices[-1].epoch if self.choices else 0
        same = self._simulated_in >= changed_in and self._epoch < self._simulated_in + HOLDS_EPOCHS
        return same and abs(speed - self._simulated_speed) <= STEADY * self._simulated_speed

    def _situation(self, workers: int) -> Situation:
        pushes, batches = self._counts
        order, size = self._order, self._size
        sizes = [samples for cycles in self._cycles.values() for samples, _ in cycles if samples > 0]
        usual = max(1, round(fmean(sizes))) if sizes else 1
        if order is not None:  # the script may accumulate the gradients of several batches
            share = order.batch / workers if order.joint else order.batch
            usual = order.batch * max(1, round(usual / share))
        return Situation(
            syncs=self._candidates(workers),
            cycles=tuple(tuple(self._cycles[worker]) for worker in sorted(self._cycles)),
            computed=tuple(tuple(self._computed.get(worker, ())) for worker in sorted(self._cycles)),
            samples=size if size and size >= workers else None,
            batch_size=usual,
            balanced=order is not None and order.balanced,
            split=order.split if order is not None else "auto",
            pushes_per_batch=max(1.0, pushes / batches) if batches else 1.0,
            joint=order is not None and order.joint,
        )

    def _candidates(self, workers: int) -> tuple[str, ...]:
        usual_s = [median(seconds for _, seconds in cycles) for cycles in self._cycles.values()]
        slow = sum(worker_s > SLOW * median(usual_s) for worker_s in usual_s)
        quorum = backup_quorum(workers, max(slow, ceil(workers / 8)))
        backups = () if quorum is None else (f"drop-stragglers:quorum={quorum}",)
        wished = (self.sync, *backups, *(RELAXED if self._stale else ()))
        usable = [sync for sync in wished if self._allowed(sync) and not self._forbidden(sync)]
        return tuple(dict.fromkeys((BASELINE, *usable)))

    def _forbidden(self, sync: str) -> bool:
        """Return True if the script makes calls that the model `sync` does not allow."""
        return self._clips and not all(model.agrees_on_means for model in parse_shards(sync))

    # -- decisions ----------------------------------------------------------------------------------------

    def begin(self, epoch: int, order: DataOrder | None = None) -> ModelChoice | None:
        """Record that an epoch begins. Return the change of the model that is made now; None for no change.

        Args:
            epoch: number of the epoch.
            order: the order of the epoch.
        """
        measured, loss = self._measured(), _mean(self._losses)
        choice = self._decide(epoch, measured, loss) if self._prospects else None
        self._order, self._epoch = order or self._order, epoch
        self._since, self._prospects = None, {}
        self._begun_at = self._latest.applied if self._latest is not None else 0
        self._losses, self._loss = [], loss or self._loss
        if choice is not None:
            self.sync = choice.after
            self.choices.append(choice)
        return choice

    def _measured(self) -> float | None:
        """Return the speed that was measured in this epoch; None if too little is known."""
        if self._since is None or self._latest is None or self._latest.now_s <= self._since.now_s:
            return None
        return (self._latest.applied - self._since.applied) / (self._latest.now_s - self._since.now_s)

    def _decide(
        self, epoch: int, measured: float | None, loss: tuple[float, float] | None
    ) -> ModelChoice | None:
        simulated = self._prospects
        if measured and self.sync in simulated and self.has_epochs:
            self._ratios[self.sync] = measured / simulated[self.sync]
        if (rise := self._rise(loss)) is not None:
            self._stale = False
            reason = f"The mean loss of an epoch has risen from {rise[0]:.4g} to {rise[1]:.4g}."
            return self._choice(epoch, BASELINE, self._values(), reason)
        values = self._values()
        now, base = values.get(self.sync), values.get(BASELINE)
        if now is None or base is None:
            return None
        best = self._best(values, epoch)
        if best != self.sync and now <= (1.0 - self._least_saving(best)) * values[best]:
            return self._choice(epoch, best, values)
        if self.sync != BASELINE and now < (1.0 + LEAST_GAIN) * base:
            self._barred[self.sync] = epoch + PENALTY_EPOCHS
            return self._choice(epoch, BASELINE, values, f"{self.sync} has saved too little time.")
        return None

    def _values(self) -> dict[str, float]:
        """Return the speed that is expected of each candidate."""
        # If bsp takes longer than simulated, for example because of evaluations, the other models are assumed to take
        # longer by the same amount.
        ratio, base = self._ratios.get(BASELINE, 1.0), self._prospects.get(BASELINE, 0.0)
        more_s = max(0.0, 1.0 / ratio - 1.0) / base if base else 0.0  # seconds per sample
        return {
            sync: speed * self._ratios[sync] if sync in self._ratios else 1.0 / (1.0 / speed + more_s)
            for sync, speed in self._prospects.items()
        }

    def _best(self, values: Mapping[str, float], epoch: int) -> str:
        open_to = {sync: value for sync, value in values.items() if self._barred.get(sync, 0) <= epoch}
        most = max(open_to.values())
        alike = [sync for sync, value in open_to.items() if value >= (1.0 - ALIKE) * most]
        # The candidates are in the order of how much they change training.
        order = [BASELINE, *(sync for sync in values if _effect(sync) == "fresh"), *RELAXED]
        return min(alike, key=lambda sync: order.index(sync) if sync in order else len(order))

    @property
    def noise(self) -> float | None:
        """Mean relative spread of the norms of gradients on the same weights; None if too few norms are known.

        The more the workers' gradients differ, the less it matters that some gradients are stale.
        """
        spreads = [pstdev(norms) / fmean(norms) for norms in self._norms.values() if len(norms) > 1]
        return fmean(spreads) if len(spreads) >= LEAST_SEEN else None

    def _least_saving(self, sync: str) -> float:
        quiet = self.noise is not None and self.noise < QUIET and _effect(sync) == "stale"
        return QUIET_SAVING if quiet else LEAST_SAVING

    def _rise(self, loss: tuple[float, float] | None) -> tuple[float, float] | None:
        """Return the mean losses of the last two epochs if the loss has risen under a model with stale gradients."""
        if loss is None or self._loss is None or _effect(self.sync) != "stale":
            return None
        (before, before_error), (now, now_error) = self._loss, loss
        noise = SIGMAS * hypot(before_error, now_error)
        # If the mean is infinite or NaN, the loss has risen.
        return (before, now) if not now - max(noise, WORSE * abs(before)) <= before else None

    def _choice(self, epoch: int, after: str, values: Mapping[str, float], why: str = "") -> ModelChoice:
        now, then = values.get(self.sync, 0.0), values.get(after, 0.0)
        saving = 1.0 - now / then if now and then else 0.0
        unit = "samples" if self.has_epochs else "gradients"
        speeds = f"{then:.4g} {unit} per second are expected instead of {now:.4g}"
        if (size := self._size) and now and then:
            less = f"{abs(saving):.0%} {'less' if saving >= 0 else 'more'}"
            times = f"{size / then:.3g} s instead of {size / now:.3g} s, {less}"
            speeds = f"An epoch is expected to take {times} ({speeds})"
        reason = f"{why} {speeds}.".strip()
        return ModelChoice(
            epoch=epoch,
            before=self.sync,
            after=after,
            saving=saving,
            effect=_effect(after),
            reason=reason,
        )


def _effect(sync: str) -> Effect:
    return effect_of(parse_shards(sync))


def _mean(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean and the standard error of the mean; None if there are too few losses.

    The losses of training that diverges may be huge, infinite or NaN. `fmean` and `pvariance` fail for some of these.
    """
    if len(losses) < LEAST_SEEN:
        return None
    mean = sum(losses) / len(losses)
    return mean, hypot(*(loss - mean for loss in losses)) / len(losses)
