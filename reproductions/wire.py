"""Whether training with rounded gradients and weights (`--wire bf16`) needs more iterations to reach the same loss.

Two small problems, a convolutional network on digits and a byte-level transformer, are trained by four workers under
bsp, in virtual time, with float32 and with another format. For each seed, both runs begin with the same weights and
see the same batches. After each update, the loss on the validation data is computed from the servers' weights. The
*iterations to the target* are the number of updates until the mean of the last 10 of these losses is at most the
target. Rounding is that of a live run (`paceline.shard.codecs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from rich.table import Table
from torch import nn

import paceline
from paceline.cli.console import TellShare
from paceline.core.layout import WireFormat
from paceline.errors import ConfigurationError
from paceline.shard.store import WeightsSnapshot
from paceline.studies.statistics import Ratio, compare_samples

from .evidence import batched
from .evidence.images import DigitImages
from .evidence.language import ByteTransformer
from .evidence.schedules import Gradient
from .exhibit import plain_table

WORKERS = 4
SMOOTHED = 10
"""Number of the last losses whose mean must reach the target."""

MOST = 1.05
"""The goal: the ratio of the iterations to the target, and the upper end of its interval, are at most this."""


class Problem(msgspec.Struct, frozen=True):
    """What is learned.

    Attributes:
        name: name of the problem.
        learned: function that returns the network with its data.
        optimizer: function that returns the optimizer of some parameters.
        target: the loss on the validation data that must be reached.
        iterations: number of iterations of a run.
    """

    name: str
    learned: Callable[[], batched.Problem]
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    target: float
    iterations: int


PROBLEMS = (
    Problem(
        "digits, CNN",
        DigitImages,
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        target=0.12,
        iterations=160,
    ),
    Problem(
        "text, transformer",
        ByteTransformer,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95)),
        target=3.3,
        iterations=240,
    ),
)


class WireResult(msgspec.Struct, frozen=True):
    """The results of one problem.

    Attributes:
        problem: name of the problem.
        wire: the format that is compared with float32.
        target: the loss on the validation data that must be reached.
        exact: iterations to the target with float32, for each seed; inf if it is not reached.
        rounded: the same with the other format.
    """

    problem: str
    wire: str
    target: float
    exact: tuple[float, ...]
    rounded: tuple[float, ...]

    @property
    def ratio(self) -> Ratio:
        """The ratio of the iterations to the target, with its interval."""
        return compare_samples(self.rounded, self.exact)

    @property
    def verdict(self) -> str:
        """Whether the goal is met: "met", "missed", or "open" if the interval contains the limit."""
        ratio = self.ratio
        return "met" if ratio.high <= MOST else "missed" if ratio.low > MOST else "open"


def compare_formats(
    wire: str,
    seeds: int,
    problems: Sequence[Problem] = PROBLEMS,
    tell: TellShare = lambda what, share, slow=False: None,
) -> list[WireResult]:
    """Train each problem with float32 and with another format, and compare the iterations to the target.

    Args:
        wire: the other format, in the notation of the command line.
        seeds: number of seeds.
        problems: the problems.
        tell: function that shows the progress.

    Raises:
        ConfigurationError: the format is unknown, or is float32.
    """
    if WireFormat.read(wire).exact:
        raise ConfigurationError("wire is 'float32', with which it is compared; expected another format.")
    results = []
    for place, problem in enumerate(problems):
        learned = problem.learned()
        losses: dict[str, list[list[float]]] = {"float32": [], wire: []}
        for seed in range(seeds):
            for index, each in enumerate(losses):
                done = (place + (seed + index / 2) / seeds) / len(problems)
                tell(f"{problem.name}, seed {seed + 1} of {seeds}, {each}", done, slow=True)
                losses[each].append(_losses(problem, learned, seed, each))
        exact, rounded = (
            tuple(_iterations_to(problem.target, run) for run in runs) for runs in losses.values()
        )
        results.append(WireResult(problem.name, wire, problem.target, exact, rounded))
    return results


def _losses(problem: Problem, learned: batched.Problem, seed: int, wire: str) -> list[float]:
    """Return the loss on the validation data after each update."""

    def train() -> None:
        model = batched.AsModule(learned.initial(seed))
        inner = problem.optimizer(list(model.parameters()))
        optimizer = paceline.DistributedOptimizer(inner, model=model)
        worker = paceline.worker_index()
        for iteration in range(problem.iterations):
            number = WORKERS * iteration + worker
            gradient = Gradient(worker, iteration, number, iteration, 1 / WORKERS, 1.0)
            optimizer.zero_grad()
            learned.loss(model.weights, *learned.batch(seed, gradient)).backward()
            optimizer.step()

    seen = batched.AsModule(learned.initial(seed))
    losses: list[float] = []

    def look(time_s: float, snapshot: WeightsSnapshot) -> bool:
        seen.load_state_dict(snapshot.state_dict)
        with torch.inference_mode():
            losses.append(float(learned.validation(seen.weights)))
        return False

    cluster = paceline.Cluster(compute_s=[1.0] * WORKERS)
    settings: dict[str, Any] = {"wire": wire, "snapshot_every_s": 1.0, "on_snapshot": look}
    paceline.simulate(cluster, "bsp", train_fn=train, seed=seed, **settings)
    return losses


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of the last losses after each update."""
    return [
        sum(losses[max(0, end - SMOOTHED) : end]) / min(end, SMOOTHED) for end in range(1, len(losses) + 1)
    ]


def _iterations_to(target: float, losses: Sequence[float]) -> float:
    """Return the number of updates until the target is reached; inf if it is not."""
    return next((float(n) for n, loss in enumerate(_smoothed(losses)) if loss <= target), float("inf"))


def result_table(results: Sequence[WireResult]) -> Table:
    """Return the table of the results."""
    made = plain_table(
        f"Iterations to the same loss, {WORKERS} workers, {len(results[0].exact)} seeds, medians",
        *("problem", "loss", "float32", results[0].wire, "ratio [95 %]", f"goal <= {MOST:g}"),
    )
    for result in results:
        made.add_row(
            result.problem,
            f"{result.target:g}",
            f"{median(result.exact):g}",
            f"{median(result.rounded):g}",
            f"{result.ratio.ratio:.3f} [{result.ratio.low:.3f}, {result.ratio.high:.3f}]",
            result.verdict,
        )
    return made
