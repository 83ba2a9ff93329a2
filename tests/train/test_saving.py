"""`save`: one file for all workers, complete or absent, with the statistics of all of them."""

from __future__ import annotations

import copy
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

import paceline
from paceline.core.messages import Started, WorkingDirectory
from paceline.errors import UsageError
from paceline.run.readers import Fetches
from paceline.sim import Cluster, simulate
from paceline.train.collectives import _place_for_all, working_directory
from paceline.train.session import Session
from tests.support.live import await_that, mark, run_program, start_program
from tests.support.marks import thorough

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

__all__ = ["mark"]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 1))


def train(model: nn.Module, steps: int = 3) -> None:
    """Train on data whose mean is different in each worker."""
    worker = paceline.worker_index()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    generator = torch.Generator().manual_seed(worker)
    for _ in range(steps):
        x = torch.randn(8, 2, generator=generator) + 10 * worker
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


# -- outside a run ----------------------------------------------------------------------------------------


def test_the_file_is_that_of_torch_with_the_usual_permissions(tmp_path: Path) -> None:
    path, other = tmp_path / "model.pt", tmp_path / "other"
    paceline.save({"epoch": 3, "weights": torch.arange(3)}, path)
    saved = torch.load(path)
    assert saved["epoch"] == 3
    assert saved["weights"].tolist() == [0, 1, 2]
    other.write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [path, other]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "model.pt", tmp_path / "best.pt"
    link.symlink_to(path)
    paceline.save(1, link)
    assert link.is_symlink()
    assert torch.load(path) == 1


def test_a_path_that_cannot_be_written_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cannot write '.*missing/model.pt': No such file or directory. Choose"
    ):
        paceline.save(1, tmp_path / "missing" / "model.pt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        paceline.save(1, tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_failure_leaves_the_earlier_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    paceline.save("earlier", path)
    with pytest.raises((TypeError, AttributeError)):
        paceline.save([torch.ones(1000), threading.Lock()], path)
    assert torch.load(path) == "earlier"
    assert os.listdir(tmp_path) == ["model.pt"]


# -- in a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_what_is_saved_holds_the_statistics_of_all_workers(
    transport: str, tmp_path: Path, run_on_threads: RunOnThreads
) -> None:
    path = tmp_path / "model.pt"

    def work() -> Any:
        model = make()
        train(model)
        paceline.barrier()
        own = copy.deepcopy(model.state_dict())
        paceline.save({"nets": [model.state_dict(), model[1]], "copy": own, "epoch": 3}, path)
        with paceline.evaluating(model) as snapshot:
            evaluated = copy.deepcopy(snapshot.state_dict())
        paceline.barrier()
        assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
        return own, evaluated

    run = run_on_threads(work, servers=2, transport=transport)
    results: dict[int, Any] = run.results
    saved = torch.load(path, weights_only=False)
    [state, norm] = saved["nets"]
    own = results[0][0]
    assert not torch.equal(own["1.running_mean"], results[1][0]["1.running_mean"])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(state[name], run.state_dict[name])
        assert torch.equal(norm.state_dict()[name.removeprefix("1.")], run.state_dict[name])
        assert torch.equal(results[1][1][name], run.state_dict[name])
        assert torch.equal(saved["copy"][name], own[name])
    assert torch.equal(state["0.weight"], own["0.weight"])
    assert list(state) == list(own)
    assert saved["epoch"] == 3


