"""A fixture with which the processes of a pool are copies of the process that tests."""

from __future__ import annotations

import importlib
import os
from multiprocessing.context import ForkContext, ForkProcess

import pytest

from paceline.lab import pool


class Copy(ForkProcess):
    """A copy of this process, which has none of its descriptors but the connection to it."""

    def run(self) -> None:
        own: int = vars(self)["_args"][0].fileno()
        os.closerange(3, own)
        os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
        super().run()


class Copies(ForkContext):
    Process = Copy


@pytest.fixture
def copied_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a pool are copies of this one, because new ones would first import torch for two seconds."""
    importlib.import_module("torch._dynamo")  # what the first optimizer of each process imports
    monkeypatch.setattr(pool, "CONTEXT", Copies())
