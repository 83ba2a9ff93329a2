"""`prepare`, which makes all parts of a training script ready for a run in one call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigurationError
from .data import DistributedLoader, call_site, device_of, distribute_at
from .generator_states import seed_worker
from .optimizer import DistributedOptimizer
from .schedules import JobScheduler, ScheduledData
from .session import current
from .sources import length_of, sites_apart

Model = TypeVar("Model", bound=nn.Module)
Scheduler = TypeVar("Scheduler", bound=LRScheduler)
T = TypeVar("T")


@overload
def prepare(
    model: Model,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[T],
    scheduler: None = None,
    /,
    *,
    joint_batch: bool | None = None,
    device: torch.device | str | None = None,
) -> tuple[Model, DistributedOptimizer, Iterable[T]]: ...


@overload
def prepare(
    model: Model,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[T],
    scheduler: Scheduler,
    /,
    *,
    joint_batch: bool | None = None,
    device: torch.device | str | None = None,
) -> tuple[Model, DistributedOptimizer, Iterable[T], Scheduler]: ...


@overload
def prepare(model: Model, optimizer: torch.optim.Optimizer, /) -> tuple[Model, DistributedOptimizer]: ...


@overload
def prepare(
    *parts: Any,
    scheduler: LRScheduler | None = None,
    joint_batch: bool | None = None,
    device: torch.device | str | None = None,
) -> Any: ...


def prepare(
    *parts: Any,
    scheduler: LRScheduler | None = None,
    joint_batch: bool | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Make the parts of a training script ready for a run: models, optimizers, loaders and schedulers.

    This is the same as `DistributedOptimizer(optimizer, model=model)` for each optimizer and `distribute(loader)` for
    each loader. In addition, a scheduler that is stepped in every iteration follows the job's progress, instead of the
    iteration count of one worker. So write the schedule for a single process. A step of the schedule is one batch of
    the first of the given loaders, whichever worker uses this batch. In a loop that only `paceline.epochs(updates=...)`
    ends, a step is one update. If no loader is given, the step depends on the loop: with `updates` or `minutes`, a step
    is one update; with `samples`, a step is as many samples as the worker uses in one iteration; in any other loop,
    each call is one step. The schedule then fits any number of workers, even if a fast worker performs more iterations
    than a slow one. In one iteration, the schedule may advance by several steps or by none. At its end, the schedule
    stops without an error. A scheduler that is stepped once per epoch works as usual. The state of a scheduler may be
    loaded before or after this call. Outside a run, the loaders and the schedulers are returned unchanged.

    The workers' weights become the same in the first forward pass with gradients enabled, not in this call. Until
    then, a script may still initialize or load weights; see `DistributedOptimizer`.

    In a run, the first call of this function or of `distribute` also seeds the random generators of torch, Python and
    NumPy in each worker except worker 0, so that dropout, augmentation and noise differ between workers.

    Pass a loader for evaluation only if each worker is to evaluate on a part of the data.

    Args:
        parts: modules to train (an optimizer may train several of them), optimizers to wrap (see
            `DistributedOptimizer`), loaders to split (or loaders that `distribute` has returned), and schedulers from
            `torch.optim.lr_scheduler` that were created for one of the optimizers; in any order and number. A part
            that is None is returned as None.
        scheduler: a scheduler, as the last of the parts.
        joint_batch: True if the batch sizes of the loaders are those of the joint batch of all workers; see
            `distribute`. Not for loaders that `distribute` has returned.
        device: device to which the batches of the loaders are moved, such as `paceline.device()`; see `distribute`.
            Models are not moved: call `model.to(paceline.device())` before the optimizer is created.

    Returns:
        The parts in the same order, as a tuple; if there is only one part, this part alone.

    Raises:
        ConfigurationError: a part is none of these things, a scheduler was created for another optimizer, a parameter
            of an optimizer is in none of several models, or a part cannot be used in a run.
        UsageError: an optimizer is a `DistributedOptimizer`.

    Example:
        >>> import paceline, torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    """
    if scheduler is not None:
        parts = (*parts, scheduler)
    if not parts:
        raise ConfigurationError("prepare() got nothing; pass the model, its optimizer and its loader.")
    for part in parts:
        known = part is None or isinstance(part, nn.Module | torch.optim.Optimizer | LRScheduler | Iterable)
        if not known or isinstance(part, str | bytes | torch.Tensor):
            raise ConfigurationError(
                f"prepare() got {part!r}; expected modules, optimizers, loaders and learning-rate schedulers."
            )
    models = [part for part in parts if isinstance(part, nn.Module)]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    loaders = [part for part in parts if _is_loader(part)]
    for part in parts:
        if isinstance(part, LRScheduler) and not any(part.optimizer is optimizer for optimizer in optimizers):
            raise ConfigurationError(
                f"prepare() got the scheduler {type(part).__name__}, which was not created for the given optimizer. "
                "Create it with this optimizer, before prepare()."
            )
    if (session := current()) is not None:
        seed_worker(session)
    wrapped = {id(each): DistributedOptimizer(each, model=models_of(each, models)) for each in optimizers}
    split = {id(each): each for each in loaders}
    whole = [each for each in split.values() if not isinstance(each, DistributedLoader)]
    for site, each in zip(sites_apart(call_site(sys._getframe(1)), whole), whole, strict=True):
        split[id(each)] = distribute_at(site, each, joint_batch=joint_batch, device=device)
    for loader in loaders:
        if isinstance(loader, DistributedLoader) and device is not None:
            loader.move_to(device_of(device))

    def prepared(part: Any) -> Any:
        if isinstance(part, LRScheduler):
            follow = loaders[0] if loaders else None
            return _following(part, wrapped[id(part.optimizer)], follow, split.get(id(follow)))
        return wrapped.get(id(part), split.get(id(part), part))

    ready = tuple(map(prepared, parts))
    return ready[0] if len(ready) == 1 else ready


