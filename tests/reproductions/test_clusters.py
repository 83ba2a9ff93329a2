"""The papers' clusters: one description each, from which the exhibits take parts, and which they scale."""

from __future__ import annotations

import pytest

from paceline.sim import Cluster
from reproductions.clusters import one_server, part_of, scaled
from reproductions.spec_sync.workloads import WORKLOADS

GBIT = 1e9


def test_a_part_keeps_the_share_of_slower_machines() -> None:
    whole = Cluster.preset("fluent-ps-64")
    for workers in (8, 16, 64):
        part = part_of(whole, workers)
        slow = sum(part.compute(worker).typical_s > 0.5 for worker in range(workers))
        assert slow == workers // 8
        assert part.bandwidth_bps == whole.bandwidth_bps  # the servers are machines of their own
        assert {part.links[worker].bandwidth_bps for worker in range(workers)} == {1 * GBIT}


@pytest.mark.parametrize("number", [1, 2])
def test_each_machine_of_spec_sync_is_a_server_too(number: int) -> None:
    for workers in (20, 40):
        cluster = WORKLOADS["CIFAR-10"].cluster(workers, number)
        rates_bps = {cluster.links[worker].bandwidth_bps for worker in range(workers)}
        assert rates_bps == {0.75 * GBIT}
        assert cluster.bandwidth_bps == pytest.approx(workers * 0.75 * GBIT)


def test_a_workload_has_its_own_time_of_an_iteration_and_its_own_size() -> None:
    for workload in WORKLOADS.values():
        cluster = workload.cluster()
        assert cluster.compute(0).typical_s == pytest.approx(workload.iteration_s)
    assert scaled(Cluster(compute_s=[2.0]), 1.5, 7).compute(0).typical_s == 3.0


def test_one_server_in_place_of_all_has_their_bandwidth_and_workers_keep_theirs() -> None:
    several = Cluster.preset("fluent-ps-32")
    one = one_server(several)
    assert one.servers == 1
    assert one.bandwidth_bps == pytest.approx(8 * several.bandwidth_bps)
    assert {one.links[worker].bandwidth_bps for worker in range(32)} == {several.bandwidth_bps}
    assert one_server(one) is one
