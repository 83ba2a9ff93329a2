"""`DistributedOptimizer`, which wraps an existing optimizer for data-parallel training.

`DistributedOptimizer` is a subclass of `torch.optim.Optimizer` that shares the wrapped optimizer's parameter groups,
so code that works on parameter groups, such as learning-rate schedulers, needs no change. In a run, `step()` pushes
the gradients to the servers and pulls the new weights. Each server runs the wrapped optimizer's class with the same
hyper-parameters on its slice of the parameters. Outside a run, `step()` only calls the wrapped optimizer.
"""

from __future__ import annotations

import gc
import logging
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ..core.joint_batch import clip_factor
from ..core.layout import OptimizerSpec
from ..core.requests import COORDINATOR, Send
from ..errors import UsageError
from ..shard.foreign import has_modes
from ..shard.lars import LARS
from ..shard.optimizers import ServerOptimizer, read_groups, server_optimizer
from ..sync.events import MOST_NORM, MOST_WEIGHT, Clip
from .forward import can_compute_gradients, hidden_from_modes, may_look, untraced
from .gradients import OverflowWatch, lent_scaling, require_not_capturing, scales_of, scaling_of, unscale
from .hooks import before_each_forward, gradient_norm
from .job_model import (
    ParameterSet,
    any_empty_buffer,
    any_lazy,
    find_model,
    initialize,
    require_initialized,
    require_not_wrapped,
)
from .loops import count_step
from .metrics import metrics_of
from .schedules import Marks, ScheduleWatch
from .session import (
    Session,
    add_untrained,
    are_trained,
    current,
    hold_job_model,
    job_state,
    resumption_of,
    untrained,
)
from .training import WorkerTraining, training_of
from .worker_state import after_step, begin_resumed, restore, state_now

log = logging.getLogger("paceline.train.optimizer")

