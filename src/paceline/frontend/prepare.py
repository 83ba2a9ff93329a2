"""`prepare`, which makes all parts of a training script ready for a run in one call."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigurationError
from .data import DistributedLoader, call_site, distribute_at
from .optimizer import DistributedOptimizer
from .schedule import JobScheduler
from .session import worker_count
from .sources import length_of

__all__ = ["prepare"]

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler", bound=LRScheduler)
T = TypeVar("T")


@overload
def prepare(
    model: Model, optimizer: torch.optim.Optimizer, loader: Iterable[T], scheduler: None = None
) -> tuple[Model, DistributedOptimizer, Iterable[T]]: ...


@overload
def prepare(
    model: Model, optimizer: torch.optim.Optimizer, loader: Iterable[T], scheduler: Scheduler
) -> tuple[Model, DistributedOptimizer, Iterable[T], Scheduler]: ...


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    scheduler: LRScheduler | None = None,
) -> Any:
    """Make a model, its optimizer, a loader and a scheduler ready for a run.

    This is the same as `DistributedOptimizer(optimizer, model=model)` and `distribute(loader)`. In addition, a
    scheduler that is stepped in every iteration follows the job's progress through the data, instead of the iteration
    count of one worker. So write the schedule for `len(loader)` steps per epoch, where `loader` is the given loader.
    The schedule then fits any number of workers, even if a fast one receives more batches than a slow one. In one
    iteration, the schedule may advance by several steps or by none, and it stops quietly at its end. A scheduler that
    is stepped once per epoch works as usual. Outside a run, the loader and the scheduler are returned unchanged.

    Args:
        model: the module to train.
        optimizer: the optimizer to wrap. See `DistributedOptimizer`.
        loader: the loader to split, or one that `distribute` has returned.
        scheduler: a scheduler from `torch.optim.lr_scheduler` that was created for `optimizer`.

    Returns:
        (model, optimizer, loader), or (model, optimizer, loader, scheduler) if a scheduler is given.

    Raises:
        ConfigurationError: the scheduler was created for another optimizer, or an argument cannot be used in a run.
        UsageError: `optimizer` is a `DistributedOptimizer`, or this worker already trains with such an optimizer.

    Example:
        >>> import paceline, torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    """
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ConfigurationError(
            f"prepare() got the scheduler {type(scheduler).__name__}, which was not created for the given optimizer. "
            "Create it with this optimizer, before prepare()."
        )
    distributed = DistributedOptimizer(optimizer, model=model)
    length = length_of(loader)
    # If the loader is already distributed, its batches are those of one worker, not joint batches.
    joint = 1 if isinstance(loader, DistributedLoader) else worker_count()
    if not isinstance(loader, DistributedLoader):
        loader = distribute_at(call_site(sys._getframe(1)), loader)
    if scheduler is None:
        return model, distributed, loader
    if not isinstance(loader, DistributedLoader):  # outside a run
        return model, distributed, loader, scheduler
    distributed.schedule_watch = None
    return model, distributed, loader, JobScheduler(scheduler, distributed, loader.position, length, joint)
