"""One worker's part in training: registration before the first gradient, and then one push and pull per iteration."""

from __future__ import annotations

import logging
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from types import FrameType, MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..core.agreement import HASHED_ITERATIONS
from ..core.layout import BufferSpec, FrozenSpec, HyperParameters, of_set
from ..core.lease import DrawnBatch
from ..core.messages import MOST_PARAMETER, Combined, GradientHashed, Observation, Warned
from ..core.metrics import Settled
from ..core.requests import COORDINATOR, Send
from ..errors import NonFiniteGradientError, UsageError
from ..shard.foreign import evaluated_state, has_modes
from ..shard.vectors import Vectors, digest, sampled_norm, squared_norm, torch_dtype
from ..sync.events import Clip, PushFlags
from .forward import builds_graph, guess_of, unwatch_backward, watch_backward
from .gradients import Gradients, unwatch_scalers, watch_scalers
from .hooks import (
    Restartable,
    after_each_forward,
    before_each_load,
    remove_now,
    take_clipped,
    unwatch_clipping,
    watch_clipping,
)
from .job_model import ParameterSet, TrainedModel, describe_parameter, least_samples_of
from .metrics import MetricLog, metrics_of
from .session import Session, TrainingStep, current, resumption_of
from .weights import Stager, Weights, stager_of

log = logging.getLogger("paceline.train.training")

EVALUATING, EDITING = "paceline.evaluating(...)", "optimizer.editing()"
EDITING_PRIVATELY = "optimizer.editing(private=True)"
"""The contexts in which a script may not take a step."""

UNABORTABLE = (
    "the sync model aborts computations on outdated weights and restarts them, but this script calls step() without "
    "a closure, when the gradients are already computed. So nothing is aborted: spec-sync behaves as its base model "
    "(asp by default), and ringmaster drops outdated gradients only when they arrive. To let the sync model abort "
    "computations, put zero_grad(), the forward pass and backward() into a function that returns the loss, and call: "
    "loss = optimizer.step(closure)"
)
"""Warning about a script whose computations cannot be aborted."""

LEAST_NORM = 1e-12
"""Minimum denominator of |g| / |w|, because the norm of the weights may be zero."""


