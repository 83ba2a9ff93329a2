"""Joining a run: a machine connects to the coordinator, and offers to run some workers, and perhaps some servers.

The coordinator replies with their indices and the configuration of the run. From then on, they are processes as in a
run on one machine, except that the coordinator and other processes are on other ones. The agent of the machine looks
after them (see `agent`).

A machine that brings servers listens on one port for all of them, as the machine that serves the run does. The run
cannot continue without them. So when such a machine loses its connection, it does not join again. Other machines do,
with the workers that were cut off.

When the run has lost a server and goes on from a checkpoint, the coordinator says so. Then every machine ends its
processes and joins the run again with all of them, as it did at first.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from msgspec import structs
from rich.console import Console

from ...core.protocol.messages import (
    Hello,
    MachineAdmitted,
    MachineJoined,
    Message,
    Refused,
    first_phase,
)
from ...errors import ConfigurationError, DeadlineError, PacelineError, PeerLostError, ProtocolError
from ...runtime.calling import call
from ...runtime.compute_devices import Device
from ...runtime.job import Resumed, claim_run_dir, decode_job
from ...runtime.listener import Listener
from ...wire.addresses import seen_from
from ...wire.stream import Stream
from ...wire.tcp import TCP, is_local
from ...wire.tls import Contexts, contexts
from ..live_run.local import LocalEngine
from ..live_run.rejoining import FIRST_PAUSE_S, MOST_REJOINS, Rejoins
from ..processes.interruption import Interruption
from ..processes.orders import payload_of_server
from ..processes.starting import Starter
from ..terminal.channels import Channels, Streams
from ..terminal.output import PlainScreen, print_sentence
from .agent import POLL_INTERVAL_S, Agent, CutOffError, process_names
from .fetched_checkpoint import fetch_checkpoint

__all__ = ["Joined", "ServerOffer", "join"]

RETRY_INTERVAL_S = 0.5
# Time after which an unanswered connection to the coordinator is given up. A coordinator that is suspended still
# acknowledges what it receives, and within this time, one that is not has taken out a machine behind a broken link.
SILENCE_MS = 10_000


class Joined(NamedTuple):
    """How the processes of this machine have ended.

    Attributes:
        run_dir: the directory of their logs.
        finished: True if a worker has finished its script, or there was none; False if all of them were lost.
        endings: how the process of each worker has ended, for the user.
    """

    run_dir: Path
    finished: bool
    endings: str

    @classmethod
    def of(cls, run_dir: str, engine: LocalEngine) -> Joined:
        """Return how the processes of an engine have ended."""
        endings = [f"{process.name}: {process.ending}" for process in engine.workers.values()]
        return cls(Path(run_dir), engine.finished or not engine.workers, "; ".join(endings))


class ServerOffer(msgspec.Struct, frozen=True):
    """The servers that a machine brings.

    Attributes:
        count: their number.
        listen: address of this machine on which the workers reach them; "" for that from which this machine reaches
            the coordinator, "0.0.0.0" or "::" for all addresses.
        port: TCP port of the servers; 0 for any free port.
        path: module search path from which they import what users define.
    """

    count: int
    listen: str = ""
    port: int = 0
    path: Sequence[str] = ()


def join(
    address: str,
    token: str,
    worker_arguments: Sequence[str],
    *,
    worker_payload: bytes = b"",
    version: str,
    workers: int,
    indices: Sequence[int] = (),
    servers: ServerOffer | None = None,
    console: Console,
    patience_s: float = 60.0,
    rejoins: int = MOST_REJOINS,
    run_dir: str | None = None,
    streams: Streams | None = None,
    shown: str = "",
    starter: Starter | None = None,
    devices: Sequence[Device] = (),
    imports: Sequence[str] = (),
) -> Joined:
    """Run processes on this machine for a run whose coordinator listens at `address`, until they have ended.

    Workers that are taken out of the run join it again (see `rejoining`).

    Args:
        address: address of the coordinator, for example "tls:10.0.0.1:29600".
        token: the secret of the run.
        worker_arguments: what each worker runs; see `Order`.
        worker_payload: the objects that are sent to each worker.
        version: version of Paceline on this machine.
        workers: number of workers to start on this machine.
        indices: the indices that these workers get if they are free.
        servers: the servers that this machine brings, if any.
        console: console for messages.
        patience_s: number of seconds for which the coordinator is called if it does not answer.
        rejoins: maximum number of times that workers join again after they were taken out of the run.
        run_dir: directory of the workers' logs. Default: a new directory in ./runs.
        streams: what the user wants of the standard streams of the workers.
        shown: name of the worker whose output is shown. Default: the first one on this machine.
        starter: starts the workers when they join for the first time; by default, a new one.
        devices: the device of each worker; () if none is assigned.
        imports: modules that the workers of this machine import besides those of the run.

    Raises:
        ConfigurationError: the run does not accept this machine, or it cannot listen for its servers.
        PeerLostError: the coordinator cannot be reached, or the connection to it was lost and this machine does not
            join again.
        RunFailedError: the run failed, or a process on this machine failed.
        KeyboardInterrupt: Ctrl-C was pressed; all processes on this machine have ended.
    """
    again = Rejoins(rejoins)
    folder, wanted = run_dir or "", workers
    with Interruption() as interruption:
        first = True
        reason: PacelineError
        while True:
            stream = _call(address, contexts(token), patience_s, console, interruption)
            door = contextlib.ExitStack()  # what this machine listens with
            try:
                sock, listens_at = None, "tls:"
                if servers is not None:
                    sock, listens_at = _listen(servers, stream.sock.getsockname()[0], console)
                    door.callback(sock.close)
                count = 0 if servers is None else servers.count
                offer = MachineJoined(version, wanted, tuple(indices), count)
                checkpoint, admitted = _ask_to_join(stream, address, token, offer, door)
                if taken := ", ".join(str(index) for index in indices if index not in admitted.workers):
                    print_sentence(console, f"the worker index {taken} is not free")
                job = decode_job(admitted.job, admitted.now_ticks)
                if checkpoint is not None:
                    job = structs.replace(job, resumed=Resumed(str(checkpoint)))
                job = claim_run_dir(structs.replace(job, run_dir=folder))
                folder, first = job.run_dir, False
                listener = None
                if sock is not None:
                    listener = door.enter_context(Listener(sock, bytes.fromhex(job.mark)))
                    names = process_names("server", admitted.servers)
                    print_sentence(console, f"brings {names}, reached at {listens_at}")
                with starter or Starter([()] * (wanted + count)) as processes:
                    starter = None
                    channels = Channels(
                        streams or Streams(),
                        None,
                        PlainScreen(),
                        shown=shown or (f"worker {min(admitted.workers)}" if admitted.workers else ""),
                    )
                    engine = LocalEngine(
                        job,
                        address,
                        processes,
                        channels,
                        lambda worker, how: None,
                        admitted.machine,
                        listener,
                        listens_at,
                        imports,
                    )
                    agent = Agent(job, engine, channels, stream, console, interruption, again)
                    if servers is not None:
                        agent.start_servers(admitted.servers, payload_of_server(servers.path, {}))
                    placed = dict(zip(admitted.workers, devices, strict=True)) if devices else {}
                    agent.carry_out(admitted.workers, worker_arguments, worker_payload, placed)
                return Joined.of(folder, engine)
            except CutOffError as error:
                if servers is not None and not error.resumes:
                    raise
                if servers is None and not error.workers:
                    if engine.finished:  # nobody knows whether the run will keep what they have trained
                        raise
                    return Joined.of(folder, engine)
                wanted, indices = len(error.workers), error.workers
                devices = [agent.devices[worker] for worker in error.workers if worker in agent.devices]
                reason, pause_s = error, FIRST_PAUSE_S if error.resumes else again.pause_s()
            except UnansweredError as error:
                reason, pause_s = error, again.pause_s()
            except ConfigurationError as error:
                if first:
                    raise
                reason, pause_s = error, again.pause_s()
            finally:
                door.close()
                stream.close()
            if pause_s is None:
                raise reason
            print_sentence(console, f"{reason}; joining again in {pause_s:g} s")
            deadline_s = time.monotonic() + pause_s
            while time.monotonic() < deadline_s:
                if interruption.asked:
                    raise interruption.exception("all workers on this machine have ended", {})
                time.sleep(POLL_INTERVAL_S)


class UnansweredError(PeerLostError):
    """The connection to the coordinator was lost before it had answered the offer of this machine."""


def _listen(servers: ServerOffer, own: str, console: Console) -> tuple[socket.socket, str]:
    """Return a socket that listens for the servers of this machine, and the address at which they are reached.

    Args:
        servers: the servers.
        own: the address from which this machine has reached the coordinator.
        console: console for messages.

    Raises:
        ConfigurationError: this machine cannot listen there.
    """
    sock, address = TCP.listen(servers.listen or own, servers.port, secure=True)
    host = f"[{own}]" if ":" in own else own
    listens_at = seen_from(address, f"tls:{host}:0")
    if is_local(listens_at):
        print_sentence(
            console,
            f"the servers of this machine are reached at {listens_at}, so only workers on this machine can use them. "
            "Name the address on which the other machines reach this one with --listen.",
        )
    return sock, listens_at


def _call(
    address: str, known: Contexts, patience_s: float, console: Console, interruption: Interruption
) -> Stream[Message]:
    """Return a connection to the coordinator. If it cannot be reached, try again for `patience_s` seconds."""
    deadline_s = time.monotonic() + patience_s
    told = False
    while True:
        try:
            left_s = max(1.0, deadline_s - time.monotonic())
            stream: Stream[Message] = Stream(
                call(address, left_s, known), first_phase("coordinator", "agent")
            )
            with contextlib.suppress(OSError):  # the connection is lost, as the first message will say
                stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
            return stream
        except PeerLostError as error:
            if interruption.asked:
                raise interruption.exception("no worker was started", {}) from error
            if time.monotonic() > deadline_s:
                raise PeerLostError(f"{error}; gave up after {patience_s:g} s") from error
            if not told:
                print_sentence(console, f"{error}; trying again for {patience_s:g} s")
                told = True
            time.sleep(RETRY_INTERVAL_S)


def _ask_to_join(
    stream: Stream[Message], address: str, token: str, offer: MachineJoined, door: contextlib.ExitStack
) -> tuple[Path | None, MachineAdmitted]:
    """Offer to run some processes.

    Returns:
        the directory of the checkpoint with which the run begins, perhaps a copy that `door` removes, and the answer.
    """
    try:
        stream.send(Hello(token, "agent", 0))
        # A machine that has been admitted must show at regular intervals that it is alive, so this comes first.
        checkpoint = fetch_checkpoint(
            stream, lambda: door.enter_context(TemporaryDirectory(prefix="paceline-"))
        )
        stream.send(offer)
        answer = stream.wait()
    except (PeerLostError, DeadlineError) as error:
        raise UnansweredError(
            f"the connection to the coordinator at {address} was lost before it had answered: {error}"
        ) from error
    if isinstance(answer, Refused):
        raise ConfigurationError(answer.reason)
    if not isinstance(answer, MachineAdmitted):
        raise ProtocolError(f"the coordinator sent {type(answer).__name__}, expected MachineAdmitted")
    return checkpoint, answer
