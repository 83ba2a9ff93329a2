"""Lightning and Fabric in a run: equal to one process under bsp, dynamic shares, losses, late joins, resumed runs."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from paceline.errors import ConfigurationError
from paceline.integrations import require as require_framework
from paceline.trace.run_dir import read_metrics
from tests.support.live import DEADLINE_S, await_that, kill_all, mark, processes, run_program, start_program
from tests.support.marks import thorough
from tests.support.served import Served
from tests.support.served import output as output_of
from tests.train.test_porting import output, require, run, start

__all__ = ["mark"]

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"

# A module and its data. `STEP`, `OPTIMIZER` and the like are replaced by tests.
SCRIPT = """
import json
import os
import sys
import time
from pathlib import Path

import {package} as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import paceline.integrations.lightning

EarlyStopping = lightning.{inner}callbacks.EarlyStopping
LearningRateMonitor = lightning.{inner}callbacks.LearningRateMonitor
ModelCheckpoint = lightning.{inner}callbacks.ModelCheckpoint
CSVLogger = lightning.{inner}loggers.CSVLogger

SIZE, BATCH, EPOCHS, PAUSE_S = {size}, {batch}, {epochs}, {pause_s}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def loss(self, batch):
        inputs, targets, indices = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def training_step(self, batch, index):
        time.sleep(0.0 if Path("go").exists() else PAUSE_S)
        loss = self.loss(batch)
        with open(f"used-{{paceline.worker_index()}}", "a") as file:
            file.write(f"{{self.current_epoch}} {{batch[2].tolist()}}\\n")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val_loss"].item()
            with open(f"validated-{{paceline.worker_index()}}", "a") as file:
                file.write(json.dumps([self.current_epoch, loss]) + "\\n")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "step"}}}}


lightning.seed_everything(0)
x = torch.randn(SIZE, 8)
data = TensorDataset(x, x[:, :3].argmax(1), torch.arange(SIZE))
callbacks = [{callbacks}]
options = dict(max_epochs=EPOCHS, gradient_clip_val=0.5, logger=CSVLogger("logs"), callbacks=callbacks)
options |= dict({options})
trainer = lightning.Trainer(
    strategy="paceline", accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **options
)
module = Module()
validation = DataLoader(TensorDataset(*(each[:64] for each in data.tensors)), batch_size=32)
trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle={shuffle}), validation)
rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
stopped = getattr(trainer.early_stopping_callback, "stopped_epoch", None)
best = getattr(trainer.checkpoint_callback, "best_model_path", None)
ended = dict(epoch=trainer.current_epoch, step=trainer.global_step, rates=rates, stopped=stopped, best=best)
Path(f"ended-{{paceline.worker_index()}}").write_text(json.dumps(ended))
"""

ALL_CALLBACKS = (
    'ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True), EarlyStopping("val_loss", patience=3), '
    "LearningRateMonitor()"
)
DEFAULTS: dict[str, Any] = {
    "package": "lightning",
    "inner": "pytorch.",
    "size": 72,
    "batch": 4,
    "epochs": 3,
    "pause_s": 0.0,
    "callbacks": "",
    "options": "",
    "shuffle": "True",
}


def script(**values: Any) -> str:
    return SCRIPT.format(**DEFAULTS | values)


def used(folder: Path) -> dict[int, list[int]]:
    """Return the samples that all workers have used, by the `Trainer`'s epoch."""
    found: dict[int, list[int]] = {}
    for path in folder.glob("used-*"):
        for line in path.read_text().splitlines():
            epoch, _, indices = line.partition(" ")
            found.setdefault(int(epoch), []).extend(json.loads(indices))
    return found


def batches(folder: Path, worker: int) -> int:
    return len((folder / f"used-{worker}").read_text().splitlines())


def validated(folder: Path, worker: int) -> dict[int, float]:
    """Return the loss of each validation of a worker, by epoch."""
    return dict(map(json.loads, (folder / f"validated-{worker}").read_text().splitlines()))


def ended(folder: Path, worker: int = 0) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((folder / f"ended-{worker}").read_text())
    return found


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def alone(folder: Path, program: str) -> None:
    """Run a script in one process, without Paceline."""
    process = start(folder, program)
    printed = output(process)
    assert process.returncode == 0, printed


def require_all_used_once(folder: Path, size: int, epochs: int) -> None:
    found = used(folder)
    assert sorted(found) == list(range(epochs))
    for epoch, indices in found.items():
        assert sorted(indices) == list(range(size)), epoch
    samples = summary(folder)["ledger"]["samples"]
    assert samples["used"] == size * epochs, samples


