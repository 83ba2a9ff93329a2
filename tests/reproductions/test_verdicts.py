"""Verdicts: they follow from the paper's number and the interval of ours, and never from what anybody wrote."""

from __future__ import annotations

import math

import msgspec
import pytest

from paceline.studies.statistics import Difference, Ratio, mean_interval
from reproductions.catalogue import EXHIBITS
from reproductions.papers import PAPERS, Quote
from reproductions.verdicts import RESULTS, Measured, judged, verdict


def quote(value: float, unit: str = "x", **others: object) -> Quote:
    return msgspec.convert(
        {"where": "Fig. 1", "value": value, "means": "speed", "unit": unit, **others}, Quote
    )


def between(low: float | None, high: float | None) -> Measured:
    return Measured(value=None, low=low, high=high)


@pytest.mark.parametrize(
    ("paper", "low", "high", "word"),
    [
        (quote(1.77), 1.70, 1.80, "agrees"),
        (quote(1.77), 1.774, 1.774, "agrees"),  # printed as 1.77
        (quote(1.77), 1.78, 2.50, "agrees in direction"),
        (quote(1.77), 1.01, 1.50, "agrees in direction"),
        (quote(1.77), 0.90, 2.50, "cannot tell"),  # holds the paper's number, but no effect as well
        (quote(1.77), 0.90, 1.00, "contradicts"),
        (quote(1.77), 1.01, 1.05, "contradicts"),  # less than a tenth of the effect
        (quote(86, "%", neutral=0), 0.5, 3.0, "contradicts"),
        (quote(1.77), 1.20, None, "agrees"),  # the others never reach the target
        (quote(1.77), None, 0.50, "contradicts"),
        (quote(1.77), None, None, "cannot tell"),
        (quote(2.25, bound="up to"), 3.00, 4.00, "agrees"),
        (quote(2.25, bound="up to"), 1.10, 2.00, "agrees in direction"),
        (quote(0.5), 0.45, 0.55, "agrees"),
        (quote(0.5), 1.10, 1.20, "contradicts"),
        (quote(1, bound="about"), 0.95, 1.05, "agrees"),
        (quote(1, bound="about"), 0.80, 1.05, "cannot tell"),
        (quote(1, bound="about"), 1.20, 1.30, "contradicts"),
        (quote(1, bound="above"), 1.20, 1.30, "agrees"),
        (quote(1, bound="above"), 0.90, 1.30, "cannot tell"),
        (quote(1, bound="above"), 0.80, 0.90, "contradicts"),
        (quote(1, bound="below"), 0.80, 0.90, "agrees"),
        (quote(1, bound="below"), 1.10, 1.20, "contradicts"),
        (quote(58, "%", neutral=0, bound="up to"), 10.0, 30.0, "agrees in direction"),
        (quote(58, "%", neutral=0, bound="up to"), 60.0, 70.0, "agrees"),
        (quote(58, "%", neutral=0, bound="up to"), 0.0, 0.0, "contradicts"),
        (quote(12.6, "%", neutral=0), -6.0, -5.0, "contradicts"),
        (quote(13795, ""), 13795, 13795, "agrees"),
        (quote(13795, ""), 13794, 13794, "contradicts"),
        (quote(6, "", bound="over"), 6.5, 7.0, "agrees"),
        (quote(6, "", bound="over"), 6.0, 6.0, "contradicts"),
        (quote(2, "", bound="at most"), 1.2, 1.2, "agrees"),
        (quote(2, "", bound="at most"), 2.3, 2.3, "agrees"),  # printed as 2
        (quote(2, "", bound="at most"), 2.6, 2.6, "contradicts"),
        (quote(15, "%", bound="at least"), 15.0, 15.0, "agrees"),
        (quote(15, "%", bound="at least"), 14.0, 14.0, "contradicts"),
        (quote(0, "%", neutral=0, bound="above"), 0.5, 1.5, "agrees"),
        (quote(0, "%", neutral=0, bound="above"), -0.5, 1.5, "cannot tell"),
        (quote(0, "%", neutral=0, bound="above"), -1.5, -0.5, "contradicts"),
        (quote(75.9, "%", absolute=True), 90.0, 91.0, "cannot tell"),
        (quote(75.9, "%", absolute=True), 75.0, 76.0, "cannot tell"),  # on a stand-in, that is a coincidence
    ],
)
def test_the_verdict_follows_from_the_interval(
    paper: Quote, low: float | None, high: float | None, word: str
) -> None:
    found = verdict(paper, between(low, high))
    assert found.word == word
    assert bool(found.reason) == (word == "cannot tell")


def test_an_interval_without_the_number_of_the_paper_says_that_the_effect_is_smaller() -> None:
    assert str(verdict(quote(1.77), between(0.9, 2.5))) == "cannot tell: more seeds"
    assert verdict(quote(1.77), between(0.9, 1.2)).reason.endswith("smaller than the paper's")


def test_a_number_without_a_measurement_is_not_reproduced() -> None:
    assert str(verdict(quote(2.0), None)) == "not reproduced"
    assert str(verdict(quote(2.0, not_made="another system"), None)) == "not reproduced: another system"


def test_estimates_become_measurements_and_infinity_an_open_end() -> None:
    assert Measured.of(Ratio(2.0, 1.5, math.inf, 0.01)) == Measured(value=2.0, low=1.5, high=None)
    assert Measured.of(Difference(0.05, 0.04, 0.06, 0.0), "own rate", 100.0).value == pytest.approx(5.0)
    assert str(Measured.of(mean_interval([0.5]))) == "0.5 [..., ...]"  # one seed has no interval
    assert Measured.saved(Ratio(0.4, 0.3, 0.5, 0.0)) == Measured(value=60.0, low=50.0, high=70.0)
    assert Measured.saved(Ratio(math.inf, 2.0, math.inf, 0.0)) == Measured(value=None, low=None, high=-100.0)


def test_measurements_are_written_with_their_interval() -> None:
    assert str(Measured(value=1.234, low=1.1, high=None)) == "1.23 [1.1, ...]"
    assert str(Measured.exactly(13795)) == "13,795"
    assert str(between(None, None)) == "unknown"
    assert str(between(2.0, None)) == "? [2, ...]"


@pytest.mark.parametrize("prefix", PAPERS)
def test_every_claim_has_a_verdict_and_every_measurement_a_claim(prefix: str) -> None:
    rows = judged(prefix)
    assert [row.key for row in rows] == list(PAPERS[prefix].claims())
    claims = {f"{name}/{key}" for name, paper in PAPERS.items() for key in paper.claims()}
    for file in RESULTS.glob("*.json"):
        kept = msgspec.json.decode(file.read_bytes())
        assert kept["exhibit"] in EXHIBITS
        assert kept.get("measured", {}).keys() <= claims, file.name
    for row in rows:
        assert (row.ours is None) == (row.verdict.word == "not reproduced") == (row.exhibit == "")


def test_settings_have_no_verdict() -> None:
    keys = PAPERS["elasticbsp"].claims().keys()
    assert "fig14-rate" not in keys
    assert "faster-than-bsp" in keys


def test_numbers_of_a_table_are_compared_with_the_base_that_it_names() -> None:
    claims = PAPERS["fluentps"].claims()
    ratio = claims["table4-time: AlexNet on CIFAR-10, soft P=1"]
    assert (ratio.unit, ratio.value) == ("x", 1.76)  # 80.77 s, relative to 45.85 s under P=0
    assert "table4-time: AlexNet on CIFAR-10, soft P=0" not in claims
