"""The scripts in docs: complete, and equal to one process on the joint batch."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline import Cluster, DistributedOptimizer, simulate
from paceline.trace.run_dir import read_metrics
from tests.support import live
from tests.support.marks import thorough
from tests.train.test_tensorwise import Net, largest_difference

pytestmark = pytest.mark.processes

DOCS = Path(__file__).parents[2] / "docs"
PYTHON_BLOCK = re.compile(r"^```python\n# ([^\n:]+)(?::[^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    name: block
    for folder in ("start", "how-to")
    for page in sorted((DOCS / folder).glob("*.md"))
    for name, block in PYTHON_BLOCK.findall(page.read_text())
}

VOCABULARY = 250_000
"""Number of words of a model whose embedding has 64 MB."""


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make porting` runs this test")


def start(folder: Path, script: str, *command: str, **variables: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, *command, "train.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    with process:
        printed, _ = process.communicate(timeout=live.DEADLINE_S)
    return printed


def run(
    folder: Path, script: str, *options: str, workers: int = 2, **variables: str
) -> dict[str, torch.Tensor]:
    """Run a script with some workers; return the weights that the run saves."""
    count = ("--workers", str(workers), "--servers", "1")
    command = ("-m", "paceline", "run", *count, "--run-dir", "run", *options)
    process = start(folder, script, *command, **variables)
    printed = output(process)
    assert process.returncode == 0, printed
    return load_file(folder / "run" / "weights.safetensors")


def test_two_workers_equal_distributed_data_parallel_to_the_last_bit(mark: str, tmp_path: Path) -> None:
    # Each worker has 16 consecutive samples of each joint batch, a DistributedSampler every other sample.
    reordered = "x = torch.randn(512, 8).view(-1, 16, 2, 8).transpose(1, 2).reshape(512, 8)"
    ours = BLOCKS["train.py"].replace("shuffle=True", "shuffle=False")
    weights = run(tmp_path / "ours", ours.replace("x = torch.randn(512, 8)", reordered))
    store = f'"gloo", init_method="file://{tmp_path}/store", rank=int(os.environ["RANK"]), world_size=2'
    theirs = "import os\n" + BLOCKS["train_ddp.py"].replace('"gloo"', store)
    theirs = theirs.replace("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)")
    processes = [
        start(tmp_path / "theirs", theirs, RANK=str(rank), GLOO_SOCKET_IFNAME="lo") for rank in range(2)
    ]
    printed = [output(process) for process in processes]
    expected = torch.load(tmp_path / "theirs" / "model.pt")
    saved = torch.load(tmp_path / "ours" / "model.pt")
    assert weights.keys() == saved.keys() == expected.keys(), printed
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
        assert torch.equal(saved[name], tensor), name


@pytest.mark.parametrize("sync", ["asp", *thorough("bsp")])
def test_all_workers_stop_early_with_an_average_of_the_weights(sync: str, mark: str, tmp_path: Path) -> None:
    weights = run(tmp_path / "run", BLOCKS["train_averaged.py"], "--sync", sync)
    validation = read_metrics(tmp_path / "run" / "run")["validation_loss"]
    assert validation.kind == "point"
    assert 4 < len(validation.values) < 30
    assert min(validation.values) == validation.values[-4] < 0.5
    saved = torch.load(tmp_path / "run" / "best.pt")
    assert saved.keys() == weights.keys()


def test_the_page_counts_the_lines_that_change() -> None:
    changes = difflib.ndiff(BLOCKS["train_ddp.py"].splitlines(), BLOCKS["train.py"].splitlines())
    signs = [line[0] for line in changes if line[2:].strip()]
    assert (signs.count("+"), signs.count("-")) == (6, 12)
    assert "six lines are new, and twelve are gone:" in (DOCS / "start" / "coming-from-ddp.md").read_text()


def test_two_lines_of_a_script_for_accelerate_change() -> None:
    before, after = BLOCKS["train_accelerate.py"], BLOCKS["train_with_accelerator.py"]
    changes = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[2:].strip()]
    assert [line[:2] for line in changes].count("+ ") == [line[:2] for line in changes].count("- ") == 2
    page = (DOCS / "start" / "coming-from-accelerate.md").read_text()
    assert "two lines change: the import, and the name of the loader" in page


def test_a_script_for_accelerate_trains(mark: str, tmp_path: Path) -> None:
    require("accelerate")
    weights = run(tmp_path / "run", BLOCKS["train_with_accelerator.py"])
    saved = load_file(tmp_path / "run" / "out" / "model.safetensors")
    assert weights.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(weights[name], tensor), name


STEP = "        optimizer.step()\n"
MEASURED_STEP = f"""{STEP}
        print("traffic", *(sum(s.traffic[i] for s in current().links.servers) for i in (0, 1)))
"""
MEASURED_END = """
import os
from tests.support.live import is_server, peak_bytes

