"""The loss of a server is an event of the coordinator: the run ends, and the server is named."""

from __future__ import annotations

import math

import pytest

from paceline.errors import RunFailedError
from paceline.sim import Cluster
from paceline.sim.clockwork import Clockwork
from paceline.sim.result import Recorders
from paceline.sim.simulate import NOTHING_TRAINED, NullStore
from paceline.sim.simulated_job import VirtualJob
from paceline.sync.schedule import read_schedule

WORKERS, SHARDS = 3, 4


def virtual_job(sync: str) -> VirtualJob:
    """Return a job on two servers in virtual time."""
    schedule = read_schedule(sync)
    recorders = Recorders(schedule, WORKERS, SHARDS, 0, keep=False, run_dir=None)
    recorders.begin()
    cluster = Cluster(compute_s=[1.0] * WORKERS, servers=2)
    return VirtualJob(cluster, schedule, SHARDS, 0, overlap=True, recorders=recorders)


def run(job: VirtualJob, iterations: float) -> None:
    """Train in virtual time."""
    clockwork = Clockwork(job, iterations)
    empty = {"float32": [0] * SHARDS}
    job.run(clockwork, lambda worker: NOTHING_TRAINED, [NullStore()] * SHARDS, empty, math.inf)


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:staleness=1"])
def test_a_run_in_virtual_time_ends_when_it_loses_a_server(sync: str) -> None:
    job = virtual_job(sync)
    job.kernel.at(job.kernel.in_ticks(2.5), job.lose_server, 1)
    with pytest.raises(RunFailedError, match="it was lost") as failure:
        run(job, iterations=10)
    assert failure.value.process == "server 1"
    assert job.kernel.now_ticks == job.kernel.in_ticks(2.5)
    assert job.coordinator.servers.lost == {1: "it was lost"}
    assert job.versions[0] > 0


def test_without_a_loss_the_same_run_ends_normally() -> None:
    job = virtual_job("bsp")
    run(job, iterations=3)
    assert job.versions == (3,) * SHARDS
    assert job.coordinator.servers.lost == {}
