"""How much memory and how many descriptors a run needs, and that a run that cannot have enough does not begin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer, launch
from paceline.core.layout import Layout, OptimizerSpec, Parameter, WireFormat
from paceline.errors import ConfigurationError, RunFailedError
from paceline.run import coordinator as coordinator_host
from paceline.run import job_options
from paceline.run.footprint import (
    DESCRIPTOR_HEADROOM,
    available_bytes,
    child_bytes,
    descriptor_shortage,
    descriptors,
    file_shortage,
    footprint,
    format_size,
    process_shortage,
    served_shortage,
    shortage,
    state_vectors,
)
from paceline.run.server_memory import StreamedInbox
from paceline.shard.optimizers import ELEMENTWISE, PER_PARAMETER_STATE, read_groups
from paceline.shard.slice_optimizers import FusedOptimizer, TorchOptimizer, optimizer_of_slice
from paceline.wire.memory import MASTER, Region
from paceline.wire.transports import TRANSPORTS
from tests.support.marks import chaos
from tests.support.warm import WarmStarts

if TYPE_CHECKING:
    from tests.conftest import RunOnThreads

GIB = 1024**3


# -- the arithmetic ---------------------------------------------------------------------------------------


def test_over_shared_memory_a_worker_costs_its_region() -> None:
    """1000 bytes of weights with momentum, four workers: 1000 + 1000 + 4 * 2000, of which 4 * 1000 are there,
    and 3 * 1000 at the end.
    """
    assert footprint(1000, vectors=1, workers=4, shared=True) == 9_000


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_over_streams_a_worker_costs_an_inbox_and_its_answers_as_well(transport: str) -> None:
    """1000 bytes of weights with Adam, three workers: 1000 + 2000 + 3 * (1000 + 1000 + 1000) + 3000."""
    shared = TRANSPORTS[transport].shares_memory
    assert footprint(1000, vectors=2, workers=3, shared=shared) == 15_000


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_worker_costs_at_most_3_times_the_parameters_beyond_its_model(transport: str) -> None:
    shared = TRANSPORTS[transport].shares_memory
    one, two = (footprint(1000, vectors=2, workers=n, shared=shared) for n in (1, 2))
    assert two - one <= 3 * 1000


@pytest.mark.parametrize(
    ("wire", "rounded"), [("gradients=bf16", 3000), ("weights=bf16", 2000), ("bf16", 5000)]
)
def test_rounded_values_need_memory_of_half_the_size_at_both_ends(wire: str, rounded: int) -> None:
    """1000 bytes of weights and three workers: 3 * 2 * 500 for gradients, and (3 + 1) * 500 for weights."""
    for shared, more in ((False, rounded), (True, 0)):
        needed, exact = (
            footprint(1000, vectors=0, workers=3, shared=shared, wire=WireFormat.read(name))
            for name in (wire, "float32")
        )
        assert needed == exact + more


def test_servers_that_machines_join_need_memory_for_rounded_values() -> None:
    """(1 + 2 * 2) * 1000, 2 * 500 for rounded gradients and 500 for rounded weights."""
    for available, fits in ((6499, False), (6500, True)):
        reason = served_shortage(1000, 0, 2, available, wire=WireFormat("bf16", "bf16"))
        assert (reason == "") == fits


@pytest.mark.parametrize("servers", [1, 3])
def test_these_are_the_sizes_of_the_memory_that_is_made(servers: int) -> None:
    layout = Layout.of(
        [
            Parameter(("a",), (129, 257), "float32"),
            Parameter(("b",), (1000,), "float64"),
            Parameter(("c",), (5,), "bfloat16"),
        ]
    )
    workers = 2
    master = Region.create(layout, MASTER, shared=True)
    regions = [Region.create(layout, shared=shared) for shared in (True, False)]
    inboxes = [StreamedInbox(shard) for _ in range(workers) for shard in layout.slice_evenly(servers)]
    assert size_of(master.weights) == layout.size_bytes
    for region in regions:
        assert size_of(region.weights) + size_of(region.gradients) == 2 * layout.size_bytes
    assert sum(size_of(inbox.gradient) for inbox in inboxes) == workers * layout.size_bytes
    for region in (master, *regions):
        region.close()


def size_of(vectors: Any) -> int:
    return sum(vector.nbytes for vector in vectors.values())


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"momentum": 0.5}, {"centered": True}, {"momentum": 0.5, "centered": True}],
}
CASES = [(name, settings) for name in ELEMENTWISE for settings in SETTINGS.get(name, [{}])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_an_optimizer_keeps_as_many_vectors_as_is_said(
    name: str, settings: dict[str, Any], dtype: str
) -> None:
    kind: Any = ELEMENTWISE[name]
    groups = read_groups(kind([torch.zeros(1)], lr=0.01, **settings))
    layout = Layout.of([Parameter(("a",), (64, 32), dtype)])
    [shard] = layout.slice_evenly(1)

    def vector() -> torch.Tensor:
        return torch.ones(layout.sizes[dtype], dtype=getattr(torch, dtype))

    optimizer = optimizer_of_slice(OptimizerSpec(name, groups, (0,)), shard, {dtype: vector()})
    for _ in range(2):
        optimizer.step([{dtype: vector()}, {dtype: vector()}], (0.5, 0.5), b"\x01", groups)
    state = optimizer.state()
    kept = sum(
        value.nbytes for key, value in state.items() if key.partition("/")[2] not in PER_PARAMETER_STATE
    )
    if isinstance(optimizer, TorchOptimizer):
        kept += size_of(optimizer._mean)
    else:
        assert isinstance(optimizer, FusedOptimizer)
    assert kept == state_vectors(name, groups, layout.sizes) * layout.size_bytes


def test_the_group_that_keeps_most_counts_and_an_unknown_optimizer_keeps_many() -> None:
    assert state_vectors("SGD", [{"momentum": 0.0}, {"momentum": 0.9}], ["float32"]) == 1
    assert state_vectors("Adam", [{"amsgrad": False}], ["float32", "float16"]) == 3
    assert state_vectors("Unheard", [{}], ["float32"]) == 4
    assert state_vectors("Adam", [{"amsgrad": False}], ["float32"], fractions=True) == 2
    assert state_vectors("RMSprop", [{}], ["float32"], fractions=True) == 5


def test_sizes_in_words() -> None:
    sizes = [0, 1023, 1024, 1_700_000, 5 * GIB // 2, 3 * GIB * 1024, 2**60]
    assert [format_size(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.6 MiB",
        "2.5 GiB",
        "3.0 TiB",
        "1048576.0 TiB",
    ]


def test_servers_of_one_machine_need_memory_for_what_they_hold() -> None:
    # Weights, momentum, and a gradient and an answer of each of 4 workers. The whole model is read with 3 copies.
    assert served_shortage(GIB, 1, 4, 10 * GIB) == ""
    assert served_shortage(GIB, 1, 4, 10 * GIB - 1).startswith(
        "not enough memory: servers with 1.0 GiB of parameters need 10.0 GiB for weights, optimizer state and the "
        "gradients of 4 workers, but only 10.0 GiB is available on this machine"
    )
    assert "need 16.0 GiB" in served_shortage(GIB, 1, 4, 0, read_bytes=2 * GIB)
    assert served_shortage(GIB, 1, 4, None) == ""


def test_a_shortage_names_both_sizes_and_what_to_do() -> None:
    needed, what = footprint(GIB, vectors=1, workers=4, shared=False), "4 workers over tcp"
    assert shortage(GIB, needed, 17 * GIB, what, could_share=True) == ""
    assert shortage(GIB, needed, None, what, could_share=True) == ""
    assert shortage(GIB, needed, 5 * GIB // 2, what, could_share=True) == (
        "not enough memory: 4 workers over tcp with 1.0 GiB of parameters need 17.0 GiB for weights, gradients and "
        "optimizer state, but only 2.5 GiB is available. Use fewer workers, use transport 'shm' (which needs "
        "one third of the memory per worker), train a smaller model, or give the machine or container more memory."
    )
    assert "transport 'shm'" not in shortage(GIB, needed, 0, "4 workers over unix", could_share=False)


def test_a_limit_on_the_size_of_files_is_no_bug_but_is_named_with_what_to_do() -> None:
    """Such a limit holds for shared memory, too, which is a file without a name."""
    assert file_shortage(GIB, None) == file_shortage(GIB, GIB) == ""
    assert file_shortage(GIB, 2**20) == (
        "the shared memory of a worker needs 1.0 GiB, but files may have at most 1.0 MiB here (ulimit -f). Raise the "
        "limit with 'ulimit -f unlimited' before the run, or use transport 'unix'."
    )


def test_it_is_arithmetic_and_needs_no_torch() -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(paceline.__file__).parents[1])!r})\n"
    program += "import paceline.run.footprint; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", program]).returncode == 0


# -- what there is ----------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal:       16000 kB\nMemFree:         3000 kB\nMemAvailable:    8000 kB\n"}


def of_v2(path: str, limit: str, usage: int, inactive: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 17\nfile 99\ninactive_file {inactive}\nactive_file 4\n",
    }


def of_v1(path: str, limit: int, usage: int, inactive: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


V2 = {"proc/self/cgroup": "0::/user/job\n"}
V1 = {"proc/self/cgroup": "12:cpu,cpuacct:/other\n4:memory:/docker/abc\n1:name=systemd:/x\n"}
UNLIMITED_V1 = 9223372036854771712

TREES: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing can be read": ({}, None),
    "a machine without cgroups": (MACHINE, 8_192_000),
    "no limit": (MACHINE | V2 | of_v2("/user/job", "max", 5000, 0), 8_192_000),
    "its own limit": (MACHINE | V2 | of_v2("/user/job", "100000", 5000, 2000), 97_000),
    "its parent's": (
        MACHINE | V2 | of_v2("/user/job", "100000", 5000, 2000) | of_v2("/user", "90000", 60_000, 0),
        30_000,
    ),
    "the root's, of a container": (
        MACHINE | {"proc/self/cgroup": "0::/\n"} | of_v2("", "50000", 1, 0),
        49_999,
    ),
    "a path out of the container": (
        MACHINE | {"proc/self/cgroup": "0::/../../host\n"} | of_v2("", "50000", 0, 0),
        50_000,
    ),
    "the machine has less": (MACHINE | V2 | of_v2("/user/job", "100000000", 0, 0), 8_192_000),
    "used up": (MACHINE | V2 | of_v2("/user/job", "1000", 5000, 0), 0),
    "only a limit": (V2 | of_v2("/user/job", "1000", 400, 100), 700),
    "version 1": (MACHINE | V1 | of_v1("/docker/abc", 70_000, 20_000, 5000), 55_000),
    "version 1, its parent's": (
        MACHINE | V1 | of_v1("/docker/abc", UNLIMITED_V1, 10, 0) | of_v1("/docker", 70_000, 20_000, 0),
        50_000,
    ),
    "version 1, the host's path": (MACHINE | V1 | of_v1("", 60_000, 20_000, 0), 40_000),
    "version 1, no limit": (MACHINE | V1 | of_v1("/docker/abc", UNLIMITED_V1, 10, 0), 8_192_000),
    "both versions": (
        MACHINE
        | {"proc/self/cgroup": V1["proc/self/cgroup"] + "0::/\n"}
        | of_v1("/docker/abc", 70_000, 20_000, 0),
        50_000,
    ),
    "what makes no sense": (
        {"proc/meminfo": "MemAvailable: much\n\n", "proc/self/cgroup": "\nx\n0::/\n"} | of_v2("", "-3", 1, 0),
        None,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_the_least_of_what_the_machine_and_its_cgroups_leave_counts(name: str, tmp_path: Path) -> None:
    files, expected = TREES[name]
    assert available_bytes(write(tmp_path, files)) == expected


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="this system has no /proc")
def test_this_machine_has_some_memory() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- a run that cannot have enough ------------------------------------------------------------------------


def training() -> Callable[[], None]:
    """A function that can be sent to another process, where this file cannot be imported."""

    def train() -> None:
        model = nn.Linear(1024, 256)  # 1 MiB and 1 KiB
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model=model
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 1024)).square().mean().backward()
            optimizer.step()

    return train


P = 4 * (1024 * 256 + 256)
NEED = {"shm": ("8.0 MiB", 7 * P), "tcp": ("14.0 MiB", 11 * P)}  # of 3 workers in words, and of 2


@pytest.mark.parametrize("transport", NEED)
def test_a_run_that_needs_more_than_there_is_does_not_begin(
    run_on_threads: RunOnThreads, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for one worker less: when the first one that was refused has left, the others must not begin.
    words, limit = NEED[transport]
    monkeypatch.setattr(coordinator_host, "available_bytes", lambda: limit)
    before = threading.active_count()
    run = run_on_threads(training(), workers=3, servers=2, transport=transport, keep_errors=True)
    assert sorted(run.errors) == [0, 1, 2]
    for error in run.errors.values():
        assert isinstance(error, ConfigurationError)
        assert str(error).startswith(
            f"not enough memory: 3 workers over {transport} with 1.0 MiB of parameters"
        )
        assert f"need {words} for" in str(error)
        assert f"but only {format_size(limit)} is available" in str(error)
    assert not run.shards
    assert threading.active_count() == before


def test_a_run_that_needs_just_what_there_is_begins(
    run_on_threads: RunOnThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_host, "available_bytes", lambda: 7 * P)
    run_on_threads(training(), workers=2, servers=1, transport="shm")
    monkeypatch.setattr(coordinator_host, "available_bytes", lambda: 7 * P - 1)
    with pytest.raises(ConfigurationError, match=r"^not enough memory"):
        run_on_threads(training(), workers=2, servers=1, transport="shm")


@pytest.mark.processes
def test_a_refused_run_of_processes_fails_with_the_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_starts: WarmStarts
) -> None:
    monkeypatch.setattr(coordinator_host, "available_bytes", lambda: 1_000_000)
    warm_starts.begin()  # is a child
    before = children()
    with pytest.raises(RunFailedError, match=r"^the run failed: not enough memory: 2 workers over shm"):
        launch(training(), workers=2, servers=1, transport="shm", run_dir=tmp_path / "run", progress=False)
    assert children() == before


def children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:  # it has ended meanwhile
            continue
        if int(text.rpartition(")")[2].split()[1]) == os.getpid():
            found.add(int(file.parent.name))
    return found


# -- before any process is started ------------------------------------------------------------------------

SCRIPT = """
import torch

