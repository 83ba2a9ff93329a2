"""What `paceline advise` says after live runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigurationError
from paceline.lab.advice import advise, command_for
from paceline.look.run_reading import read_report
from paceline.sim import Cluster, simulate
from paceline.sync import MODELS, parse
from paceline.trace import read_run, replay
from paceline.trace.recording import load_kept_models
from tests.support.live import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "buffered.py"
ONE_OPTIMIZER = """
import sys
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
for _ in range(int(sys.argv[1])):
    for a, b in paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8)):
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(a), b)
            loss.backward()
            return loss
        optimizer.step(closure)
"""

TWO_OPTIMIZERS = """
import time
import torch
import paceline

torch.manual_seed(0)
critic, generator = torch.nn.Linear(4, 1), torch.nn.Linear(4, 4)
x = torch.randn(96, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
first = paceline.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.01), model=critic)
second = paceline.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.01), model=generator)
for _ in range(5):
    for inputs, targets in paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8)):
        first.zero_grad()
        second.zero_grad()
        time.sleep(0.02)
        (critic(generator(inputs)) - targets).square().mean().backward()
        first.step()
        second.step()
"""


def paceline(*arguments: str) -> str:
    """Return what a command prints; it must succeed."""
    ended = run_program("-m", "paceline", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("mark")
def test_a_run_that_steps_two_optimizers_with_each_batch_is_simulated_with_as_many_gradients() -> None:
    Path("train.py").write_text(TWO_OPTIMIZERS)
    paceline("run", "--servers", "1", "--run-dir", "run", "train.py")
    report = json.loads(paceline("advise", "run", "--sync", "bsp", "--json"))
    assert report["data"]["pushes_per_batch"] == 2.0
    assert abs(report["deviation"]) < 0.25


@pytest.mark.processes
@pytest.mark.usefixtures("mark")
def test_a_model_of_the_user_is_advised_without_naming_its_module_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is next to the script, and the command that is recommended runs as it is printed."""
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    scripts.mkdir()
    elsewhere.mkdir()
    shutil.copy(EXAMPLE, scripts)
    (scripts / "train.py").write_text(ONE_OPTIMIZER)
    # Also on a busy machine, one worker is much slower.
    options = ["--servers", "1", "--pace", ".002,.4", "--import", "buffered", "--run-dir", "run"]
    paceline("run", *options, "--sync", "buffered:batch=2", "scripts/train.py", "4")
    monkeypatch.chdir(elsewhere)
    report = json.loads(paceline("advise", "../run", "--sync", "bsp,buffered:batch=2", "--json"))
    [command] = [each["command"] for each in report["advice"] if each["sync"] == "buffered:batch=2"]
    assert command.startswith("paceline run --workers 2 --servers 1 --sync buffered:batch=2 ")
    assert command.endswith(" --import buffered scripts/train.py 4")
    monkeypatch.chdir(tmp_path)
    assert "buffered:batch=2" in paceline(*shlex.split(command)[1:])
    check = "from pathlib import Path\nfrom paceline.trace import read_run, replay\n"
    check += "print([replay(trace, trust=True) for trace in read_run(Path('run'))])"
    Path("replaying.py").write_text(check)
    monkeypatch.setenv("PYTHONPATH", f"{scripts}:{Path(EXAMPLE).parents[1] / 'src'}")
    assert run_program("replaying.py").stdout == "[[], []]\n"


LOADERS = {
    "a DataLoader": "torch.utils.data.DataLoader(data, batch_size=8)",
    "a batch sampler": "torch.utils.data.DataLoader(data, batch_sampler=torch.arange(64).view(8, 8).tolist())",
}


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize("loader", LOADERS)
def test_what_the_findings_of_a_run_suggest_can_be_done(loader: str) -> None:
    Path("train.py").write_text(ONE_OPTIMIZER.replace(LOADERS["a DataLoader"], LOADERS[loader]))
    options = ["--servers", "1", "--pace", ".01,.15"]
    paceline("run", *options, "--batch", "balanced", "--run-dir", "balanced", "train.py", "6")
    findings = " ".join(json.loads(Path("balanced", "summary.json").read_text())["findings"])
    assert "--batch balanced" not in findings
    paceline("run", *options, "--run-dir", "run", "train.py", "6")
    findings = " ".join(json.loads(Path("run", "summary.json").read_text())["findings"])
    # The script is simulated on the machines of the run, to check its accuracy under the other models.
    [check] = re.findall(r"paceline (simulate .*? --sync \S+)", findings)
    findings = findings.replace(check, "")
    arguments = shlex.split(check)
    arguments[arguments.index("--script") + 1] = "train.py 1"
    assert "elastic-bsp: " in paceline(*arguments)
    suggested = re.findall(r"(--[a-z]+) ([a-z-]+)", findings)
    assert (("--batch", "balanced") in suggested) == (loader == "a DataLoader")
    assert ("--sync", "asp") in suggested
    for option in suggested:
        assert "cannot" not in paceline("run", *options, *option, "train.py", "1")
    [command] = re.findall(r"run: paceline (.*)", findings)
    paceline(*shlex.split(command))


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a simulated run with a model of the user, whose module is no longer imported."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder)
    with monkeypatch.context() as context:
        context.syspath_prepend(str(folder))
        __import__("buffered")
        run_dir = simulate(Cluster(compute_s=[1.0, 2.0]), "buffered:batch=2", 10, record=True).save(
            tmp_path / "run"
        )
    _forget()
    monkeypatch.setattr(sys, "path", [*sys.path])
    return run_dir


