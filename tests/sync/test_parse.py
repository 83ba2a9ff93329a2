"""The notation of the command line: `name:key=value,key=value`."""

from __future__ import annotations

import math

import pytest

from paceline.errors import ConfigurationError
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    MODELS,
    PSSP,
    SSP,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    NaiveWaiting,
    Ringmaster,
    SpecSync,
    SyncModel,
    parse,
)


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
        ("asp:push_scale=1/n", ASP(push_scale="1/n")),
        ("ssp:execution=lazy", SSP(execution="lazy")),
        ("dssp", DSSP(lower=3, upper=15)),
        ("dssp:lower=1,upper=2", DSSP(lower=1, upper=2)),
        ("dsps:lower=0,upper=9", DSPS(lower=0, upper=9)),
        ("pssp:probability=0.25", PSSP(probability=0.25)),
        ("pssp:draws=per-shard,staleness=0", PSSP(staleness=0, draws="per-shard")),
        ("dynamic-pssp:alpha=2", DynamicPSSP(alpha=2.0)),
        ("dynamic-pssp:alpha=significance", DynamicPSSP(alpha="significance")),
        ("drop-stragglers:quorum=3", DropStragglers(quorum=3)),
        ("naive-waiting:delay_s=0.5", NaiveWaiting(delay_s=0.5)),
        ("naive-waiting:delay_s=0", NaiveWaiting(delay_s=0.0)),
        ("spec-sync:base=ssp,staleness=4", SpecSync(base=SSP(staleness=4))),
        ("ringmaster:threshold=4,stop=true", Ringmaster(threshold=4, stop=True)),
        ("ringmaster:threshold=4,stop=False", Ringmaster(threshold=4)),
        ("conditions:pull=m:f,pushes=average", Conditions(pull="m:f", pushes="average")),
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
        ("bsp:staleness=3", "unknown parameter of sync model 'bsp'"),
        ("ssp:3", "'3' does not have the form key=value"),
        ("ssp:staleness", "'staleness' does not have the form key=value"),
        ("ssp:staleness=", "expected a number"),
        ("ssp:staleness=three", "staleness is 'three', expected a number"),
        ("ssp:staleness=-1", "staleness is -1, expected a whole number >= 0"),
        ("ssp:staleness=1.5", "staleness is 1.5, expected a whole number"),
        ("ssp:staleness=nan", "staleness is nan"),
        ("ssp:staleness=1,staleness=2", "'staleness' is given twice"),
        ("elastic-bsp:lookahead=0", "lookahead is 0, expected a whole number >= 1"),
        ("elastic-bsp:lookahead=inf", "lookahead is inf"),
        ("elastic-bsp:lookahead=2.5", "lookahead is 2.5"),
        ("ringmaster:threshold=4,stop=1", "stop is '1', expected true or false"),
        ("ringmaster:threshold=0", "threshold is 0, expected a whole number >= 1"),
        ("rennala", "needs a value for batch, as in 'rennala:batch=2'"),
        ("ssp:execution=hard", "unknown execution of ssp 'hard'"),
        ("ssp:push_scale=n", "unknown push_scale of ssp 'n'"),
        ("dssp:lower=4,upper=3", "lower is 4 and upper is 3, expected lower <= upper"),
        ("dsps:upper=inf", "upper is inf"),
        ("pssp:probability=1.5", "probability is 1.5, expected a number >= 0 and <= 1"),
        ("pssp:draws=mine", "unknown draws of pssp 'mine'"),
        ("dynamic-pssp:alpha=signifcance", "did you mean 'significance'?"),
        ("dynamic-pssp:alpha=-1", "alpha is -1"),
        ("drop-stragglers", "needs a value for quorum, as in 'drop-stragglers:quorum=2'"),
        ("drop-stragglers:quorum=0", "quorum is 0, expected a whole number >= 1"),
        ("naive-waiting", "needs a value for delay_s, as in 'naive-waiting:delay_s=0.5'"),
        ("naive-waiting:delay_s=-1", "delay_s is -1, expected a number >= 0"),
        ("naive-waiting:delay_s=nan", "delay_s is nan"),
        ("conditions", "needs a value for pull, as in 'conditions:pull=module:function'"),
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
