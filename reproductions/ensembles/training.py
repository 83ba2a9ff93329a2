"""Training along a recorded schedule, with many runs at once.

All runs of an ensemble have the same events in the same order, because no worker's turn depends on the weights. So the
core of one shard decides which pushes are applied in all runs with raw hyper-parameters, and a second core in all runs
with translated ones. All gradients are computed together. But each run has a store of its own, which translates the
hyper-parameters and updates the weights as in any other run. The result is that of `paceline.simulate(train_fn=...)`
with the same order of the data, apart from rounding.

A gradient is computed at the latest when it is pushed. The gradients of other workers whose weights are known by then
are computed together with it, which makes large tensors out of small ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.layout import HyperParameters, Layout, OptimizerSpec, Parameter
from paceline.core.messages import Message
from paceline.core.requests import Apply, Discard, Host, Peer, Preserve, Timer
from paceline.core.shard import Shard
from paceline.shard.optimizers import TENSORWISE
from paceline.shard.store import Push, Store
from paceline.sync.events import PushReceived
from paceline.sync.schedule import read_schedule
from paceline.sync.translation import Standing

from .problems import Data, Trainable, Weights, parts_of
from .schedules import Batch, Schedule

TOGETHER_BYTES = 64 * 1024 * 1024
"""Maximum size of the weights for which gradients are computed together."""


class Setting(NamedTuple):
    """The hyper-parameters of a run."""

    rate: float  # learning rate that the script states
    hyperparameters: Literal["raw", "translated"]  # whether the servers use it as it is, or translated


class Evaluation(NamedTuple):
    """The quality of all runs at one time."""

    time_s: float  # virtual time in seconds
    quality: np.ndarray  # quality of each run. Shape: (settings, seeds).


class Observer(Protocol):
    """Sees the gradients of all runs before their pushes are handled, and may temper each run's updates."""

    def observe(self, worker: int, updates: int, losses: Tensor, gradients: Tensor, weights: Tensor) -> None:
        """Take notice of a push.

        Args:
            worker: the worker that pushes.
            updates: number of updates in the weights.
            losses: the loss of each run. Shape: (runs,).
            gradients: the gradient of each run. Shape: (runs, parameters).
            weights: the weights on which they were computed, of the same shape.
        """
        ...

    def standing(self, run: int, standing: Standing) -> Standing:
        """Return the standing of an update for one run. `standing` is the one for all runs with translation."""
        ...


class _Kind(NamedTuple):
    """The runs with raw or with translated hyper-parameters: the core that decides for them, and their stores."""

    shard: Shard
    stores: dict[int, Sequence[Store]]


class _Computed(NamedTuple):
    """The losses and gradients of all runs in one iteration of a worker."""

    losses: Tensor
    gradients: Tensor


def evenly(end_s: float, evaluations: int) -> list[float]:
    """Return the ends of equal intervals of time, as many as there are evaluations.

    >>> evenly(6.0, 3)
    [2.0, 4.0, 6.0]
    """
    return [*(end_s * (k + 1) / evaluations for k in range(evaluations - 1)), end_s]


def train(
    problem: Trainable,
    schedule: Schedule,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    times_s: Iterable[float],
    observer: Observer | None = None,
) -> Iterator[Evaluation]:
    """Train one run for each setting and seed, and yield their qualities whenever an evaluation is due.

    The runs are trained only as far as evaluations are requested. To stop earlier, stop iterating.

    Args:
        problem: the problem.
        schedule: the schedule, which is the same for all runs.
        settings: the hyper-parameters.
        seeds: seeds of the initial weights and of the order of the data.
        times_s: virtual times of the evaluations, ascending. Times from the end of the run on are left out, because
            the last evaluation is always at the end.
        observer: sees all gradients.
    """
    return _Ensemble(problem, schedule, settings, seeds, observer).run(times_s)