SAVED = 'torch.save(module.state_dict(), "module.pt")\n'


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize(
    "options", ["", "accumulate_grad_batches=2", *thorough('gradient_clip_algorithm="value"')]
)
def test_bsp_equals_one_process_on_the_joint_batch(
    package: str, options: str, mark: str, tmp_path: Path
) -> None:
    """With clipping, a schedule of the iterations, and gradients that are left at the end of an epoch."""
    require(package)
    inner = "pytorch." if package == "lightning" else ""
    values: dict[str, Any] = {"package": package, "inner": inner, "options": options}
    values |= {"shuffle": False, "callbacks": ALL_CALLBACKS}
    alone(tmp_path / "one", script(**values | {"batch": 8}) + SAVED)
    weights = run(tmp_path / "two", script(**values))
    expected = torch.load(tmp_path / "one" / "module.pt")
    assert weights.keys() == expected.keys()
    if "value" not in options:  # each worker clamps its own gradient
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
        losses, others = validated(tmp_path / "one", 0), validated(tmp_path / "two", 1)
        assert list(losses.values()) == pytest.approx(list(others.values()), rel=1e-3)
        assert losses.keys() == others.keys()
    for name in ("step", "rates", "epoch", "stopped"):
        assert ended(tmp_path / "two")[name] == ended(tmp_path / "one")[name], name
    require_all_used_once(tmp_path / "two", 72, 3)
    logged = read_metrics(tmp_path / "two" / "run")
    assert {"loss", "val_loss", "train_loss"} <= set(logged)
    assert not logged["loss"].guessed
    assert len(logged["val_loss"].values) == 3
    assert sum(point.count for point in logged["train_loss"].points) == 2 * 3 * 9


SCALER = 'torch.amp.GradScaler("cpu", init_scale=256.0)'
FLOAT16 = f'plugins=lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", {SCALER})'
"""Lightning would use float16, with a scaler, only on an accelerator."""


@pytest.mark.parametrize("precision", ["bf16-mixed", *thorough("16-mixed")])
def test_mixed_precision_with_clipping_equals_one_process(precision: str, mark: str, tmp_path: Path) -> None:
    require("lightning")
    options = 'precision="bf16-mixed"' if precision == "bf16-mixed" else FLOAT16
    alone(tmp_path / "one", script(batch=8, shuffle=False, options=options) + SAVED)
    weights = run(tmp_path / "two", script(shuffle=False, options=options))
    for key, tensor in torch.load(tmp_path / "one" / "module.pt").items():
        assert (weights[key] - tensor).norm() <= 0.05 * tensor.norm(), key


@pytest.mark.parametrize("sync", ["asp", *thorough("ssp:staleness=2", "auto")])
def test_an_ordinary_module_trains_with_dynamic_shares(sync: str, mark: str, tmp_path: Path) -> None:
    """It has a schedule, a checkpoint callback, early stopping, a monitor, clipping and validation."""
    require("lightning")
    size, epochs = 320, 3
    run(
        tmp_path / "run",
        script(size=size, epochs=epochs, callbacks=ALL_CALLBACKS),
        *("--sync", sync, "--pace", ".01,.05"),
    )
    folder = tmp_path / "run"
    require_all_used_once(folder, size, epochs)
    if sync == "asp":
        assert batches(folder, 0) > 1.5 * batches(folder, 1)
    # Workers validate the same weights, and the schedule has reached its end in both of them.
    assert validated(folder, 0) == validated(folder, 1)
    assert sorted(validated(folder, 0)) == [0, 1, 2]
    for worker in (0, 1):
        assert ended(folder, worker)["epoch"] == epochs
        [rate] = ended(folder, worker)["rates"]
        assert rate < 0.002
    checkpoints = [path.name for path in folder.glob("logs/**/*.ckpt")]
    assert len(checkpoints) == 3, checkpoints  # the two best ones and the last one
    assert ended(folder, 0)["best"] == ended(folder, 1)["best"]
    assert (folder / ended(folder, 0)["best"]).exists()
    [table] = folder.glob("logs/**/metrics.csv")
    assert "val_loss" in table.read_text()


STOPPING = """
class Stopping(lightning.{inner}Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if paceline.worker_index() == 1 and trainer.current_epoch == 1:
            trainer.should_stop = True
"""


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_all_workers_stop_when_early_stopping_says_so(sync: str, mark: str, tmp_path: Path) -> None:
    require("lightning")
    stops = 'EarlyStopping("val_loss", patience=1, min_delta=100.0)'
    run(tmp_path, script(epochs=20, callbacks=stops), "--sync", sync, "--pace", ".01,.03")
    assert ended(tmp_path, 0)["stopped"] == ended(tmp_path, 1)["stopped"] == 1
    assert sorted(used(tmp_path)) == [0, 1]