print("trained", sum(p.nbytes for p in model.parameters() if p.requires_grad))
[server] = filter(is_server, map(int, filter(str.isdigit, os.listdir("/proc"))))
print("peaks", peak_bytes(server), peak_bytes(os.getpid()))
"""


class Adapters(NamedTuple):
    """What was measured in worker 0 of a run that trains adapters.

    Attributes:
        weights: the weights that the run has saved.
        traffic: after each step, the bytes that were sent to the server so far, and those that were received.
        trained: bytes of the parameters that are trained.
        server: the most memory that the server has used, in bytes.
        worker: the most memory that the worker has used, in bytes.
    """

    weights: dict[str, torch.Tensor]
    traffic: list[list[int]]
    trained: int
    server: int
    worker: int


def train_adapters(folder: Path, script: str) -> Adapters:
    """Run a script with adapters with two workers, over TCP, and measure it."""
    assert STEP in script
    measured = "from paceline.train.session import current\n" + script.replace(STEP, MEASURED_STEP)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]])
    weights = run(folder, measured + MEASURED_END, "--transport", "tcp", PYTHONPATH=path)
    numbers: dict[str, list[list[int]]] = {"traffic": [], "trained": [], "peaks": []}
    for line in (folder / "run" / "worker-0.log").read_text().splitlines():
        name, *values = line.split() or [""]
        if name in numbers:
            numbers[name].append(list(map(int, values)))
    [[trained]], [[server, worker]] = numbers["trained"], numbers["peaks"]
    return Adapters(weights, numbers["traffic"], trained, server, worker)


def test_adapters_equal_one_process_and_nothing_else_travels_or_is_at_the_servers(
    mark: str, tmp_path: Path
) -> None:
    require("peft")
    script = BLOCKS["train_lora.py"].replace("AdamW(", "SGD(").replace("lr=1e-3", "lr=0.1")
    large = script.replace("vocab_size=50", f"vocab_size={VOCABULARY}")
    whole = large.replace("batch_size=4", "batch_size=8").replace("paceline.save", "torch.save")
    process = start(tmp_path / "one", whole + 'torch.save(model.state_dict(), "model.pt")\n')
    printed = output(process)
    assert process.returncode == 0, printed
    measured = train_adapters(tmp_path / "two", large)
    expected = torch.load(tmp_path / "one" / "model.pt")
    assert measured.weights.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(measured.weights[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    adapters = torch.load(tmp_path / "one" / "adapters.pt")
    saved = torch.load(tmp_path / "two" / "adapters.pt")
    assert saved.keys() == adapters.keys()
    for key, tensor in adapters.items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    trained = measured.trained
    assert len(measured.traffic) == 24
    assert all(total <= 2 * (trained + 1024) for total in measured.traffic[0]), (
        "the initial weights, and one step"
    )
    for before, after in itertools.pairwise(measured.traffic):
        for now, earlier in zip(after, before, strict=True):
            assert trained <= now - earlier <= trained + 1024
    page = (DOCS / "how-to" / "adapters.md").read_text()
    assert f"adapters and classifier have {trained:,} bytes" in page
    # The larger vocabulary makes only frozen parameters larger.
    small = train_adapters(tmp_path / "small", script)
    assert small.trained == trained
    added = (VOCABULARY - 50) * 64 * 4
    assert measured.worker - small.worker > 0.9 * added
    assert abs(measured.server - small.server) < 0.1 * added


@pytest.mark.thorough
def test_mixed_precision_equals_one_process_on_the_joint_batch(mark: str, tmp_path: Path) -> None:
    script = BLOCKS["train_mixed.py"]
    weights = run(tmp_path / "two", script)
    history = read_metrics(tmp_path / "two" / "run")
    alone = script.replace("batch_size=16", "batch_size=32")
    process = start(tmp_path / "one", alone)
    printed = output(process)
    assert process.returncode == 0, printed
    expected = torch.load(tmp_path / "one" / "model.pt")
    saved = torch.load(tmp_path / "two" / "model.pt")
    assert weights.keys() == saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (weights[name] - tensor).norm() <= 0.005 * tensor.norm()  # float16 has 11 bits
        assert torch.equal(saved[name], weights[name])
    losses = history["loss"].values
    assert len(losses) == 48
    assert losses[-1] < losses[0] / 2


def run_cells() -> Any:
    """Run the cells of the notebook; return the value of the last one."""
    import nbformat
    from nbclient import NotebookClient

    cells = [text for name, text in BLOCKS.items() if name.startswith("notebook")]
    assert len(cells) == 3
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=int(live.DEADLINE_S), kernel_name="python3").execute()
    return notebook.cells[-1].outputs[-1]["data"]["text/plain"]


def test_a_notebook_launches_a_run(mark: str, tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        require(package)
    # In a process of its own, because the kernel's client changes this one's event loop and signals.
    (tmp_path / "client.py").write_text(
        "from tests.train.test_porting import run_cells\nprint(run_cells())\n"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ["PYTHONPATH"]])
    ended = subprocess.run(
        [sys.executable, "client.py"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1] == str(3 * 128)


def test_the_cells_of_the_notebook_run_without_one(mark: str, tmp_path: Path) -> None:
    cells = [text for name, text in BLOCKS.items() if name.startswith("notebook")]
    process = start(
        tmp_path / "cells", "\n".join(cells).replace("result.summary", "assert 384 == result.summary")
    )
    printed = output(process)
    assert process.returncode == 0, printed
    assert paceline.worker_count() == 1


WITH_BARS = """
import torch
from tqdm import tqdm

