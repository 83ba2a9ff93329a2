"""Which device each worker gets, what it sees of the others, and how they are counted.

There is no accelerator here. Some tests say which ones have been found; others add a kind of device to torch that
only exists in Python. What the workers see is seen in real processes.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from rich.console import Console

import paceline
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.status import JobStatus, WorkerStatus
from paceline.errors import ConfigurationError, first_line
from paceline.look.dashboard import with_devices
from paceline.look.run_reading import read_report
from paceline.look.status import StatusView
from paceline.look.summary import summary_rows
from paceline.run.compute_devices import CPU, Device
from paceline.run.job import describe
from paceline.run.job_options import make_job
from paceline.start import launch as engines
from paceline.start.processes import devices
from paceline.start.processes.child import with_advice
from paceline.start.processes.devices import (
    Accelerators,
    CountedDevice,
    assign_devices,
    device_of_process,
    devices_of_servers,
    environment_of,
    shared,
)
from paceline.start.results import averages_line, description_of, server_device_line
from paceline.trace.report import RunReport, WorkerReport
from tests.support.added_device import ADDED, needs_added_device
from tests.support.live import DEADLINE_S, mark, run_program, start_program
from tests.support.served import Served

__all__ = ["mark"]

Have = Callable[..., None]

HERE = "on this machine, torch 2.13.0 has found: cuda:0 (Model 0), cuda:1 (Model 1), cpu"


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Have:
    """have("cuda", "cuda", "xpu"): the accelerators of this machine. torch chooses the first kind."""

    def have(*kinds: str) -> None:
        found: dict[str, list[CountedDevice]] = {}
        for kind in kinds:
            found.setdefault(kind, []).append(CountedDevice(f"Model {len(found.get(kind, ()))}", 8 * 10**9))
        accelerators = Accelerators(kinds[0] if kinds else None, "2.13.0", found)
        monkeypatch.setattr(devices, "count_accelerators", lambda imports, kinds=(): accelerators)
        monkeypatch.setattr(devices, "may_have_accelerators", lambda imports: True)
        monkeypatch.setattr(devices, "torch_build", lambda: devices.Build(frozenset(), rocm=False))

    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(variable, raising=False)
    return have


def names(assigned: devices.Assigned) -> list[str]:
    return [device.name for device in assigned.devices]


# -- which devices servers get --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "of_workers", "expected"),
    [
        ("cpu", "cpu", []),
        ("cuda", "cuda,cpu", ["cuda:0"]),  # the user may want to share one
        ("cuda:1", "cuda", ["cuda:1"]),
        ("xpu", "cuda", ["xpu:0"]),
        ("auto", "cpu", ["cuda:0", "cuda:1"]),
        ("auto", "cuda", ["cuda:1"]),
        ("auto", "cuda:0,cuda:1", []),
    ],
)
def test_servers_get_the_named_device_or_those_without_a_worker(
    have: Have, wanted: str, of_workers: str, expected: list[str]
) -> None:
    have("cuda", "cuda", "xpu")
    workers = assign_devices(of_workers, None, usual=2).devices
    found = devices_of_servers(wanted, workers)
    assert [device.name for device in found] == expected
    assert all(device.own_index == 0 and device.environment for device in found)  # it sees no other one


def test_without_an_accelerator_auto_is_the_cpu(have: Have) -> None:
    have()
    assert devices_of_servers("auto") == ()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda:2", f"server_device contains 'cuda:2', but {HERE}; use cuda:0 to cuda:1."),
        (
            "cudda",
            f"server_device contains 'cudda', but {HERE}; name one of these (did you mean 'cuda'?), or import",
        ),
        ("cuda,cpu", "server_device is 'cuda,cpu', expected 'cpu', 'auto', or a device such as 'cuda:1'."),
        ("cpu:1", "server_device is 'cpu:1', expected 'cpu', 'auto', or a device such as 'cuda:1'."),
    ],
)
def test_a_device_of_servers_that_does_not_exist_is_refused(have: Have, wanted: str, message: str) -> None:
    have("cuda", "cuda")
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
        devices_of_servers(wanted)


def test_a_run_whose_servers_have_no_such_device_is_refused_before_anything_starts(
    have: Have, tmp_path: Path
) -> None:
    have()
    with pytest.raises(
        ConfigurationError, match=r"^server_device contains 'cuda', but on this machine, torch"
    ):
        paceline.launch(print, workers=1, server_device="cuda", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


MATRIX = Parameter(("weight",), (4, 4), "float32")
BOTH = ModelSpec(
    Layout.of([MATRIX]),
    OptimizerSpec("Muon", ({},), (0,), whole=True),
    (),
    (OptimizerSpec("AdamW", ({},), ()),),
)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"sync": "asp"}, "Muon"),
        ({"sync": "bsp"}, ""),
        ({"sync": "asp", "hyperparameters": "raw"}, ""),
        ({"sync": "asp", "workers": 1}, ""),
    ],
)
def test_a_run_says_which_optimizers_receive_a_mean_of_gradients(options: dict[str, Any], names: str) -> None:
    line = averages_line(make_job(**{"workers": 2, "dry_run": True, **options}), BOTH)
    assert line.startswith(f"{names} receives a running mean of gradients") if names else not line


def test_a_run_says_where_the_steps_are_made_and_when_the_option_has_no_effect() -> None:
    device = Device(kind="cuda", model="NVIDIA H100")
    on_cpu = make_job(workers=2, dry_run=True)
    on_cuda = make_job(workers=2, server_device="cuda", dry_run=True)
    on_cuda = structs.replace(on_cuda, server_devices=(device,))
    unused = make_job(workers=2, server_device="auto", dry_run=True)
    plain = structs.replace(BOTH, optimizer=BOTH.further[0], further=())
    assert server_device_line(on_cpu, BOTH) == server_device_line(on_cuda, None) == ""
    assert server_device_line(on_cuda, BOTH) == "the servers make the steps of Muon on cuda:0 (NVIDIA H100)"
    assert server_device_line(on_cuda, plain) == (
        "--server-device cuda has no effect, because only optimizers that need whole tensors use it. The steps of "
        "AdamW are made on the CPU."
    )
    assert server_device_line(unused, BOTH) == (
        "--server-device auto has found no accelerator without a worker, so the steps of Muon are made on the CPU."
    )
    assert server_device_line(unused, plain) == ""
    assert describe(on_cuda)["servers"].endswith(", with steps of whole tensors on cuda:0 (NVIDIA H100)")


# -- which device a worker gets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "workers", "expected"),
    [
        (None, None, ["cuda:0", "cuda:1"]),
        ("auto", None, ["cuda:0", "cuda:1"]),
        (None, 1, ["cuda:0"]),
        (None, 3, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1,cuda,cpu", None, ["cuda:1", "cuda:0", "cpu"]),
        (["cuda:1", torch.device("cpu")], 2, ["cuda:1", "cpu"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1"]),
        (torch.device("xpu", 0), None, ["xpu:0"]),
        ("xpu, cpu", None, ["xpu:0", "cpu"]),
        ("cpu", None, ["cpu"]),
    ],
)
def test_there_is_one_worker_for_each_device(
    have: Have, wanted: object, workers: int | None, expected: list[str]
) -> None:
    have("cuda", "cuda", "xpu")
    assigned = assign_devices(wanted, workers, usual=2)
    assert names(assigned) == expected
    assert assigned.workers == len(expected)


@pytest.mark.parametrize(("workers", "expected"), [(None, 2), (5, 5), (0, 0)])
def test_without_an_accelerator_no_device_is_assigned(have: Have, workers: int | None, expected: int) -> None:
    have()
    assert assign_devices(None, workers, usual=2) == (expected, ())


@pytest.mark.parametrize("wanted", [None, "auto", "cpu", "cpu,cpu"])
def test_nothing_is_counted_if_torch_has_no_accelerators(
    wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    assert not torch.accelerator.is_available()
    monkeypatch.setattr(devices, "Companion", fail)
    assert {device.name for device in assign_devices(wanted, None, usual=2).devices} <= {"cpu"}


@pytest.mark.parametrize(
    ("driver", "found"),
    [("/nonexistent", False), ("libnonexistent.so.1", False), ("/dev", True), ("libc.so.6", True)],
)
def test_nothing_is_counted_without_a_driver(
    driver: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This build of torch has no accelerators, so torch is made to say that it has."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(devices, "DRIVERS", {"cuda": driver})
    assert devices.may_have_accelerators(()) == found


def test_torch_is_not_imported_to_find_out_that_it_has_no_accelerators() -> None:
    program = (
        "import sys; from paceline.start.processes.devices import assign_devices; "
        "print(assign_devices(None, None, usual=2).workers, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.stdout.split() == ["2", "False"], ended.stderr


@pytest.mark.parametrize(
    ("wanted", "workers", "message"),
    [
        ("cuda:7", None, f"'cuda:7', but {HERE}; use cuda:0 to cuda:1."),
        ("xpu", None, f"'xpu', but {HERE}; name one of these, or install a driver and a build of torch for xpu."),
        ("vulkan,cpu", None, "import the package that adds this kind of device to torch (--import PACKAGE)."),
        ("cdua", None, "name one of these (did you mean 'cuda'?), or import the package"),
        ("cuda:0,auto", None, "'auto', expected 'auto' alone, or a list of devices such as 'cuda:0,cuda:1,cpu'."),
        ("cuda:x", None, "'cuda:x', expected 'auto' alone"),
        ("", None, "'', expected 'auto' alone"),
        ("cpu:1", None, "'cpu:1', expected 'auto' alone"),
        ("cuda:0,cpu", 3, "workers is 3, but devices names 2, and there is one worker for each of them; omit "
         "workers, or name as many devices."),
        ("cpu", 0, "workers is 0, but devices names 1"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be_used_are_refused(
    have: Have, wanted: str, workers: int | None, message: str
) -> None:
    have("cuda", "cuda")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        assign_devices(wanted, workers, usual=2)


@pytest.mark.parametrize("workers", [0, -1, "4", True, 1.5])
def test_a_number_of_workers_that_is_none_is_refused(have: Have, workers: object, tmp_path: Path) -> None:
    have("cuda", "cuda")
    with pytest.raises(
        ConfigurationError, match=f"workers is {re.escape(repr(workers))}, expected a whole number"
    ):
        paceline.launch(print, workers=workers, run_dir=tmp_path / "run")  # type: ignore[arg-type]


def test_workers_that_share_a_device_are_warned_of() -> None:
    cuda = [Device(kind="cuda", index=index) for index in range(2)]
    assert shared([*cuda, CPU, CPU]) == ""
    assert shared([cuda[0], CPU, cuda[0], cuda[1], cuda[1]]) == (
        "2 workers share cuda:0, 2 workers share cuda:1, so they slow each other down and their memory adds "
        "up; use fewer workers (--workers), or name a device for each (--devices)."
    )


def test_the_worker_of_a_process_of_a_scheduler_has_the_device_with_its_number(have: Have) -> None:
    have("cuda", "cuda")
    found = [device_of_process(place) for place in range(3)]
    assert [device.own_name for device in found if device is not None] == ["cuda:0", "cuda:1", "cuda:0"]
    assert all(device is not None and device.environment == {} for device in found)
    have()
    assert device_of_process(0) is None


# -- what a worker sees -----------------------------------------------------------------------------------------

CUDA = Device(kind="cuda", index=1)
XPU = Device(kind="xpu")


@pytest.mark.parametrize(
    ("device", "environment", "rocm", "expected"),
    [
        (CUDA, {}, False, {"CUDA_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "65535"}),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, False,
         {"CUDA_VISIBLE_DEVICES": "GPU-b", "ZE_AFFINITY_MASK": "65535"}),
        (CUDA, {"HIP_VISIBLE_DEVICES": "2,3"}, True, {"HIP_VISIBLE_DEVICES": "3", "ZE_AFFINITY_MASK": "65535"}),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "2,3"}, True, {"HIP_VISIBLE_DEVICES": "3", "ZE_AFFINITY_MASK": "65535"}),
        (CUDA, {"ROCR_VISIBLE_DEVICES": "2,3"}, True, {"HIP_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "65535"}),
        (XPU, {"ZE_AFFINITY_MASK": "4"}, False, {"ZE_AFFINITY_MASK": "4", "CUDA_VISIBLE_DEVICES": ""}),
        (CPU, {"CUDA_VISIBLE_DEVICES": "4"}, False, {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "65535"}),
        (CPU, {}, True, {"HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "65535"}),
    ],
)  # fmt: skip
def test_a_worker_sees_its_own_accelerator_only(
    device: Device, environment: Mapping[str, str], rocm: bool, expected: Mapping[str, str]
) -> None:
    assert environment_of(device, ["cuda", "xpu"], environment, rocm=rocm) == expected


def test_an_entry_of_a_mask_that_stands_for_several_devices_stays(
    have: Have, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under some drivers, an entry stands for a card, and each of its parts is a device."""
    have("xpu", "xpu")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3")
    first, second = assign_devices(None, None, usual=2).devices
    assert (first.environment, first.own_name) == ({"ZE_AFFINITY_MASK": "3"}, "xpu:0")
    assert (second.environment, second.own_name) == ({}, "xpu:1")


