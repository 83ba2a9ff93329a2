"""Says whether a run has applied the pushes of its workers. A fast run that applies nothing trains nothing.

A sync model may drop pushes: that is its decision. But each push that it holds must be applied later. A few are lost
without the model's fault: when a worker is lost while it pushes, and, when a run ends early, those of the round in
progress.
"""

from __future__ import annotations

from .measures import PushCounts

__all__ = ["unapplied_pushes"]

MOST_SHARE = 0.01  # a larger share of pushes that were never applied is reported


def unapplied_pushes(pushes: PushCounts, unapplied: int) -> str:
    """Return a sentence about pushes that were never applied; "" if the run has applied what it should.

    Such a run is named first wherever its results are shown, and its sync model is never recommended.

    Args:
        pushes: what became of the pushes.
        unapplied: number of pushes that should have been applied; see `Measures.unapplied`.
    """
    received = pushes.applied + pushes.averaged + pushes.dropped + pushes.lost
    hint = " If the model is your own, test it with paceline.testing.check." if pushes.lost else ""
    if received and pushes.dropped + pushes.lost == received:
        return (
            f"Nothing was trained: none of the {received} pushes was applied. The sync model held {pushes.lost} of "
            f"them until the end, and {pushes.dropped} were dropped or had no usable gradient.{hint}"
        )
    if unapplied > MOST_SHARE * received:
        return (
            f"{pushes.lost} of {received} pushes ({pushes.lost / received:.0%}) were never applied: the sync model "
            f"held them until the end.{hint}"
        )
    return ""
