"""The comparison of formats in which gradients and weights travel: what it counts, and a short run."""

from __future__ import annotations

import math

import pytest
from msgspec import structs
from rich.console import Console

from paceline.errors import ConfigurationError
from reproductions import wire


def test_iterations_are_counted_to_a_smoothed_loss() -> None:
    falling = [4.0] * 10 + [0.0] * 20
    assert wire._iterations_to(2.0, falling) == 14.0  # the loss before the first update is not counted
    assert wire._iterations_to(0.0, falling) == 19.0
    assert wire._iterations_to(-1.0, falling) == math.inf


@pytest.mark.parametrize(
    ("rounded", "verdict"),
    [((100.0, 101.0, 100.0), "met"), ((120.0, 121.0, 120.0), "missed"), ((80.0, 130.0, 105.0), "open")],
)
def test_the_verdict_follows_from_the_interval(rounded: tuple[float, ...], verdict: str) -> None:
    result = wire.WireResult("p", "bf16", 0.1, (100.0, 100.0, 100.0), rounded)
    assert result.verdict == verdict
    console = Console(width=80)
    with console.capture() as shown:
        console.print(wire.result_table([result]))
    assert shown.get().splitlines()[-1].split()[-1] == verdict


def test_float32_is_not_compared_with_itself() -> None:
    with pytest.raises(ConfigurationError, match="with which it is compared"):
        wire.compare_formats("float32", 2)


def test_rounding_changes_the_losses_only_a_little() -> None:
    short = structs.replace(wire.PROBLEMS[0], iterations=12, target=2.0)
    [result] = wire.compare_formats("bf16", 2, [short])
    exact, rounded = (wire._losses(short, short.learned(), 0, each)[-1] for each in ("float32", "bf16"))
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=0.1)
    assert all(map(math.isfinite, (*result.exact, *result.rounded)))
