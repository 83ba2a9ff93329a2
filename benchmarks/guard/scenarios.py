"""Runs for the guard to judge: planted divergences, and healthy runs that look like a divergence at times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.sim import Cluster
from paceline.train.session import current

from .problems import PROBLEMS, Batch

Spoil = Callable[[int, int, Batch], Batch]
"""Changes a batch: (worker, step of the worker, batch) -> batch."""

Measured = list[tuple[int, int, int, float]]
"""(worker, step, update, loss) for each step. The loss is the *loss without noise*: the loss of the weights before the
step, on many samples that are not spoiled."""

Train = Callable[[int, Measured], None]
"""A training function."""

MEASURED = 256  # number of samples on which the loss without noise is measured

EQUAL = (1.0, 1.07, 0.96, 1.02)  # compute times in seconds of four machines that are about equally fast
ONE_SLOW = (1.0, 1.1, 0.9, 3.0)


class Scenario(msgspec.Struct, frozen=True):
    """One run."""

    name: str  # what happens in the run
    # The training function of every worker. It receives the seed of the run and a list. At each step, it appends to
    # the list the loss without noise of the worker's weights.
    train: Train
    sync: str = "asp"
    compute_s: tuple[float, ...] = EQUAL  # the compute time of each worker
    planted_at: int | None = None  # a worker's step at which the divergence begins; None for a healthy run
    culprit: int | None = None  # the worker that the guard must name; None if it need not name a worker
    # True if the pushes of the culprit (of all workers, if there is no culprit) show immediately that something is
    # wrong. False if the loss of the weights must be measured.
    at_once: bool = False
    on_nan: str = "stop"  # see `paceline.launch`

    @property
    def cluster(self) -> Cluster:
        return Cluster(compute_s=list(self.compute_s))


def sgd(rate: float, momentum: float = 0.9) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def adamw(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate)


def unchanged(worker: int, step: int, batch: Batch) -> Batch:
    return batch


def training(
    problem: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = 150,
    samples: int = 32,
    rate: Callable[[int], float] = lambda step: 1.0,
    momentum: Callable[[int], float] | None = None,
    spoil: Spoil = unchanged,
    twist: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda worker, step, loss: loss,
    closure: bool = True,
) -> Train:
    """Return a training function.

    Args:
        problem: name of the problem.
        optimizer: makes the optimizer of the parameters.
        steps: number of steps of each worker.
        samples: number of samples in a batch.
        rate: factor of the learning rate at each step.
        momentum: the momentum at each step. Default: that of the optimizer.
        spoil: changes the batches.
        twist: changes the loss: (worker, step, loss) -> loss.
        closure: True if `step` receives a closure that returns the loss.
    """

    def train(seed: int, measured: Measured) -> None:
        chosen = PROBLEMS[problem]
        torch.manual_seed(seed)
        model = chosen.model()
        sample = chosen.draw(MEASURED, torch.Generator().manual_seed(seed))
        session = current()
        assert session is not None
        worker = session.worker
        generator = torch.Generator().manual_seed(1000 * seed + worker)
        steady = paceline.DistributedOptimizer(optimizer(model.parameters()), model=model)
        first = [group["lr"] for group in steady.param_groups]
        for step in range(steps):
            for group, begun in zip(steady.param_groups, first, strict=True):
                group["lr"] = begun * rate(step)
                if momentum is not None:
                    group["momentum"] = momentum(step)
            batch = spoil(worker, step, chosen.draw(samples, generator))

            def compute(batch: Batch = batch, step: int = step) -> torch.Tensor:
                model.eval()
                with torch.no_grad():
                    before = chosen.loss(model, sample).item()
                    measured.append((worker, step, session.core.updates, before))
                model.train()
                steady.zero_grad()
                loss = twist(worker, step, chosen.loss(model, batch))
                loss.backward()
                return loss

            if closure:
                steady.step(compute)
            else:
                compute()
                steady.step()

    return train


def from_step(begin: int, factor: float, before: float = 1.0) -> Callable[[int], float]:
    return lambda step: factor if step >= begin else before


def restarts(period: int) -> Callable[[int], float]:
    return lambda step: 0.5 * (1 + math.cos(math.pi * (step % period) / period)) + 1e-3


def at_worker(culprit: int, begin: int, change: Callable[[Batch], Batch]) -> Spoil:
    return lambda worker, step, batch: change(batch) if worker == culprit and step >= begin else batch


def brighter(batch: Batch) -> Batch:
    return Batch(255.0 * batch.inputs, batch.targets)


def shifted(batch: Batch) -> Batch:
    return Batch(batch.inputs, (batch.targets + 5) % 10)


def poisoned(batch: Batch) -> Batch:
    return Batch(torch.full_like(batch.inputs, math.nan), batch.targets)


def spikes(every: int, factor: float) -> Callable[[int, int, torch.Tensor], torch.Tensor]:
    """Now and then, multiply the loss of one worker's batch by a factor."""
    return lambda worker, step, loss: factor * loss if (7 * step + worker) % every == 5 else loss


