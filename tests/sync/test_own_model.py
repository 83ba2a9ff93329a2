"""A sync model in a file outside the package: registered, installed, rehearsed, and trained with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.errors import ConfigurationError
from paceline.sim import Cluster, simulate
from paceline.sync import MODELS, SSP, ShardMachine, SyncModel, parse, register
from paceline.sync.asp import ASP
from paceline.sync.plugins import load_models, modules_of
from paceline.testing import check
from paceline.trace import read_run, replay
from tests.support.warm import bare_environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "buffered.py"

SCRIPT = """
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
for _ in range(3):
    for a, b in paceline.distribute(torch.utils.data.DataLoader(data, batch_size=8)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
"""


@pytest.fixture
def buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SyncModel]]:
    """The example's class, imported from a folder that is not part of the package."""
    shutil.copy(EXAMPLE, tmp_path / "buffered.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_models("", ["buffered"])
    yield MODELS["buffered"]
    MODELS.pop("buffered", None)
    sys.modules.pop("buffered", None)
    parse.cache_clear()


def paceline_in(folder: Path, *arguments: str) -> str:
    """What the command prints; it must succeed."""
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=bare_environment(HOME=str(folder)),
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_page_shows_the_code_of_the_example() -> None:
    page, code = (ROOT / "docs" / "how-to" / "own-model.md").read_text(), EXAMPLE.read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class " in block]
    assert len(blocks) == 2
    assert all(block.strip() in code for block in blocks)
    assert code.endswith("\n\n\n".join(block.strip() for block in blocks) + "\n"), "the page shows all of it"
    assert len(code.splitlines()) <= 60


def test_it_is_known_by_its_name(buffered: type[SyncModel]) -> None:
    assert str(buffered()) == "buffered:batch=4"
    assert parse("buffered:batch=2") == buffered(batch=2)
    with pytest.raises(ConfigurationError, match="unknown parameter of sync model 'buffered'"):
        parse("buffered:size=2")


def test_it_keeps_the_promises_of_every_model(buffered: type[SyncModel]) -> None:
    assert str(check(buffered(batch=2))) in (ROOT / "docs" / "how-to" / "own-model.md").read_text()


@pytest.mark.thorough
def test_a_model_that_is_imported_again_is_checked_as_its_new_class(buffered: type[SyncModel]) -> None:
    """The search changes from BSP to the model by its name."""
    before = check(buffered(batch=2), iterations=1)
    del MODELS["buffered"], sys.modules["buffered"]
    load_models("", ["buffered"])
    anew = MODELS["buffered"]
    assert anew is not buffered
    assert check(anew(batch=2), iterations=1) == before


def test_it_is_simulated_and_its_trace_replays(buffered: type[SyncModel]) -> None:
    result = simulate(Cluster(compute_s=[1.0, 1.0, 3.0], servers=2), "buffered:batch=2", 30, record=True)
    assert 0 < result.updates <= 3 * 30 // 2
    assert max(result.staleness) > 0
    assert all(replay(trace) == [] for trace in result.trace)


def test_a_run_changes_to_it_and_one_shard_has_it_alone(buffered: type[SyncModel]) -> None:
    cluster = Cluster(compute_s=[1.0, 1.5, 2.0], servers=2)
    changed = simulate(cluster, "bsp@0,buffered:batch=2@10", 30)
    assert changed.updates > 0
    mixed = simulate(cluster, "buffered:batch=2|asp", 30)
    assert mixed.updates > 0


@pytest.mark.processes
def test_it_trains_in_live_runs(buffered: type[SyncModel], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--workers", "2", "--servers", "2", "--run-dir", "runs/live"]
    text = paceline_in(
        tmp_path, "run", *options, "--sync", "buffered:batch=2", "--import", "buffered", "train.py"
    )
    assert "buffered:batch=2" in text
    traces = read_run(tmp_path / "runs" / "live")
    assert [trace.header.sync for trace in traces] == ["buffered:batch=2"] * 3
    assert all(replay(trace) == [] for trace in traces)


@pytest.mark.processes
def test_a_model_that_is_passed_to_launch_reaches_every_process(buffered: type[SyncModel]) -> None:
    model = buffered(batch=2)
    result = paceline.launch(train, workers=2, sync=model, progress=False)
    assert result.summary["sync"] == "buffered:batch=2"
    assert result.summary["updates"] > 0


def train() -> None:
    exec(SCRIPT, {"__name__": "script"})


@pytest.mark.thorough
def test_it_is_ranked_beside_the_models_of_the_package(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "buffered.py")
    options = ["--sync", "bsp,buffered:batch=3", "--iterations", "20", "--out", "out", "--json"]
    found = json.loads(paceline_in(tmp_path, "simulate", "elastic-bsp", "--import", "buffered", *options))
    rows = found["rows"]
    assert {row["sync"] for row in rows} == {"bsp", "buffered:batch=3"}
    assert "the mean of every B" in paceline_in(tmp_path, "sync", "buffered", "--import", "buffered")


def test_an_installed_model_needs_no_import(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "buffered.py")
    info = tmp_path / "buffered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: buffered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.sync]\nbuffered = buffered\n")
    (tmp_path / "counting.py").write_text("""
from paceline.sim import Cluster, simulate
print(simulate(Cluster(compute_s=[1.0, 2.0]), "buffered:batch=1", 5).updates)
""")
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "counting.py")],
        capture_output=True,
        text=True,
        env=bare_environment(),
    )
    assert int(ended.stdout) > 0, ended.stderr


