"""Messages about the machines of a run, the heartbeats that they send, and the status of the run."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...sync.events import Number
from .connection import MOST_WORDS
from .table import Message, sent

MOST_PROCESSES = 4096
"""Maximum number of processes on a machine."""

MOST_NAMES = 100
"""Maximum number of optimizers, and of formats, that a machine names."""

Name = Annotated[str, msgspec.Meta(max_length=64)]


@sent("agent", to="coordinator", during="offering", forwarded=False)
class FetchCheckpoint(Message):
    """A machine that is about to join needs a piece of the checkpoint with which a resumed run begins.

    Attributes:
        name: path of a file in the directory of the checkpoint.
        begin: where the piece begins, in bytes.
    """

    name: Annotated[str, msgspec.Meta(max_length=64)]
    begin: Number = 0


@sent("coordinator", to="agent", during="offering", forwarded=False)
class CheckpointPiece(Message):
    """A piece of the checkpoint with which the run begins. The payload is empty at the end of the file.

    Attributes:
        path: the directory of the checkpoint on the machine of the coordinator; "" if the run begins anew.
        begun: True if training has begun, so that the rest of the checkpoint is fetched at a lower rate.
    """

    path: str = ""
    begun: bool = False


class Installed(msgspec.Struct, frozen=True):
    """The installed software of a machine, as far as all machines of a run must agree on it. See `run.installed`.

    Attributes:
        python: version of Python, without the last number.
        torch: version of torch.
        formats: name of a format in which processes exchange data -> its number or digest.
        optimizers: the names in `torch.optim`; () if they are unknown.
    """

    python: Name
    torch: Name
    formats: Annotated[dict[Name, Name], msgspec.Meta(max_length=MOST_NAMES)]
    optimizers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_NAMES)]


@sent("agent", to="coordinator", during="offering joined", then="joined", forwarded=False)
class MachineJoined(Message):
    """A machine offers to run workers and servers. The process that sends this message is its *agent*.

    Attributes:
        version: version of Paceline on the machine. The coordinator can read this field even if the versions differ in
            all other fields.
        workers: number of workers that the machine can run.
        wanted: the indices that these workers should have if they are free.
        servers: number of servers that the machine brings.
        installed: what the machine has installed; None for a worker that returns, whose machine was checked before.
        unpickles: True if the workers run a function that was pickled on another machine.
    """

    version: Name
    workers: Number
    wanted: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MOST_PROCESSES)] = ()
    servers: Number = 0
    installed: Installed | None = None
    unpickles: bool = False


@sent("coordinator", to="agent", during="offering joined", then="joined", forwarded=False)
class MachineAdmitted(Message):
    """A machine may start the workers and servers that it has offered.

    Attributes:
        workers: the index of each worker of the machine, and how often this index has been used before.
        job: the configuration of the run, encoded by `paceline.run.job`.
        now_ticks: time on the clock of the run at which this message was sent.
        machine: index of the machine, by which the records of its clock are named.
        servers: the indices of the machine's servers.
    """

    workers: dict[int, int]
    job: bytes
    now_ticks: int
    machine: int
    servers: tuple[int, ...] = ()


@sent("agent", to="coordinator", during="joined", forwarded=False)
class MachineLeaving(Message):
    """A machine that has brought servers was asked to leave.

    A run in progress ends, because it cannot continue without these servers, and its weights are saved. The servers
    stay until the weights have been saved.
    """


@sent("agent", to="coordinator", during="joined", forwarded=False)
class ProcessEnded(Message):
    """The process of a worker on the agent's machine has ended.

    Attributes:
        worker: index of the worker.
        how: a phrase that says how the process ended.
        crashed: True if the process has crashed.
        asked: True if the machine had asked its workers to leave.
        returns: True if the worker has finished, or has failed only because another process had ended. The worker then
            joins again if the run goes on from a checkpoint.
    """

    worker: Number
    how: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    crashed: bool
    asked: bool = False
    returns: bool = False


@sent("agent", to="coordinator", during="joined", forwarded=False)
class ServerEnded(Message):
    """The process of a server on the agent's machine has ended.

    Attributes:
        server: index of the server.
        how: a phrase that says how the process ended.
        output: the last lines of the server's output; "" if the process has ended as it should.
    """

    server: Number
    how: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
    output: Annotated[str, msgspec.Meta(max_length=MOST_WORDS)] = ""


class ProcessState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a process on an agent's machine.

    Attributes:
        role: role of the process.
        index: index of the worker or server.
        state: "running", "stopped" by a signal, "traced" (a debugger has stopped it), or "gone".
        incarnation: how often the worker's index had been used before this process was started.
    """

    role: Literal["worker", "server"]
    index: Number
    state: Literal["running", "stopped", "traced", "gone"]
    incarnation: Number = 0


