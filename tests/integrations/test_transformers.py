"""The Trainer of Hugging Face and trl's trainers in runs: equal to one process, resumed, and with lost workers."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoints.manifest import numbers_in
from paceline.lab.check import check_script
from paceline.trace.run_dir import read_metrics
from tests.support import live, served
from tests.support.live import await_that, of_the_run
from tests.train.test_porting import output, require, run, start

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    require("transformers")
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


def example(name: str, **replaced: str) -> str:
    """Return an example, with other values of some arguments."""
    return with_arguments((EXAMPLES / f"{name}.py").read_text(), **replaced)


def with_arguments(script: str, **replaced: str) -> str:
    """Return a script with other values of some keyword arguments, each of which is on a line of its own."""
    for argument, value in replaced.items():
        lines = [line for line in script.splitlines() if line.strip().startswith(f"{argument}=")]
        assert len(lines) == 1, argument
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        script = script.replace(lines[0], f"{indent}{argument}={value},")
    return script


def alone(folder: Path, script: str) -> str:
    """Run a script without Paceline's launcher, in one process. Return what it has printed."""
    process = start(folder, script)
    printed = output(process)
    assert process.returncode == 0, printed
    return printed


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def used(folder: Path) -> int:
    samples: dict[str, int] = summary(folder)["ledger"]["samples"]
    assert not samples["returned"]
    return samples["used"]


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


SENTENCES = """
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, TrainerCallback

from paceline.integrations.transformers import distribute


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(2, 24, (), generator=generator))
        return torch.randint(1, 40, (length,), generator=generator)


def collate(sentences):
    ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0,
))
arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=0.5,
    optim="sgd",
    warmup_steps=2,
    max_grad_norm=0.5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Sentences(), data_collator=collate)
distribute(trainer)
trainer.train()
trainer.save_model("trained")
print("steps", trainer.state.global_step, "rate", trainer.lr_scheduler.get_last_lr()[0])
"""


def saved(folder: Path, name: str = "trained") -> dict[str, torch.Tensor]:
    return load_file(folder / name / "model.safetensors")


def test_bsp_with_sentences_of_different_lengths_is_one_process_on_the_joint_batch(
    mark: str, tmp_path: Path
) -> None:
    run(tmp_path / "two", SENTENCES)
    printed = alone(tmp_path / "one", with_arguments(SENTENCES, per_device_train_batch_size="8"))
    require_equal(saved(tmp_path / "two"), saved(tmp_path / "one"))
    # With a joint batch, the workers divide the batch of the script.
    run(tmp_path / "joint", with_arguments(SENTENCES, per_device_train_batch_size="8"), "--joint-batch")
    require_equal(saved(tmp_path / "joint"), saved(tmp_path / "one"))
    log = (tmp_path / "two" / "run" / "worker-0.log").read_text()
    assert "steps 8 rate 0.0" in printed
    assert "steps 16 rate 0.0" in log  # batches of any worker
    assert used(tmp_path / "two") == 128
    loss = read_metrics(tmp_path / "two" / "run")["loss"]
    assert not loss.guessed
    assert len(loss.values) == 8


def test_without_weights_the_update_would_be_another_one(mark: str, tmp_path: Path) -> None:
    """Shows that the test above would notice if pushes were weighted by their samples."""
    forget = "type(trainer.job).tokens = property(lambda self: None, lambda self, value: None)\n"
    unweighted = SENTENCES.replace("distribute(trainer)\n", f"distribute(trainer)\n{forget}", 1)
    run(tmp_path / "two", unweighted)
    alone(tmp_path / "one", with_arguments(SENTENCES, per_device_train_batch_size="8"))
    found, expected = saved(tmp_path / "two"), saved(tmp_path / "one")
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) > 1e-3