def test_devices_of_other_kinds_are_not_hidden(have: Have) -> None:
    have("vulkan", "vulkan")
    found = assign_devices(None, None, usual=2).devices
    assert [device.own_name for device in found] == ["vulkan:0", "vulkan:1"]
    assert [device.environment for device in found] == [{}, {}]


LOOK = """
import json
import os
from pathlib import Path

import torch

import paceline

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def train():
    seen = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    seen["device"] = str(paceline.device())
    Path(f"seen-{paceline.worker_index()}").write_text(json.dumps(seen))
    model = torch.nn.Linear(3, 1)
    model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3) + paceline.worker_index()).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture
def look(mark: str, tmp_path: Path) -> Iterator[Callable[..., paceline.RunResult]]:
    """look(**options): the result of a run whose workers write what they see into files."""
    (tmp_path / "look.py").write_text(LOOK)

    def look(**options: object) -> paceline.RunResult:
        function: Callable[..., object] = importlib.import_module("look").train
        return paceline.launch(function, servers=1, run_dir="run", **options)  # type: ignore[arg-type]

    yield look
    sys.modules.pop("look", None)


def seen(workers: int) -> list[dict[str, str]]:
    return [json.loads(Path(f"seen-{worker}").read_text()) for worker in range(workers)]


def test_each_worker_of_a_mixed_job_sees_its_own_device(
    have: Have, look: Callable[..., paceline.RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    have("cuda", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    result = look(devices="cuda:1,cpu,cuda:0")
    assert seen(3) == [
        {"CUDA_VISIBLE_DEVICES": "6", "device": "cuda:0"},
        {"CUDA_VISIBLE_DEVICES": "", "device": "cpu"},
        {"CUDA_VISIBLE_DEVICES": "4", "device": "cuda:0"},
    ]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    named = {"0": "cuda:1 (Model 1)", "1": "cpu", "2": "cuda:0 (Model 0)"}
    assert result.summary["devices"] == named
    assert summary_rows(result.summary)["devices"] == (
        "worker 0: cuda:1 (Model 1); worker 1: cpu; worker 2: cuda:0 (Model 0)"
    )
    report = read_report(Path("run"))
    assert [worker.device for worker in report.workers] == ["cuda:1 (Model 1)", "", "cuda:0 (Model 0)"]
    assert {each.name: each.value for each in report.settings}["--devices"] == "cuda:1,cpu,cuda:0"


@pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="this build of torch would look for a driver"
)
def test_with_the_variables_of_torchrun_all_accelerators_are_seen(
    have: Have, look: Callable[..., paceline.RunResult]
) -> None:
    """A script that chooses its accelerator by LOCAL_RANK finds it."""
    have("cuda", "cuda")
    look(torchrun_env=True)
    assert seen(2) == [{"device": "cuda:0"}, {"device": "cuda:1"}]


def test_without_accelerators_nothing_is_said_about_devices(
    look: Callable[..., paceline.RunResult],
) -> None:
    result = look(workers=2)
    assert [each["device"] for each in seen(2)] == ["cpu", "cpu"]
    assert "devices" not in result.summary
    assert "devices" not in summary_rows(result.summary)
    report = read_report(Path("run"))
    assert [worker.device for worker in report.workers] == ["", ""]
    assert "--devices" not in {each.name for each in report.settings}


def test_devices_are_no_option_on_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "import_ray", lambda: None)
    with pytest.raises(ConfigurationError, match="devices cannot be used with engine 'ray'"):
        paceline.launch(print, engine="ray", workers=1, devices="cpu")
    with pytest.raises(
        ConfigurationError, match="workers is missing: engine 'ray' needs the number of workers"
    ):
        paceline.launch(print, engine="ray")


# -- a kind of device that a module adds to torch ---------------------------------------------------------------


ON_ABACUS = """
import os
from pathlib import Path

