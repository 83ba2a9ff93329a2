"""Runs in real processes: what they leave behind, and what happens when one of them, or the launcher, is killed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

import paceline
from paceline.errors import RunFailedError
from paceline.look.causes import COMPARE, evidence_of, sentences_of
from paceline.look.run_reading import read_report
from paceline.sync.actions import ApplyMean, PublishPlan
from paceline.trace import replay
from paceline.trace.findings import find
from paceline.trace.measures import measure
from tests.support.live import (
    DEADLINE_S,
    await_that,
    descriptors,
    meanwhile,
    processes,
    run_program,
    start_program,
    times_in,
    train,
)
from tests.support.marks import thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

SYNC = "elastic-bsp:lookahead=5"
STEPS = 24

# A script that goes on until somebody ends it.
ENDLESS = """
import workout

workout.train(10**9, progress="progress")
"""


@pytest.fixture
def starts(request: pytest.FixtureRequest) -> None:
    """How the programs of a test start: "warm", or "plain", as those of users do."""
    if request.param == "plain":
        request.getfixturevalue("plain_starts")


# -- one run, looked at from all sides -----------------------------------------------------------------------

TheRun = Callable[[], paceline.RunResult]


@pytest.fixture(scope="module")
def left_open() -> list[object]:
    """The descriptors and threads that this process has more after the launch than before."""
    return []


@pytest.fixture(scope="module")
def the_run(tmp_path_factory: pytest.TempPathFactory, left_open: list[object]) -> TheRun:
    """the_run(): a run of two workers, one three times slower than the other; made once."""
    made: list[paceline.RunResult] = []

    def run() -> paceline.RunResult:
        if not made:
            open_before, threads_before = descriptors(), threading.enumerate()
            result = paceline.launch(
                train(),
                args=(STEPS,),
                workers=2,
                servers=2,
                sync=SYNC,
                pace=(0.03, 0.09),
                run_dir=tmp_path_factory.mktemp("runs") / "run",
                progress=False,
                snapshot_every_s=0.1,
            )
            made.append(result)
            left_open.extend(descriptors().items() - open_before.items())
            left_open.extend(thread for thread in threading.enumerate() if thread not in threads_before)
        return made[0]

    return run


def test_a_live_trace_replays_to_identical_actions(the_run: TheRun) -> None:
    result = the_run()

    hosts = [(trace.header.host, trace.header.index) for trace in result.trace]
    assert hosts == [("shard", 0), ("shard", 1), ("coordinator", 0)]
    for trace in result.trace:
        assert trace.header.sync == SYNC
        assert trace.header.emulated == "--pace 0.03,0.09 (minimum seconds per iteration)"
        assert not [entry for entry in trace.entries if entry.refused]
        assert replay(trace) == []


def test_every_worker_trains_to_its_end_and_the_summary_says_so(the_run: TheRun) -> None:
    result = the_run()

    assert json.loads((result.run_dir / "summary.json").read_text()) == result.summary
    assert result.summary["sync"] == SYNC
    assert result.summary["workers"] == 2
    assert result.summary["lost_workers"] == []
    assert result.summary["iterations"] == {"0": STEPS, "1": STEPS}
    assert result.summary["emulated"] == "--pace 0.03,0.09 (minimum seconds per iteration)"
    assert result.summary["dropped_pushes"] == 0
    *shards, coordinator = result.trace
    measures = measure(shards, coordinator)
    for figure in ("updates", "delayed_pulls", "max_gap", "max_staleness", "waiting_share", "gradients"):
        assert result.summary[figure] == getattr(measures, figure)
    for figure in ("barriers", "sync_cost_s", "predicted_sync_cost_s"):
        assert result.summary[figure] == getattr(measures, figure) is not None
    assert all(use.computing_s > use.outside_s for use in times_in(result.summary).values())
    evidence = evidence_of(result.summary, str(result.run_dir))
    assert evidence is not None
    assert result.summary["findings"] == find(measures, lost_time=sentences_of(evidence))
    causes = read_report(result.run_dir).causes
    in_report = [each for cause in causes for each in (cause.words, *cause.remedies)]
    assert in_report == [each for each in result.summary["findings"] if COMPARE not in each]


def test_the_barrier_of_elastic_bsp_is_planned(the_run: TheRun) -> None:
    *shards, coordinator = the_run().trace

    plans = [
        action.plan
        for entry in coordinator.entries
        for action in entry.actions
        if isinstance(action, PublishPlan)
    ]
    assert [plan.superstep for plan in plans] == list(range(len(plans)))
    assert plans[0].members == (0, 1)
    for shard in shards:
        assert any(isinstance(action, ApplyMean) for entry in shard.entries for action in entry.actions)


def test_the_weights_file_loads_without_paceline_and_has_both_names_of_tied_weights(the_run: TheRun) -> None:
    result = the_run()
    weights = safetensors.torch.load_file(result.run_dir / "weights.safetensors")

    model = importlib.import_module("workout").make()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    assert weights.keys() == result.state_dict.keys() == first.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, result.state_dict[name])
        assert not torch.equal(tensor, first[name]), f"{name} is as it was before the run"
    assert torch.equal(weights["encoder.weight"], weights["decoder.weight"])


def test_the_run_directory_holds_the_results_and_what_each_process_printed(the_run: TheRun) -> None:
    run_dir = the_run().run_dir

    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock-1",  # the marker of a free lock
        "metrics.jsonl",
        "report.html",
        "run.json",
        "script.py",
        "server-0.log",
        "server-1.log",
        "summary.json",
        "trace-coordinator.jsonl",
        "trace-shard-0.jsonl",
        "trace-shard-1.jsonl",
        "weights.safetensors",
        "worker-0.jsonl",
        "worker-0.log",
        "worker-1.jsonl",
        "worker-1.log",
    ]
    for worker in range(2):
        assert (run_dir / f"worker-{worker}.log").read_text() == f"this is worker {worker} of 2\n"
    for server in range(2):
        assert (run_dir / f"server-{server}.log").read_text() == ""


def test_the_report_of_a_run_tells_what_the_summary_and_the_settings_tell(the_run: TheRun) -> None:
    result = the_run()
    report = read_report(result.run_dir)
    assert (report.state, report.duration_s) == ("finished", result.summary["duration_s"])
    assert [worker.iterations for worker in report.workers] == list(result.summary["iterations"].values())
    assert {setting.name: setting.value for setting in report.settings}["--pace"] == "0.03,0.09"
    assert report.timeline is not None
    assert sum(len(spans.begun) for spans in report.timeline.spans) == 2 * STEPS
    assert report.headline in (result.run_dir / "report.html").read_text()


def test_snapshots_are_taken_in_order_while_the_run_goes_on(the_run: TheRun) -> None:
    result = the_run()

    times_s = [time_s for time_s, _ in result.snapshots]
    versions = [snapshot.versions for _, snapshot in result.snapshots]
    assert len(times_s) >= 2
    assert times_s == sorted(times_s)
    assert versions == sorted(versions)
    assert all(snapshot.state_dict.keys() == result.state_dict.keys() for _, snapshot in result.snapshots)


def test_a_launch_leaves_no_descriptor_and_no_thread(the_run: TheRun, left_open: list[object]) -> None:
    the_run()

    assert left_open == []


# -- where the function comes from ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), *thorough((("-W", "error"),))], ids=str)
def test_a_function_of_an_unguarded_script_trains_and_the_script_runs_once(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        """
import torch
import paceline