def test_a_trainer_that_validates_and_stops_early_is_one_process_on_the_joint_batch(
    mark: str, tmp_path: Path
) -> None:
    """A validation loss that should rise never does, so training stops after three of eight epochs."""
    script = example(
        "trainer",
        num_train_epochs="8",
        learning_rate='0.3,\n    optim="sgd"',
        metric_for_best_model='"eval_loss",\n    greater_is_better=True',
    )
    # In float64, because rounding is visible after a hundred steps with a large learning rate.
    script = script.replace("arguments = ", "model.double()\narguments = ")
    weights = run(tmp_path / "two", script)
    alone(tmp_path / "one", with_arguments(script, per_device_train_batch_size="16"))
    require_equal(saved(tmp_path / "two"), saved(tmp_path / "one"))
    states = [newest_state(tmp_path / each) for each in ("two", "one")]
    assert [(each["global_step"], each["best_global_step"]) for each in states] == [(192, 64), (96, 32)]
    assert [each["epoch"] for each in states] == [3.0, 3.0]
    losses = [
        [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry] for state in states
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    # The best model is loaded into the job, so it is what the run saves.
    best = load_file(tmp_path / "two" / "checkpoints" / "checkpoint-64" / "model.safetensors")
    require_equal(saved(tmp_path / "two"), best)
    require_equal({name: weights[name] for name in best}, best)


def newest_state(folder: Path) -> dict[str, Any]:
    """Return the state of a trainer in its newest checkpoint."""
    newest = max((folder / "checkpoints").glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))
    found: dict[str, Any] = json.loads((newest / "trainer_state.json").read_text())
    return found


@pytest.mark.parametrize("sync", ["asp", "elastic-bsp"])
def test_a_faster_worker_uses_more_batches_and_all_of_them_count(
    sync: str, mark: str, tmp_path: Path
) -> None:
    script = example("trainer", num_train_epochs="3") + (
        'print("ended", trainer.state.global_step, trainer.state.epoch, trainer.lr_scheduler.get_last_lr()[0])\n'
    )
    run(tmp_path / "run", script, "--sync", sync, "--pace", ".05,.2")
    found = summary(tmp_path / "run")
    assert used(tmp_path / "run") == 3 * 512
    assert found["worker_samples"]["0"] > found["worker_samples"]["1"]
    for worker in (0, 1):
        log = (tmp_path / "run" / "run" / f"worker-{worker}.log").read_text()
        assert "ended 192 3.0 0.0" in log
    assert newest_state(tmp_path / "run")["global_step"] == 192
    history = read_metrics(tmp_path / "run" / "run")
    assert sum(point.count for point in history["loss"].points) == 192
    assert sum(point.count for point in history["eval_loss"].points) == 3


def test_numbers_of_steps_count_joint_batches_under_every_model(mark: str, tmp_path: Path) -> None:
    script = example(
        "trainer",
        max_grad_norm="1.0,\n    max_steps=40,\n    eval_steps=10,\n    save_steps=20",
        eval_strategy='"steps"',
        save_strategy='"steps"',
    )
    script = script.replace("trainer.train()", "metrics = trainer.train().metrics")
    script += (
        'print("counted", round(metrics["train_samples_per_second"] * metrics["train_runtime"] / 8) * 8)\n'
    )
    # Under asp, each worker ends at another step, because others have begun steps meanwhile.
    for name, sync, workers, options in (
        ("bsp", "bsp", 2, ()),
        ("asp", "asp", 4, ()),
        ("joint", "bsp", 2, ("--joint-batch",)),
    ):
        folder = tmp_path / name
        run(folder, script, "--sync", sync, *options, workers=workers)
        samples = 40 * 8 * (1 if options else workers)
        assert used(folder) == pytest.approx(samples, abs=8 * workers)
        [counted] = re.findall(r"counted (\d+)", (folder / "run" / "worker-0.log").read_text())
        assert int(counted) == pytest.approx(samples, rel=0.1)
        history = read_metrics(folder / "run")
        assert sum(point.count for point in history["eval_loss"].points) == 4
        folders = sorted(each.name for each in (folder / "checkpoints").iterdir())
        assert len(folders) == 2