ClockTicks = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""A time or a difference of times on the clock of some machine."""


class ClockOffset(msgspec.Struct, frozen=True):
    """The offset of the coordinator's clock relative to a machine's clock. See `core.liveness`.

    Attributes:
        at_ticks: time on the machine's clock at which the offset holds.
        offset_ticks: estimate of the time on the coordinator's clock minus the time on the machine's clock.
        bound_ticks: maximum error of the estimate.
        drift_ppb: estimated change of the offset, in nanoseconds per second; None if it is not known yet.
    """

    at_ticks: ClockTicks
    offset_ticks: ClockTicks
    bound_ticks: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    drift_ppb: ClockTicks | None = None


@sent("agent", to="coordinator", during="joined", forwarded=False)
class Heartbeat(Message):
    """An agent reports that its machine is alive, at regular intervals and when the state of a process changes.

    Attributes:
        sent_ticks: time on the machine's clock at which the message was sent.
        states: the states of the processes that the agent has started.
        clock: the latest estimate of the offset between the clocks of the machine and of the coordinator; None if there
            is none yet.
    """

    sent_ticks: ClockTicks
    states: Annotated[tuple[ProcessState, ...], msgspec.Meta(max_length=MOST_PROCESSES)]
    clock: ClockOffset | None = None


@sent("coordinator", to="agent", during="joined", forwarded=False)
class HeartbeatAnswered(Message):
    """The answer to a heartbeat, from which the agent estimates the offset between the two clocks.

    Attributes:
        sent_ticks: `sent_ticks` of the heartbeat.
        received_ticks: time on the coordinator's clock at which the heartbeat arrived.
        answered_ticks: time on the coordinator's clock at which this message was sent.
    """

    sent_ticks: ClockTicks
    received_ticks: ClockTicks
    answered_ticks: ClockTicks


@sent("observer", to="coordinator", forwarded=False)
class FetchStatus(Message):
    """An observer asks the coordinator for the state of the job, which is sent as a `StatusReported`."""


@sent("coordinator", to="observer", forwarded=False)
class StatusReported(Message):
    """The answer to a `FetchStatus`.

    Attributes:
        status: the state of the job, a `JobStatus` in MessagePack.
    """

    status: bytes


@sent("coordinator", to="agent", during="joined", forwarded=False)
class KillOrdered(Message):
    """An agent must kill the process of a worker or server, because of the reason `why`."""

    role: Literal["worker", "server"]
    index: int
    why: str


@sent("coordinator", to="worker")
@sent("coordinator", to="agent", during="joined", forwarded=False)
class TakenOut(Message):
    """A worker is no longer part of the run, although its process has not ended.

    The coordinator sends this message to the worker's agent, and to the worker, which reads it when its process runs
    again. Nothing that this incarnation of the worker sends from now on is used.

    Attributes:
        worker: index of the worker.
        incarnation: how often this index had been used before.
        reason: why the coordinator no longer counts on the worker.
        for_good: True if the worker must not join again.
    """

    worker: int
    incarnation: int
    reason: str
    for_good: bool = False


@sent("coordinator", to="agent", forwarded=False)
class RunEnded(Message):
    """The run is over, so all remaining workers must end. The message is sent again when the results have been saved.

    Attributes:
        failure: the reason why the run has failed or was interrupted; else "".
        saved: True if the results have been saved. If the weights are incomplete, `failure` says so.
    """

    failure: str
    saved: bool = False


@sent("coordinator", to="agent", during="joined", forwarded=False)
class RunResumes(Message):
    """The run has lost a server and goes on from a checkpoint. The coordinator closes all connections next.

    Every machine then joins the run again, with its workers and its servers.

    Attributes:
        words: what has happened, and from which checkpoint the run goes on.
    """

    words: str
