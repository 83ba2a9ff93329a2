"""Scripts for Hugging Face Accelerate in runs: equal to one process, with shares that follow the workers' speeds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.trace.run_dir import read_metrics
from tests.integrations.test_transformers import EXAMPLES, alone, require_equal, summary, used
from tests.support import served
from tests.support.live import await_that
from tests.train.test_porting import output, require, run, start

pytestmark = pytest.mark.processes

SCRIPT = (EXAMPLES / "accelerate_loop.py").read_text()


@pytest.fixture(autouse=True)
def installed() -> None:
    require("accelerate")


def log_of(folder: Path, worker: int = 0) -> str:
    return (folder / "run" / f"worker-{worker}.log").read_text()


def test_bsp_is_one_process_on_the_joint_batch(mark: str, tmp_path: Path) -> None:
    """The script accumulates, clips, and has a schedule that ends with training."""
    # One process on the joint batch has half as many steps, and the rate after each step of the job.
    rates = "LinearLR(optimizer, 1.0, 0.1, total_iters=3 * len(loader) // 2)"
    assert rates in SCRIPT
    script = (
        SCRIPT.replace("shuffle=True", "shuffle=False") + 'print("rate", optimizer.param_groups[0]["lr"])\n'
    )
    weights = run(tmp_path / "two", script)
    alone(tmp_path / "one", script.replace("batch_size=8", "batch_size=16"))
    expected = load_file(tmp_path / "one" / "state" / "model.safetensors")
    require_equal(weights, expected)
    require_equal(load_file(tmp_path / "two" / "state" / "model.safetensors"), expected)
    assert used(tmp_path / "two") == 3 * 512
    logs = [log_of(tmp_path / "two", worker) for worker in (0, 1)]
    assert "rate 0.02" in logs[0]
    assert logs[0].count("accuracy") == 3
    assert logs[1].count("accuracy") == 0
    accuracy = read_metrics(tmp_path / "two" / "run")["accuracy"]
    assert sum(point.count for point in accuracy.points) == 6  # each worker logs once in each epoch


@pytest.mark.parametrize("steps", [2, 3])
def test_a_faster_worker_uses_more_batches_and_no_gradient_is_left(
    steps: int, mark: str, tmp_path: Path
) -> None:
    script = SCRIPT.replace("accumulation_steps=2", f"accumulation_steps={steps}")
    script += 'print("rest", accelerator.has_rest, accelerator.sync_gradients)\n'
    run(tmp_path / "run", script, "--sync", "asp", "--pace", ".02,.08")
    assert used(tmp_path / "run") == 3 * 512
    found = summary(tmp_path / "run")["worker_samples"]
    assert found["0"] > found["1"]
    for worker in (0, 1):
        assert "rest False True" in log_of(tmp_path / "run", worker)


def test_mixed_precision_equals_one_process(mark: str, tmp_path: Path) -> None:
    half = SCRIPT.replace("shuffle=True", "shuffle=False").replace(
        "accumulation_steps=2)", 'accumulation_steps=2, mixed_precision="bf16")'
    )
    scaled = SCRIPT.replace("shuffle=True", "shuffle=False").replace(
        "accumulation_steps=2)\n",
        'accumulation_steps=2)\naccelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)\n',
    )
    for name, script, error in (("bf16", half, 0.05), ("fp16", scaled, 1e-3)):
        weights = run(tmp_path / name, script)
        # Without a run, Accelerate would clip scaled gradients, because the script sets the scaler by itself.
        expected = run(tmp_path / f"{name}-one", script.replace("batch_size=8", "batch_size=16"), workers=1)
        for key, tensor in expected.items():
            assert (weights[key] - tensor).norm() <= error * tensor.norm(), name


CALLS = """
import torch

import paceline
from paceline.integrations.accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(16, 1))
loader = torch.utils.data.DataLoader(data, 2)
try:
    accelerator.prepare(model, optimizer, loader)
except paceline.errors.UsageError as error:
    print("refused:", error)
model, optimizer, loader = accelerator.prepare(model, optimizer, train=loader)
try:
    accelerator.prepare(train=loader)
except paceline.errors.UsageError as error:
    print("refused:", error)