def _is_loader(part: Any) -> bool:
    return isinstance(part, Iterable) and not isinstance(part, nn.Module)


def models_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> Sequence[nn.Module] | None:
    """Return the first model that contains all parameters of an optimizer, or all models that contain at least one of
    them.

    Return None if no models are given.

    Raises:
        ConfigurationError: several models are given, and a parameter is in none of them.
    """
    if len(models) < 2:
        return models or None
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held = [{id(parameter) for parameter in model.parameters()} for model in models]
    for model, parameters in zip(models, held, strict=True):
        if trained <= parameters:
            return [model]
    missing = len(trained.difference(*held))
    if missing:
        raise ConfigurationError(
            f"prepare() got {len(models)} models, but {missing} of the {len(trained)} parameters of the "
            f"{type(optimizer).__name__} optimizer are in none of them. Pass all modules that the optimizer trains."
        )
    return [model for model, parameters in zip(models, held, strict=True) if trained & parameters]


def _following(scheduler: LRScheduler, optimizer: DistributedOptimizer, given: Any, loader: Any) -> Any:
    """Return a scheduler that follows the progress of the job; outside a run, the scheduler itself.

    Args:
        scheduler: the scheduler.
        optimizer: the distributed optimizer for whose parameters the scheduler was created.
        given: the loader for which the schedule is written; None if there is none.
        loader: the distributed loader that was made from `given`.
    """
    if given is loader and isinstance(loader, DistributedLoader):
        # The loader was already distributed, so its length is the number of joint batches.
        return follow(scheduler, optimizer, loader, length_of(loader), joint=True)
    return follow_as_written(scheduler, optimizer, loader if isinstance(loader, DistributedLoader) else None)


def follow(
    scheduler: LRScheduler,
    optimizer: DistributedOptimizer,
    loader: DistributedLoader[Any] | None,
    length: int | None = None,
    *,
    joint: bool = False,
) -> Any:
    """Let a scheduler follow the progress of the job, even if it was created after its optimizer was distributed.

    Args:
        scheduler: the scheduler.
        optimizer: the distributed optimizer for whose parameters the scheduler was created.
        loader: the distributed loader whose batches are the steps of the schedule, whichever worker uses them. None if
            each call is a step.
        length: number of steps in an epoch; None if the loader has no length.
        joint: True if a step is a joint batch, False if it is a batch of any worker.

    Returns:
        A `JobScheduler`; outside a run, the scheduler itself.
    """
    session = current()
    if session is None:
        return scheduler
    data = None
    if loader is not None:
        optimizer.schedule_watch = None
        if length is not None:
            data = ScheduledData(loader.position, length, 1 if joint else session.workers)
    return JobScheduler(scheduler, optimizer, session, data, optimizer.schedule_watch, optimizer.marks)


def follow_as_written(
    scheduler: LRScheduler, optimizer: DistributedOptimizer, loader: DistributedLoader[Any] | None
) -> Any:
    """Let a scheduler follow the job. The schedule must be written for the loader that the script gave to `distribute`.

    A step of the schedule is a batch of that loader: a joint batch if the loader's batches are divided among the
    workers, else a batch of any worker. See `follow`.
    """
    if loader is None:
        return follow(scheduler, optimizer, None)
    return follow(scheduler, optimizer, loader, loader.script_length, joint=loader.divides)