Loss = TypeVar("Loss")


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a PyTorch optimizer for data-parallel training with parameter servers.

    In a worker of a run, the first forward pass with gradients enabled registers the model and copies worker 0's
    weights into it, so workers may start with different weights. If a script computes its first gradient without
    calling a module that holds one of the parameters, the model is registered at the first `step()`. This step then
    drops the gradient of each worker whose weights differed from worker 0's. Each step pushes the worker's gradients to
    the servers and pulls the new weights; the run's synchronization model decides when pushes are applied and pulls are
    answered. After that first forward pass, weights may change only inside `step()`. Outside a run, this class behaves
    exactly like the wrapped optimizer.

    A script may wrap several optimizers, for example for a GAN, in the same order in all workers. The optimizers must
    train different parameters. Each step of any optimizer is one iteration, and changes only the parameters of this
    optimizer. An optimizer may also be created after training has begun, for example for the next fold of a
    cross-validation, and `add_param_group` may add parameters. At the first forward pass or step that uses the new
    parameters, each worker waits until all live workers have added the same parameters, and receives the initial
    weights of the live worker with the lowest index. If a later optimizer trains parameters of one earlier optimizer,
    the later optimizer takes them over, and the state of the earlier optimizer is dropped.

    This class shares the wrapped optimizer's `param_groups` and sends their hyper-parameters with every push, so
    learning-rate schedulers need no change. Do not call the wrapped optimizer's own `step()`.

    Args:
        optimizer: the optimizer to wrap. In a run, it must update each element or each tensor independently: SGD,
            Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, Muon or Adafactor of
            `torch.optim`, `paceline.LARS`, or any other class that passes a short test (see
            `paceline.register_elementwise` and `paceline.register_tensorwise`). Outside a run, any optimizer works.
        model: the module to train, or several modules that hold the optimizer's parameters together. Default: the
            outermost module that holds all of these parameters. Required if there is no such module, or more than one.

    Raises:
        ConfigurationError: in a run, the servers cannot run the optimizer; the message says why.
        UsageError: `optimizer` is a `DistributedOptimizer`, or is not a `torch.optim.Optimizer`.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()  # outside a run, as in this example, the same as SGD's own step()
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, model: nn.Module | Sequence[nn.Module] | None = None
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("The optimizer is already a DistributedOptimizer; wrap the original optimizer.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"DistributedOptimizer got a {type(optimizer).__name__}, expected a torch.optim.Optimizer. If it is "
                "built around an optimizer, wrap the inner optimizer, or use a class without an inner optimizer, such "
                "as AdamWScheduleFree instead of ScheduleFreeWrapper."
            )
        session = current()
        # the class that the servers run; outside a run, any optimizer will do
        self._kind = server_optimizer(optimizer) if session is not None else ServerOptimizer("")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapped = optimizer
        self._share_groups()
        # the modules to train, if they are given
        self._given = (model,) if isinstance(model, nn.Module) else tuple(model or ())
        # while training begins: the modules that were found, kept because the search looks at all existing objects,
        # which takes long
        self._found: tuple[nn.Module, ...] = ()
        self._session = session
        self._training: WorkerTraining | None = None  # created by the first forward pass of a run
        # How the gradient of the next step is clipped: a list of at most one entry. The list is changed in place,
        # because Lightning and Fabric wrap an optimizer in an object that reads the optimizer's attributes, but an
        # assignment to the object does not reach the optimizer.
        self._clip: list[Clip] = []
        self.schedule_watch = ScheduleWatch(session) if session is not None else None
        self._overflow_watch = OverflowWatch(session) if session is not None else None
        self.marks = Marks(session) if session is not None and session.workers > 1 else None
        self._set_index = 0  # index of this optimizer among those of the script
        self._evaluates = False  # True if the script has last called `eval()`, not `train()`
        # True if an autograd graph may hold initial weights of a model whose shapes are not all known. These weights
        # must not change before the step.
        self._begins_at_step = False
        self._takes_step = False  # True while `step` begins to train the parameters
        # If training begins at the step: copies of the buffers from before the first forward pass, by `id`
        self._first_buffers: dict[int, torch.Tensor] = {}
        # notices the first forward pass with parameters that are not trained yet; None if there are none
        self._forward_hook: RemovableHandle | None = None
        if session is not None:
            # The wrapped optimizer takes no step in a run, so the hooks that are registered on it run here.
            self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
            self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
            # A scheduler that was created for the wrapped optimizer or for this one warns if it is stepped before its
            # optimizer. The wrapped optimizer takes no step in a run, and a worker may have no batch in an epoch. So
            # both optimizers are marked as stepped.
            optimizer._opt_called = self._opt_called = True  # type: ignore[attr-defined]
            require_not_wrapped(self._given, self._parameters())
            self._wait_for_forward(session)

    @overload
    def step(
        self, closure: None = None, *, samples: int | None = None, weight: float | None = None
    ) -> None: ...

    @overload
    def step(
        self, closure: Callable[[], Loss], *, samples: int | None = None, weight: float | None = None
    ) -> Loss: ...

    @untraced
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        samples: int | None = None,
        weight: float | None = None,
    ) -> Any:
        """Perform one iteration: push the gradients and pull the new weights.

        Args:
            closure: a function that clears the gradients, computes the loss, calls `backward()` and returns the
                loss. SpecSync can abort and restart a computation only if it runs in a closure. Without a closure,
                the current gradients of the parameters are pushed.
            samples: number of samples from which the gradient was computed. Default: the number of samples that have
                been drawn from the distributed loader since the last step, except samples from which no gradient was
                computed. If no samples have been drawn and the script has several optimizers, the default is the number
                of samples of the step before, and these samples are not counted twice.
            weight: weight of the gradient when pushes are averaged. Default: `samples`. If the loss is a mean over
                something else, such as tokens, give their number; if the loss is a sum, give 1. Outside a run, the
                weight has no effect.

        Returns:
            The result of the closure; None if there is no closure. If the result is a number or a tensor of one
            element, it is logged as the loss, unless the script logs a loss itself (see `paceline.log`).

        Raises:
            ConfigurationError: the model or its parameters are not supported. Only the first forward pass or step
                with new parameters raises this error.
            NonFiniteGradientError: a gradient contains NaN or inf, and the run does not skip such gradients. Nothing
                was pushed.
            WeightsChangedError: weights have been edited or moved since the last step.
            UsageError: the groups were replaced, or no longer hold the same parameters as when training began, or
                `samples` is not a positive integer, or `weight` is not a number >= 0, or a `GradScaler` has passed a
                closure, or a graph of the accelerator's operations is being captured.
        """
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
            raise UsageError(
                f"samples is {samples!r}, expected a positive integer: the number of samples in the step."
            )
        if weight is not None:
            _require_limit("weight", weight, MOST_WEIGHT)
        session = self._session
        if session is None:
            with lent_scaling(self, self._wrapped):
                result = self._wrapped.step() if closure is None else self._wrapped.step(closure)
            count_step(None, samples)
            return result
        if self.param_groups is not self._wrapped.param_groups:
            raise UsageError(
                "The parameter groups of the wrapped optimizer were replaced, for example by its load_state_dict(). "
                "Call load_state_dict() on the DistributedOptimizer instead."
            )
        require_not_capturing("step() was called")
        scaling = scaling_of(self)
        if scaling is not None and closure is not None:
            raise UsageError(
                "scaler.step(optimizer, closure) was called, but a GradScaler looks for overflows before the closure "
                "runs. Compute the gradients first, and call scaler.step(optimizer)."
            )
        data = session.core.data
        if samples is not None:
            data.samples, data.used = samples, True
        if weight is not None:
            data.weight, data.used = float(weight), True
        loss: Any = None
        # True if the gradients were computed before training began, or without a closure
        computed = closure is None
        if self._training is None or self._forward_hook is not None:
            if closure is not None and any_lazy(self._new_parameters()):
                initialize(self.models(), closure)
            elif closure is not None and self._awaits_shapes():
                # Run the whole closure: only then do buffers have the same content as in a single process.
                with torch.enable_grad(), metrics_of(session).closure():
                    loss = closure()
                computed = True
            require_initialized(self.models(), self._new_parameters())
            self._takes_step = True
            try:
                _begin(session)
            finally:
                self._takes_step = False
        assert self._training is not None
        self._require_current("step()")
        self._training.require_not_idle("step()")
        self._training.require_training_mode(self._set_index, "step()")
        self._training.require_same(self._set_index, self._parameters())
        if (resumption := resumption_of(session)).repeats:
            resumption.steps += 1
            self._clip.clear()
            if closure is not None and not computed:
                with torch.enable_grad():
                    loss = closure()
            return loss
        if closure is None:
            self._training.computed_without_closure()
        elif computed:
            self._training.computed()
        else:
            with torch.enable_grad():
                loss = self._training.compute(closure)
        groups = read_groups(self._wrapped)
        if self.schedule_watch is not None:
            self.schedule_watch.look(groups)
        if self.marks is not None and (report := self.marks.look(self._set_index, groups)) is not None:
            sent = Send(COORDINATOR, report)
            session.exchange(lambda: [sent])
        clip = self._clip.pop() if self._clip else None
        overflows = scaling is not None and scaling.overflows
        if scaling is not None and self._overflow_watch is not None:
            self._overflow_watch.look(overflows=overflows)
        if scaling is not None and not overflows:
            unscale(self._parameters(), scaling.scale)
            if clip is not None:  # the gradient may have been scaled when its norm was computed
                clip = _clip_to(clip.max_norm, gradient_norm(self._parameters()))
        # A closure that ran after training had begun has computed new gradients.
        stale = self._set_index in self._training.stale and computed
        if stale:
            log.warning(
                "worker %d: the first gradient is discarded, because it was computed before training began, with "
                "other weights than those of the job. To keep it, compute the loss by calling the model, or pass a "
                "closure to step().",
                session.worker,
            )
        count_step(session, data.samples)
        self._training.stale.discard(self._set_index)
        self._training.commit(
            self._set_index,
            groups,
            result=_as_number(loss),
            has_closure=closure is not None,
            leave_out_gradient=stale or overflows,
            clip=clip,
        )
        after_step(session)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters of this optimizer, as the wrapped optimizer's own method does.

        Args:
            set_to_none: True to remove the gradients, False to fill them with zeros.
        """
        super().zero_grad(set_to_none)
        if not set_to_none and self._session is not None:
            self._session.core.data.drop()  # removed gradients are noticed when new gradients are accumulated

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Limit the norm of the gradient that the next step applies, over all parameters of this optimizer.

        Call this method between `backward()` and `step()`, or in the closure of `step()`, after `backward()`. In a
        run, each worker sees only its own gradient, but the servers may apply the mean of several gradients. This
        method clips the gradient that is applied: the mean if the synchronization model averages, else the worker's
        gradient. So under BSP, a run with clipping equals a single process on the joint batch.
        `torch.nn.utils.clip_grad_norm_` would clip each worker's gradient before the mean is computed, which gives
        another result. Outside a run, this method and torch's function do the same.

        If the loss is scaled by a `GradScaler`, call `scaler.unscale_(optimizer)` first, as for torch's own function.
        In a run, this call is not necessary, because the method knows the scale.

        The method does not change `p.grad` in a run. If it is called several times before a step, the smallest
        `max_norm` counts; if workers pass different values, the value of the most advanced worker counts. `LARS`
        scales gradients before they are averaged, so with `LARS`, each worker's gradient is clipped.

        Args:
            max_norm: largest L2 norm; a number >= 0. If it is infinity, the method only computes the norm.

        Returns:
            The L2 norm of this worker's own gradient.

        Raises:
            SyncRefusedError: under the run's synchronization model, shards may average different gradients, so the
                norm of their mean is not known.
            UsageError: `max_norm` is not a number >= 0.

        Example:
            >>> import paceline, torch
            >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
            >>> optimizer = paceline.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
            >>> weight.square().sum().backward()
            >>> optimizer.clip_grad_norm(1.0)  # the gradient is [6, 8]
            tensor(10.)
            >>> optimizer.step()
            >>> [round(number, 4) for number in weight.tolist()]
            [2.4, 3.2]
        """
        _require_limit("max_norm", max_norm)
        parameters = self._parameters()
        if self._session is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self._session.core.require_clippable()
        norm = gradient_norm(parameters) / scales_of(self._session).of(parameters)
        largest = min(float(max_norm), *(clip.max_norm for clip in self._clip), math.inf)
        if largest <= MOST_NORM:
            self._clip[:] = [_clip_to(largest, norm)]
        return torch.tensor(norm)

    def clip_grad_value(self, clip_value: float) -> None:
        """Clamp each element of this worker's own gradients to [-clip_value, clip_value], in place.

        This is `torch.nn.utils.clip_grad_value_` over all parameters of this optimizer. In a run, each worker clamps
        its gradients before the servers average them, which differs from clamping their mean.

        Args:
            clip_value: largest absolute value of an element.

        Raises:
            UsageError: `clip_value` is not a number >= 0.
        """
        _require_limit("clip_value", clip_value)
        parameters = self._parameters()
        scale = 1.0 if self._session is None else scales_of(self._session).of(parameters)
        torch.nn.utils.clip_grad_value_(parameters, scale * clip_value)

    def editing(self, *, private: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the weights may be edited between two steps.

        All workers run the block. The edit of one worker takes effect in all workers: at the end of the block, the
        values that this worker has changed replace the values at the servers, and every worker continues with the
        result. A value that is equal before and after the block does not count as changed. The optimizer's state, such
        as momentum, is kept.

        An edit counts as an iteration, but not as an update. If the sync model keeps all workers in lockstep, as `bsp`
        does, all workers see the edit after the same iteration, and the edit is that of the worker with the lowest
        index. Under other models, the edit is that of the worker that enters the block first. While this worker is
        inside the block, updates by other workers are lost for the parameters that the block changes. Other workers may
        compute a few more gradients with the weights from before the edit. If the block raises an exception, the edit
        is undone.

        With `private=True`, the edit takes effect in this worker alone, and the weights are restored at the end of the
        block. Use such a block to compute a gradient at other weights than those of the step, as in sharpness-aware
        minimization, or to evaluate averaged weights. Only the workers that need the block run it.

        If `private` is False, the context has no effect outside a run and before training has begun. If `private` is
        True, the context restores the weights of this optimizer outside a run as well. In a run, training begins with a
        private block if it has not begun before.

        Args:
            private: True for an edit that is undone at the end of the block.

        Raises:
            UsageError: `step()`, `evaluating()` or `editing()` was called inside the block.
            WeightsChangedError: weights were changed before the block, or the block has changed a shape or a dtype.

        Example:
            >>> import paceline, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> with optimizer.editing(), torch.no_grad():  # clip the weights, as a Wasserstein GAN does
            ...     for parameter in model.parameters():
            ...         _ = parameter.clamp_(-0.01, 0.01)
        """
        self._require_current("editing()")
        # The parameters of this optimizer may be trained already, by an optimizer that this one replaces.
        training = training_of(self._session)
        if private:
            if self._session is not None and self._forward_hook is not None and not self._awaits_shapes():
                # The first gradient may be computed inside the block, and training must not begin with the block's
                # weights.
                if training is not None:
                    training.require_not_idle("editing(private=True)")
                _begin(self._session)
                training = training_of(self._session)
            return training.editing_privately() if training is not None else _restoring(self._parameters())
        return training.editing() if training is not None else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in the format of the wrapped optimizer's own `state_dict()`.

        In a run, the state is fetched from the servers. It is the state for the mode, training or evaluation, that the
        optimizer has in this worker.
        """
        self._require_current("state_dict()")
        own = self._wrapped.state_dict()
        found = None
        if self._training is not None:
            found = self._training.fetch_state(self._set_index)
        elif self._session is not None:
            found = job_state(self._session, self)
        if found is not None:
            own["state"], counters = found
            for group, counted in zip(own["param_groups"], counters, strict=False):
                group.update(counted)
        return own if self._training is None else self._training.state_in_mode(self._set_index, own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer state that `state_dict()` has returned.

        In a run, call this in every worker before the first forward pass. In that pass, worker 0's state is sent to
        the servers.

        Args:
            state_dict: a state from this optimizer's or the wrapped optimizer's `state_dict()`.

        Raises:
            UsageError: training has begun.
        """
        self._require_not_begun("load_state_dict()")
        self._wrapped.load_state_dict(state_dict)
        self._share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. After training has begun, all workers must add the same groups.

        See the description of the class: the training of the parameters begins with the first forward pass or step that
        uses them.

        Args:
            param_group: dict with the parameters (key `"params"`) and hyper-parameters that differ from the defaults.
        """
        if "_wrapped" not in self.__dict__:  # torch's constructor calls this method for each group
            super().add_param_group(param_group)
            return
        self._require_current("add_param_group()")
        self._wrapped.add_param_group(param_group)
        if self._training is not None and self._forward_hook is None and self._session is not None:
            self._wait_for_forward(self._session)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no session, so the copy trains alone.
        return {**super().__getstate__(), "_wrapped": self._wrapped, "_session": None, "_training": None}

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped optimizer that this class does not have.

        A method can be called only outside a run: in a run, the servers hold the optimizer's state, so the method would
        change only this worker's weights, or a state that is not used. If the class has both `train` and `eval`, as
        schedule-free optimizers do, these two methods may also be called in a run. `eval()` sets the model in this
        worker to the weights that the class's own `eval()` gives with the current weights and state of the servers.
        `train()` sets the model to the weights of the last step again. Between the two calls, `step()` and `editing()`
        raise an error.
        """
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(wrapped, name)
        if self._session is None or not callable(value):
            return value
        if name in ("train", "eval") and has_modes(type(wrapped)):
            return partial(self._set_mode, evaluates=name == "eval")

        def refuse(*arguments: object, **options: object) -> None:
            raise UsageError(
                f"{type(wrapped).__name__}.{name}() cannot be called in a run: the servers hold the optimizer's "
                "state, so the call would affect only this worker."
            )

        return refuse

    def _set_mode(self, *, evaluates: bool) -> None:
        """Set the parameters to the weights for evaluation, or to the weights in training."""
        self._require_current("eval()" if evaluates else "train()")
        wrapped: Any = self._wrapped
        if self._training is None:
            wrapped.eval() if evaluates else wrapped.train()
        elif evaluates:
            self._training.evaluate(self._set_index)
        else:
            self._training.train(self._set_index)
        self._evaluates = evaluates

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if a `GradScaler` may call `step()` with scaled gradients. See `gradients.py`."""
        return self._session is not None or getattr(self._wrapped, "_step_supports_amp_scaling", False)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _share_groups(self) -> None:
        self.param_groups = self._wrapped.param_groups
        self.state = self._wrapped.state

    def _require_not_begun(self, call: str) -> None:
        if self._training is not None:
            raise UsageError(
                f"{call} must be called before the first forward pass with gradients enabled: since that pass, the "
                "servers hold the optimizer's state."
            )

    def _require_current(self, call: str) -> None:
        """Raise `UsageError` if another optimizer has taken over the parameters."""
        training = self._training
        if training is not None and training.sets[self._set_index].owner is not self._wrapped:
            raise UsageError(
                f"{call} was called, but another DistributedOptimizer that was created later has taken over this "
                "optimizer's parameters, and the state of this optimizer has been dropped. Use the later optimizer, or "
                "give the optimizers different parameters."
            )

    def _wait_for_forward(self, session: Session) -> None:
        """Begin to train this optimizer's parameters in the first forward pass that may compute their gradients."""
        add_untrained(session, self)
        self._forward_hook = before_each_forward(session, self._before_forward)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        """Begin to train the parameters that are not trained yet, if the module may compute gradients of them."""
        session = self._session
        assert session is not None
        if self._forward_hook is None:
            return
        if (training := training_of(session)) is not None and training.is_idle:
            return  # the script evaluates; the step that follows begins to train the parameters
        if can_compute_gradients(session, module, self._new_parameters()):
            if self._begins_at_step:
                return
            self._found = self.models()
            try:
                if self._awaits_shapes():
                    self._begins_at_step = True
                    buffers = [each for model in self._found for each in model.buffers() if not is_lazy(each)]
                    self._first_buffers = {id(buffer): buffer.clone() for buffer in buffers}
                else:
                    with hidden_from_modes():
                        _begin(session)
            finally:
                self._found = ()
        elif training is None and may_look(session, module, self._parameters()):
            with hidden_from_modes():
                hold_job_model(session)
        elif training is not None and can_compute_gradients(session, module, training.parameters):
            training.graph_begun = True

    def parameter_set(self) -> ParameterSet:
        parameters = self._parameters()
        require_not_wrapped(self._given, parameters)
        # `tuple` of a generator fails if another thread takes a reference to the unfinished tuple (`find_model`).
        group_of = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        return ParameterSet(
            self.models(),
            parameters,
            OptimizerSpec(
                self._kind.name, read_groups(self._wrapped), tuple(group_of), whole=self._kind.whole
            ),
            self._wrapped,
            self._wrapped.state,
            self._wrapped.scale_gradients if isinstance(self._wrapped, LARS) else None,
        )

    def models(self) -> tuple[nn.Module, ...]:
        """Return the modules that hold the parameters. Parameters that were added later may be in another module."""
        if self._training is None:
            return self._given or self._found or (find_model(self._parameters()),)
        models = self._training.sets[self._set_index].models
        held = {id(parameter) for model in models for parameter in model.parameters()}
        outside = [parameter for parameter in self._new_parameters() if id(parameter) not in held]
        return (*models, find_model(outside)) if outside else models

    def _awaits_shapes(self) -> bool:
        """Return True if a forward pass must give the model its shapes before the new parameters are trained."""
        return any_lazy(self._new_parameters()) or any_empty_buffer(self.models())

    def _new_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that are not trained yet."""
        trained = 0 if self._training is None else len(self._training.sets[self._set_index].parameters)
        return self._parameters()[trained:]


def _as_number(loss: object) -> float | None:
    """Return a closure's result as a float; None if it is neither a real number nor a tensor of one real number."""
    try:
        if isinstance(loss, torch.Tensor):
            loss = loss.item()
        return float(loss) if isinstance(loss, numbers.Real) else None
    except (RuntimeError, OverflowError):
        # The result is a tensor with several elements or without data (device "meta"), or too large for a float.
        return None


@contextmanager
def _restoring(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context at whose end the parameters are set to the values that they had at its beginning."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _begin(session: Session) -> None:
    """Begin to train all parameters of all existing optimizers, except those that begin at their next step."""
    if len(untrained(session)) > 1:
        gc.collect()  # frees optimizers that the script has replaced, and their modules
        for optimizer in untrained(session):
            optimizer._found = ()
    found: list[DistributedOptimizer] = [
        optimizer
        for optimizer in untrained(session)
        if optimizer._takes_step or not (optimizer._begins_at_step or optimizer._awaits_shapes())
    ]
    training = training_of(session)
    sets = list(training.sets) if training is not None else []
    indices: list[int] = []
    for optimizer in found:
        if optimizer._training is None and has_modes(type(optimizer._wrapped)):
            optimizer._wrapped.train()  # type: ignore[attr-defined]  # the servers begin in training mode
        if optimizer._training is None:
            set_index = training.set_of(optimizer._parameters()) if training is not None else None
        else:
            optimizer._training.require_same(optimizer._set_index, optimizer._parameters(), may_grow=True)
            set_index = optimizer._set_index
        if set_index is None or set_index in indices:
            set_index = len(sets)
        indices.append(set_index)
        sets[set_index : set_index + 1] = [optimizer.parameter_set()]  # replaces a set, or is appended
    if training is None:
        begin_resumed(session)
        first = {key: value for optimizer in found for key, value in optimizer._first_buffers.items()}
        training = WorkerTraining(session, sets, first)
        session.callbacks.state = lambda ended: state_now(session, ended=ended)
        restore(session)
    else:
        training.extend(sets)
    for optimizer, index in zip(found, indices, strict=True):
        optimizer._training, optimizer._set_index = training, index
        optimizer._begins_at_step, optimizer._first_buffers = False, {}
        if optimizer._forward_hook is not None:
            optimizer._forward_hook.remove()
            optimizer._forward_hook = None
    are_trained(session, found)
    for optimizer in found:
        if optimizer._evaluates:
            training.evaluate(optimizer._set_index)


def _clip_to(max_norm: float, norm: float) -> Clip:
    """Return how a gradient with this norm is clipped."""
    return Clip(max_norm=max_norm, factor=clip_factor(max_norm, norm))


def _require_limit(name: str, value: object, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= most:
        bounds = "a number >= 0" if most == math.inf else f"a number from 0 to {most:.0e}"
        raise UsageError(f"{name} is {value!r}, expected {bounds}.")