import torch

import paceline

worker = paceline.worker_index()
initialized = torch.get_device_module("abacus").is_initialized() or torch.cuda.is_initialized()
Path(f"seen-{worker}").write_text(f"{paceline.device()} {os.getpid()} {os.getppid()} {initialized}")
model = torch.nn.Linear(3, 1)
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 3) + worker).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def abacus(mark: str, tmp_path: Path) -> Path:
    """A folder with a module `abacus`, which adds a kind of device to torch, and a script."""
    (tmp_path / "abacus.py").write_text(ADDED)
    (tmp_path / "train.py").write_text(ON_ABACUS)
    return tmp_path


@needs_added_device
def test_added_devices_are_found_and_no_process_that_forks_initializes_them(abacus: Path) -> None:
    command = ["-m", "paceline", "run", "--import", "abacus", "--run-dir", "run", "train.py"]
    with start_program(*command) as program:
        stdout, stderr = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 0, stderr
    workers = [(abacus / f"seen-{worker}").read_text().split() for worker in range(2)]
    assert [device for device, *_ in workers] == ["abacus:0", "abacus:1"]
    assert [initialized for *_, initialized in workers] == ["False", "False"]
    asked = [line.split(maxsplit=1) for line in (abacus / "asked").read_text().splitlines()]
    [counting] = {process for process, question in asked if question == "device_count"}
    fork_server = workers[0][2]
    assert workers[1][2] == fork_server
    assert counting not in (str(program.pid), fork_server)
    assert {process for process, _ in asked} <= {counting, *(own for _, own, *_ in workers)}
    # No driver hides these devices, so the second worker makes its own the current one.
    assert [each for each in asked if each[1].startswith("set")] == [[workers[1][1], "set 1"]]
    assert "devices worker 0: abacus:0 (Abacus 0); worker 1: abacus:1 (Abacus 1)" in " ".join(stdout.split())


