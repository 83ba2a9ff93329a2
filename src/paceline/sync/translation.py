"""Translated hyper-parameters: an update moves the weights as far as its samples would move them in one process.

In one process, or under BSP, each step of the optimizer uses the *joint batch*: the batches of all live workers. Other
models apply updates that use a part of this batch, for example one push out of n. Each of these updates takes a
*fraction of a joint step*:

    the optimizer takes a whole step with the gradient of the update, from the current weights and state;
    then the weights and the state move by the fraction s towards the result, where s is the update's share of the
    samples in a joint batch.

In this way, training takes the same course as under BSP, in smaller steps. The same number of samples moves the weights
as far, decays the weights as much, and advances the state (momentum, step counts, running means) as far as under BSP,
for every class of optimizer, every schedule and all hyper-parameters. For SGD with learning rate h, momentum m and
velocity u,

    w <- w - s h (g + m u)        u <- u + s (g - (1 - m) u).

So a push moves the weights by h s g immediately. Its later effect, through momentum, is spread over as many *samples*
as under BSP. (If only the learning rate were divided by n, this effect would end after an n-th of the samples. If the
momentum were only reduced by the amount that staleness adds, as in Mitliagkas et al., "Asynchrony begets momentum",
2016, directions of large curvature would not be damped.) In three cases, the fraction s alone is not enough.

**Delay.** A gradient is computed on weights that miss the updates which are applied between its pull and its push. The
shares of these updates add up to the *delay* d, in joint steps; with n workers under ASP, d is about 1. Momentum lags
behind as well, and both lags together let directions of large curvature oscillate. Therefore averages of the gradient
(`Family.means`) move only by s / (1 + d / 2). Each gradient is then spread over more samples, so in the directions in
which the delay matters, the immediate effect of each push dominates. The distance that a gradient moves the weights in
the long run stays the same, but momentum builds up more slowly. Correcting half of the delay is a compromise: if the
whole delay is corrected, runs of a hundred joint steps lag behind, and if no delay is corrected, large steps oscillate
(`docs/models/same-accuracy.md`).

**Second moments.** Adam and its relatives divide by a running mean of squared gradients. A push of a share s contains
more noise than a joint gradient: with the signal a and the noise b of the joint gradient, the square of the push
is a^2 + b^2 / s. Therefore the square in `Family.square` is replaced by an estimate of the joint gradient's square,
s g^2 + (1 - s) m^2, where m is the running mean of the gradient.

**Normalized updates.** Muon makes the update of a matrix orthogonal, Lion takes signs, and Adafactor limits the norm of
an update. So the noise of a gradient changes the direction of the update or shortens its signal, and no later
correction of the state can undo this. Therefore these optimizers never see the gradient of a push itself, but a running
mean v of gradients (`Family.averages`), which moves by r = 2 s / (1 + s):

    v <- v + r (g - v).

In the long run, the noise of v is r / (2 - r) = s times the noise of a push, so it equals that of a joint gradient.
And v lags by (1 - s) / 2 joint steps. No other delay is corrected: the length of a normalized update does not depend on
how far the momentum has built up, so a slower momentum would only lag behind further. Optimizer classes about which
nothing is known are treated in the same way. They may normalize; if they do not, the running mean costs only its lag.

At share 1 and delay 0, all of these rules give the whole step itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

HYPERPARAMETERS = ("raw", "translated")
"""The hyper-parameters of a script refer to each update ("raw"), or to a step on the joint batch ("translated")."""


class Standing(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The data about an update from which a shard translates the hyper-parameters.

    Attributes:
        share: the part of a joint batch that the update uses: the samples of its pushes, divided by the samples of
            one push of each live worker. 1 / n for a single push of n equal workers, 1 for the mean of all workers.
        delay: mean staleness of the shard's recent pushes in joint steps: the sum of the shares of the updates
            between the pull and the application of a push.
        temper: factor by which the guard reduces the learning rate.
    """

    share: float
    delay: float = 0.0
    temper: float = 1.0


class Fraction(NamedTuple):
    """The fraction of a joint step that an update takes.

    A whole step would move the weights and the state from their current values to the result of the step. The
    attributes say which fraction of this way they move.

    Attributes:
        step: fraction of the way that the state moves, except for averages of the gradient.
        weights: fraction of the way that the weights move. Smaller than `step` only if the guard has reduced the
            learning rate.
        means: fraction of the way that averages of the gradient move.
    """

    step: float
    weights: float
    means: float

    @property
    def whole(self) -> bool:
        """True if the update takes the whole step, as in one process."""
        return self.step == self.weights == self.means == 1.0

    @property
    def average(self) -> float:
        """Fraction of the way that a running mean of gradients moves, so that its noise is that of a joint gradient."""
        return 2.0 * self.step / (1.0 + self.step)


