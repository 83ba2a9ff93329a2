"""Tests on the device that `make accelerator` names. The other commands do not collect them."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("PACELINE_ACCELERATOR") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # A backend may compute on the CPU what its device cannot, and say so.
    config.addinivalue_line("filterwarnings", "ignore:.*[Ff]alling back to CPU")
