"""The demo: sync models are compared in live runs that train on handwritten digits (`paceline demo`).

The first part has the data, a small network, and the training function that every worker runs. Then come the settings
that are compared, a run with one of them, and the comparison.

The 1,797 images of 8 x 8 pixels are part of scikit-learn, so nothing is downloaded. The launcher loads the images and
passes them to the workers as tensors, so workers do not import scikit-learn. `paceline demo --quick` draws random
images instead, so it needs only the packages that Paceline itself needs.
"""

from __future__ import annotations

import csv
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from rich.console import Console
from rich.text import Text
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..core.lease import BatchSizing
from ..core.metrics import Metric, MetricPoint
from ..errors import ConfigurationError
from ..files import Unfinished, write_json
from ..look.page import page_of
from ..look.run_reading import read_report
from ..look.tables import TrialOutcome, comparison_table, medians
from ..run.job_options import make_job
from ..start.launch import launch
from ..start.results import RunResult
from ..start.terminal import print_sentence
from ..sync import MODELS, PullState, parse
from ..trace.run_dir import write_metrics
from ..train.data import distribute
from ..train.optimizer import DistributedOptimizer
from ..words import run_name

TEST_SHARE = 0.2
SPLIT_SEED = 0
CLASSES = 10
BRIGHTEST = 16.0  # scikit-learn's pixels range from 0 to 16
DRAWN_IMAGES = 1800
BRIGHT_SHARE = 0.4  # share of bright pixels in drawn patterns
NOISE = 0.35  # standard deviation of the noise in drawn images


class Digits(msgspec.Struct, frozen=True):
    """The images and labels, split into a training set and a test set.

    Attributes:
        train_images: float32 tensor of shape (n, 1, 8, 8) with values from 0 to 1.
        train_labels: int64 tensor of shape (n,) with values from 0 to 9.
        test_images: images of the test set, in the same format. The two sets are disjoint.
        test_labels: labels of the test set, in the same format.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The hyper-parameters and the length of a worker's training.

    A worker trains on its part of each pass over the training set, until the duration or the number of iterations is
    reached.

    Attributes:
        learning_rate: learning rate of SGD.
        momentum: momentum of SGD; 0 disables it.
        batch_size: images per worker and iteration.
        duration_s: training time in seconds; infinity for no limit.
        seed: random seed for the initial weights, which are the same in all workers.
        iterations: number of iterations of the worker; None for no limit.
    """

    learning_rate: float
    momentum: float
    batch_size: int
    duration_s: float
    seed: int
    iterations: int | None = None


class DigitsNet(nn.Sequential):
    """A network with two convolutional and two fully connected layers, 9,802 parameters in total.

    It has no dropout and no batch normalization, so that workers differ only in their data.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 32),
            nn.ReLU(),
            nn.Linear(32, CLASSES),
        )


def load() -> Digits:
    """Load the digits and split them. The test set is always the same and contains a fifth of each class.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            "the digits are part of scikit-learn, which is not installed. Run: pip install 'paceline[demo]'"
        ) from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.float32).unsqueeze(1) / BRIGHTEST
    return _divided(images, torch.from_numpy(raw.target).to(torch.int64))


