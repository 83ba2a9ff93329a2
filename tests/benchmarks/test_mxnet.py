"""MXNet's kvstore beside Paceline: its processes, what is refused, and what the table of `overlap --mxnet` shows.

A module takes the place of MXNet, whose servers only wait. With PACELINE_MXNET, the Python of an environment with
MXNet, the last test runs the real one.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.commands import app_of
from benchmarks.overlap.beside_mxnet import resnet_56, rows_of
from benchmarks.transport import plan
from benchmarks.transport.kvstore import INSTALL, KvTask, KvTimes, require_mxnet, run_kvstore
from benchmarks.transport.plan import MXNET_BSP, Turn
from benchmarks.transport.systems import measure_turn
from paceline.errors import ConfigurationError, RunFailedError
from paceline.start.local import HostMachine
from reproductions.fluent_ps import slicing
from tests.support.marks import thorough

MXNET = """
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

if os.environ.get("DMLC_ROLE"):
    Path(os.environ["FOLDER"], f"{os.environ['DMLC_ROLE']}-{os.getpid()}").touch()
if os.environ.get("DMLC_ROLE") in ("server", "scheduler"):
    time.sleep(3600)

class Array:
    def __init__(self, value):
        self.value = value

    def __setitem__(self, key, value):
        self.value[key] = value

    def wait_to_read(self):
        assert not queued

    def min(self):
        return SimpleNamespace(asscalar=lambda: float(self.value.min()))

    def max(self):
        return SimpleNamespace(asscalar=lambda: float(self.value.max()))

queued = []

class Store:
    rank, num_workers = 0, 1

    def __init__(self, kind):
        assert kind in ("dist_sync", "dist_async")
        while len([*Path(os.environ["FOLDER"]).glob("*-*")]) < 3:
            time.sleep(0.01)

    def init(self, keys, values):
        self.weights = [value.value.copy() for value in values]

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer

    def push(self, key, gradient, priority):
        assert priority == -key
        rate = self.optimizer.learning_rate * self.optimizer.rescale_grad * float(os.environ.get("RATE", 1))
        self.weights[key] -= rate * gradient.value

    def pull(self, key, out, priority):
        out.value[:] = self.weights[key]

    def _barrier(self):
        pass

