"""`device`, the device on which a script computes."""

from __future__ import annotations

import torch

from .session import current

__all__ = ["device"]


def device() -> torch.device:
    """Return the device on which this worker computes.

    In a run, this is the accelerator that was assigned to the worker (`--devices`), or the CPU if none was. Outside a
    run, it is torch's current accelerator if there is one, else the CPU. So a script that moves its model and its
    batches there runs on any machine. Other accelerators are hidden from a worker if possible, so the first one that
    the worker sees is its own, and it usually has index 0.

    Returns:
        A device with an index, such as `torch.device("cuda:0")`, or `torch.device("cpu")`.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1).to(paceline.device())
        >>> model.weight.device == paceline.device()
        True
    """
    if (session := current()) is not None:
        return session.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
