"""The benchmark of network links: its checks and its tables."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import links
from paceline.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": "fast"}, "rate is 'fast', expected a rate from 1mbit"),
        ({"rounds": 0}, "rounds is 0, expected a whole number >= 1"),
        ({"sizes_mb": ()}, "sizes are .*, expected numbers > 0"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_starts(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        links.LinksPlan(**options).require_sound()  # type: ignore[arg-type]


def test_the_benchmark_names_the_command_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="needs the command iperf3"):
        links.LinksPlan().require_sound()


def test_a_ratio_is_the_link_time_over_the_communication_time() -> None:
    plain = links._row(25.0, False, [(0.4, 0.5), (0.4, 0.4), (0.4, 0.2)])
    encrypted = links._row(25.0, True, [(0.4, 0.8)])
    assert (plain.ratio, plain.low, plain.high) == (1.0, 0.8, 2.0)
    assert encrypted.communication_ms == 800.0
    report = links.LinksReport(
        rate="1gbit",
        iperf_mbit=(950.0, 940.0),
        rounds=3,
        rows=(plain, encrypted),
        delays_ms=(50.0, 60.0),
        slowed_ms=(51.0, 600.0),
    )
    console = Console(width=120)
    with console.capture() as shown:
        for table in links.tables(report):
            console.print(table)
    assert "1.00   0.80 - 2.00    met" in shown.get()
    assert "0.50   0.50 - 0.50      -" in shown.get()
    assert "10 times slower" in shown.get()
