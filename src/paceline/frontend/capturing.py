"""Refuses to train while a graph of an accelerator's operations, such as a CUDA graph, is being captured.

A captured graph repeats the operations on the accelerator, and nothing else. So when it is replayed, no gradient is
pushed and no weights are pulled. Without this check, the first copy to the memory of the host would fail, with an
error of the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..errors import UsageError

__all__ = ["require_not_capturing"]


def require_not_capturing(call: str) -> None:
    """Raise `UsageError` if the operations of the current stream are being captured.

    Args:
        call: what the script does.
    """
    if (is_capturing := _accelerators_check()) is not None and is_capturing():
        raise UsageError(
            f"{call} while a graph of the accelerator's operations was captured. Such a graph pushes no gradients "
            "and pulls no weights when it is replayed: call backward() and step() outside the graph."
        )


@functools.cache
def _accelerators_check() -> Callable[[], bool] | None:
    """Return the function that tells if the current stream is captured; None if nothing can be captured here."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    check: Callable[[], bool] | None = getattr(
        torch.get_device_module(accelerator), "is_current_stream_capturing", None
    )
    return check
