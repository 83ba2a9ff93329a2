"""The names that users write. Whoever changes one of these lists changes the interface."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import sync, zipline


def test_the_package_exports_these_names_and_no_others() -> None:
    assert dir(paceline) == [
        "Cluster",
        "DistributedOptimizer",
        "LARS",
        "RunResult",
        "SimResult",
        "__version__",
        "barrier",
        "checkpoint",
        "device",
        "distribute",
        "epochs",
        "errors",
        "evaluating",
        "is_main",
        "launch",
        "log",
        "partition",
        "prepare",
        "reduce",
        "register_elementwise",
        "register_tensorwise",
        "save",
        "set_sync",
        "sim",
        "simulate",
        "study",
        "sync",
        "track",
        "worker_count",
        "worker_index",
        "zipline",
    ]


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2.6.0+cu124", True), ("1.13.1", True), ("2.7.1+cpu", False), ("3.0.0a0", False)],
)
def test_a_torch_that_is_too_old_is_refused_in_one_sentence(
    version: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch is imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = {version!r}\n")
    places = f"sys.path[:0] = [{str(tmp_path)!r}, {str(Path(paceline.__file__).parents[1])!r}]"
    program = f"import sys; {places}; import paceline"
    command = tmp_path / "paceline"  # as pip installs it
    command.write_text(program)
    imported, called = (
        subprocess.run([sys.executable, *words], capture_output=True, text=True)
        for words in (("-c", program), (command,))
    )
    sentence = (
        f"Paceline {paceline.__version__} needs torch 2.7 or newer, but torch {version} is installed; run: pip install "
        "'torch>=2.7'"
    )
    assert imported.returncode == int(refused), imported.stderr
    assert imported.stderr.splitlines()[-1:] == [f"ImportError: {sentence}"] * refused
    assert (called.returncode, called.stderr) == ((2, f"error: {sentence}\n") if refused else (0, ""))


def test_sync_models_are_these_under_these_names() -> None:
    assert sync.__all__ == [
        "ASP",
        "BSP",
        "DSPS",
        "DSSP",
        "MODELS",
        "PSSP",
        "SSP",
        "Conditions",
        "DropStragglers",
        "DynamicPSSP",
        "ElasticBSP",
        "JobMachine",
        "Machine",
        "NaiveWaiting",
        "PullState",
        "PushState",
        "Rennala",
        "Ringmaster",
        "ShardMachine",
        "SpecSync",
        "SyncModel",
        "parse",
        "register",
    ]


def test_sync_models_have_these_parameters_and_defaults() -> None:
    required = {
        "drop-stragglers": "drop-stragglers:quorum=3",
        "naive-waiting": "naive-waiting:delay_s=0.5",
        "rennala": "rennala:batch=4",
        "ringmaster": "ringmaster:threshold=8",
        "conditions": "conditions:pull=package.module:function",
    }
    written = {name: str(sync.parse(required.get(name, name))) for name in sync.MODELS}
    assert written == {
        "bsp": "bsp",
        "asp": "asp",
        "ssp": "ssp:staleness=3",
        "dssp": "dssp:lower=3,upper=15",
        "dsps": "dsps:lower=1,upper=15",
        "pssp": "pssp:staleness=3,probability=0.5",
        "dynamic-pssp": "dynamic-pssp:staleness=3,alpha=1",
        "drop-stragglers": "drop-stragglers:quorum=3",
        "naive-waiting": "naive-waiting:delay_s=0.5",
        "elastic-bsp": "elastic-bsp:lookahead=15",
        "spec-sync": "spec-sync",
        "rennala": "rennala:batch=4",
        "ringmaster": "ringmaster:threshold=8",
        "conditions": "conditions:pull=package.module:function",
    }


def test_the_solver_has_these_names_and_arguments() -> None:
    assert {"solve", "solve_periodic"} <= set(zipline.__all__)
    assert list(inspect.signature(zipline.solve).parameters)[:2] == ["times", "method"]
    assert inspect.signature(zipline.solve).parameters["method"].default == "auto"
    assert list(inspect.signature(zipline.solve_periodic).parameters)[:3] == ["last", "interval", "lookahead"]
    solution = zipline.solve([[1.0, 2.0], [2.5, 3.0]])
    assert (solution.wait, solution.barrier, solution.picks.tolist()) == (0.5, 2.5, [1, 0])
    assert solution.candidates >= 1


def test_the_result_of_a_run_has_these_attributes() -> None:
    names = {name for name, _ in inspect.getmembers(paceline.RunResult) if not name.startswith("_")}
    assert {"state_dict", "summary", "run_dir", "trace", "history"} <= names


def test_launch_takes_these_arguments() -> None:
    parameters = inspect.signature(paceline.launch).parameters
    assert next(iter(parameters)) == "function"
    assert {"workers", "servers", "sync", "engine", "transport", "seed", "pace", "slowdown", "jitter"} <= (
        parameters.keys()
    )


@pytest.mark.parametrize("name", [name for name in dir(paceline) if name != "__version__"])
def test_every_public_name_can_be_used_and_explains_itself(name: str) -> None:
    assert inspect.getdoc(getattr(paceline, name))


def test_what_the_package_lists_is_what_it_has() -> None:
    assert sorted([*paceline.__all__, "__version__"]) == dir(paceline)
    assert pydoc.locate("paceline.DistributedOptimizer") is paceline.DistributedOptimizer


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'nothing_such'"):
        getattr(paceline, "nothing_such")  # noqa: B009
