"""Every sync model in a live run: real sockets, real memory, and what the traces say of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigurationError, RunFailedError
from paceline.sim import Cluster, simulate
from paceline.sync import Conditions, PullState, parse
from paceline.sync.actions import AnswerPull, ApplyMean, ApplyPush, DropPush, ReportFault, RestartWorker
from paceline.sync.events import IterationStarted, PullRepeated, PushReceived
from paceline.trace import Trace, read_run, replay
from paceline.trace.measures import Measures, measure
from paceline.trace.recording import read_records
from paceline.train.data import distribute
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.session import worker_index
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

MODELS = [
    "bsp",
    "asp",
    "asp:push_scale=1/n",
    "asp:push_scale=1/tau",
    "ssp:staleness=1",
    "ssp:staleness=1,execution=lazy",
    "dssp:lower=1,upper=4",
    "dsps:lower=1,upper=4",
    "pssp:staleness=1,probability=0.5",
    "pssp:staleness=1,probability=0.5,draws=per-shard",
    "dynamic-pssp:staleness=1,alpha=significance",
    "drop-stragglers:quorum=2",
    "naive-waiting:delay_s=0.002",
    "elastic-bsp:lookahead=4",
    "spec-sync",
    "spec-sync:abort_time_s=0.003,abort_rate=0.1",
    "spec-sync:base=ssp:staleness=2,abort_time_s=0.003,abort_rate=0.1",
    "bsp|ssp:staleness=2|asp",
    "ssp:staleness=3|pssp:staleness=3,probability=0.5|drop-stragglers:quorum=2",
    "bsp@0,asp@5,elastic-bsp:lookahead=2@10,spec-sync@15",
]
REPRESENTATIVES = {
    "bsp": "tcp",
    "ssp:staleness=1": "tcp",
    "elastic-bsp:lookahead=4": "shm",
    "spec-sync:abort_time_s=0.003,abort_rate=0.1": "shm",
    "ssp:staleness=3|pssp:staleness=3,probability=0.5|drop-stragglers:quorum=2": "tcp",
    "bsp@0,asp@5,elastic-bsp:lookahead=2@10,spec-sync@15": "shm",
}
"""Model -> transport, for every kind of decision: averages, staleness, draws and drops, plans, restarts, changes."""

PACE_S = (0.004, 0.004, 0.012)
STEPS = 20


def training(
    steps: int = STEPS, meanwhile: Callable[[int], None] = lambda iteration: None
) -> Callable[[], None]:
    """A function that trains a small net for so many iterations."""

    def train() -> None:
        model = nn.Linear(6, 3).to(torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for iteration in range(steps):
            meanwhile(iteration)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(2, 6, dtype=torch.float64)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    return train


def fates(trace: Trace) -> dict[tuple[int, int], int]:
    """(worker, iteration) -> how often that push was applied, averaged or dropped."""
    counted: dict[tuple[int, int], int] = {}
    for entry in trace.entries:
        if isinstance(entry.event, PushReceived) and entry.refused is None:
            counted[entry.event.worker, entry.event.iteration] = 0
        for action in entry.actions:
            match action:
                case ApplyPush(worker, iteration) | DropPush(worker, iteration):
                    counted[worker, iteration] += 1
                case ApplyMean(pushes):
                    for key in pushes:
                        counted[key] += 1
                case _:
                    pass
    return counted


@pytest.mark.parametrize(
    ("sync", "transport"),
    [
        *REPRESENTATIVES.items(),
        *thorough(*(pair for pair in product(MODELS, ["tcp", "shm"]) if pair not in REPRESENTATIVES.items())),
    ],
)
def test_every_model_runs_live_loses_no_push_and_replays_to_identical_actions(
    run_on_threads: RunOnThreads, sync: str, transport: str
) -> None:
    run = run_on_threads(
        training(), workers=3, servers=3, sync=sync, pace=PACE_S, jitter=0.3, transport=transport
    )
    for trace in run.shards:
        counted = fates(trace)
        assert counted == {(worker, iteration): 1 for worker in range(3) for iteration in range(STEPS)}
        assert not [entry for entry in trace.entries if entry.refused]
    for trace in run.traces:
        assert replay(trace) == []


@pytest.mark.parametrize(
    "sync", ["rennala:batch=2", "ringmaster:threshold=2,stop=true", *thorough("ringmaster:threshold=2")]
)
def test_models_that_need_one_shard_run_live_and_apply_no_outdated_gradient(
    run_on_threads: RunOnThreads, sync: str
) -> None:
    run = run_on_threads(training(), workers=3, servers=1, sync=sync, pace=(0.004, 0.004, 0.02))
    assert set(fates(run.shards[0]).values()) == {1}
    measures = measure(run.shards)
    assert measures.max_staleness <= ("ringmaster" in sync)
    assert (measures.restarts > 0) == ("stop" in sync)
    for trace in run.traces:
        assert replay(trace) == []


# -- what the models are for --------------------------------------------------------------------------------


def figures(
    run_on_threads: RunOnThreads,
    sync: str,
    transport: str = "auto",
    pace: tuple[float, float, float] = PACE_S,
) -> Measures:
    """Of three workers, one three times slower than the others."""
    run = run_on_threads(training(), workers=3, servers=2, transport=transport, sync=sync, pace=pace)
    written = ",".join(map(str, pace))
    for trace in run.traces:
        assert trace.header.sync == sync
        assert trace.header.emulated == f"--pace {written} (minimum seconds per iteration)"
        assert replay(trace) == []
    measures = measure(run.shards, run.traces[-1])
    assert measures.iterations == {0: STEPS, 1: STEPS, 2: STEPS}
    assert measures.dropped_pushes == 0
    return measures


def test_under_bsp_no_gradient_is_stale_and_nobody_runs_ahead(run_on_threads: RunOnThreads) -> None:
    found = figures(run_on_threads, "bsp")
    assert found.max_staleness == 0
    assert found.max_gap == 0
    assert found.updates == STEPS


def test_under_ssp_3_the_fast_run_ahead_but_never_by_more_than_3(run_on_threads: RunOnThreads) -> None:
    found = figures(run_on_threads, "ssp:staleness=3")
    assert 1 <= found.max_gap <= 3
    assert found.updates == 3 * STEPS


def test_under_asp_nobody_waits(run_on_threads: RunOnThreads) -> None:
    found = figures(run_on_threads, "asp", transport="tcp")
    assert found.delayed_pulls == 0
    assert found.waiting_share == 0.0
    assert found.updates == 3 * STEPS


@pytest.mark.thorough
def test_the_barrier_of_elastic_bsp_costs_less_than_that_of_bsp(run_on_threads: RunOnThreads) -> None:
    pace = (0.02, 0.02, 0.06)
    elastic, bsp = (figures(run_on_threads, sync, pace=pace) for sync in ("elastic-bsp:lookahead=5", "bsp"))
    assert elastic.delayed_pulls < bsp.delayed_pulls
    assert elastic.waiting_share < bsp.waiting_share
    assert 0 < elastic.barriers < bsp.barriers == STEPS
    assert elastic.sync_cost_s < bsp.sync_cost_s
    assert elastic.predicted_sync_cost_s is not None
    assert bsp.predicted_sync_cost_s is None


# -- SpecSync ---------------------------------------------------------------------------------------------


def test_spec_sync_restarts_computations_and_counts_what_was_in_vain(run_on_threads: RunOnThreads) -> None:
    sync = "spec-sync:abort_time_s=0.004,abort_rate=0"
    run = run_on_threads(training(), workers=3, servers=2, sync=sync, pace=(0.01, 0.01, 0.02))
    coordinator = run.traces[-1]
    ordered = {
        (action.worker, action.iteration)
        for entry in coordinator.entries
        for action in entry.actions
        if isinstance(action, RestartWorker)
    }
    again = [
        [(e.event.worker, e.event.iteration) for e in trace.entries if isinstance(e.event, PullRepeated)]
        for trace in run.shards
    ]
    assert again[0]
    assert sorted(again[0]) == sorted(again[1])
    assert len(set(again[0])) == len(again[0]), "an iteration restarts at most once"
    assert set(again[0]) <= ordered
    records = [record for worker in read_records(run.run_dir) for record in worker]
    restarted = [record for record in records if record.dropped_s is not None]
    assert len(restarted) == len(again[0]) == measure(run.shards).restarts
    for record in restarted:
        assert record.restarted_s is not None
        assert record.dropped_s is not None
        assert record.begun_s <= record.dropped_s <= record.restarted_s <= record.computed_s
        assert record.wasted_s == record.restarted_s - record.begun_s > 0
    wasted_s = sum(record.wasted_s for record in records)
    assert sum(use.wasted_s for use in run.time_use.values()) == pytest.approx(wasted_s, rel=0.01)


def test_the_restarted_computation_is_on_fresher_weights(run_on_threads: RunOnThreads) -> None:
    """A restarted push's staleness counts from its second pull."""
    sync = "spec-sync:abort_time_s=0.008,abort_rate=0"
    run = run_on_threads(training(), workers=2, servers=1, sync=sync, pace=(0.005, 0.02))
    [shard] = run.shards
    version = 0
    pulled: dict[tuple[int, int], int] = {}
    checked = 0
    for entry in shard.entries:
        if isinstance(entry.event, PullRepeated):
            pulled[entry.event.worker, entry.event.iteration] = version
        for worker, iteration, staleness in entry.staleness:
            if (worker, iteration) in pulled:
                assert staleness == version - pulled[worker, iteration]
                checked += 1
        version = entry.version or 0
    assert checked


