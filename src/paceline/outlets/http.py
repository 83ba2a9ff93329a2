"""A small HTTP server for a few readers, which strangers can neither fill nor keep busy. h11 parses the requests.

A connection belongs to a *stranger* until a request on it has shown the token; from then on to a *guest*. If there is
no token, all are strangers. These limits hold:

- At most `MOST_STRANGERS` connections are strangers'. When there are more, a new one takes the place of the oldest,
  but only after this one has had `GREETING_S` to send its request. Others wait in the system's queue.
- A stranger has `REQUEST_S` for a whole request, however slowly its bytes arrive, and gets one answer: then the
  connection is closed.
- After each connection of a stranger, no other one is accepted for `REFUSAL_S`. So a flood of requests costs this
  process a few percent of a core, and guests, who keep their connections, do not notice it.
- At most `MOST_GUESTS` connections are guests'. A guest that is silent for `GUEST_S`, or does not take its answer
  within `GUEST_S`, is dropped.
- The head of a request has at most `HEAD_BYTES`. Bodies are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import h11

from .door import HARDENING, Answer, Door, Request

__all__ = ["HttpServer"]

log = logging.getLogger("paceline.outlets")

MOST_STRANGERS = 32
MOST_GUESTS = 32
GREETING_S = 0.25
REQUEST_S = 5.0
REFUSAL_S = 0.01
GUEST_S = 60.0
HEAD_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024

Reply = Callable[[Request], Awaitable[Answer]]


class HttpServer:
    """Serves one socket.

    Args:
        sock: a listening socket that does not block. The server takes ownership.
        door: decides who is let in.
        reply: returns the answer to a request that was let in.
    """

    def __init__(self, sock: socket.socket, door: Door, reply: Reply) -> None:
        self._sock = sock
        self._door = door
        self._reply = reply
        self._strangers: dict[asyncio.Task[None], float] = {}  # with the time of their arrival, oldest first
        self._guests: set[asyncio.Task[None]] = set()
        self._rests_until_s = 0.0

    async def serve(self) -> None:
        """Serve until this task is cancelled. All connections are closed then."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._make_room()
                try:
                    sock, _ = await loop.sock_accept(self._sock)
                except OSError as error:  # no descriptor is free, or the peer has gone already
                    log.debug("a connection could not be accepted: %s", error)
                    await asyncio.sleep(GREETING_S)
                    continue
                task = loop.create_task(self._attend(sock))
                self._strangers[task] = loop.time()
                task.add_done_callback(self._forget)
        finally:
            tasks = [*self._strangers, *self._guests]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sock.close()

    async def _make_room(self) -> None:
        """Wait until another connection may be accepted, and drop the oldest stranger if it is in the way."""
        loop = asyncio.get_running_loop()
        if (rest_s := self._rests_until_s - loop.time()) > 0:
            await asyncio.sleep(rest_s)
        while len(self._strangers) >= MOST_STRANGERS:
            oldest, since_s = next(iter(self._strangers.items()))
            if (left_s := since_s + GREETING_S - loop.time()) > 0:
                await asyncio.wait([oldest], timeout=left_s)
            oldest.cancel()
            await asyncio.wait([oldest])

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Note the end of a connection."""
        if task in self._strangers:
            self._rests_until_s = asyncio.get_running_loop().time() + REFUSAL_S
        self._strangers.pop(task, None)
        self._guests.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection has failed", exc_info=error)

    def _welcome(self) -> bool:
        """Note that the current connection is a guest's. Return False if there are too many guests."""
        task = asyncio.current_task()
        assert task is not None
        if task not in self._guests:
            if len(self._guests) >= MOST_GUESTS:
                return False
            self._strangers.pop(task, None)
            self._guests.add(task)
        return True

    async def _attend(self, sock: socket.socket) -> None:
        """Answer the requests on one connection."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        with sock, contextlib.suppress(TimeoutError, ConnectionError):
            while True:
                patience_s = GUEST_S if asyncio.current_task() in self._guests else REQUEST_S
                try:
                    async with asyncio.timeout(patience_s):
                        request = await _receive(sock, parser)
                except h11.RemoteProtocolError as error:
                    await _refuse(sock, parser, HTTPStatus(error.error_status_hint))
                    return
                if request is None:
                    return
                answer = self._door.answer(request)
                if answer is None and self._door.token and not self._welcome():
                    answer = Answer.text(
                        HTTPStatus.SERVICE_UNAVAILABLE, "Too many browsers have this page open."
                    )
                if answer is None:
                    answer = await self._answer(request)
                is_guest = asyncio.current_task() in self._guests
                async with asyncio.timeout(GUEST_S if is_guest else REQUEST_S):
                    await _send(sock, parser, request, answer, close=not is_guest)
                if not is_guest or parser.our_state is h11.MUST_CLOSE:
                    return
                try:
                    parser.start_next_cycle()
                except h11.LocalProtocolError:  # the peer has closed the connection
                    return

    async def _answer(self, request: Request) -> Answer:
        """Return the answer to a request that was let in, also if this fails."""
        try:
            return await self._reply(request)
        except Exception as error:
            log.exception("a request for %s has failed", request.path)
            return Answer.text(HTTPStatus.INTERNAL_SERVER_ERROR, f"This has failed: {error!r}")


async def _receive(sock: socket.socket, parser: h11.Connection) -> Request | None:
    """Return the next request; None if the peer has closed the connection.

    Raises:
        h11.RemoteProtocolError: the request is malformed, has a body, or is too large.
    """
    loop = asyncio.get_running_loop()
    head: h11.Request | None = None
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(await loop.sock_recv(sock, CHUNK_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return _request(head)
        elif isinstance(event, h11.ConnectionClosed):
            return None
        else:
            raise h11.RemoteProtocolError(
                "a request has a body", error_status_hint=HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            )


def _request(head: h11.Request) -> Request:
    """Return a request that h11 has parsed. Of headers that occur several times, the values are joined."""
    headers: dict[str, str] = {}
    for name, value in head.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    path, _, query = head.target.decode("latin-1").partition("?")
    return Request(head.method.decode("latin-1"), path, query, headers)


async def _send(
    sock: socket.socket, parser: h11.Connection, request: Request, answer: Answer, *, close: bool
) -> None:
    """Send an answer."""
    body, headers = answer.body, {**HARDENING, **answer.headers, "Content-Length": str(len(answer.body))}
    if close:
        headers["Connection"] = "close"
    head = h11.Response(status_code=answer.status, headers=list(headers.items()), reason=answer.status.phrase)
    data = [parser.send(head)]
    if body and request.method != "HEAD":
        data.append(parser.send(h11.Data(data=body)))
    data.append(parser.send(h11.EndOfMessage()))
    await asyncio.get_running_loop().sock_sendall(sock, b"".join(part or b"" for part in data))


async def _refuse(sock: socket.socket, parser: h11.Connection, status: HTTPStatus) -> None:
    """Say that a request is malformed, if the parser still permits it."""
    if parser.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    request = Request("GET", "/")
    async with asyncio.timeout(REQUEST_S):
        await _send(sock, parser, request, Answer.text(status, "This request is not valid."), close=True)