def test_all_workers_evaluate_together_although_the_model_changes(mark: str, tmp_path: Path) -> None:
    script = example(
        "trainer",
        num_train_epochs="3",
        eval_strategy='"steps",\n    eval_steps=7',
        save_strategy='"steps",\n    save_steps=7',
    ).replace("early_stopping_patience=2", "early_stopping_patience=20")
    script += 'print("ended", len([each for each in trainer.state.log_history if "eval_loss" in each]))\n'
    printed = alone(tmp_path / "one", with_arguments(script, per_device_train_batch_size="16"))
    # transformers 5 evaluates after the last of 96 steps as well
    evaluations = 14 if "ended 14" in printed else 13
    assert f"ended {evaluations}" in printed
    run(tmp_path / "run", script, "--sync", "bsp@0,asp@20", "--pace", ".02,.08")
    for worker in (0, 1):
        log = (tmp_path / "run" / "run" / f"worker-{worker}.log").read_text()
        assert f"ended {evaluations}" in log
    best = newest_state(tmp_path / "run")["best_model_checkpoint"]
    require_equal(saved(tmp_path / "run"), load_file(tmp_path / "run" / best / "model.safetensors"))


def test_a_trainer_goes_on_from_its_own_checkpoint_in_mid_epoch(mark: str, tmp_path: Path) -> None:
    script = example(
        "trainer",
        num_train_epochs="2",
        learning_rate='0.1,\n    optim="sgd"',
        save_strategy='"steps",\n    save_steps=13',
        load_best_model_at_end="False",
        save_total_limit="None",
    )
    run(tmp_path / "run", script)
    expected = saved(tmp_path / "run")
    (tmp_path / "run" / "run").rename(tmp_path / "run" / "first")
    resumed = script.replace(
        "trainer.train()", 'trainer.train(resume_from_checkpoint="checkpoints/checkpoint-26")'
    )
    run(tmp_path / "run", resumed)
    require_equal(saved(tmp_path / "run"), expected)
    samples = summary(tmp_path / "run")["ledger"]["samples"]
    assert samples["used"] == 2 * 512 - 13 * 16
    assert read_metrics(tmp_path / "run" / "run")["loss"].values[-1] < 1.0


RATES = """
from transformers import TrainerCallback

class Said(TrainerCallback):
    def on_step_begin(self, args, state, control, **options):
        print("rate", trainer.lr_scheduler.get_last_lr()[0])

trainer.add_callback(Said())
trainer.train()
print("rate", trainer.lr_scheduler.get_last_lr()[0])
"""

RESUMES = "trainer.train()", 'trainer.train(resume_from_checkpoint="checkpoints/checkpoint-52")'


def resumable(**replaced: str) -> str:
    """Return a script whose checkpoints are written every 26 steps, and which prints the rate of each step."""
    script = example(
        "trainer",
        num_train_epochs="2",
        warmup_steps="0",
        save_strategy='"steps",\n    save_steps=26',
        load_best_model_at_end="False",
        save_total_limit="None",
        **replaced,
    )
    return script.replace("trainer.train()\n", RATES)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_checkpoint_of_one_process_is_resumed_by_three_workers(
    sync: str, mark: str, tmp_path: Path
) -> None:
    script = resumable()
    alone(tmp_path, script)
    run(tmp_path, script.replace(*RESUMES), "--sync", sync, workers=3)
    rates = [
        float(line.split()[-1])
        for line in (tmp_path / "run" / "worker-0.log").read_text().splitlines()
        if line.startswith("rate ")
    ]
    # 76 of 128 batches are left, and the rate falls to 0
    assert rates[0] == pytest.approx(3e-3 * 76 / 128, rel=0.03)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0
    # bsp begins with a whole joint batch, so the last batch before the checkpoint is used once more
    assert used(tmp_path) == 2 * 512 - (51 if sync == "bsp" else 52) * 8


def test_a_checkpoint_of_one_process_is_resumed_by_workers_that_divide_its_batches(
    mark: str, tmp_path: Path
) -> None:
    """A step is a smaller batch there, and the result is that of the process that was not interrupted."""
    script = resumable(learning_rate='0.1,\n    optim="sgd"')
    alone(tmp_path, script)
    expected = saved(tmp_path)
    run(tmp_path, script.replace(*RESUMES), "--joint-batch")
    require_equal(saved(tmp_path), expected)
    assert "rate 0.0" in (tmp_path / "run" / "worker-0.log").read_text()
    assert newest_state(tmp_path)["global_step"] == 256
    assert used(tmp_path) == 2 * 512 - 52 * 8
    # and back: the newest checkpoint of the two workers, which divided batches, is one of larger batches
    (tmp_path / "run").rename(tmp_path / "before")
    back = script.replace(RESUMES[0], 'trainer.train(resume_from_checkpoint="checkpoints/checkpoint-208")')
    run(tmp_path, back)
    assert "rate 0.0" in (tmp_path / "run" / "worker-0.log").read_text()
    assert used(tmp_path) == pytest.approx(2 * 512 * 48 / 256, abs=16)


