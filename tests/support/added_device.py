"""A device that a test adds to torch, as the source of a module: it records which processes ask about it."""

from __future__ import annotations

import pytest
import torch.utils.backend_registration

__all__ = ["ADDED", "needs_added_device"]

needs_added_device = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch knows no kinds of devices that are written in Python",
)

# Each question to the device is recorded with the process that asked. There are two such devices.
ADDED = """
import os
from pathlib import Path

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

FOLDER = Path(__file__).parent


def record(question):
    with open(FOLDER / "asked", "a") as file:
        print(os.getpid(), question, file=file)


class Abacus:
    initialized = False

    def __getattr__(self, name):
        raise AttributeError(name)

    def is_available(self):
        record("is_available")
        Abacus.initialized = True
        return True

    def device_count(self):
        record("device_count")
        return 2

    def get_device_name(self, index):
        return f"Abacus {index}"

    def is_initialized(self):
        return Abacus.initialized

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass


_setup_privateuseone_for_python_backend("abacus", Abacus())
set_device_index = torch.accelerator.set_device_index


def recorded(index):
    record(f"set {index}")
    set_device_index(index)


torch.accelerator.set_device_index = recorded
print("a module may print")
"""