@needs_added_device
@pytest.mark.thorough
def test_a_machine_that_joins_brings_one_worker_for_each_of_its_devices(abacus: Path) -> None:
    """The machine that serves the run has no such device, and does not import the module."""
    served = Served("--workers", "2")
    (abacus / "train.py").write_text(ON_ABACUS)
    with served.join(options=["--import", "abacus"]) as machine:
        _, stderr = machine.communicate(timeout=DEADLINE_S)
        assert machine.returncode == 0, stderr
    assert served.summary()["devices"] == {"0": "abacus:0 (Abacus 0)", "1": "abacus:1 (Abacus 1)"}
    seen_devices = [(abacus / f"seen-{worker}").read_text().split()[0] for worker in range(2)]
    assert seen_devices == ["abacus:0", "abacus:1"]


@needs_added_device
@pytest.mark.thorough
def test_under_torchrun_a_worker_has_the_accelerator_with_the_number_of_its_process(abacus: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "paceline.join"]
    ended = run_program(*torchrun, "--import", "abacus", "--run-dir", "run", "train.py")
    assert ended.returncode == 0, ended.stderr
    devices_of_workers = [(abacus / f"seen-{worker}").read_text().split()[0] for worker in range(2)]
    assert devices_of_workers == ["abacus:0", "abacus:1"]
    summary = json.loads(Path("run", "summary.json").read_text())
    assert summary["devices"] == {"0": "abacus:0 (Abacus 0)", "1": "abacus:1 (Abacus 1)"}