whole = accelerator.prepare(torch.utils.data.DataLoader(data, 4))
print("whole", sum(len(x) for (x,) in whole))
for (x,) in accelerator.skip_first_batches(loader, 1):
    optimizer.zero_grad()
    accelerator.backward(model(x).mean())
    optimizer.step()
own = torch.tensor([1.0 + paceline.worker_index()])
print("gathered", accelerator.gather(own).tolist(), accelerator.gather_for_metrics(own).tolist())
print("reduced", accelerator.reduce(own).item(), accelerator.reduce({"a": own}, "mean")["a"].item())
accelerator.wait_for_everyone()
print("main", accelerator.is_main_process)
accelerator.on_main_process(print)("decorated")
accelerator.on_local_main_process(print)("decorated")
"""


def test_calls_of_all_workers_and_a_loader_without_a_name(mark: str, tmp_path: Path) -> None:
    run(tmp_path / "run", CALLS)
    for worker, main in ((0, "True"), (1, "False")):
        log = log_of(tmp_path / "run", worker)
        assert re.search(r"refused: .*no loader by the name train.*Write prepare", log)
        assert re.search(r"refused: .*that an earlier call has divided", log)
        assert "whole 16" in log
        assert f"gathered [1.0, 2.0] [{worker + 1}.0]" in log
        assert "reduced 3.0 1.5" in log
        assert f"main {main}" in log
        assert log.count("decorated") == (0 if worker else 2)
    assert used(tmp_path / "run") == 12


CLIPS = """
import torch

import paceline
from paceline.integrations.accelerate import Accelerator

accelerator = Accelerator()
models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in models]
accelerator.prepare(*models)
optimizers = accelerator.prepare(*optimizers)
parameters = [[*each.parameters()] for each in models]
for given in (parameters[0][:1], parameters[0] + parameters[1]):
    try:
        accelerator.clip_grad_norm_(given, 0.5)
    except paceline.errors.UsageError as error:
        print("refused:", error)
before = [torch.nn.utils.parameters_to_vector(each).detach() for each in parameters]
accelerator.backward(models[1](models[0](torch.full((1, 2), 100.0))).sum())
accelerator.clip_grad_norm_(parameters[0], 0.5)
accelerator.step_with_rest()  # as at the end of a pass
changes = [torch.nn.utils.parameters_to_vector(each).detach() - old for each, old in zip(parameters, before)]
print("changes", *(float(each.norm()) for each in changes))
"""


def test_the_gradient_of_one_optimizer_is_clipped_and_no_other_one(mark: str, tmp_path: Path) -> None:
    run(tmp_path / "run", CLIPS)
    log = log_of(tmp_path / "run")
    assert "got 1 of the 2 parameters of an optimizer, expected all parameters of one optimizer" in log
    assert "got parameters of 2 optimizers, expected all parameters of one optimizer" in log
    [changes] = re.findall("changes (.*) (.*)", log)
    assert float(changes[0]) == pytest.approx(0.5, rel=1e-3)
    assert float(changes[1]) > 1.0


@pytest.mark.parametrize("before", ["fsdp_plugin=", "True, False, None, 1, False, None, None, "])
def test_arguments_that_divide_the_model_are_refused(before: str, mark: str, tmp_path: Path) -> None:
    call = f"Accelerator({before}accelerate.FullyShardedDataParallelPlugin())"
    script = f"import accelerate\nfrom paceline.integrations.accelerate import Accelerator\n{call}\n"
    command = "-m", "paceline", "run", "--workers", "1", "--servers", "1", "--run-dir", "run"
    process = start(tmp_path, script, *command)
    printed = output(process)
    assert process.returncode != 0
    assert "Accelerator() got fsdp_plugin, which divides the model" in printed
    assert "Omit fsdp_plugin" in printed


def test_a_state_that_was_saved_is_loaded_by_all_workers(mark: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("shuffle=True", "shuffle=False").replace(
        "paceline.epochs(3)", "paceline.epochs(1)"
    )
    first = run(tmp_path / "run", script)
    (tmp_path / "run" / "run").rename(tmp_path / "run" / "first")
    loading = script.replace(
        "validation = accelerator.prepare(validation)",
        """validation = accelerator.prepare(validation)
