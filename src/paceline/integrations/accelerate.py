"""`Accelerator`, which lets a script that is written for Hugging Face Accelerate train in a run.

The class is a subclass of Accelerate's own class, and overrides public methods only. Accelerate itself sees one process
in each worker: Paceline divides the data, exchanges gradients and clips them.

    from paceline.integrations.accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, train=loader)

Accelerate decides when the optimizer pushes: a step is made when `sync_gradients` is True. This attribute is also True
at the end of a pass over the loader. With dynamic shares, no worker knows beforehand which of its batches is the last
one. So when the pass has ended, the loader itself makes the step for the remaining gradients.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ConfigurationError, UsageError
from ..train.collectives import barrier, is_main, reduce
from ..train.data import DistributedLoader, distribute_at
from ..train.generator_states import GeneratorStates, generators_lock, loader_seed
from ..train.metrics import metrics_of
from ..train.optimizer import DistributedOptimizer
from ..train.prepare import follow_as_written, models_of
from ..train.session import current, worker_count
from . import require

require("accelerate", "1.8", "accelerate")

import accelerate  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import recursively_apply  # noqa: E402

DIVIDING = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)
"""Arguments of Accelerate's class for training with processes other than the workers."""

SITE = "accelerate"
"""Name of the place at which loaders are distributed. It is the same in all workers."""


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Return a context in which the `state_dict()` of a model contains copies of the model's tensors.

    In a run, all parameters are views of one vector. Functions that write safetensors files consider such tensors to be
    tied, and leave these tensors out or refuse to write them. Tensors that are tied in the model remain tied.
    """
    if current() is None:
        yield
        return

    def copied(_: object, state: dict[str, Any], prefix: str, metadata: object) -> None:
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                key = value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride())
                state[name] = copies.setdefault(key, value.clone()) if value.numel() else value

    hook = model.register_state_dict_post_hook(copied)
    try:
        yield
    finally:
        hook.remove()


class JobAccelerator(accelerate.Accelerator):
    """The base class of the accelerators for a script's own loop and for the `Trainer`: it pushes and clips gradients.

    Attributes:
        has_rest: True if gradients have been accumulated since the last step.
    """

    has_rest = False
    _optimizers_of_job: tuple[tuple[Any, DistributedOptimizer], ...] = ()
    _known_models: tuple[nn.Module, ...] = ()
    # optimizer -> the maximum norm in the last call of `clip_grad_norm_` for its parameters
    _max_norms: Mapping[DistributedOptimizer, float] = MappingProxyType({})

    def prepare_model(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        if all(model is not known for known in self._known_models):
            self._known_models = (*self._known_models, model)
        return super().prepare_model(model, *arguments, **options)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        if current() is None:
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, AcceleratedOptimizer):
            prepared = super().prepare_optimizer(optimizer, device_placement)
            if isinstance(prepared.optimizer, DistributedOptimizer):
                self._optimizers_of_job = ((prepared, prepared.optimizer),)
            return prepared
        distributed = (
            optimizer
            if isinstance(optimizer, DistributedOptimizer)
            else DistributedOptimizer(optimizer, model=models_of(optimizer, self._known_models))
        )
        # The servers hold the optimizer's state, so none of it is moved to a device.
        prepared = super().prepare_optimizer(distributed, device_placement=False)
        distributed.register_step_post_hook(self._stepped)
        self._optimizers_of_job = (*self._optimizers_of_job, (prepared, distributed))
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        self._optimizers_of_job, self._known_models, self.has_rest = (), (), False
        self._max_norms = {}
        return super().free_memory(*objects)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(loss, **options)
        self.has_rest = True

    def _stepped(self, *_: object) -> None:
        self.has_rest = False

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Limit the norm of the gradient that the next step applies. See `DistributedOptimizer.clip_grad_norm`.

        Raises:
            UsageError: `norm_type` is not 2, the parameters belong to several optimizers, or some parameters of their
                optimizer are missing.
        """
        if current() is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        if norm_type != 2:
            raise UsageError(
                f"clip_grad_norm_() got norm_type={norm_type!r}, expected 2: the servers clip the joint gradient by "
                "its L2 norm."
            )
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if max_norm == math.inf:  # only the norm is wanted
            return torch.nn.utils.get_total_norm([each.grad for each in given if each.grad is not None])
        optimizers = self._of(given)
        if not optimizers:
            return torch.tensor(0.0)
        held = {id(each) for each in given}
        missing = [id(each) not in held for each in _trained(optimizers[0])]
        if len(optimizers) > 1 or any(missing):
            found = (
                f"parameters of {len(optimizers)} optimizers"
                if len(optimizers) > 1
                else f"{missing.count(False)} of the {len(missing)} parameters of an optimizer"
            )
            raise UsageError(
                f"clip_grad_norm_() got {found}, expected all parameters of one optimizer: the servers clip the whole "
                "gradient of an optimizer by its norm. Call clip_grad_norm_() once for each optimizer, with all of its "
                "parameters."
            )
        self._max_norms = {**self._max_norms, optimizers[0]: float(max_norm)}
        return optimizers[0].clip_grad_norm(max_norm)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp each element of this worker's own gradients. See `DistributedOptimizer.clip_grad_value`."""
        if current() is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        for distributed in self._of(parameters):
            distributed.clip_grad_value(clip_value)

    def _of(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[DistributedOptimizer]:
        """Return the optimizers that train at least one of these parameters."""
        given = {id(each) for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        return [
            distributed
            for _, distributed in self._optimizers_of_job
            if any(id(each) in given for group in distributed.param_groups for each in group["params"])
        ]

    def get_state_dict(self, model: Any, *arguments: Any, **options: Any) -> Any:
        with apart(model):
            return super().get_state_dict(model, *arguments, **options)

    def step_with_rest(self) -> bool:
        """Make a step with the gradients that were accumulated since the last step; return True if there were any."""
        if not self.has_rest or current() is None:
            return False
        self.sync_gradients = True
        self.step = 0
        for prepared, distributed in self._optimizers_of_job:
            if (max_norm := self._max_norms.get(distributed)) is not None:
                distributed.clip_grad_norm(max_norm)
            prepared.step()
            prepared.zero_grad()
        return True


class Accelerator(JobAccelerator):
    """Accelerate's `Accelerator` for a script that trains in a run.

    This class takes the same arguments as Accelerate's own class. Outside a run, both classes do the same.

    The loader with the training data is given to `prepare` by the name `train`, and is divided among the workers.
    All other loaders are not divided: each worker evaluates on the whole evaluation set, and `gather_for_metrics`
    returns its input. `gather`, `reduce` and `wait_for_everyone` involve all workers, which must make the same calls in
    the same order (see `paceline.barrier`). Only the main worker writes checkpoints, logs with trackers, and prints
    with `print`.

    Raises:
        ConfigurationError: an argument lets Accelerate divide the model among processes.
        UsageError: `prepare` is given an optimizer and loaders, but no loader by the name `train`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        given = inspect.signature(super().__init__).bind_partial(*arguments, **options).arguments
        used = [name for name in DIVIDING if given.get(name) is not None]
        if used and current() is not None:
            raise ConfigurationError(
                f"Accelerator() got {used[0]}, which divides the model or exchanges gradients among processes of its "
                f"own. Omit {used[0]}: in a run, each worker has a whole model, and Paceline exchanges gradients."
            )
        super().__init__(*arguments, **options)

    _trackers: tuple[tuple[Any, ...], Mapping[str, Any]] | None = (
        None  # arguments of `init_trackers`, until Accelerate's own method is called
    )

    def prepare(
        self, *parts: Any, device_placement: list[bool] | None = None, train: Iterable[Any] | None = None
    ) -> Any:
        """Prepare the parts of a training script, and return them in the same order, with the divided loader last.

        Args:
            parts: see Accelerate's own method. A scheduler follows the progress of the job: write it for a single
                process, with the length that the training loader has before this call.
            device_placement: see Accelerate's own method.
            train: the loader with the training data, which is divided among the workers.

        Raises:
            UsageError: optimizers and loaders are given, but none by the name `train`.
        """
        if current() is None:
            placement = (
                [*device_placement, True] if device_placement and train is not None else device_placement
            )
            return super().prepare(*parts, *(() if train is None else (train,)), device_placement=placement)
        loaders = [part for part in parts if isinstance(part, torch.utils.data.DataLoader)]
        if loaders and train is None and any(isinstance(part, torch.optim.Optimizer) for part in parts):
            raise UsageError(
                "accelerator.prepare() got an optimizer and a loader, but no loader by the name train, so each worker "
                "would train on all data. Write prepare(model, optimizer, train=loader), and prepare loaders for an "
                "evaluation in another call."
            )
        if train is not None:
            self._train = self.prepare_train_loader(train)
        for part in parts:
            if isinstance(part, nn.Module):
                self._known_models = (*self._known_models, part)
        ready = super().prepare(*parts, device_placement=device_placement) if parts else ()
        ready = ready if isinstance(ready, tuple) else (ready,)
        if train is not None:
            ready = (*ready, self._train)
        return ready[0] if len(ready) == 1 else ready

    _train: TrainLoader | None = None  # the loader that was divided last

    def prepare_train_loader(self, loader: Iterable[Any]) -> TrainLoader:
        """Divide a loader among the workers. See `prepare`."""
        if isinstance(loader, TrainLoader):
            raise UsageError(
                "accelerator.prepare() got a loader by the name train that an earlier call has divided. Use the loader "
                "that the earlier call has returned."
            )
        device = self.device if self.device_placement else None
        distributed = distribute_at(SITE, loader, split="auto", device=device)
        assert isinstance(distributed, DistributedLoader)
        return TrainLoader(distributed, self.step_with_rest)

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        distributed = next((each for _, each in self._optimizers_of_job if _shares(each, scheduler)), None)
        if distributed is not None:
            loader = None if self._train is None else self._train.loader
            scheduler = follow_as_written(scheduler, distributed, loader)
        return super().prepare_scheduler(scheduler)

    @property
    def is_main_process(self) -> bool:
        """True in the main worker, which writes for all workers. See `paceline.is_main`."""
        return is_main()

    is_local_main_process = is_main_process

    def print(self, *arguments: Any, **options: Any) -> None:
        if is_main():
            super().print(*arguments, **options)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Return a function that calls `function` in the main worker only. See `paceline.is_main`."""
        if current() is None or function is None:
            return super().on_main_process(function)
        return _in_main(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Return a function that calls `function` in the main worker only. See `paceline.is_main`."""
        if current() is None or function is None:
            return super().on_local_main_process(function)
        return _in_main(function)

    def wait_for_everyone(self) -> None:
        """Wait until all other workers have made this call, too. See `paceline.barrier`."""
        if not self._saves:
            barrier()

    _saves = False  # True while Accelerate saves the states, which it does in the main worker only

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all workers, joined along the first dimension. All tensors must have the same shape."""
        return super().gather(tensor) if current() is None else recursively_apply(_gathered, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the input, because each worker evaluates on the whole evaluation set."""
        return super().gather_for_metrics(input_data, use_gather_object) if current() is None else input_data

    def reduce(
        self, tensor: Any, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0
    ) -> Any:
        """Return the sum or the mean of tensors over all workers. See `paceline.reduce`."""
        if current() is None or reduction == "none":
            return super().reduce(tensor, reduction, scale)
        if reduction not in ("sum", "mean"):
            raise UsageError(f"reduce() got reduction={reduction!r}, expected 'sum', 'mean' or 'none'.")
        return recursively_apply(lambda each: reduce(each, reduction), tensor)

    def init_trackers(self, *arguments: Any, **options: Any) -> None:
        """Set up the trackers when something is first logged, in the worker that is the main worker at that time."""
        if current() is None:
            super().init_trackers(*arguments, **options)
        else:
            self._trackers = arguments, options

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log values with `paceline.log` in each worker, and with the trackers in the main worker."""
        if (session := current()) is None:
            super().log(values, step, log_kwargs)
            return
        metrics_of(session).add_legal(session, values)
        if not is_main():
            return
        if self._trackers is not None:
            (arguments, options), self._trackers = self._trackers, None
            super().init_trackers(*arguments, **options)
        super().log(values, step, log_kwargs)

    def save(self, *arguments: Any, **options: Any) -> None:
        if is_main():
            super().save(*arguments, **options)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        if is_main():
            super().save_model(*arguments, **options)

    def save_state(self, *arguments: Any, **options: Any) -> Any:
        """Save the states in the main worker. To resume from them, all workers call `load_state` before training."""
        if not is_main():
            self.project_configuration.iteration += 1
            return None
        self._saves = True
        try:
            return super().save_state(*arguments, **options)
        finally:
            self._saves = False

    def load_state(self, *arguments: Any, **options: Any) -> None:
        """Load the states, in all workers. Only worker 0 gets the random states that were saved."""
        super().load_state(*arguments, **options)
        session = current()
        if session is None or session.worker == 0:
            return
        with generators_lock:
            # This number depends on the random states that were loaded, so it differs from checkpoint to checkpoint.
            drawn = int(torch.randint(2**31, ()))
            GeneratorStates.seeded(loader_seed(session, drawn)).give_back()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader after telling it to leave out the first batches of its next pass.

        Args:
            dataloader: the loader. All workers must make this call.
            num_batches: number of batches per worker: the next pass leaves out this number of batches, multiplied by
                the number of workers.
        """
        if not isinstance(dataloader, TrainLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.loader.begin_at(num_batches * worker_count())
        return dataloader


class AroundLoader:
    """A mixin for a class around a distributed loader, which shows the attributes of the loader.

    Attributes:
        loader: the distributed loader.
    """

    loader: DistributedLoader[Any]

    def __getattr__(self, name: str) -> Any:
        # An attribute of this class can be missing, for example while an instance is copied.
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)


class TrainLoader(AroundLoader, DataLoaderStateMixin):
    """One worker's part of a loader, which tells Accelerate where a pass ends.

    The length of the loader is the number of batches that one worker may use. Under models that keep all workers in
    lockstep, this is the worker's equal share. Otherwise, it is the number of batches of the whole epoch, because any
    worker may use more than its share.

    Args:
        loader: the distributed loader.
        end_pass: called after the last batch of a pass.
    """

    def __init__(self, loader: DistributedLoader[Any], end_pass: Callable[[], object]) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._end_pass = end_pass

    def __len__(self) -> int:
        return self.loader.whole_length if self.loader.may_be_dynamic else len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in self.loader:
                self.end_of_dataloader = self.loader.left == 0
                yield batch
            self._end_pass()
        finally:
            self.end()


def _trained(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that get gradients."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _shares(optimizer: DistributedOptimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Return True if a scheduler sets the learning rates of an optimizer."""
    return scheduler.optimizer.param_groups is optimizer.param_groups


def _in_main(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` in the main worker, and returns None in all other workers."""

    @functools.wraps(function)
    def in_main(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) if is_main() else None

    return in_main


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    session = current()
    assert session is not None
    rows = torch.zeros(session.workers, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    there = torch.zeros(session.workers)
    rows[session.worker], there[session.worker] = tensor, 1.0
    found = reduce({"rows": rows, "there": there}, "sum")
    rows = found["rows"][found["there"] > 0].to(tensor.dtype)
    return rows.flatten(0, 1) if tensor.ndim else rows