def test_an_installed_model_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.sync]\nbroken-model = no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match="'broken-model' cannot be imported from no_such_module"):
        load_models("broken-model")


# -- what cannot be registered ------------------------------------------------------------------------------


def test_a_name_that_is_taken_is_refused() -> None:
    class Mine(ASP, frozen=True):
        pass

    with pytest.raises(ConfigurationError, match=r"'asp' of .*Mine is taken by paceline.sync.asp.ASP"):
        register(Mine)


def test_a_module_whose_name_for_a_model_is_taken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "second_asp.py").write_text(
        "from paceline.sync import ASP, register\n\n@register\nclass Mine(ASP, frozen=True):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigurationError, match=r"^the module 'second_asp' cannot be imported: the name 'asp' of"
    ):
        load_models("", ["second_asp"])


@pytest.mark.parametrize("name", ["", "My-Model", "1st", "a model", "a:b"])
def test_a_name_that_the_notation_cannot_hold_is_refused(name: str) -> None:
    class Mine(SyncModel, frozen=True):
        pass

    Mine.name = name
    with pytest.raises(ConfigurationError, match="expected lower-case letters, digits and hyphens"):
        register(Mine)


def test_a_model_that_does_not_read_back_is_refused() -> None:
    class Forgetful(SyncModel, frozen=True):
        name = "forgetful"

        count: int = 1

        def __str__(self) -> str:
            return "forgetful:count=2"

    with pytest.raises(ConfigurationError, match="which parses as"):
        register(Forgetful)
    assert "forgetful" not in MODELS


def test_a_model_that_is_not_registered_cannot_be_run() -> None:
    class Mine(SSP, frozen=True):
        pass

    with pytest.raises(ConfigurationError, match=r"decorate its class with @paceline.sync.register"):
        simulate(Cluster(compute_s=[1.0]), Mine(), 1)


def test_a_model_of_the_script_itself_cannot_reach_the_servers() -> None:
    class Mine(SyncModel, frozen=True):
        name = "mine"

        def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
            return ASP().at_shard()

    Mine.__module__ = "__main__"
    with pytest.raises(ConfigurationError, match="Move the class into a module next to the script"):
        modules_of([Mine()])


def test_a_module_that_cannot_be_imported_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="the module 'no_such_module_at_all' cannot be imported"):
        load_models("bsp", ["no_such_module_at_all"])


@pytest.mark.parametrize("name", ["buffered", "median_bound", "merge_late"])
def test_the_page_shows_the_code_of_the_examples(name: str) -> None:
    page = (ROOT / "docs" / "how-to" / "own-model.md").read_text()
    code = (ROOT / "examples" / f"{name}.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    methods = [part.strip("\n") for block in blocks for part in re.split(r"\n\n(?=    def )", block)]
    assert sum(part in code for part in methods) >= 2 - (name == "merge_late")
    assert f"(../../examples/{name}.py)" in page


@pytest.mark.parametrize("sync", ["median-bound:ahead=1", "merge-late:late=2,most=2,wait_s=3"])
def test_the_worked_examples_train(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slow worker of four, the median holds nobody up, and late pushes of the slow worker are merged."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    name = sync.partition(":")[0]
    load_models("", [name.replace("-", "_")])
    try:
        cluster = Cluster([1.0, 1.0, 1.0, 4.0])
        result = simulate(cluster, sync, None, until_s=80.0, record=True)
        assert result.measures.unapplied == 0
        assert result.waiting_share == 0.0
        for trace in result.trace:
            assert replay(trace) == []
        merged = [
            action
            for entry in result.trace[0].entries
            for action in entry.actions
            if type(action).__name__ == "ApplyMean"
        ]
        assert bool(merged) == (name == "merge-late")
    finally:
        del MODELS[name], sys.modules[name.replace("-", "_")]
        parse.cache_clear()