def draw() -> Digits:
    """Draw images in place of digits. Each class has a pattern of dark and bright pixels, to which noise is added."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    labels = torch.arange(DRAWN_IMAGES) % CLASSES
    patterns = (torch.rand(CLASSES, 1, 8, 8, generator=generator) < BRIGHT_SHARE).float()
    noise = NOISE * torch.randn(DRAWN_IMAGES, 1, 8, 8, generator=generator)
    return _divided((patterns[labels] + noise).clamp(0.0, 1.0), labels)


def train(digits: Digits, recipe: Recipe) -> None:
    """Train as one worker of a run.

    In the demo, workers stop after a fixed time, not after a fixed number of epochs. Thus, each sync model gets the
    same training time, and the slow worker does not train alone after the other workers have finished.
    """
    torch.manual_seed(recipe.seed)
    model = DigitsNet()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum), model=model
    )
    images = TensorDataset(digits.train_images, digits.train_labels)
    part = distribute(DataLoader(images, recipe.batch_size, shuffle=True, drop_last=True))
    begun_s: float | None = None
    batches = itertools.chain.from_iterable(itertools.repeat(part))
    for x, y in itertools.islice(batches, recipe.iterations):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        now_s = time.monotonic()
        begun_s = begun_s or now_s  # the first step is not timed, since it includes the wait for all workers
        if now_s - begun_s >= recipe.duration_s:
            return


def accuracy(state_dict: dict[str, torch.Tensor], digits: Digits) -> float:
    """Return the accuracy of a network with these weights on the test images, from 0 to 1."""
    model = DigitsNet()
    model.load_state_dict(state_dict)
    with torch.inference_mode():
        predicted = model(digits.test_images).argmax(dim=1)
    return float((predicted == digits.test_labels).float().mean())


def _divided(images: torch.Tensor, labels: torch.Tensor) -> Digits:
    """Divide images into the training set and the test set."""
    test = _test_part(labels)
    return Digits(images[~test], labels[~test], images[test], labels[test])


def _test_part(labels: torch.Tensor) -> torch.Tensor:
    """Return the mask that selects the test images: a fifth of each class, and always the same images."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(CLASSES):
        (of_class,) = torch.nonzero(labels == digit, as_tuple=True)
        shuffled = of_class[torch.randperm(len(of_class), generator=generator)]
        test[shuffled[: round(TEST_SHARE * len(of_class))]] = True
    return test


# -- The settings that the demo compares, and the training task that all of them share -----------------------

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
        drawn: True if the images are drawn at random, False if they are handwritten digits.
    """

    pace_s: tuple[float, ...] = (0.03, 0.03, 0.03, 0.09)
    servers: int = 2
    batch_size: int = 32
    duration_s: float = 16.0
    snapshot_every_s: float = 0.25
    target_accuracy: float = 0.95
    drawn: bool = False


class DemoSetting(msgspec.Struct, frozen=True):
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
    DemoSetting("bsp", learning_rate=0.14, momentum=0.9),
    DemoSetting("bsp", learning_rate=0.14, momentum=0.9, batch="balanced"),
    DemoSetting("ssp:staleness=3", learning_rate=0.0088, momentum=0.9),
    DemoSetting("asp", learning_rate=0.14, momentum=0.0),
    DemoSetting("elastic-bsp:lookahead=15", learning_rate=0.14, momentum=0.0),
)
"""Each sync model with the best learning rate and momentum that a search found for it.

BSP makes the same updates with equal and with balanced batches, so both settings have the same learning rate and
momentum.

The search (`make tune`) tries momentum 0 and 0.9, each with a grid of learning rates that is extended until the best
point lies inside the grid. All points are measured with one seed. The best points and their neighbors are measured
with three seeds and compared by their median time to the target. `docs/start/demo.md` describes the conditions.
"""

_bsp, _balanced, _ssp, _asp, _elastic = OWN_BEST

TRANSLATED = tuple(
    msgspec.structs.replace(_bsp, sync=setting.sync, hyperparameters="translated")
    for setting in (_ssp, _asp, _elastic)
)
"""The other sync models with the hyper-parameters of BSP, as for a user who changes only `--sync`."""

SETTINGS = (_bsp, _balanced, *TRANSLATED, _ssp, _asp, _elastic)
"""The settings of the demo: first those with BSP's hyper-parameters, then those with each model's own."""

QUICK_SETTINGS = (_bsp, _balanced, TRANSLATED[1])
"""The settings of `paceline demo --quick`."""

QUICK = Problem(duration_s=6.0, drawn=True)
"""The training task of `paceline demo --quick`."""


def _like(sync: str) -> DemoSetting:
    """Return a setting for another sync model, with the learning rate and momentum of a similar model."""
    model = parse(sync)
    similar = _bsp if model.fresh else _asp if model.independent else _ssp
    return msgspec.structs.replace(similar, sync=sync)


EVERY_SETTING = (
    *OWN_BEST,
    *(_like(sync) for model in MODELS.values() for sync in model.demo),
    _like("conditions:pull=paceline.lab.demo:within_two_of_the_slowest"),
)
"""The settings of `paceline demo --all`, each with a learning rate and momentum.