def test_over_ssp_a_timer_starts_when_the_computation_does(run_on_threads: RunOnThreads) -> None:
    sync = "spec-sync:base=ssp:staleness=0,abort_time_s=0.001,abort_rate=0"
    run = run_on_threads(training(6), workers=2, servers=1, sync=sync, pace=(0.002, 0.03))
    answered = {
        (action.worker, action.iteration + 1): entry.event.now_ticks
        for entry in run.shards[0].entries
        for action in entry.actions
        if isinstance(action, AnswerPull) and not isinstance(entry.event, PullRepeated)
    }
    started = [e.event for e in run.traces[-1].entries if isinstance(e.event, IterationStarted)]
    assert len(started) >= 2 * 5
    for event in started:
        assert event.now_ticks >= answered[event.worker, event.iteration]


# -- changes in mid-run -----------------------------------------------------------------------------------


def in_force(trace: Trace) -> list[str]:
    """The models that a shard was told to change to, in order."""
    named: list[str] = []
    for entry in trace.entries:
        change = entry.event.change if isinstance(entry.event, PushReceived) else None
        if change is not None and named[-1:] != [change.sync]:
            named.append(change.sync)
    return named


@pytest.mark.parametrize("callers", ["all", "worker 0", "worker 2"])
def test_set_sync_changes_the_model_of_the_job(run_on_threads: RunOnThreads, callers: str) -> None:
    def meanwhile(iteration: int) -> None:
        if callers in ("all", f"worker {worker_index()}"):
            if iteration == 4:
                paceline.set_sync("bsp")
            if iteration == 12:
                paceline.set_sync(paceline.sync.SSP(staleness=2))

    run = run_on_threads(
        training(STEPS, meanwhile), workers=3, servers=2, sync="asp", pace=(0.004, 0.004, 0.008)
    )
    for trace in run.shards:
        assert in_force(trace) == ["bsp", "ssp:staleness=2"]
        assert set(fates(trace).values()) == {1}
    for trace in run.traces:
        assert replay(trace) == []


