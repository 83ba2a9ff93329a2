"""A host's timers come out in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.run.hub import Timers
from paceline.sync.ticks import in_ticks


def test_what_is_due_comes_out_in_order_and_once() -> None:
    timers: Timers[str] = Timers()
    assert timers.left_s(0) is None
    for due_s, what in [(3.0, "late"), (1.0, "first"), (1.0, "second"), (2.0, "third")]:
        timers.set(in_ticks(due_s), what)
    assert timers.left_s(in_ticks(0.25)) == 0.75
    assert timers.take_due(in_ticks(1.0) - 1) == []
    assert timers.take_due(in_ticks(2.0)) == ["first", "second", "third"]
    assert timers.left_s(in_ticks(9.0)) == 0.0
    assert timers
    assert timers.take_due(in_ticks(9.0)) == ["late"]
    assert not timers
    assert timers.take_due(in_ticks(99.0)) == []


@given(st.lists(st.integers(0, 5)))
def test_ties_come_out_in_the_order_in_which_they_were_set(due: list[int]) -> None:
    timers: Timers[int] = Timers()
    for number, at in enumerate(due):
        timers.set(at, number)
    assert timers.take_due(5) == sorted(range(len(due)), key=lambda number: due[number])
