"""Values of tensors that are read later, so that nobody waits for a device now."""

from __future__ import annotations

import torch

__all__ = ["keep", "read"]


def keep(tensor: torch.Tensor) -> float | torch.Tensor:
    """Return the number in a tensor of one element. If it is on another device than the CPU, return a copy there.

    Raises:
        RuntimeError: the number cannot be read.
    """
    if _is_at_hand(tensor):
        return float(tensor.item())
    return tensor.detach().clone()


def read(kept: float | torch.Tensor) -> float:
    """Return the number that was kept."""
    return float(kept.item()) if isinstance(kept, torch.Tensor) else kept


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Return True if a tensor can be read without waiting, or cannot be copied in the ordinary way."""
    return tensor.is_cpu or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
