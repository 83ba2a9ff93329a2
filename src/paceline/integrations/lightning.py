"""Lightning: once this module is imported, `Trainer` and `Fabric` accept `strategy="paceline"`.

Lightning itself sees one process with one device in each worker. The strategy divides the training data, exchanges
gradients, and clips the joint gradient. The strategy overrides public methods, and also uses names that Lightning does
not document. `tests/integrations/test_lightning.py` checks that these names exist.

**Epochs.** A `Trainer` counts its own epochs and batches. In a run, the epochs are those of the job: a loop of
`paceline.epochs` advances when the `Trainer` begins a pass over its data. In a worker that joins late, and in a
resumed run, the `Trainer` begins with the current epoch of the job. Under a sync model whose workers do not wait for
each other, no worker knows beforehand how many batches it will use. So the loader says for each batch whether it is the
last batch of the epoch. After the last batch, the `Trainer` ends its epoch: it makes the step for the gradients that it
has accumulated, and validates.

**What all workers do together.** In a run, a worker may join or be lost at any time, and workers need not have made the
same number of steps. So the workers of a `Trainer` do only the following together:

- Before the first step: `broadcast` sends a value of worker 0 to all workers, such as the folder of the checkpoints.
- When a validation begins, unless the sync model always keeps workers in lockstep: each worker waits for the others,
  and then pulls the newest weights. So all workers validate the same model on the whole validation set, and see the
  same metrics. Callbacks that depend on these metrics therefore make the same decisions in all workers, without any
  communication.
- When training ends, unless the sync model always keeps workers in lockstep: each worker waits for the others (see
  `_Fit.meet`).
- When a checkpoint is loaded: each worker waits for the others before it reads the file. If training has begun, each
  worker waits again until the servers have the loaded weights.

Other calls of `barrier`, `broadcast` and `reduce_boolean_decision` do nothing. In a validation, `reduce` returns the
value itself, because all workers have the same value. In a training step, `reduce` needs a sync model that keeps
workers in lockstep.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigurationError, UsageError
from ..train.collectives import barrier, evaluating_in_place, reduce, with_joint_statistics
from ..train.data import DistributedLoader, distribute_at
from ..train.device import device
from ..train.epochs import Epochs
from ..train.loops import Limits
from ..train.metrics import log, metrics_of
from ..train.optimizer import DistributedOptimizer
from ..train.prepare import follow, follow_as_written, models_of
from ..train.schedules import JobScheduler
from ..train.session import Session, current, resumption_of, worker_count, worker_index
from ..train.tracking import track
from ..train.training import training_of
from ..train.worker_state import sendable, set_state, state_of
from . import broadcast, require

Base: Any = object  # the base class of a strategy, which depends on the package; see `_register`

SITE = "lightning"
"""Name of the place at which loaders are distributed. It is the same in all workers."""

SENT = (str, bool, int, float, type(None))
"""Types of the values that `broadcast` sends."""


class _Strategy(Base):
    """The common part of the strategies of the `Trainer` and of Fabric: one device for each worker, and ranks."""

    strategy_name = "paceline"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._device = torch.device("cpu")
        # For Lightning, each worker is a node of its own, so each worker prepares the data.
        self.global_rank = self.node_rank = worker_index()
        self.world_size, self.local_rank = worker_count(), 0
        self.follow_main()

    @property
    def parallel_devices(self) -> list[torch.device]:
        return []  # so that Lightning sets the devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ConfigurationError(
                f'strategy="paceline" was used with {len(devices)} devices, expected 1: each worker is a process with '
                f"one device. Use devices=1, and start {len(devices)} workers with paceline run --workers "
                f"{len(devices)}."
            )
        self._device = torch.device(devices[0])

    @property
    def root_device(self) -> torch.device:
        own = device()
        return own if current() is not None and own.type == self._device.type else self._device

    @property
    def is_global_zero(self) -> bool:
        """True if this worker is the main worker now, as far as it knows."""
        session = current()
        return session is None or session.main_worker == session.worker

    def follow_main(self) -> None:
        """Let Lightning log and print messages in the worker that is the main worker now."""
        if current() is not None:
            rank_zero_only = import_module("lightning_utilities.core.rank_zero").rank_zero_only
            rank_zero_only.rank = 0 if self.is_global_zero else max(self.global_rank, 1)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if worker_count() > 1:
            raise UsageError(
                'strategy="paceline" has no all_gather(), because workers may come and go. Combine numbers with '
                "paceline.reduce(), or let each worker write a file of its own."
            )
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


def _is_main_now() -> bool:
    session = current()
    return session is None or session.is_main_now()


def _broadcast(obj: Any) -> Any:
    """Return the object of worker 0 if its type is in `SENT`; otherwise, return this worker's object itself."""
    return broadcast(obj, sends=worker_index() == 0) if isinstance(obj, SENT) else obj