LATE = """
class Late(lightning.{inner}Callback):
    def on_validation_end(self, trainer, module):
        while paceline.worker_index() and not trainer.sanity_checking:
            if any(path.stem.startswith(f"epoch={{trainer.current_epoch}}") for path in Path("logs").glob("**/*.ckpt")):
                break
"""


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_checkpoints_have_the_same_names_in_a_worker_that_looks_after_they_are_written(
    sync: str, mark: str, tmp_path: Path
) -> None:
    """Lightning adds a number to the name of a file that exists."""
    require("lightning")
    program = script(callbacks='Late(), ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=-1)')
    program = program.replace("\n\nclass Module", LATE.format(inner="pytorch.") + "\n\nclass Module")
    run(tmp_path, program, "--sync", sync)
    best = ended(tmp_path, 0)["best"]
    assert ended(tmp_path, 1)["best"] == best
    assert (tmp_path / best).exists()


AGAIN = """
[found] = trainer.validate(module, validation, ckpt_path="best", verbose=False)
Path(f"again-{paceline.worker_index()}").write_text(json.dumps(found["val_loss"]))
"""


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_the_best_weights_of_all_are_validated_again_after_training(
    sync: str, mark: str, tmp_path: Path
) -> None:
    require("lightning")
    worst = 'ModelCheckpoint(monitor="val_loss", mode="max")'  # the weights after the first epoch
    weights = run(tmp_path, script(callbacks=worst) + AGAIN, "--sync", sync, "--pace", ".01,.02")
    for worker in range(2):
        losses = validated(tmp_path, worker)
        again = json.loads((tmp_path / f"again-{worker}").read_text())
        assert again == pytest.approx(losses[0], rel=1e-5)
        assert losses[0] == max(losses.values())
    best = torch.load(tmp_path / ended(tmp_path)["best"], weights_only=False)["state_dict"]
    assert all(torch.equal(weights[name], best[name]) for name in weights)


def test_a_worker_that_becomes_the_main_worker_while_it_saves_saves_the_states_of_the_optimizer(
    mark: str, tmp_path: Path
) -> None:
    require("lightning")
    program = script(epochs=1, callbacks='ModelCheckpoint(dirpath="saved", filename="state")')
    # A worker that does not know yet that it is the main worker gives no states.
    unaware = "trainer.strategy.optimizer_state = lambda optimizer: {}\n"
    run(tmp_path, program.replace("module = Module()\n", f"module = Module()\n{unaware}"), workers=1)
    [state] = torch.load(tmp_path / "saved" / "state.ckpt", weights_only=False)["optimizer_states"]
    assert len(state["state"]) == 4


PREDICT = """
found = torch.cat(trainer.predict(module, validation))
torch.save({"inputs": x[:64], "found": found}, f"predicted-{paceline.worker_index()}.pt")
"""


def test_all_workers_predict_with_the_weights_of_the_job(mark: str, tmp_path: Path) -> None:
    require("lightning")
    step = "    def predict_step(self, batch, index):\n        return self.network(batch[0])\n\n"
    program = script().replace("    def configure_optimizers", f"{step}    def configure_optimizers")
    weights = run(tmp_path, program + PREDICT, "--sync", "asp", "--pace", ".01,.02")
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    network.load_state_dict({name.removeprefix("network."): value for name, value in weights.items()})
    for worker in range(2):
        predicted = torch.load(tmp_path / f"predicted-{worker}.pt")
        torch.testing.assert_close(predicted["found"], network(predicted["inputs"]).detach())


def test_a_process_that_was_started_while_data_is_prepared_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("lightning")
    module = importlib.import_module("paceline.integrations.lightning")
    lock, kept = fcntl.flock, []

    def flock(file: IO[str], operation: int) -> None:
        kept.append(os.dup(file.fileno()))  # as a child of this process would
        lock(file, operation)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    with module._one_at_a_time():
        pass
    with (tmp_path / f"paceline-lightning-{os.getuid()}.lock").open("a") as file:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an error if the lock is taken
    for each in kept:
        os.close(each)


SLOW_WRITER = """
from lightning.{inner}plugins.io import TorchCheckpointIO

class SlowWriter(TorchCheckpointIO):
    def save_checkpoint(self, *arguments, **options):
        while not Path("reached").exists():
            pass
        super().save_checkpoint(*arguments, **options)
"""
REACHED = """
if not paceline.is_main():
    Path("reached").touch()
"""


