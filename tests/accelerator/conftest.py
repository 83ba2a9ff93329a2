"""Tests on the device that `make accelerator` names. The other commands do not collect them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.sim.virtual_training import PausableThread

NEEDS = {
    "vulkan": "It needs a Vulkan driver: Debian's packages mesa-vulkan-drivers and libvulkan1 compute on the CPU"
}

collect_ignore_glob = [] if os.environ.get("PACELINE_ACCELERATOR") else ["*.py"]


def pytest_sessionstart() -> None:
    """Say what to do if there is no such device."""
    if collect_ignore_glob:
        return
    from .device import DEVICE, KIND

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != DEVICE.type or not torch.accelerator.device_count():
        raise pytest.UsageError(
            f"torch has no device {KIND!r} here. {NEEDS.get(KIND, 'Install its driver')}."
        )


def pytest_configure(config: pytest.Config) -> None:
    # A backend may compute on the CPU what its device cannot, and say so.
    config.addinivalue_line("filterwarnings", "ignore:.*[Ff]alling back to CPU")


@pytest.fixture(autouse=True, scope="session")
def sanitized_strands() -> Iterator[None]:
    """Let CUDA's sanitizer see what simulated workers compute. By itself, it sees only the main thread."""
    from .device import SANITIZED

    if not SANITIZED:
        yield
        return
    from torch.cuda._sanitizer import cuda_sanitizer

    run = PausableThread._run

    def run_sanitized(strand: PausableThread, function: Callable[[], object]) -> None:
        with cuda_sanitizer.dispatch:
            run(strand, function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PausableThread, "_run", run_sanitized)
        yield
