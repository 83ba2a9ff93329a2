"""The demo on each kind of cluster: it reaches the accuracy that it has on one machine (`make clusters`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.overlap.namespaces import NetworkLink, network, why_not
from tests.support.live import await_that, mark, run_program
from tests.support.scheduled import program, summary
from tests.support.served import Served, output, two_machines
from tests.support.slurm import EXAMPLES, MISSING, Batch, cluster

__all__ = ["cluster", "mark", "two_machines"]

# After 20 epochs, the accuracy hardly depends on the number of updates.
DIGITS = EXAMPLES.parent.joinpath("digits.py").read_text().replace("default=10", "default=20")

pytestmark = [pytest.mark.processes, pytest.mark.chaos]
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=f"network namespaces need {why_not()}")


def accuracy(said: str, where: str) -> float:
    """Return the accuracy in percent that the demo has printed, and print it."""
    [percent] = re.findall(r"accuracy on \d+ test images: ([\d.]+)%", said)
    print(f"{where}: {percent} %")
    return float(percent)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The accuracy of four workers on one machine, in percent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("alone"))
        Path("train.py").write_text(DIGITS)
        ended = run_program("-m", "paceline", "run", "-n", "4", "--servers", "2", "--sync", "bsp", "train.py")
    assert ended.returncode == 0, ended.stderr
    return accuracy(ended.stdout, "one machine")


@needs_namespaces
@pytest.mark.usefixtures("machines_alone")
def test_on_two_machines_of_a_network(mark: str, alone: float) -> None:
    with network(2, NetworkLink()) as machines:
        served = Served("--workers", "4", "--servers", "2", "--sync", "bsp", "--listen", "0.0.0.0")
        Path("train.py").write_text(DIGITS)
        address = f"{machines.host}:{served.port}"
        joined = [
            served.join(options=["-n", "2"], address=address, prefix=each.prefix)
            for each in machines.machines
        ]
        ends = [output(each) for each in joined]
        served.summary()

    assert [code for code, *_ in ends] == [0, 0], ends
    assert accuracy("".join(said for _, said, _ in ends), "two network namespaces") == pytest.approx(
        alone, abs=1
    )


@needs_namespaces
@pytest.mark.usefixtures("machines_alone")
def test_with_two_agents_of_torchrun(
    mark: str, two_machines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, alone: float
) -> None:
    program("torchrun", "torch.distributed.run", monkeypatch)
    monkeypatch.setenv("PACELINE_OPTIONS", "--sync bsp --servers 2")
    Path("digits.py").write_text(DIGITS)
    subprocess.run("(umask 077; openssl rand -hex 32 > paceline-secret)", shell=True, check=True)
    agents = [
        subprocess.Popen(
            [*prefix, str(EXAMPLES / "torchrun.sh"), str(number), "digits.py"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, prefix in enumerate(two_machines.values())
    ]
    ends = [output(agent) for agent in agents]

    assert [code for code, *_ in ends] == [0, 0], ends
    assert accuracy("".join(said for _, said, _ in ends), "two agents of torchrun") == pytest.approx(
        alone, abs=1
    )


@pytest.mark.skipif(bool(MISSING or os.geteuid()), reason="a Slurm cluster needs root and Slurm's programs")
@pytest.mark.usefixtures("cluster")
def test_on_two_nodes_of_slurm(mark: str, monkeypatch: pytest.MonkeyPatch, alone: float) -> None:
    # The names of the nodes stand for no addresses.
    monkeypatch.setenv("PACELINE_OPTIONS", "--sync bsp --servers 2 --listen 127.0.0.1")
    program("paceline", "paceline", monkeypatch)
    job = Batch("slurm.sbatch", script=DIGITS)

    assert job.await_end() == "COMPLETED", job.output
    assert accuracy(job.output, "two nodes of Slurm") == pytest.approx(alone, abs=1)


@pytest.mark.parametrize("sync", ["bsp", "asp", "elastic-bsp:lookahead=15", "ssp:staleness=3"])
def test_a_job_of_4_that_loses_2_and_gets_2_others(sync: str, mark: str, alone: float) -> None:
    script = DIGITS.replace("range(options.epochs)", "paceline.epochs(options.epochs)").replace(
        "    for x, y in", "    Path(f'epoch-{epoch}').touch()\n    for x, y in"
    )
    script = f"import time\nfrom pathlib import Path\n{script}".replace(
        "        loss = optimizer.step(closure)",
        "        loss = optimizer.step(closure)\n        time.sleep(0.02)",
    )
    served = Served("--workers", "2:4", "--servers", "2", "--sync", sync)
    Path("train.py").write_text(script)
    first = served.join(options=["-n", "2", "--run-dir", "first"])
    second = served.join(options=["-n", "2", "--run-dir", "second"])
    await_that(Path("epoch-3").exists, "the third epoch has begun")
    second.kill()  # its workers end with it
    await_that(lambda: "2 lost" in served.messages, "the run has noticed both losses")
    others = served.join(options=["-n", "2", "--run-dir", "others"])
    ends = [output(each) for each in (first, second, others)]
    served.summary()

    assert [code for code, *_ in ends] == [0, -signal.SIGKILL, 0], ends
    assert len(summary("run")["lost_workers"]) == 2
    said = "".join(said for _, said, _ in ends)
    # While there are two workers, a joint batch is half as large, and an epoch has twice as many updates. So the
    # accuracy may be higher than that of the undisturbed job. On a busy machine, gradients may be staler than usual.
    least = alone - (1 if sync == "bsp" else 5)
    assert accuracy(said, f"4 workers under {sync}, of which 2 were replaced") >= least