def test_a_worker_that_loads_a_checkpoint_waits_for_its_writer(mark: str, tmp_path: Path) -> None:
    require("lightning")
    program = script(
        epochs=1, callbacks='ModelCheckpoint(monitor="val_loss")', options="plugins=[SlowWriter()]"
    )
    program = program.replace("\n\nclass Module", SLOW_WRITER.format(inner="pytorch.") + "\n\nclass Module")
    run(tmp_path, program + REACHED + AGAIN)
    for worker in range(2):
        again = json.loads((tmp_path / f"again-{worker}").read_text())
        assert again == pytest.approx(validated(tmp_path, worker)[0], rel=1e-5)


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_a_worker_that_is_stopped_in_mid_epoch_stops_the_others(sync: str, mark: str, tmp_path: Path) -> None:
    require("lightning")
    program = script(epochs=200, size=160, callbacks="Stopping()")
    program = program.replace("\n\nclass Module", STOPPING.format(inner="pytorch.") + "\n\nclass Module")
    run(tmp_path, program, "--sync", sync, "--pace", ".005,.01")
    assert max(used(tmp_path)) in (1, 2)
    assert ended(tmp_path, 0)["epoch"] <= 3


def test_max_steps_counts_joint_batches_under_each_model(mark: str, tmp_path: Path) -> None:
    require("lightning")
    options = "max_steps=12, max_epochs=-1"
    for sync in ("bsp", "asp"):
        run(tmp_path / sync, script(options=options, size=80), "--sync", sync, "--pace", ".01,.03")
    assert summary(tmp_path / "bsp")["ledger"]["samples"]["used"] == 12 * 8
    # Each worker finishes the iteration in which the limit was reached.
    assert 12 * 8 <= summary(tmp_path / "asp")["ledger"]["samples"]["used"] <= 14 * 8


def test_max_steps_includes_the_steps_of_a_checkpoint(mark: str, tmp_path: Path) -> None:
    require("lightning")
    cycle = "OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)"
    saves = 'ModelCheckpoint(dirpath="saved", filename="first")'
    first = script(size=80, epochs=1, callbacks=saves).replace(cycle, "LambdaLR(optimizer, lambda step: 1.0)")
    run(tmp_path, first, "--sync", "asp", "--pace", ".01,.03")
    assert summary(tmp_path)["ledger"]["samples"]["used"] == 10 * 8
    (tmp_path / "run").rename(tmp_path / "before")
    resumed = first.replace("options |= dict()", "options |= dict(max_steps=20, max_epochs=-1)")
    resumed = resumed.replace("validation)\nrates", 'validation, ckpt_path="saved/first.ckpt")\nrates')
    run(tmp_path, resumed, "--sync", "asp", "--pace", ".01,.03")
    # Each worker finishes the iteration in which the limit was reached.
    assert 10 * 8 <= summary(tmp_path)["ledger"]["samples"]["used"] <= 12 * 8


@pytest.mark.parametrize(("limit", "batches"), [("1", 1), ("3", 3), (".5", 2)])
def test_a_limit_of_the_batches_of_an_epoch_is_kept_in_each_of_them(
    limit: str, batches: int, mark: str, tmp_path: Path
) -> None:
    require("lightning")
    # Of 40 samples, each of two workers has five batches of 4.
    run(tmp_path, script(options=f"limit_train_batches={limit}", size=40, epochs=2))
    for worker in range(2):
        assert ended(tmp_path, worker)["epoch"] == 2
        assert ended(tmp_path, worker)["step"] == 2 * batches
    assert summary(tmp_path)["ledger"]["samples"]["used"] == 2 * 2 * batches * 4


