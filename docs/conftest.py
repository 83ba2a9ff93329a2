"""Fixtures of the examples in the documentation."""

from __future__ import annotations

import pytest

from tests.support.copies import copied_pools

__all__ = ["copied_pools"]


@pytest.fixture(autouse=True)
def copies(request: pytest.FixtureRequest) -> None:
    """The processes of a study are copies of this one."""
    if request.node.path.name == "study.md":
        request.getfixturevalue("copied_pools")