class WorkerTraining:
    """Trains the parameter sets of a script in one worker of a run.

    When this object is created, the worker joins the run: it registers its models and optimizers, waits for the other
    workers, and copies the initializer's weights into its models.

    Args:
        session: this worker's session.
        sets: the parameter sets. Below, a set is given by its index in this sequence.
        first_buffers: copies of buffers from before the first forward pass, by their `id`, if training begins after
            this pass.

    Attributes:
        stale: the sets with gradients that were computed with weights that differed from the initializer's weights.
            The first push of such a set must not contain these gradients.
        graph_begun: True if a module that holds trained parameters has been called in this iteration, as far as is
            known. Only set while there are parameters that are not trained yet.

    Raises:
        ConfigurationError: the model or its parameters are not supported, or this worker may not join the run.
    """

    _trained: TrainedModel
    _stager: Stager
    _weights: Weights
    _gradients: Gradients
    _restartable: Restartable | None
    _trained_ids: set[int]  # `id` of each trained parameter

    def __init__(
        self, session: Session, sets: Sequence[ParameterSet], first_buffers: Mapping[int, torch.Tensor]
    ) -> None:
        self._session = session
        self._said_unabortable = False
        self._thread = threading.get_ident()
        self._inside = ""  # one of the three contexts above, if the script is in one
        self._evaluated: set[int] = set()  # the sets whose optimizers are in evaluation mode
        # The sets whose last push had NaN in its gradient. The guard of the run must learn of the next push as well.
        self._had_nan: set[int] = set()
        # the observation of the last push, if it is sent to the guard after the script has logged the push's loss
        self._unobserved: Observation | None = None
        # set -> the parameters of the set that had no new gradient at the last call of `_require_in_model`
        self._missing: dict[int, list[int]] = {}
        self.stale: set[int] = set()
        self.graph_begun = False
        trained = TrainedModel.of(sets)
        layout = trained.spec.layout
        self._expect_batches_for(trained)
        session.callbacks.frozen = trained.buffers.chunks_of
        initializer = session.begin(trained.spec)
        weights = Weights(layout, trained.parameters)
        if initializer:
            weights.copy_to(session.weights)
            buffers = trained.buffers.values(trained.buffers.specs)
            session.initialize(buffers, trained.initial_state(trained.parameters))
        else:
            session.await_first_weights()
        trained.buffers.changed()  # from here on, only changed buffers are sent
        # True if the weights and buffers of the run are those of this worker
        own = initializer and not session.resumed
        new = ((), ()) if own else (trained.spec.buffers, trained.spec.frozen)
        self._train(trained, weights, range(len(trained.parameters)), *new, first_buffers)
        # The session refers to this object, so the object continues to exist if the script keeps only the model.
        session.callbacks.on_moved = self._follow_weights
        session.callbacks.on_finish = self._finish
        _trainings[session] = ref(self)

    @property
    def sets(self) -> Sequence[ParameterSet]:
        """The parameter sets."""
        return self._trained.sets

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters of all sets."""
        return self._trained.parameters

    @property
    def is_idle(self) -> bool:
        """True if the script evaluates or edits the model."""
        return bool(self._inside)

    def set_of(self, parameters: Sequence[torch.Tensor]) -> int | None:
        """Return the set that already contains parameters from this list; None if there is no such set, or several."""
        places = zip(self._trained.parameters, self._trained.spec.layout.parameters, strict=True)
        wanted = set(map(id, parameters))
        found = {place.set_index for parameter, place in places if id(parameter) in wanted}
        return found.pop() if len(found) == 1 else None

    def extend(self, sets: Sequence[ParameterSet]) -> None:
        """Train further parameters: wait for the other workers to add them, and copy one worker's weights.

        The other parameters keep their weights if the worker has not pulled while it waited, or if the script has
        already used these weights in this iteration. Otherwise, they have the newly pulled weights.

        Args:
            sets: the parameter sets, which may have further parameters or another optimizer. Further sets may follow.

        Raises:
            ConfigurationError: the model or its parameters are not supported.
            UsageError: the script evaluates or edits the model, or the workers' calls differ.
            WeightsChangedError: weights have been changed since the last step.
        """
        self.require_not_idle("The first step with new parameters")
        self._require_training_mode("The first step with new parameters")
        session, before = self._session, self._trained
        self._weights.require_unchanged()
        trained = TrainedModel.of(sets, before)
        layout = trained.spec.layout
        self._expect_batches_for(trained)
        added = range(len(before.parameters), len(trained.parameters))
        initial = {
            name: torch.zeros(size, dtype=torch_dtype(name))
            for name, size in layout.sizes.items()
            if name not in before.spec.layout.sizes
        }
        weights = Weights(layout, trained.parameters)
        weights.copy_to(initial)
        session.callbacks.frozen = trained.buffers.chunks_of
        state_of = trained.initial_state(trained.new_since(before))
        pulled, iteration = self._weights.copies(), session.core.iteration
        if refused := session.extend(trained.spec, initial, list(trained.buffers.added.values()), state_of):
            raise UsageError(f"The workers' calls differ: {refused}")
        if session.core.iteration == iteration or self.graph_begun:
            # Keep the weights that the worker pulled with its last step, because an autograd graph may hold them.
            self._weights.keep_in(session.weights, pulled)
        remove_now(session)
        new = trained.spec.buffers_beyond(before.spec), trained.spec.frozen_beyond(before.spec)
        self._train(trained, weights, added, *new)
        for index, parameter in enumerate(before.parameters):
            if parameter.grad is not None:  # this gradient is in memory that the session no longer uses
                self._gradients.adopt(index)

    def _train(
        self,
        trained: TrainedModel,
        weights: Weights,
        added: range,
        new_buffers: Sequence[BufferSpec],
        new_frozen: Sequence[FrozenSpec],
        first_buffers: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Take over the session's weights, and train with the session's memory from now on.

        Args:
            trained: what the script trains.
            weights: the weights of all parameters.
            added: the indices of the parameters that were not trained before.
            new_buffers: the buffers whose values must be taken over from the initializer.
            new_frozen: the frozen parameters whose values must be taken over if they differ.
            first_buffers: see the class.
        """
        session, parameters = self._session, trained.parameters
        self._trained, self._weights = trained, weights
        # created before the first computation that may be aborted
        self._restartable = None
        self._stager = stager_of(trained.spec.layout, session, trained.device)
        replaced = any(index in added for index in weights.use(self._stager))
        if new_buffers:
            own = trained.buffers.values(new_buffers)
            initial = {**session.servers.fetch_initial_buffers(new_buffers, own)}
            initial |= resumption_of(session).take_buffers(new_buffers)
            if first_buffers and not (replaced or session.core.updates or session.resumed):
                # Buffers that a forward pass with the job's weights has changed are statistics of this worker, which
                # the worker keeps.
                own_statistics = trained.buffers.differing_from(first_buffers)
                initial = {name: value for name, value in initial.items() if name not in own_statistics}
                trained.buffers.send_again(own_statistics)
            replaced |= trained.buffers.take_over(initial)
        if new_frozen:
            replaced |= trained.buffers.take_over(session.servers.fetch_frozen(new_frozen))
        if replaced:
            self.stale |= {
                set_index
                for set_index, members in enumerate(trained.members)
                if any(index in added and parameters[index].grad is not None for index in members)
            }
        self._gradients = Gradients(
            trained.spec.layout,
            parameters,
            trained.members,
            self._stager,
            session,
            weights.note_gradients,
            final=all(each.scale_gradients is None for each in trained.sets),
        )
        weights.mark()
        self._trained_ids = set(map(id, parameters))
        before_each_load(session, self._before_loading)
        after_each_forward(session, self._after_forward)

    def _expect_batches_for(self, trained: TrainedModel) -> None:
        data = self._session.core.data
        data.least = max(data.least, least_samples_of(trained.model.modules()))
        data.accelerated = trained.device.type != "cpu"

    def require_not_idle(self, call: str) -> None:
        """Raise `UsageError` if the script evaluates or edits the model."""
        if self._inside == EVALUATING:
            raise UsageError(
                f"{call} was called inside `with {EVALUATING}`. End the evaluation first: while it "
                "lasts, other workers continue without this one."
            )
        if self._inside:
            raise UsageError(f"{call} was called inside `with {self._inside}:`. End this block first.")

    def require_training_mode(self, set_index: int, call: str) -> None:
        """Raise `UsageError` if the optimizer of a set is in evaluation mode."""
        if set_index in self._evaluated:
            raise UsageError(
                f"{call} was called after the optimizer's eval(), so the model has the weights for evaluation. Call "
                "the optimizer's train() first, which gives back the weights for training."
            )

    def _require_training_mode(self, call: str) -> None:
        for set_index in self._evaluated:
            self.require_training_mode(set_index, call)

    def require_same(
        self, set_index: int, parameters: Sequence[torch.Tensor], *, may_grow: bool = False
    ) -> None:
        """Check that the optimizer's groups still hold the same parameters as when their training began.

        Args:
            set_index: the parameter set.
            parameters: the parameters that the groups hold now.
            may_grow: True if further parameters may follow.

        Raises:
            UsageError: a parameter was added, removed or replaced.
        """
        known = self._trained.sets[set_index].parameters
        if len(parameters) == len(known) and all(map(operator.is_, parameters, known)):
            return
        for index, (now, then) in enumerate(zip_longest(parameters, known)):
            if now is then or (may_grow and then is None):
                continue
            change = (
                f"{self.describe(now)} was added" if now is not None else f"{self.describe(then)} was removed"
            )
            raise UsageError(
                f"The optimizer's groups have changed since training began: {change} at index {index}. Add "
                "parameters with add_param_group(); trained parameters cannot be removed or replaced."
            )

    def _require_in_model(self, set_index: int) -> None:
        """Check that the model still uses the parameters of a set. If it did not, gradients would silently be missing.

        The model is only examined if the parameters without a new gradient are not those of the last check.

        Raises:
            UsageError: the script has replaced parameters of the model by new ones.
        """
        missing = self._gradients.not_accumulated(set_index)
        if missing == self._missing.get(set_index, []):
            return
        self._missing[set_index] = missing
        if replaced := self._trained.replaced(missing):
            names = ", ".join(map(repr, replaced[:3])) + (", ..." if len(replaced) > 3 else "")
            raise UsageError(
                f"The optimizer holds {len(replaced)} parameters that the model no longer has: {names}. The model has "
                "new parameters in their places, from load_state_dict(..., assign=True), a new layer or a conversion. "
                "So the optimizer would not train the new parameters. Load without assign=True, or create and prepare "
                "a new optimizer after the change."
            )

    def describe(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the model, or its shape if it is not a parameter of the model."""
        return describe_parameter(self._trained.model, parameter)

    def compute(self, closure: Callable[[], Any]) -> Any:
        """Run a closure and return its result.

        If the session aborts the computation, the closure runs again with newly pulled weights.
        """
        with metrics_of(self._session).closure():
            return self._compute(closure)

    def _compute(self, closure: Callable[[], Any]) -> Any:
        def computed() -> Any:
            result = closure()
            self._await_gradients()
            return result

        if not self._session.core.may_restart:
            result = computed()
            self._session.hold_back(droppable=False)
            return result
        if self._restartable is None:
            self._restartable = Restartable(
                self._trained.model,
                self._trained.parameters,
                self._session,
                self._stager.keep_close,
                partial(_restart, self._gradients, self._weights, metrics_of(self._session)),
            )
        return self._restartable.run(computed)

    def computed_without_closure(self) -> None:
        """Tell the session that the gradients are already computed, so that it is too late to abort the computation.

        If the sync model aborts computations, the main worker says once that this is impossible without a closure.
        """
        session = self._session
        if session.core.may_restart and not self._said_unabortable:
            self._said_unabortable = True
            if session.main_worker == session.worker:
                session.exchange(lambda: [Send(COORDINATOR, Warned(UNABORTABLE))])
        self.computed()

    def computed(self) -> None:
        """Tell the session that the gradients are already computed."""
        self._await_gradients()
        self._session.hold_back(droppable=False)

    def _await_gradients(self) -> None:
        self._gradients.computed()  # in case a backward pass has failed
        self._stager.await_gradients()

    def commit(
        self,
        set_index: int,
        groups: tuple[HyperParameters, ...],
        *,
        result: float | None,
        has_closure: bool,
        leave_out_gradient: bool,
        clip: Clip | None = None,
    ) -> None:
        """Push the current gradients of a parameter set and pull its new weights.

        Args:
            set_index: the parameter set.
            groups: the hyper-parameters of each parameter group.
            result: the number that the closure of the step has returned; None if there is none.
            has_closure: True if the step has a closure.
            leave_out_gradient: True to push without a gradient. The iteration still counts as progress.
            clip: how the gradient that is applied is clipped; None if the script does not clip this gradient.

        Raises:
            NonFiniteGradientError: a gradient contains NaN or inf, and the run does not skip such gradients.
            WeightsChangedError: weights have been changed since the last step.
        """
        session = self._session
        self._weights.require_unchanged()
        self._require_in_model(set_index)
        scale_gradients = self._trained.sets[set_index].scale_gradients
        sets = len(self._trained.sets)
        selected = set_index if sets > 1 else None
        logged = metrics_of(session).settle(session, result=result, has_closure=has_closure, sets=sets)
        present = self._gradients.collect(set_index)
        empty = leave_out_gradient
        if not empty:
            self._stager.deliver(selected)
        norm, name = (None, None) if empty else self._gradients.norm(selected)
        observed = None
        if session.observes or name is not None or set_index in self._had_nan:
            weights = sampled_norm(of_set(session.weights, selected).values())
            observed = Observation(
                session.core.updates,
                logged.loss,
                norm,
                weights,
                (name or "")[:MOST_PARAMETER],
                set_index,
                session.core.data.samples or 0,
            )
        observed = self._in_turn(observed, logged, is_nan=name is not None)
        if name is None:
            self._had_nan.discard(set_index)
        else:
            self._had_nan.add(set_index)
            error = NonFiniteGradientError(session.worker, session.core.iteration, name)
            if not session.skips_nan:
                assert observed is not None
                session.observe(observed, logged.noted)
                raise error
            log.warning(
                "worker %d, iteration %d: gradients not pushed, because the gradient of %r contains NaN or inf",
                *error.args,
            )
            empty = True
        if session.core.iteration < HASHED_ITERATIONS and session.workers > 1 and not session.core.data.used:
            gradient = "" if empty else digest(of_set(session.gradients, selected).values())
            hashed = Send(COORDINATOR, GradientHashed(session.core.iteration, gradient))
            session.exchange(lambda: [hashed])
        significance = None
        if session.core.needs_significance and not empty:
            norm_of_weights = _norm(of_set(session.weights, selected))
            significance = _norm(of_set(session.gradients, selected)) / max(norm_of_weights, LEAST_NORM)
        if empty:
            clip = None
        elif scale_gradients is not None:
            if clip is not None:
                # Scaling changes the norm of the gradients, so the clipping precedes the scaling.
                self._gradients.scale(clip.factor, selected)
                clip = None
            scale_gradients()
            self._stager.deliver(selected)
        flags = PushFlags(
            empty=empty,
            significance=significance,
            clip=clip,
            clipped=take_clipped(session),
            set_index=selected,
        )
        encoded = msgspec.msgpack.encode(groups)
        session.commit(
            TrainingStep(present, encoded, flags, self._trained.buffers.changed(), logged, observed)
        )
        self._weights.mark_pulled(selected, self._trained.members[set_index])
        self._gradients.begin_next()
        self.graph_begun = False

    def _in_turn(self, observed: Observation | None, logged: Settled, *, is_nan: bool) -> Observation | None:
        """Return the observation to send now: that of the previous push, if a loss is known only after its push.

        A gradient with NaN is reported immediately.
        """
        before, self._unobserved = self._unobserved, None
        if before is not None:
            before = msgspec.structs.replace(before, loss=logged.earlier_loss)
        if observed is None:
            return before
        if logged.follows and not is_nan:
            self._unobserved = observed
            return before
        if before is not None:
            self._session.observe(before)
        return observed

    def sit_out(self, pushes: int) -> None:
        """Make the pushes for a joint batch in which this worker has no part. These pushes have no gradient.

        No pushes are made if it is not known how many pushes the other workers make with this batch, because the script
        accumulates gradients, draws batches ahead or loads them on a thread of its own. From then on, workers need not
        have the same number of iterations when they make a call together.

        Args:
            pushes: number of pushes that the script makes for each batch; 0 if it is not known.
        """
        session = self._session
        if not session.core.lockstep:
            return  # no worker waits for these pushes
        if not pushes or session.core.data.has_drawn or self._inside or threading.get_ident() != self._thread:
            session.exchange(session.core.become_uneven)
            return
        for _ in range(pushes):
            self._weights.require_unchanged()
            session.sit_out()
            self._weights.mark_pulled()

    def forget(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Forget what was computed since the last push, and continue with the newest weights.

        Args:
            buffers: the values to which buffers are set, by their descriptions.
        """
        self._stager.await_gradients()
        specs = self._trained.buffers.specs
        self._trained.buffers.take_over(
            {spec.name: buffers[str(spec)] for spec in specs if str(spec) in buffers}
        )
        self._gradients.begin_next()
        metrics_of(self._session).restart()
        self.stale.clear()
        self.refresh()

    def refresh(self) -> None:
        """Pull the current weights between two iterations, without a push.

        Raises:
            WeightsChangedError: weights have been changed since the last step.
        """
        self._weights.require_unchanged()
        self._session.refresh()
        self._weights.mark_pulled()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Return a context in which this worker does not train, and no other worker waits for it."""
        self._inside = EVALUATING
        try:
            with self._session.idle():
                yield
        finally:
            self._inside = ""
            self._weights.mark_pulled()
        self.refresh()

    def with_modes(self, *, training: bool = True) -> list[int]:
        """Return the sets whose optimizers have modes. If `training` is True, return only the sets in training mode."""
        found = [index for index, each in enumerate(self.sets) if has_modes(type(each.owner))]
        return [index for index in found if not (training and index in self._evaluated)]

    def fetch_evaluated(self, sets: Sequence[int]) -> dict[int, torch.Tensor]:
        """For these sets, fetch the current weights for evaluation: index of each parameter -> its values.

        The weights are in new memory on the device of the model. Nothing is fetched if `sets` is empty.
        """
        if not sets:
            return {}
        found, described = self._session.servers.fetch_evaluated(), self._trained.spec.layout.parameters
        return {
            index: found[described[index].names[0]].to(self._trained.device)
            for set_index in sets
            for index in self._trained.members[set_index]
        }

    def state_in_mode(self, set_index: int, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert the `state_dict()` of a set's optimizer from training mode to the optimizer's present mode."""
        if set_index not in self._evaluated:
            return state_dict
        each, weights = self.sets[set_index], self._weights.copies()
        members = zip(each.parameters, self._trained.members[set_index], strict=True)
        copies = {id(parameter): weights[index] for parameter, index in members}
        return evaluated_state(each.owner, copies, state_dict)

    def evaluate(self, set_index: int) -> None:
        """Set the parameters of a set to the weights for evaluation, until `train` is called.

        Raises:
            UsageError: the script evaluates or edits the model.
            WeightsChangedError: weights have been changed since the last step.
        """
        self.require_not_idle("The optimizer's eval()")
        if set_index not in self._evaluated:
            self._weights.require_unchanged()
            self._weights.set_apart(self.fetch_evaluated([set_index]))
            self._evaluated.add(set_index)

    def train(self, set_index: int) -> None:
        """Set the parameters of a set back to the weights of the last pull.

        Raises:
            WeightsChangedError: weights have been changed since `evaluate`.
        """
        if set_index in self._evaluated:
            self._weights.put_back(self._trained.members[set_index])
            self._evaluated.remove(set_index)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Return a context in which the script may edit the weights. See `DistributedOptimizer.editing`."""
        self.require_not_idle("editing()")
        self._require_training_mode("editing()")
        session, weights = self._session, self._weights
        weights.require_unchanged()
        if session.core.lockstep and session.encodes_weights:
            self.refresh()  # the edit begins with the weights that the servers have, as it does under other models
        pushes_edit = session.begin_edit()
        weights.mark_pulled()
        before = weights.copies()
        self._inside = EDITING
        try:
            yield
            changed = weights.changed_since(before)
            lent: AbstractContextManager[None] = nullcontext()
            if pushes_edit:
                changed = {index: value.clone() for index, value in changed.items()}
                lent = self._gradients.replaced_by(changed)
        except BaseException:
            session.core.cancel_edit()
            raise
        finally:
            self._inside = ""
            weights.restore(before)
            weights.mark_pulled()
        present = bytes(index in changed for index in range(len(self._trained.parameters)))
        with lent:
            session.push_edit(
                present if pushes_edit else bytes(len(present)), buffers=self._trained.buffers.changed()
            )
        weights.mark_pulled()

    @contextmanager
    def editing_privately(self) -> Iterator[None]:
        """Return a context at whose end the weights are set to what they were at its beginning."""
        self.require_not_idle("editing(private=True)")
        self._require_training_mode("editing(private=True)")
        self._weights.require_unchanged()
        before = self._weights.copies()
        self._inside = EDITING_PRIVATELY
        try:
            yield
        finally:
            self._inside = ""
            self._weights.give_back(before)

    def combine(self, call: str, op: Literal["mean", "sum"], numbers: bytes, weight: float) -> Combined:
        """Take part in a barrier or a reduction. See `Session.combine`.

        Raises:
            UsageError: the script edits the model.
            WeightsChangedError: weights have been changed since the last step.
        """
        session = self._session
        if self._inside in (EDITING, EDITING_PRIVATELY):
            self.require_not_idle(f"{call.partition('(')[0]}()")
        if self._inside:
            return session.combine(call, op, numbers, weight)
        self._weights.require_unchanged()
        before = session.core.iteration
        combined = session.combine(call, op, numbers, weight)
        if session.core.iteration != before:  # the worker has pushed and pulled while it waited
            self._weights.mark_pulled()
        return combined

    def pooled_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the model's buffers, pooled over the workers; {} if training has not changed this worker's buffers."""
        return self._session.servers.fetch_buffers() if self._trained.buffers.have_changed else {}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return this worker's own buffers, by their names in the model's `state_dict`."""
        return self._trained.buffers.all()

    def described_buffers(self) -> dict[str, torch.Tensor]:
        """Return this worker's own buffers, by their descriptions: name, dtype and shape."""
        buffers = self._trained.buffers
        return {str(spec): buffer for spec, buffer in zip(buffers.specs, buffers.all().values(), strict=True)}

    def fetch_state(self, set_index: int) -> tuple[dict[int, dict[str, Any]], Sequence[HyperParameters]]:
        """Fetch the state of a set's optimizer from the servers. See `TrainedModel.optimizer_of_job`."""
        state, counters = self._trained.optimizer_of_job(set_index, self._session.servers.fetch_state())
        members = self._trained.members[set_index]
        beside = {
            position: _beside(self.parameters[members[position]], entries)
            for position, entries in state.items()
        }
        return beside, counters

    def _follow_weights(self) -> None:
        """Take over the session's weights, which were moved to other memory."""
        self._stager.follow(self._session.weights)
        self._weights.use(self._stager)

    def _finish(self) -> str:
        """Remove the hooks when the script ends, and describe what the saved weights do not contain."""
        remove_now(self._session)
        added = self._trained.buffers.unknown()
        words = [
            self._weights.change_after_training(),
            f"Buffer {added[0]!r} was added to the model after training had begun. The weights that the run saves do "
            "not contain it: register it before the first step."
            if added
            else "",
        ]
        return " ".join(filter(None, words))

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Notice whether the first output from a batch contributes to a gradient. See `core/lease.py`."""
        if torch.is_grad_enabled():
            guess_of(self._session).computes = True
        batch = self._session.core.data.newest
        if batch is None or batch.watched or not builds_graph(self._session):
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                batch.watched = True
                leaf.register_hook(partial(_contribute, batch))

    def _before_loading(self, module: nn.Module) -> None:
        """Keep a copy of the weights before `load_state_dict()` may change them."""
        if not self._inside and not self._trained_ids.isdisjoint(map(id, module.parameters(recurse=False))):
            self._weights.keep()


def training_of(session: Session | None) -> WorkerTraining | None:
    """Return the training in which a worker takes part; None before its first forward pass, and outside a run."""
    found = _trainings.get(session) if session is not None else None
    return found() if found is not None else None


# The references are weak: a `WorkerTraining` refers to its session, which is the key, so with a strong
# reference the session would never be freed.
_trainings: WeakKeyDictionary[Session, ref[WorkerTraining]] = WeakKeyDictionary()


def watch_script() -> None:
    """Wrap functions of torch, so that a session learns what the script does with losses and gradients."""
    watch_clipping()
    watch_backward()
    watch_scalers()
    watch_steps()


def unwatch_script() -> None:
    """Restore the functions that `watch_script` has wrapped."""
    unwatch_steps()
    unwatch_scalers()
    unwatch_backward()
    unwatch_clipping()


# -- A step of an optimizer that is not distributed, before training has begun --------------------------------

REMEDIES = {
    "transformers.": "Call paceline.integrations.transformers.distribute(trainer) before trainer.train().",
    "lightning.pytorch.": 'Write import paceline.integrations.lightning, and Trainer(strategy="paceline").',
    "pytorch_lightning.": 'Write import paceline.integrations.lightning, and Trainer(strategy="paceline").',
    "lightning.fabric.": 'Write import paceline.integrations.lightning, and Fabric(strategy="paceline").',
    "lightning_fabric.": 'Write import paceline.integrations.lightning, and Fabric(strategy="paceline").',
    "accelerate.": "Use the Accelerator of paceline.integrations.accelerate, and prepare(..., train=loader).",
    "": "Wrap the optimizer: model, optimizer, loader = paceline.prepare(model, optimizer, loader). Call only the "
    "step() of the optimizer that prepare returns.",
}
"""Beginning of the name of a module on the stack when an optimizer makes a step -> how to distribute this optimizer."""


def how_to_distribute(frame: FrameType | None) -> str:
    """Return how to distribute an optimizer that makes a step in this frame."""
    modules = []
    while frame is not None:
        modules.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    # The first framework in the table counts, because a trainer may use frameworks that come later in the table.
    return next(REMEDIES[start] for start in REMEDIES if any(each.startswith(start) for each in modules))


def watch_steps() -> None:
    """Notice the first step of an optimizer if training has not begun, because then no optimizer is distributed.

    If a framework makes this step, nothing is distributed, so `UsageError` is raised. A script may have trained another
    model in each worker before, so a step in the script itself causes only a warning.
    """
    global _steps_watch
    _steps_watch = register_optimizer_step_post_hook(_look_at_step)


def unwatch_steps() -> None:
    """Undo `watch_steps`."""
    if _steps_watch is not None:
        _steps_watch.remove()


_steps_watch: RemovableHandle | None = None


def _look_at_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    session = current()
    if session is None:
        return
    unwatch_steps()
    if training_of(session) is not None:
        return
    remedy = how_to_distribute(sys._getframe())
    text = (
        f"The {type(optimizer).__name__} optimizer is not distributed, so every worker trains its own weights. "
        f"{remedy}"
    )
    if remedy != REMEDIES[""]:
        raise UsageError(text)
    if session.worker == 0:
        log.warning("%s", text)


def _restart(gradients: Gradients, weights: Weights, metrics: MetricLog) -> None:
    """Continue after a computation was aborted, its gradients were dropped, and new weights were pulled."""
    gradients.begin_next()
    weights.mark_pulled()
    metrics.restart()


def _beside(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state on its device, as torch's optimizers keep it. Step counts stay on the CPU."""
    return {
        key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in state.items()
    }


def _contribute(batch: DrawnBatch, gradient: torch.Tensor) -> None:
    batch.contributes = True


def _norm(vectors: Vectors) -> float:
    """Return the L2 norm over all elements of the given vectors."""
    return math.sqrt(sum(squared_norm([vector]) for vector in vectors.values()))
