"""Conditions of a user's own: how they are named, and what becomes of a shard when one fails."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.core.shard import ShardSync
from paceline.core.worker import Worker
from paceline.errors import ConfigurationError
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    DSSP,
    SSP,
    Conditions,
    ElasticBSP,
    NaiveWaiting,
    PullState,
    PushState,
    SyncModel,
    parse,
)
from paceline.sync.actions import (
    AnswerPull,
    AnyAction,
    ApplyMean,
    ApplyPush,
    DropPush,
    HoldPush,
    ReportFault,
    SetTimer,
)
from paceline.sync.events import Change, PullRequested, WorkerFenced, WorkerLost
from paceline.sync.plugins import local_conditions, require_named
from paceline.sync.schedule import read_schedule
from paceline.sync.ticks import in_ticks
from paceline.testing.promises import CheckedShard

HERE = __name__


def near(state: PullState) -> bool:
    return state.gap <= 1


def behind(state: PullState) -> bool:
    return state.progress < state.v_train


def never(state: PullState) -> bool:
    return False


def raises(state: PullState) -> bool:
    raise ZeroDivisionError("of all things")


def raises_for_2(state: PullState) -> bool:
    return bool(1 // (state.worker != 2))


def push_raises(state: PushState) -> bool:
    raise KeyError("loss")


class Bound:
    """Conditions of all the kinds that there are."""

    limit = 1

    def __call__(self, state: PullState) -> bool:
        return state.gap <= self.limit

    def method(self, state: PullState) -> bool:
        return state.gap <= self.limit

    @staticmethod
    def static(state: PullState) -> bool:
        return state.gap <= 1

    @classmethod
    def of_class(cls, state: PullState) -> bool:
        return state.gap <= cls.limit


not_a_function = 7
bound = Bound()


def begin(sync: SyncModel, workers: int) -> CheckedShard:
    checked = CheckedShard(ShardSync(sync))
    for _ in range(workers):
        checked.tell(checked.legal.join())
    return checked


def hosted(checked: CheckedShard) -> ShardSync:
    assert isinstance(checked.machine, ShardSync)
    return checked.machine


def iterate(checked: CheckedShard, worker: int, change: Change | None = None) -> list[AnyAction]:
    return checked.tell(checked.legal.push(worker, change=change)) + checked.tell(checked.legal.pull(worker))


# -- a condition that fails ---------------------------------------------------------------------------------------


def test_a_pull_condition_that_raises_is_reported_with_the_users_own_traceback() -> None:
    checked = begin(Conditions(pull=raises), 2)
    assert checked.tell(checked.legal.push(0)) == [ApplyPush(0, 0)]
    fault, *rest = checked.tell(checked.legal.pull(0))
    assert isinstance(fault, ReportFault)
    assert fault.reason == f"the pull condition {HERE}:raises raised ZeroDivisionError: of all things"
    assert "in raises\n" in fault.traceback
    assert 'raise ZeroDivisionError("of all things")' in fault.traceback
    assert "sync/plugins.py" not in fault.traceback.replace(__file__, "")
    assert fault.sync == "bsp"
    assert rest == []  # under BSP it waits for worker 1
    assert hosted(checked).sync == BSP()


def test_a_push_condition_that_raises_is_reported_after_the_push_has_been_dealt_with() -> None:
    checked = begin(Conditions(pull=near, push=push_raises), 2)
    applied, fault = checked.tell(checked.legal.push(0))
    assert applied == ApplyPush(0, 0)
    assert isinstance(fault, ReportFault)
    assert fault.reason == f"the push condition {HERE}:push_raises raised KeyError: 'loss'"
    assert checked.tell(checked.legal.pull(0)) == []
    assert iterate(checked, 1) == [HoldPush(1, 0), ApplyMean(((1, 0),)), AnswerPull(0, 0), AnswerPull(1, 0)]


@pytest.mark.parametrize(
    "verdict",
    [np.True_, np.bool_(False), None, 1, 0, "yes", [True]],
    ids=["numpy's True", "numpy's False", "None", "1", "0", "text", "a list"],
)
def test_what_is_neither_true_nor_false_is_reported(verdict: object) -> None:
    checked = begin(Conditions(pull=lambda state: verdict), 2)
    checked.tell(checked.legal.push(0))
    [fault] = checked.tell(checked.legal.pull(0))
    assert isinstance(fault, ReportFault)
    assert fault.reason.endswith(f"returned {verdict!r}, expected True or False")
    assert fault.traceback == ""
    assert AnswerPull(0, 0) in checked.tell(checked.legal.push(1))


def test_a_condition_that_takes_no_argument_is_reported() -> None:
    condition: Any = lambda: True  # noqa: E731
    checked = begin(Conditions(pull=condition), 1)
    checked.tell(checked.legal.push(0))
    fault, answer = checked.tell(checked.legal.pull(0))
    assert isinstance(fault, ReportFault)
    assert "TypeError" in fault.reason
    assert answer == AnswerPull(0, 0)


def test_a_condition_that_asks_for_what_there_is_not_is_reported() -> None:
    condition: Any = lambda state: state.gapp <= 1  # noqa: E731
    checked = begin(Conditions(pull=condition), 1)
    checked.tell(checked.legal.push(0))
    fault, _ = checked.tell(checked.legal.pull(0))
    assert isinstance(fault, ReportFault)
    assert "'PullState' object has no attribute 'gapp'" in fault.reason


def test_it_is_reported_once_and_nothing_is_asked_any_more() -> None:
    asked = []

    def fails(state: PullState) -> bool:
        asked.append(state.worker)
        raise ValueError

    checked = begin(Conditions(pull=fails), 2)
    for _ in range(3):
        iterate(checked, 0)
        iterate(checked, 1)
    assert len(checked.faults) == 1
    assert asked == [0]


def test_a_worker_that_leaves_may_bring_it_about() -> None:
    """The push condition is evaluated after each departure too."""

    def fails(state: PushState) -> bool:
        if state.live < 3:
            raise ValueError("too few")
        return state.pushed >= state.live

    checked = begin(Conditions(pull=behind, push=fails), 3)
    assert iterate(checked, 0) == [ApplyPush(0, 0)]
    [fault] = checked.tell(checked.legal.leave(2, lost=True))
    assert isinstance(fault, ReportFault)
    assert iterate(checked, 1) == [HoldPush(1, 0), ApplyMean(((1, 0),)), AnswerPull(0, 0), AnswerPull(1, 0)]


def test_the_last_push_before_a_change_may_bring_it_about() -> None:
    checked = begin(Conditions(pull=near, push=push_raises), 2)
    change = Change(number=1, members=(0, 1), sync="asp")
    checked.tell(checked.legal.push(0, change=change))
    assert len(checked.faults) == 1
    checked.tell(checked.legal.pull(0))
    assert checked.tell(checked.legal.push(1, change=change)) == [
        HoldPush(1, 0),
        ApplyMean(((1, 0),)),
        AnswerPull(0, 0),
    ]
    assert hosted(checked).sync == ASP()


def test_pushes_that_are_held_are_averaged_once_by_bsp() -> None:
    checked = begin(Conditions(pull=behind, push=push_raises, pushes="average"), 2)
    held, fault = checked.tell(checked.legal.push(1))
    assert held == HoldPush(1, 0)
    assert isinstance(fault, ReportFault)
    assert checked.tell(checked.legal.push(0)) == [HoldPush(0, 0), ApplyMean(((0, 0), (1, 0)))]
    assert checked.tell(checked.legal.pull(1)) == [AnswerPull(1, 0)]


@pytest.mark.parametrize(
    ("kept", "verdict"), [(1, ApplyMean(((1, 1),))), (0, DropPush(1, 1))], ids=["received", "torn"]
)
def test_a_failure_applies_no_push_of_a_lost_worker_before_the_verdict(kept: int, verdict: AnyAction) -> None:
    """The last model that worked applies held pushes at once, but not those that another shard may not have."""
    checked = begin(SSP(staleness=3), 3)
    change_to(checked, Conditions(pull=raises_for_2, pushes="average"), 3)
    for worker in (0, 1):
        checked.tell(checked.legal.push(worker))
    shard = hosted(checked)
    assert shard.handle(WorkerFenced(now_ticks=0, worker=1)) == []
    assert shard.handle(checked.legal.push(2)) == [HoldPush(2, 1)]
    fault, *rest = shard.handle(PullRequested(now_ticks=0, worker=2, iteration=1))
    assert isinstance(fault, ReportFault)
    assert rest == [ApplyMean(((0, 1), (2, 1))), AnswerPull(2, 1)]
    assert shard.holds(1)
    assert shard.handle(WorkerLost(now_ticks=0, worker=1, kept=kept)) == [verdict]
    assert not shard.holds(1)
    shard.validate()


def change_to(checked: CheckedShard, sync: SyncModel, workers: int, number: int = 1) -> None:
    change = Change(number=number, members=tuple(range(workers)), sync=str(sync))
    for worker in range(workers):
        iterate(checked, worker, change)
    assert hosted(checked).sync == sync
    assert not checked.legal.waiting


@pytest.mark.parametrize(
    "worked", [BSP(), SSP(staleness=1), DSSP(lower=0, upper=2), DSPS(lower=0, upper=2)], ids=str
)
def test_the_shard_goes_back_to_the_last_model_that_worked(worked: SyncModel) -> None:
    checked = begin(worked, 3)
    change_to(checked, Conditions(pull=raises_for_2), 3)
    for worker in (0, 1):
        assert iterate(checked, worker)[-1] == AnswerPull(worker, 1)
    actions = iterate(checked, 2)
    assert checked.faults[0].sync == str(worked)
    assert hosted(checked).sync == worked
    assert AnswerPull(2, 1) in actions  # all have pushed as often
    for _ in range(6):
        for worker in (0, 1, 2):
            iterate(checked, worker)
    assert not checked.legal.waiting


def test_a_shard_does_not_fall_back_to_a_model_that_needs_plans_but_to_asp() -> None:
    fault, answer = fail_after(ElasticBSP())
    assert isinstance(fault, ReportFault)
    assert fault.sync == "asp"
    assert answer == AnswerPull(0, 1)


def test_a_shard_falls_back_to_naive_waiting_and_defers_the_pull() -> None:
    fault, timer = fail_after(NaiveWaiting(delay_s=0.5))
    assert isinstance(fault, ReportFault)
    assert fault.sync == "naive-waiting:delay_s=0.5"
    assert timer == SetTimer(0, 1, in_ticks(0.5))


def fail_after(worked: SyncModel) -> list[AnyAction]:
    """What a shard does when a condition raises that has replaced a model that worked."""
    checked = begin(worked, 2)
    change = Change(number=1, members=(0, 1), sync=str(Conditions(pull=raises)))
    for worker in (0, 1):
        iterate(checked, worker, change)
    checked.tell(checked.legal.push(0))
    return checked.tell(checked.legal.pull(0))


def test_delayed_pulls_are_tested_anew_by_the_model_that_takes_over() -> None:
    """Worker 0 waits for worker 1 under the conditions; SSP(1), which worked before, lets it go on."""
    checked = begin(SSP(staleness=1), 3)

    def for_0_and_2(state: PullState) -> bool:
        return bool(1 // (state.worker != 2)) and state.worker != 0

    change = Change(number=1, members=(0, 1, 2), sync=str(Conditions(pull=for_0_and_2)))
    for worker in range(3):
        iterate(checked, worker, change)
    assert iterate(checked, 0) == [ApplyPush(0, 1)]
    checked.tell(checked.legal.push(2))
    fault, *answers = checked.tell(checked.legal.pull(2))
    assert isinstance(fault, ReportFault)
    assert answers == [AnswerPull(0, 1), AnswerPull(2, 1)]


def test_no_held_push_is_lost_when_a_model_takes_over_that_holds_none() -> None:
    checked = begin(SSP(staleness=1), 2)
    change_to(checked, Conditions(pull=raises, push=never, pushes="average"), 2)
    assert checked.tell(checked.legal.push(0)) == [HoldPush(0, 1)]
    fault, *rest = checked.tell(checked.legal.pull(0))
    assert isinstance(fault, ReportFault)
    assert rest == [ApplyMean(((0, 1),)), AnswerPull(0, 1)]
    assert not checked.held


def test_what_conditions_that_failed_were_replaced_with_has_worked_when_the_next_ones_fail() -> None:
    checked = begin(SSP(staleness=1), 1)
    change_to(checked, Conditions(pull=raises), 1)
    iterate(checked, 0)
    assert hosted(checked).sync == SSP(staleness=1)
    change_to(checked, Conditions(pull=near, push=push_raises), 1, number=2)
    iterate(checked, 0)
    assert [fault.sync for fault in checked.faults] == ["ssp:staleness=1", "ssp:staleness=1"]


def test_conditions_that_work_are_gone_back_to() -> None:
    sync = Conditions(pull=near)
    checked = begin(sync, 2)
    change_to(checked, Conditions(pull=raises), 2)
    iterate(checked, 0)
    assert checked.faults[0].sync == str(sync)
    assert iterate(checked, 0) == [ApplyPush(0, 2)]


def test_late_workers_are_taken_over_with_their_counts() -> None:
    """Worker 1's push was dropped, and its next one, for the round that it was told of, has yet to come, when the
    condition fails."""

    def one_is_enough(state: PushState) -> bool:
        if state.slowest:
            raise ValueError
        return state.pushed >= 1

    checked = begin(Conditions(pull=behind, push=one_is_enough, pushes="average"), 2)
    for _ in range(3):
        iterate(checked, 0)
    dropped, *rest = checked.tell(checked.legal.push(1))
    assert dropped == DropPush(1, 0)
    assert checked.tell(checked.legal.pull(1)) == [*rest, AnswerPull(1, 0, v_train=3)]
    assert not checked.faults
    for _ in range(2):
        iterate(checked, 0)
        assert [fault.sync for fault in checked.faults] == ["bsp"]
        iterate(checked, 1)
        assert not checked.legal.waiting
    assert not checked.held


# -- what a condition sees ----------------------------------------------------------------------------------------


def test_a_pull_condition_sees_the_numbers_of_table_iii() -> None:
    seen: list[tuple[object, ...]] = []

    def look(state: PullState) -> bool:
        seen.append(
            (
                state.worker,
                state.iteration,
                state.progress,
                state.gap,
                state.v_train,
                state.live,
                state.pushed,
            )
        )
        seen.append((state.slowest, state.fastest, state.significance, state.count(0), state.count(1)))
        return True

    checked = begin(Conditions(pull=look, significance="on"), 3)
    iterate(checked, 1)
    checked.tell(checked.legal.push(1, significance=0.25))
    checked.tell(checked.legal.pull(1))
    assert seen == [(1, 0, 0, 1, 0, 3, 1), (0, 1, None, 1, 0), (1, 1, 1, 2, 0, 3, 1), (0, 2, 0.25, 1, 1)]


def test_a_push_condition_is_evaluated_in_a_loop() -> None:
    """One event may complete several rounds."""

    def all_or_late(state: PushState) -> bool:
        return state.pushed >= state.live or (state.fastest >= 3 and state.v_train < 2)

    checked = begin(Conditions(pull=lambda state: state.gap <= 9, push=all_or_late), 2)
    for _ in range(2):
        iterate(checked, 0)
    assert vars(hosted(checked))["_machine"].v_train == 0
    iterate(checked, 0)
    assert vars(hosted(checked))["_machine"].v_train == 2


def test_a_worker_that_joins_in_a_later_round_has_not_pushed_the_rounds_before() -> None:
    def pushed_by_all(state: PushState) -> bool:
        return state.count(state.v_train) >= state.live

    checked = begin(Conditions(pull=behind, push=pushed_by_all, pushes="average"), 2)
    _, count = hosted(checked).entry(2)
    assert count == 1  # round 0 is in progress, and does not wait for worker 2
    checked.tell(msgspec.structs.replace(checked.legal.join(), count=count, pulls=True))
    checked.tell(checked.legal.pull(2))
    assert iterate(checked, 0) == [HoldPush(0, 0)]
    held, mean, *answers = iterate(checked, 1)
    assert (held, mean) == (HoldPush(1, 0), ApplyMean(((0, 0), (1, 0))))
    assert len(answers) == 3


def test_a_push_condition_that_is_always_true_ends() -> None:
    checked = begin(Conditions(pull=lambda state: True, push=lambda state: True), 2)
    for _ in range(5):
        assert len(iterate(checked, 0)) == 2


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        (near, f"{HERE}:near"),
        (Bound.static, f"{HERE}:Bound.static"),
        (f"{HERE}:near", f"{HERE}:near"),
        (f"{HERE}:bound", f"{HERE}:bound"),
        (f"{HERE}:bound.method", f"{HERE}:bound.method"),
        (f"{HERE}:Bound.of_class", f"{HERE}:Bound.of_class"),
    ],
    ids=[
        "a function",
        "a static method",
        "its name",
        "an object that is called",
        "its method",
        "a class method",
    ],
)
def test_what_can_be_imported_is_kept_as_its_name(condition: object, name: str) -> None:
    sync = Conditions(pull=condition)
    assert sync.pull == name
    assert parse(str(sync)) == sync
    sync.require_runnable(2)
    assert iterate(begin(sync, 1), 0) == [ApplyPush(0, 0), AnswerPull(0, 0)]


@pytest.mark.parametrize(
    "condition",
    [lambda state: state.gap <= 1, bound, bound.method, functools.partial(lambda limit, state: True, 1)],
    ids=["a lambda", "an object that is called", "a method", "a partial"],
)
def test_what_cannot_be_imported_is_known_in_this_process(condition: Any) -> None:
    sync = Conditions(pull=condition)
    assert sync.pull.startswith("local:")
    assert parse(str(sync)) == sync
    sync.require_runnable(2)
    assert iterate(begin(sync, 1), 0) == [ApplyPush(0, 0), AnswerPull(0, 0)]


def test_a_nested_function_is_known_in_this_process() -> None:
    def nested(state: PullState) -> bool:
        return True

    sync = Conditions(pull=nested)
    assert sync.pull.startswith("local:")
    assert local_conditions[sync.pull] is nested
    assert Conditions(pull=nested) == sync  # the same one has the same name


def test_two_lambdas_are_two() -> None:
    assert Conditions(pull=lambda state: True) != Conditions(pull=lambda state: True)


def test_a_function_whose_name_now_means_another_is_known_in_this_process() -> None:
    def shadowed(state: PullState) -> bool:
        return True

    shadowed.__qualname__ = "near"
    assert Conditions(pull=shadowed).pull.startswith("local:")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_such_module_anywhere:f", "cannot be imported here: No module named 'no_such_module_anywhere'"),
        (f"{HERE}:no_such_function", "cannot be imported here"),
        (f"{HERE}:Bound.no_such_method", "cannot be imported here"),
        (f"{HERE}:not_a_function", "is 7, expected a function"),
        (
            "local:f-0",
            "cannot be imported here: it was defined in a script or notebook that runs in another process",
        ),
    ],
)
def test_what_cannot_be_found_here_is_refused_before_anything_starts(name: str, complaint: str) -> None:
    for sync in (Conditions(pull=name), Conditions(pull=near, push=name)):
        with pytest.raises(ConfigurationError) as refusal:
            sync.require_runnable(2)
        assert name in str(refusal.value)
        assert complaint in str(refusal.value)
        with pytest.raises(ConfigurationError):
            sync.at_shard()


def test_what_lies_in_another_module_than_the_one_that_is_named_is_refused() -> None:
    """Else naming one module would name all that it imports: `mine:os.system`."""
    with pytest.raises(
        ConfigurationError, match="'itertools' is a module; module names belong before the colon"
    ):
        Conditions(pull="paceline.sync.plugins:itertools.count").require_runnable(2)


def test_only_conditions_of_modules_that_were_named_at_the_launch_may_be_changed_to() -> None:
    own = Conditions(pull=lambda state: True)
    launched = [Conditions(pull="mine:f", push="ours:g"), own, SSP()]
    for model in (SSP(), Conditions(pull="mine:other"), Conditions(pull="more:h", push="ours:g"), own):
        require_named([model], launched, ["more"])
    for name in ("theirs:f", "mine.part:f", "minea:f"):
        for model in (Conditions(pull=name), Conditions(pull="mine:f", push=name)):
            with pytest.raises(
                ConfigurationError, match=r"was not named when the run was launched.*--import"
            ):
                require_named([SSP(), model], launched, ["more"])
    with pytest.raises(ConfigurationError, match="Put these into a module"):
        require_named([Conditions(pull="local:f-99")], launched, [])
    with pytest.raises(ConfigurationError):
        require_named([own], [SSP()], ["local"])


def test_a_script_may_request_conditions_of_a_module_whose_name_ends_in_local(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = ModuleType("rules_local")
    vars(rules)["close"] = near
    monkeypatch.setitem(sys.modules, "rules_local", rules)
    worker = Worker(read_schedule("asp"), workers=2, shards=1, servers=1)
    assert worker.request_sync([Conditions(pull="rules_local:close")]) == []
    assert worker.asked == 1
    with pytest.raises(ConfigurationError, match="The module must not be named 'local'"):
        worker.request_sync([Conditions(pull=lambda state: True)])


def test_a_condition_that_ends_the_process_is_a_fault_like_any_other() -> None:
    def leave(state: PullState) -> bool:
        raise SystemExit("enough")

    checked = begin(Conditions(pull=leave), 1)
    [fault] = [action for action in iterate(checked, 0) if isinstance(action, ReportFault)]
    assert "raised SystemExit: enough" in fault.reason


@pytest.mark.parametrize(
    "condition", [7, None, True, [near], {"pull": near}], ids=lambda value: type(value).__name__
)
def test_what_is_no_function_is_refused(condition: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"conditions: pull is .*expected a function of one argument"
    ):
        Conditions(pull=condition)


@pytest.mark.parametrize("name", ["near", "module:", ":near", "module.near"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match="expected a function or its name in the form 'module:function'"
    ):
        Conditions(pull=name)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("conditions", "needs a value for pull, as in 'conditions:pull=module:function'"),
        ("conditions:pull=a:b,pushes=mean", "unknown pushes of conditions 'mean'. Choices: apply, average"),
        ("conditions:pull=a:b,pushes=aply", "did you mean 'apply'?"),
        ("conditions:pull=a:b,significance=yes", "unknown significance of conditions 'yes'"),
        ("conditions:pull=a:b,execution=hard", "unknown execution of conditions 'hard'"),
        ("conditions:pull=a:b,push_scale=2", "unknown push_scale of conditions '2'"),
        ("conditions:pull=a", "expected a function or its name in the form 'module:function'"),
    ],
)
def test_options_that_there_are_not_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse(text)
    assert complaint in str(refusal.value)


def test_its_options_are_written_and_read() -> None:
    sync = Conditions(pull=near, push=f"{HERE}:never", pushes="average", significance="on", execution="lazy")
    assert parse(str(sync)) == sync
    assert sync.needs_significance
    assert not Conditions(pull=near).needs_significance
