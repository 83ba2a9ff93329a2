"""The norm of a worker's own gradient, for clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..shard.vectors import squared_norm

__all__ = ["gradient_norm"]


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of the gradients of all parameters together, computed in double precision."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return math.sqrt(sum(squared_norm([each.reshape(-1)]) for each in values))
