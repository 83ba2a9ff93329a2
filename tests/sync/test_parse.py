"""The notation of the command line: `name:key=value,key=value`."""

from __future__ import annotations

import math

import pytest

from paceline.errors import ConfigurationError
from paceline.sync import ASP, BSP, MODELS, SSP, ElasticBSP, SyncModel, parse


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("bsp", BSP()),
        ("asp", ASP()),
        (" asp ", ASP()),
        ("bsp:", BSP()),
        ("ssp", SSP(staleness=3)),
        ("ssp:staleness=0", SSP(staleness=0)),
        ("ssp:staleness=7", SSP(staleness=7)),
        ("ssp:staleness=inf", SSP(staleness=math.inf)),
        ("elastic-bsp", ElasticBSP(lookahead=15)),
        ("elastic-bsp:lookahead=1", ElasticBSP(lookahead=1)),
    ],
)
def test_reads(text: str, model: SyncModel) -> None:
    assert parse(text) == model


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ellastic-bsp", "unknown sync model 'ellastic-bsp'; did you mean 'elastic-bsp'"),
        ("bps", "did you mean 'bsp'"),
        ("nothing-like-it", "unknown sync model 'nothing-like-it'"),
        ("", "unknown sync model ''"),
        ("BSP", "unknown sync model 'BSP'"),
        ("ssp:stalenes=3", "'stalenes'; did you mean 'staleness'"),
        ("bsp:staleness=3", "unknown key of sync model 'bsp'"),
        ("ssp:3", "'3' is not key=value"),
        ("ssp:staleness", "'staleness' is not key=value"),
        ("ssp:staleness=", "expected a number"),
        ("ssp:staleness=three", "staleness is 'three', expected a number"),
        ("ssp:staleness=-1", "staleness is -1, expected a whole number >= 0"),
        ("ssp:staleness=1.5", "staleness is 1.5, expected a whole number"),
        ("ssp:staleness=nan", "staleness is nan"),
        ("ssp:staleness=1,staleness=2", "'staleness' is given twice"),
        ("elastic-bsp:lookahead=0", "lookahead is 0, expected a whole number >= 1"),
        ("elastic-bsp:lookahead=inf", "lookahead is inf"),
        ("elastic-bsp:lookahead=2.5", "lookahead is 2.5"),
    ],
)
def test_refuses(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse(text)
    assert complaint in str(refusal.value)


def test_an_unknown_name_is_answered_with_all_choices() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse("bulk")
    assert all(name in str(refusal.value) for name in MODELS)


@pytest.mark.parametrize("lookahead", [0, -3, 1.5, math.inf, math.nan, True])
def test_a_lookahead_that_is_no_count_is_refused(lookahead: int) -> None:
    with pytest.raises(ConfigurationError, match=r"elastic-bsp: lookahead is .*expected a whole number >= 1"):
        ElasticBSP(lookahead=lookahead)