accelerator.load_state("state")
print("loaded", float(model[0].weight.detach().norm()), optimizer.param_groups[0]["lr"])
print("drawn", float(torch.rand(())))""",
    )
    second = run(tmp_path / "run", loading)
    norm = float(first["0.weight"].norm())
    for worker in (0, 1):
        [line] = [each for each in log_of(tmp_path / "run", worker).splitlines() if each.startswith("loaded")]
        assert float(line.split()[1]) == pytest.approx(norm)
        assert float(line.split()[2]) < 0.2  # the schedule goes on
    assert not torch.equal(first["0.weight"], second["0.weight"])
    drawn = [re.findall("drawn .*", log_of(tmp_path / "run", worker)) for worker in (0, 1)]
    assert len(drawn[0]) == len(drawn[1]) == 1
    assert drawn[0] != drawn[1]


def test_states_with_automatic_names_are_saved_by_the_main_worker_alone(mark: str, tmp_path: Path) -> None:
    configuration = 'accelerate.utils.ProjectConfiguration(".", automatic_checkpoint_naming=True)'
    script = SCRIPT.replace("_steps=2)", f"_steps=2, project_config={configuration})")
    script = script.replace('accelerator.save_state("state")', "    accelerator.save_state()")
    run(tmp_path / "run", f"import accelerate\n{script}")
    for number in range(3):
        assert (tmp_path / "run" / "checkpoints" / f"checkpoint_{number}" / "model.safetensors").is_file()


def test_outside_a_run_it_is_the_class_of_accelerate(mark: str, tmp_path: Path) -> None:
    own = SCRIPT.replace("from paceline.integrations.accelerate import", "from accelerate import")
    own = own.replace("scheduler, train=loader", "scheduler, loader")
    printed = [alone(tmp_path / "ours", SCRIPT), alone(tmp_path / "theirs", own)]
    assert printed[0] == printed[1]
    states = [load_file(tmp_path / each / "state" / "model.safetensors") for each in ("ours", "theirs")]
    require_equal(states[0], states[1])


DIES = """        if epoch == 1 and paceline.worker_index() == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        with accelerator.accumulate(model):
"""


@pytest.mark.parametrize(("sync", "victim"), [("bsp", 0), ("asp", 0), ("asp", 1)])
def test_a_lost_worker_does_not_end_training_or_its_states(
    sync: str, victim: int, mark: str, tmp_path: Path
) -> None:
    step = "        with accelerator.accumulate(model):\n"
    assert step in SCRIPT
    script = f"import os\nimport signal\n{SCRIPT.replace(step, DIES.format(victim=victim))}"
    weights = run(tmp_path / "run", script, "--sync", sync, workers=3)
    found = summary(tmp_path / "run")
    assert [*found["lost_workers"]] in ([victim], [str(victim)])
    samples = found["ledger"]["samples"]
    assert sum(samples.values()) == 3 * 512
    assert samples["returned"] == samples["left"] == 0
    state = load_file(tmp_path / "run" / "state" / "model.safetensors")
    if sync == "bsp":  # otherwise, another worker may push later
        require_equal(state, weights)
    logs = "".join(log_of(tmp_path / "run", worker) for worker in range(3) if worker != victim or not victim)
    assert "epoch 2: accuracy" in logs


SLOWLY = """        Path(f"stepped-{os.getpid()}").touch()
        Path(f"worker-{paceline.worker_index()}-epoch-{epoch}").touch()
        if epoch and not Path("enough").exists():
            time.sleep(0.5)
        with accelerator.accumulate(model):
"""


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_worker_that_joins_late_begins_with_the_epoch_of_the_job(sync: str, mark: str) -> None:
    run_of = served.Served("--workers", "2:3", "--servers", "1", "--sync", sync)
    step = "        with accelerator.accumulate(model):\n"
    heads = "import os\nimport time\nfrom pathlib import Path\n"
    Path("train.py").write_text(heads + SCRIPT.replace(step, SLOWLY))
    programs = [run_of.join() for _ in range(2)]
    await_that(lambda: Path("worker-0-epoch-1").exists(), "the second epoch has begun")
    programs.append(run_of.join())
    served.await_training(3)
    served.enough()
    ends = [served.output(program) for program in programs]
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    found: dict[str, Any] = run_of.summary()
    assert found["ledger"]["samples"]["used"] == 3 * 512
    assert not Path("worker-2-epoch-0").exists()
    assert Path("state", "model.safetensors").exists()