@needs_added_device
@pytest.mark.thorough
def test_workers_that_share_an_added_device_are_warned_of_before_they_start(abacus: Path) -> None:
    with_devices = run_program(
        "-m", "paceline", "run", "--dry-run", "--import", "abacus", "--workers", "3", "train.py"
    )
    assert "2 workers share abacus:0" in " ".join(with_devices.stderr.split())
    assert "abacus:0 (Abacus 0); abacus:1 (Abacus 1); abacus:0 (Abacus 0)" in " ".join(
        with_devices.stdout.split()
    )
    without = run_program("-m", "paceline", "run", "--dry-run", "--devices", "abacus", "train.py")
    assert without.returncode == 2
    assert "'abacus', but on this machine, torch" in " ".join(without.stderr.split())
    assert without.stderr.count("error:") == 1


@needs_added_device
def test_accelerators_that_cannot_be_counted_end_the_command(abacus: Path) -> None:
    (abacus / "abacus.py").write_text(ADDED.replace("return 2", "raise OSError('no driver')"))
    ended = run_program("-m", "paceline", "run", "--dry-run", "--import", "abacus", "train.py")
    assert ended.returncode == 2
    words = " ".join(ended.stderr.split())
    assert (
        "the accelerators of this machine cannot be counted (OSError: no driver); train on the CPU" in words
    )


