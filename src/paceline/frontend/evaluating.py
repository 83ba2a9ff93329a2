"""`evaluating`, with which one worker evaluates the model while the others go on training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from torch import nn

from ..errors import UsageError
from .metrics import metrics_of
from .newcomer import hold_job_model
from .saving import pool_buffers
from .session import current
from .training import training_of

__all__ = ["evaluating"]

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def evaluating(model: Model) -> Iterator[Model]:
    """Return a context for evaluating the model between two iterations, without stopping the other workers.

    At the beginning of the context, the worker fetches the current weights from the servers. The target of the `with`
    statement is a copy of the model with these weights, in evaluation mode, which training does not change. The
    BatchNorm statistics of the copy are those of all workers together, as in the weights that the run saves.

    If other workers may have to wait for this worker, as under `bsp`, it goes on pushing inside the context, on a
    background thread and about as often as usual. These pushes contain no gradient, so they count as progress but do
    not affect averages. After the context, the worker continues with the newest weights. In virtual time, an
    evaluation takes only the time of the messages that fetch the weights, before and after it. Outside a run, and
    before the first forward pass of training, the copy has the weights of the given model; in a worker that joins a
    run in progress, it has the job's weights also before this pass.

    In the context, use only the copy, because the weights of the model change. Use a loader that is not distributed,
    unless the worker is meant to evaluate on a part of the data.

    Args:
        model: the model, or a part of it.

    Raises:
        UsageError: `model` is not a module, or `step()` or `evaluating()` was called inside the context.
        WeightsChangedError: weights have been changed since the last step.
        PeerLostError: the run ended during the evaluation. Raised at the end of the context.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> if paceline.is_main():
        ...     with paceline.evaluating(model) as snapshot, torch.no_grad():
        ...         loss = snapshot(torch.ones(4, 2)).square().mean()
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"evaluating() got {model!r}, expected a torch.nn.Module: the model, or a part of it."
        )
    session = current()
    training = training_of(session) if session is not None else None
    if training is None:
        hold_job_model(session, newest=True)
        with metrics_of(session).evaluation(session) if session is not None else nullcontext():
            yield copy.deepcopy(model).eval()
        return
    training.require_not_idle("evaluating()")
    training.refresh()
    snapshot = copy.deepcopy(model).eval()
    pool_buffers(training, model, snapshot)
    assert session is not None
    with metrics_of(session).evaluation(session), training.idle():
        yield snapshot
