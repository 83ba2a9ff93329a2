"""`python -m benchmarks checkpoints`: steps of training while a checkpoint is written."""

from __future__ import annotations

import pytest

from benchmarks.checkpoints import COLUMNS, SETTLING, Case, Step, measure, row_of

CASE = Case(25, "SGD", "shm")


def steps(*times_s: float, checkpoint: int = 0) -> list[Step]:
    return [Step(took_s, checkpoint) for took_s in times_s]


def test_steps_during_checkpoints_are_compared_with_the_others() -> None:
    settling = steps(*[9.0] * SETTLING)
    usual = settling + steps(1.0, 2.0, 3.0)
    row = row_of(CASE, usual + steps(2.0, 5.0, checkpoint=1) + usual + steps(3.0, checkpoint=2))
    assert (row.checkpoints, row.step_ms, row.steps) == (2, 2000.0, [2, 1])
    assert (row.undisturbed, row.median, row.longest) == (1.5, 1.5, [2.5, 1.5])
    assert not row.met
    assert COLUMNS["longest"](row) == "2.50, 1.50"
    assert COLUMNS["goals"](row) == "1.1 and 2: not met"


@pytest.mark.chaos
@pytest.mark.processes
def test_a_worker_times_its_steps_while_checkpoints_are_written() -> None:
    told: list[str] = []
    [figures] = measure(lambda what, share, slow=False: told.append(what), (4.0,), 2, optimizers=("SGD",))
    assert told == ["round 1 of 1, 4 MB, SGD, shm", "round 1 of 1, 4 MB, SGD, tcp"]
    for row in figures.rows:
        assert row.checkpoints == 2
        assert min(row.steps) > 0
        assert row.longest[0] > 0 < row.step_ms
