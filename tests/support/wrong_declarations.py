"""Mistakes in the declarations of cores, which tests must notice."""

from __future__ import annotations

from functools import cache

import pytest

from paceline import state
from paceline.state import DECLARED, Field

__all__ = ["declare_as_history"]


def declare_as_history(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake: declare that a field is history, although it decides."""
    declared = DECLARED[kind]
    assert declared.get(name, Field(name)).mark == "decides"
    monkeypatch.setitem(DECLARED, kind, declared | {name: Field(name, "history")})
    monkeypatch.setattr(state, "_declared", cache(state._declared.__wrapped__))
