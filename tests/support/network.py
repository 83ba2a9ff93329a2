"""A deterministic network: the cores of a whole run, and the messages between them, in one process and without time.

The network runs the same cores as a live run: the coordinator, the servers with their shards, and the workers. A
connection keeps the order of its messages. What happens next is a choice among `Network.steps`: a message arrives,
a timer fires, or a worker does what comes next in its script. A *chooser* makes this choice: `Random`, `Hostile`,
or a script in a text file (see `network_scripts`). Faults are steps, too: a process ends, hangs or is taken
out, a connection is dropped, a worker joins or comes back.

A step is a tuple of words, such as `("deliver", "w0", "s1")`. So the steps of a run are the commands of a script that
repeats the run. Processes have these names:

    c           the coordinator
    s1          server 1
    w0 w0' w0'' worker 0, the next incarnation of worker 0, and the one after it

The network checks what its cores do: each push is used exactly once, no healthy process is refused, and the cores do
not contradict themselves. `Network.check_end` checks that nobody waits when no step is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from paceline.core.coordinator import Coordinator
from paceline.core.job_cut import JobCut
from paceline.core.messages import Hello, Message
from paceline.core.server import Server
from paceline.core.worker import Worker
from paceline.errors import ConfigurationError, InternalError, ProtocolError
from paceline.sync.schedule import read_schedule
from tests.support.network_processes import (
    END,
    CoordinatorProcess,
    Medium,
    ServerProcess,
    Step,
    WorkerProcess,
)

__all__ = ["Chooser", "Network", "Step", "describe"]

Chooser = Callable[["Network", Sequence[Step]], Step]
"""A function that chooses one of the steps that are possible next, or a fault instead."""


class Network(Medium):
    """The processes of a run, and the messages in flight between them.

    Args:
        sync: the sync models of the run, in the notation of the command line.
        workers: number of workers at the start.
        servers: number of servers.
        shards: number of shards. Default: one for each server.
        most: maximum number of workers. Default: `workers`.
        resumed: the cut with which the run begins; None for none.
        first_model: number of the model of `network_processes.MODELS` with which the scripts begin.
        used: (epoch, position) -> how often earlier runs have used the position, according to this cut.
        script: what each worker does, one verb after another: see `WorkerProcess.VERBS`. "epoch N" is repeated until
            the epoch has ended.
        options: further arguments of the coordinator.

    Attributes, besides those of `Medium`:
        faulty: names of the processes that have ended, hang, were taken out or have lost a connection.
        hanging: names of the processes that hang. Each is taken out at some time.
    """

    def __init__(
        self,
        sync: str,
        *,
        workers: int,
        servers: int = 1,
        shards: int = 0,
        most: int = 0,
        script: Sequence[str] = (),
        resumed: JobCut | None = None,
        first_model: int = 0,
        used: Mapping[tuple[int, int], int] = {},
        **options: Any,
    ) -> None:
        schedule = read_schedule(sync)
        most = max(most, workers)
        shards = shards or servers
        self.faulty: set[str] = set()
        self.hanging: set[str] = set()
        self._used = used
        self._script = script
        self._make_worker = partial(Worker, schedule, workers=most, shards=shards, servers=servers)
        late = range(workers, most)
        core = Coordinator(
            schedule, workers=most, servers=servers, shards=shards, late=late, resumed=resumed, **options
        )
        super().__init__(core, first_model)
        self.hub = CoordinatorProcess(self, core)
        for index in range(servers):
            self.servers.append(ServerProcess(self, index, Server(options.get("seed", 0))))
        for server in self.servers:
            self.connect(server.name, "c", Hello("", "server", server.index, address=server.name))
        for worker in range(workers):
            self._start(worker, 0)

    # -- what can happen ----------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Return the steps that are possible next, without faults."""
        if self.over:
            return []
        found: list[Step] = [("deliver", *ends) for ends, channel in self.channels.items() if channel]
        found += [("take-out", name) for name in sorted(self.hanging)]
        for node in self.workers.values():
            found += node.next_steps()
        if self.timers:
            found.append(("fire",))
        return found or [("stand-in", name) for name, node in self.workers.items() if node.may_stand_in]

    def faults(self) -> list[Step]:
        """Return the faults that do not end the run, and the arrival of a worker."""
        found: list[Step] = []
        for name, node in self.workers.items():
            initializes = node.index == self.coordinator.initializer or self.coordinator.model is None
            if name in self.faulty or (initializes and not self.coordinator.started):
                continue
            found += [("crash", name), ("hang", name), ("take-out", name)]
            found += [("drop", name, server.name) for server in self.servers if node.number >= 0]
        return [*found, ("join",)]

    def take(self, step: Step) -> None:
        """Let a step happen.

        Raises:
            AssertionError: a check failed. The message contains all steps that have been taken.
        """
        self.taken.append(step)
        try:
            if (method := self.VERBS.get(step[0])) is not None:
                method(self, *step[1:])
            else:
                self.workers[step[1]].act(step[0], *step[2:])
        except (AssertionError, ProtocolError, InternalError, LookupError) as error:
            way = [" ".join(each) for each in self.taken]
            raise AssertionError("\n".join([*way, repr(error)])) from error

    def advance(self, choose: Chooser, most: int) -> bool:
        """Take steps until none is left, or the run has ended. Return False if that takes more than `most` steps."""
        for _ in range(most):
            if not (steps := self.steps()):
                return True
            self.take(choose(self, steps))
        return False

    def run(self, choose: Chooser, most: int = 100_000) -> None:
        """Take all steps of the run. Fail if there are more than `most`."""
        if not self.advance(choose, most):
            raise AssertionError(f"the run has not ended after {most:,} steps")

    def settle(self) -> None:
        """Deliver all messages, in the order in which they were sent, until none is in flight."""
        while not self.over and (ready := [ends for ends, channel in self.channels.items() if channel]):
            self.take(("deliver", *min(ready, key=lambda ends: self.channels[ends][0][0])))

    def validate(self) -> None:
        """Raise an error if a core contradicts itself."""
        self.coordinator.validate()
        self.coordinator.data.validate()
        for server in self.servers:
            if server.core.initializer >= 0:
                server.core.validate()

    def check_end(self) -> None:
        """Check a run of which no step is left: nobody waits, nothing is held, and all data is accounted for."""
        self.validate()
        if self.over:
            return
        waiting = ", ".join(map(str, self.workers.values()))
        assert not waiting, f"no step is left, but {waiting}"
        giving = self.coordinator.reconfigurations.giving
        assert giving is None or giving.labels is None, f"cut {giving.number} has not been completed"
        members = self.coordinator.members
        left = members.live | members.invited | members.present
        assert not left, f"the coordinator expects workers {left}, which have left"
        for server in self.servers:
            assert not server.core.expected, f"{server.name} expects workers {server.core.expected}"
            for shard, store in server.stores.items():
                assert not store.unused, (
                    f"shard {shard} holds the pushes {store.unused} of workers that have left"
                )
        self._check_data()

    def _check_data(self) -> None:
        """Check that every position is used once, and that the ledger of the coordinator says the same."""
        stores = [store for server in self.servers for store in server.stores.values()]
        complete = set.intersection(*(store.received for store in stores)) if stores else set()
        used = self.used_by(complete)
        twice = [position for position, count in used.items() if count > 1]
        assert not twice, f"the positions {twice} (epoch, position) are used twice"
        for counts in self.coordinator.data.counts().values():
            assert counts.leased == 0, f"workers have left with {counts.leased} positions"
            assert counts.used == used.total(), f"{used.total()} positions are used, but {counts}"

    def used_by(self, pushes: Collection[tuple[int, int]]) -> Counter[tuple[int, int]]:
        """Return how often earlier runs, and some pushes of this run, have used each (epoch, position)."""
        return Counter(self._used) + Counter(
            (batch.epoch, position)
            for label, batches in self.batches.items()
            if label in pushes
            for batch in batches
            for position in range(batch.start, batch.start + batch.size)
        )

    # -- steps --------------------------------------------------------------------------------------------

    def deliver(self, sender: str, receiver: str, number: str = "0") -> None:
        """Let the first message of a channel arrive."""
        _, message = self.channels[sender, receiver, number].popleft()
        if message is END:
            del self.channels[sender, receiver, number]
            self.post(receiver, sender, END, number)
        self.tell(f"{sender} > {receiver} {describe(message)}")
        node = self.nodes[receiver]
        try:
            node.receive(sender, number, message)
        except ProtocolError as error:
            if sender not in self.faulty:
                raise AssertionError(
                    f"{receiver} refuses {describe(message)} from {sender}: {error}"
                ) from error
            self.tell(f"    {receiver} refuses {sender}: {error}")
            node.refuse(sender, number)

    def fire(self) -> None:
        """Fire the timer that is due first."""
        self.timers.sort(key=lambda each: each[:2])
        due_ticks, _, timer, name = self.timers.pop(0)
        self.now_ticks = max(self.now_ticks, due_ticks)
        self.tell(f"{name} timer of {timer.worker}:{timer.iteration}")
        node = self.nodes[name]
        node.carry_out(node.core.fire(timer, self.now_ticks))

    def crash(self, name: str, *unsent: str) -> None:
        """Let a process end. The last messages that it has sent may be lost: "s0:2" for two of those to server 0."""
        self.faulty.add(name)
        self._cut(name, *unsent)
        self.end(name)

    def hang(self, name: str) -> None:
        """Let a process be silent from now on, without an end of its connections, until it is taken out."""
        self.faulty.add(name)
        self.hanging.add(name)
        self.end(name, silent=True)

    def take_out(self, name: str) -> None:
        """Let the coordinator go on without a worker, whose process may go on."""
        self.faulty.add(name)
        self.hanging.discard(name)
        self.hub.take_out_worker(name)

    def drop(self, name: str, server: str, *unsent: str) -> None:
        """Let the connections between a worker and a server end, although both go on."""
        self.faulty.add(name)
        self._cut(name, *unsent)
        for sender, receiver, number in list(self.channels):
            if {sender, receiver} == {name, server}:
                self.post(sender, receiver, END, number)

    def join(self) -> None:
        """Start another worker: one that has not been there yet, or one that has left."""
        try:
            [(worker, incarnation)] = self.coordinator.invite(1).items()
        except ConfigurationError:
            self.tell("no index is free")
            return
        self._start(worker, incarnation)

    def cut(self) -> None:
        """Let the coordinator begin a cut of the job."""
        self.hub.carry_out(self.coordinator.cut())

    def lose_server(self, name: str) -> None:
        """Let the process of a server end."""
        self.faulty |= {name, *self.workers}
        self.end(name)

    VERBS: ClassVar[dict[str, Callable[..., None]]] = {
        "deliver": deliver,
        "fire": fire,
        "crash": crash,
        "hang": hang,
        "take-out": take_out,
        "drop": drop,
        "join": join,
        "cut": cut,
        "lose": lose_server,
    }
    """What can happen, and the method that lets it happen. All other verbs are in `WorkerProcess.VERBS`."""

    def _start(self, worker: int, incarnation: int) -> None:
        node = WorkerProcess(self, worker, incarnation, self._make_worker(), self._script)
        self.workers[node.name] = node
        node.start()

    def _cut(self, name: str, *unsent: str) -> None:
        """Lose the last messages of a process. See `crash`."""
        for receiver, count in (each.split(":") for each in unsent):
            for ends, channel in self.channels.items():
                if ends[:2] == (name, receiver):
                    for _ in range(min(int(count), len(channel))):
                        channel.pop()


LONG = {"model", "shards", "addresses", "digests", "drawn", "traceback", "data"}
UNINTERESTING = LONG | {"token", "address", "role", "index", "call", "may_push", "state", "source"}
"""Fields that a description leaves out."""

OFTEN_ZERO = frozenset({"incarnation", "superstep"})
"""Fields that a description leaves out if they are 0."""


def describe(message: Message | str) -> str:
    """Return a short description of a message: its type, and its fields that are not as usual."""
    if isinstance(message, str):
        return "ends"
    names, defaults = message.__struct_fields__, message.__struct_defaults__
    usual = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | dict.fromkeys(
        OFTEN_ZERO, 0
    )
    words = [type(message).__name__]
    for name in names:
        value = getattr(message, name)
        if name not in UNINTERESTING and value not in (None, usual.get(name)):
            number = getattr(value, "number", getattr(value, "superstep", value))  # of a change or a stop
            words.append(f"{name}={number}".replace(", ", ","))
    return " ".join(words)