with open("counter", "a") as counter:
    counter.write("once\\n")

SIZE = 3
model = torch.nn.Linear(SIZE, 1)  # of the launcher; each worker makes its own


def fit(steps):
    try:
        paceline.launch(fit, args=(1,), workers=1)
    except paceline.errors.UsageError as error:
        print(f"explained: {error}")
    model = torch.nn.Linear(SIZE, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, SIZE)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


result = paceline.launch(fit, args=(5,), workers=1, servers=1, run_dir="run")
print(result.summary["updates"], sorted(result.state_dict))
"""
    )
    ended = run_program(*options, "script.py")

    assert ended.stderr == ""
    assert ended.returncode == 0
    assert (tmp_path / "counter").read_text() == "once\n"
    explained, result = ended.stdout.splitlines()
    assert explained.startswith("explained: launch() was called inside a worker.")
    assert "if __name__ == '__main__':" in explained
    assert result == "5 ['bias', 'weight']"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run"]


# -- what fails ----------------------------------------------------------------------------------------------


def test_the_others_finish_when_a_worker_is_killed(tmp_path: Path) -> None:
    result = paceline.launch(
        train(),
        args=(20, (1, 7)),
        workers=3,
        servers=1,
        sync=SYNC,
        pace=(0.01, 0.01, 0.03),
        run_dir=tmp_path / "run",
        progress=False,
    )

    assert result.summary["lost_workers"] == [1]
    assert result.summary["iterations"] == {"0": 20, "1": 7, "2": 20}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["lost_workers"] == [1]
    for trace in result.trace:
        assert replay(trace) == []
    assert all(tensor.isfinite().all() for tensor in result.state_dict.values())


@pytest.mark.usefixtures("plain_starts")
def test_a_killed_server_ends_the_run_which_names_it(mark: str, tmp_path: Path) -> None:
    def kill() -> None:
        await_that((tmp_path / "progress-0").exists, "worker 0 trains")
        os.kill(processes(mark)["server 1"], signal.SIGKILL)

    with meanwhile(kill), pytest.raises(RunFailedError) as caught:
        paceline.launch(
            train(),
            args=(10**9, None, None, str(tmp_path / "progress")),
            workers=1,
            servers=2,
            run_dir=tmp_path / "run",
            progress=False,
        )

    assert caught.value.process == "server 1"
    assert str(caught.value) == "server 1 failed: it was terminated by signal SIGKILL"
    assert processes(mark) == {}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["ended"], summary["failure"]) == ("failed", str(caught.value))


def test_a_gradient_with_nan_stops_the_run_naming_worker_iteration_and_parameter(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        paceline.launch(
            train(),
            args=(10**9, None, (1, 4)),
            workers=2,
            servers=1,
            run_dir=tmp_path / "run",
            progress=False,
        )

    assert caught.value.process == "worker 1"
    assert "worker 1, iteration 4: the gradient of 'norm.bias' contains NaN or inf" in caught.value.reason
    assert "--on-nan skip" in caught.value.reason


@pytest.mark.parametrize("starts", ["warm", *thorough("plain")], indirect=True)
def test_a_script_that_raises_shows_its_own_traceback_once(starts: None, mark: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        """
import paceline
import workout

