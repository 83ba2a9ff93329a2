"""Which sync model a job runs, and when it changes: what users give, read and written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigurationError
from paceline.sync import (
    ASP,
    BSP,
    SSP,
    Conditions,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    NaiveWaiting,
    SpecSync,
    SyncModel,
)
from paceline.sync.notation import notation, parse_shards, require_shards
from paceline.sync.schedule import Schedule, ScheduleStep, read_schedule

MODELS: list[SyncModel] = [
    BSP(),
    ASP(push_scale="1/n"),
    SSP(staleness=1, execution="lazy"),
    DynamicPSSP(alpha="significance", draws="per-shard"),
    DropStragglers(quorum=2),
    NaiveWaiting(delay_s=0.125),
    ElasticBSP(lookahead=4),
    SpecSync(),
    SpecSync(base=SSP(staleness=2, execution="lazy"), abort_time_s=0.5, abort_rate=0.25),
    Conditions(pull="module:function", push="package.module:Class.method", pushes="average"),
]


@pytest.mark.parametrize("sync", MODELS, ids=str)
def test_a_model_is_the_whole_schedule(sync: SyncModel) -> None:
    schedule = Schedule((ScheduleStep((sync,)),))
    assert read_schedule(sync) == read_schedule(str(sync)) == read_schedule([sync]) == schedule
    assert read_schedule(schedule) is schedule
    assert schedule.first == (sync,)
    assert str(schedule) == str(sync)


def test_a_list_is_one_model_for_each_shard() -> None:
    schedule = read_schedule([BSP(), SSP(staleness=1)])
    assert schedule == read_schedule("bsp|ssp:staleness=1")
    assert schedule.first == (BSP(), SSP(staleness=1))
    assert str(schedule) == "bsp|ssp:staleness=1"


def test_steps_are_read_with_when_they_begin() -> None:
    schedule = read_schedule("bsp@0,ssp:staleness=1,execution=lazy@100,asp|bsp@epoch:5")
    assert schedule.steps == (
        ScheduleStep((BSP(),), 0),
        ScheduleStep((SSP(staleness=1, execution="lazy"),), 100),
        ScheduleStep((ASP(), BSP()), None, 5),
    )
    assert [step.sync for step in schedule.steps] == ["bsp", "ssp:staleness=1,execution=lazy", "asp|bsp"]


def test_a_model_with_a_base_is_read_in_a_step() -> None:
    text = "spec-sync:base=ssp,staleness=4,abort_time_s=1,abort_rate=0.5@0,asp@10"
    sync = SpecSync(base=SSP(staleness=4), abort_time_s=1.0, abort_rate=0.5)
    assert read_schedule(text).steps == (ScheduleStep((sync,)), ScheduleStep((ASP(),), 10))


def test_a_single_step_at_the_beginning_is_no_change() -> None:
    assert read_schedule("bsp@0") == read_schedule("bsp")


def test_iterations_and_epochs_are_each_in_order_and_may_alternate() -> None:
    text = "bsp@0,asp@epoch:1,bsp@50,asp@epoch:3,bsp@60"
    assert str(read_schedule(text)) == text


STEPS = st.lists(
    st.tuples(st.lists(st.sampled_from(MODELS), min_size=1, max_size=3), st.booleans()),
    min_size=1,
    max_size=5,
)


@given(STEPS)
def test_whatever_is_written_reads_back(steps: list[tuple[list[SyncModel], bool]]) -> None:
    """One model for each shard is written as one, where they are all the same."""
    made = []
    for index, (models, epoch) in enumerate(steps):
        several = tuple(models) if len(set(models)) > 1 else (models[0],)
        made.append(
            ScheduleStep(several, None, 10 * index) if epoch and index else ScheduleStep(several, 10 * index)
        )
    schedule = Schedule(tuple(made))
    assert read_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "unknown sync model ''"),
        ("bps", "did you mean 'bsp'?"),
        ("bsp|", "unknown sync model ''"),
        ("bsp@0,asp", "'asp' does not say when it begins. Write, for example, 'bsp@0,asp@100'"),
        ("bsp,asp@100", "sync 'bsp,asp' lists several models"),
        ("bsp@1,asp@100", "the first model must begin at iteration 0, as in 'bsp@0,asp@100'"),
        ("bsp@epoch:0,asp@100", "the first model must begin at iteration 0"),
        ("bsp@0,asp@0", "iteration 0 is listed after iteration 0"),
        ("bsp@0,asp@10,bsp@10", "iteration 10 is listed after iteration 10"),
        ("bsp@0,asp@10,bsp@5", "iteration 5 is listed after iteration 10"),
        ("bsp@0,asp@epoch:2,bsp@epoch:1", "epoch 1 is listed after epoch 2"),
        ("bsp@0,asp@", "'' is not a valid start, expected an iteration ('@100') or an epoch ('@epoch:5')"),
        ("bsp@0,asp@soon", "'soon' is not a valid start"),
        ("bsp@0,asp@-5", "'-5' is not a valid start"),
        ("bsp@0,asp@1.5", "'1.5' is not a valid start"),
        ("bsp@0,asp@step:5", "'step:5' is not a valid start"),
        ("bsp@0,asp@epoch:", "'epoch:' is not a valid start"),
        ("bsp@0,asp@:5", "':5' is not a valid start"),
        ("bsp@0,asp@\u0665", "is not a valid start"),
        ("bsp@0,asp@\u00b2", "is not a valid start"),
        ("bsp@0,ssp:staleness=-1@5", "staleness is -1"),
        ("@0", "unknown sync model ''"),
        ("bsp@0,@5", "unknown sync model ''"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read_schedule(text)
    assert complaint in str(refusal.value)


def test_epochs_and_iterations_are_compared_with_all_steps_before() -> None:
    with pytest.raises(ConfigurationError, match="iteration 50 is listed after iteration 50"):
        read_schedule("bsp@0,asp@50,bsp@epoch:3,asp@50")


@pytest.mark.parametrize(
    ("sync", "complaint"),
    [
        ([], "sync is an empty sequence, expected one sync model, or one for each shard"),
        ((), "sync is an empty sequence"),
        ([BSP(), "asp"], "sync is 'asp', expected a sync model such as paceline.sync.SSP(staleness=3)"),
        ([BSP], "expected a sync model such as"),
        ([None], "sync is None"),
    ],
)
def test_what_is_no_model_is_refused(sync: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read_schedule(sync)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("sync", [None, 7, 1.5, BSP])
def test_what_is_no_model_text_or_list_is_refused(sync: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a sync model"):
        read_schedule(sync)


def test_shards_are_parted_by_bars() -> None:
    assert parse_shards("bsp") == (BSP(),)
    assert parse_shards("bsp|asp|bsp") == (BSP(), ASP(), BSP())
    assert parse_shards(" bsp | asp ") == (BSP(), ASP())


@pytest.mark.parametrize("text", ["bsp|bps", "|bsp", "bsp||asp"])
def test_shards_of_unknown_models_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown sync model"):
        parse_shards(text)


@given(st.lists(st.sampled_from(MODELS), min_size=1, max_size=4))
def test_models_of_shards_are_written_as_one_if_they_are_the_same(models: list[SyncModel]) -> None:
    read = parse_shards(notation(models))
    assert read == (tuple(models) if len(set(models)) > 1 else (models[0],))


@pytest.mark.parametrize(
    ("models", "shards"),
    [
        ([BSP()], 1),
        ([BSP()], 5),
        ([BSP(), ASP()], 2),
        ([ASP(), DropStragglers(quorum=2), DropStragglers(quorum=3)], 3),
        ([ASP(), Conditions(pull="a:b", pushes="average")], 2),
        ([ElasticBSP()], 3),
        ([SpecSync(), SpecSync()], 2),
    ],
)
def test_one_model_or_one_for_each_shard_is_taken(models: list[SyncModel], shards: int) -> None:
    require_shards(models, shards)


@pytest.mark.parametrize(
    ("models", "shards", "complaint"),
    [
        ([BSP(), ASP()], 3, "'bsp|asp' names 2 sync models for 3 shards; give one, or one per shard"),
        ([BSP(), ASP()], 1, "names 2 sync models for 1 shards"),
        ([BSP(), BSP(), BSP()], 2, "names 3 sync models for 2 shards"),
        (
            [ASP(), ElasticBSP()],
            2,
            "elastic-bsp:lookahead=15 applies to the whole job, so all shards must use it",
        ),
        ([ASP(), SpecSync()], 2, "spec-sync"),
        ([ElasticBSP(), ElasticBSP(lookahead=2)], 2, "applies to the whole job"),
    ],
)
def test_other_mixtures_are_refused(models: list[SyncModel], shards: int, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        require_shards(models, shards)
    assert complaint in str(refusal.value)


def test_every_step_is_to_be_runnable() -> None:
    read_schedule("bsp@0,drop-stragglers:quorum=2@5").require_runnable(workers=2, shards=3)
    with pytest.raises(ConfigurationError, match="quorum is 2, expected at most 1, the number"):
        read_schedule("bsp@0,drop-stragglers:quorum=2@5").require_runnable(workers=1, shards=3)
    with pytest.raises(ConfigurationError, match="names 2 sync models for 3 shards"):
        read_schedule("bsp@0,asp|bsp@5").require_runnable(workers=2, shards=3)
    with pytest.raises(ConfigurationError, match=r"delay_s is 2000000.0, expected .* <= 1e\+06"):
        read_schedule(NaiveWaiting(delay_s=2e6)).require_runnable(workers=2, shards=1)
    with pytest.raises(ConfigurationError, match="cannot be imported here"):
        read_schedule("conditions:pull=no_such_module_anywhere:f").require_runnable(workers=2, shards=1)


def test_without_overlap_every_step_is_to_go_in_lockstep() -> None:
    read_schedule("bsp@0,asp@5").require_overlap("shards")
    read_schedule("bsp").require_overlap("off")
    with pytest.raises(
        ConfigurationError, match="requires the sync model bsp, but the sync model is bsp@0,asp@5"
    ):
        read_schedule("bsp@0,asp@5").require_overlap("off")