class _Ensemble:
    """The runs, in the order of the settings, and for each setting in the order of the seeds."""

    def __init__(
        self,
        problem: Trainable,
        schedule: Schedule,
        settings: Sequence[Setting],
        seeds: Sequence[int],
        observer: Observer | None,
    ) -> None:
        self._problem, self._schedule = problem, schedule
        self._settings, self._seeds = settings, seeds
        self._observer = observer
        initial = [problem.initial(seed) for seed in seeds]
        self._layout = Layout.of(
            [Parameter((name,), tuple(value.shape), "float32") for name, value in initial[0].items()]
        )
        size = self._layout.sizes["float32"]
        of_seeds = torch.zeros(len(seeds), size)
        for row, weights in zip(of_seeds, initial, strict=True):
            for value, view in zip(weights.values(), self._views(row.unsqueeze(0)).values(), strict=True):
                view[0] = value
        # The stores update the rows of this tensor: each store the columns that its optimizer trains.
        self._weights = of_seeds.repeat(len(settings), 1)
        self._parts = parts_of(problem, len(initial[0]))
        self._columns = [self._columns_of(part.parameters) for part in self._parts]
        self._stores = [self._stores_of(run) for run in range(len(self._weights))]
        self._kinds = [self._kind(kind) for kind in dict.fromkeys(s.hyperparameters for s in settings)]
        # All hosts but the last one only update the weights of their runs.
        self._hosts = [_KindHost(self, kind, answers=kind is self._kinds[-1]) for kind in self._kinds]
        self._latest: Tensor | None = None  # a copy of the weights, unless they have changed since
        # worker -> weights that it has pulled; number of updates in them; its gradients if they are computed
        # already; its iteration
        self._pulled: dict[int, Tensor] = dict.fromkeys(schedule.batches, self._copy())
        self._versions = dict.fromkeys(schedule.batches, 0)
        self._computed: dict[int, _Computed] = {}
        self._iteration = dict.fromkeys(schedule.batches, 0)
        self._together = max(1, TOGETHER_BYTES // self._weights.nbytes)

    def run(self, times_s: Iterable[float]) -> Iterator[Evaluation]:
        """Pass all events to the shard, and yield the qualities at these times of virtual time and at the end."""
        end_s = self._schedule.end_s
        due = itertools.chain(itertools.takewhile(lambda time_s: time_s < end_s, times_s), (math.inf,))
        next_s = next(due)
        for event, time_s in zip(self._schedule.events, self._schedule.times_s, strict=True):
            while time_s > next_s:
                yield self._evaluation(next_s)
                next_s = next(due)
            if isinstance(event, PushReceived):
                self._push(event.worker, event.iteration)
            # All cores make the same decisions, except for the scales and the standings of updates.
            for requests in zip(*(kind.shard.handle(event) for kind in self._kinds), strict=True):
                for host, request in zip(self._hosts, requests, strict=True):
                    host.carry_out((request,))
        while next_s < math.inf:
            yield self._evaluation(next_s)
            next_s = next(due)
        yield self._evaluation(end_s)

    def _evaluation(self, time_s: float) -> Evaluation:
        evaluated = [torch.cat([s.evaluated()["float32"] for s in stores]) for stores in self._stores]
        with torch.no_grad():
            quality = self._problem.quality(self._views(torch.stack(evaluated)))
        return Evaluation(time_s, quality.double().numpy().reshape(len(self._settings), len(self._seeds)))

    def _push(self, worker: int, iteration: int) -> None:
        """Store the push of a worker for each run."""
        if worker not in self._computed:
            self._compute(worker)
        computed = self._computed.pop(worker)
        if self._observer is not None:
            updates, weights = self._versions[worker], self._pulled[worker]
            self._observer.observe(worker, updates, computed.losses, computed.gradients, weights)
        batch = self._schedule.batches[worker][self._iteration[worker]]
        self._iteration[worker] += 1
        del self._pulled[worker]
        groups = self._hyper_parameters(batch)
        for run, (stores, gradient) in enumerate(zip(self._stores, computed.gradients.unbind(), strict=True)):
            of_parts = zip(stores, self._columns, groups[run // len(self._seeds)], strict=True)
            for store, columns, settings in of_parts:
                present = b"\1" * len(store.bounds.segments)
                push = Push({"float32": gradient[columns]}, present, (settings,))
                store.put(worker, iteration, push)

    def _compute(self, worker: int) -> None:
        """Compute the gradients of a worker, and those of other workers with known weights and equal batches."""
        size = self._batch(worker).size
        others = (w for w in self._pulled if w != worker and w not in self._computed and self._goes_on(w))
        workers = [worker, *(w for w in others if self._batch(w).size == size)][: self._together]
        pulled = [self._pulled[w] for w in workers]
        stacked = torch.cat(pulled) if len(pulled) > 1 else pulled[0]
        weights = {name: view.detach().requires_grad_() for name, view in self._views(stacked).items()}
        losses = self._problem.losses(weights, *self._data([self._batch(w) for w in workers]))
        found = torch.autograd.grad(losses.sum(), list(weights.values()))
        gradients = torch.zeros_like(stacked)
        for view, gradient in zip(self._views(gradients).values(), found, strict=True):
            view.copy_(gradient)
        for w, loss, part in zip(
            workers, losses.detach().chunk(len(workers)), gradients.chunk(len(workers)), strict=True
        ):
            self._computed[w] = _Computed(loss, part)

    def _answer(self, worker: int) -> None:
        """Let a worker pull the weights of all runs."""
        self._pulled[worker] = self._copy()
        self._versions[worker] = self._kinds[0].shard.version
        self._computed.pop(worker, None)

    def _batch(self, worker: int) -> Batch:
        return self._schedule.batches[worker][self._iteration[worker]]

    def _goes_on(self, worker: int) -> bool:
        return self._iteration[worker] < len(self._schedule.batches[worker])

    def _data(self, batches: Sequence[Batch]) -> Data:
        """Return the batches for all runs. Shape of each tensor: (batches * runs, ...)."""
        of_each = [self._problem.data(self._seeds, batch) for batch in batches]
        settings = len(self._settings)
        return tuple(
            torch.stack(parts).unsqueeze(1).expand(-1, settings, *parts[0].shape).flatten(0, 2)
            for parts in zip(*of_each, strict=True)
        )

    def _hyper_parameters(self, batch: Batch) -> list[list[HyperParameters]]:
        """Return the hyper-parameters of each optimizer of the script for each setting."""
        samples, _, epochs = self._schedule.epochs
        progress = (batch.epoch + batch.start / samples) / epochs
        return [[part.settings(setting.rate, progress) for part in self._parts] for setting in self._settings]

    def _views(self, stacked: Tensor) -> Weights:
        """Return the parameters of flat vectors. Shape of `stacked`: (runs, size of the layout)."""
        return {
            parameter.names[0]: stacked[:, offset : offset + parameter.size].view(-1, *parameter.shape)
            for parameter, offset in zip(self._layout.parameters, self._layout.offsets, strict=True)
        }

    def _copy(self) -> Tensor:
        if self._latest is None:
            self._latest = self._weights.clone()
        return self._latest

    def _kind(self, hyperparameters: str) -> _Kind:
        schedule, seeds = self._schedule, len(self._seeds)
        shard = Shard(
            0,
            read_schedule(schedule.sync).first,
            schedule.seed,
            usual_samples=schedule.epochs.batch,
            ticks_per_s=schedule.ticks_per_s,
            translated=hyperparameters == "translated",
        )
        own = [setting.hyperparameters == hyperparameters for setting in self._settings]
        return _Kind(shard, {run: store for run, store in enumerate(self._stores) if own[run // seeds]})

    def _columns_of(self, parameters: range) -> slice:
        ends = [*self._layout.offsets, self._layout.sizes["float32"]]
        return slice(ends[parameters.start], ends[parameters.stop])

    def _stores_of(self, run: int) -> list[Store]:
        """Return the store of each optimizer of a run."""
        stores, rate = [], self._settings[run // len(self._seeds)].rate
        for part, columns in zip(self._parts, self._columns, strict=True):
            layout = Layout.of(self._layout.parameters[part.parameters.start : part.parameters.stop])
            group_of, whole = (0,) * len(layout.parameters), part.optimizer in TENSORWISE
            spec = OptimizerSpec(part.optimizer, (part.settings(rate, 0.0),), group_of, whole=whole)
            [bounds] = layout.slice_by_parameter(1, {0} if whole else ())
            stores.append(Store(bounds, {"float32": self._weights[run, columns]}, [spec]))
        return stores


class _KindHost(Host):
    """Carries out the requests of the core that decides for the runs of one kind.

    Args:
        ensemble: the ensemble.
        kind: the runs.
        answers: True if this host lets workers pull, because the hosts of all other kinds have made the same updates.
    """

    def __init__(self, ensemble: _Ensemble, kind: _Kind, *, answers: bool) -> None:
        self._ensemble = ensemble
        self._kind = kind
        self._answers = answers

    def send(self, to: Peer, message: Message) -> None:
        if self._answers:
            self._ensemble._answer(to.index)

    def apply(self, update: Apply) -> None:
        ensemble = self._ensemble
        ensemble._latest = None
        for run, stores in self._kind.stores.items():
            standing = update.standing
            if standing is not None and ensemble._observer is not None:
                standing = ensemble._observer.standing(run, standing)
            for store in stores:
                store.apply(update.pushes, update.scales, standing)

    def discard(self, push: Discard) -> None:
        for store in itertools.chain.from_iterable(self._kind.stores.values()):
            store.discard(push.worker, push.iteration)

    def preserve(self, push: Preserve) -> None:
        """Do nothing: no gradient is ever overwritten."""

    def set_timer(self, timer: Timer) -> None:
        """Do nothing: timers have fired already, and what they have caused is among the recorded events."""