def test_the_best_checkpoint_of_another_folder_is_loaded(mark: str, tmp_path: Path) -> None:
    script = example(
        "trainer",
        num_train_epochs="2",
        metric_for_best_model='"eval_loss",\n    greater_is_better=True',
        save_total_limit="None",
    )
    run(tmp_path, script)
    (tmp_path / "run").rename(tmp_path / "first")
    elsewhere = script.replace('"checkpoints",', '"elsewhere",').replace(
        "num_train_epochs=2", "num_train_epochs=3"
    )
    resumed = elsewhere.replace(
        "trainer.train()", 'trainer.train(resume_from_checkpoint="checkpoints/checkpoint-128")'
    )
    run(tmp_path, resumed)
    assert (tmp_path / "elsewhere" / "checkpoint-192").is_dir()
    require_equal(
        saved(tmp_path), load_file(tmp_path / "checkpoints" / "checkpoint-64" / "model.safetensors")
    )


LATEST_IS_BEST = """
import paceline
from transformers import TrainerCallback


class Latest(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **options):
        metrics["eval_step"] = state.global_step

    def on_log(self, args, state, control, logs, **options):
        if "train_runtime" in logs:
            paceline.barrier()  # the main worker has written its last checkpoint


"""


def test_the_best_checkpoint_is_kept_by_workers_that_resumed_with_another_best_one(
    mark: str, tmp_path: Path
) -> None:
    script = example(
        "trainer",
        num_train_epochs="2",
        metric_for_best_model='"eval_step",\n    greater_is_better=True',
        save_total_limit="1",
        callbacks="[Latest()]",
    )
    script = script.replace(first := "arguments = TrainingArguments(", LATEST_IS_BEST + first)
    run(tmp_path, script)
    (tmp_path / "run").rename(tmp_path / "first")
    resumed = script.replace("num_train_epochs=2", "num_train_epochs=3").replace(
        "trainer.train()", 'trainer.train(resume_from_checkpoint="checkpoints/checkpoint-128")'
    )
    run(tmp_path, resumed)
    require_equal(
        saved(tmp_path), load_file(tmp_path / "checkpoints" / "checkpoint-192" / "model.safetensors")
    )


def test_a_trainer_that_is_not_distributed_is_noticed_at_its_first_step(mark: str, tmp_path: Path) -> None:
    script = example("trainer", num_train_epochs="1").replace("distribute(trainer)", "pass")
    process = start(
        tmp_path, script, "-m", "paceline", "run", "--workers", "2", "--servers", "1", "--run-dir", "run"
    )
    printed = output(process)
    assert process.returncode != 0
    assert "UsageError: The AdamW optimizer is not distributed" in printed
    assert "Call paceline.integrations.transformers.distribute(trainer) before trainer.train()." in printed


