"""Clipping by a worker: the norm of its own gradient, and a watch on the clipping that torch offers.

`torch.nn.utils.clip_grad_norm_` clips a worker's own gradient, before the servers average it with the gradients of
other workers. This is legal, but usually not what a script that was written for one process means. Therefore the
function is wrapped during a run: the next push says that its gradient was clipped, and the summary of the run names
it. The wrapper changes nothing else. Scripts, and libraries such as Lightning, find it if they look up the function
after the run has begun.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from ..shard.vectors import squared_norm
from .session import Session, current

__all__ = ["gradient_norm", "take_clipped", "unwatch_torch", "watch_torch"]

ORIGINAL = clip_grad.clip_grad_norm_


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of the gradients of all parameters together, computed in double precision."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return math.sqrt(sum(squared_norm([each.reshape(-1)]) for each in values))


def watch_torch() -> None:
    """Wrap torch's function for clipping, so that `take_clipped` notices its calls."""
    _place(_watched)


def unwatch_torch() -> None:
    """Restore torch's function for clipping."""
    _place(ORIGINAL)


def take_clipped(session: Session) -> bool:
    """Return True if the script has called torch's function since the last call of `take_clipped`."""
    if session not in _clipped:
        return False
    _clipped.remove(session)
    return True


_clipped: WeakSet[Session] = WeakSet()  # sessions whose scripts have clipped the gradient of the next push


@functools.wraps(ORIGINAL)
def _watched(*arguments: Any, **options: Any) -> Any:
    session = current()
    if session is not None:
        _clipped.add(session)
    return ORIGINAL(*arguments, **options)


def _place(function: Callable[..., Any]) -> None:
    # Scripts look up the function in the first module, torch itself in the second.
    for module in (utils, clip_grad):
        vars(module)[ORIGINAL.__name__] = function
