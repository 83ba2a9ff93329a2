"""The benchmark of network links: its checks and its tables."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks import links
from benchmarks.commands import app_of
from paceline.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rate fast", "rate is 'fast', expected a rate from 1mbit"),
        ("--rounds 0", "rounds is 0, expected a whole number >= 1"),
        ("--sizes 0", "sizes are .*, expected numbers > 0"),
        ("--wire fp16", "wire is 'fp16', expected one of 'float32', 'bf16', 'int8', 'int4'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        CliRunner().invoke(app_of(["links"]), ["links", *options.split()], catch_exceptions=False)


def test_the_benchmark_names_the_command_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="needs the command iperf3"):
        links.measure(lambda what, share, slow=False: None)


def test_a_ratio_is_the_link_time_over_the_communication_time() -> None:
    plain = links.row_of(25.0, False, [(0.4, 0.5), (0.4, 0.4), (0.4, 0.2)])
    encrypted = links.row_of(25.0, True, [(0.4, 0.8)])
    assert (plain.ratio, plain.low, plain.high) == (1.0, 0.8, 2.0)
    assert encrypted.communication_ms == 800.0
    cells = [[cell(row) for cell in links.COLUMNS.values()][-3:] for row in (plain, encrypted)]
    assert cells == [["1.00", "0.80 - 2.00", "met"], ["0.50", "0.50 - 0.50", "-"]]


@pytest.mark.parametrize(("times_s", "met"), [((1.7, 1.8, 2.0), "met"), ((2.5, 2.6, 1.5), "missed")])
def test_the_goal_of_a_format_is_judged_by_the_median_share(times_s: tuple[float, ...], met: str) -> None:
    exact, other = links.wire_rows({"float32": [3.0, 4.0, 3.0], "bf16": list(times_s)})
    assert (exact.step_ms, exact.low, exact.high) == (3000.0, 3000.0, 4000.0)
    assert (exact.goal, other.goal) == ("-", f"<= 0.6 {met}")
