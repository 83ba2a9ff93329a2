"""`python -m benchmarks look`: what it costs to look at a run while it goes on.

A script trains with steps of about 5 ms, which compute all the time. Its run shows a live page, TensorBoard's files
and metrics. The cases take turns within this run, for a few seconds each: the script logs or does not, and clients
fetch what is shown or do not. In each round, every case has one turn, and the result is the median over the rounds of
the ratio to the turn in which nothing happens. Turns are so short because a machine's speed may change by several
percent within a minute. Two turns of each round are alike, and tell how much of a ratio is chance.
"""

from __future__ import annotations

from .measurement import CASES, SIEGE, Case, LookRow, Times, estimate_s, measure, require_packages, table

__all__ = ["CASES", "SIEGE", "Case", "LookRow", "Times", "estimate_s", "measure", "require_packages", "table"]
