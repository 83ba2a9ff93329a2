"""Processes that a scheduler has started: the place of each in the job, and how it joins or serves the job.

A scheduler starts the same command several times, on one or more machines. The processes differ in their environment
variables. Each function here reads the variables of one scheduler and returns a `JobPlace`; `ENVIRONMENTS` lists
these functions. Nothing else depends on a scheduler's variables. The functions are pure: the
environment is an argument.

              address               role: serves if    index           secret             device
    torchrun  in the job's store    RANK is 0          RANK            PACELINE_SECRET    LOCAL_RANK
    slurm     first node of step    SLURM_PROCID is 0  SLURM_PROCID    PACELINE_SECRET    SLURM_LOCALID

The secret may also be in a file that the user names. A worker inherits the environment, and its device is the
accelerator with the number in the last column. If the scheduler hides all accelerators but one, the device is the
accelerator that remains. Paceline hides no accelerators from the worker, because a script may read the variable in the
last column itself and choose its accelerator.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs
from rich.console import Console

from ..errors import ConfigurationError, PeerLostError, RunFailedError
from ..run.compute_devices import Device
from ..run.resuming import can_resume
from ..wire.secure import VARIABLE, read_secret
from ..wire.transports import interface_to, is_local, seen_from
from .beside import Announcement, finished, serving
from .join import join
from .processes.interruption import Interruption, Terminated
from .results import command_of
from .terminal import StandardStreams, print_sentence

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


FIRST_PORT = 20_000
PORTS = 10_000  # all ports are below 30000: below those that Linux gives to clients, and those of Kubernetes


class RendezvousStore(msgspec.Struct, frozen=True, kw_only=True):
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


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a process in a job that a scheduler has started.

    Attributes:
        name: name of the job. If the scheduler starts the job again, the job has another name.
        index: the index that the worker of this process gets if this index is free.
        local: index of this process among the processes of the job on its machine.
        count: number of processes in the job.
        serves: True if this process also starts the coordinator and the servers of the run.
        alone: True if all processes of the job run on this machine.
        host: host name or address of the process that serves the job. If this is not known, host name or address of
            another process, which all processes can reach.
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
    store: RendezvousStore | None = None


def torchrun(environment: Mapping[str, str]) -> JobPlace:
    """Return the place of a process that torchrun has started.

    All processes of the job know the address of a store. Connections to this store are not encrypted. Whenever torchrun
    starts the job again, the job has a new key in the store.

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
    # If a machine joins or leaves, torchrun starts all workers again with the same restart count, so the number of
    # workers is a part of the name.
    name = f"torchrun-{run}-{count}-{restarts}"
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return JobPlace(
        name=name,
        index=rank,
        local=read.number("LOCAL_RANK", default=0),
        count=count,
        serves=rank == 0,
        alone=read.number("LOCAL_WORLD_SIZE") == count,
        host=host,
        store=RendezvousStore(host=host, port=port, key=f"paceline/{name}", hosted=hosted),
    )


