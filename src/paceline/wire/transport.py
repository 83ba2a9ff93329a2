"""What a run asks of a transport: to connect its processes, and to place the memory of its workers.

A transport is a subclass of `Transport` in a file of its own: `shm`, `unix` or `tcp`. `addresses` has the table of
all transports. No other code tells them apart by their names: it asks for the attributes below. So a new transport is
a class and a row of this table.

Messages travel over the connections in frames (see `stream`). What a transport costs in memory and descriptors
follows from `shares_memory`; see `paceline.runtime.footprint`.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from typing import ClassVar

from ..core.protocol.layout import Layout
from .memory import Region
from .passing import Source
from .secure import SecureSocket
from .tls import Contexts

__all__ = ["BACKLOG", "QUEUE_INTERVAL_S", "Transport"]

BACKLOG = 1024
QUEUE_INTERVAL_S = 0.01
"""Time between two attempts to connect while the listener's queue is full."""


class Transport(ABC):
    """A way in which the processes of a run are connected.

    Attributes:
        name: the name by which users choose it.
        words: what it is, for users.
        kinds: the kinds of its addresses: the parts in front of the first colon.
        shares_memory: True if servers map the memory of workers, whose descriptors its connections pass. Then
            gradients and weights do not travel.
        spans_machines: True if the processes may run on several machines. Then it has hosts and ports.
        needs: what it needs of the system, for users; "" if every system has it.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    shares_memory: ClassVar[bool] = False
    spans_machines: ClassVar[bool] = False
    needs: ClassVar[str] = ""

    def available(self) -> bool:
        """Return True if this system has what the transport needs."""
        return True

    @abstractmethod
    def listen(self, host: str = "127.0.0.1", port: int = 0, *, secure: bool = False) -> tuple[Source, str]:
        """Return what accepts new connections, without blocking, and its address.

        Args:
            host: address of this machine, if the transport spans machines.
            port: port, if the transport spans machines; 0 for any free port.
            secure: True if the address says that the connections use TLS. What listens does not encrypt anything.

        Raises:
            ConfigurationError: the port is in use or not permitted, the host is not an address of this machine, or
                this process cannot listen at all.
        """

    @abstractmethod
    def connect(self, address: str, timeout_s: float, known: Contexts | None) -> socket.socket | SecureSocket:
        """Return a connection to an address of this transport. See `addresses.connect`.

        Raises:
            OSError: no connection was made within `timeout_s`.
            ProtocolError: the process that listens there is not one of the run.
        """

    def place(self, layout: Layout, *, servers: int, offered: bool, name: str) -> Region:
        """Return new memory for the weights and gradients of a worker.

        Args:
            layout: layout of the model.
            servers: number of servers, with each of which the worker may exchange messages through the memory.
            offered: True if servers on this machine may find the memory, although its descriptor is not passed.
            name: name of the memory, by which they recognize it.
        """
        return Region.create(layout, shared=offered, name=name)

    def is_here(self, address: str) -> bool:
        """Return True if an address belongs to this machine."""
        return True

    def seen_from(self, address: str, reached: str) -> str:
        """Return an address as another process sees it. See `addresses.seen_from`."""
        return address
