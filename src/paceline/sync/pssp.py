"""PSSP, probabilistic staleness synchronous parallel: a worker that is too far ahead waits with a given probability.

Reference: FluentPS (Yao, Wu and Wang, CLUSTER 2019), section III-E, Table III row PSSP, Theorems 1 and 2.
Admission: Let k = progress - V_train. A pull with k >= s (that is, c_p - min c > s) is delayed with probability P;
every other pull is answered. In constant PSSP, P is a constant c. In dynamic PSSP, P(s, k) = a / (1 + e^(s - k)),
clamped to [0, 1], where a is a constant or the significance |g| / |w| of the push that preceded the pull.
State: c_p, the delayed pulls of each round, and the significance of each worker's last push.
Guarantee: With P = 0, the model is ASP; with P = 1, it is SSP(s). If the slowest worker stops, the value of k at which
constant PSSP first delays another worker is random, with mean s + 1/c - 1. With `execution="lazy"`, the default of the
paper, a delayed worker waits until the slowest worker has caught up, so the expected k is at most this mean, and in all
tests, the regret is below the bounds of Theorems 1 and 2. With `execution="soft"`, the default here, a delayed worker
waits for one round only. In this case, under constant PSSP, the k of a worker that is much faster than the slowest
worker grows without a bound, by 1/c - 1 per round on average. So the regret can exceed the bound of Theorem 1. The
paper does not mention this. The regret exceeds this bound only if every gradient is computed on the oldest weights that
the theorem allows. Here, the weights are newer, because each answer contains all pushes that have arrived. The paper
does not state the step size for which its bounds hold. In the tests, they hold for the step size of Ho et al. (2013).
Eq. 2 of the paper is meant for 0 < c < 1: the first line of Eq. 2 is 0 for c = 0, where PSSP is ASP, and the second
line is undefined for c = 1. With `draws="per-shard"` and M shards, 1 - (1 - c)^M replaces c, because a worker continues
only if no shard delays it. The run makes progress as long as the slowest live worker does.
Use: When SSP makes too many workers wait at the same time: PSSP delays fewer pulls. With `execution="lazy"`, constant
PSSP has the same bound on the expected regret as SSP(s + 1/c - 1).
Deviations: The random draw is keyed by (seed, worker, iteration), so that all shards agree, and the number of shards
does not change the model. In the paper, each server evaluates `rand(0,1) > P` with a random number of its own. With
`draws="per-shard"`, each shard draws a number of its own, too. Then P is the probability at one shard, and the
probability that a worker has to wait is 1 - (1 - P)^M, which the paper does not discuss. For example, P = 0.1 on 8
shards delays a worker with a probability of 0.57. With `push_scale="1/n"`, n is the largest number of workers that have
been present at the same time (see `paceline.sync.conditions`). In the paper, N is a constant.

>>> from paceline.sync.events import PullRequested, PushReceived, WorkerJoined
>>> shard = PSSP(staleness=0, probability=1.0).at_shard()
>>> for worker in (0, 1):
...     _ = shard.handle(WorkerJoined(now_ticks=0, worker=worker))
>>> _ = shard.handle(PushReceived(now_ticks=1, worker=0, iteration=0))
>>> shard.handle(PullRequested(now_ticks=1, worker=0, iteration=0))  # waits, as in SSP(0)
[]
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import unknown_name
from .conditions import ConditionMachine, ConditionModel, PullState, exp
from .draws import uniform
from .model import require_count, require_within

DRAWS = ("shared", "per-shard")


class PSSP(ConditionModel):
    """Constant PSSP (probabilistic staleness synchronous parallel): a worker that is too far ahead waits with a fixed
    probability.

    Attributes:
        staleness: s, the bound on the gap, in iterations; an integer >= 0.
        probability: P, from 0 to 1: the probability that the pull of a worker that is too far ahead is delayed.
        draws: "shared" for one random draw that all shards use, or "per-shard" for independent draws, as in the
            paper: a worker waits if any shard delays its pull.
    """

    name = "pssp"
    style = "#7A0177", 3
    shown = ("pssp:staleness=1,probability=0.5",)
    demo = ("pssp:staleness=3,probability=0.333333",)

    staleness: int = 3
    probability: float = 0.5
    draws: str = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.name, "staleness", self.staleness, 0)
        require_within(self.name, "probability", self.probability, 0.0, 1.0)
        _require_draws(self.name, self.draws)

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        return _delaying(self, lambda state: self.probability, seed, shard)


class DynamicPSSP(ConditionModel):
    """Dynamic PSSP: the further a worker is ahead, the more likely its pull is to be delayed.

    Attributes:
        staleness: s, the bound on the gap, in iterations; an integer >= 0.
        alpha: the factor a in P(s, k): a number >= 0, or "significance" to use |g| / |w|.
        draws: "shared" for one random draw that all shards use, or "per-shard" for independent draws, as in the
            paper: a worker waits if any shard delays its pull.
    """

    name = "dynamic-pssp"
    style = "#C51B8A", 4
    shown = ("dynamic-pssp:staleness=1",)
    demo = ("dynamic-pssp:staleness=3",)

    staleness: int = 3
    alpha: float | str = 1.0
    draws: str = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.name, "staleness", self.staleness, 0)
        if isinstance(self.alpha, str):
            if self.alpha != "significance":
                raise unknown_name(f"alpha of {self.name}", self.alpha, ["significance"])
        else:
            require_within(self.name, "alpha", self.alpha, 0.0, math.inf)
        _require_draws(self.name, self.draws)

    @property
    def needs_significance(self) -> bool:
        return self.alpha == "significance"

    def at_shard(self, seed: int = 0, shard: int = 0) -> ConditionMachine:
        def probability(state: PullState) -> float:
            alpha = (state.significance or 0.0) if isinstance(self.alpha, str) else self.alpha
            k = state.progress - state.v_train
            return min(1.0, alpha / (1.0 + exp(self.staleness - k)))

        return _delaying(self, probability, seed, shard)


def _delaying(
    model: PSSP | DynamicPSSP, probability: Callable[[PullState], float], seed: int, shard: int
) -> ConditionMachine:
    """Return a state machine with the condition of Table III, row PSSP: a pull with k >= s is delayed at random."""
    key = (seed,) if model.draws == "shared" else (seed, shard)
    staleness = model.staleness

    def answers(state: PullState) -> bool:
        if state.progress < state.v_train + staleness:
            return True
        return uniform(*key, state.worker, state.iteration) >= probability(state)

    return model.machine(answers)


def _require_draws(model: str, draws: str) -> None:
    """Raise `ConfigurationError` unless `draws` is "shared" or "per-shard"."""
    if draws not in DRAWS:
        raise unknown_name(f"draws of {model}", draws, DRAWS)