workout.train(5)
raise ValueError("the labels are missing")
"""
    )
    ended = run_program(
        "-m", "paceline", "run", "--workers", "1", "--servers", "1", "--run-dir", "run", "wrong.py"
    )

    assert ended.returncode == 1
    assert processes(mark) == {}
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert (
        ended.stderr.count("ValueError: the labels are missing\n") == 2
    )  # the headline and the traceback's end
    lines = ended.stderr.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert lines[start - 1] == "error: worker 0 failed: ValueError: the labels are missing"
    assert "wrong.py" in lines[start + 1]
    assert "line 6" in lines[start + 1]
    assert f"the output of worker 0 is in {tmp_path}/run/worker-0.log" in ended.stderr
    assert "Traceback" not in ended.stdout


# -- the launcher ends ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def endless_run(mark: str, tmp_path: Path, workers: int) -> Iterator[subprocess.Popen[str]]:
    """`paceline run` of a script without an end, with all its processes in the middle of training."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    with start_program(
        *("-m", "paceline", "run", "--workers", str(workers), "--servers", "1", "--sync", "asp", "endless.py")
    ) as launcher:
        try:
            for worker in range(workers):
                await_that(
                    lambda worker=worker: (  # type: ignore[misc]
                        (tmp_path / f"progress-{worker}").exists() or launcher.poll() is not None
                    ),
                    f"worker {worker} trains",
                )
            expected = [
                "fork server",
                "launcher",
                "server 0",
                *(f"worker {worker}" for worker in range(workers)),
            ]
            assert sorted(processes(mark)) == expected
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.kill()


def test_every_process_ends_when_the_launcher_is_killed(mark: str, tmp_path: Path) -> None:
    with endless_run(mark, tmp_path, workers=1) as launcher:
        launcher.kill()
        launcher.communicate(timeout=DEADLINE_S)
        await_that(lambda: not processes(mark), "all processes have ended with their launcher")

    assert launcher.returncode == -signal.SIGKILL


@pytest.mark.parametrize("starts", ["warm", *thorough("plain")], indirect=True)
def test_ctrl_c_ends_every_process_and_exits_with_130(starts: None, mark: str, tmp_path: Path) -> None:
    with endless_run(mark, tmp_path, workers=2) as launcher:
        launcher.send_signal(signal.SIGINT)
        _, stderr = launcher.communicate(timeout=DEADLINE_S)
        assert processes(mark) == {}

    assert launcher.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted: all processes of the run have ended"
    assert "Traceback" not in stderr