All hyper-parameters are raw. A model that is not in `OWN_BEST` uses the learning rate and momentum of a similar
model: BSP for models that average gradients, SSP for models that bound staleness, and ASP for all others.
With lazy execution, PSSP(s=3, c=1/3) and SSP(5) have the same regret bound (FluentPS, Theorem 1: s + 1/c - 1).
"""


# -- A trial: one live run that trains on the digits with one setting, and the evaluation of its weights -----
#
# The evaluation does not disturb the timing of the run: a reader takes snapshots of the weights at regular
# intervals, and the snapshots are evaluated after the run.


class Trial(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        outcome: settings and results of the run.
        curve: (seconds since training began, accuracy on the test images) of each evaluation.
        run_dir: directory of the run.
    """

    outcome: TrialOutcome
    curve: tuple[tuple[float, float], ...]
    run_dir: Path


def run_trial(
    digits: Digits, problem: Problem, setting: DemoSetting, seed: int, *, run_dir: Path, progress: bool | None
) -> Trial:
    """Train in new processes, then evaluate the weights. The accuracies become a metric of the run.

    A trial takes the duration given by `problem`, plus the time to start the processes. Gradients that are not finite
    are skipped, so that a trial has a result even if training diverges.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunFailedError: a process failed.
    """
    recipe = Recipe(
        learning_rate=setting.learning_rate,
        momentum=setting.momentum,
        batch_size=problem.batch_size,
        duration_s=problem.duration_s,
        seed=seed,
    )
    result = launch(
        train,
        args=(digits, recipe),
        workers=len(problem.pace_s),
        servers=problem.servers,
        devices="cpu",
        sync=setting.sync,
        batch=setting.batch,
        hyperparameters=setting.hyperparameters,
        seed=seed,
        pace=problem.pace_s,
        on_nan="skip",
        run_dir=run_dir,
        progress=progress,
        snapshot_every_s=problem.snapshot_every_s,
    )
    points = _evaluate(result, digits, problem.snapshot_every_s)
    metrics = [*result.history.values(), Metric("accuracy", "point", points)]
    write_metrics(result.run_dir, metrics)
    curve = tuple((point.time_s, point.value) for point in points)
    reached_s = time_to_target(curve, problem.target_accuracy)
    summary = result.summary
    present_s = len(problem.pace_s) * summary["duration_s"]
    pulls = sum(summary["iterations"].values()) * problem.servers
    outcome = TrialOutcome(
        sync=setting.sync,
        batch=setting.batch,
        hyperparameters=setting.hyperparameters,
        learning_rate=setting.learning_rate,
        momentum=setting.momentum,
        seeds=(seed,),
        target_accuracy=problem.target_accuracy,
        time_to_target_s=reached_s,
        final_accuracy=accuracy(result.state_dict, digits),
        delayed_share=summary["delayed_pulls"] / pulls if pulls else 0.0,
        wasted_share=summary["wasted_s"] / present_s if present_s else 0.0,
        **{
            key: summary[key]
            for key in (
                "updates_per_s",
                "gradients_per_s",
                "samples_per_s",
                "waiting_share",
                "mean_staleness",
                "max_staleness",
                "restarts",
                "emulated",
            )
        },
    )
    return Trial(outcome, curve, run_dir)


