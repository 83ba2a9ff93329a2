"""`python -m benchmarks look`: what it costs to look at a run while it goes on.

The same script trains with steps of about 5 ms, which compute all the time, with and without what shows its run. The
runs alternate, in a new order in each round, and the result is the median over the rounds of the ratio to the run
beside it in which nothing is shown. Two such runs in each round tell how much of a ratio is chance.
"""

from __future__ import annotations

from .measurement import CASES, SIEGE, Case, LookRow, estimate_s, measure, require_packages, table

__all__ = ["CASES", "SIEGE", "Case", "LookRow", "estimate_s", "measure", "require_packages", "table"]
