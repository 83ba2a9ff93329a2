"""Two versions of torch in one run. Only `make versions` runs these tests, because they need two environments.

The tests run with one version, and PACELINE_OTHER_PYTHON is the interpreter of the other one, which is older.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.live import mark
from tests.support.served import ENDLESS_SCRIPT, SCRIPT, Served, await_training, enough, output

__all__ = ["mark"]

if not os.environ.get("PACELINE_OTHER_PYTHON"):
    pytest.skip("only `make versions` has two versions of torch", allow_module_level=True)

OWN, OTHER = sys.executable, os.environ["PACELINE_OTHER_PYTHON"]
EPOCHS = "5"
DEADLINE_S = 600.0  # several programs import torch, each from another place
SGD = "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)"
ADAM = SCRIPT.replace(SGD, "torch.optim.Adam(model.parameters())")
MUON = (  # trains matrices only, until the file "enough" exists
    ENDLESS_SCRIPT.replace("torch.nn.Linear(6, 8)", "torch.nn.Linear(6, 8, bias=False)")
    .replace("torch.nn.Linear(8, 1)", "torch.nn.Linear(8, 1, bias=False)")
    .replace(SGD, "torch.optim.Muon(model.parameters())")
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("mark", "plain_starts")]


def version(python: str) -> str:
    """Return the version of torch that an interpreter imports."""
    program = "import torch; print(torch.__version__.partition('+')[0])"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def weights(
    serves: str, workers: list[str], script: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Train in a run that one interpreter serves, with a worker of each of the others, and return the weights."""
    folder.mkdir()
    with monkeypatch.context() as place:
        place.chdir(folder)
        place.setattr(sys, "executable", serves)
        served = Served("--workers", str(len(workers)), "--servers", "1")
        Path("train.py").write_text(script)
        joined = []
        for number, worker in enumerate(workers):
            place.setattr(sys, "executable", worker)
            joined.append(served.join(EPOCHS, options=["--run-dir", f"machine-{number}"]))
        for program in joined:
            code, _, errors = output(program, DEADLINE_S)
            assert code == 0, errors
        summary = served.summary()
        assert (summary["faults"], summary["samples"]) == ([], 96 * int(EPOCHS))
        return load_file("run/weights.safetensors")


def test_the_versions_differ() -> None:
    assert version(OWN) == torch.__version__.partition("+")[0] != version(OTHER)


@pytest.mark.parametrize("script", [SCRIPT, ADAM], ids=["SGD", "Adam"])
def test_a_run_of_two_versions_has_the_weights_of_one(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(OWN, [OWN, OWN], script, tmp_path / "one", monkeypatch)
    for name, serves, workers in (
        ("serves the newer", OWN, [OWN, OTHER]),
        ("serves the older", OTHER, [OTHER, OWN]),
    ):
        found = weights(serves, workers, script, tmp_path / name.replace(" ", "-"), monkeypatch)
        assert found.keys() == expected.keys()
        off = max(float((found[key] - expected[key]).abs().max()) for key in expected)
        largest = max(float(value.abs().max()) for value in expected.values())
        print(f"\n{name}: the weights differ by at most {off:.1e}; the largest one is {largest:.2f}")
        assert off <= 1e-6


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_a_machine_without_the_optimizer_of_the_run_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served("--workers", "1:2")
    Path("train.py").write_text(MUON)
    first = served.join("1000000", options=["--run-dir", "first"])
    await_training(1)
    monkeypatch.setattr(sys, "executable", OTHER)
    code, _, errors = output(served.join("1000000", options=["--run-dir", "second"]), DEADLINE_S)
    print("\n" + errors)
    assert code == 2
    sentence = f"this machine has torch {version(OTHER)}, which has no torch.optim.Muon, but the run trains with this"
    assert sentence in " ".join(errors.split())
    assert "Traceback" not in errors
    enough()
    assert output(first, DEADLINE_S)[0] == 0
    assert served.summary()["faults"] == []


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_a_run_whose_servers_lack_the_optimizer_of_a_worker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", OTHER)
    served = Served("--workers", "1")
    Path("train.py").write_text(MUON)
    monkeypatch.setattr(sys, "executable", OWN)
    joined = served.join("1000000")
    code, _, _ = output(joined, DEADLINE_S)
    said = " ".join(served.failure().split())
    print("\n" + said)
    assert code == 1
    assert f"torch {version(OTHER)}" in said
    assert (
        "has no torch.optim.Muon, but a worker uses this optimizer. On the machine of the server, install"
        in said
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_a_script_that_needs_another_version_is_told_which_one_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served("--workers", "1")
    Path("train.py").write_text(MUON)
    monkeypatch.setattr(sys, "executable", OTHER)
    code, _, errors = output(served.join("1000000"), DEADLINE_S)
    said = " ".join(errors.split())
    print("\n" + said)
    assert code == 1
    assert f"has no attribute 'Muon': this machine has torch {version(OTHER)}" in said
    served.failure()
