"""Training runs for the papers' figures: the digits on a simulated cluster, judged on a grid of virtual times.

The papers' networks and data are not here; DigitsNet on scikit-learn's digits stands in for them, while the cluster's
times, its network and the size of what travels are those of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import msgspec
import torch
from torch import nn

from paceline.demo.digits import Digits, DigitsNet, Recipe, accuracy, load, train
from paceline.rehearsal.process_pool import TellCount, on_all_cores
from paceline.runtime.reader import WeightsSnapshot
from paceline.sim import Cluster, simulate

__all__ = [
    "JUDGED",
    "Outcome",
    "Run",
    "Setting",
    "Target",
    "at_own_best",
    "best_of_each",
    "common_and_tuned",
    "medians",
    "run_all",
    "with_setting",
]

FEW = 4  # runs are done in this process: another one takes longer to start

JUDGED = 256  # training images that the loss is of: all of them would take longer than the training

NEVER_S = 1e6  # no run here lasts so long

Setting = tuple[float, float]
"""(learning rate, momentum)."""


class Target(msgspec.Struct, frozen=True):
    """What a run is to come to.

    Attributes:
        measure: "accuracy" on the test images, from 0 to 1, or "loss" over the first `JUDGED` training images.
        value: at least such an accuracy, or at most such a loss.
        in_a_row: at so many evaluations in a row.
    """

    measure: Literal["accuracy", "loss"]
    value: float
    in_a_row: int

    def lack(self, value: float) -> float:
        """By how much a value falls short; 0 or less for one that does not."""
        return self.value - value if self.measure == "accuracy" else value - self.value

    def reached_at(self, values: Sequence[float]) -> int | None:
        """The evaluation that was the last of such a row."""
        row = 0
        for index, value in enumerate(values):
            row = row + 1 if self.lack(value) <= 0 else 0
            if row == self.in_a_row:
                return index
        return None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One training run.

    Attributes:
        label: what it is called in figures; runs with the same one differ in seed or learning rate only.
        cluster: the machines.
        sync: the sync model.
        target: what it is to come to, and what is evaluated.
        learning_rate: of SGD; 0 where it is yet to be chosen.
        momentum: of SGD, likewise.
        likely_rate: near which the best rate is looked for first; None for the middle of what is tried.
        batch_size: images per worker and iteration.
        iterations: of each worker.
        until_s: virtual seconds after which it is cut.
        seed: of weights, data and times.
        every_s: virtual seconds between two evaluations.
        until_target: or when it has come to its target.
    """

    label: str
    cluster: Cluster
    sync: str
    target: Target
    learning_rate: float = 0.0
    likely_rate: float | None = None
    momentum: float = 0.0
    batch_size: int = 16
    iterations: int = 1_000_000
    until_s: float = math.inf
    seed: int = 0
    every_s: float = 1.0
    until_target: bool = True


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What it came to.

    Attributes:
        run: the run.
        times_s: of the evaluations.
        values: what was measured at these times.
        time_s: when the last worker had finished.
        gradients: that were applied.
        updates: optimizer steps.
        restarts: computations that were started anew.
        mean_staleness: in versions.
        bytes_by_kind: what was sent.
        pushes_s: when each push began, ascending.
        reached_s: when it had come to its target; infinity if never.
        slowness: the same; of runs that never come there, far more, by what they lack at the end.
    """

    run: Run
    times_s: list[float]
    values: list[float]
    time_s: float
    gradients: int
    updates: int
    restarts: int
    mean_staleness: float
    bytes_by_kind: dict[str, int]
    pushes_s: list[float]

    @property
    def reached_s(self) -> float:
        """When it had come to its target; infinity if never."""
        index = self.run.target.reached_at(self.values)
        return math.inf if index is None else self.times_s[index]

    @property
    def slowness(self) -> float:
        """The time to the target; of runs that never come there, far more, by what they lack at the end."""
        lack = min(self.run.target.lack(self.values[-1]), NEVER_S)
        return min(self.reached_s, NEVER_S * (1 + max(0.0, lack)))


def run_all(runs: Sequence[Run], tell: TellCount = lambda done, of, what: None) -> list[Outcome]:
    """All of them, in order, on all cores; the same run is done once."""
    wanted = list(dict.fromkeys(map(_key, runs)))
    by_key = {_key(run): run for run in runs}
    digits = load()
    if len(wanted) <= FEW:  # sooner done than a process has started
        _prepare(digits)
        found = {}
        for done, key in enumerate(wanted, start=1):
            found[key] = _run(by_key[key])
            tell(done, len(wanted), by_key[key].label)
        return [msgspec.structs.replace(found[_key(run)], run=run) for run in runs]
    tasks = [by_key[key] for key in wanted]
    outcomes = on_all_cores(_run, tasks, lambda run: run.label, tell, _prepare, (digits,))
    by_task = dict(zip(wanted, outcomes, strict=True))
    return [msgspec.structs.replace(by_task[_key(run)], run=run) for run in runs]


def best_of_each(
    runs: Sequence[Run],
    grid: Sequence[Setting],
    tell: TellCount = lambda done, of, what: None,
) -> dict[str, Setting]:
    """For each label, the setting whose runs come to their target first, in the median; of equal ones the earlier.

    Where each label has one run, and that ends there, the settings are tried from the likely one outwards, each for
    no longer than the best so far has taken.

    Args:
        runs: one or more for each label (its seeds).
        grid: what is tried.
        tell: how far it is.
    """
    if len({run.label for run in runs}) == len(runs) and all(run.until_target for run in runs):
        tasks = [(run, tuple(grid)) for run in runs]
        found = on_all_cores(_tune, tasks, lambda task: task[0].label, tell, _prepare, (load(),))
        return {run.label: setting for run, setting in zip(runs, found, strict=True)}
    tried = [with_setting(run, setting) for run in runs for setting in grid]
    judged: dict[str, dict[Setting, list[float]]] = {}
    for outcome in run_all(tried, tell):
        setting = outcome.run.learning_rate, outcome.run.momentum
        judged.setdefault(outcome.run.label, {}).setdefault(setting, []).append(outcome.slowness)
    return {
        label: min(found, key=lambda setting: (median(found[setting]), grid.index(setting)))
        for label, found in judged.items()
    }


def common_and_tuned(
    runs: Sequence[Run],
    grid: Sequence[Setting],
    tell: Callable[[str, float], None],
) -> tuple[list[Outcome], list[Outcome], dict[str, Setting]]:
    """The runs as they are, by the papers' protocol, and again each label at its own best setting of a grid.

    The first seed alone decides which that is.
    """
    common = run_all(runs, lambda done, of, what: tell(what, 0.3 * done / max(1, of)))
    tuned, best = at_own_best(runs, grid, lambda what, share: tell(what, 0.3 + 0.7 * share))
    return common, tuned, best


def at_own_best(
    runs: Sequence[Run],
    grid: Sequence[Setting],
    tell: Callable[[str, float], None],
) -> tuple[list[Outcome], dict[str, Setting]]:
    """The runs, each label at its own best setting of a grid, and which that is. The first seed alone decides it."""
    best = best_of_each(
        [run for run in runs if run.seed == 0],
        grid,
        lambda done, of, what: tell(f"tuning {what}", 0.6 * done / max(1, of)),
    )
    outcomes = run_all(
        [with_setting(run, best[run.label]) for run in runs],
        lambda done, of, what: tell(what, 0.6 + 0.4 * done / max(1, of)),
    )
    return outcomes, best


def with_setting(run: Run, setting: Setting) -> Run:
    """The same run with another learning rate and momentum."""
    return msgspec.structs.replace(run, learning_rate=setting[0], momentum=setting[1])


def medians(outcomes: Sequence[Outcome], measure: Callable[[Outcome], float]) -> dict[str, float]:
    """For each label, the median of a measure over its runs."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.run.label, []).append(measure(outcome))
    return {label: median(values) for label, values in found.items()}


