"""The machines that have joined a run, as the host of the coordinator knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..core.machines.liveness import SILENCE_S, Liveness
from ..core.status.job_status import MachineStatus
from ..sync.ticks import TICKS_PER_S

__all__ = ["Machines"]


class Machines:
    """The machines that have joined a run, each with an agent that has connected to the coordinator.

    Attributes:
        workers: index of a machine's agent -> the machine's workers, each with its incarnation; {} until the machine
            has been admitted.
        servers: index of a machine's agent -> the servers that the machine has brought.
        names: index of the agent of an admitted machine -> name of the machine: its address, with a number if several
            agents have this address.
        liveness: decides from the agents' heartbeats which machines and workers are taken out.
    """

    def __init__(self) -> None:
        self.workers: dict[int, dict[int, int]] = {}
        self.servers: dict[int, set[int]] = {}
        self.liveness = Liveness()
        self.names: dict[int, str] = {}

    def add(self) -> int:
        """Return the index of the agent of a new machine."""
        agent = len(self.workers)
        self.workers[agent], self.servers[agent] = {}, set()
        return agent

    def admit(
        self, agent: int, address: str, workers: Mapping[int, int], servers: Iterable[int], now_ticks: int
    ) -> None:
        """Record that a machine with this address runs these processes from now on, besides those that it had."""
        if agent not in self.names:
            same = sum(name.partition(" ")[0] == address for name in self.names.values())
            name = self.names[agent] = f"{address} ({same + 1})" if same else address
            self.liveness.machine_joined(agent, name, now_ticks)
        self.workers[agent].update(workers)
        self.servers[agent].update(servers)
        for worker, incarnation in workers.items():
            self.liveness.worker_joined(worker, incarnation)

    @property
    def machine_of(self) -> dict[int, str]:
        """Worker -> name of its machine."""
        newest: dict[int, tuple[int, int]] = {}  # worker -> (its incarnation, its agent)
        for agent, workers in self.workers.items():
            for worker, incarnation in workers.items():
                newest[worker] = max(newest.get(worker, (-1, -1)), (incarnation, agent))
        return {worker: self.names[agent] for worker, (_, agent) in newest.items()}

    @property
    def machine_of_server(self) -> dict[int, str]:
        """Server that a machine has brought -> name of the machine."""
        return {server: self.names[agent] for agent, servers in self.servers.items() for server in servers}

    def agents_of(self, role: str, index: int) -> list[int]:
        """Return the agents that have started an incarnation of a worker, or a server."""
        started = self.servers if role == "server" else self.workers
        return [agent for agent, indices in started.items() if index in indices]

    def statuses(self, now_ticks: int) -> tuple[MachineStatus, ...]:
        """Return, for each machine, how long it has been silent."""
        servers: dict[str, list[int]] = {}
        for server, name in sorted(self.machine_of_server.items()):
            servers.setdefault(name, []).append(server)
        silent_s = {name: ticks / TICKS_PER_S for name, ticks in self.liveness.silences(now_ticks).items()}
        return tuple(
            MachineStatus(name, each_s, each_s / float(SILENCE_S), tuple(servers.get(name, ())))
            for name, each_s in silent_s.items()
        )