def test_after_a_change_to_bsp_the_fast_do_not_wait_for_the_gap_they_had_gathered(
    run_on_threads: RunOnThreads,
) -> None:
    def meanwhile(iteration: int) -> None:
        if worker_index() == 0 and iteration == 15:
            paceline.set_sync("bsp")

    run = run_on_threads(training(30, meanwhile), workers=2, servers=2, sync="asp", pace=(0.002, 0.03))
    [first, second] = run.shards
    for trace in (first, second):
        flagged = {
            e.event.worker: e.event.iteration
            for e in trace.entries
            if isinstance(e.event, PushReceived) and e.event.change is not None
        }
        assert flagged[0] >= 15
        assert flagged[1] < flagged[0] - 5, "there was a gap"
        # From there on, both go in step: each mean has one push of each, as far ahead as at the boundary.
        means = [a.pushes for e in trace.entries for a in e.actions if isinstance(a, ApplyMean)]
        both = [pushes for pushes in means if len(pushes) == 2]
        assert both
        for pushes in both:
            iterations = dict(pushes)
            assert iterations[0] - iterations[1] == flagged[0] - flagged[1]


def test_one_shard_can_change_alone(run_on_threads: RunOnThreads) -> None:
    def meanwhile(iteration: int) -> None:
        if iteration == 3:
            paceline.set_sync("bsp", shard=1)

    run = run_on_threads(training(12, meanwhile), workers=2, servers=2, sync="asp")
    for trace in run.shards:
        assert in_force(trace) == ["asp|bsp"]
    last = [[a for e in t.entries[-30:] for a in e.actions] for t in run.shards]
    assert not any(isinstance(action, ApplyMean) for action in last[0])
    assert any(isinstance(action, ApplyMean) for action in last[1])


