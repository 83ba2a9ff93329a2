"""`distribute`, which lets the `Trainer` of Hugging Face, and trainers derived from it, train in a run.

    trainer = paceline.integrations.transformers.distribute(Trainer(...))
    trainer.train()

The trainer becomes an instance of a subclass of its own class. The subclass overrides public methods only. The
`Trainer` itself sees one process in each worker.

**Epochs.** The loader of a trainer drives a loop over `paceline.epochs`: the loader advances the loop when the trainer
begins a pass. So a worker that joins late, or whose run is resumed, gets no batch in the passes that the job has
finished, and all workers stop together. The loop may ask for one more pass over data that lost workers have not used.
For the trainer, this pass is a part of its last pass.

**Steps.** `global_step` counts the progress of the job: the batches of all workers add to it. Under sync models whose
workers do not wait for each other, a worker may use more batches than others. If a worker is lost, the other workers
have larger shares. So the trainer is told the length of the whole epoch, and its pass ends when the job's epoch has
ended. The numbers of steps in `TrainingArguments` count joint batches, which consist of one batch of each worker, so
these numbers are multiplied by the number of workers. If all shares are equal, a schedule counts joint batches, so it
equals the schedule of one process that trains on the joint batch. Otherwise, a schedule counts the batches of all
workers.

**Weights.** If the loss is divided by the number of labels, this number is the weight of a push, so the weighted mean
of the workers' gradients is the gradient of the joint batch.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import numbers
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import ConfigurationError, UsageError
from ..train.collectives import barrier, is_main, reduce, update_main
from ..train.data import DistributedLoader, distribute_at
from ..train.epochs import Epochs, epochs
from ..train.generator_states import GeneratorStates, generators_lock, loader_seed
from ..train.metrics import metrics_of
from ..train.optimizer import DistributedOptimizer
from ..train.prepare import follow
from ..train.schedules import JobScheduler
from ..train.session import Session, came_late, current, resumption_of, worker_count
from ..train.tracking import track
from ..train.training import training_of
from . import broadcast, require

require("transformers", "4.57", "transformers")

import transformers  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers.trainer_callback import ExportableState, ProgressCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint, has_length  # noqa: E402

from .accelerate import AroundLoader, JobAccelerator, apart  # noqa: E402

T = TypeVar("T", bound=transformers.Trainer)

log = logging.getLogger("paceline.integrations.transformers")

SITE = "transformers"
"""Name of the place at which the training data is distributed. It is the same in all workers."""

STATE = "trainer_state.json"
"""Name of the file in a checkpoint of a trainer that contains its `TrainerState`."""

KINDS = ("logging", "eval", "save")
"""The actions that a trainer takes at regular intervals of steps."""

KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Attributes of a `TrainerState` that belong to the job."""


def distribute(trainer: T) -> T:
    """Let a trainer train in a run. Call this before `trainer.train()`, in all workers.

    This function works for `Trainer`, trl's `SFTTrainer` and `DPOTrainer`, and classes derived from them. Outside a
    run, the trainer is returned unchanged.

    In a run, the training data is divided among the workers, and `per_device_train_batch_size` is the batch size of
    each worker (with `--joint-batch`, of all workers together). The numbers of steps in `TrainingArguments` count joint
    batches. Each worker evaluates on the whole evaluation set. The metrics are the means over all workers, so all
    workers make the same decisions. The main worker writes the checkpoints, and all workers read them with
    `resume_from_checkpoint`.

    Args:
        trainer: the trainer. It is changed in place.

    Returns:
        The trainer.

    Raises:
        ConfigurationError: the trainer uses something that does not work in a run; the message says what.
        UsageError: the trainer is distributed already, or has trained.
    """
    session = current()
    if not isinstance(trainer, transformers.Trainer):
        raise UsageError(f"distribute() got a {type(trainer).__name__}, expected a transformers.Trainer.")
    if isinstance(trainer, JobTrainer):
        raise UsageError("distribute() was called twice for the same trainer. Call this function once.")
    if session is None:
        return trainer
    if trainer.state.max_steps:
        raise UsageError("distribute() was called after trainer.train(). Call this function before training.")
    if (reason := reason_against(trainer)) is not None:
        raise ConfigurationError(reason)
    job = TrainerJob(trainer, session)
    _become(trainer, JobTrainer)
    _become(trainer.accelerator, JobAccelerator)
    _become(trainer.control, JobControl)
    trainer.job = job
    # This callback comes right after the callback that sets the flow, so the user's callbacks have the last word.
    trainer.callback_handler.callbacks.insert(1, JobCallback(job))
    return trainer


