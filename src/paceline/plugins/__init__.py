"""Support for user extensions: sync models in modules outside Paceline, and functions that serve as conditions."""

from __future__ import annotations

from .loading import imported_modules, load_models, modules_of

__all__ = ["imported_modules", "load_models", "modules_of"]