def test_a_schedule_counts_epochs_by_what_distribute_gave(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        items = torch.utils.data.TensorDataset(torch.ones(12, 1))
        part = distribute(torch.utils.data.DataLoader(items, batch_size=2))
        for _ in range(4):
            for (x,) in part:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    run = run_on_threads(train, workers=2, servers=1, sync="bsp@0,asp@epoch:2")
    flagged = [
        e.event.iteration
        for e in run.shards[0].entries
        if isinstance(e.event, PushReceived) and e.event.change is not None
    ]
    assert len(flagged) == 2
    assert min(flagged) >= 6  # two epochs of three iterations
    assert run.traces[-1].header.sync == "bsp"


def test_a_worker_that_leaves_in_the_middle_of_a_change_holds_nobody_up(run_on_threads: RunOnThreads) -> None:
    def train() -> None:
        steps = 3 if worker_index() == 1 else 12

        def meanwhile(iteration: int) -> None:
            if worker_index() == 0 and iteration == 3:
                paceline.set_sync("bsp")

        training(steps, meanwhile)()

    run = run_on_threads(train, workers=3, servers=2, sync="asp", pace=(0.001, 0.02, 0.002))
    assert [in_force(trace) for trace in run.shards] == [["bsp"], ["bsp"]]


def test_bad_requests_for_a_change_are_refused_in_the_script(run_on_threads: RunOnThreads) -> None:
    messages: list[str] = []

    def meanwhile(iteration: int) -> None:
        if iteration != 1 or worker_index() != 0:
            return
        for sync, shard in [
            ("bps", None),
            ("elastic-bsp", 0),
            ("asp", 5),
            ("drop-stragglers:quorum=9", None),
            (Conditions(pull=lambda state: True), None),
        ]:
            with pytest.raises(ConfigurationError) as caught:
                paceline.set_sync(sync, shard=shard)  # type: ignore[arg-type]
            messages.append(str(caught.value))

    run = run_on_threads(training(4, meanwhile), workers=2, servers=2, sync="asp")
    assert [in_force(trace) for trace in run.shards] == [[], []]
    for message, words in zip(
        messages,
        [
            "did you mean 'bsp'",
            "applies to the whole job",
            "shard is 5, expected a number from 0 to 1",
            "quorum is 9, expected at most 2, the number of workers",
            "Put these into a module",
        ],
        strict=True,
    ):
        assert words in message


def test_without_a_run_set_sync_only_checks_what_it_is_given() -> None:
    paceline.set_sync("bsp")
    with pytest.raises(ConfigurationError, match="did you mean 'bsp'"):
        paceline.set_sync("bps")


# -- a user's own conditions ------------------------------------------------------------------------------


def test_a_model_of_two_lines_is_ssp(run_on_threads: RunOnThreads) -> None:
    sync = Conditions(pull=lambda state: state.gap <= 2)
    run = run_on_threads(training(), workers=3, servers=2, sync=sync, pace=PACE_S)
    assert measure(run.shards).max_gap == 2


def test_a_condition_that_raises_is_reported_and_the_shard_goes_back_to_what_worked(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_late(state: PullState) -> bool:
        return [True][state.progress // 5]

    sync = Conditions(pull=fails_late)
    run = run_on_threads(training(), workers=2, servers=2, sync=sync, pace=(0.002, 0.004))
    for trace in run.shards:
        [fault] = [a for e in trace.entries for a in e.actions if isinstance(a, ReportFault)]
        assert "raised IndexError: list index out of range" in fault.reason
        assert fault.sync == "bsp"
        assert "return [True][state.progress // 5]" in fault.traceback
        assert "sync/plugins.py" not in fault.traceback
        assert set(fates(trace).values()) == {1}
    assert "The shard continues with bsp." in caplog.text
    assert "return [True][state.progress // 5]" in caplog.text


def test_a_simulation_reports_a_condition_that_fails_in_the_words_of_a_live_run(
    run_on_threads: RunOnThreads, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_at_once(state: PullState) -> bool:
        raise KeyError("loss")

    sync = Conditions(pull=fails_at_once)
    run_on_threads(training(), workers=2, servers=1, sync=sync)
    live = _faults(caplog, "paceline.coordinator")
    assert len(live) == 1
    caplog.clear()
    result = simulate(Cluster(compute_s=[1.0, 2.0]), sync, train_fn=training())
    assert result.measures.iterations == {0: STEPS, 1: STEPS}
    assert [fault for fault in result.faults if fault.startswith("shard")] == live
    assert _faults(caplog, "paceline.sim") == live


def _faults(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """Return the faults of shards that were logged, without the warning that the workers train on the same data.

    Whether their gradients are equal depends on the order in which threads draw from the same generator.
    """
    messages = [record.getMessage() for record in caplog.records if record.name == logger]
    return [message for message in messages if message.startswith("shard")]


ELSEWHERE = "a_module_that_is_only_here"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that could be imported; nobody has."""
    tmp_path.joinpath(f"{ELSEWHERE}.py").write_text("def close(state):\n    return state.gap <= 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield ELSEWHERE
    sys.modules.pop(ELSEWHERE, None)


def test_a_condition_whose_module_was_not_named_at_the_launch_is_refused_in_the_script(
    run_on_threads: RunOnThreads, elsewhere: str
) -> None:
    messages: list[str] = []

    def meanwhile(iteration: int) -> None:
        if iteration == 1:
            with pytest.raises(ConfigurationError) as caught:
                paceline.set_sync(f"conditions:pull={elsewhere}:close")
            messages.append(str(caught.value))

    run = run_on_threads(training(3, meanwhile), workers=2, sync="asp")
    assert set(messages) == {
        f"conditions: the module of '{elsewhere}:close' was not named when the run was launched. Launch the run "
        f"with --import {elsewhere}, or with launch(imports=['{elsewhere}'])."
    }
    assert [in_force(trace) for trace in run.shards] == [[]]
    assert elsewhere not in sys.modules


@pytest.mark.parametrize("imports", [True, False])
def test_a_condition_of_a_module_that_was_named_at_the_launch_may_be_changed_to(
    run_on_threads: RunOnThreads, elsewhere: str, imports: bool
) -> None:
    """By --import, or as another condition of the schedule."""

    def meanwhile(iteration: int) -> None:
        if iteration == 2:
            paceline.set_sync(f"conditions:pull={elsewhere}:close,execution=lazy")

    wanted = f"conditions:pull={elsewhere}:close,execution=lazy"
    named: dict[str, Any] = {"sync": "asp", "imports": [elsewhere]}
    if not imports:
        named = {"sync": f"asp@0,conditions:pull={elsewhere}:close@1000"}
    run = run_on_threads(training(6, meanwhile), workers=2, **named)
    assert [in_force(trace) for trace in run.shards] == [[wanted]]


@pytest.mark.parametrize("names", [["nowhere_at_all"], ["sys", "nowhere.at.all"]])
def test_a_module_that_cannot_be_imported_is_an_error_before_the_start(
    names: list[str], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigurationError, match=f"the module '{names[-1]}' cannot be imported: ModuleNotFoundError"
    ):
        paceline.launch(training(), workers=1, imports=names, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("failing")
def test_models_that_stall_everybody_end_the_run_with_a_report_of_who_waits_for_what(tmp_path: Path) -> None:
    """Shard 0 has conditions, which describe what pulls wait for. The model of shard 1 has no method `waits`."""
    begun_s = time.monotonic()
    with pytest.raises(RunFailedError) as caught:
        paceline.launch(
            training(5),
            workers=2,
            servers=1,
            shards=2,
            sync=[
                Conditions(pull=lambda state: False, push=lambda state: False),
                parse("failing:how=blocks"),
            ],
            imports=["failing_models"],
            run_dir=tmp_path / "run",
            progress=False,
        )
    assert time.monotonic() - begun_s < 60
    report = str(caught.value)
    assert "every worker waits" in report
    for worker in range(2):
        assert f"worker {worker}, after its iteration 0, waits at shard 0 (conditions:" in report
        assert (
            f"worker {worker}, after its iteration 0, waits at shard 1 (failing:how=blocks) for the sync model "
            "failing:how=blocks, which does not describe its delayed pulls" in report
        )
    assert "for round 0 (2 of 2 workers have pushed round 0)" in report
    assert threading.active_count() < 20


@pytest.mark.processes
def test_a_condition_from_the_users_own_module_runs_in_the_servers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def close(state):\n    return state.gap <= 1\n")
    (tmp_path / "later.py").write_text("def closer(state):\n    return state.gap <= 0\n")
    (tmp_path / "train.py").write_text(
        "import torch, paceline\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for iteration in range(8):\n"
        "    if iteration == 4:\n"
        "        paceline.set_sync('conditions:pull=later:closer')\n"
        "    def closure():\n"
        "        optimizer.zero_grad()\n"
        "        loss = model(torch.ones(1, 2)).square().mean()\n"
        "        loss.backward()\n"
        "        return loss\n"
        "    optimizer.step(closure)\n"
    )
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--workers",
        "1",
        "--servers",
        "1",
        "--run-dir",
        "out",
    ]
    ended = subprocess.run(
        [*command, "--sync", "conditions:pull=mine:close", "--import", "later", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "conditions:pull=mine:close" in ended.stdout
    [shard] = [trace for trace in read_run(tmp_path / "out") if trace.header.host == "shard"]
    assert in_force(shard) == ["conditions:pull=later:closer"]
