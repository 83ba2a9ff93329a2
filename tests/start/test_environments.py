"""What schedulers write into the environment, and what is read from it."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from paceline.errors import ConfigurationError
from paceline.start import schedulers
from paceline.start.schedulers import (
    ENVIRONMENTS,
    JobPlace,
    RendezvousStore,
    expand,
    listening_address,
    slurm,
    torchrun,
)
from tests.support.scheduled import SLURM

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


# Two components, of which the first is on the node whose name comes last.
HETEROGENEOUS = {
    **SLURM,
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
}


def test_each_start_of_a_torchrun_job_is_another_job() -> None:
    places = [torchrun({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": count}) for count in "012"]
    assert len({place.store.key for place in places if place.store is not None}) == 3


def test_one_process_of_a_torchrun_job_runs_the_store_if_no_agent_does() -> None:
    hosted = [torchrun({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": use}).store for use in ("True", "False")]
    assert [store is not None and store.hosted for store in hosted] == [False, True]


def test_a_job_is_alone_on_a_machine() -> None:
    assert torchrun(TORCHRUN).alone
    assert not torchrun({**TORCHRUN, "WORLD_SIZE": "4"}).alone


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        (SLURM, "n1"),
        (HETEROGENEOUS, "n2"),
        ({**HETEROGENEOUS, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1"}, "n1"),
    ],
)
def test_the_first_task_of_a_step_serves(environment: dict[str, str], host: str) -> None:
    place = slurm(environment)
    assert place == JobPlace(
        name="slurm-2.0",
        index=0,
        local=0,
        count=3,
        serves=True,
        alone=environment["SLURM_STEP_NUM_NODES"] == "1",
        host=host,
        port=20008,
    )


def test_a_job_that_slurm_has_requeued_is_another_job() -> None:
    names = [slurm({**SLURM, "SLURM_RESTART_COUNT": count}).name for count in ("", "0", "1", "2")]
    assert names == ["slurm-2.0", "slurm-2.0", "slurm-2.0-1", "slurm-2.0-2"]


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        ("a[08-10,3],b", ["a08", "a09", "a10", "a3", "b"]),
        ("r[1-2]n[3-4].net", ["r1n3.net", "r1n4.net", "r2n3.net", "r2n4.net"]),
    ],
)
def test_a_list_of_nodes(nodes: str, names: list[str]) -> None:
    assert expand(nodes) == names


def test_the_first_process_listens_where_the_others_reach_it() -> None:
    place = torchrun({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "4"})
    assert listening_address(place, "") == "127.0.0.1"  # the scheduler has named the loopback interface
    assert listening_address(place, "10.0.0.1") == "10.0.0.1"
    assert listening_address(place, "0.0.0.0") == "127.0.0.1"

    named = structs.replace(place, host="localhost")  # stands for a machine's name that means 127.0.1.1 on it
    assert listening_address(structs.replace(named, alone=True), "") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigurationError, match=r"the other machines of the job cannot reach. Use --listen"):
        listening_address(named, "")
    with pytest.raises(
        ConfigurationError, match=r"'no.such.name.invalid' cannot be reached from this machine"
    ):
        listening_address(structs.replace(place, host="no.such.name.invalid"), "")


def test_an_address_of_ip_version_6_is_a_loopback_address_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "interface_to", lambda host: "::1")
    place = torchrun({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "::1"})
    assert listening_address(place, "") == "::1"
    with pytest.raises(
        ConfigurationError, match=r"means ::1, which the other machines of the job cannot reach"
    ):
        listening_address(structs.replace(place, host="a-machine"), "")


def test_a_process_may_wait_for_the_store_without_a_limit() -> None:
    place = RendezvousStore(host="127.0.0.1", port=0, key="job", hosted=True)
    store = schedulers._store(place, math.inf, serves=True)
    store.set(place.key, "an address")
    assert store.get(place.key) == b"an address"


@pytest.mark.parametrize("scheduler", ENVIRONMENTS)
def test_a_process_that_the_scheduler_has_not_started(scheduler: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not set, so .* `paceline join HOST:PORT SCRIPT`"):
        ENVIRONMENTS[scheduler]({})


def test_a_batch_script_is_no_task() -> None:
    environment = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(ConfigurationError, match="SLURM_STEP_ID is not set, so this process is not a task"):
        slurm(environment)


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(ConfigurationError, match="RANK is 'one', expected a whole number"):
        torchrun({**TORCHRUN, "RANK": "one"})
