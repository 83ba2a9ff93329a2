"""Mistakes in the declarations of cores, which tests must notice."""

from __future__ import annotations

import msgspec
import pytest

from paceline import state
from paceline.state import DECLARED

__all__ = ["declare_as_history"]


def declare_as_history(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake: declare that a field is history, although it decides."""
    declaration = DECLARED[kind]
    assert name not in (*declaration.history, *declaration.fixed)
    wrong = msgspec.structs.replace(declaration, history=(*declaration.history, name))
    monkeypatch.setitem(DECLARED, kind, wrong)
    monkeypatch.setattr(state, "_fields", {})
