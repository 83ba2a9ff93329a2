"""The color of each use of the workers' time. All pictures use the same colors, and no curve has one of them."""

from __future__ import annotations

__all__ = ["COMPUTING", "OUTSIDE", "TRANSFER", "WAITING", "WASTED"]

COMPUTING = "#56B4E9"
TRANSFER = "#999999"
WAITING = "#D55E00"
WASTED = "#F0E442"
OUTSIDE = "#CC79A7"