def noisy_labels(share: float) -> Spoil:
    def change(worker: int, step: int, batch: Batch) -> Batch:
        generator = torch.Generator().manual_seed(100_000 * worker + step)
        wrong = torch.rand(len(batch.targets), generator=generator) < share
        drawn = torch.randint(10, batch.targets.shape, generator=generator)
        return Batch(batch.inputs, torch.where(wrong, drawn, batch.targets))

    return change


def only(classes: Callable[[int, int], Iterable[int]]) -> Spoil:
    """Keep only the samples of some classes. `classes` maps (worker, step) to these classes."""

    def change(worker: int, step: int, batch: Batch) -> Batch:
        keep = torch.isin(batch.targets, torch.tensor(list(classes(worker, step))))
        if not keep.any():
            keep[0] = True
        return Batch(batch.inputs[keep], batch.targets[keep])

    return change


def adversarial(*, wasserstein: bool = False, rate: float = 1e-3) -> Train:
    """Return the training function of a small GAN, which learns points on a circle."""

    def train(seed: int, measured: Measured) -> None:
        torch.manual_seed(seed)
        generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        both = [
            paceline.DistributedOptimizer(
                torch.optim.Adam(each.parameters(), lr=rate, betas=(0.5, 0.9)), model=each
            )
            for each in (critic, generator)
        ]
        draws = torch.Generator().manual_seed(1000 * seed + paceline.worker_index())
        for _ in range(90):
            angle = 2 * math.pi * torch.rand(32, generator=draws)
            real = torch.stack([angle.cos(), angle.sin()], dim=1)
            noise = torch.randn(32, 4, generator=draws)

            def judge(real: torch.Tensor = real, noise: torch.Tensor = noise) -> torch.Tensor:
                both[0].zero_grad()
                yes, no = critic(real), critic(generator(noise).detach())
                if wasserstein:
                    loss: torch.Tensor = (
                        no.mean() - yes.mean() + 0.1 * (yes.square().mean() + no.square().mean())
                    )
                else:
                    loss = functional.softplus(-yes).mean() + functional.softplus(no).mean()
                loss.backward()
                return loss.detach()

            def forge(noise: torch.Tensor = noise) -> torch.Tensor:
                both[1].zero_grad()
                judged = critic(generator(noise))
                loss = -judged.mean() if wasserstein else functional.softplus(-judged).mean()
                loss.backward()
                return loss.detach()

            both[0].step(judge)
            both[1].step(forge)

    return train


def to_nan(begin: int) -> Callable[[int, int, torch.Tensor], torch.Tensor]:
    return lambda worker, step, loss: loss * math.nan if step >= begin else loss


def one_nan(every: int) -> Callable[[int, int, torch.Tensor], torch.Tensor]:
    return lambda worker, step, loss: loss * math.nan if step % every == every - 1 else loss


def huge_once(at: int) -> Callable[[int, int, torch.Tensor], torch.Tensor]:
    return lambda worker, step, loss: loss * 1e25 if (worker, step) == (1, at) else loss


def run(
    name: str,
    problem: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    sync: str = "asp",
    compute_s: tuple[float, ...] = EQUAL,
    planted_at: int | None = None,
    culprit: int | None = None,
    at_once: bool = False,
    on_nan: str = "stop",
    **how: Any,
) -> Scenario:
    """Return a scenario that trains on a problem. `how` contains further arguments of `training`."""
    function = training(problem, optimizer, **how)
    return Scenario(name, function, sync, compute_s, planted_at, culprit, at_once, on_nan)


SUDDENLY = from_step(60, 30.0)

