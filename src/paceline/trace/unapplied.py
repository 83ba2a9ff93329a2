"""Says whether a run has applied the pushes of its workers. A fast run that applies nothing trains nothing.

A sync model may drop pushes: that is its decision. But each push that it holds must be applied later. A few are lost
without the model's fault: when a worker is lost while it pushes, and, when a run ends early, those of the round in
progress.

A model that drops many pushes may also make fewer updates than bsp, with as many samples. Then an epoch moves the
weights less far, which no loss shows: it falls as it should, only more slowly.
"""

from __future__ import annotations

from .measures import Measures, PushCounts

__all__ = ["missing_updates", "unapplied_pushes"]

MOST_SHARE = 0.01  # a larger share of pushes that were never applied is reported

LEAST_DROPPED = 0.25  # a smaller share of dropped samples is not reported
MOST_UPDATES = 0.75  # nor are more updates than this share of those that bsp makes


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


def missing_updates(measures: Measures) -> str:
    """Return a sentence about updates that are missing because gradients were dropped; "" if few are.

    It says nothing if the numbers of samples are unknown. bsp makes an update of one gradient of each worker. Every
    worker that has ever taken part counts, so a run is not wronged because its workers come and go.

    Args:
        measures: the statistics of the run.
    """
    samples = measures.samples + measures.dropped_samples
    if not measures.samples or measures.dropped_samples < LEAST_DROPPED * samples:
        return ""
    # Empty pushes have no samples, so they are no gradients. A dropped gradient is taken to have the usual samples.
    gradients = measures.sampled_gradients * samples / measures.samples
    usual = gradients / len(measures.iterations)
    # With the last round, which is not complete, a model that averages one push of each worker has one more.
    if measures.updates + 1 > MOST_UPDATES * usual:
        return ""
    return (
        f"{measures.dropped_samples / samples:.0%} of the samples were in gradients that were dropped, because they "
        f"were late or not usable. So the run has made {measures.updates} updates, while bsp makes about {usual:.0f} "
        f"with as many samples: an epoch has moved the weights about {measures.updates / usual:.1f} times as far, "
        "and training may not be finished. Train for more epochs, or use a sync model that applies every gradient."
    )
