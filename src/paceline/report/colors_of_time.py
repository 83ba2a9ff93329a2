"""The color of each use of the workers' time. All pictures use the same colors, and no curve has one of them."""

from __future__ import annotations

__all__ = ["COLOR_OF", "COMPUTING", "IDLE", "LOADING", "OUTSIDE", "PAUSED", "TRANSFER", "WAITING", "WASTED"]

COMPUTING = "#56B4E9"
TRANSFER = "#999999"
WAITING = "#D55E00"
WASTED = "#F0E442"
PAUSED = "#6F6FB4"
OUTSIDE = "#CC79A7"
LOADING = "#8CC6A5"
IDLE = "#9999994D"
"""Transparent, so that it is pale on a light background and on a dark one."""

COLOR_OF = {
    "computing": COMPUTING,
    "transfer": TRANSFER,
    "waiting": WAITING,
    "wasted": WASTED,
    "paused": PAUSED,
    "outside": OUTSIDE,
    "idle": IDLE,
    "loading": LOADING,
}
"""Kind of time, as in `trace.time_use` -> its color."""