def _forget() -> None:
    MODELS.pop("buffered", None)
    sys.modules.pop("buffered", None)
    parse.cache_clear()


def test_the_modules_of_a_run_are_kept_with_it(saved: Path, tmp_path: Path) -> None:
    assert json.loads((saved / "summary.json").read_text())["imports"] == {
        "buffered": str(tmp_path / "models")
    }
    assert all(trace.header.imports == ("buffered",) for trace in read_run(saved))
    assert load_kept_models(saved) == ("buffered",)
    assert "buffered" in MODELS
    assert all(replay(trace) == [] for trace in read_run(saved))
    _forget()


def test_a_module_inside_the_run_directory_is_data(saved: Path) -> None:
    shutil.copy(EXAMPLE, saved)
    summary = json.loads((saved / "summary.json").read_text())
    (saved / "summary.json").write_text(json.dumps({**summary, "imports": {"buffered": str(saved)}}))
    with pytest.raises(ConfigurationError, match="the module 'buffered' cannot be imported"):
        load_kept_models(saved, trust=True)


def test_modules_that_somebody_else_names_are_not_imported_unless_the_user_says_so(
    saved: Path, tmp_path: Path
) -> None:
    traces = read_run(saved)
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "planted.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    whole = json.loads((saved / "summary.json").read_text())
    for changes in (
        {"imports": {"planted": str(evil)}},  # the signature is that of other modules
        {"imports": {"planted": str(evil)}, "signature": ""},
        {"sync": "conditions:pull=planted:f"},  # which it does not mention
        {"sync": "conditions:pull=os:system"},
    ):
        (saved / "summary.json").write_text(json.dumps({**whole, **changes}))
        with pytest.raises(ConfigurationError, match=r"names the module (planted|os).*add --trust"):
            load_kept_models(saved)
    _forget()
    with pytest.raises(
        ConfigurationError, match="names the module buffered, but this is not signed with your key"
    ):
        replay(traces[0])
    assert "buffered" not in sys.modules
    assert not (tmp_path / "ran").exists()
    (saved / "summary.json").write_text(json.dumps({**whole, "imports": {"planted": str(evil)}}))
    load_kept_models(saved, trust=True)
    assert (tmp_path / "ran").exists()
    sys.modules.pop("planted")


def test_nothing_that_reads_a_run_imports_what_it_names(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    sync, imports = "conditions:pull=planted:f", {"planted": str(tmp_path)}
    summary = json.loads((saved / "summary.json").read_text())
    (saved / "summary.json").write_text(json.dumps({**summary, "sync": sync, "imports": imports}))
    for path in saved.glob("trace-*.jsonl"):
        head, rest = path.read_text().split("\n", 1)
        header = {**json.loads(head), "sync": sync, "imports": ["planted"]}
        path.write_text(f"{json.dumps(header)}\n{rest}")
    assert read_report(saved).state == "finished"
    assert Cluster.from_run(saved).workers == 2
    for read in (lambda: advise(saved), lambda: replay(read_run(saved)[0])):
        with pytest.raises(
            ConfigurationError, match=r"names the module planted.*this is not signed with your key"
        ):
            read()
    for command in ("advise", "replay"):
        result = CliRunner().invoke(app, [command, str(saved)])
        assert isinstance(result.exception, ConfigurationError), result.output
    assert CliRunner().invoke(app, ["report", str(saved)]).exit_code == 0
    assert "planted" not in sys.modules


def test_a_trace_of_models_of_the_package_is_as_before() -> None:
    trace = simulate(Cluster(compute_s=[1.0]), "asp", 2, record=True).trace[0]
    assert b"imports" not in __import__("msgspec").json.encode(trace.header)


RUN = {"workers": 4, "servers": 2, "shards": 2, "imports": {"mine": "/x"}}


@pytest.mark.parametrize(
    ("summary", "sync", "command"),
    [
        ({"workers": 4, "servers": 2}, "asp", "paceline run --workers 4 --servers 2 --sync asp SCRIPT"),
        (
            {**RUN, "shards": 3, "program": ["script", "my train.py", "--lr", "1"]},
            "bsp|asp|asp",
            "paceline run --workers 4 --servers 2 --shards 3 --sync 'bsp|asp|asp' --import mine 'my train.py' --lr 1",
        ),
        (
            {**RUN, "program": ["module", "package.train", "5"]},
            "asp",
            "paceline run --workers 4 --servers 2 --sync asp --import mine -m package.train 5",
        ),
        (
            {**RUN, "program": [], "least_workers": 2},
            "asp",
            "paceline serve --workers 2:4 --servers 2 --sync asp --import mine",
        ),
        (
            {**RUN, "program": ["function"], "least_workers": 4},
            "asp",
            "paceline.launch(FUNCTION, workers=4, servers=2, sync='asp', imports=['mine'])",
        ),
        (
            {**RUN, "program": ["script", "train.py"], "hyperparameters": "raw"},
            "asp",
            "paceline run --workers 4 --servers 2 --sync asp --hyperparameters raw --import mine train.py",
        ),
        (
            {**RUN, "program": ["script", "train.py"], "split": "static"},
            "asp",
            "paceline run --workers 4 --servers 2 --sync asp --split static --import mine train.py",
        ),
        (
            {**RUN, "program": ["function"], "hyperparameters": "raw"},
            "asp",
            "paceline.launch(FUNCTION, workers=4, servers=2, sync='asp', hyperparameters='raw', imports=['mine'])",
        ),
    ],
)
def test_the_command_is_for_how_the_run_was_launched(
    summary: dict[str, object], sync: str, command: str
) -> None:
    assert command_for(summary, sync, "equal") == command