def _key(run: Run) -> tuple[object, ...]:
    """Runs with the same key come out the same."""
    return (
        id(run.cluster),
        run.sync,
        run.learning_rate,
        run.momentum,
        run.batch_size,
        run.iterations,
        run.until_s,
        run.seed,
        run.every_s,
        run.target,
        run.until_target,
    )


_digits: Digits


def _prepare(digits: Digits) -> None:
    global _digits
    _digits = digits


def _tune(task: tuple[Run, tuple[Setting, ...]]) -> Setting:
    """The setting that comes to the target first; if none does, the one that comes nearest."""
    run, grid = task
    likely = len(grid) // 2
    if (rate := run.likely_rate) is not None:
        likely = min(range(len(grid)), key=lambda index: abs(math.log(grid[index][0] / rate)))
    best = math.inf, likely
    until_s = run.until_s
    for index in sorted(range(len(grid)), key=lambda index: abs(index - likely)):
        outcome = _run(msgspec.structs.replace(with_setting(run, grid[index]), until_s=until_s))
        best = min(best, (outcome.slowness, index))
        until_s = min(until_s, best[0])
    return grid[best[1]]


def _run(run: Run) -> Outcome:
    recipe = Recipe(
        learning_rate=run.learning_rate,
        momentum=run.momentum,
        batch_size=run.batch_size,
        duration_s=math.inf,
        iterations=run.iterations,
        seed=run.seed,
    )
    times_s: list[float] = []
    values: list[float] = []
    measure = _accuracy if run.target.measure == "accuracy" else _loss

    def judge(time_s: float, snapshot: WeightsSnapshot) -> bool:
        times_s.append(time_s)
        values.append(measure(snapshot.state_dict))
        return run.until_target and run.target.reached_at(values[-run.target.in_a_row :]) is not None

    result = simulate(
        run.cluster,
        run.sync,
        seed=run.seed,
        until_s=run.until_s,
        train_fn=train,
        args=(_digits, recipe),
        on_nan="skip",
        snapshot_every_s=run.every_s,
        on_snapshot=judge,
    )
    measures = result.measures
    return Outcome(
        run=run,
        times_s=times_s,
        values=values,
        time_s=result.time_s,
        gradients=sum(measures.iterations.values()),
        updates=measures.updates,
        restarts=measures.restarts,
        mean_staleness=measures.mean_staleness,
        bytes_by_kind=result.bytes_by_kind,
        pushes_s=[loss.time_s for loss in result.history or []],
    )


def _accuracy(state_dict: dict[str, torch.Tensor]) -> float:
    return accuracy(state_dict, _digits)


def _loss(state_dict: dict[str, torch.Tensor]) -> float:
    """Over some training images; infinity where it is no number."""
    model = DigitsNet()
    model.load_state_dict(state_dict)
    with torch.inference_mode():
        images, labels = _digits.train_images[:JUDGED], _digits.train_labels[:JUDGED]
        loss = float(nn.functional.cross_entropy(model(images), labels))
    return loss if math.isfinite(loss) else math.inf
