"""Extensions by users: sync models in their own modules, and functions that are used as conditions."""

from __future__ import annotations

from .loading import imported_modules, load_models, modules_of

__all__ = ["imported_modules", "load_models", "modules_of"]