import paceline

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
"""
MIB = 1024**2
DEADLINE_S = 120.0  # a safety net


def run_limited(first: str, options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`paceline run` of a small script, started by a shell that does something else first."""
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [
            "sh",
            "-c",
            f'{first} && exec "$0" -m paceline run --run-dir run {options} train.py',
            sys.executable,
        ],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_the_busiest_process_counts() -> None:
    """Its own 3; a listening socket, a selector, a pair of sockets, a trace, the weights (2); 4 for each of 6
    children; 2 for each of 3 shards; the headroom."""
    assert descriptors(4, 2, 3, open_now=3, shared=False) == 3 + 9 + 5 * 6 + 2 * 3 + DESCRIPTOR_HEADROOM
    # One server of many shards: its 6; the weights (2); 2 for each worker; 3 for each shard.
    assert descriptors(2, 1, 100, open_now=3, shared=True) == 6 + 2 + 2 * 2 + 3 * 100 + DESCRIPTOR_HEADROOM
    # A launcher that has many files open itself.
    assert (
        descriptors(4, 2, 3, open_now=53, shared=False) == descriptors(4, 2, 3, open_now=3, shared=False) + 50
    )


def test_too_few_descriptors_name_the_limit_and_what_is_needed_and_what_to_do() -> None:
    needed = descriptors(4, 2, 2, open_now=3, shared=True)
    arguments = (4, 2, 2, 3)
    assert descriptor_shortage(*arguments, limit=needed, shared=True) == ""
    assert descriptor_shortage(*arguments, limit=None, shared=True) == ""
    assert descriptor_shortage(*arguments, limit=24, shared=True) == (
        f"too few file descriptors: with 4 workers, 2 servers and 2 shards, one process needs up to {needed} "
        f"open files and connections, but the limit is 24. Raise the limit with 'ulimit -n {needed}' before the run, "
        "or use fewer workers, servers or shards."
    )
    assert "Raise the limit with 'ulimit" in descriptor_shortage(
        *arguments, limit=24, hard_limit=needed, shared=True
    )
    assert descriptor_shortage(*arguments, limit=24, hard_limit=needed - 1, shared=True).endswith(
        f"the limit is 24. Let an administrator raise the hard limit, which is {needed - 1}, or use fewer workers, "
        "servers or shards."
    )