import paceline

model = torch.nn.Linear(1, 1)
data = torch.utils.data.TensorDataset(torch.randn(160, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(2):
    bar = tqdm(loader)
    for (x,) in bar:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    print("bar", epoch, bar.n, bar.total)
"""


@pytest.mark.parametrize("pace", [".01,.03", ".03,.01"], ids=["fast", "slow"])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_bar_of_tqdm_is_full_at_the_end_of_each_epoch(
    sync: str, pace: str, mark: str, tmp_path: Path
) -> None:
    require("tqdm")
    run(tmp_path / "bars", WITH_BARS, "--pace", pace, "--sync", sync)
    log = (tmp_path / "bars" / "run" / "worker-0.log").read_text()
    ends = [tuple(map(int, line.split()[1:])) for line in log.splitlines() if line.startswith("bar ")]
    assert [epoch for epoch, *_ in ends] == [0, 1]
    for _, drawn, expected in ends:
        assert drawn == expected
        assert (drawn != 20) if sync == "asp" else (drawn == 20)
    assert log.count("100%|") >= 2


@pytest.mark.thorough
def test_the_page_of_optimizers_is_what_the_test_of_their_classes_finds() -> None:
    require("pytorch_optimizer")
    require("schedulefree")
    script = DOCS / "make_optimizers.py"
    ended = subprocess.run([sys.executable, script, "--check"], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, f"run: python {script}"


# -- optimizers of other packages, against one process ------------------------------------------------------

OTHERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "SOAP": lambda parameters: optimizers().SOAP(parameters, lr=0.01, precondition_frequency=5),
    "Lamb": lambda parameters: optimizers().Lamb(parameters, lr=0.01, weight_decay=0.01),
    "CAME": lambda parameters: optimizers().CAME(parameters, lr=0.01),
    "Adan": lambda parameters: optimizers().Adan(parameters, lr=0.01),
    "ScheduleFreeAdamW": lambda parameters: optimizers().ScheduleFreeAdamW(parameters, lr=0.01),
}
STEPS, BATCH = 200, 16


def optimizers() -> Any:
    require("pytorch_optimizer")
    return importlib.import_module("pytorch_optimizer")


@pytest.mark.parametrize(("name", "steps"), [("Lamb", 60), *thorough(*((name, STEPS) for name in OTHERS))])
def test_an_optimizer_of_another_package_equals_one_process_on_the_joint_batch(name: str, steps: int) -> None:
    """With a scheduler, clipping, decay, accumulation, a frozen layer and tied weights.

    SOAP chooses a basis for what is zero in the first gradients, and rounding decides which. CAME makes tiny
    differences larger. So they may differ by what they differ from themselves, if their gradients are changed in the
    last bit.
    """
    optimizers()

    def train(noise: float = 0.0) -> dict[str, torch.Tensor]:
        net = Net()
        optimizer: Any = DistributedOptimizer(
            OTHERS[name]([p for p in net.parameters() if p.requires_grad]), model=net
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        count, worker = paceline.worker_count(), paceline.worker_index()
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 12, generator=generator, dtype=torch.float64)
            y = torch.randint(0, 5, (BATCH,), generator=generator)
            part = slice(worker * BATCH // count, (worker + 1) * BATCH // count)
            optimizer.zero_grad()
            for half in (0, 1):
                (net.loss(x[part][half::2], y[part][half::2], step) / 2).backward()
            optimizer.clip_grad_norm(1.0)
            for parameter in net.parameters() if noise else ():
                if parameter.grad is not None:
                    shape, dtype = parameter.shape, torch.float64
                    parameter.grad.mul_(1 + noise * torch.randn(shape, generator=generator, dtype=dtype))
            optimizer.step()
            scheduler.step()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        return {key: value.clone() for key, value in net.state_dict().items()}

    alone = train()
    allowed = max(1e-6, 10 * largest_difference(train(noise=1e-15), alone))
    for workers, servers in ((1, 2), (2, 5), (4, 1)):
        cluster = Cluster([1.0 + 0.1 * worker for worker in range(workers)], servers=servers)
        found = simulate(cluster, "bsp", train_fn=train).state_dict
        assert found is not None
        assert largest_difference(found, alone) <= allowed, (workers, servers)
