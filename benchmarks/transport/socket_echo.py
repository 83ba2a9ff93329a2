"""The system `socket`: servers that receive gradients over TCP on loopback, apply SGD and send weights."""

from __future__ import annotations

import select
import selectors
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .plan import LR, WARM_UP, Figures, Turn, elements, lengths
from .rendezvous import await_until, meet, publish
from .timing import Flat, median_s

__all__ = ["echo_server", "echo_worker"]


def echo_worker(turn: Turn, index: int, out: Path) -> Figures:
    """In each iteration, compute a gradient, send a slice to each server and receive the same slice of the weights.

    A worker sends to the servers in a fixed order and receives from them in any order. If a send blocks, the server
    is waiting for another worker, and that worker can only be sending to a server that comes later in the order.
    Therefore, the processes cannot deadlock, even if kernel buffers are small.
    """
    length = elements(turn.size_mb)
    model = Flat(turn.size_mb, index)
    gradient, weights = torch.zeros(length), torch.zeros(length)
    places = gradient.split(lengths(turn.size_mb))
    slices = _slices(length, turn.servers)
    outgoing = [_bytes_of(gradient[part]) for part in slices]
    incoming = [_bytes_of(weights[part]) for part in slices]
    streams = [_dial(out, server) for server in range(turn.servers)]

    def step() -> None:
        model.compute()
        model.copy_gradients(places)
        for stream, view in zip(streams, outgoing, strict=True):
            stream.sendall(view)
        awaited = dict(zip(streams, incoming, strict=True))
        while awaited:
            for stream in select.select(awaited, (), ())[0]:
                _receive(stream, awaited.pop(stream))

    meet(out, "before", index, turn.workers)
    step_s = median_s(step, turn.iterations)
    meet(out, "after", index, turn.workers)  # servers fail if a worker closes its connection too early
    return {turn.cases[0].mode: step_s}


def echo_server(turn: Turn, index: int, out: Path) -> None:
    """Hold a slice of the weights. Answer pushes immediately (ASP), or all pushes of an iteration together (BSP)."""
    part = _slices(elements(turn.size_mb), turn.servers)[index]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        publish(out, f"port-{index}", str(listener.getsockname()[1]))
        streams = [listener.accept()[0] for _ in range(turn.workers)]
    poll = selectors.DefaultSelector()
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(stream, selectors.EVENT_READ)
    echo = _echo_each if turn.cases[0].mode == "asp" else _echo_all
    echo(streams, poll, part.stop - part.start, WARM_UP + turn.iterations)


def _echo_each(
    streams: Sequence[socket.socket], poll: selectors.BaseSelector, length: int, exchanges: int
) -> None:
    """Serve one worker at a time: receive its gradient, apply SGD, send the weights."""
    gradient, weights = torch.zeros(length), torch.zeros(length)
    incoming, outgoing = _bytes_of(gradient), _bytes_of(weights)
    remaining = exchanges * len(streams)
    while remaining:
        for stream in _readable(poll):
            _receive(stream, incoming)
            weights.add_(gradient, alpha=-LR)
            stream.sendall(outgoing)
            remaining -= 1


def _echo_all(
    streams: Sequence[socket.socket], poll: selectors.BaseSelector, length: int, exchanges: int
) -> None:
    """Receive the gradients of all workers, apply SGD with their mean, and send the weights to each worker."""
    gradients = [torch.zeros(length) for _ in streams]
    weights = torch.zeros(length)
    incoming = dict(zip(streams, map(_bytes_of, gradients), strict=True))
    outgoing = _bytes_of(weights)
    for _ in range(exchanges):
        missing = len(streams)
        while missing:
            for stream in _readable(poll):
                _receive(stream, incoming[stream])
                missing -= 1
        for other in gradients[1:]:
            gradients[0].add_(other)
        weights.add_(gradients[0], alpha=-LR / len(streams))
        for stream in streams:
            stream.sendall(outgoing)


def _readable(poll: selectors.BaseSelector) -> Iterator[socket.socket]:
    for key, _ in poll.select():
        assert isinstance(key.fileobj, socket.socket)
        yield key.fileobj


def _slices(length: int, servers: int) -> list[slice]:
    """Return slices that cut a vector into nearly equal parts, one for each server."""
    return [slice(length * i // servers, length * (i + 1) // servers) for i in range(servers)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the tensor's memory."""
    return tensor.numpy().data.cast("B")


def _dial(out: Path, server: int) -> socket.socket:
    await_until(lambda: Path(out, f"port-{server}").exists(), f"server {server} to listen")
    stream = socket.create_connection(("127.0.0.1", int(Path(out, f"port-{server}").read_text())))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _receive(stream: socket.socket, view: memoryview) -> None:
    """Fill the whole view."""
    while view:
        count = stream.recv_into(view)
        if not count:
            raise ConnectionError("the peer has closed the connection")
        view = view[count:]
