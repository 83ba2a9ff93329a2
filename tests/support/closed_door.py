"""A host whose door is closed, polled by hand, and a relay that records what passes between two machines."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from paceline.core.messages import Hello, Message, WorkerFinished, first_phase
from paceline.errors import PacelineError
from paceline.run.hub import Caller, Hub
from paceline.run.listener import Listener
from paceline.wire.memory import PassedSockets
from paceline.wire.preface import ANY_RUN, COORDINATOR
from paceline.wire.secure import SecureSocket, contexts, new_secret
from paceline.wire.stream import Stream
from paceline.wire.transports import TCP, connect

__all__ = ["House", "relay"]

KNOWN = contexts(new_secret())

SNAPSHOTS = first_phase("server", "reader")

DEADLINE_S = 60.0


class House:
    """A host behind a listener and TLS, which is polled by hand."""

    def __init__(self, named: int = COORDINATOR, expected: bytes = ANY_RUN, mark: bytes = ANY_RUN) -> None:
        """Let the listener expect this target and the mark `expected`, and the host `mark`."""
        self.known = KNOWN._replace(mark=mark)
        sock, self.address = TCP.listen(secure=True)
        self.listener = Listener(sock, expected).__enter__()
        passed = PassedSockets(self.listener.receiver(named))
        self.hub: Hub[Caller] = Hub("the host", "token", passed, "server", Caller, self, self.known)
        self.heard: list[Message] = []
        self.callers: list[socket.socket | SecureSocket | Stream[Message]] = []

    def greeted(self, peer: Caller, hello: Hello) -> None:
        peer.role, peer.index = hello.role, hello.index

    def received(self, peer: Caller, message: Message) -> None:
        self.heard.append(message)

    def payload_targets(self, peer: Caller, message: Message, size_bytes: int) -> Sequence[memoryview]:
        return []

    def gone(self, peer: Caller, reason: str) -> None:
        pass

    def knock(self, said: bytes = b"") -> socket.socket:
        """Connect without TLS, and send some bytes."""
        _, host, port = self.address.split(":")
        caller = socket.create_connection((host, int(port)))
        self.callers.append(caller)
        caller.sendall(said)
        return caller

    def enter(self, worker: int = 0) -> Stream[Message]:
        """Connect as a member does."""
        stream: Stream[Message] = Stream(self.meanwhile(lambda: connect(self.address, 20, KNOWN)), SNAPSHOTS)
        self.callers.append(stream)
        stream.send(Hello("token", "worker", worker))
        stream.send(WorkerFinished())
        return stream

    def meanwhile(self, act: Callable[[], socket.socket | SecureSocket]) -> socket.socket | SecureSocket:
        """Act on another thread while the host serves its connections."""
        results: list[socket.socket | SecureSocket | PacelineError] = []

        def body() -> None:
            try:
                results.append(act())
            except PacelineError as error:
                results.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        self.poll_until(lambda: bool(results))
        thread.join()
        if isinstance(results[0], PacelineError):
            raise results[0]
        return results[0]

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            self.hub.poll(0.01)
            assert time.monotonic() < deadline_s

    def close(self) -> None:
        self.listener.__exit__(None, None, None)
        self.hub.close()
        for caller in self.callers:
            caller.close()


def relay(source: socket.socket, target: socket.socket, recorded: bytearray) -> None:
    """Pass on what arrives, until the connection is closed."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            recorded += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