def test_processes_that_do_not_fit_name_both_sizes_and_what_to_do(tmp_path: Path) -> None:
    """Usage of 100 MiB in a cgroup of 1 GiB: 924 MiB are left."""
    files = MACHINE | V2 | of_v2("/user/job", str(GIB), 100 * MIB, 0)
    files["proc/meminfo"] = "MemAvailable: 8000000 kB\n"
    available = available_bytes(write(tmp_path, files))
    assert process_shortage(13, 1, available) == ""
    assert process_shortage(13, 1, None) == ""
    assert process_shortage(14, 1, available) == (
        "not enough memory: 14 workers and 1 server are 15 processes, which need about 950.0 MiB in total before "
        "training begins, but only 924.0 MiB is available. Use fewer workers or servers, "
        "or give the machine or container more memory."
    )


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_whose_processes_do_not_fit_is_refused_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    monkeypatch.setattr(job_options, "available_bytes", lambda: child_bytes(2, 1))
    options: dict[str, Any] = {"servers": 1, "run_dir": tmp_path / "run", "dry_run": dry_run}
    with pytest.raises(
        ConfigurationError, match=r"^not enough memory: 3 workers and 1 server are 4 processes"
    ):
        job_options.make_job(workers=3, **options)
    assert not (tmp_path / "run").exists()
    job_options.make_job(workers=2, **options)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm", *chaos("tcp")])
