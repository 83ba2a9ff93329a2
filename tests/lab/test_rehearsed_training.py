"""`paceline simulate --script`: what is said about models under which a script was trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.lab.clusters import load_cluster
from paceline.lab.comparison import TrainedScript, verdicts
from paceline.lab.ranking import figures_of
from paceline.sim import Cluster, simulate
from tests.support.live import run_program
from tests.support.marks import chaos

SCRIPT = """
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model=model)
loader = paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8))
for _ in range(10):
    for a, b in loader:
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(a), b)
            loss.backward()
            return loss
        optimizer.step(closure)
print("trained")
print(f"error {(model(x) - x.sum(1, keepdim=True)).square().mean():.3f}")
"""

CLUSTER = Cluster(compute_s=[1.0, 3.0])


def trained(sync: str, curve: list[tuple[float, float]]) -> TrainedScript:
    return TrainedScript(figures_of(sync, simulate(CLUSTER, "bsp", 10)), curve, curve[-1][1])


def test_a_model_is_judged_by_the_loss_of_the_first_one() -> None:
    rows = [
        trained("bsp", [(10.0, 2.0), (30.0, 1.0)]),
        trained("asp", [(5.0, 2.0), (15.0, 0.9)]),
        trained("elastic-bsp", [(5.0, 2.0), (15.0, 1.5)]),
        trained("ssp", [(30.0, 1.0)]),
        trained("spec-sync", [(5.0, float("nan"))]),
    ]
    assert verdicts(rows) == [
        "asp: reaches the last loss of bsp 2.00 times sooner.",
        "elastic-bsp: never reaches the last loss of bsp; its last loss is 1.5 instead of 1.",
        "ssp: reaches the last loss of bsp, but not sooner.",
        "spec-sync: never reaches the last loss of bsp; its last loss is nan instead of 1.",
    ]


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("mark")
def test_a_script_is_trained_on_the_machines_of_a_recorded_run(tmp_path: Path) -> None:
    run_dir = simulate(CLUSTER, "bsp", 20, record=True).save(tmp_path / "run")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--script", str(tmp_path / "train.py"), "--sync", "bsp,asp", "--out", str(tmp_path / "out")]
    ended = run_program("-m", "paceline", "simulate", str(run_dir), *options)
    assert ended.returncode == 0, ended.stderr
    assert "2 workers (1 at 1 s, 1 at 3 s)" in " ".join(ended.stdout.split())
    assert "bsp printed: error 0." in ended.stdout  # the last line of the script
    assert "asp: " in ended.stdout


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize("sync", ["asp", *chaos("bsp,asp")])
def test_hyper_parameters_are_translated_unless_raw_ones_are_asked_for(sync: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.toml").write_text("[[workers]]\ncount = 4\ncompute = '1 s'\n")
    said = {}
    for number, options in enumerate(([], ["--hyperparameters", "raw"])):
        ended = run_program(
            *("-m", "paceline", "simulate", str(tmp_path / "mine.toml"), "--sync", sync, *options),
            *("--script", str(tmp_path / "train.py"), "--out", str(tmp_path / f"out-{number}")),
        )
        assert ended.returncode == 0, ended.stderr
        said[number] = re.findall(r"^(\w+) printed: error (\S+)", ended.stdout, re.MULTILINE)
        assert ("are translated for updates with a part" in " ".join(ended.stdout.split())) == (not options)
    assert said[0][:-1] == said[1][:-1], "bsp"
    assert said[0][-1] != said[1][-1], "asp"


OWN = """
import sys
import torch

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
"""


@pytest.mark.processes
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(("kind", "times"), [("SGD", 4.7), ("Own", 3.1)])
@pytest.mark.thorough
def test_the_codec_that_is_recommended_is_that_for_the_optimizer_of_the_script(
    kind: str, times: float, tmp_path: Path
) -> None:
    script = SCRIPT if kind == "SGD" else OWN + SCRIPT.replace("torch.optim.SGD(", "Own(")
    (tmp_path / "train.py").write_text(script)
    # The pushes and the pulls of both workers take 1.6 s each, so a step takes 3.5 s.
    network = "bandwidth = '1 Gbit/s'\nparameters = '100 MB'\n"
    (tmp_path / "slow.toml").write_text(f"{network}[[workers]]\ncount = 2\ncompute = '0.3 s'\n")
    options = [
        "--script",
        str(tmp_path / "train.py"),
        "--sync",
        "bsp",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    ended = run_program("-m", "paceline", "simulate", str(tmp_path / "slow.toml"), *options)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)["recommendation"]["text"]
    codec = "int4" if kind == "SGD" else "int8"
    assert f"of each iteration is on the wire: add --wire {codec}, " in said
    assert f"({times} times as fast as bsp now; {codec} cost no measurable accuracy in " in said
    assert f" with {kind}), or put the servers on 2 machines" in said


def test_a_directory_without_a_run_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not contain a run"):
        load_cluster(str(tmp_path))
