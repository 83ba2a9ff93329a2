"""The settings of a run, in a table. `table` has a row for each of them, and `setting` says what a row contains.

Imports from `errors`, `sync`, `core`, `trace` and `wire`.
"""

from .checks import Setting
from .table import SETTINGS, Settings, checked

__all__ = ["SETTINGS", "Setting", "Settings", "checked"]
