"""Runs on Ray clusters, whose nodes are raylets on this machine.

`make ray` runs these tests. Each driver is a program of its own, because Ray leaves threads and files in a process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from benchmarks.overlap.namespaces import why_not
from paceline.checkpoints.manifest import numbers_in
from paceline.errors import ConfigurationError, RunFailedError
from paceline.start.processes.interruption import Interrupted, Interruption
from paceline.start.ray import RayRun
from paceline.start.ray_program import HostReport
from tests.support import live
from tests.support.live import await_that, mark, of_the_run, processes, run_program, start_program, train

__all__ = ["mark"]

# The beginning of every driver.
BEGINNING = """
import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
import torch

import paceline

def await_that(condition, what):
    deadline_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.05)

def run(function, *args, **options):
    options = {"workers": 2, "servers": 1, "resources": {"CPU": 1, "one": 1}, **options}
    result = paceline.launch(function, args=args, engine="ray", run_dir="run", **options)
    Path("result.json").write_text(json.dumps(result.summary))
    return result
"""

# The beginning of a driver on three nodes. One worker fits on each node except for the first, which serves the run.
# Nodes with numbers from 10 on are for servers alone.
DRIVER = f"""{BEGINNING}
from ray.cluster_utils import Cluster

def add_node(number):
    nodes.append(
        cluster.add_node(
            num_cpus=CPUS.get(number, 1),
            resources={{"one": 1}} if 2 < number < 10 else {{}},
            node_ip_address=f"127.0.0.{{number}}",
            include_dashboard=False,
        )
    )

CPUS = {{2: 2}}
nodes = []
cluster = Cluster(shutdown_at_exit=False)  # otherwise, nodes can be added on the main thread only

@atexit.register
def shutdown():
    for node in reversed(nodes):
        node.kill_all_processes(check_alive=False, allow_graceful=False)

for number in (2, 3, 4):
    add_node(number)
