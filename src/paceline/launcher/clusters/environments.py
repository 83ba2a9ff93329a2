"""What a scheduler has written into the environment of a process: the place of the process in a job.

A scheduler starts the same command several times, on one or more machines, and tells the processes apart by their
environment. Each function here reads the variables of one scheduler and returns a `Place`; `ENVIRONMENTS` lists these
functions. Nothing else depends on a scheduler's variables. The functions are pure: they receive the environment.

              address               role: serves if    index           secret             device
    torchrun  in the job's store    RANK is 0          RANK            PACELINE_SECRET    LOCAL_RANK
    slurm     first node of step    SLURM_PROCID is 0  SLURM_PROCID    PACELINE_SECRET    SLURM_LOCALID

The secret may also be in a file that the user names. A worker inherits the environment, and its device is the
accelerator with the number in the last column. If the scheduler hides the other ones, it is the only one. Nothing
else is hidden from the worker, because a script may choose its accelerator by this variable itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from ...errors import ConfigurationError

__all__ = ["ENVIRONMENTS", "Place", "Store", "slurm", "torchrun"]

FIRST_PORT = 20_000
PORTS = 10_000  # so the ports lie below those that Linux gives to clients, and those of Kubernetes


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """A store of keys and values in which the process that serves the job publishes its address.

    Attributes:
        host: host name or address.
        port: TCP port.
        key: the key for this job.
        hosted: True if the process that serves the job must also run the store.
    """

    host: str
    port: int
    key: str
    hosted: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a process in a job that a scheduler has started.

    Attributes:
        name: name of the job. If the scheduler starts the job again, it has another name.
        index: the index of the worker of this process, if it is free.
        local: number of this process on its machine.
        count: number of processes in the job.
        serves: True if this process also starts the coordinator and the servers of the run.
        alone: True if all processes of the job run on this machine.
        host: host name or address of the process that serves the job or, if it is not known, of another process
            that all others can reach.
        port: TCP port of the coordinator; 0 if it is published in the store.
        store: where the address is published; None if `host` and `port` are known from the start.
    """

    name: str
    index: int
    local: int
    count: int
    serves: bool
    alone: bool
    host: str
    port: int = 0
    store: Store | None = None


def torchrun(environment: Mapping[str, str]) -> Place:
    """Return the place of a process that torchrun has started.

    All processes of the job know the address of a store, which is not encrypted. The job has a new key there whenever
    torchrun starts it again.

    Raises:
        ConfigurationError: torchrun has not started this process.

    Example:

        >>> place = torchrun({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
        ...                   "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"})
        >>> place.index, place.serves, place.store.key
        (3, False, 'paceline/torchrun-a-4-1')
    """
    read = _Variables(
        environment,
        "torchrun has not started this process. Use, for example, `torchrun --nproc-per-node 2 -m paceline.join "
        "SCRIPT`; without torchrun, `paceline join HOST:PORT SCRIPT`",
    )
    rank, count = read.number("RANK"), read.number("WORLD_SIZE")
    run, restarts = read.text("TORCHELASTIC_RUN_ID"), read.number("TORCHELASTIC_RESTART_COUNT")
    host, port = read.text("MASTER_ADDR"), read.number("MASTER_PORT")
    # If a machine leaves or comes, torchrun starts all workers again with the same restart count, so the number of
    # workers is a part of the name.
    name = f"torchrun-{run}-{count}-{restarts}"
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Place(
        name=name,
        index=rank,
        local=read.number("LOCAL_RANK", default=0),
        count=count,
        serves=rank == 0,
        alone=read.number("LOCAL_WORLD_SIZE") == count,
        host=host,
        store=Store(host=host, port=port, key=f"paceline/{name}", hosted=hosted),
    )


def slurm(environment: Mapping[str, str]) -> Place:
    """Return the place of a task of a Slurm job step.

    The first task serves the job. Its machine is the first node of the step or, in a heterogeneous job, of the step's
    first component. The port is derived from the numbers of the job and the step.

    Raises:
        ConfigurationError: this process is not a task of a job step.

    Example:

        >>> place = slurm({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
        ...                "SLURM_JOB_ID": "117", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]"})
        >>> place.index, place.serves, place.host, place.port
        (3, False, 'gpu03', 20468)
    """
    read = _Variables(
        environment,
        "this process is not a task of a Slurm job step. Use, for example, `srun --ntasks 2 paceline join --slurm "
        "SCRIPT` in a file for sbatch; without Slurm, `paceline join HOST:PORT SCRIPT`",
    )
    step = read.number("SLURM_STEP_ID")  # a batch script has the other variables, too
    rank, job = read.number("SLURM_PROCID"), read.number("SLURM_JOB_ID")
    nodes = expand(read.text("SLURM_STEP_NODELIST"))
    components = (
        expand(environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", ""))[:1]
        for component in range(read.number("SLURM_HET_SIZE", default=0))
    )
    firsts = [node for component in components for node in component if node in nodes]
    restarts = read.number("SLURM_RESTART_COUNT", default=0)
    return Place(
        name=f"slurm-{job}.{step}" + (f"-{restarts}" if restarts else ""),
        index=rank,
        local=read.number("SLURM_LOCALID", default=0),
        count=read.number("SLURM_STEP_NUM_TASKS"),
        serves=rank == 0,
        alone=read.number("SLURM_STEP_NUM_NODES") == 1,
        host=[*firsts, *nodes][0],
        port=FIRST_PORT + (4 * job + step) % PORTS,
    )


ENVIRONMENTS: Mapping[str, Callable[[Mapping[str, str]], Place]] = {"torchrun": torchrun, "slurm": slurm}
"""Name of a scheduler -> the function that reads the variables of this scheduler."""


class _Variables:
    """Reads the variables of a scheduler. `otherwise` says what it means if one of them is missing."""

    def __init__(self, environment: Mapping[str, str], otherwise: str) -> None:
        self._environment = environment
        self._otherwise = otherwise

    def text(self, name: str) -> str:
        if not (text := self._environment.get(name, "")):
            raise ConfigurationError(f"the environment variable {name} is not set, so {self._otherwise}.")
        return text

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and not self._environment.get(name):
            return default
        text = self.text(name)
        if not text.isdecimal():
            raise ConfigurationError(f"the environment variable {name} is {text!r}, expected a whole number.")
        return int(text)


def expand(nodes: str) -> list[str]:
    """Return the names in Slurm's notation of a list of nodes, in order.

    >>> expand("login,gpu[03-05,9]")
    ['login', 'gpu03', 'gpu04', 'gpu05', 'gpu9']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        ranges = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if ranges is None:
            names.append(part)
            continue
        before, inside, after = ranges.groups()
        for piece in inside.split(","):
            first, _, last = piece.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names += [f"{before}{number:0{len(first)}d}{rest}" for rest in expand(after) or [""]]
    return names