kv = SimpleNamespace(create=Store)
nd = SimpleNamespace(zeros=lambda length: Array(np.zeros(length)), waitall=queued.clear)
optimizer = SimpleNamespace(SGD=SimpleNamespace)
"""
TASK = KvTask("bsp", [[3], [2, 1]], 0.5, warm_up=1, iterations=3, compute_s=0.01)
HERE = HostMachine()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which each process that imports the module leaves a file with its number."""
    (tmp_path / "mxnet.py").write_text(MXNET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


def processes(folder: Path) -> dict[str, int]:
    """Return role and number of all processes that there were."""
    found = (path.name.split("-") for path in folder.glob("*-*"))
    return {role: int(number) for role, number in found}


def require_ended(folder: Path, roles: set[str]) -> None:
    found = processes(folder)
    assert {*found} == roles
    for number in found.values():
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


# -- what it refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["transport", "overlap"])
@pytest.mark.parametrize(
    ("python", "words"),
    [("/nowhere/python", "No such file or directory"), (sys.executable, "No module named 'mxnet'")],
)
def test_a_python_without_mxnet_is_refused_with_the_command_that_installs_it(
    command: str, python: str, words: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        CliRunner().invoke(app_of([command]), [command, "--mxnet", python], catch_exceptions=False)
    assert f"mxnet is {python!r}, which cannot import MXNet" in str(error.value)
    assert words in str(error.value)
    assert INSTALL in str(error.value)


def test_the_system_is_refused_without_its_python() -> None:
    with pytest.raises(ConfigurationError, match="mxnet is not given, expected --mxnet PYTHON"):
        CliRunner().invoke(app_of(["transport"]), ["transport", "--systems", "mxnet"], catch_exceptions=False)


def test_there_is_no_picture_of_it(tmp_path: Path) -> None:
    options = ["--mxnet", sys.executable, "--picture", str(tmp_path / "a.png")]
    with pytest.raises(ConfigurationError, match="picture is given"):
        CliRunner().invoke(app_of(["overlap"]), ["overlap", *options], catch_exceptions=False)


# -- what it measures ----------------------------------------------------------------------------------------


def test_it_is_only_measured_on_request() -> None:
    [*turns] = plan.turns_of((1.0,), (2,), 2, ("mxnet", "floor"), (), "python")
    assert [turn.cases[0].system for turn in turns] == ["floor", "mxnet", "mxnet"]
    assert "mxnet" not in plan.SYSTEMS


def test_the_layers_are_those_of_the_exhibit() -> None:
    parameters = [math.prod(parameter.shape) for parameter in slicing.resnet_56().parameters]
    assert [length for layer in resnet_56() for length in layer] == parameters


def test_rows_compare_medians_over_rounds_with_the_first_setting() -> None:
    slow = [[KvTimes(0.5, 0.1), KvTimes(0.7, 0.1)], [KvTimes(0.9, 0.1)] * 2, [KvTimes(0.3, 0.2)] * 2]
    first, second = rows_of({"a": slow, "b": [[KvTimes(0.2, 0.1)] * 2]})
    assert (first.communication_ms, first.low_ms, first.high_ms) == pytest.approx((500.0, 100.0, 800.0))
    assert (first.iteration_ms, first.saved, first.faster) == pytest.approx((600.0, 0.0, 1.0))
    assert (second.communication_ms, second.saved, second.faster) == pytest.approx((100.0, 0.8, 3.0))


# -- its processes -------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, *thorough(False)])
def test_a_job_measures_and_leaves_no_process(folder: Path, overlap: bool) -> None:
    require_mxnet(sys.executable)
    task = KvTask("bsp", TASK.layers, 0.5, warm_up=1, iterations=3, compute_s=0.01, overlap=overlap)
    [found] = run_kvstore(sys.executable, task, HERE.host, [HERE], [HERE])
    assert found.whole_s >= 0.01
    assert found.bare_s >= 0.01
    require_ended(folder, {"worker", "server", "scheduler"})


@pytest.mark.processes
def test_a_turn_of_transport_runs_a_job(folder: Path) -> None:
    [(mode, time_s)] = measure_turn(Turn((MXNET_BSP,), 0.004, 1, 1, 3, mxnet=sys.executable)).items()
    assert mode == "bsp"
    assert time_s > 0
    require_ended(folder, {"worker", "server", "scheduler"})


@pytest.mark.processes
def test_wrong_weights_fail_the_job_and_end_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "2")
    with pytest.raises(RunFailedError, match=r"the weights of key 0 are .*, expected -2"):
        run_kvstore(sys.executable, TASK, HERE.host, [HERE], [HERE])
    require_ended(folder, {"worker", "server", "scheduler"})


@pytest.mark.processes
def test_ctrl_c_ends_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        time_sleep(0.05)
        if len(processes(folder)) == 3:
            raise KeyboardInterrupt

    time_sleep = time.sleep
    monkeypatch.setattr(time, "sleep", interrupted)
    endless = KvTask("bsp", TASK.layers, 0.5, warm_up=1, iterations=10**6, compute_s=0.01)
    with pytest.raises(KeyboardInterrupt):
        run_kvstore(sys.executable, endless, HERE.host, [HERE], [HERE])
    require_ended(folder, {"worker", "server", "scheduler"})


@pytest.mark.processes
@pytest.mark.skipif("PACELINE_MXNET" not in os.environ, reason="PACELINE_MXNET names no Python with MXNet")
@pytest.mark.parametrize(("mode", "overlap"), [("bsp", True), ("bsp", False), ("asp", True)])
def test_mxnet_trains_over_two_servers(mode: str, overlap: bool) -> None:
    task = KvTask(mode, [[3000], [20, 10]], 0.5, warm_up=1, iterations=3, compute_s=0.01, overlap=overlap)
    variables = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}
    found = run_kvstore(os.environ["PACELINE_MXNET"], task, HERE.host, [HERE] * 2, [HERE] * 2, variables)
    assert len(found) == 2