def test_without_statistics_nothing_is_fetched(
    tmp_path: Path, run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(Fetches, "fetch_buffers", fetched.append)

    def work() -> None:
        model = nn.Linear(2, 1)
        model.register_buffer("constant", torch.ones(3))
        train(model)
        paceline.save(model.state_dict(), tmp_path / "model.pt")

    run_on_threads(work)
    assert not fetched
    assert torch.load(tmp_path / "model.pt")["constant"].tolist() == [1, 1, 1]


def test_a_simulated_run_saves_pooled_statistics(tmp_path: Path) -> None:
    def work() -> None:
        model = make()
        train(model)
        paceline.barrier()
        paceline.save(model.state_dict(), tmp_path / "model.pt")

    result = simulate(Cluster(compute_s=[1.0, 2.0]), "bsp", train_fn=work)
    saved = torch.load(tmp_path / "model.pt")
    assert result.state_dict is not None
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(saved[name], result.state_dict[name])


LANGUAGE_MODEL = """
import math, sys
import paceline, torch
from torch import nn

torch.manual_seed(1)
path = sys.argv[1]
model = nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 20))
text = torch.randint(20, (64, 17))
loader = torch.utils.data.DataLoader(text, batch_size=4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
best = math.inf
for epoch in range(4):
    total = count = 0
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        total, count = total + loss.item() * len(batch), count + len(batch)
    mean = paceline.reduce(total / count, weight=count)
    if mean < best:
        best = mean
        paceline.save(model.state_dict(), path)
    else:
        paceline.barrier()
        with optimizer.editing():
            model.load_state_dict(torch.load(path))
paceline.barrier()
best_model = torch.load(path)
print(sorted(best_model) == sorted(model.state_dict()), best)
"""


@pytest.mark.parametrize("sync", ["bsp", *thorough("ssp:staleness=1")])
def test_a_language_model_saves_and_reloads_its_best(sync: str, tmp_path: Path) -> None:
    script, path, run_dir = tmp_path / "train.py", tmp_path / "best.pt", tmp_path / "run"
    script.write_text(LANGUAGE_MODEL)
    options = ["--workers", "2", "--servers", "1", "--sync", sync, "--run-dir", str(run_dir)]
    ended = run_program("-m", "paceline", "run", *options, str(script), str(path))
    assert ended.returncode == 0, ended.stderr
    said = [(run_dir / f"worker-{worker}.log").read_text().splitlines()[-1] for worker in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("True ")


@pytest.mark.parametrize("sync", ["bsp", "spec-sync"])
def test_a_whole_module_is_saved_without_the_hooks_of_the_run(
    sync: str, tmp_path: Path, run_on_threads: RunOnThreads
) -> None:
    """SpecSync hooks the modules that a closure may abort; a file with hooks could not be read with weights_only."""

    def save_whole() -> None:
        model = make()
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)

        def closure() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 2)).square().mean().backward()

        optimizer.step(closure)
        paceline.save(model, tmp_path / "model.pt")
        optimizer.step(closure)  # the hooks are back

    run_on_threads(save_whole, workers=2, sync=sync)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.BatchNorm1d]):
        saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert [type(part) for part in saved] == [nn.Linear, nn.BatchNorm1d, nn.Linear]


@pytest.mark.parametrize("first", [0, 3])
def test_requests_of_all_workers_cut_a_simulated_job_once_each_time(first: int) -> None:
    def train() -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(12):
            if step in (first, 7):
                paceline.checkpoint()
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    cluster = paceline.Cluster(compute_s=[1.0, 2.0], latency_s=0.01)
    for sync in ("bsp", "asp"):
        result = paceline.simulate(cluster, sync, train_fn=train)
        assert len(result.cuts) == 2