@pytest.mark.parametrize("name", ["trainer", "accelerate_loop", "fabric_loop", "lightning_trainer"])
def test_nothing_is_found_in_the_examples(
    name: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_script(EXAMPLES / f"{name}.py") == []


def test_what_is_found_in_a_trainer_that_is_not_distributed_says_how_it_is(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(example("trainer").replace("distribute(trainer)", "pass"))
    found = {mistake.name: mistake.fix for mistake in check_script(script)}
    remedy = "Call paceline.integrations.transformers.distribute(trainer) before trainer.train()."
    assert found["optimizer not distributed"] == remedy
    assert "file written by every worker" not in found


LEAVES_FIRST = """
import os
from contextlib import contextmanager

import paceline

editing = paceline.DistributedOptimizer.editing


def until(name):
    while not os.path.exists(name):
        pass


@contextmanager
def slow_in_worker_1(self, **options):
    if paceline.is_main():
        until("entered")
    with editing(self, **options):
        if not paceline.is_main():
            open("entered", "w").close()
            until("left")
        yield
    if paceline.is_main():
        open("left", "w").close()


paceline.DistributedOptimizer.editing = slow_in_worker_1
trainer.train()
"""


def test_the_best_model_is_that_of_all_workers_although_one_loads_it_later(mark: str, tmp_path: Path) -> None:
    """Under asp, the edit of the worker that begins first counts, and the others do not wait for it."""
    script = example(
        "trainer",
        num_train_epochs="2",
        metric_for_best_model='"eval_loss",\n    greater_is_better=True',
    ).replace("trainer.train()\n", LEAVES_FIRST)
    run(tmp_path, script, "--sync", "asp")
    best = newest_state(tmp_path)["best_model_checkpoint"]
    expected = load_file(tmp_path / best / "model.safetensors")
    require_equal(saved(tmp_path), expected)


def await_checkpoint(folder: Path, least: int) -> None:
    def there() -> bool:
        place = folder / "run" / "checkpoints"
        return place.is_dir() and numbers_in(of_the_run(place))[-1:] >= [least]

    await_that(there, "a checkpoint is whole")


COUNTED = """
import os
from transformers import TrainerCallback

class Said(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        with open(f"steps-{os.environ['ATTEMPT']}.txt", "a") as file:
            file.write(f"{state.epoch:.3f} {state.global_step}\\n")

trainer.add_callback(Said())
trainer.train()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_killed_run_goes_on_in_its_second_epoch(sync: str, mark: str, tmp_path: Path) -> None:
    script = example("trainer", num_train_epochs="3").replace("trainer.train()\n", COUNTED)
    undisturbed = run(tmp_path / "undisturbed", script, "--sync", sync, ATTEMPT="0")
    folder = tmp_path / "run"
    options = (
        "--workers",
        "2",
        "--servers",
        "1",
        "--sync",
        sync,
        "--run-dir",
        "run",
        "--checkpoint-every",
        "0.3",
    )
    process = start(folder, script, "-m", "paceline", "run", *options, "--pace", ".05,.05", ATTEMPT="1")
    steps = folder / "steps-1.txt"

    def in_the_second_epoch() -> bool:
        return steps.exists() and any(float(line.split()[0]) > 1.1 for line in steps.read_text().splitlines())

    await_that(in_the_second_epoch, "the second epoch has begun")
    newest = numbers_in(of_the_run(folder / "run" / "checkpoints"))[-1]
    await_checkpoint(folder, newest + 2)  # the next one may have been begun in the first epoch
    live.kill_all(mark)
    output(process)
    process = start(folder, script, "-m", "paceline", "run", "--resume", "run", "--trust", ATTEMPT="2")
    printed = output(process)
    assert process.returncode == 0, printed
    first, *_, last = (folder / "steps-2.txt").read_text().splitlines()
    assert 1.0 < float(first.split()[0]) < 3.0
    assert last.split()[1] == "192"
    assert "not to be a single sample" not in printed
    samples = summary(folder)["ledger"]["samples"]
    assert samples["used"] == 3 * 512
    if sync == "bsp":
        require_equal(load_file(folder / "run" / "weights.safetensors"), undisturbed)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_worker_does_not_end_training_or_checkpoints(
    sync: str, victim: int, mark: str, tmp_path: Path
) -> None:
    dies = f"""
import signal

import paceline


class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        if paceline.worker_index() == {victim} and state.epoch > 1.3:
            os.kill(os.getpid(), signal.SIGKILL)

trainer.add_callback(Dies())
trainer.train()
"""
    script = example("trainer", num_train_epochs="4").replace(
        "trainer.train()\n", COUNTED.replace("trainer.train()\n", dies)
    )
    run(tmp_path / "run", script, "--sync", sync, workers=3, ATTEMPT="0")
    found = summary(tmp_path / "run")
    assert len(found["lost_workers"]) == 1
    state = newest_state(tmp_path / "run")
    assert state["epoch"] == 4.0
    assert (tmp_path / "run" / "trained" / "model.safetensors").exists()


def test_checkpoints_go_on_at_once_when_the_main_worker_is_lost_in_the_only_epoch(
    mark: str, tmp_path: Path
) -> None:
    dies = """
import os
import signal

import paceline
from transformers import TrainerCallback

class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        if paceline.worker_index() == 0 and state.epoch > 0.3:
            os.kill(os.getpid(), signal.SIGKILL)

trainer.add_callback(Dies())
trainer.train()
"""
    script = example(
        "trainer",
        num_train_epochs="1",
        eval_strategy='"steps",\n    eval_steps=4',
        save_strategy='"steps",\n    save_steps=4',
        save_total_limit="None",
    )
    run(tmp_path, script.replace("trainer.train()\n", dies), workers=3)
    assert summary(tmp_path)["lost_workers"] == [0]
    steps = sorted(int(each.name.partition("-")[2]) for each in (tmp_path / "checkpoints").iterdir())
    assert {12, 36, 48, 60} <= {
        *steps
    }  # that of step 24 may be due before the next main worker knows of the loss
    assert len(steps) <= 7  # the batches that the lost worker has not used come after the epoch's 66 steps
    logged = newest_state(tmp_path)["log_history"]
    assert [each["step"] for each in logged if "eval_loss" in each][:5] == [12, 24, 36, 48, 60]


def test_a_run_is_resumed_with_fewer_workers_whose_batches_are_larger(mark: str, tmp_path: Path) -> None:
    """The rate, and the next evaluation, follow the progress of the job."""
    script = resumable(eval_strategy='"steps",\n    eval_steps=13', learning_rate="0.001")
    run_of_two = script.replace("trainer.train()\n", COUNTED, 1)
    options = ("--workers", "2", "--servers", "1", "--sync", "asp", "--joint-batch", "--run-dir", "run")
    command = ("-m", "paceline", "run", *options, "--checkpoint-every", "0.3", "--pace", ".05,.05")
    process = start(tmp_path, run_of_two, *command, ATTEMPT="1")
    steps = tmp_path / "steps-1.txt"
    await_that(
        lambda: (
            steps.exists() and any(float(line.split()[0]) > 0.6 for line in steps.read_text().splitlines())
        ),
        "more than half of the first epoch is done",
    )
    newest = numbers_in(of_the_run(tmp_path / "run" / "checkpoints"))[-1]
    await_checkpoint(tmp_path, newest + 1)
    live.kill_all(mark)
    output(process)
    process = start(
        tmp_path,
        run_of_two,
        "-m",
        "paceline",
        "run",
        "--resume",
        "run",
        "--trust",
        "--workers",
        "1",
        "--pace",
        ".05",
        ATTEMPT="2",
    )
    printed = output(process)
    assert process.returncode == 0, printed
    epochs = [float(line.split()[0]) for line in (tmp_path / "steps-2.txt").read_text().splitlines()]
    rates = [
        float(line.split()[-1])
        for line in (tmp_path / "run" / "worker-0.log").read_text().splitlines()
        if line.startswith("rate ")
    ]
    assert rates[0] == pytest.approx(0.001 * (1 - epochs[0] / 2), abs=0.00005)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0
    evaluated = [each["epoch"] for each in newest_state(tmp_path)["log_history"] if "eval_loss" in each]
    assert len(evaluated) == pytest.approx(2 * 64 // 13, abs=1)


JOINED = """
import os
import time
from pathlib import Path

import paceline
from transformers import TrainerCallback


class Said(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        with open(f"steps-{paceline.worker_index()}.txt", "a") as file:
            file.write(f"{state.epoch:.3f} {state.global_step}\\n")
        Path(f"stepped-{os.getpid()}").touch()
        if state.epoch > 1.1 and not Path("enough").exists():
            time.sleep(1.0)

trainer.add_callback(Said())
trainer.train()
"""


def steps_of(worker: int) -> list[tuple[float, int]]:
    """Return the epoch and the step after each step of a worker."""
    file = Path(f"steps-{worker}.txt")
    lines = file.read_text().splitlines() if file.exists() else []
    return [(float(epoch), int(step)) for epoch, step in map(str.split, lines)]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_worker_that_joins_late_begins_with_the_epoch_of_the_job(sync: str, mark: str) -> None:
    run_of = served.Served("--workers", "2:3", "--servers", "1", "--sync", sync)
    script = example("trainer", num_train_epochs="4").replace("trainer.train()\n", JOINED)
    Path("train.py").write_text(script)
    programs = [run_of.join() for _ in range(2)]
    await_that(lambda: any(epoch > 1.1 for epoch, _ in steps_of(0)), "the second epoch has begun")
    programs.append(run_of.join())
    served.await_training(3)
    served.enough()
    ends = [served.output(program) for program in programs]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    found: dict[str, Any] = run_of.summary()
    assert found["ledger"]["samples"]["used"] == 4 * 512
    [(first, _), *_] = steps_of(2)
    assert first > 1.0
    whole = 4 * 66  # of three workers with batches of 8, for 512 samples
    state = newest_state(Path())
    assert (state["epoch"], state["global_step"]) == (4.0, whole)
    assert len([entry for entry in state["log_history"] if "eval_loss" in entry]) == 4


def test_sft_with_lora_is_one_process_on_the_joint_batch(mark: str, tmp_path: Path) -> None:
    require("trl")
    script = example("sft_lora", num_train_epochs="1", learning_rate='0.1,\n        optim="sgd"')
    run(tmp_path / "two", script)
    alone(tmp_path / "one", with_arguments(script, per_device_train_batch_size="8"))
    adapters = [
        load_file(tmp_path / each / "adapters" / "adapter_model.safetensors") for each in ("two", "one")
    ]
    require_equal(*adapters)
    assert used(tmp_path / "two") == 384
    assert "mean_token_accuracy" in read_metrics(tmp_path / "two" / "run")


DPO = """
from trl import DPOConfig, DPOTrainer

pairs = Dataset.from_dict({
    "prompt": [sentence(choose) + " " for _ in range(64)],
    "chosen": [sentence(choose) for _ in range(64)],
    "rejected": [sentence(choose) for _ in range(64)],
})
trainer = DPOTrainer(
    model,
    args=DPOConfig(
        "checkpoints",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=0.05,
        optim="sgd",
        max_length=64,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
    ),
    train_dataset=pairs,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
distribute(trainer)
trainer.train()
trainer.save_model("adapters")
"""


def test_dpo_is_one_process_on_the_joint_batch(mark: str, tmp_path: Path) -> None:
    require("trl")
    script = (EXAMPLES / "sft_lora.py").read_text().partition("trainer = SFTTrainer(")[0] + DPO
    run(tmp_path / "two", script)
    alone(tmp_path / "one", with_arguments(script, per_device_train_batch_size="8"))
    adapters = [
        load_file(tmp_path / each / "adapters" / "adapter_model.safetensors") for each in ("two", "one")
    ]
    require_equal(*adapters)


def test_bfloat16_equals_one_process(mark: str, tmp_path: Path) -> None:
    script = example(
        "trainer",
        num_train_epochs="1",
        learning_rate='0.1,\n    optim="sgd",\n    bf16=True,\n    use_cpu=True',
    )
    run(tmp_path / "two", script)
    alone(tmp_path / "one", with_arguments(script, per_device_train_batch_size="16"))
    for name, tensor in saved(tmp_path / "one").items():
        torch.testing.assert_close(saved(tmp_path / "two")[name], tensor, rtol=0.02, atol=0.002)


OWN_SUBCLASS = """
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


"""


def test_a_subclass_with_a_model_of_its_own_saves_all_weights(mark: str, tmp_path: Path) -> None:
    script = example(
        "trainer",
        num_train_epochs="1",
        learning_rate='0.1,\n    optim="sgd"',
        load_best_model_at_end="True",
    )
    script = script.replace("arguments = ", f"{OWN_SUBCLASS}model = Plain()\narguments = ")
    script = script.replace("trainer = Trainer(", "trainer = Own(").replace(
        "return 2 * outputs", 'return 2 * outputs["loss"]'
    )
    script = script.replace("2 * outputs.loss", '2 * outputs["loss"]')
    weights = run(tmp_path / "two", script)
    alone(tmp_path / "one", with_arguments(script, per_device_train_batch_size="16"))
    require_equal(saved(tmp_path / "two"), saved(tmp_path / "one"))
    require_equal(weights, saved(tmp_path / "two"))


LOADS = """
import torch
from paceline.integrations.transformers import _load

saved, model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
torch.save(saved.state_dict(), "pytorch_model.bin")
_load(model, ".")
print("equal", torch.equal(model.weight, saved.weight))
"""


def test_a_checkpoint_without_safetensors_is_loaded(mark: str, tmp_path: Path) -> None:
    assert "equal True" in alone(tmp_path, LOADS)


def test_a_schedule_by_a_metric_is_not_stepped_with_the_gradients_that_are_left(
    mark: str, tmp_path: Path
) -> None:
    if version("transformers").startswith("4."):
        pytest.skip("this version has no GreedyLR")
    script = with_arguments(
        SENTENCES,
        gradient_accumulation_steps="3",
        warmup_steps='0,\n    lr_scheduler_type="greedy",\n    eval_strategy="epoch"',
    )
    script = script.replace(
        "train_dataset=Sentences(),", "train_dataset=Sentences(), eval_dataset=Sentences(),"
    )
    run(tmp_path, script)
    assert used(tmp_path) == 2 * 64


REFUSED = """
import types

import paceline
from paceline.integrations.transformers import reason_against

args = dict(fsdp=[], n_gpu=1, auto_find_batch_size=False, optim="adamw_torch", parallelism_config=None)


def reason(kind="Trainer", bases=(object,), model=None, is_fsdp_enabled=False, is_deepspeed_enabled=False, **changed):
    trainer = type(kind, bases, {})()
    trainer.args = types.SimpleNamespace(**{**args, **changed})
    trainer.model = model
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = is_fsdp_enabled, is_deepspeed_enabled
    return reason_against(trainer)


assert reason() is None
print("grpo:", reason("GRPOTrainer"))
print("own grpo:", reason("Own", (type("RLOOTrainer", (), {}),)))
print("fsdp:", reason(fsdp=["full_shard"]))
print("deepspeed:", reason(is_deepspeed_enabled=True))
print("tensors:", reason(model=types.SimpleNamespace(tp_size=2)))
print("gpus:", reason(n_gpu=2))
print("sizes:", reason(auto_find_batch_size=True))
print("bits:", reason(optim="adamw_bnb_8bit"))
"""

REMEDIES = {
    "grpo": "Train with SFTTrainer or DPOTrainer",
    "own grpo": "Own cannot train in a run: RLOOTrainer compares",
    "fsdp": "Omit the argument fsdp",
    "deepspeed": "Omit the argument deepspeed",
    "tensors": "Load the model without tp_plan",
    "gpus": "--devices cuda:0,cuda:1",
    "sizes": "Omit this argument",
    "bits": "optim='adamw_torch'",
}


def test_what_does_not_work_is_refused_with_the_remedy(mark: str, tmp_path: Path) -> None:
    printed = alone(tmp_path / "refused", REFUSED)
    lines = dict(line.split(":", 1) for line in printed.splitlines() if ":" in line)
    assert REMEDIES.keys() <= lines.keys()
    for name, remedy in REMEDIES.items():
        assert remedy in lines[name]


MISUSED = """
from paceline.errors import UsageError


def refused(call, *arguments):
    try:
        call(*arguments)
    except UsageError as error:
        print("refused:", error)


refused(distribute, trainer)
refused(distribute, model)
refused(trainer.hyperparameter_search)
"""


def test_a_trainer_is_distributed_once_and_before_training(mark: str, tmp_path: Path) -> None:
    script = example("trainer", num_train_epochs="1").replace(
        "trainer.train()\n", MISUSED + "trainer.train()\n"
    )
    late = "data = Sentences(8, seed=1)\nother = Trainer(model, arguments, train_dataset=data, eval_dataset=data)\n"
    run(
        tmp_path / "run",
        f"{script}{late}other.state.max_steps = 1  # as after training\nrefused(distribute, other)\n",
    )
    log = (tmp_path / "run" / "run" / "worker-0.log").read_text()
    refusals = [line for line in log.splitlines() if line.startswith("refused")]
    assert len(refusals) == 4
    for line, text in zip(
        refusals,
        ("called twice", "expected a transformers.Trainer", "study", "Call this function before"),
        strict=True,
    ):
        assert text in line
