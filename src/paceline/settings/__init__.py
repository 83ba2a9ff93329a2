"""The settings of a run, in a table.

Each row has the type, the default, the help texts and the check of a setting. The argument of `launch`, the option of
the commands and the line in the report follow from the row. Combinations of settings are checked in `run`.

Read first: `table`, then `checks`, which says what a row contains.

Imports from `errors`, `sync`, `core`, `trace` and `wire`.
"""

from .checks import Setting
from .table import SETTINGS, Settings, checked

__all__ = ["SETTINGS", "Setting", "Settings", "checked"]