def test_different_paths_of_the_workers_are_said_at_the_next_barrier(
    run_on_threads: RunOnThreads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with Hydra, each worker has a folder of its own. Nothing is said of equal paths."""

    def train() -> None:
        worker = paceline.worker_index()
        for folder in ("same", "same", f"worker-{worker}", f"worker-{worker}"):
            (tmp_path / folder).mkdir(exist_ok=True)
            paceline.save({"epoch": 1}, tmp_path / folder / "model.pt")
            paceline.barrier()
            paceline.barrier()
            before.append(len(caplog.records)) if folder == "same" and worker == 0 else None

    before: list[int] = []
    run_on_threads(train, workers=3)
    assert before == [0, 0]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("worker 0: ")
    assert f"only at the path of worker 0: {tmp_path}/worker-0/model.pt" in warning
    assert [path.name for path in tmp_path.glob("*/model.pt")] == ["model.pt"] * 2


OWN_FOLDERS = """
import os, signal
from pathlib import Path
import torch
import paceline

worker, start = paceline.worker_index(), Path.cwd()
os.mkdir(f"dated-{worker}")
os.chdir(f"dated-{worker}")
model = torch.nn.Linear(2, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
for _ in range(3):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
for main in (0, 1):
    path = paceline.save({"written by": worker}, "model.pt")
    paceline.barrier()
    assert torch.load(path) == {"written by": main}
    assert path == f"{start}/dated-0/model.pt", path
    paceline.barrier()  # everybody has read the file
    if worker == main == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    paceline.barrier()  # without worker 0
(start / f"read-{worker}").touch()
"""


@pytest.mark.processes
def test_workers_with_folders_of_their_own_save_to_that_of_the_first_main_worker(mark: str) -> None:
    """As with Hydra. The file is read by all workers, and is written to the same place after the loss of worker 0."""
    Path("train.py").write_text(OWN_FOLDERS)
    ended = run_program("-m", "paceline", "run", "-n", "3", "--sync", "asp", "--run-dir", "run", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in Path().glob("read-*")) == ["read-1", "read-2"]
    assert [str(path) for path in Path().glob("dated-*/*")] == ["dated-0/model.pt"]
    said = " ".join(ended.stderr.split())
    assert said.count("the workers have different working directories") == 2  # at once, and at the end
    assert "different paths" not in said


WAITS_UNTIL_SAID = """
import time
from pathlib import Path
import torch
import paceline

model = torch.nn.Linear(2, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
paceline.save({}, f"model-{paceline.worker_index()}.pt")
paceline.barrier()
while not Path("said").exists():
    time.sleep(0.01)
"""


@pytest.mark.processes
def test_a_problem_that_does_not_end_the_run_is_said_at_once_and_again_at_the_end(mark: str) -> None:
    Path("train.py").write_text(WAITS_UNTIL_SAID)
    words = "worker 0: the workers have given paceline.save() different paths"
    with open("run.log", "w") as messages:
        program = start_program("-m", "paceline", "run", "-n", "2", "train.py", stderr=messages)
        await_that(lambda: words in Path("run.log").read_text(), "it is said")
        Path("said").touch()
        program.communicate()
    said = Path("run.log").read_text()
    assert program.returncode == 0, said
    assert said.count(words) == said.count(f"note: {words}") + 1 == 2


def test_a_path_is_that_of_the_main_worker_only_if_it_can_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, main = tmp_path / "own", tmp_path / "main"
    for folder in (own / "elsewhere", main):
        folder.mkdir(parents=True)
    monkeypatch.chdir(main)
    directory = working_directory()
    assert directory is not None
    monkeypatch.chdir(own)

    def place(path: str | Path, *, there: WorkingDirectory | None = directory, writes: bool = False) -> str:
        started = None if there is None else Started((), (), 0, directory=there)
        core = SimpleNamespace(started=started, directory=begun)
        return _place_for_all(cast(Session, SimpleNamespace(core=core)), path, writes=writes)

    begun = working_directory()
    assert place("model.pt") == place("model.pt", writes=True) == f"{main}/model.pt"
    assert place(Path("..", "model.pt")) == f"{tmp_path}/model.pt"
    assert place(own / "model.pt") == f"{own}/model.pt"  # absolute
    assert place("model.pt", there=None) == f"{own}/model.pt"  # before training
    another = WorkingDirectory(directory.path, directory.number + 1)  # of another machine
    assert place("model.pt", there=another) == f"{own}/model.pt"
    assert place("x/model.pt") == f"{main}/x/model.pt"
    assert (
        place("x/model.pt", writes=True) == f"{own}/x/model.pt"
    )  # only this worker has made the folder, if any
    monkeypatch.chdir("elsewhere")
    assert place("model.pt") == f"{own}/elsewhere/model.pt"