HEALTHY = (
    run("digits, bsp", "digits", sgd(0.1), sync="bsp"),
    run("digits, asp", "digits", sgd(0.02)),
    run("warm restarts", "digits", sgd(0.03), rate=restarts(40)),
    run("warm restarts, AdamW", "letters", adamw(0.005), rate=restarts(50)),
    run("loss of one batch x 100", "digits", sgd(0.01, 0.0), twist=spikes(50, 100.0)),
    run("loss of one batch x 30, unknown", "digits", sgd(0.01, 0.0), twist=spikes(40, 30.0), closure=False),
    Scenario("GAN", adversarial()),
    Scenario("Wasserstein GAN", adversarial(wasserstein=True)),
    run(
        "cosine, AdamW", "letters", adamw(0.003), rate=lambda step: 0.5 * (1 + math.cos(math.pi * step / 150))
    ),
    run("40 % wrong labels", "digits", sgd(0.02), spoil=noisy_labels(0.4)),
    run("batches of 2", "digits", sgd(0.01, 0.5), samples=2, steps=250),
    run(
        "BatchNorm, elastic-bsp", "digits with BatchNorm", sgd(0.005), sync="elastic-bsp", compute_s=ONE_SLOW
    ),
    run("dropout", "digits with dropout", sgd(0.02), compute_s=ONE_SLOW),
    run(
        "harder data at half",
        "digits",
        sgd(0.02),
        spoil=only(lambda worker, step: range(5) if step < 75 else range(3, 10)),
    ),
    run("noisy quadratic", "quadratic", sgd(0.01), samples=4, steps=250),
    run("factors", "factors", sgd(0.1, 0.5), steps=250),
    run("warm-up x 100", "letters", sgd(0.2, 0.5), rate=lambda step: min(1.0, 0.01 + step / 100)),
    run("digits, loss unknown", "digits", sgd(0.02), closure=False, sync="ssp:staleness=3"),
    run(
        "unequal data",
        "digits",
        sgd(0.01, 0.5),
        spoil=only(lambda worker, step: range(2 * worker, 2 * worker + 4)),
    ),
    run("one NaN in 50", "digits", sgd(0.02), twist=one_nan(50), on_nan="skip", compute_s=ONE_SLOW),
)

PLANTED = (
    run("rate x 30, bsp", "digits", sgd(3.0), sync="bsp", planted_at=0),
    run("rate x 30, asp", "digits", sgd(0.6), planted_at=0),
    run("rate x 30 at 60", "digits", sgd(0.02), rate=SUDDENLY, planted_at=60),
    run("rate x 30 at 60, loss unknown", "digits", sgd(0.02), rate=SUDDENLY, closure=False, planted_at=60),
    run("rate x 30 at 60, AdamW", "letters", adamw(0.005), rate=SUDDENLY, planted_at=60),
    run("rate x 30 at 80, factors", "factors", sgd(0.2, 0.5), rate=from_step(80, 30.0), planted_at=80),
    run("rate x 30, quadratic", "quadratic", sgd(1.5, 0.5), planted_at=0, on_nan="skip"),
    run("rate x 30 at 60, BatchNorm", "digits with BatchNorm", sgd(0.005), rate=SUDDENLY, planted_at=60),
    run("momentum 0.99", "digits", sgd(0.1, 0.99), planted_at=0),
    run("momentum 0.99, quadratic", "quadratic", sgd(0.2, 0.99), planted_at=0, on_nan="skip"),
    run(
        "momentum 0.99 at 60, letters",
        "letters",
        sgd(0.15, 0.5),
        momentum=from_step(60, 0.99, 0.5),
        steps=250,
        planted_at=60,
    ),
    run(
        "NaN in the loss at 50",
        "digits",
        sgd(0.02),
        twist=to_nan(50),
        planted_at=50,
        at_once=True,
        on_nan="skip",
    ),
    run(
        "NaN in the data of worker 2 at 40",
        "digits",
        sgd(0.02),
        spoil=at_worker(2, 40, poisoned),
        planted_at=40,
        at_once=True,
        culprit=2,
        on_nan="skip",
    ),
    run("weights overflow at 50", "digits", sgd(0.02), twist=huge_once(50), planted_at=50, on_nan="skip"),
    run(
        "inputs x 255 at worker 1",
        "digits",
        sgd(0.01, 0.0),
        spoil=at_worker(1, 40, brighter),
        planted_at=40,
        at_once=True,
        culprit=1,
    ),
    run(
        "wrong labels at worker 3",
        "digits",
        sgd(0.02),
        spoil=at_worker(3, 60, shifted),
        planted_at=60,
        at_once=True,
        culprit=3,
    ),
    run("rate x 30, factors, loss unknown", "factors", sgd(6.0, 0.5), closure=False, planted_at=0),
    run("rate grows by 5 % a step", "letters", sgd(0.1, 0.5), rate=lambda step: 1.05**step, planted_at=0),
    run(
        "asp at bsp's rate, 16 workers",
        "digits",
        sgd(0.1),
        steps=60,
        compute_s=(*(1.0 + 0.01 * i for i in range(12)), 3.0, 3.1, 3.2, 3.3),
        planted_at=0,
    ),
    run(
        "rate x 30 at 60, RMSprop",
        "digits with dropout",
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.002),
        rate=SUDDENLY,
        sync="elastic-bsp",
        compute_s=ONE_SLOW,
        planted_at=60,
    ),
)