def reason_against(trainer: Any) -> str | None:
    """Return why a trainer cannot train in a run, with the remedy; None if it can."""
    args, name = trainer.args, type(trainer).__name__
    ancestors = {each.__name__ for each in type(trainer).__mro__}
    if generating := sorted(ancestors & {"GRPOTrainer", "RLOOTrainer"}):
        return (
            f"{name} cannot train in a run: {generating[0]} compares the answers to one prompt with one another, but "
            "a run would divide these answers among the workers. Train with SFTTrainer or DPOTrainer, or without "
            "Paceline."
        )
    if trainer.is_fsdp_enabled or args.fsdp:
        return (
            f"{name} uses FSDP, which divides the weights among processes of its own. Omit the argument fsdp: "
            "in a run, each worker has a whole model."
        )
    if trainer.is_deepspeed_enabled:
        return (
            f"{name} uses DeepSpeed, which exchanges gradients itself. Omit the argument deepspeed: in a run, Paceline "
            "exchanges them."
        )
    if (getattr(trainer.model, "tp_size", None) or 1) > 1 or getattr(args, "parallelism_config", None):
        return (
            f"{name} uses tensor parallelism, which divides the model among processes. Load the model without tp_plan, "
            "and omit parallelism_config: in a run, each worker has a whole model."
        )
    if args.n_gpu > 1:
        return (
            f"{name} sees {args.n_gpu} GPUs, which it would use in one process. Give each worker one GPU: paceline run "
            "--devices cuda:0,cuda:1"
        )
    if args.auto_find_batch_size:
        return (
            f"{name} has auto_find_batch_size=True, which would give the workers different batch sizes. Omit this "
            "argument, or let faster workers have larger batches with paceline run --batch balanced."
        )
    if "8bit" in (optim := str(getattr(args.optim, "value", args.optim))) or "4bit" in optim:
        return (
            f"{name} has optim={optim!r}, whose state is rounded, so the servers cannot hold a part of it. Use "
            "optim='adamw_torch': in a run, the servers hold the state, not the workers' GPUs."
        )
    return None


UNTRUE = "not to be a single sample", "do not match the ones in the `trainer_state.json`"
"""Parts of the two warnings of a trainer that are not true in a run.

The first warning says that training ends after a pass without samples, but training goes on. The second warning says
that the numbers of steps in a checkpoint and in the arguments differ, but these numbers only have different units:
batches of all workers in the checkpoint, and joint batches in the arguments.
"""


def _tells(record: logging.LogRecord) -> bool:
    """Return False for a warning that is not true in a run."""
    return not any(text in record.getMessage() for text in UNTRUE)


@contextmanager
def _true_warnings() -> Iterator[None]:
    """Return a context in which trainers do not give the warnings that are not true in a run."""
    logs = [logging.getLogger(f"transformers.{name}") for name in ("trainer", "trainer_utils")]
    for each in logs:
        each.addFilter(_tells)
    try:
        yield
    finally:
        for each in logs:
            each.removeFilter(_tells)


def _evaluates_at_end(args: Any) -> bool:
    """Return True if this version of transformers always evaluates after the last step, for any `eval_steps`.

    Args:
        args: any `TrainingArguments`. They are not changed.
    """
    args = copy.copy(args)  # constructing new arguments would reset Accelerate
    args.eval_strategy, args.eval_delay = transformers.IntervalStrategy.STEPS, 0
    state = transformers.TrainerState(global_step=3, max_steps=3, logging_steps=2, eval_steps=2, save_steps=2)
    control = transformers.TrainerControl()
    transformers.DefaultFlowCallback().on_step_end(args, state, control)
    return bool(control.should_evaluate)


