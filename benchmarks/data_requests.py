"""Measures which share of a core a coordinator uses to answer workers that request data.

The load is measured for the coordinator's state machine with the decoding and encoding of its messages, for a whole
coordinator with one socket per worker, and for a loop that receives the same requests and answers them with the same
bytes every time. This loop shows how much time the system calls alone take.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import ExitStack, closing
from itertools import count
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from paceline.core.coordinator import Coordinator
from paceline.core.data_feed import DataFeed
from paceline.core.lease import DataOrder, Lease
from paceline.core.messages import DataGranted, Hello, Message, Phase, first_phase
from paceline.core.requests import Request, Send, worker_peer
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job_options import make_job
from paceline.sync.schedule import read_schedule
from paceline.sync.ticks import in_ticks
from paceline.wire.stream import BUFFER_BYTES, MAGIC, PREFIX, Stream, decoder
from paceline.wire.transports import UNIX, connect

from .crowd import allow_descriptors, beside, load_of

CLIENTS = 2  # number of processes, among which the workers are divided
ROUNDS = 5
SECONDS = 5.0
GREETING_TIMEOUT_S = 60.0
# The epoch is so long that it does not end during the measurement.
ORDER = DataOrder(2**50, 16, True, "dynamic", "0123456789abcdef")
NAME = "train.py:35#0"


class RequestsRow(msgspec.Struct, frozen=True):
    """The load of a coordinator."""

    measured: str  # what was measured
    workers: int
    rate: float  # number of requests per second that were answered; 0 if requests followed each other without a pause
    request_us: float  # processor time per request


class Asker:
    """A worker that only requests data and uses up what it receives."""

    def __init__(self) -> None:
        self._feed = DataFeed()

    def begin(self) -> Message:
        """Return the first request."""
        return _message(self._feed.begin(0, NAME, 0, ORDER))

    def use(self, granted: DataGranted) -> Message:
        """Use all batches of an answer, and return the next request."""
        self._feed.handle(granted)
        while self._feed.take(0) is not None:
            self._feed.draw(0, ORDER.batch, ORDER.batch)
        requests = self._feed.push()
        self._feed.answered()
        return _message(requests)


def _message(requests: list[Request]) -> Message:
    [request] = requests
    assert isinstance(request, Send)
    return request.message


def ask_core(workers: int, rate: float) -> RequestsRow:
    """Measure the processor time of the state machine, and of the decoding and encoding of its messages."""
    core = Coordinator(read_schedule("asp"), workers=workers, servers=1, shards=1)
    askers = [Asker() for _ in range(workers)]
    encoder = msgspec.msgpack.Encoder()
    decode = decoder(Phase("worker", "coordinator", "training"))
    client_decode = decoder(first_phase("coordinator", "worker"))
    peers = [worker_peer(worker) for worker in range(workers)]
    for peer in peers:
        core.connected(peer, 0)
    requests = [encoder.encode(asker.begin()) for asker in askers]
    rounds_us = []
    # In the first rounds, the coordinator does not know the workers' times per batch yet, so these rounds are not
    # measured.
    for number in range(ROUNDS + 3):
        answers = []
        begun_s = time.thread_time()
        for worker, request in enumerate(requests):
            now_ticks = in_ticks((number + worker / workers) / rate)
            [answer] = core.handle(peers[worker], decode(request), now_ticks)
            assert isinstance(answer, Send)
            answers.append(encoder.encode(answer.message))
        rounds_us.append(1e6 * (time.thread_time() - begun_s) / workers)
        requests = [
            encoder.encode(asker.use(client_decode(answer)))
            for asker, answer in zip(askers, answers, strict=True)
        ]
    return RequestsRow("state machine, decoding and encoding", workers, 0.0, median(rounds_us[3:]))


def ask_host(workers: int, rate: float, seconds: float = SECONDS) -> RequestsRow:
    """Measure the processor time of a coordinator whose workers are sockets of two other processes.

    Raises:
        ConfigurationError: this process may not open enough sockets.
    """
    allow_descriptors(workers)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        # `make_job` gets one worker, because it checks the memory for all workers, but no process trains here.
        job = make_job(workers=1, servers=1, sync="asp", transport="unix", run_dir=f"{folder}/run")
        job = msgspec.structs.replace(job, workers=workers)
        coordinator = CoordinatorHost.listen(job)
        coordinator.start()
        stack.callback(coordinator.stop)
        request_us, reached = _load(
            coordinator._thread, coordinator.address, job.token, workers, rate, seconds
        )
    return RequestsRow("whole coordinator, one socket per worker", workers, reached, request_us)


def ask_floor(workers: int, rate: float, seconds: float = SECONDS) -> RequestsRow:
    """Measure the processor time of a loop that receives the requests, ignores them, and sends a constant answer.

    Raises:
        ConfigurationError: this process may not open enough sockets.
    """
    allow_descriptors(workers)
    listener, address = UNIX.listen()
    stop, stopping = socket.socketpair()
    thread = threading.Thread(target=_answer_all, args=(listener, workers, stopping))
    thread.start()
    try:
        request_us, reached = _load(thread, address, "", workers, rate, seconds)
    finally:
        stop.close()
        thread.join()
        stopping.close()
    return RequestsRow("system calls only, one socket per worker", workers, reached, request_us)


def _answer_all(listener: socket.socket, workers: int, stopping: socket.socket) -> None:
    """Accept connections, and then send the same bytes for each request, until the other end of `stopping` closes."""
    answer = msgspec.msgpack.encode(DataGranted(0, 0, (Lease(0, 0, ORDER.batch, ORDER.batch, 1),), False))
    frame = PREFIX.pack(MAGIC, len(answer), 0) + answer
    buffer = bytearray(BUFFER_BYTES)
    with ExitStack() as stack:
        stack.enter_context(listener)
        listener.setblocking(True)
        selector = stack.enter_context(closing(selectors.DefaultSelector()))
        selector.register(stopping, selectors.EVENT_READ)
        for _ in range(workers):
            sock = stack.enter_context(listener.accept()[0])
            hello: Stream[Message] = Stream(sock, first_phase("worker", "coordinator"))
            hello.wait(GREETING_TIMEOUT_S)
            selector.register(sock, selectors.EVENT_READ, sock)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return
                try:
                    key.data.recv_into(buffer)
                    key.data.send(frame)
                except ConnectionError:  # the workers leave at the end
                    selector.unregister(key.data)


def _load(
    thread: threading.Thread, address: str, token: str, workers: int, rate: float, seconds: float
) -> tuple[float, float]:
    """Let workers in other processes request data at an address, and measure the thread that answers them.

    Returns:
        The processor time per request in microseconds, and the number of answered requests per second.
    """
    with ExitStack() as stack:
        shares = [range(first, workers, CLIENTS) for first in range(min(CLIENTS, workers))]
        pipes = [beside(stack, _ask, address, token, share, rate) for share in shares]
        for pipe in pipes:
            pipe.recv()  # the connections have been made
        for pipe in pipes:
            pipe.send(None)
        requests_us, rates = [], []
        time.sleep(min(1.0, seconds))
        for _ in range(ROUNDS):
            before = _answered(pipes)
            load = load_of(thread, seconds)
            answered = _answered(pipes) - before
            requests_us.append(1e6 * load.used_s / max(answered, 1))
            rates.append(answered / load.elapsed_s)
    return median(requests_us), median(rates)


def _answered(pipes: list[Any]) -> int:
    """Return how many requests have been answered so far."""
    for pipe in pipes:
        pipe.send(None)
    return sum(pipe.recv() for pipe in pipes)


def _ask(address: str, token: str, workers: range, rate: float, pipe: Any) -> None:
    """Act as several workers until the pipe is closed. This function runs in a process of its own."""
    allow_descriptors(len(workers))
    with ExitStack() as stack:
        selector = stack.enter_context(closing(selectors.DefaultSelector()))
        selector.register(pipe, selectors.EVENT_READ)
        askers = [Asker() for _ in workers]
        streams: list[Stream[Any]] = []
        messages: list[Message | None] = []
        for place, worker in enumerate(workers):
            stream: Stream[Any] = Stream(connect(address), first_phase("coordinator", "worker"))
            stack.callback(stream.close)
            stream.send(Hello(token, "worker", worker))
            selector.register(stream, selectors.EVENT_READ, place)
            streams.append(stream)
            messages.append(askers[place].begin())
        pipe.send(None)
        pipe.recv()
        answered = 0
        begun_s = time.monotonic()
        interval_s = 1 / (rate * len(workers))
        for number in count():
            place = number % len(workers)
            # A worker whose last request has not been answered yet waits for its next turn.
            if (message := messages[place]) is not None:
                messages[place] = None
                streams[place].send(message)
            while (left_s := begun_s + (number + 1) * interval_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    if key.data is None:
                        try:
                            pipe.recv()
                        except EOFError:
                            return
                        pipe.send(answered)
                        continue
                    for granted in streams[key.data].receive():
                        messages[key.data] = askers[key.data].use(granted)
                        answered += 1