# -- The Trainer ---------------------------------------------------------------------------------------------


class _TrainerStrategy(_Strategy):
    """The strategy of the `Trainer`.

    Args:
        options: `accelerator`, `checkpoint_io` and `precision_plugin`, as for other strategies.

    Attributes:
        fit: the call of `Trainer.fit` that is in progress; None if no call is in progress, and outside of a run.
        state: the part of the `Trainer`'s state that is tracked with `track`.
        files: paths of the files in the folders of the checkpoints; the same in all workers (see `name_files_alike`).
    """

    hooks_class: type
    _is_main = False  # whether this worker was the main worker at the last call of `follow_main`

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fit: _Fit | None = None
        self.state = _State(self)
        self.files: set[str] = set()
        self._prepares = False  # True between the setup of the environment and the setup of the module
        self._turn = ExitStack()  # holds the lock for preparing data
        self._evaluation = ExitStack()

    @property
    def trainer(self) -> Any:
        return self.lightning_module.trainer

    def setup_environment(self) -> None:
        super().setup_environment()
        if current() is not None:
            self.follow_main()
            self._prepares = True
            self._turn.enter_context(_one_at_a_time())

    def follow_main(self) -> None:
        super().follow_main()
        session = current()
        if session is None or self.lightning_module is None:
            return
        takes_over, self._is_main = self.is_global_zero and not self._is_main, self.is_global_zero
        if takes_over and (session.resumed or training_of(session) is not None):
            for logger in self.trainer.loggers:
                _keep_metrics(logger)

    def connect(self, model: Any) -> None:
        super().connect(model)
        callbacks = self.trainer.callbacks
        if current() is not None and not any(isinstance(each, self.hooks_class) for each in callbacks):
            callbacks.insert(0, self.hooks_class())

    def setup_optimizers(self, trainer: Any) -> None:
        if current() is not None:
            trainer.fit_loop.setup_data()
            if isinstance(data := trainer.train_dataloader, TrainingData) and data.length is not None:
                # The module may ask the `Trainer` for its estimated number of steps, which depends on `max_batches`.
                trainer.fit_loop.max_batches = data.limited(trainer.limit_train_batches)
        super().setup_optimizers(trainer)
        if current() is not None:
            self.optimizers: list[Any] = [self._distributed(each) for each in self.optimizers]

    def _distributed(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        if isinstance(optimizer, DistributedOptimizer):
            return optimizer
        found = DistributedOptimizer(optimizer, model=self.lightning_module)
        # Lightning names learning rates after the class of an optimizer.
        found.__class__ = type(type(optimizer).__name__, (DistributedOptimizer,), {})
        return found

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        if current() is not None:
            self.precision_plugin.clip_gradients = clip_gradients

    def process_dataloader(self, dataloader: Any) -> Any:
        if current() is None or not self.trainer.training:
            return dataloader  # each worker validates on the whole validation set
        if not isinstance(dataloader, DistributedLoader):
            dataloader = distribute_at(SITE, dataloader)
        dataloader.knows_end = True
        return TrainingData(self, dataloader)

    def batch_to_device(self, *arguments: Any, **options: Any) -> Any:
        self.follow_main()
        return super().batch_to_device(*arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        output = super().training_step(*arguments, **options)
        if self.fit is not None:
            self.fit.log_loss(output)
        return output

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **options: Any) -> Any:
        session = current()
        if (
            session is not None
            and session.core.may_restart
            and not self.lightning_module.automatic_optimization
        ):
            raise ConfigurationError(
                "A module with manual optimization cannot be used with a sync model that aborts computations, such as "
                "spec-sync, because the module computes its gradients before step(). Use another sync model, or "
                "automatic optimization."
            )
        return super().optimizer_step(optimizer, closure, model, **options)

    # -- the course of a fit --

    def on_train_start(self) -> None:
        super().on_train_start()
        if (session := current()) is not None:
            self.fit = _Fit(self, session)
            self.fit.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.fit is not None:
            self.fit.begin_batch(batch_idx)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.fit is not None:
            fit, self.fit = self.fit, None
            fit.end()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if not self.trainer.sanity_checking:
            self._begin_evaluation()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._evaluation.close()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_evaluation()

    def on_test_end(self) -> None:
        super().on_test_end()
        self._evaluation.close()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_evaluation()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._evaluation.close()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._turn.close()
        self._evaluation.close()

    def teardown(self) -> None:
        if current() is None:
            super().teardown()
            return
        # Lightning's own method moves the model to the CPU, but the job still uses the model's memory.
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _begin_evaluation(self) -> None:
        if (session := current()) is not None:
            if self.fit is not None:
                self.fit.meet()
            self._evaluation.enter_context(evaluating_in_place(session))

    # -- what workers do together --

    def barrier(self, name: str | None = None) -> None:
        self._prepares = False
        self._turn.close()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        session = current()
        if session is None or src or training_of(session) is not None:
            return obj
        # Otherwise, the workers that wait for their turn could not make this call, which all workers make together.
        self._turn.close()
        sent = _broadcast(obj)
        if self._prepares:
            self._turn.enter_context(_one_at_a_time())
        return sent

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        session = current()
        if session is None or self.fit is None or not self.trainer.training:
            return tensor
        if session.core.stays_lockstep:
            return reduce(tensor, _operation(reduce_op))
        if not tensor.is_floating_point():
            return tensor  # Lightning reduces no integers except the lengths of loaders
        raise ConfigurationError(
            "reduce() was called in a training step, but under this sync model workers do not make their steps "
            "together. Log the value instead: the metrics of the run are the means over all workers. Or use a model "
            "that keeps workers in lockstep, such as bsp."
        )

    # -- checkpoints --

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = with_joint_statistics(super().lightning_module_state_dict())
        return state

    def load_model_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Load weights, such as the best weights before a test, in all workers and in the servers."""
        session = current()
        training = None if session is None else training_of(session)
        with ExitStack() as edits:
            if training is not None:
                for optimizer in self.optimizers[:1]:  # an edit covers the parameters of all optimizers
                    edits.enter_context(optimizer.editing())
            super().load_model_state_dict(*arguments, **options)
        if training is not None:
            # One worker sends the new weights. Without the barrier, other workers might go on before the weights have
            # arrived.
            barrier()
            training.refresh()

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        barrier()  # the main worker may still be writing the file
        return super().load_checkpoint(*arguments, **options)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        # The servers hold this state, so only the worker that writes the checkpoint fetches the state.
        state: dict[str, Any] = super().optimizer_state(optimizer) if self.is_global_zero else {}
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, *arguments: Any, **options: Any
    ) -> None:
        self.files.add(os.path.abspath(filepath))
        if _is_main_now():
            # If this worker has become the main worker since the checkpoint was made, the checkpoint has no optimizer
            # states yet.
            states = checkpoint.get("optimizer_states", [])
            for number, optimizer in enumerate(self.optimizers[: len(states)]):
                states[number] = states[number] or super().optimizer_state(optimizer)
            super().save_checkpoint(checkpoint, filepath, *arguments, **options)

    def remove_checkpoint(self, filepath: Any) -> None:
        self.files.discard(os.path.abspath(filepath))
        super().remove_checkpoint(filepath)

    def name_files_alike(self) -> None:
        """Make the names of checkpoints independent of when a worker checks whether a file exists.

        Lightning appends a number to the name of a checkpoint if a file of this name exists. The main worker may have
        written the file before another worker checks, and the workers do not ask each other. So each worker keeps a
        list of the files that existed when training began, and updates it whenever a checkpoint is saved or removed.
        """
        for callback in self.trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if folder is not None and hasattr(callback, "file_exists") and "://" not in str(folder):
                self.files.update(os.path.abspath(path) for path in Path(folder).glob("**/*"))
                callback.file_exists = lambda filepath, trainer: os.path.abspath(filepath) in self.files


def _keep_metrics(logger: Any) -> None:
    """Rename the file of a `CSVLogger` that an earlier main worker has written, because the logger would delete it."""
    # Both packages of `PACKAGES` have a class of this name, and users derive classes from it.
    if any(each.__name__ == "CSVLogger" for each in type(logger).__mro__):
        path = Path(logger.log_dir, "metrics.csv")
        if path.is_file():
            names = (path.with_name(f"metrics-{number}.csv") for number in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))


def clip_gradients(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
    """Clip the joint gradient as `Precision.clip_gradients` clips the gradients of one process.

    Args:
        optimizer: a distributed optimizer, or Lightning's wrapper of it.
        clip_val: the largest norm, or the largest absolute value. 0 for no clipping.
        gradient_clip_algorithm: "norm" or "value".
    """
    if clip_val <= 0:
        return
    if gradient_clip_algorithm == "value":
        optimizer.clip_grad_value(clip_val)
    else:
        optimizer.clip_grad_norm(clip_val)


def _operation(reduce_op: Any) -> Any:
    """Return the operation of `paceline.reduce` that corresponds to an operation of Lightning."""
    name = str(reduce_op).lower().removeprefix("redoptype.")
    if name in ("none", "mean", "avg"):
        return "mean"
    if name == "sum":
        return "sum"
    raise UsageError(f"reduce() got reduce_op={reduce_op!r}, expected 'mean' or 'sum'.")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Return a context that only one worker of this user on this machine can be in at a time.

    Each worker prepares its data, because it may be on a machine of its own. The workers of a machine prepare the data
    one after the other, so the first worker downloads the data, and the other workers find the downloaded data.
    """
    path = Path(tempfile.gettempdir()) / f"paceline-lightning-{os.getuid()}.lock"
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A process that was started in this context may still have the file open, so closing the file here would
            # not end the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


class TrainingData:
    """The training data of a worker as the `Trainer` sees it: each pass is an epoch of the job.

    Args:
        strategy: the strategy.
        loader: the worker's part of the data.

    Attributes:
        loader: the worker's part of the data.
        length: number of batches that all workers together use in an epoch; None if it is not known. If all other
            workers are lost, one worker uses all of these batches.
        share: number of batches of this worker in an epoch, if all shares are always equal; else the same as `length`.
    """

    def __init__(self, strategy: Any, loader: DistributedLoader[Any]) -> None:
        self.loader = loader
        self._strategy = strategy
        self._pass: Iterator[Any] = iter(())
        # Number of batches of this worker in this pass, as far as it is known. Before the first pass, the `Trainer`
        # reads the length as the limit of all passes, so this number is as large as possible.
        self._share = sys.maxsize
        self.length = self.share = None
        with suppress(TypeError):  # an iterable dataset has no length
            self.length = loader.whole_length
            self.share = self.length if loader.may_be_dynamic else len(loader)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the training data has no length")
        return max(self.length, self._share)

    @property
    def expected(self) -> float:
        """Number of batches of this worker in a pass; infinity if it depends on the speeds of the workers."""
        return float("inf") if self.length is None or self.loader.may_be_dynamic else len(self.loader)

    def limited(self, limit: int | float) -> int:
        """Return how many batches this worker uses in an epoch under `Trainer(limit_train_batches=limit)`."""
        assert self.share is not None
        return min(self.share, limit) if isinstance(limit, int) else max(int(self.share * limit), 1)

    def __iter__(self) -> Iterator[Any]:
        self._pass, self._share = self._batches(), 0
        if self._strategy.fit is None:
            return self._pass
        # The `Trainer` asks for no more batches than `len(self)`, which it reads after this call. A share may be larger
        # than an epoch, because it may contain batches of an earlier epoch that a lost worker has not used.
        first = list(itertools.islice(self._pass, 1))
        self._share = len(first) + (self.loader.left or 0)
        return itertools.chain(first, self._pass)

    def _batches(self) -> Iterator[Any]:
        fit = self._strategy.fit
        if fit.begin_pass():
            yield from self.loader
            fit.trainer.should_stop |= fit.loop.over

    def finish(self) -> None:
        """End the pass after the step for its last batch, because the `Trainer` asks for no further batch."""
        for _ in self._pass:
            raise AssertionError("a pass has another batch after its last batch")


class _Fit:
    """One call of `Trainer.fit` in one worker: its epochs, and the state that it shares with the calls in other
    workers.

    Args:
        strategy: the strategy.
        session: the session of the worker.

    Attributes:
        trainer: the `Trainer`.
        data: the training data of this worker.
        loop: the loop over the epochs of the job.
    """

    def __init__(self, strategy: Any, session: Session) -> None:
        self.trainer = strategy.trainer
        data = self.trainer.train_dataloader
        if not isinstance(data, TrainingData):
            raise ConfigurationError(
                'strategy="paceline" was used with several training loaders, expected one. Combine the datasets, for '
                "example with torch.utils.data.StackDataset or ConcatDataset, and give one loader to the Trainer."
            )
        if self.trainer.reload_dataloaders_every_n_epochs:
            raise ConfigurationError(
                "Trainer(reload_dataloaders_every_n_epochs=...) makes new training loaders, but the job divides the "
                "epochs of one loader. Leave this argument out, and let the dataset change what it returns."
            )
        self.data = data
        self._session = session
        self._strategy = strategy
        self._require_whole_epochs()
        # `current_epoch` is not 0 if the Trainer goes on from one of its own checkpoints, or if `fit` is called a
        # second time.
        self._first = self.trainer.current_epoch
        self._max_epochs, self._max_steps = self.trainer.max_epochs, self.trainer.max_steps
        epochs = None if self._max_epochs in (None, -1) else self._max_epochs - self._first
        self.loop = Epochs(Limits(epochs, samples=self._most_samples()), session)
        self._epochs = iter(self.loop)
        self._next: int | None = None  # the number of the next epoch, if the loop has already returned it
        self._apart = False  # True once workers no longer wait for each other
        self._has_loss = False  # True once a training step has returned a loss
        self._logged: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin with the epoch that the job has reached."""
        self._follow_job()
        self._strategy.name_files_alike()
        state = self._strategy.state
        track(**{state.name_in(self._session): state})
        self._next = next(self._epochs, None)
        if self._next is None:  # the job has ended this loop
            self.trainer.should_stop = True
        elif self._next:
            progress = self.trainer.fit_loop.epoch_progress
            for counts in (progress.total, progress.current):
                counts.ready = counts.started = counts.processed = counts.completed = self._first + self._next

    def begin_pass(self) -> bool:
        """Begin the next epoch of the job. Return False if there is no next epoch."""
        if self._next is None:
            self._next = next(self._epochs, None)
        found, self._next = self._next is not None, None
        self.trainer.should_stop |= not found
        return found

    def begin_batch(self, number: int) -> None:
        """Tell the `Trainer` whether the batch is the last one of its pass.

        Args:
            number: index of the batch in the pass.
        """
        fit_loop, loader = self.trainer.fit_loop, self.data.loader
        fit_loop.epoch_loop.batch_progress.is_last_batch = loader.is_last
        if number == 0 and uses_all(self.trainer):
            # If workers were lost, the share of each remaining worker is larger than before.
            if (left := loader.left) is not None:
                fit_loop.max_batches = left + 1
            elif self.data.length is not None:
                fit_loop.max_batches = self.data.length

    def end_epoch(self) -> None:
        """After the last pass, let the `Trainer` make one more pass over the data that lost workers have not used."""
        fit_loop = self.trainer.fit_loop
        last = fit_loop.max_epochs == self.trainer.current_epoch + 1
        if last and uses_all(self.trainer) and not self.trainer.should_stop:
            self._next = next(self._epochs, None)
            fit_loop.max_epochs += self._next is not None

    def end(self) -> None:
        """End the loop. If this worker has been stopped, end the loop in all workers."""
        if self.trainer.should_stop:
            self.loop.stop()
        next(self._epochs, None)
        fit_loop = self.trainer.fit_loop
        fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = self._max_epochs, self._max_steps
        if not self._session.core.lockstep:
            self.meet(ends=True)

    def meet(self, *, ends: bool = False) -> None:
        """Wait for the other workers before a validation or after training, if workers are not always in lockstep.

        A worker may be stopped in the middle of an epoch, for example because its time is over, while other workers
        wait before a validation that this worker does not reach. So each worker tells the others whether its training
        ends. If training ends for any worker, it soon ends for all workers, and workers no longer wait for each other.

        Workers that are not in lockstep have made different numbers of steps. After this call, `global_step` is the
        mean of these numbers in all workers, so all workers give the same names to checkpoints.

        Args:
            ends: True if training has ended for this worker.
        """
        if self._session.core.stays_lockstep or self._apart:
            return
        if self.trainer.should_stop:
            self.loop.stop()
            ends = True
        found = reduce({"ends": float(ends), "steps": float(self.trainer.global_step)})
        self._apart = found["ends"] > 0
        _set_steps(self.trainer, round(found["steps"]))

    def log_loss(self, output: Any) -> None:
        """Log the loss that a training step has returned."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, torch.Tensor) and not resumption_of(self._session).repeats:
            self._has_loss = True
            log(loss=loss)

    def log_metrics(self, *, logs: bool) -> None:
        """Log the metrics that the module has logged since the last call, or only remember them if `logs` is False.

        A metric stays in the `Trainer`'s metrics even if the module does not log it again. So a new value is recognized
        by its memory, which differs from that of the last value: the last value is kept here, so its memory is not used
        again.
        """
        logs = logs and not resumption_of(self._session).repeats
        has_loss = self._has_loss
        for name, value in self.trainer.callback_metrics.items():
            if not isinstance(value, torch.Tensor) or value.numel() != 1 or (name == "loss" and has_loss):
                continue
            last = self._logged.get(name)
            if last is None or last.data_ptr() != value.data_ptr():
                self._logged[name] = value
                if logs:
                    metrics_of(self._session).add_legal(self._session, {name: value})

    def _require_whole_epochs(self) -> None:
        """Raise `ConfigurationError` if the `Trainer` divides epochs in a way that differs between workers."""
        trainer = self.trainer
        if trainer.val_check_interval == 1.0:
            # With this value, the Trainer validates after the batch that the loader calls the last one of the epoch.
            trainer.val_check_batch = float("inf")
        elif isinstance(trainer.val_check_interval, float) and self.data.share is not None:
            batches = self.data.limited(trainer.limit_train_batches)
            trainer.val_check_batch = max(int(batches * trainer.val_check_interval), 1)
        if not self.data.loader.may_be_dynamic and self._session.core.stays_lockstep:
            return
        if trainer.val_check_interval != 1.0:
            raise ConfigurationError(
                f"Trainer(val_check_interval={trainer.val_check_interval!r}) validates in the middle of an epoch, but "
                "in this run, workers may make different numbers of steps. Use val_check_interval=1.0 and "
                "check_val_every_n_epoch, or a model that keeps workers in lockstep, such as bsp, without --split "
                "dynamic."
            )
        if not uses_all(trainer) and not trainer.fast_dev_run:
            raise ConfigurationError(
                f"Trainer(limit_train_batches={trainer.limit_train_batches!r}) counts the batches of one worker, but "
                "in this run, workers may use different numbers of batches. Give the Trainer a loader over a part of "
                "the data, such as torch.utils.data.Subset."
            )

    def _most_samples(self) -> float:
        """Return the number of samples that all workers together use; infinity if the `Trainer` counts its own steps.

        `max_steps` counts joint batches. If workers are not in lockstep, no worker can count the joint batches of the
        job, so the limit is given in samples. The steps that the `Trainer` made before this call of `fit`, such as
        those before a checkpoint, count toward `max_steps`, too.
        """
        trainer, steps = self.trainer, self._max_steps
        if steps == -1 or self._session.core.stays_lockstep:
            return float("inf")
        batch = getattr(self.data.loader, "batch_size", None)
        if batch is None:
            raise ConfigurationError(
                f"Trainer(max_steps={steps}) was used with a training loader without a batch size, so the number of "
                "samples in these steps is not known under this sync model. Use max_epochs or max_time."
            )
        trainer.fit_loop.epoch_loop.max_steps = -1
        workers = 1 if self.data.loader.divides else self._session.workers
        left = max(steps - trainer.global_step, 0)
        return float(left * trainer.accumulate_grad_batches * batch * workers)

    def _follow_job(self) -> None:
        """Let the schedulers that are stepped in each iteration follow the job."""
        loader = self.data.loader
        automatic = self.trainer.lightning_module.automatic_optimization
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
                continue
            if config.interval == "step" or not automatic:
                optimizer = _trained_by(scheduler, self.trainer.optimizers)
                config.scheduler = follow(
                    scheduler, optimizer, loader, self.data.share, joint=not loader.may_be_dynamic
                )
                if self.trainer.ckpt_path is not None and not self._session.resumed:
                    self._check_position(config.scheduler)

    def _check_position(self, scheduler: JobScheduler) -> None:
        """If the checkpoint was written with another number of workers, let a schedule begin where the `Trainer` goes
        on.

        Raises:
            ConfigurationError: a scheduler of this class cannot begin at another step.
        """
        if self.data.share is None:
            return
        steps = -(-self.data.share // self.trainer.accumulate_grad_batches)
        least, most = self._first * steps, (self._first + 1) * steps
        if not least - self._session.workers <= scheduler.last_epoch <= most:
            scheduler.begin_at(least)


def _trained_by(scheduler: LRScheduler, optimizers: Iterable[Any]) -> DistributedOptimizer:
    """Return the distributed optimizer whose parameter groups a scheduler changes."""
    found: DistributedOptimizer
    [found] = (each for each in optimizers if each.param_groups is scheduler.optimizer.param_groups)
    return found


def uses_all(trainer: Any) -> bool:
    """Return True if a `Trainer` uses all batches of an epoch. A limit of 1 is one batch; 1.0 is all batches."""
    limit = trainer.limit_train_batches
    return isinstance(limit, float) and limit == 1.0


def _set_steps(trainer: Any, steps: int) -> None:
    """Set the number of steps that a `Trainer` has made, which is its `global_step`."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        total = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        total = epoch_loop.manual_optimization.optim_step_progress.total
    total.ready = total.completed = steps


class _State:
    """The state of a `Trainer` besides the model, for workers that join late and for runs that are resumed.

    Args:
        strategy: the strategy of the `Trainer`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._name = ""

    def name_in(self, session: Session) -> str:
        """Return the name under which the state is tracked, which is the same in all workers."""
        self._name = self._name or f"lightning {next(_numbers.setdefault(session, itertools.count()))}"
        return self._name

    def state_dict(self) -> dict[str, Any]:
        session, trainer = current(), self._strategy.trainer
        assert session is not None
        callbacks = {
            each.state_key: sendable(session, f"the state of {each.state_key}", each.state_dict())
            for each in trainer.callbacks
        }
        return {
            "steps": trainer.global_step,
            "epoch_loop": trainer.fit_loop.epoch_loop.on_save_checkpoint(),
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "schedulers": [state_of(config.scheduler) for config in trainer.lr_scheduler_configs],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._strategy.trainer
        trainer.fit_loop.epoch_loop.on_load_checkpoint(state_dict["epoch_loop"])
        _set_steps(trainer, state_dict["steps"])
        for callback in trainer.callbacks:
            if (state := state_dict["callbacks"].get(callback.state_key)) is not None:
                if "dirpath" in state:  # a callback ignores checkpoints outside its folder
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(state)
        for config, state in zip(trainer.lr_scheduler_configs, state_dict["schedulers"], strict=True):
            set_state(config.scheduler, state)


_numbers: WeakKeyDictionary[Session, Iterator[int]] = WeakKeyDictionary()


class _Hooks(Base):
    """The callback with which the strategy notices the ends of batches, epochs and validations."""

    def on_train_epoch_start(self, trainer: Any, *arguments: Any) -> None:
        # Progress bars, whose callbacks are called after this one, ask for the length of the pass.
        if (fit := trainer.strategy.fit) is not None and uses_all(trainer):
            trainer.fit_loop.max_batches = fit.data.expected

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if (fit := trainer.strategy.fit) is not None:
            fit.log_metrics(logs=True)
            if fit.data.loader.is_last:
                fit.data.finish()

    def on_train_epoch_end(self, trainer: Any, *arguments: Any) -> None:
        if (fit := trainer.strategy.fit) is not None:
            fit.log_metrics(logs=True)
            fit.end_epoch()

    def on_validation_end(self, trainer: Any, *arguments: Any) -> None:
        if (fit := trainer.strategy.fit) is not None:
            # All workers have the same metrics.
            fit.log_metrics(logs=trainer.is_global_zero)


# -- Fabric --------------------------------------------------------------------------------------------------


class _FabricStrategy(_Strategy):
    """The strategy of Fabric, with which a script writes its own loops.

    Args:
        options: `accelerator`, `checkpoint_io` and `precision`, as for other strategies.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._modules: list[torch.nn.Module] = []
        self._loaders: list[DistributedLoader[Any]] = []

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        found: torch.nn.Module = super().setup_module(module)
        return found

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = super().setup_optimizer(optimizer)
        if current() is None or isinstance(found, DistributedOptimizer):
            return found
        return DistributedOptimizer(found, model=models_of(found, self._modules))

    def setup_module_and_optimizers(self, module: Any, optimizers: Any, *scheduler: Any) -> Any:
        module, optimizers, *rest = super().setup_module_and_optimizers(module, optimizers, *scheduler)
        return (module, optimizers, *(self._followed(each, optimizers) for each in rest))

    def _followed(self, scheduler: Any, optimizers: list[DistributedOptimizer]) -> Any:
        """Return a scheduler that follows the job's progress through the first loader, if a loader exists already."""
        if current() is None or scheduler is None:
            return scheduler
        loader = self._loaders[0] if self._loaders else None
        return follow_as_written(scheduler, _trained_by(scheduler, optimizers), loader)

    def process_dataloader(self, dataloader: Any) -> Any:
        if current() is None or isinstance(dataloader, DistributedLoader):
            return dataloader
        loader = distribute_at(SITE, dataloader)
        assert isinstance(loader, DistributedLoader)
        self._loaders.append(loader)
        return loader

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        self.follow_main()
        return super().optimizer_step(optimizer, **options)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        if current() is None:
            options = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
            norm: torch.Tensor = super().clip_gradients_norm(module, optimizer, max_norm, **options)
            return norm
        if norm_type != 2:
            raise UsageError(
                f"clip_gradients() got norm_type={norm_type!r}, expected 2: the servers clip the joint gradient by "
                "its L2 norm."
            )
        norm = optimizer.clip_grad_norm(max_norm)
        return norm

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        if current() is None:
            super().clip_gradients_value(module, optimizer, clip_val)
        else:
            optimizer.clip_grad_value(clip_val)

    def barrier(self, name: str | None = None) -> None:
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        sent = _broadcast(obj) if src == 0 else obj
        if sent is obj and worker_count() > 1 and not isinstance(obj, SENT):
            raise UsageError(
                f"broadcast() got a {type(obj).__name__} with src={src}, expected a text or a number of worker 0. "
                "Combine tensors with fabric.all_reduce(), and write anything else to a file."
            )
        return sent

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return reduce(tensor, _operation(reduce_op))

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = with_joint_statistics(super().get_module_state_dict(module))
        return state

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        if _is_main_now():
            super().save_checkpoint(*arguments, **options)


# -- The packages --------------------------------------------------------------------------------------------

LEAST = "2.5"
"""The oldest version of Lightning with which the strategies work."""

PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
"""Lightning's packages, each with its modules in which strategies are registered."""


def _register(module: str) -> type:
    """Register the strategy for the `Trainer` or the Fabric of a package, and return it."""
    strategies = import_module(f"{module}.strategies")
    kind: type = _FabricStrategy
    members: dict[str, Any] = {}
    registry = getattr(strategies, "STRATEGY_REGISTRY", None)
    if registry is None:
        kind, registry = _TrainerStrategy, strategies.StrategyRegistry
        callback = import_module(f"{module}.callbacks").Callback
        members["hooks_class"] = type("PacelineCallback", (_Hooks, callback), {})
    strategy = type("PacelineStrategy", (kind, strategies.SingleDeviceStrategy), members)
    registry.register("paceline", strategy, description="Paceline", override=True)
    return strategy


def _register_all() -> tuple[type, type]:
    """Register the strategies for the packages of `PACKAGES` that the script has imported.

    If the script has imported no such package, register the strategies for all packages of `PACKAGES` that are
    installed.

    Returns:
        The strategy for the `Trainer` and the strategy for Fabric, both of the first of these packages.
    """
    installed = [package for package in PACKAGES if find_spec(package) is not None]
    used = [package for package in installed if any(name in sys.modules for name in PACKAGES[package])]
    registered: list[type] = []
    for package in used or installed or ["lightning"]:
        require(package, LEAST, "lightning")
        registered += map(_register, PACKAGES[package])
    return registered[0], registered[1]


PacelineStrategy, PacelineFabricStrategy = _register_all()