ray.init(address=cluster.address, log_to_driver=False)
"""

# The beginning of a driver on one node. Ray's autoscaler adds others, which are raylets on this machine, too. Each of
# them has room for one worker.
AUTOSCALED = f"""{BEGINNING}
config = {{
    "cluster_name": "growing",
    "max_workers": 3,
    "provider": {{
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }},
    "available_node_types": {{
        "ray.head.default": {{"resources": {{"CPU": 1}}, "node_config": {{}}, "max_workers": 0}},
        "other": {{"resources": {{"CPU": 1, "one": 1}}, "node_config": {{}}, "min_workers": 0, "max_workers": 3}},
    }},
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.1,
    "file_mounts_sync_continuously": False,
}}
config |= {{name: {{}} for name in ("auth", "docker", "file_mounts")}}
config |= {{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")}}
for kind in ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray", "initialization"):
    config[f"{{kind}}_commands"] = []
Path("autoscaling.json").write_text(json.dumps(config))
ray_command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus=1", "--block"]
head = subprocess.Popen(
    [*ray_command, "--autoscaling-config=autoscaling.json", "--include-dashboard=false"],
    env={{**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}},
    stdout=open("head.log", "wb"),
    stderr=subprocess.STDOUT,
)
await_that(lambda: "Ray runtime started" in Path("head.log").read_text(), "the head has started")
ray.init(address="auto", log_to_driver=False)
"""

# A function that trains until the file "enough" exists, and the end of its driver.
ENDLESS = """
def endless(folder):
    model = torch.nn.Linear(4, 1)
    model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while not Path(folder, "enough").exists():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().square().backward()
        optimizer.step()
        Path(folder, f"stepped-{paceline.worker_index()}-{os.getpid()}").touch()
        time.sleep(0.01)

def trained():
    return len(list(Path().glob("stepped-*")))
"""

# The beginning of a driver on one node, and a function that trains slowly until the file "go"
# exists.
RESUMABLE = f"""{BEGINNING}
from recording import train

ray.init(num_cpus=3, resources={{"one": 2}}, include_dashboard=False, log_to_driver=False)
options = json.loads(sys.argv[1])
"""

RECORDING = """
import os
import time
from pathlib import Path

import torch

import paceline

def train(folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(64), torch.randn(64, 4)), batch_size=4, shuffle=True
    )
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for epoch in paceline.epochs(12):
        for numbers, x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if Path(folder, "fail").exists():
                raise RuntimeError("not today")
            if not Path(folder, "go").exists():
                time.sleep(0.05)
"""

FLOAT64 = """
from digits import train

torch.set_default_dtype(torch.float64)
result = run(train, 40)
local = paceline.launch(train, args=(40,), workers=2, servers=1, run_dir="local")
assert all(torch.equal(result.state_dict[name], tensor) for name, tensor in local.state_dict.items())
"""

DIGITS = """
import torch
from sklearn.datasets import load_digits

import paceline

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(labels)

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()

def accuracy(model):
    return (model(images[1500:]).argmax(dim=1) == labels[1500:]).double().mean().item()

def train(iterations, parts=2):
    model = make()
    part = paceline.worker_index() if parts > 1 else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if parts > 1:
        model, optimizer = paceline.prepare(model, optimizer)
    for iteration in range(iterations):
        at = slice(100 * iteration % 1500, 100 * iteration % 1500 + 100)
        optimizer.zero_grad()
        x, y = images[at][part::parts], labels[at][part::parts]
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model
"""


@pytest.fixture
def driver(mark: str) -> Iterator[Path]:
    """The path of a file for a program whose Ray sessions are in a directory that is removed afterwards."""
    pytest.importorskip("ray", reason="ray is not installed; `make ray` runs this test")
    # The paths of Ray's sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield Path("driver.py")
        await_that(lambda: not processes(mark), "Ray's processes have ended")


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("result.json").read_text())
    return found


def test_ray_trains_what_one_machine_and_one_process_train(driver: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    Path("digits.py").write_text(DIGITS)
    driver.write_text(DRIVER + FLOAT64)

    ended = run_program(str(driver))

    assert ended.returncode == 0, ended.stderr
    assert summary()["lost_workers"] == []
    assert {path.name for path in Path("run").glob("worker-*")} == {
        *("worker-0.log", "worker-0.jsonl", "worker-1.log", "worker-1.jsonl")
    }
    assert str(tmp_path) in str(summary()["weights"])
    pytest.MonkeyPatch().syspath_prepend(tmp_path)
    import digits  # type: ignore[import-not-found]

    alone = digits.train(40, parts=1)
    found = load_file("run/weights.safetensors")
    assert all(
        torch.allclose(found[name], tensor, rtol=0, atol=1e-12) for name, tensor in alone.state_dict().items()
    )
    assert digits.accuracy(alone) > 0.8


def test_the_others_continue_without_a_raylet_that_is_killed_and_a_replacement_joins(driver: Path) -> None:
    driver.write_text(
        DRIVER
        + ENDLESS
        + """
import threading

def disturb():
    await_that(lambda: trained() == 2, "both train")
    raylet = nodes[2].all_processes["raylet"][0].process
    raylet.kill()
    raylet.wait()  # the processes of the node notice its end when its id is free
    add_node(5)
    await_that(lambda: trained() == 3, "a replacement trains")
    Path("enough").touch()

thread = threading.Thread(target=disturb)
thread.start()
run(endless, os.getcwd(), sync="asp")
thread.join()
"""
    )

    ended = run_program(str(driver))

    assert ended.returncode == 0, ended.stderr
    assert len(summary()["left"] + summary()["lost_workers"]) == 1


@pytest.mark.skipif(bool(why_not()), reason=f"creating network namespaces needs {why_not()}")
def test_nodes_that_the_autoscaler_adds_join_a_run(driver: Path) -> None:
    # The nodes have the address of this machine, so it should be a loopback address. They end with the driver.
    alone = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    alone += ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    driver.write_text(
        AUTOSCALED
        + ENDLESS
        + """
import threading

def watch():
    await_that(lambda: trained() == 3, "workers on three further nodes train")
    Path("enough").touch()

thread = threading.Thread(target=watch)
thread.start()
run(endless, os.getcwd(), workers=(1, 3), sync="asp")
thread.join()
"""
    )

    with start_program(str(driver), prefix=alone) as program:
        _, stderr = program.communicate(timeout=120)

    assert program.returncode == 0, stderr
    assert summary()["lost_workers"] == []


def test_ctrl_c_in_the_driver_ends_everything(driver: Path) -> None:
    driver.write_text(DRIVER + ENDLESS + 'run(endless, os.getcwd(), workers=(1, 3), sync="asp")\n')
    with start_program(str(driver)) as program:
        await_that(lambda: len(list(Path().glob("stepped-*"))) == 2, "both train")
        program.send_signal(signal.SIGINT)
        _, stderr = program.communicate(timeout=60)

    assert program.returncode != 0
    assert "all processes of the run have ended" in stderr
    assert load_file("run/weights.safetensors").keys() == {"weight", "bias"}


RUN = (
    RESUMABLE
    + """
run(train, os.getcwd(), checkpoint_every=0.3, progress=True, **options)
"""
)


def resumable(driver: Path, text: str = RUN) -> None:
    Path("recording.py").write_text(RECORDING)
    driver.write_text(text.replace('run_dir="run", **options', "**options"))


def started(driver: Path, **options: str) -> subprocess.Popen[str]:
    """Start a run, and return its driver when the run has written two checkpoints."""
    program = start_program(str(driver), json.dumps({"run_dir": "run", **options}), stderr=subprocess.STDOUT)
    await_that(
        lambda: numbers_in(of_the_run(Path("run", "checkpoints")))[-1:] >= [2], "two checkpoints are whole"
    )
    return program


def require_closed(found: dict[str, Any], resumptions: int) -> None:
    """Check that the ledger has each sample of each epoch once."""
    samples = found["ledger"]["samples"]
    assert samples["used"] == sum(samples.values()) == 12 * 64
    assert len(found["resumptions"]) == resumptions


HIDDEN = """
from paceline.start.ray import RayRun

request = RayRun._request

def hide(run, place):
    request(run, place)
    run._mark.unlink(missing_ok=True)  # as if the node did not see the run directory

RayRun._request = hide
"""


def test_the_checkpoints_travel_if_the_node_does_not_see_the_run_directory(driver: Path) -> None:
    resumable(driver, RESUMABLE + HIDDEN + RUN.removeprefix(RESUMABLE))
    program = start_program(str(driver), '{"run_dir": "run"}', stderr=subprocess.STDOUT)
    elsewhere = Path(os.environ["TMPDIR"])
    await_that(
        lambda: [*elsewhere.glob("paceline-*/checkpoints/paceline-*/000002")], "two checkpoints are whole"
    )
    assert not Path("run", "checkpoints").exists()
    Path("fail").touch()
    program.communicate(timeout=60)
    Path("fail").unlink()
    newest = numbers_in(of_the_run(Path("run", "checkpoints")))[-1]

    Path("go").touch()
    ended = run_program(str(driver), '{"resume": "run"}')

    assert ended.returncode == 0, ended.stderr
    require_closed(summary(), 1)
    assert Path(summary()["resumptions"][0]["checkpoint"]).name == f"{newest:06d}"
    assert Path("run", "before", f"{newest:06d}", "trace-shard-0.jsonl").exists()


@pytest.mark.parametrize(("end", "engine"), [("fail", "local"), ("kill", "ray")])
def test_a_run_goes_on_after_its_end(driver: Path, mark: str, end: str, engine: str) -> None:
    resumable(driver)
    program = started(driver)
    if end == "fail":
        Path("fail").touch()
        output, _ = program.communicate(timeout=60)
        assert "is whole; to go on from it: paceline.launch(..., resume=" in " ".join(output.split())
        Path("fail").unlink()
    else:
        program.kill()
        program.communicate(timeout=60)
        await_that(lambda: not processes(mark), "all processes have ended")

    newest = numbers_in(of_the_run(Path("run", "checkpoints")))[-1]
    Path("go").touch()
    if engine == "local":
        text = driver.read_text().replace('engine="ray", ', "").replace("ray.init", "dict")
        driver.write_text(text.replace('"resources": {"CPU": 1, "one": 1}, ', ""))
    ended = run_program(str(driver), '{"resume": "run"}')

    assert ended.returncode == 0, ended.stderr
    require_closed(summary(), 1)
    assert Path(summary()["resumptions"][0]["checkpoint"]).name == f"{newest:06d}"
    assert Path("run", "before", f"{newest:06d}", "trace-shard-0.jsonl").exists()


def pipes(process_id: int) -> set[str]:
    found = (os.readlink(entry) for entry in Path(f"/proc/{process_id}/fd").iterdir())
    return {name for name in found if name.startswith("pipe:")}


def actor_of(program_id: int, mark: str) -> int:
    """Return the id of the actor that is connected to a program."""
    ids = [
        int(folder.name) for folder in live.started(mark) if b"RayHost" in (folder / "cmdline").read_bytes()
    ]
    return max(ids, key=lambda each: len(pipes(each) & pipes(program_id)))


@pytest.mark.parametrize("victim", ["server", "program", "actor"])
def test_a_lost_server_ends_nothing(driver: Path, mark: str, victim: str) -> None:
    resumable(driver)
    program = started(driver)
    serving = json.loads(Path("run", "running.json").read_text())["launcher"]["process"]["process_id"]
    victims = {"server": processes(mark)["server 0"], "program": serving, "actor": actor_of(serving, mark)}
    os.kill(victims[victim], signal.SIGKILL)
    await_that(lambda: Path("run", "before").exists(), "the run begins again")
    Path("go").touch()
    output, _ = program.communicate(timeout=120)

    assert program.returncode == 0, output
    require_closed(summary(), 1)
    why = summary()["resumptions"][0]["why"]
    if victim == "server":
        assert why == "server 0 failed: it was terminated by signal SIGKILL."
    else:
        assert why.startswith("the actor with its coordinator and its servers was lost: ")
        assert f"{why} The run goes on from checkpoint" in " ".join(output.split())


def test_a_lost_node_with_the_servers_ends_nothing(driver: Path) -> None:
    Path("recording.py").write_text(RECORDING)
    nodes = DRIVER.replace("{2: 2}", "{2: 0}").replace("(2, 3, 4)", "(2, 3, 4, 10, 11)")
    driver.write_text(
        nodes
        + """
import threading

from paceline.start.ray import RayRun
from recording import train

said = []
say = RayRun._say

def say_and_note(run, line):
    said.append(line)
    say(run, line)

RayRun._say = say_and_note

def disturb():
    await_that(lambda: [*Path("run/checkpoints").glob("*/000002")], "two checkpoints are whole")
    host = json.loads(Path("run/running.json").read_text())["address"].split(":")[1]
    node = next(node for node in nodes if node.node_ip_address == host)
    drain = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=soon", "--deadline-remaining-seconds=600"]
    ray_command = [str(Path(sys.executable).with_name("ray")), "drain-node", f"--address={cluster.address}"]
    subprocess.run([*ray_command, f"--node-id={node.node_id}", *drain], check=True)
    await_that(lambda: any("that serves the run" in line for line in said), "the driver has noticed")
    raylet = node.all_processes["raylet"][0].process
    raylet.kill()
    raylet.wait()
    await_that(Path("run/before").exists, "the run goes on")
    Path("go").touch()

thread = threading.Thread(target=disturb)
thread.start()
run(train, os.getcwd(), checkpoint_every=0.3, progress=True)
thread.join()
"""
    )

    ended = run_program(str(driver))

    assert ended.returncode == 0, ended.stderr
    require_closed(summary(), 1)
    words = " ".join(ended.stderr.split())
    assert (
        "about to take away the node that serves the run. The run will go on from its newest checkpoint"
        in words
    )
    assert "servers was lost: " in words


def test_a_lost_server_ends_the_run_if_the_user_wants_it_so(driver: Path, mark: str) -> None:
    resumable(driver)
    program = started(driver, on_server_loss="stop")
    os.kill(
        json.loads(Path("run", "running.json").read_text())["launcher"]["process"]["process_id"],
        signal.SIGKILL,
    )
    output, _ = program.communicate(timeout=120)

    assert program.returncode != 0
    assert "is whole; to go on from it: paceline.launch(..., resume=" in " ".join(output.split())


def test_a_lost_server_ends_the_run_without_a_checkpoint(driver: Path, mark: str) -> None:
    resumable(driver, RUN.replace("0.3", '"off"'))
    program = start_program(str(driver), '{"run_dir": "run"}', stderr=subprocess.STDOUT)
    await_that(
        lambda: "worker 0" in processes(mark) and Path("run", "trace-shard-0.jsonl").exists(), "it trains"
    )
    os.kill(
        json.loads(Path("run", "running.json").read_text())["launcher"]["process"]["process_id"],
        signal.SIGKILL,
    )
    output, _ = program.communicate(timeout=120)

    assert program.returncode != 0
    words = "could not go on by itself, because there is no whole checkpoint in"
    assert words in " ".join(output.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "rey", "workers": 2}, "unknown engine 'rey'; did you mean 'ray'? Choices: local, ray."),
        ({"workers": (2, 4)}, "this needs engine 'ray'"),
        ({"workers": 2, "resources": {"GPU": 1}}, "this needs engine 'ray'"),
        ({"workers": 2, "snapshot_every_s": -1}, "snapshot_every_s is -1, expected a number of seconds > 0."),
        ({"workers": 2, "snapshot_every_s": float("nan")}, "snapshot_every_s is nan, expected"),
    ],
)
def test_bad_input(options: dict[str, object], words: str, mark: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("?", r"\?")):
        paceline.launch(train(), args=(1,), **options)  # type: ignore[arg-type]


def test_ray_is_not_installed(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    with pytest.raises(ConfigurationError, match=r"ray is not installed: pip install paceline\[ray\]"):
        paceline.launch(train(), args=(1,), workers=2, engine="ray")


def test_memory_has_an_option_of_its_own() -> None:
    options = RayRun._options(Any, {"CPU": 1.0, "memory": 8e9, "ssd": 2.0})  # type: ignore[arg-type]
    assert (options["num_cpus"], options["memory"], options["resources"]) == (1.0, 8e9, {"ssd": 2.0})
    assert "memory" not in RayRun._options(Any, {"CPU": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["RayActorError", "OutOfMemoryError", "ObjectLostError"])
def test_an_actor_that_ray_has_lost_is_requested_again(name: str) -> None:
    names = ("RayActorError", "OutOfMemoryError", "ObjectLostError")
    errors = SimpleNamespace(**{each: type(each, (Exception,), {}) for each in names})
    lost: list[tuple[str, str]] = []

    def get(answer: str) -> None:
        raise getattr(errors, name)("killed\nby Ray")

    ray = SimpleNamespace(exceptions=errors, get=get, wait=lambda asked, **options: (asked, []))
    run = SimpleNamespace(
        _ray=ray, _asked={"answer": ("worker 0", "hear")}, _lost=lambda *words: lost.append(words)
    )
    RayRun._await_answers(run)  # type: ignore[arg-type]
    assert lost == [("worker 0", "killed")]


@pytest.mark.parametrize("how", ["interrupted", "finished"])
def test_only_weights_that_exist_are_said_to_be_saved(how: str, tmp_path: Path) -> None:
    said: list[str] = []
    run = SimpleNamespace(
        _server=SimpleNamespace(folder="/tmp/node"),
        _job=SimpleNamespace(run_dir=str(tmp_path)),
        _failure=None,
        _interruption=Interruption(),
        _say=said.append,
    )
    ended = HostReport(how, result=({}, [], ["the disk is full"]))
    with pytest.raises((Interrupted, RunFailedError)) as raised:
        RayRun._result(run, ended)  # type: ignore[arg-type]
    assert said == []
    if how == "finished":
        assert f"its weights are not in {tmp_path}" in str(raised.value)
        assert raised.value.__notes__ == ["the disk is full"]