def _become(thing: Any, mixin: type) -> None:
    """Make an object an instance of a subclass of its own class, with the methods of a mixin before its own."""
    own = type(thing)
    thing.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__})


class JobControl:
    """A mixin for the `TrainerControl` of a trainer. It lets only the main worker save."""

    @property
    def should_save(self) -> bool:
        """True if the trainer must save now, and this worker is the one that writes."""
        return bool(self.__dict__.get("should_save")) and is_main()

    @should_save.setter
    def should_save(self, value: bool) -> None:
        self.__dict__["should_save"] = value


class JobLoader(AroundLoader):
    """The training data of a trainer, where each pass is a pass of the job. See the description of this module.

    Args:
        loader: the distributed loader.
        job: the job of the trainer.
    """

    def __init__(self, loader: DistributedLoader[Any], job: TrainerJob) -> None:
        self.loader = loader
        self._job = job
        self._epoch = 0

    def __len__(self) -> int:
        return self.loader.whole_length

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, as the trainer counts passes."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._job.make_pass(self._epoch)


class TrainerJob:
    """The connection between a trainer and the job.

    Args:
        trainer: the trainer.
        session: the session of this worker.

    Attributes:
        loader: the training data; None before training.
        optimizer: the distributed optimizer; None before training.
        steps_per_epoch: number of steps in an epoch, in the unit of `global_step`.
        epochs: number of epochs that the trainer makes.
        tokens: number of labels by which the loss of the next step is divided; None if the loss is not divided by this
            number.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self.trainer = trainer
        self.session = session
        self.loader: JobLoader | None = None
        self.optimizer: DistributedOptimizer | None = None
        self.steps_per_epoch = self.epochs = 1
        self.tokens: int | None = None
        self._trainings = 0  # number of calls of `train`
        self._losses: list[torch.Tensor] = []  # losses of the batches since the last step
        self._logged: list[torch.Tensor] = []  # losses of the steps since the trainer last logged a loss
        self._total, self._steps = 0.0, 0  # sum of the losses of all steps of this worker, and their number
        self._loop: Epochs | None = None
        self._numbers: Generator[int] | None = None  # the iterator over the loop
        self._first = 0  # first epoch of the loop, as the trainer counts epochs
        self._reached: int | None = None  # the epoch of the job; None if the loop has ended
        self._epoch = 0  # the epoch of the trainer
        self._passes_by = False  # True in a pass for an epoch that the job had already finished
        self._drew = False  # True if this pass has had a batch
        self._whole = False  # True if this pass has come to its end
        self._stops = False  # True if the trainer was told to stop before this pass
        self._resumes = False  # True if the trainer goes on from one of its own checkpoints
        self._skips = False  # True if the first pass leaves out the batches that preceded the checkpoint
        self._begin_at = 0  # number of batches that the first pass leaves out
        self._evaluations = 0  # number of evaluations that `eval_steps` has caused
        self._evaluates_at_end = _evaluates_at_end(trainer.args)
        self._before = 0  # `global_step` before the current step
        self.loads_best = False
        # a folder of links to the checkpoint from which the trainer goes on
        self._checkpoint: Path | None = None

    @property
    def dynamic(self) -> bool:
        """True if a pass may hand out each batch when a worker needs it; False if shares are equal in every pass."""
        return self.loader is not None and self.loader.loader.may_be_dynamic

    def schedule_length(self, num_training_steps: int) -> int:
        """Return the number of steps of the schedule.

        Args:
            num_training_steps: number of steps in the unit of `global_step`.
        """
        assert self.loader is not None
        args = self.trainer.args
        if self.dynamic:
            return num_training_steps
        if (steps := int(args.max_steps)) > 0:
            return steps
        return math.ceil(float(args.num_train_epochs) * self._joint_steps)

    @property
    def _joint_steps(self) -> int:
        """Number of steps in an epoch if each step uses joint batches."""
        assert self.loader is not None
        accumulated: int = self.trainer.args.gradient_accumulation_steps
        return -(-len(self.loader.loader) // accumulated)

    # -- data and epochs ----------------------------------------------------------------------------------

    def divide(self, loader: Any) -> JobLoader:
        """Divide the training data among the workers."""
        # Accelerate's own loader is not used: it loads batches before they are needed, and knows of no other workers.
        inner = getattr(loader, "base_dataloader", loader)
        distributed = distribute_at(SITE, inner)
        assert isinstance(distributed, DistributedLoader)
        self.loader = JobLoader(distributed, self)
        if not has_length(inner):
            raise ConfigurationError(
                "the training data of the trainer has no length, so it is not known how many of the trainer's "
                "steps the job has made. Use a dataset with a length."
            )
        return self.loader

    def make_pass(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of this worker in an epoch of the trainer; none if the job has finished the epoch."""
        assert self.loader is not None
        self._epoch, self._drew, self._whole = epoch, False, False
        if self._loop is None:
            self._begin(epoch)
        while self._reached is not None and self._reached < epoch:
            self._advance()
        self._passes_by = self._reached != epoch
        while self._reached == epoch:
            for batch in self.loader.loader:
                self._drew = True
                yield batch
            if epoch + 1 < self.epochs:
                break  # the trainer's actions after the pass belong to this epoch
            self._advance()  # data of lost workers may be left
        self._whole = True

    def _begin(self, epoch: int) -> None:
        assert self.loader is not None
        session, loader = self.session, self.loader.loader
        number = self._trainings
        scheduler = self.trainer.lr_scheduler
        track(**{f"trainer_{number}": _TrainerStates(self), f"scheduler_{number}": scheduler})
        self._first = epoch
        if epoch and not session.resumed and not came_late(session):
            loader.set_epoch(epoch)
        if self._begin_at:
            loader.begin_at(self._begin_at)
        if self._resumes and session.worker > 0:
            # The checkpoint has the random states of the worker that wrote it. The other workers need other states.
            with generators_lock:
                GeneratorStates.seeded(loader_seed(session, epoch)).give_back()
        self._loop = epochs(self.epochs - epoch)
        self._numbers = iter(self._loop)
        self._advance()

    def _advance(self) -> None:
        assert self._numbers is not None
        number = next(self._numbers, None)
        self._reached = None if number is None else number + self._first

    @property
    def over(self) -> bool:
        """True if the loop has ended in all workers, or must end."""
        return self._loop is not None and (self._reached is None or self._loop.over)

    # -- one call of `train` ------------------------------------------------------------------------------

    @contextmanager
    def training(self, *, resumes: bool) -> Iterator[None]:
        """Return a context in which the trainer trains.

        Args:
            resumes: True if the trainer goes on from one of its own checkpoints.
        """
        args = self.trainer.args
        own = args.ignore_data_skip, args.load_best_model_at_end
        self._resumes, self._skips = resumes, resumes and not args.ignore_data_skip
        self._trainings += 1
        self._losses, self._logged, self._total, self._steps = [], [], 0.0, 0
        self.loads_best = args.load_best_model_at_end
        args.ignore_data_skip = args.ignore_data_skip or resumes
        try:
            with _true_warnings():
                yield
            if self._loop is not None and not self.over:
                self._loop.stop()
        finally:
            args.ignore_data_skip, args.load_best_model_at_end = own
            self._checkpoint = None
            if self._numbers is not None:
                self._numbers.close()
            self._loop = self._numbers = self._reached = None

    def begin_training(self, state: Any) -> None:
        """Record the step at which the trainer begins, and translate the numbers of steps in its arguments."""
        args = self.trainer.args
        for kind in KINDS:
            if (steps := getattr(args, f"{kind}_steps")) is not None and steps >= 1:
                setattr(state, f"{kind}_steps", int(steps) * worker_count())
        if self._checkpoint is not None and not self.session.resumed:
            self._translate_schedule(state)
        self._before = state.global_step
        self._evaluations = self._due(state)
        self._begin_at = 0
        if self._skips:
            self._begin_at = state.global_step % self.steps_per_epoch * args.gradient_accumulation_steps

    @contextmanager
    def translated(self, checkpoint: Any) -> Iterator[Any]:
        """Return a context that gives a folder of links to the files of a checkpoint.

        `translate_steps` changes this folder.

        Args:
            checkpoint: the argument of `train`. If it names no checkpoint, the context gives the argument itself.
        """
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.trainer.args.output_dir) or True
        if not isinstance(checkpoint, str | os.PathLike) or not os.path.isfile(Path(checkpoint, STATE)):
            yield checkpoint
            return
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            for path in Path(checkpoint).resolve().iterdir():
                Path(folder, path.name).symlink_to(path)
            self._checkpoint = Path(folder)
            yield folder

    def translate_steps(self) -> None:
        """Let the steps of the checkpoint count batches of this run's size, before the trainer reads the checkpoint."""
        if self._checkpoint is None:
            return
        path = self._checkpoint / STATE
        state = json.loads(path.read_text())
        state["global_step"] = self._step_here(state["global_step"], state["epoch"])
        path.unlink()  # a link to the file of the checkpoint
        path.write_text(json.dumps(state))

    def _step_here(self, step: int, epoch: float) -> int:
        """Return the step of this run that corresponds to a step of an earlier run, which may have had batches of
        another size.
        """
        there = step / epoch if epoch else self.steps_per_epoch
        # With another number of workers, an epoch may have up to one joint batch more, although all batches have the
        # same size.
        is_same = abs(there - self.steps_per_epoch) <= max(worker_count(), 0.1 * there)
        return step if is_same else int(epoch * self.steps_per_epoch + 1e-6)

    def go_on(self) -> None:
        """Go on from the state of the trainer that was restored, in a resumed run or in a worker that joins late."""
        state = self.trainer.state
        state.global_step = self._before = self._step_here(state.global_step, state.epoch or 0.0)
        self._evaluations = self._due(state)

    def _translate_schedule(self, state: Any) -> None:
        """If the checkpoint was written with another number of workers, let the schedule begin where the trainer goes
        on.

        Raises:
            ConfigurationError: a scheduler of this class cannot begin at another step.
        """
        scheduler = self.trainer.lr_scheduler
        step = state.epoch * (self.steps_per_epoch if self.dynamic else self._joint_steps)
        tolerance = worker_count() if self.dynamic else 1
        if isinstance(scheduler, JobScheduler) and abs(scheduler.last_epoch - step) > tolerance:
            scheduler.begin_at(round(step))

    def begin_epoch(self, control: Any) -> None:
        # After training, `load_best` loads the best model in all workers.
        self.trainer.args.load_best_model_at_end = False
        self._stops = control.should_training_stop

    def add_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of a batch."""
        self._losses.append(loss.detach())

    def begin_step(self) -> None:
        """Set the weight and the loss of the next push."""
        loss = torch.stack(self._losses).sum() if self._losses else None
        self._losses = []
        if resumption_of(self.session).repeats:
            return
        if self.tokens is not None:
            data = self.session.core.data
            data.weight, data.used = float(self.tokens), True
        if loss is not None:
            self._logged.append(loss)
            metrics_of(self.session).add(self.session, {"loss": loss})

    def end_step(self, state: Any) -> None:
        """Set `global_step` to the progress of the job, minus 1, because the trainer adds 1."""
        self._before = state.global_step
        state.global_step = max(state.global_step, self._progress() - 1)

    def _progress(self) -> int:
        """Return the number of steps that the job has begun."""
        assert self.loader is not None
        accumulated: int = self.trainer.args.gradient_accumulation_steps
        return self._epoch * self.steps_per_epoch + -(-self.loader.loader.begun // accumulated)

    def _due(self, state: Any) -> int:
        """Return how many evaluations `eval_steps` should have caused so far in the job."""
        args = self.trainer.args
        if args.eval_strategy != "steps" or not state.eval_steps:
            return 0
        if state.global_step < args.eval_delay * worker_count():
            return 0
        # Another worker may make the last step of an epoch, so each worker regards the end of its pass as the end of
        # the epoch. The last step of a worker may be later than `max_steps`, because other workers have begun steps
        # meanwhile.
        step = min(state.global_step, state.max_steps)
        ended = step == state.max_steps and (self._whole or args.max_steps > 0)
        rest = step % state.eval_steps > 0
        return int(step // state.eval_steps + (ended and rest and self._evaluates_at_end))

    def set_flow(self, state: Any, control: Any) -> None:
        """Decide what the trainer does after a step. `global_step` may have skipped a multiple of `save_steps`."""
        args, before, now = self.trainer.args, self._before, state.global_step
        self.set_main(state)
        state.epoch = min(now / self.steps_per_epoch, self._epoch + 1.0)
        if args.max_steps <= 0 and now >= state.max_steps and not self._whole:
            # The pass ends by itself, when nothing is left of the epoch. The trainer saves when it stops.
            control.should_training_stop = False
            control.should_save &= args.save_strategy != "steps"
        for kind, strategy in (("log", args.logging_strategy), ("save", args.save_strategy)):
            every = state.logging_steps if kind == "log" else state.save_steps
            if strategy == "steps" and every > 0 and now // every > before // every:
                setattr(control, f"should_{kind}", True)
        if args.eval_strategy == "steps":
            control.should_evaluate = self._due(state) > self._evaluations

    def end_epoch(self, state: Any, control: Any) -> None:
        """Decide what the trainer does after an epoch."""
        args = self.trainer.args
        self.set_main(state)
        if not self._drew:
            control.should_training_stop = self._stops
        ended_by_others = self._loop is not None and self._loop.over
        if self._drew and not ended_by_others:
            self._step_with_rest()
        if self._whole:
            self._before = state.global_step
            state.global_step = max(state.global_step, (self._epoch + 1) * self.steps_per_epoch)
            state.epoch = self._epoch + 1.0
        if self._passes_by or ended_by_others:
            control.should_log = control.should_evaluate = control.should_save = False
            control.should_training_stop = (
                control.should_training_stop or ended_by_others or self._reached is None
            )
            self._evaluations = self._due(state)
        elif self._whole:
            self.set_flow(state, control)
            if args.save_strategy == "steps" and state.global_step >= state.max_steps:
                control.should_save = True

    def _step_with_rest(self) -> None:
        """Make a step with the gradients that are left at the end of an epoch, as a single process does."""
        trainer = self.trainer
        if not trainer.accelerator.has_rest:
            return
        self.begin_step()
        trainer.accelerator.step_with_rest()
        if not _is_stepped_by_metric(trainer.lr_scheduler):
            trainer.lr_scheduler.step()
        trainer.state.global_step += 1

    def set_main(self, state: Any) -> None:
        """Let `is_main` and the callbacks know which worker is the main worker now."""
        update_main(self.session)
        main = is_main()
        if main and not state.is_world_process_zero:
            for callback in self.trainer.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback):
                    state.is_world_process_zero = True
                    callback.on_train_begin(self.trainer.args, state, self.trainer.control)
        state.is_world_process_zero = state.is_local_process_zero = main

    def reduce_metrics(self, metrics: dict[str, Any]) -> None:
        """Replace the metrics of an evaluation by the means over all workers."""
        if self._loop is None:
            return
        own = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, numbers.Real) and not isinstance(value, bool)
        }
        # A worker that has passed several multiples of `eval_steps` in one step takes part in each of the evaluations.
        due = self._due(self.trainer.state)
        for _ in range(max(due - self._evaluations, 1)):
            found = reduce(own)
        metrics.update(found)
        self._evaluations = max(due, self._evaluations)

    def correct_logs(self, logs: dict[str, Any]) -> None:
        """Correct losses that were divided by the number of the job's steps: this worker has made fewer steps."""
        if "loss" in logs and self._logged:
            total = float(torch.stack(self._logged).sum())
            logs["loss"] = total / len(self._logged)
            self._keep_losses()
        if "train_loss" in logs:
            self._keep_losses()
            if self._steps:
                logs["train_loss"] = self._total / self._steps

    def end_training(self, logs: dict[str, Any]) -> None:
        """When the trainer logs its time, after its last step, let only the main worker remove checkpoints.

        After this log, the trainer removes all checkpoints except the best one if `save_total_limit` is 1. Only the
        main worker, which has written the checkpoints, knows the best one.
        """
        if "train_runtime" in logs and not is_main():
            self.trainer.state.best_model_checkpoint = None

    def _keep_losses(self) -> None:
        self._total += float(torch.stack(self._logged).sum()) if self._logged else 0.0
        self._steps += len(self._logged)
        self._logged = []

    def load_best(self) -> None:
        """Load the best model of all checkpoints into the model of the job."""
        state, model = self.trainer.state, self.trainer.model
        # The main worker, which has written the checkpoint, knows where the checkpoint is.
        path = broadcast(self._best_checkpoint(), sends=is_main())
        if path is None:
            if is_main() and state.best_global_step:
                log.warning(
                    "The best checkpoint, of step %d, is not visible to this worker.", state.best_global_step
                )
            return
        assert self.optimizer is not None
        with self.optimizer.editing():
            if os.path.isdir(path):
                _load(model, path)
                state.best_model_checkpoint = path
            else:
                log.warning("The best checkpoint %s is not visible to this worker.", path)
        # One worker sends the edit. Without the barrier, other workers might go on before the edit has arrived.
        barrier()
        training = training_of(self.session)
        if training is not None:  # a worker that joined after the last batch has not trained
            training.refresh()

    def _best_checkpoint(self) -> str | None:
        """Return the path of the best checkpoint; None if this worker finds none."""
        state = self.trainer.state
        known = os.path.join(self.trainer.args.output_dir, f"checkpoint-{state.best_global_step}")
        # Before the run was resumed, the checkpoints may have been written elsewhere.
        return next(
            (path for path in (known, state.best_model_checkpoint) if path and os.path.isdir(path)), None
        )


