"""Workers of a served run: those on the servers' machine use shared memory, and the others TCP, in one run."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.core.layout import Layout, Parameter
from paceline.core.messages import MemoryPlace
from paceline.errors import ProtocolError
from paceline.run.worker_links import Outbox
from paceline.shard.codecs import Sender
from paceline.shard.vectors import sliced, tensors_over
from paceline.wire.memory import Region, find_memory
from paceline.wire.transports import is_here, own_addresses
from tests.support.live import assert_equal, await_that, mark, processes, run_program
from tests.support.served import ENDLESS_SCRIPT, Served, await_training, enough, output

__all__ = ["mark"]

# With a process namespace of its own, a worker names a process id that the server does not know.
APART = ("unshare", "--pid", "--fork", "--mount-proc")
apart_is_possible = (
    shutil.which("unshare") is not None and subprocess.run([*APART, "true"], check=False).returncode == 0
)
needs_namespaces = pytest.mark.skipif(
    not apart_is_possible, reason="creating process namespaces needs root and unshare"
)
KILLS = 2

# Trains a second module from the second epoch on, with an optimizer of its own.
EXTENDING_SCRIPT = """
import os
import sys
import time
from pathlib import Path
import torch
import paceline

torch.manual_seed(0)
body, head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)
optimizers = [torch.optim.SGD(body.parameters(), lr=0.01)]
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4)
body, optimizers[0], loader = paceline.prepare(body, optimizers[0], loader)
for epoch in paceline.epochs(3):
    if epoch == 1:
        optimizers.append(paceline.DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.01)))
    for inputs, targets in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.nn.functional.mse_loss(head(body(inputs).tanh()), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        if epoch == 2:
            Path(f"stepped-{os.getpid()}").touch()
            if len(sys.argv) > 1 and not Path("enough").exists():
                time.sleep(float(sys.argv[1]))
"""
LAYOUT = Layout.of([Parameter(("weight",), (1000,), "float32")])


def shared_memory(process: int) -> set[str]:
    """Return the shared memory of workers that a process maps."""
    maps = Path(f"/proc/{process}/maps").read_text()
    return {word for word in maps.split() if word.startswith("/memfd:paceline-")}


@needs_namespaces
def test_each_worker_uses_memory_or_tcp_and_the_result_is_the_same(mark: str) -> None:
    served = Served("--workers", "2", "--servers", "2", "--sync", "bsp")
    near = served.join("2", "0.1", options=["--run-dir", "near"])
    far = served.join("2", "0.1", options=["--run-dir", "far"], prefix=APART)
    await_training(2)
    found = processes(mark)
    mapped = {name: shared_memory(found[name]) for name in ("server 0", "server 1", "worker 0", "worker 1")}
    enough()
    codes = [output(each) for each in (near, far)]
    served.summary()
    alone = run_program("-m", "paceline", "run", "-n", "2", "--run-dir", "alone", "train.py", "2")

    assert [code for code, *_ in codes] == [0, 0], codes
    assert alone.returncode == 0, alone.stderr
    used = mapped["server 0"]
    assert len(used) == 1
    assert mapped["server 1"] == used
    assert sorted(mapped[worker] == used for worker in ("worker 0", "worker 1")) == [False, True]
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")


@pytest.mark.chaos
@needs_namespaces
def test_a_worker_shares_memory_with_one_server_and_uses_tcp_to_the_other(mark: str) -> None:
    served = Served("--workers", "2", "--servers", "2", "--remote-servers", "1", "--sync", "bsp")
    near = served.join("2", "0.1", options=["--run-dir", "near"])
    far = served.join("2", "0.1", options=["--servers", "1", "--run-dir", "far"], prefix=APART)
    await_training(2)
    found = processes(mark)
    mapped = {name: shared_memory(found[name]) for name in ("server 0", "server 1", "worker 0", "worker 1")}
    enough()
    codes = [output(each) for each in (near, far)]
    served.summary()
    alone = run_program(
        *("-m", "paceline", "run", "-n", "2", "--servers", "2", "--run-dir", "alone", "train.py", "2")
    )

    assert [code for code, *_ in codes] == [0, 0], codes
    assert alone.returncode == 0, alone.stderr
    # Each server maps the memory of the worker in its own namespace, and of no other one.
    servers = [mapped["server 0"], mapped["server 1"]]
    assert [len(memory) for memory in servers] == [1, 1]
    assert servers[0] != servers[1]
    assert sorted(map(sorted, servers)) == sorted(sorted(mapped[name]) for name in ("worker 0", "worker 1"))
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")


@pytest.mark.chaos
@needs_namespaces
def test_a_script_extends_the_model_in_memory_and_over_tcp(mark: str) -> None:
    served = Served("--workers", "2", "--servers", "2", "--sync", "bsp")
    Path("train.py").write_text(EXTENDING_SCRIPT)
    near = served.join("0.1", options=["--run-dir", "near"])
    far = served.join("0.1", options=["--run-dir", "far"], prefix=APART)
    await_training(2)
    found = processes(mark)
    mapped = {name: shared_memory(found[name]) for name in ("server 0", "worker 0", "worker 1")}
    enough()
    codes = [output(each) for each in (near, far)]
    served.summary()
    alone = run_program("-m", "paceline", "run", "-n", "2", "--run-dir", "alone", "train.py")

    assert [code for code, *_ in codes] == [0, 0], codes
    assert alone.returncode == 0, alone.stderr
    assert mapped["server 0"] in (mapped["worker 0"], mapped["worker 1"])
    assert mapped["server 0"]
    assert_equal("run/weights.safetensors", "alone/weights.safetensors")


@pytest.mark.thorough
def test_workers_that_share_memory_are_killed_during_their_iterations(mark: str) -> None:
    """The model is so large that most of an iteration is spent on the push and the pull."""
    served = Served("--workers", "1:2", "--sync", "asp")
    script = ENDLESS_SCRIPT.replace("8", "200000").replace("lr=0.01", "lr=1e-9")
    Path("train.py").write_text(script)
    stays = served.join("1000", options=["--run-dir", "stays"])
    await_training(1)
    for number in range(KILLS):
        joined = served.join("1000", options=["--run-dir", f"killed-{number}"])
        await_training(2 + number)
        [worker] = [index for name, index in processes(mark).items() if name == "worker 1"]
        memory = shared_memory(worker)
        assert memory
        assert memory < shared_memory(processes(mark)["server 0"])
        time.sleep(number * 0.013)
        os.kill(worker, signal.SIGKILL)
        output(joined)
    await_that(
        lambda: len(shared_memory(processes(mark)["server 0"])) == 1,
        "the server unmaps what the lost had shared",
    )
    enough()
    code, _, stderr = output(stays)

    assert code == 0, stderr
    assert served.summary()["lost_workers"] == [1] * KILLS


def test_own_addresses_are_recognized() -> None:
    [*others, loopback] = sorted(own_addresses(), key=lambda address: address.startswith("127."))
    assert all(is_here(f"tls:{address}:29600/1") for address in (*others, loopback))
    assert is_here("tls:[::1]:29600")
    assert not is_here("tls:198.51.100.77:29600/1")  # an address for documentation
    assert not is_here("tls:no-such-name.invalid:29600")


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(LAYOUT, shared=True, name="paceline-0123")
    yield region
    region.close()


def test_memory_is_found_by_its_name(region: Region) -> None:
    assert region.descriptor is not None
    descriptor = find_memory(os.getpid(), region.descriptor, "paceline-0123")
    assert descriptor is not None
    found = Region.attach(LAYOUT, descriptor)
    region.gradients["float32"][:4] = b"1234"
    assert bytes(found.gradients["float32"][:4]) == b"1234"


def test_other_memory_files_and_processes_are_not_opened(region: Region, tmp_path: Path) -> None:
    assert region.descriptor is not None
    (tmp_path / "file").write_bytes(bytes(region.size_bytes))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (tmp_path / "file").open("r+b") as file:
        assert find_memory(os.getpid(), file.fileno(), "paceline-0123") is None
    assert find_memory(os.getpid(), region.descriptor, "paceline-4567") is None
    assert find_memory(os.getpid(), 1_000_000, "paceline-0123") is None
    assert find_memory(2**31 - 1, region.descriptor, "paceline-0123") is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    "name", ["paceline", "paceline-0123", f"paceline-{'g' * 32}", f"paceline-{'0' * 32}\n"]
)
def test_a_name_that_could_be_guessed_is_refused(name: str) -> None:
    """Memory that is passed over a connection is named "paceline" in every run."""
    encoded = msgspec.msgpack.encode(MemoryPlace(1, 3, name))
    with pytest.raises(msgspec.ValidationError, match="name"):
        msgspec.msgpack.decode(encoded, type=MemoryPlace)


def test_the_name_of_a_worker_is_accepted() -> None:
    place = MemoryPlace(1, 3, f"paceline-{secrets.token_hex(16)}")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(place), type=MemoryPlace) == place


def test_memory_of_another_size_is_refused(region: Region) -> None:
    assert region.descriptor is not None
    descriptor = find_memory(os.getpid(), region.descriptor, "paceline-0123")
    assert descriptor is not None
    with pytest.raises(ProtocolError, match="expected"):
        Region.attach(Layout.of([Parameter(("weight",), (5000,), "float32")]), descriptor)


def test_an_outbox_sends_nothing_to_shards_that_read_the_memory() -> None:
    sent: list[int] = []
    shards = LAYOUT.slice_evenly(2)
    gradients = {"float32": memoryview(bytearray(4000))}
    codecs = {shard.index: Sender("float32", sliced(tensors_over(gradients), shard)) for shard in shards}
    outbox = Outbox(
        shards, gradients, lambda shard, message, payload: sent.append(shard), early=True, codecs=codecs
    )
    outbox.leave_out([0])
    outbox.ready(0)
    assert sent == [1]
    assert outbox.rest(0) == ((), [])
