"""The processes of a `Network`: what the hosts of the cores do in a live run, as far as the protocol depends on it.

Each process is a `core.requests.Host`. A server has no tensors, but remembers which pushes it has received, and
whose initial weights. A worker has no script, but a list of what to do next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec import structs

from paceline.core.coordinator import Coordinator
from paceline.core.job_cut import JobCut
from paceline.core.layout import Layout, ModelSpec, OptimizerSpec, Parameter
from paceline.core.lease import Batch, DataOrder
from paceline.core.messages import (
    Commit,
    CreateShards,
    ExtendShards,
    Failed,
    Hello,
    InitialWeights,
    Message,
    ModelExtended,
    Started,
    Status,
    TakenOut,
    WorkerLost,
)
from paceline.core.requests import (
    COORDINATOR,
    AbandonCut,
    Abort,
    Apply,
    CompleteCut,
    Discard,
    EndWithout,
    Fail,
    Host,
    Peer,
    Proceed,
    Request,
    SaveCut,
    TakeCut,
    TakeOut,
    Timer,
    Warn,
    server_peer,
    worker_peer,
)
from paceline.core.server import Server
from paceline.core.worker import EMPTY, Worker
from paceline.errors import ConfigurationError, InternalError, TakenOutError
from paceline.sync.notation import parse_shards
from paceline.sync.translation import Standing

__all__ = [
    "END",
    "MODELS",
    "CoordinatorProcess",
    "Medium",
    "Process",
    "Pushes",
    "ServerProcess",
    "Step",
    "WorkerProcess",
    "incarnation_of",
    "peer_of",
]

Step = tuple[str, ...]
"""What can happen next: a verb, and names of processes or further words."""

END = "the end of the connection"
"""What arrives last on a connection, in place of a message."""

SGD = OptimizerSpec("SGD", ({"lr": 0.1},), (0,))
PARAMETERS = [Parameter((name,), (40,), "float32", index, index) for index, name in enumerate("abc")]
MODELS = [ModelSpec(Layout.of(PARAMETERS[: n + 1]), SGD, (), (SGD,) * n) for n in range(len(PARAMETERS))]
"""The model after each number of extensions."""

ORDER = DataOrder(24, 2, False, "auto", "")
"""The order of an epoch: 24 positions in batches of 2."""


def _name_of(worker: int, incarnation: int) -> str:
    """Return the name of the process of a worker."""
    return f"w{worker}" + incarnation * "'"


def incarnation_of(name: str) -> int:
    """Return how often the index of a worker had been used before."""
    return name.count("'")


def peer_of(name: str) -> Peer:
    """Return the peer whose process has this name."""
    index = name.strip("csw'")
    return COORDINATOR if not index else (worker_peer if name[0] == "w" else server_peer)(int(index))


class Pushes:
    """What stands in place of the tensors of a shard: it remembers which pushes were received, and which are unused.

    Attributes:
        received: the labels of all pushes, as (worker, iteration).
        unused: the pushes with gradients that have been neither applied nor discarded.
        means: the pushes of each update that has used several pushes.
    """

    def __init__(self) -> None:
        self.received: set[tuple[int, int]] = set()
        self.unused: set[tuple[int, int]] = set()
        self.means: list[tuple[tuple[int, int], ...]] = []

    def put(self, worker: int, iteration: int, push: Commit) -> None:
        assert (worker, iteration) not in self.received, f"push {worker}:{iteration} has arrived twice"
        self.received.add((worker, iteration))
        if not push.empty:
            self.unused.add((worker, iteration))

    def apply(
        self,
        pushes: Sequence[tuple[int, int]],
        scales: Sequence[float],
        standing: Standing | None = None,
    ) -> None:
        assert self.unused.issuperset(pushes), (
            f"the pushes {pushes} are applied, but {self.unused} are unused"
        )
        self.unused.difference_update(pushes)
        if len(pushes) > 1:
            self.means.append(tuple(pushes))

    def squared_norm(self, pushes: Sequence[tuple[int, int]], scales: Sequence[float]) -> float:
        return float(len(pushes))

    def overwrite(self, worker: int, iteration: int, number: int) -> None:
        self.apply([(worker, iteration)], [1.0])

    def discard(self, worker: int, iteration: int) -> None:
        self.unused.discard((worker, iteration))

    def preserve(self, worker: int, iteration: int) -> None:
        assert (worker, iteration) in self.unused, f"push {worker}:{iteration} is held, but was used before"


class Medium:
    """The connections between processes, and what the processes of a run share.

    Attributes:
        coordinator: the core of the coordinator.
        first_model: number of the model of `MODELS` with which the scripts begin.
        servers: the processes of the servers.
        workers: name -> process, for the workers that have not ended.
        nodes: name -> process, for all that have not ended.
        now_ticks: the current time. It advances only when a timer fires, or a chooser lets time pass.
        channels: (sender, receiver, number) -> what is in flight, each with the number of its sending. Connections
            between the same two processes are numbered, because a worker connects again when the model is extended.
        timers: (due time, number, timer, who has set it) of each timer.
        taken: the steps that have been taken.
        told: sentences about what has happened, for scripts.
        batches: (worker, iteration) -> the batches of data in this push.
        cuts: the cuts of the run. For each cut, the pushes that all shards contain, and those that some contain.
        over: why the run has ended; "" while it goes on.
    """

    def __init__(self, coordinator: Coordinator, first_model: int) -> None:
        self.coordinator = coordinator
        self.first_model = first_model
        self.servers: list[ServerProcess] = []
        self.workers: dict[str, WorkerProcess] = {}
        self.nodes: dict[str, Process] = {}
        self.now_ticks = 0
        self.channels: dict[Step, deque[tuple[int, Message | str]]] = {}
        self.timers: list[tuple[int, int, Timer, str]] = []
        self.taken: list[Step] = []
        self.told: list[str] = []
        self.batches: dict[tuple[int, int], list[Batch]] = {}
        self.cuts: list[tuple[JobCut, set[tuple[int, int]], set[tuple[int, int]]]] = []
        self.over = ""
        self._sent = 0

    def connect(self, client: str, server: str, hello: Hello) -> None:
        """Open a connection, and send the greeting."""
        number = str(hello.extension)
        self.channels[client, server, number] = deque()
        self.channels[server, client, number] = deque()
        self.post(client, server, hello, number)

    def post(self, sender: str, receiver: str, message: Message | str, number: str = "0") -> None:
        """Send a message. It is lost if the connection is not open."""
        channel = self.channels.get((sender, receiver, number))
        if channel is not None and not (channel and channel[-1][1] is END):
            self._sent += 1
            channel.append((self._sent, message))

    def tell(self, sentence: str) -> None:
        """Note what has happened."""
        self.told.append(sentence)

    def hang_up(self, closer: str, other: str, number: str) -> None:
        """Close a connection: what is in flight to `closer` is lost, and the other side sees the end of it."""
        self.post(closer, other, END, number)
        self.channels.pop((other, closer, number), None)

    def end(self, name: str, *, silent: bool = False) -> None:
        """End a process: what is in flight to it is lost, and the others see the end of its connections."""
        self.nodes.pop(name, None)
        self.workers.pop(name, None)
        self.timers = [each for each in self.timers if each[3] != name]
        for sender, receiver, number in list(self.channels):
            if receiver == name:
                del self.channels[sender, receiver, number]
            elif sender == name and not silent:
                self.post(sender, receiver, END, number)


class Process(Host):
    """A process: its core, and what the host of the core does."""

    core: Any

    def __init__(self, network: Medium, name: str) -> None:
        self.network = network
        self.name = name
        network.nodes[name] = self

    def receive(self, sender: str, number: str, message: Message | str) -> None:
        """Handle what has arrived. Raises `ProtocolError` if it is not allowed."""
        raise NotImplementedError

    def refuse(self, sender: str, number: str) -> None:
        """Close the connection to a process that has sent what is not allowed."""
        raise NotImplementedError

    def set_timer(self, timer: Timer) -> None:
        network = self.network
        network.timers.append((timer.due_ticks, len(network.taken), timer, self.name))


class CoordinatorProcess(Process):
    """The process of the coordinator.

    Attributes:
        names: connected worker or server -> name of its process.
    """

    def __init__(self, network: Medium, core: Coordinator) -> None:
        super().__init__(network, "c")
        self.core: Coordinator = core
        self.names: dict[Peer, str] = {}
        self._saved: tuple[JobCut, set[tuple[int, int]], set[tuple[int, int]]]  # the cut that was made last
        self._refused: set[str] = set()  # processes from which only the end of the connection is awaited

    def receive(self, sender: str, number: str, message: Message | str) -> None:
        core, peer, now_ticks = self.core, peer_of(sender), self.network.now_ticks
        if isinstance(message, Hello):
            requests = core.connected(peer, now_ticks, message.address, message.incarnation)
            self.names[peer] = sender
            self.carry_out(requests)
        elif message is END:
            self._refused.discard(sender)
            if self.names.get(peer) == sender:
                self._disconnect(peer)
            elif peer.role == "worker":
                self.carry_out(core.ended(peer.index, now_ticks, incarnation_of(sender)))
        elif sender not in self._refused:
            assert isinstance(message, Message)
            self.carry_out(core.handle(peer, message, now_ticks))

    def refuse(self, sender: str, number: str) -> None:
        self._refused.add(sender)
        self.network.post(self.name, sender, END)
        if self.names.get(peer := peer_of(sender)) == sender:
            self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        now_ticks = self.network.now_ticks
        del self.names[peer]
        self.carry_out(self.core.disconnected(peer, now_ticks))
        if peer.role == "server":
            self.carry_out(self.core.server_lost(peer.index, "its connection ended"))

    def take_out_worker(self, name: str) -> None:
        """Continue without a worker, unless it has left."""
        peer, core = peer_of(name), self.core
        if core.members.incarnation(peer.index) != incarnation_of(name):
            return
        self.carry_out(core.take_out(peer.index, self.network.now_ticks))
        self.send(peer, TakenOut(peer.index, incarnation_of(name), "it was silent"))
        self.refuse(name, "0")

    def send(self, to: Peer, message: Message) -> None:
        if (name := self.names.get(to)) is not None:
            self.network.post(self.name, name, message)

    def warn(self, warning: Warn) -> None:
        self.network.tell(f"    c warns: {warning.words}")

    def take_out(self, request: TakeOut) -> None:
        self.take_out_worker(self.names[worker_peer(request.worker)])

    def save_cut(self, request: SaveCut) -> None:
        cut, network = request.cut, self.network
        settled = [server.copies[shard, cut.number] for server in network.servers for shard in server.stores]
        versions = " and ".join(str(shard.version) for shard in cut.shards)
        network.tell(f"    cut {cut.number} is complete, with versions {versions}")
        self._saved = cut, set.intersection(*settled), set.union(*settled)

    def complete_cut(self, request: CompleteCut) -> None:
        cut, whole, some = self._saved
        given, present = {worker for worker, _ in request.states}, self.core.members.present
        lacking = {each.worker for each in cut.workers if each.worker in present} - given
        assert cut.number == request.number, (
            f"cut {request.number} is complete, but cut {cut.number} is written"
        )
        assert not lacking, f"cut {cut.number} is complete without the states of workers {lacking}"
        self.network.tell(f"    cut {cut.number} is whole")
        self.network.cuts.append((structs.replace(cut, loop=request.loop), whole, some))

    def abandon_cut(self, request: AbandonCut) -> None:
        self.network.tell(f"    cut {request.number} is abandoned: {request.reason}")

    def end_run(self, failure: Fail) -> None:
        self.network.over = f"{failure.where}: {failure.reason}"
        self.network.tell(f"    the run ends: {self.network.over}")

    def end_without(self, loss: EndWithout) -> None:
        self.end_run(Fail(f"server {loss.server}", loss.reason))


class ServerProcess(Process):
    """The process of a server.

    Attributes:
        stores: shard -> its store.
        origins: shard -> the workers from which its initial weights, and those of each extension, have come.
        copies: (shard, number of a cut) -> the pushes that were neither unused nor yet to be received at the cut.
    """

    def __init__(self, network: Medium, index: int, core: Server) -> None:
        super().__init__(network, f"s{index}")
        self.index = index
        self.core: Server = core
        self.stores: dict[int, Pushes] = {}
        self.origins: dict[int, list[int]] = {}
        self.copies: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._connected: dict[int, tuple[str, str]] = {}  # worker -> name and number of its newest connection
        self._prepared = 0  # number of the last extension for which it has memory
        self._arrived: dict[
            int, int
        ] = {}  # shard -> the worker whose weights for this extension have arrived

    def receive(self, sender: str, number: str, message: Message | str) -> None:
        core, now_ticks, worker = self.core, self.network.now_ticks, peer_of(sender).index
        if sender == "c":
            self._hear_coordinator(message)
        elif isinstance(message, Hello):
            core.require_expected(worker, message.extension, message.incarnation)
            if message.extension > core.extension:
                self._extend()
            self._connected[worker] = sender, number
            self.carry_out(core.connected(worker, now_ticks, message.extension, message.incarnation))
        elif message is END:
            self._disconnect(sender, number)
        else:
            assert isinstance(message, Message)
            if isinstance(message, InitialWeights):
                self._take_weights(worker, message.shard)
            requests = core.handle(worker_peer(worker), message, now_ticks)
            if isinstance(message, Commit):
                self.stores[message.shard].put(worker, message.iteration, message)
            self.carry_out(requests)

    def refuse(self, sender: str, number: str) -> None:
        self.network.hang_up(self.name, sender, number)
        self._disconnect(sender, number)

    def apply(self, update: Apply) -> None:
        pushes = " ".join(f"{worker}:{iteration}" for worker, iteration in update.pushes)
        self.network.tell(f"    shard {update.shard} applies {pushes}")
        super().apply(update)

    def discard(self, push: Discard) -> None:
        self.network.tell(f"    shard {push.shard} drops {push.worker}:{push.iteration}")
        super().discard(push)

    def take_cut(self, request: TakeCut) -> None:
        store = self.stores[request.shard]
        self.network.tell(f"    shard {request.shard} is copied for cut {request.number}")
        self.copies[request.shard, request.number] = store.received - store.unused

    def _hear_coordinator(self, message: Message | str) -> None:
        match message:
            case CreateShards(shards=shards):
                complete = bool(message.resumed) and not message.lacking
                self.stores = {shard.index: Pushes() for shard in shards}
                self.origins = {shard: [message.initializer] if complete else [] for shard in self.stores}
            case ExtendShards(number=number):
                complete = bool(message.resumed) and not message.lacking
                arrived = dict.fromkeys(self.stores, message.initializer) if complete else {}
                self._prepared, self._arrived = number, arrived
            case ModelExtended():
                self._extend()
            case WorkerLost(at_once=True):
                name, connection = self._connected.get(message.worker, ("", ""))
                if name == _name_of(message.worker, message.incarnation):
                    self.refuse(name, connection)
            case str():
                self.network.end(self.name)
                return
        assert isinstance(message, Message)
        self.carry_out(self.core.handle(COORDINATOR, message, self.network.now_ticks))

    def _take_weights(self, worker: int, shard: int) -> None:
        self.core.require_beginning(shard, worker)
        if self._prepared:
            self._arrived[shard] = worker
        else:
            self.origins[shard].append(worker)

    def _extend(self) -> None:
        """Store the extended model from now on, unless this has been done already."""
        for shard, origins in self.origins.items():
            if len(origins) <= self._prepared:
                assert shard in self._arrived, f"the initial weights of shard {shard} have not arrived"
                origins.append(self._arrived[shard])

    def _disconnect(self, sender: str, number: str) -> None:
        worker = peer_of(sender).index
        if self._connected.get(worker) == (sender, number):
            del self._connected[worker]
            self.carry_out(self.core.disconnected(worker, self.network.now_ticks))

    def send(self, to: Peer, message: Message) -> None:
        if to is COORDINATOR:
            self.network.post(self.name, "c", message)
        elif to.index in self._connected:
            name, number = self._connected[to.index]
            self.network.post(self.name, name, message, number)


class WorkerProcess(Process):
    """The process of a worker, and what its script does next.

    Attributes:
        index: index of the worker.
        number: number of its newest connection to each server; -1 if it has none.
        calling: "call" while the script waits in a call of all workers, and "connecting" while the worker connects
            again after an extension; else "".
    """

    def __init__(
        self, network: Medium, index: int, incarnation: int, core: Worker, script: Sequence[str]
    ) -> None:
        super().__init__(network, _name_of(index, incarnation))
        self.index = index
        self.core: Worker = core
        # number of the extension in force when it registers its model
        self._extension = network.coordinator.reconfigurations.extensions
        self.number = -1
        self.calling = ""
        self._script = deque(script)
        self._incarnation = incarnation
        self._epoch = -1
        self._drawn: list[Batch] = []  # the batches of the next push

    def __str__(self) -> str:
        core = self.core
        others = {"the others": self.calling, "data": core.data.waiting, "the end of the pause": core.paused}
        waits = core.waiting_for or next((what for what, true in others.items() if true), "nothing")
        return f"{self.name} waits for {waits} in iteration {core.iteration}"

    def start(self) -> None:
        """Connect to the coordinator, and register the model of the run."""
        hello = Hello("", "worker", self.index, incarnation=self._incarnation)
        self.network.connect(self.name, "c", hello)
        self.carry_out(self.core.register(MODELS[self.network.first_model + self._extension]))

    # -- what it does -------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if the script goes on: it waits neither for weights, nor in a call, nor for data."""
        core = self.core
        waits = core.waiting_for or core.paused or self.calling or core.data.waiting
        return core.started is not None and not waits

    @property
    def may_stand_in(self) -> bool:
        """True if the worker may push without a gradient, because its script waits in a call."""
        return self.calling == "call" and not self.core.waiting_for and self.core.may_stand_in

    def next_steps(self) -> list[Step]:
        """Return what the worker may do next."""
        if not self.idle:
            return []
        steps: list[Step] = [("again", self.name)] if self.core.restart_ordered else []
        if self._script:
            verb, *words = self._script[0].split()
            steps.append((verb, self.name, *words))
        return steps

    def act(self, verb: str, *words: str) -> None:
        """Do something that the script asks for.

        Raises:
            ValueError: the script waits.
        """
        if not (self.may_stand_in if verb == "stand-in" else self.idle):
            raise ValueError(f"{self}, so it cannot {verb}")
        if self._script and self._script[0].split() == [verb, *words] and verb != "epoch":
            self._script.popleft()
        self._give_state()
        self.VERBS[verb](self, *words)

    def push(self) -> None:
        """Push a gradient."""
        self._push(self.core.push())

    def skip(self) -> None:
        """Push without a gradient."""
        self._push(self.core.push(EMPTY))

    def stand_in(self) -> None:
        """Push without a gradient, while the script waits in a call."""
        self.carry_out(self.core.stand_in())

    def restart(self) -> None:
        """Abort the iteration, and pull again."""
        self.carry_out(self.core.pull_again())

    def change(self, sync: str) -> None:
        """Request another sync model."""
        self.carry_out(self.core.request_sync(parse_shards(sync)))

    def extend(self, number: str) -> None:
        """Propose an extended model, unless it is in force."""
        if self.network.first_model + self.core.extension < int(number):
            self.calling = "call"
            self.carry_out(self.core.propose(MODELS[int(number)]))

    def barrier(self) -> None:
        """Wait in a barrier."""
        self.calling = "call"
        self.carry_out(self.core.contribute("barrier()", "sum", b"", 1.0))

    def train(self, epoch: str) -> None:
        """Begin an epoch of the data, push the gradient of its next batch, or request more data.

        "again" stands for the positions that others have returned after the last epoch.
        """
        data, number = self.core.data, -2 if epoch == "again" else int(epoch)
        if number != self._epoch:
            self._epoch = number
            if number >= 0:
                self.core.reach_epoch(number)
            self.carry_out(data.begin(0, "data", number, ORDER) if number >= 0 else data.reopen())
        elif (batch := data.take(0)) is not None:
            data.draw(0, batch.size, batch.size)
            self._drawn.append(batch)
            self.push()
        elif data.ended(0):
            self._script.popleft()
        else:
            self.carry_out(data.request(0))

    def finish(self) -> None:
        """Leave the run, and end the process."""
        self.carry_out(self.core.finish())
        self.network.end(self.name)

    VERBS: ClassVar[dict[str, Callable[..., None]]] = {
        "push": push,
        "skip": skip,
        "stand-in": stand_in,
        "again": restart,
        "change": change,
        "extend": extend,
        "barrier": barrier,
        "epoch": train,
        "finish": finish,
    }
    """What a worker can do, and the method that does it."""

    def _push(self, requests: Sequence[Request]) -> None:
        self.network.batches[self.index, self.core.iteration] = self._drawn
        self._drawn = []
        self.carry_out(requests)

    # -- what it hears ------------------------------------------------------------------------------------

    def receive(self, sender: str, number: str, message: Message | str) -> None:
        if message is END:
            if sender != "c" and int(number) < self.number:
                return  # a former connection
            self.send(COORDINATOR, Failed(f"{sender} has ended the connection", "", consequence=True))
            self.network.end(self.name)
            return
        assert isinstance(message, Message)
        try:
            requests = self.core.handle(message)
        except (ConfigurationError, TakenOutError) as error:
            self.network.tell(f"    {self.name} ends: {error}")
            self.network.end(self.name)
            return
        if isinstance(message, Started):
            assert message.extension == self._extension, (
                f"{self.name} has registered its model with extension {self._extension}, but extension "
                f"{message.extension} is in force"
            )
            self._connect()
            if message.initializer == self.index:
                self.carry_out(self.core.initialize())
        self.carry_out(requests)
        if self.calling == "call" and not self.core.waiting_for:
            self._give_state()
            self._end_call()

    def _give_state(self) -> None:
        """Give what the script holds, if it is wanted. The script is between two iterations, or in a call."""
        if self.core.cut:
            self.send(COORDINATOR, self.core.give_state())

    def refuse(self, sender: str, number: str) -> None:
        raise InternalError(f"{self.name} cannot refuse {sender}")

    def _connect(self) -> None:
        """Connect to all servers."""
        self.number = self.core.extension
        for server in self.network.servers:
            hello = Hello("", "worker", self.index, extension=self.number, incarnation=self._incarnation)
            self.network.connect(self.name, server.name, hello)

    def _end_call(self) -> None:
        """Go on if the call of all workers has ended. If it was an extension, connect to the servers again."""
        if self.core.extended is not None:
            self.calling = "connecting"
            self.core.await_extended_weights()
            self._connect()
        elif self.core.combined is not None:
            self.calling = ""

    def send(self, to: Peer, message: Message) -> None:
        if to is COORDINATOR:
            self.network.post(self.name, "c", message)
        else:
            self.network.post(self.name, f"s{to.index}", message, str(self.number))

    def proceed(self, request: Proceed) -> None:
        if self.calling == "connecting":
            self.calling = ""
            for server in self.network.servers:
                lengths = {shard: len(origins) - 1 for shard, origins in server.origins.items()}
                assert set(lengths.values()) == {self.number}, f"the shards have {lengths} extensions"
                for number in range(self.number):
                    self.network.hang_up(self.name, server.name, str(number))
        elif self.core.last_commit is None:
            self.send(COORDINATOR, Status(self.core.iteration, None, "computing"))
        self.network.tell(f"    {self.name} goes on with iteration {self.core.iteration}")

    def abort(self, request: Abort) -> None:
        """Do nothing: the worker may push, or abort its iteration, as `next_steps` says."""