def _load(model: Any, path: str) -> None:
    """Load the weights of a checkpoint of a trainer into its model."""
    if hasattr(model, "load_adapter") and hasattr(model, "active_adapter"):
        training = model.training
        model.load_adapter(path, model.active_adapter)
        model.train(training)
    elif isinstance(model, transformers.PreTrainedModel):
        model.load_state_dict(type(model).from_pretrained(path).state_dict(), strict=False)
    elif os.path.isfile(safe := os.path.join(path, "model.safetensors")):
        from safetensors.torch import load_file

        model.load_state_dict(load_file(safe), strict=False)
    else:  # the trainer has `save_safetensors=False`
        state = torch.load(os.path.join(path, "pytorch_model.bin"), map_location="cpu", weights_only=True)
        model.load_state_dict(state, strict=False)


def _is_stepped_by_metric(scheduler: object) -> bool:
    """Return True if a trainer steps a schedule after an evaluation. Such a schedule is recognized by its class."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


class _TrainerStates:
    """The state of a trainer that belongs to the job: its `TrainerState`, and the states of its callbacks."""

    def __init__(self, job: TrainerJob) -> None:
        self._job = job

    def state_dict(self) -> dict[str, str]:
        kept = {name: value for name, value in asdict(self._job.trainer.state).items() if name in KEPT}
        callbacks = [each.state() for each in self._callbacks()]
        return {"trainer": json.dumps({"state": kept, "callbacks": callbacks})}

    def load_state_dict(self, state: dict[str, str]) -> None:
        held = json.loads(state["trainer"])
        for name, value in held["state"].items():
            setattr(self._job.trainer.state, name, value)
        for callback, known in zip(self._callbacks(), held["callbacks"], strict=False):
            for name, value in known["attributes"].items():
                setattr(callback, name, value)
        self._job.go_on()

    def _callbacks(self) -> list[Any]:
        callbacks = self._job.trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


class JobCallback(transformers.TrainerCallback):
    """Tells the job of a trainer what the trainer does."""

    def __init__(self, job: TrainerJob) -> None:
        self._job = job

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._job.begin_training(state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._job.begin_epoch(control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._job.begin_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._job.end_step(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._job.set_flow(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._job.end_epoch(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and is_main():  # the loss of each step is logged by all workers
            session = self._job.session
            metrics_of(session).add_legal(
                session, {key: logs[key] for key in logs if key not in ("loss", "epoch")}
            )


class JobTrainer:
    """A mixin for the class of a trainer. The mixin overrides public methods only.

    Attributes:
        job: the connection between the trainer and the job.
    """

    job: TrainerJob

    def get_train_dataloader(self) -> Any:
        trainer: Any = self
        config = trainer.accelerator.dataloader_config
        if config.data_seed is None:
            # Otherwise, the data seed would be that of torch's generator, which differs between the workers.
            config.data_seed = trainer.args.seed
        return self.job.divide(super().get_train_dataloader())  # type: ignore[misc]

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        trainer: Any = self
        optimizer = super().create_optimizer(*arguments, **options)  # type: ignore[misc]
        if not isinstance(optimizer, DistributedOptimizer | AcceleratedOptimizer):
            optimizer = trainer.optimizer = DistributedOptimizer(optimizer, model=trainer.model)
        if isinstance(optimizer, DistributedOptimizer):
            self.job.optimizer = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, *arguments: Any, **options: Any) -> Any:
        trainer: Any = self
        job, args, own = self.job, trainer.args, trainer.args.warmup_steps
        if own >= 1 and job.dynamic:
            args.warmup_steps = own * worker_count()
        try:
            steps = job.schedule_length(num_training_steps)
            scheduler = super().create_scheduler(steps, *arguments, **options)  # type: ignore[misc]
        finally:
            args.warmup_steps = own
        if not _is_stepped_by_metric(scheduler) and not isinstance(scheduler, JobScheduler):
            assert job.optimizer is not None
            assert job.loader is not None
            loader = job.loader.loader
            length = loader.whole_length if job.dynamic else len(loader)
            trainer.lr_scheduler = follow(scheduler, job.optimizer, loader, length, joint=not job.dynamic)
        return trainer.lr_scheduler

    def set_initial_training_values(self, args: Any, dataloader: Any, *arguments: Any) -> Any:
        if args.max_steps > 0:
            args = copy.copy(args)
            args.max_steps *= worker_count()
        values = super().set_initial_training_values(args, dataloader, *arguments)  # type: ignore[misc]
        self.job.epochs, self.job.steps_per_epoch = values[:2]
        if args.max_steps > 0 and self.job.loader is not None and self.job.loader.loader.divides:
            # The trainer has counted a joint batch of samples in each step, but a step uses the batch of one worker.
            values = *values[:3], values[3] // worker_count(), *values[4:]
        self.job.translate_steps()
        return values

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *arguments: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, *arguments)  # type: ignore[misc]
        if batches:
            self.job.tokens = None if items is None else int(items)
        # A batch without labels has no weight. The loss of such a batch must still be a number.
        return batches, 1 if items is not None and not self.job.tokens else items

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)  # type: ignore[misc]
        self.job.add_loss(loss)
        return loss

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        output = super().evaluation_loop(*arguments, **options)  # type: ignore[misc]
        if output.metrics:
            self.job.reduce_metrics(output.metrics)
        return output

    def log(self, logs: dict[str, Any], *arguments: Any, **options: Any) -> None:
        self.job.correct_logs(logs)
        self.job.end_training(logs)
        super().log(logs, *arguments, **options)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        trainer: Any = self
        resumes = resume_from_checkpoint not in (None, False)
        with self.job.training(resumes=resumes), self.job.translated(resume_from_checkpoint) as checkpoint:
            output = super().train(checkpoint, *arguments, **options)  # type: ignore[misc]
        if self.job.loads_best:
            self.job.load_best()
        loss = output.metrics.get("train_loss", math.nan)
        return output._replace(global_step=trainer.state.global_step, training_loss=loss)

    def is_world_process_zero(self) -> bool:
        """True in the main worker, which writes for all workers. See `paceline.is_main`."""
        return is_main()

    is_local_process_zero = is_world_process_zero

    def save_model(self, *arguments: Any, **options: Any) -> None:
        trainer: Any = self
        if not is_main():
            return
        with apart(trainer.model):
            super().save_model(*arguments, **options)  # type: ignore[misc]

    def push_to_hub(self, *arguments: Any, **options: Any) -> Any:
        return super().push_to_hub(*arguments, **options) if is_main() else None  # type: ignore[misc]

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        if is_main():
            super().create_model_card(*arguments, **options)  # type: ignore[misc]

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        raise UsageError(
            "hyperparameter_search() was called in a run: it trains many models one after another, each with other "
            "settings. Start one run for each model, for example by paceline study."
        )
