"""The benchmark of the format in which gradients and weights travel: its checks and its table."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import wire
from paceline.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire": "float32"}, "with which it is compared"),
        ({"wire": "fp16"}, "wire is 'fp16', expected 'float32' or 'bf16'"),
        ({"rate": "fast"}, "rate is 'fast', expected a rate from 1mbit"),
        ({"rounds": 0}, "rounds is 0, expected a whole number >= 1"),
        ({"size_mb": 0.0}, "size is 0.0, expected a number > 0"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_starts(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        wire.WirePlan(**options).require_sound()  # type: ignore[arg-type]


@pytest.mark.parametrize(("times_s", "met"), [((1.7, 1.8, 2.0), "met"), ((2.5, 2.6, 1.5), "missed")])
def test_the_goal_is_judged_by_the_median_share(times_s: tuple[float, ...], met: str) -> None:
    plan = wire.WirePlan()
    report = wire.WireReport(
        plan=plan,
        rows=(wire._row("float32", [3.0, 4.0, 3.0]), wire._row("bf16", times_s)),
        shares=tuple(each / 3.0 for each in times_s),
    )
    assert report.rows[0].communication_ms == 3000.0
    assert (report.rows[0].low, report.rows[0].high) == (3000.0, 4000.0)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(wire.table(report))
    assert shown.get().splitlines()[-1].split()[-1] == met
    assert f"{sorted(times_s)[1] / 3:.2f}" in shown.get()