# -- what is said about devices ---------------------------------------------------------------------------------


def shown(status: JobStatus) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(StatusView(status))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_status_names_devices_if_there_are_accelerators() -> None:
    plain = (WorkerStatus(0, "this machine", "computing"), WorkerStatus(1, "this machine", "computing"))
    placed = tuple(
        structs.replace(worker, device=device)
        for worker, device in zip(plain, ("cuda:0 (Model 0)", "cpu"), strict=True)
    )
    without, with_devices = (JobStatus("bsp", 1, 1.0, workers) for workers in (plain, placed))
    assert "device" not in shown(without)
    assert "device" not in json.dumps(msgspec.to_builtins(without))
    lines = shown(with_devices).splitlines()
    assert "device" in lines[1]
    assert "cuda:0 (Model 0)" in lines[2]
    assert "cpu" in lines[3]


def test_the_report_of_a_run_in_progress_names_devices() -> None:
    workers = tuple(WorkerReport(worker=worker) for worker in range(3))
    report = RunReport(name="run", run_dir="run", state="running", workers=workers)
    rows = (
        WorkerStatus(0, "this machine", "computing", device="cuda:0 (Model 0)"),
        WorkerStatus(1, "this machine", "computing", device="cpu"),
    )
    named = with_devices(report, JobStatus("bsp", 1, 1.0, rows))
    assert [worker.device for worker in named.workers] == ["cuda:0 (Model 0)", "", ""]
    plain = (structs.replace(row, device=msgspec.UNSET) for row in rows)
    assert with_devices(report, JobStatus("bsp", 1, 1.0, tuple(plain))) == report


def test_a_dry_run_and_the_settings_name_the_devices() -> None:
    placed = (Device(kind="cuda", model="Model 0", memory_bytes=8 * 10**9), CPU)
    job = make_job(workers=2, devices=placed, dry_run=True)
    assert describe(job)["devices"] == "cuda:0 (Model 0), 8.0 GB; cpu"
    assert ("--devices", "cuda:0,cpu") in {
        (each.name, each.value) for each in description_of(job, []).settings
    }
    for devices_of_cpu in ((), (CPU, CPU)):
        job = make_job(workers=2, devices=devices_of_cpu, dry_run=True)
        assert "devices" not in describe(job)
        assert "--devices" not in {each.name for each in description_of(job, []).settings}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA ran full."), RuntimeError("MPS backend out of memory")]
)
def test_advice_follows_an_error_about_memory(error: Exception) -> None:
    advised = (
        "it failed. Reduce the batch size. If only balanced batches are too large, limit their size in all"
    )
    assert with_advice("it failed.", [ValueError("it failed."), error]).startswith(advised)
    for other in (RuntimeError("the socket is closed"), ValueError("out of memory")):
        assert with_advice("it failed.", [other]) == "it failed."


@pytest.mark.parametrize(
    "statement",
    ["torch.optim.NoSuchOptimizer", "from torch.optim import NoSuchOptimizer", "import torch.none"],
)
def test_a_script_that_asks_torch_for_what_its_version_lacks_is_told_the_version(statement: str) -> None:
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(statement, {"torch": torch})
    reason = with_advice(first_line(caught.value), [caught.value])
    assert f": this machine has torch {torch.__version__}. Install a version that has this" in reason
    assert with_advice("no", [AttributeError("no")]) == with_advice("no", [ImportError("no")]) == "no"


@pytest.mark.thorough
def test_a_run_that_fails_because_of_a_devices_memory_says_what_to_do(mark: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise torch.OutOfMemoryError('CUDA out of memory')\n")
    ended = run_program("-m", "paceline", "run", "--workers", "1", "--run-dir", "run", "train.py")
    assert ended.returncode == 1
    assert "CUDA out of memory. Reduce the batch size. If only balanced batches" in " ".join(
        ended.stderr.split()
    )


@needs_added_device
def test_outside_a_run_the_device_is_torchs_current_accelerator(tmp_path: Path) -> None:
    assert paceline.device() == torch.device("cpu")
    (tmp_path / "abacus.py").write_text(ADDED)
    (tmp_path / "alone.py").write_text("import abacus, paceline\nprint(paceline.device())\n")
    source = str(Path(paceline.__file__).parents[1])
    alone = subprocess.run(
        [sys.executable, "alone.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert alone.stdout.split()[-1] == "abacus:0"