def slurm(environment: Mapping[str, str]) -> JobPlace:
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
    step = read.number("SLURM_STEP_ID")  # a batch script has all variables except for this one
    rank, job = read.number("SLURM_PROCID"), read.number("SLURM_JOB_ID")
    nodes = expand(read.text("SLURM_STEP_NODELIST"))
    components = (
        expand(environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", ""))[:1]
        for component in range(read.number("SLURM_HET_SIZE", default=0))
    )
    firsts = [node for component in components for node in component if node in nodes]
    restarts = read.number("SLURM_RESTART_COUNT", default=0)
    return JobPlace(
        name=f"slurm-{job}.{step}" + (f"-{restarts}" if restarts else ""),
        index=rank,
        local=read.number("SLURM_LOCALID", default=0),
        count=read.number("SLURM_STEP_NUM_TASKS"),
        serves=rank == 0,
        alone=read.number("SLURM_STEP_NUM_NODES") == 1,
        host=[*firsts, *nodes][0],
        port=FIRST_PORT + (4 * job + step) % PORTS,
    )


ENVIRONMENTS: Mapping[str, Callable[[Mapping[str, str]], JobPlace]] = {"torchrun": torchrun, "slurm": slurm}
"""Name of a scheduler -> the function that reads the variables of this scheduler."""


class _Variables:
    """Reads the variables of a scheduler. `otherwise` says what it means if a variable is missing."""

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


# -- A process that a scheduler has started: it joins the job. The first process also serves the job ---------
#
# Each process runs one worker as a child, so the process goes on if this worker is lost or leaves. If the
# process ended, the scheduler might end or restart the whole job. A process fails only if the job fails.

POLL_INTERVAL_S = 0.2
# Maximum time to wait for the other workers to leave after the worker of the first process has left.
LEAVE_TIMEOUT_S = 5.0
# Maximum time in seconds that the store accepts: torch counts milliseconds in 32 bits.
MOST_STORE_S = 1e6
EXIT_FINISHED = (0, 3)  # exit codes of a run that has finished

ANYWHERE = ("0.0.0.0", "::", "[::]")


def listening_address(place: JobPlace, listen: str) -> str:
    """Return the address at which the other processes of the job reach this process, which is the first one.

    Args:
        place: the place of this process.
        listen: the address of this machine that the user has chosen; "" for the address of the interface over which
            this machine reaches the host that the scheduler has named. All other machines reach this host, too.

    Raises:
        ConfigurationError: other machines cannot reach the address.
    """
    if listen and listen not in ANYWHERE:
        return listen
    address = interface_to(place.host)
    if _is_loopback(address) and not (place.alone or _is_loopback(place.host)):
        raise ConfigurationError(
            f"on this machine, the name {place.host!r} means {address}, which the other machines of the job cannot "
            "reach. Use --listen to name the address on which these machines reach this machine."
        )
    return address


def _is_loopback(host: str) -> bool:
    """Return True if a host is a loopback address."""
    return is_local(f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0")


def join_job(
    place: JobPlace,
    worker_arguments: Sequence[str],
    serve_arguments: Sequence[str],
    *,
    listen: str,
    port: int,
    token: str,
    version: str,
    console: Console,
    patience_s: float,
    run_dir: str | None,
    streams: StandardStreams,
    device: Device | None = None,
    force: bool = False,
) -> int:
    """Run one worker of a scheduler's job until the worker has ended. The first process also serves the job.

    Args:
        place: the place of this process.
        worker_arguments: the script, module or function that the worker runs; see `ProcessOrder`.
        serve_arguments: the options with which the first process serves the job.
        listen: see `listening_address`.
        port: TCP port of the coordinator; 0 for the port that the scheduler implies or, if there is none, a free port.
        token: the secret of the job; "" for a new secret, if all processes run on this machine.
        version: version of Paceline on this machine.
        console: console for messages.
        patience_s: number of seconds for which the first process is awaited.
        run_dir: run directory. If this directory has the checkpoint of a run that has not finished, the job resumes
            this run.
            Default: a new directory in ./runs.
        streams: how the user wants to use the standard streams of the worker.
        device: the device of the worker; None if none is assigned.
        force: True to use the run directory even if a run in progress holds it.

    Returns:
        The exit code of this process. A process does not fail because its worker is lost or leaves, unless this
        is the first process, and the run ends because the worker is lost.

    Raises:
        ConfigurationError: an input is not valid, or the job does not accept this process.
        PeerLostError: the first process cannot be reached.
        RunFailedError: the job has failed.
        Terminated: this process serves the job, and was asked to leave before the job had finished.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    port = port or place.port

    def work(announcement: Announcement) -> None:
        join(
            announcement.address,
            token or read_secret(Path(announcement.secret_file)),
            worker_arguments,
            version=version,
            workers=1,
            indices=[place.index],
            console=console,
            patience_s=patience_s,
            # Processes that share a file system write their logs to the same directory.
            run_dir=run_dir or str(Path("runs", Path(announcement.run_dir).name)),
            streams=streams,
            devices=[] if device is None else [device],
        )

    if not place.serves:
        announcement = _await_announcement(place, listen, port, patience_s)
        try:
            work(announcement)
        except Terminated as end:
            if end.number != signal.SIGTERM:
                raise
            print_sentence(console, f"left the run: {end.words}")
        return 0
    reached = listening_address(place, listen)
    where = [f"--listen={listen or reached}", f"--port={port}", f"--command={command_of()}"]
    if folder := run_dir or (None if place.store else f"runs/{place.name}"):
        where.append(f"--resume={folder}" if can_resume(Path(folder), force=force) else f"--run-dir={folder}")
    with serving([*serve_arguments, *where], {VARIABLE: token} if token else {}) as (program, announced):
        store = None if place.store is None else _store(place.store, patience_s, serves=True)

        def publish(announcement: Announcement) -> None:
            if store is not None and place.store is not None:
                store.set(place.store.key, msgspec.json.encode(announcement).decode())

        found = announced()
        if found is None:
            publish(
                Announcement(
                    "", "", failure="its first process could not start it, and has printed the reason"
                )
            )
            program.end(lambda: True)
            return program.exit_code or 1
        announcement = structs.replace(found, address=seen_from(found.address, f"tls:{reached}:0"))
        publish(announcement)
        asked: Terminated | None = None
        try:
            work(announcement)
        except Terminated as end:
            asked = end
        except RunFailedError as error:  # the run may continue without this worker
            print_sentence(console, str(error))
        # When the machine is about to be taken away, the other workers usually leave, too. If they do not leave, the
        # run is interrupted, so that it can still save its weights.
        with Interruption() as interruption:
            asked_s = None if asked is None else time.monotonic()

            def over() -> bool:
                nonlocal asked_s
                if interruption.asked and asked_s is None:
                    asked_s = time.monotonic()
                return asked_s is not None and time.monotonic() >= asked_s + LEAVE_TIMEOUT_S

            program.end(over)
        code = program.exit_code
        assert code is not None
        if asked is not None and not (code in EXIT_FINISHED and finished(announcement.run_dir)):
            raise asked
        return 0 if code in EXIT_FINISHED else code


def _await_announcement(place: JobPlace, listen: str, port: int, patience_s: float) -> Announcement:
    """Return how this process joins the run that the first process serves."""
    if place.store is None:
        host = listen if listen and listen not in ANYWHERE else place.host
        return Announcement(f"tls:{host}:{port}", place.name)
    store = _store(place.store, patience_s, serves=False)
    deadline_s = time.monotonic() + patience_s
    while not store.check([place.store.key]):
        if time.monotonic() > deadline_s:
            raise PeerLostError(
                f"the first process of the job has not published its address within {patience_s:g} s; wait longer "
                "with --wait, and look at its output"
            )
        time.sleep(POLL_INTERVAL_S)
    announcement = msgspec.json.decode(store.get(place.store.key), type=Announcement)
    if announcement.failure:
        raise RunFailedError("the run", announcement.failure)
    return announcement


def _store(store: RendezvousStore, patience_s: float, *, serves: bool) -> TCPStore:
    """Return a connection to the store of a job. The store contains no secrets, because anybody may connect to it."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    timeout_s = min(MOST_STORE_S, max(1.0, patience_s))
    try:
        return TCPStore(
            store.host,
            store.port,
            is_master=store.hosted and serves,
            timeout=timedelta(seconds=timeout_s),
        )
    except DistError as error:
        raise PeerLostError(
            f"the store of the job at {store.host}:{store.port} cannot be reached: {error}"
        ) from error