def time_to_target(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the first time at which two consecutive evaluations have reached the target, or None.

    >>> time_to_target([(0.0, 0.1), (0.5, 0.96), (1.0, 0.94), (1.5, 0.95), (2.0, 0.97)], target=0.95)
    2.0
    """
    pairs = itertools.pairwise(curve)
    return next((time_s for (_, before), (time_s, now) in pairs if min(before, now) >= target), None)


def _evaluate(result: RunResult, digits: Digits, interval_s: float) -> tuple[MetricPoint, ...]:
    """Return the accuracies of the snapshots, at times that are multiples of the interval.

    If the times of several snapshots round to the same multiple, because some were late, only the first snapshot is
    used.
    """
    by_number = {round(taken_s / interval_s): snapshot for taken_s, snapshot in reversed(result.snapshots)}
    return tuple(
        MetricPoint(
            round(number * interval_s, 6),
            0,
            max(snapshot.versions),
            accuracy(snapshot.state_dict, digits),
            worker=0,
        )
        for number, snapshot in reversed(by_number.items())
    )


# -- Compares sync models for the demo, and equal batches with balanced batches ------------------------------
#
# Four workers train on handwritten digits, and one of them is three times slower than the others. A table and
# a page show how much time is lost by waiting for the slowest worker, and how much of this time is saved by an
# elastic barrier or by balanced batches. Each sync model runs twice. The first run has the learning rate and momentum
# that are best for BSP, translated, as for a user who changes only `--sync`. The second run has the model's own best
# values, used as they are.


def run_demo(
    *,
    console: Console,
    run_dir: Path | None = None,
    seeds: Sequence[int] = (0,),
    settings: Sequence[DemoSetting] = SETTINGS,
    problem: Problem | None = None,
    progress: bool | None = True,
) -> list[TrialOutcome]:
    """Train with each setting and each seed, one run after another, then print and save the results.

    Afterwards, the run directory contains `summary.json` (one object per setting, with medians over the seeds),
    `trials.json` (one object per run), `curves.csv`, `comparison.html`, and a directory for each run.

    Args:
        console: console on which the table and the messages are printed.
        run_dir: directory for the results. Default: a new directory under ./runs.
        seeds: random seeds. Each seed determines the initial weights and the order of the data for all settings.
        settings: settings to compare.
        problem: training task. Default: `Problem()`.
        progress: True to show progress on standard error, False to hide it, None to show it only on a terminal.

    Returns:
        One outcome per setting, with medians over the seeds.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunFailedError: a run failed.
    """
    problem = problem or Problem()
    if not seeds:
        raise ConfigurationError("seeds is empty; expected at least one whole number, for example 0.")
    digits = draw() if problem.drawn else load()
    workers = len(problem.pace_s)
    home = Path(
        make_job(workers=workers, servers=problem.servers, pace=problem.pace_s, run_dir=run_dir).run_dir
    )
    print_sentence(
        console,
        f"{workers} workers train on {len(digits.train_labels)} "
        f"{'generated images' if problem.drawn else 'handwritten digits'} for {problem.duration_s:g} s under "
        f"each of {len(settings)} settings. The speeds are emulated: one worker is "
        f"{max(problem.pace_s) / min(problem.pace_s):g} times slower than the others.",
    )
    trials: list[Trial] = []
    for seed in seeds:
        for setting in settings:
            count = (f"{len(trials) + 1}/{len(seeds) * len(settings)}", "bold")
            line = Text.assemble(count, f" {setting}, seed {seed}")
            console.print(line, soft_wrap=True, highlight=False)
            run = home / f"{re.sub('[^a-z0-9.]+', '-', setting.name)}-seed-{seed}"
            trials.append(run_trial(digits, problem, setting, seed, run_dir=run, progress=progress))
    outcomes = [medians([t.outcome for t in trials if t.outcome.name == s.name]) for s in settings]
    write_json(home / "summary.json", outcomes)
    write_json(home / "trials.json", [trial.outcome for trial in trials])
    _save_curves(home / "curves.csv", trials)
    console.print(comparison_table(outcomes, every=len(settings) > len(SETTINGS), width=console.width))
    _save_page(home / "comparison.html", trials)
    console.print(f"page: {home / 'comparison.html'}", soft_wrap=True, highlight=False)
    console.print(f"results: {home}", soft_wrap=True, highlight=False)
    return outcomes


def _save_curves(path: Path, trials: Sequence[Trial]) -> None:
    with Unfinished(path) as place, place.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sync", "seed", "time_s", "accuracy"])
        for trial in trials:
            rows.writerows((trial.outcome.name, trial.outcome.seeds[0], *point) for point in trial.curve)


def _save_page(path: Path, trials: Sequence[Trial]) -> None:
    """Write a page that shows the runs side by side, with the curves of their accuracies."""
    shown = {setting.name for setting in SETTINGS}
    reports = [read_report(trial.run_dir) for trial in trials if trial.outcome.name in shown]
    if reports:
        with Unfinished(path) as place:
            place.write_text(page_of(reports), encoding="utf-8")