REFUSED = {
    "asp val_check_interval=.5": "validates in the middle of an epoch",
    "asp limit_train_batches=3": "counts the batches of one worker",
    "bsp --split=dynamic val_check_interval=.5": "such as bsp, without --split dynamic",
    "bsp --split=dynamic limit_train_batches=3": "workers may use different numbers of batches",
    "asp devices=2": "was used with 2 devices, expected 1",
    "bsp devices=2": "was used with 2 devices, expected 1",
    "bsp reload_dataloaders_every_n_epochs=1": "the job divides the epochs of one loader",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_a_worker_cannot_do_by_itself_is_refused_in_a_sentence(
    given: str, mark: str, tmp_path: Path
) -> None:
    require("lightning")
    sync, *split, options = given.split()
    said = fail(tmp_path, script(options=options), "--sync", sync, *split)
    assert REFUSED[given] in said


def fail(folder: Path, program: str, *options: str) -> str:
    """Run a script with two workers, which fails; return what the run says."""
    process = start(
        folder,
        program,
        *("-m", "paceline", "run", "--workers", "2", "--servers", "1", "--run-dir", "run", *options),
    )
    printed = output(process)
    assert process.returncode != 0, printed
    return " ".join(printed.split())


def test_several_training_loaders_are_refused(mark: str, tmp_path: Path) -> None:
    require("lightning")
    program = script().replace(
        "trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True), validation)",
        "trainer.fit(module, {'a': DataLoader(data), 'b': DataLoader(data)})",
    )
    assert "was used with several training loaders" in fail(tmp_path, program)


REDUCES = (
    'self.log("train_loss", loss, prog_bar=True)',
    """mean = self.trainer.strategy.reduce(torch.tensor(float(paceline.worker_index())))
        self.log("train_loss", loss + 0.0 * mean)
        assert mean == 0.5""",
)


def test_what_is_reduced_in_a_validation_is_the_same_and_in_training_it_takes_lockstep(
    mark: str, tmp_path: Path
) -> None:
    require("lightning")
    validating = script().replace('self.log("val_loss", self.loss(batch))', VALIDATES_TOGETHER)
    run(tmp_path / "asp", validating, "--sync", "asp")
    values = read_metrics(tmp_path / "asp" / "run")
    assert set(values["samples"].values) == {64.0}
    assert validated(tmp_path / "asp", 0) == validated(tmp_path / "asp", 1)
    training = script().replace(*REDUCES)
    run(tmp_path / "bsp", training)
    assert "reduce() was called in a training step" in fail(tmp_path / "refused", training, "--sync", "asp")


VALIDATES_TOGETHER = """self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)"""

BATCH_NORM = "nn.Linear(32, 3))", "nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))"


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_all_workers_validate_with_the_statistics_of_all(sync: str, mark: str, tmp_path: Path) -> None:
    require("lightning")
    program = script(callbacks='ModelCheckpoint(filename="last")').replace(
        "nn.Linear(32, 3))", "nn.BatchNorm1d(32), nn.Linear(32, 3))"
    )
    run(tmp_path, program, "--sync", sync, "--pace", ".01,.03")
    assert validated(tmp_path, 0) == pytest.approx(validated(tmp_path, 1), rel=1e-6)


# -- workers that are lost, and that join ---------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("killed", [0, 1], ids=["main", "other"])
def test_the_others_go_on_when_a_worker_is_killed_in_mid_epoch(
    killed: int, sync: str, mark: str, tmp_path: Path
) -> None:
    """If it is the main worker, another one writes the checkpoints and the log from then on."""
    require("lightning")
    os.chdir(tmp_path)
    Path("train.py").write_text(script(size=96, epochs=4, pause_s=0.05, callbacks=ALL_CALLBACKS))
    command = (
        "-m",
        "paceline",
        "run",
        "-n",
        "3",
        "--servers",
        "1",
        "--sync",
        sync,
        "--run-dir",
        "run",
        "train.py",
    )
    with start_program(*command, stderr=subprocess.STDOUT) as program:
        path = Path(f"used-{killed}")
        await_that(lambda: path.exists() and "\n1 " in path.read_text(), "the worker is in its second epoch")
        os.kill(processes(mark)[f"worker {killed}"], signal.SIGKILL)
        Path("go").touch()
        printed, _ = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 0, printed
    assert summary(Path())["lost_workers"] == [killed]
    rest = [worker for worker in range(3) if worker != killed]
    for worker in rest:
        assert ended(Path(), worker)["epoch"] >= 4
        assert max(validated(Path(), worker)) >= 3
    if sync == "asp":
        assert validated(Path(), rest[0]) == validated(Path(), rest[1])
    saved = {torch.load(path, weights_only=False)["epoch"] for path in Path().glob("logs/**/*.ckpt")}
    assert max(saved) >= 3
    samples = summary(Path())["ledger"]["samples"]
    assert samples["used"] + samples["torn"] >= 4 * 96, samples
    assert samples["left"] == 0, samples


def test_the_last_worker_uses_more_than_an_epoch_after_the_other_was_killed(
    mark: str, tmp_path: Path
) -> None:
    """In the epoch after the loss, its share is the whole epoch and what the other worker has not used."""
    require("lightning")
    program = script(size=96, epochs=5, callbacks=ALL_CALLBACKS)
    dies = """
class Dies(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if paceline.worker_index() == 1 and trainer.current_epoch == 1 and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks.append(Dies())
options = """
    program = f"import os\nimport signal\n{program.replace('options = ', dies, 1)}"
    run(tmp_path, program, workers=2)
    assert summary(tmp_path)["lost_workers"] == [1]
    assert sorted(validated(tmp_path, 0)) == [0, 1, 2, 3, 4]
    samples = summary(tmp_path)["ledger"]["samples"]
    assert (samples["used"] + samples["torn"], samples["left"]) == (5 * 96, 0)


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_a_worker_that_joins_late_goes_on_with_the_epoch_and_the_callbacks_of_the_job(
    sync: str, mark: str, tmp_path: Path
) -> None:
    require("lightning")
    os.chdir(tmp_path)
    served = Served("--workers", "1:2", "--sync", sync)
    callbacks = ALL_CALLBACKS.replace("patience=3", "patience=100")
    Path("train.py").write_text(script(size=40, epochs=12, pause_s=0.4, callbacks=callbacks))
    first = served.join()
    path = Path("used-0")
    await_that(
        lambda: path.exists() and "\n1 " in path.read_text(), "the first worker is in its second epoch"
    )
    second = served.join()
    await_that(lambda: Path("used-1").exists(), "the second worker trains")
    Path("go").touch()
    ends = [output_of(program) for program in (first, second)]
    served.summary()
    assert [code for code, *_ in ends] == [0, 0], ends
    one, other = ended(Path(), 0), ended(Path(), 1)
    assert one["epoch"] == other["epoch"] == 12
    assert min(map(int, (line.split()[0] for line in Path("used-1").read_text().splitlines()))) >= 1
    assert one["rates"] == pytest.approx(other["rates"], abs=1e-4)
    if sync == "asp":
        assert one["best"] == other["best"]
        both = validated(Path(), 0).keys() & validated(Path(), 1).keys()
        assert both
        last = max(both)
        assert validated(Path(), 0)[last] == validated(Path(), 1)[last]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_run_that_was_killed_in_its_second_epoch_goes_on_from_there(
    sync: str, mark: str, tmp_path: Path
) -> None:
    require("lightning")
    os.chdir(tmp_path)
    size, epochs = 96, 4
    logger = 'logger=CSVLogger("logs", version="mine", flush_logs_every_n_steps=1), log_every_n_steps=1'
    Path("train.py").write_text(
        script(size=size, epochs=epochs, pause_s=0.05, callbacks=ALL_CALLBACKS, options=logger)
    )
    command = ["-m", "paceline", "run", "-n", "2", "--servers", "1", "--sync", sync, "--run-dir", "run"]
    with start_program(
        *command, "--checkpoint-every", "0.3", "train.py", stderr=subprocess.STDOUT
    ) as program:
        path = Path("used-0")
        await_that(
            lambda: path.exists() and path.read_text().count("\n1 ") >= 6, "the run is in its second epoch"
        )
        kill_all(mark)
        program.communicate()
    await_that(lambda: not processes(mark), "all processes have ended")
    before = used(Path())
    Path("go").touch()
    again = run_program("-m", "paceline", "run", "--resume", "run")
    assert again.returncode == 0, again.stdout + again.stderr
    after = used(Path())
    # What was used after the checkpoint is used again, and nothing is left out.
    for epoch in range(epochs):
        assert set(after[epoch]) == set(range(size)), epoch
    assert len(after[0]) == len(before[0])  # the first epoch is not repeated
    assert ended(Path(), 0)["epoch"] == ended(Path(), 1)["epoch"] == epochs
    assert sorted(validated(Path(), 1)) == list(range(epochs))
    [rate] = ended(Path(), 0)["rates"]
    assert rate < 0.002
    samples = summary(Path())["ledger"]["samples"]
    assert samples["used"] == size * epochs, samples
    # Lightning deletes the metrics of a version that is logged again, so those from before have another name.
    assert [len(list(Path().glob(f"logs/**/{name}.csv"))) for name in ("metrics", "metrics-1")] == [1, 1]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_checkpoint_of_one_process_is_resumed_by_three_workers_or_refused(
    sync: str, mark: str, tmp_path: Path
) -> None:
    """After one of two epochs, a linear schedule goes on at its half. A schedule with a length is refused."""
    require("lightning")
    callbacks = 'ModelCheckpoint(dirpath="saved", filename="{epoch}", save_top_k=-1)'
    linear = "LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))"
    cycle = "OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)"
    first = script(epochs=2, callbacks=callbacks).replace(cycle, linear)
    alone(tmp_path, first)
    resumed = first.replace("validation)\nrates", 'validation, ckpt_path="saved/epoch=0.ckpt")\nrates')
    resumed = resumed.replace("        loss = self.loss(batch)\n", PRINTED, 1)
    for path in tmp_path.glob("used-*"):
        path.unlink()
    run(tmp_path, resumed, "--sync", sync, workers=3)
    rates = [float(line.split()[-1]) for line in (tmp_path / "rates-0").read_text().splitlines()]
    assert rates[0] == pytest.approx(0.05, rel=0.1)
    assert rates == sorted(rates, reverse=True)
    assert used(tmp_path).keys() == {1}
    (tmp_path / "run").rename(tmp_path / "before")
    if sync == "bsp":
        alone(tmp_path, first.replace(linear, cycle))
        command = "-m", "paceline", "run", "--workers", "3", "--servers", "1", "--run-dir", "run"
        process = start(tmp_path, resumed.replace(linear, cycle).replace("epoch=0.", "epoch=0-v1."), *command)
        printed = output(process)
        assert process.returncode != 0
        assert (
            "written by another number of workers, so its OneCycleLR has another number of steps" in printed
        )


PRINTED = """        loss = self.loss(batch)
        with open(f"rates-{paceline.worker_index()}", "a") as file:
            file.write(f"{self.trainer.optimizers[0].param_groups[0]['lr']}\\n")
"""


# -- manual optimization --------------------------------------------------------------------------------------

MANUAL = """
    automatic_optimization = False

    def training_step(self, batch, index):
        inputs, targets, indices = batch
        with open(f"used-{paceline.worker_index()}", "a") as file:
            file.write(f"{self.current_epoch} {indices.tolist()}\\n")
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.network(inputs), targets) * (number + 1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        first = torch.optim.SGD(self.network[0].parameters(), lr=0.1)
        second = torch.optim.Adam(self.network[2].parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(each, 0.98) for each in (first, second)]
"""


def manual(**values: Any) -> str:
    program = script(**values, options="gradient_clip_val=None")
    begin, middle, end = (
        program.index(text)
        for text in ("    def training_step", "    def validation_step", "    def configure_optimizers")
    )
    after = program.index("\n\nlightning.seed_everything")
    return program[:begin] + MANUAL.lstrip("\n") + "\n" + program[middle:end] + program[after:]


def test_manual_optimization_with_two_optimizers_equals_one_process(mark: str, tmp_path: Path) -> None:
    require("lightning")
    alone(tmp_path / "one", manual(batch=8, shuffle=False) + SAVED)
    weights = run(tmp_path / "two", manual(shuffle=False))
    expected = torch.load(tmp_path / "one" / "module.pt")
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
    assert ended(tmp_path / "two")["rates"] == ended(tmp_path / "one")["rates"]
    require_all_used_once(tmp_path / "two", 72, 3)


def test_the_best_weights_are_validated_again_after_training_with_two_optimizers(
    mark: str, tmp_path: Path
) -> None:
    require("lightning")
    run(tmp_path, manual(callbacks='ModelCheckpoint(monitor="val_loss")') + AGAIN)
    for worker in range(2):
        again = json.loads((tmp_path / f"again-{worker}").read_text())
        assert again == pytest.approx(min(validated(tmp_path, worker).values()), rel=1e-5)


def test_manual_optimization_is_refused_where_computations_are_aborted(mark: str, tmp_path: Path) -> None:
    require("lightning")
    assert "A module with manual optimization cannot be used" in fail(
        tmp_path, manual(), "--sync", "spec-sync"
    )


# -- Fabric ---------------------------------------------------------------------------------------------------

FABRIC = """
import torch
from {package} import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import paceline.integrations.lightning

fabric = Fabric(strategy="paceline", accelerator="cpu", precision={precision})
fabric.launch()
fabric.seed_everything(0)
x = torch.randn(72, 8)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1), torch.arange(72)), batch_size={batch})
loader = fabric.setup_dataloaders(loader)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
assert fabric.broadcast("text") == "text"
assert fabric.broadcast(f"worker {{fabric.global_rank}}") == "worker 0"
for epoch in range(3):
    for index, (inputs, targets, indices) in enumerate(loader):
        with open(f"used-{{fabric.global_rank}}", "a") as file:
            file.write(f"{{epoch}} {{indices.tolist()}}\\n")
        loss = nn.functional.cross_entropy(model(inputs), targets) / 3
        fabric.backward(loss)
        if index % 3 == 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
            optimizer.step()
            optimizer.zero_grad()
    total = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")
    assert total == sum(range(fabric.world_size))
fabric.save("model.ckpt", {{"model": model, "optimizer": optimizer}})
"""


@pytest.mark.parametrize(
    ("package", "precision"),
    [("lightning.fabric", "None"), ("lightning_fabric", "None"), ("lightning.fabric", '"bf16-mixed"')],
)
def test_fabric_equals_one_process_on_the_joint_batch(
    package: str, precision: str, mark: str, tmp_path: Path
) -> None:
    require(package.partition(".")[0])
    values = {"package": package, "precision": precision}
    alone(tmp_path / "one", FABRIC.format(**values, batch=8))
    weights = run(tmp_path / "two", FABRIC.format(**values, batch=4))
    expected, saved = (torch.load(tmp_path / name / "model.ckpt") for name in ("one", "two"))
    assert weights.keys() == expected["model"].keys() == saved["model"].keys()
    rtol, atol = (1e-4, 1e-5) if precision == "None" else (0.02, 0.02)
    for key, tensor in expected["model"].items():
        torch.testing.assert_close(weights[key], tensor, rtol=rtol, atol=atol)
        assert torch.equal(saved["model"][key], weights[key])
    assert saved["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    require_all_used_once(tmp_path / "two", 72, 3)


def test_fabric_trains_with_dynamic_shares(mark: str, tmp_path: Path) -> None:
    require("lightning")
    program = FABRIC.format(package="lightning.fabric", precision="None", batch=4).replace("72", "240")
    program = program.replace("index % 3 == 2", "True")  # nothing is left of the last epoch
    run(tmp_path, program, "--sync", "asp", "--pace", ".01,.05")
    require_all_used_once(tmp_path, 240, 3)
    assert batches(tmp_path, 0) > 1.5 * batches(tmp_path, 1)


# -- the examples and the names --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lightning_trainer.py", "fabric_loop.py"])
def test_an_example_runs_under_each_model_and_alone(name: str, mark: str, tmp_path: Path) -> None:
    require("lightning")
    program = (EXAMPLES / name).read_text()
    alone(tmp_path / "alone", program)
    for sync in ("bsp", "asp"):
        run(tmp_path / sync, program, "--sync", sync)
        assert summary(tmp_path / sync)["ledger"]["samples"]["used"] % 512 == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_names_that_lightning_does_not_document_exist(package: str) -> None:
    """The `Trainer` has a `fit_loop`, whose class is not public, and neither are its counts."""
    require(package.partition(".")[0])
    module = importlib.import_module(package)
    rank_zero = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
    assert callable(rank_zero)
    trainer = module.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    fit_loop = trainer.fit_loop
    for counts in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        assert {"ready", "started", "processed", "completed"} <= vars(counts).keys()
    assert {"max_epochs"} <= vars(fit_loop).keys()
    epoch_loop = fit_loop.epoch_loop
    assert {"max_steps"} <= vars(epoch_loop).keys()
    assert epoch_loop.batch_progress.is_last_batch is False
    for steps in (
        epoch_loop.automatic_optimization.optim_progress.optimizer.step.total,
        epoch_loop.manual_optimization.optim_step_progress.total,
    ):
        assert {"ready", "completed"} <= vars(steps).keys()
    held = epoch_loop.on_save_checkpoint()
    epoch_loop.on_load_checkpoint({**held, "_batches_that_stepped": 7})
    assert epoch_loop.on_save_checkpoint()["_batches_that_stepped"] == 7


def test_the_strategy_uses_no_other_private_names() -> None:
    """What begins with an underscore in the integration is its own."""
    text = (ROOT / "src" / "paceline" / "integrations" / "lightning.py").read_text()
    own = set(re.findall(r"(?:def|class|self\.|^)\s*(_\w+)", text, re.MULTILINE)) | {
        "__init__",
        "__len__",
        "__iter__",
    }
    foreign = set(re.findall(r"(?<!self)\.(_[a-z]\w*)", text)) - own
    assert foreign == set()


def test_a_version_that_is_missing_or_too_old_is_said_in_a_sentence() -> None:
    with pytest.raises(
        ConfigurationError, match=r"needs lightning-of-yore 2.5 or later, but it is not installed"
    ):
        require_framework("lightning-of-yore", "2.5", "lightning")
    with pytest.raises(ConfigurationError, match=r"pip install 'paceline\[lightning\]'"):
        require_framework("torch", "999.0", "lightning")


def test_outside_a_run_the_strategy_is_that_of_one_process(tmp_path: Path, mark: str) -> None:
    require("lightning")
    program = script(shuffle=False, options="accumulate_grad_batches=2") + SAVED
    alone(tmp_path / "with", program)
    alone(
        tmp_path / "without",
        program.replace('strategy="paceline", ', "").replace("import paceline.integrations.lightning\n", ""),
    )
    one, other = (torch.load(tmp_path / name / "module.pt") for name in ("with", "without"))
    assert all(torch.equal(one[key], other[key]) for key in other)