LAG = 0.5
"""The part of the delay that is corrected: averages of the gradient move by s / (1 + LAG d)."""

WHOLE = Fraction(1.0, 1.0, 1.0)


class Family(NamedTuple):
    """Describes how the state of an optimizer class moves if an update takes only a fraction of a step.

    `means` and `square` name the entries of the state that do not move by `Fraction.step`.

    Attributes:
        means: keys of averages of the gradient.
        square: key of the running mean, or of the sum, of squared gradients; "" if there is none.
        decay: hyper-parameter with the decay of `square`; "" if `square` is a sum. If it is a pair such as `betas`, the
            last number counts.
        mean: key in `means` of a running mean of the gradient, whose decay is the first of `betas`; "" if the state
            has no such mean, so that a mean must be kept in addition.
        averages: True if the optimizer is given a running mean of gradients instead of the gradient of an update.
        decoupled: True if the weight decay is never part of the squared gradient, whatever the hyper-parameters say.
    """

    means: tuple[str, ...] = ()
    square: str = ""
    decay: str = ""
    mean: str = ""
    averages: bool = False
    decoupled: bool = False

    def kept(self, settings: Mapping[str, Any]) -> float:
        """Return the part of `square` that one step keeps; 1 for a sum."""
        decay = settings[self.decay] if self.decay else 1.0
        return float(decay[-1] if isinstance(decay, tuple | list) else decay)


ADAM = Family(("exp_avg",), "exp_avg_sq", "betas", "exp_avg")

NORMALIZED = Family(averages=True)

SCHEDULE_FREE_ADAM = Family((), "exp_avg_sq", "betas", decoupled=True)

FAMILIES: dict[str, Family] = {
    "SGD": Family(("momentum_buffer",)),
    "Adam": ADAM,
    "AdamW": ADAM,
    "NAdam": ADAM,
    "RAdam": ADAM,
    "Adamax": Family(("exp_avg",)),
    "RMSprop": Family(("momentum_buffer", "grad_avg"), "square_avg", "alpha"),
    "Adadelta": Family((), "square_avg", "rho"),
    "Adagrad": Family((), "sum"),
    "ASGD": Family(),
    "Muon": NORMALIZED,
    "Adafactor": NORMALIZED,
    "schedulefree.adamw_schedulefree:AdamWScheduleFree": SCHEDULE_FREE_ADAM,
    "schedulefree.radam_schedulefree:RAdamScheduleFree": SCHEDULE_FREE_ADAM,
    "schedulefree.sgd_schedulefree:SGDScheduleFree": Family(),
}
"""Optimizer class -> the entries of its state. A class that is not listed counts as `NORMALIZED`."""


def averages_words(optimizers: Sequence[str]) -> str:
    """Return which optimizers receive a running mean of gradients, and what this may cost; "" if no optimizer does.

    Args:
        optimizers: the classes of the optimizers, as in `FAMILIES`.

    >>> averages_words(["Muon", "AdamW"])
    'Muon receives a running mean of gradients, because normalized updates suffer from the noise of a single gradient; \
it may learn slightly less than under bsp (see docs/models/hyper-parameters.md)'
    >>> averages_words(["AdamW"])
    ''
    """
    names = [name.rpartition(":")[2] for name in optimizers if FAMILIES.get(name, NORMALIZED).averages]
    if not names:
        return ""
    *others, last = dict.fromkeys(names)
    given, it = (f"{', '.join(others)} and {last} receive", "they") if others else (f"{last} receives", "it")
    return (
        f"{given} a running mean of gradients, because normalized updates suffer from the noise of a single gradient; "
        f"{it} may learn slightly less than under bsp (see docs/models/hyper-parameters.md)"
    )


def translate(standing: Standing) -> Fraction:
    """Return the fraction of a joint step that an update takes.

    The fraction is continuous in share and delay, and grows with the share. At share 1 and delay 0, it is the whole
    step.

    >>> translate(Standing(share=0.25, delay=1.0))
    Fraction(step=0.25, weights=0.25, means=0.16666666666666666)
    >>> translate(Standing(share=1.0)).whole
    True
    """
    share = min(standing.share, 1.0)
    return Fraction(share, share * standing.temper, share / (1.0 + LAG * standing.delay))