def test_with_one_descriptor_less_than_stated_a_run_is_refused(transport: str, tmp_path: Path) -> None:
    options = f"--transport {transport} --workers 2 --servers 2 --shards 4"
    needed = descriptors(2, 2, 4, open_now=3, shared=TRANSPORTS[transport].shares_memory)
    refused = run_limited(f"ulimit -n {needed - 1}", options, tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: too few file descriptors: .* but the limit is {needed - 1}\. .*\n", refused.stderr
    )
    assert f"'ulimit -n {needed}'" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm", *chaos("tcp")])
@pytest.mark.thorough
def test_with_the_stated_number_of_descriptors_a_run_ends_well(transport: str, tmp_path: Path) -> None:
    options = f"--transport {transport} --workers 2 --servers 2 --shards 4"
    needed = descriptors(2, 2, 4, open_now=3, shared=TRANSPORTS[transport].shares_memory)
    ended = run_limited(f"ulimit -n {needed}", options, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "weights.safetensors").exists()


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """limited(bytes): a new memory cgroup (version 1) with that limit, under this process's own."""
    made: list[Path] = []

    def make(size_bytes: int) -> Path:
        mount = Path("/sys/fs/cgroup/memory")
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        paths = [line.split(":", 2)[2] for line in lines if "memory" in line.split(":", 2)[1].split(",")]
        own = next((mount / path.lstrip("/") for path in paths if (mount / path.lstrip("/")).is_dir()), mount)
        folder = own / f"paceline-test-{os.getpid()}-{len(made)}"
        try:
            folder.mkdir()
            made.append(folder)
            (folder / "memory.limit_in_bytes").write_text(str(size_bytes))
        except OSError as error:
            pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
        return folder

    yield make
    for folder in made:
        folder.rmdir()


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs cgroups")
@pytest.mark.thorough
def test_in_a_small_cgroup_a_run_is_refused_or_ends_well(
    limited: Callable[[int], Path], tmp_path: Path
) -> None:
    launcher_bytes = 500 * MIB  # also for pages of files that it is the first to read
    folder = limited(child_bytes(2, 1) + launcher_bytes)
    inside = f"echo $$ > {folder}/cgroup.procs"
    refused = run_limited(inside, "--workers 20 --servers 1", tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(
        r"error: not enough memory: 20 workers and 1 server are 21 processes, .*\n", refused.stderr
    )
    assert not (tmp_path / "run").exists()
    assert not re.search("oom_kill [1-9]", (folder / "memory.oom_control").read_text())

    ended = run_limited(inside, "--workers 2 --servers 1", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "weights.safetensors").exists()
