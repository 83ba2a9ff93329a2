"""A small HTTP server for a few readers, and its access rules.

Clients without the token can neither take up all connections nor keep the server busy. A connection is *authenticated*
from its first request with the token in a cookie. If the page has no token, no connection is authenticated. These
limits hold:

- At most `MOST_UNAUTHENTICATED` connections are not authenticated. A further connection takes the place of the
  oldest, but only after the oldest has had `GREETING_S` to send its request. Until then, new connections wait in the
  system's queue.
- An unauthenticated connection has `REQUEST_S` for a whole request, however slowly the bytes arrive. It is closed
  after one answer.
- After an unauthenticated connection has ended, no connection is accepted for `REFUSAL_S`. So a flood of requests
  costs this process a few percent of a core, and readers with an authenticated connection do not notice the flood.
- At most `MOST_AUTHENTICATED` connections are authenticated. Such a connection is closed if it is silent for
  `SILENCE_S`, or does not take its answer within `SILENCE_S`.
- The head of a request has at most `HEAD_BYTES`. Bodies are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import h11
import msgspec

log = logging.getLogger("paceline.outlets")

MOST_UNAUTHENTICATED = 32
MOST_AUTHENTICATED = 32
GREETING_S = 0.25
REQUEST_S = 5.0
REFUSAL_S = 0.01
SILENCE_S = 60.0
HEAD_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024


# -- The rules that say who may see the live page of a run. Pure: they map a request to an answer ------------
#
# Any program and any user of this machine can connect to the page's port, and so can every page that is open
# in the user's browser. A request is answered if it has the token. These rules hold:
#
# - The address that the terminal shows contains the token. The policy moves the token to a cookie that no
#   script can read and no other site can send, and redirects to the address without the token.
# - The header `Host` must name this machine. Otherwise, a page of another site could give its own name the
#   address 127.0.0.1, and would then count as the same site (DNS rebinding). If the page is served to other
#   machines, any IP address is allowed, too, because such an attack needs a name.
# - Requests that a page of another site has caused are refused, even with the token.
# - Nothing can be changed: only GET and HEAD are answered.
#
# Browsers send a cookie to every port of a host, so the name of the cookie contains the port.


class HttpResponse(msgspec.Struct, frozen=True):
    """An answer to a request.

    Attributes:
        status: the status.
        body: the content.
        headers: further headers; those of `HARDENING` are in every answer.
    """

    status: HTTPStatus
    body: bytes = b""
    headers: Mapping[str, str] = {}

    @classmethod
    def text(cls, status: HTTPStatus, text: str, **headers: str) -> HttpResponse:
        """Return an answer that consists of a sentence."""
        return cls(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8", **headers})

    def compressed(self) -> HttpResponse:
        """Return this answer, compressed with gzip."""
        headers = {**self.headers, "Content-Encoding": "gzip"}
        return HttpResponse(self.status, gzip.compress(self.body, GZIP_LEVEL), headers)


class Request(msgspec.Struct, frozen=True):
    """The head of an HTTP request.

    Attributes:
        method: such as "GET".
        path: the path without the query.
        query: the text after "?"; "" if there is none.
        headers: names in lower case -> values.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}


Reply = Callable[[Request], Awaitable[HttpResponse]]


class HttpServer:
    """Serves one socket.

    Args:
        sock: a listening socket that does not block. The server takes ownership.
        policy: decides which requests are answered.
        reply: returns the answer to a request that the policy lets in.
    """

    def __init__(self, sock: socket.socket, policy: AccessPolicy, reply: Reply) -> None:
        self._sock = sock
        self._policy = policy
        self._reply = reply
        # connection -> the time of its arrival, oldest first
        self._unauthenticated: dict[asyncio.Task[None], float] = {}
        self._authenticated: set[asyncio.Task[None]] = set()
        self._rests_until_s = 0.0

    async def serve(self) -> None:
        """Serve until this task is cancelled. Then close all connections."""
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
                self._unauthenticated[task] = loop.time()
                task.add_done_callback(self._forget)
        finally:
            tasks = [*self._unauthenticated, *self._authenticated]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sock.close()

    async def _make_room(self) -> None:
        """Wait until another connection may be accepted. If necessary, close the oldest unauthenticated one."""
        loop = asyncio.get_running_loop()
        if (rest_s := self._rests_until_s - loop.time()) > 0:
            await asyncio.sleep(rest_s)
        while len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
            oldest, since_s = next(iter(self._unauthenticated.items()))
            if (left_s := since_s + GREETING_S - loop.time()) > 0:
                await asyncio.wait([oldest], timeout=left_s)
            oldest.cancel()
            await asyncio.wait([oldest])

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Note the end of a connection."""
        if task in self._unauthenticated:
            self._rests_until_s = asyncio.get_running_loop().time() + REFUSAL_S
        self._unauthenticated.pop(task, None)
        self._authenticated.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection has failed", exc_info=error)

    def _authenticate(self) -> bool:
        """Record that the current connection is authenticated. Return False if there are too many such connections."""
        task = asyncio.current_task()
        assert task is not None
        if task not in self._authenticated:
            if len(self._authenticated) >= MOST_AUTHENTICATED:
                return False
            self._unauthenticated.pop(task, None)
            self._authenticated.add(task)
        return True

    async def _attend(self, sock: socket.socket) -> None:
        """Answer the requests on one connection."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        with sock, contextlib.suppress(TimeoutError, ConnectionError):
            while True:
                patience_s = SILENCE_S if asyncio.current_task() in self._authenticated else REQUEST_S
                try:
                    async with asyncio.timeout(patience_s):
                        request = await _receive(sock, parser)
                except h11.RemoteProtocolError as error:
                    await _refuse(sock, parser, HTTPStatus(error.error_status_hint))
                    return
                if request is None:
                    return
                answer = self._policy.answer(request)
                if answer is None and self._policy.token and not self._authenticate():
                    answer = HttpResponse.text(
                        HTTPStatus.SERVICE_UNAVAILABLE, "Too many browsers have this page open."
                    )
                if answer is None:
                    answer = await self._answer(request)
                authenticated = asyncio.current_task() in self._authenticated
                async with asyncio.timeout(SILENCE_S if authenticated else REQUEST_S):
                    await _send(sock, parser, request, answer, close=not authenticated)
                if not authenticated or parser.our_state is h11.MUST_CLOSE:
                    return
                try:
                    parser.start_next_cycle()
                except h11.LocalProtocolError:  # the peer has closed the connection
                    return

    async def _answer(self, request: Request) -> HttpResponse:
        """Return the answer to an allowed request. If an error occurs, the answer says so."""
        try:
            return await self._reply(request)
        except Exception as error:
            log.exception("a request for %s has failed", request.path)
            return HttpResponse.text(HTTPStatus.INTERNAL_SERVER_ERROR, f"The request has failed: {error!r}")


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
    """Convert a request that h11 has parsed. If a header occurs several times, its values are joined."""
    headers: dict[str, str] = {}
    for name, value in head.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    path, _, query = head.target.decode("latin-1").partition("?")
    return Request(head.method.decode("latin-1"), path, query, headers)


async def _send(
    sock: socket.socket, parser: h11.Connection, request: Request, answer: HttpResponse, *, close: bool
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
    """Answer that a request is malformed, if the parser still permits an answer."""
    if parser.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    request = Request("GET", "/")
    async with asyncio.timeout(REQUEST_S):
        await _send(
            sock, parser, request, HttpResponse.text(status, "This request is not valid."), close=True
        )


HARDENING = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every answer: browsers must not store the page, show it in a frame, or reveal it to other sites."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
ANY_ADDRESS = "*"
GZIP_LEVEL = 1  # higher levels save little with JSON, and take much longer


class AccessPolicy(msgspec.Struct, frozen=True):
    """The conditions under which a request is answered.

    Attributes:
        port: the port on which the server listens.
        hosts: the hosts that a request may name, in lower case; see `hosts_of`.
        token: the secret of the page; "" if every client that can connect may see the page.
    """

    port: int
    hosts: frozenset[str]
    token: str = ""

    @property
    def cookie(self) -> str:
        """The name of the cookie."""
        return f"paceline-{self.port}"

    def answer(self, request: Request) -> HttpResponse | None:
        """Return the answer to a request that is refused, or that brings the token in its address.

        None allows the request and, if the page has a token, authenticates the connection.
        """
        if request.method not in ("GET", "HEAD"):
            return HttpResponse.text(
                HTTPStatus.METHOD_NOT_ALLOWED, "This page can only be read.", Allow="GET, HEAD"
            )
        host = request.headers.get("host", "").lower()
        if not self._is_known(host):
            return HttpResponse.text(
                HTTPStatus.MISDIRECTED_REQUEST,
                "The page is not served under this address. Open the address that the terminal shows; "
                "if the run is on another machine, forward the same port: ssh -L PORT:127.0.0.1:PORT MACHINE",
            )
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site not in (None, "none", "same-origin") or origin not in (None, f"http://{host}"):
            return HttpResponse.text(
                HTTPStatus.FORBIDDEN,
                "A page of another site has sent you here. Paste the address that the terminal shows into the "
                "address line of the browser.",
            )
        if not self.token:
            return None
        given = parse_qs(request.query).get("token", [])
        if given:
            return self._exchange(request.path, given[-1])
        if not self._has_cookie(request.headers.get("cookie", "")):
            return HttpResponse.text(
                HTTPStatus.FORBIDDEN, "Open the address that the terminal shows. It contains a token."
            )
        return None

    def _is_known(self, host: str) -> bool:
        """Return True if the value of the header `Host` is allowed."""
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not name:
            name, port = host, "80"
        if port != str(self.port):
            return False
        return name in self.hosts or (ANY_ADDRESS in self.hosts and _is_address(name))

    def _exchange(self, path: str, token: str) -> HttpResponse:
        """If the token is right, set the cookie and redirect to the address without the token."""
        if not self._is_token(token):
            return HttpResponse.text(
                HTTPStatus.FORBIDDEN,
                "The token is wrong. Each run has a token of its own: open the address that its terminal shows.",
            )
        cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        return HttpResponse(HTTPStatus.SEE_OTHER, headers={"Location": _local(path), "Set-Cookie": cookie})

    def _has_cookie(self, header: str) -> bool:
        try:
            cookies = SimpleCookie(header)
        except CookieError:
            return False
        return self.cookie in cookies and self._is_token(cookies[self.cookie].value)

    def _is_token(self, given: str) -> bool:
        """Compare in a time that does not depend on how much of the token is right."""
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())


def hosts_of(host: str, own_names: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the hosts that a request may name, for a page that listens on an address.

    Args:
        host: the address, or the name, on which the page listens.
        own_names: the names of this machine.

    >>> sorted(hosts_of("127.0.0.1"))
    ['127.0.0.1', '[::1]', 'localhost']
    >>> "*" in hosts_of("0.0.0.0"), "node7" in hosts_of("0.0.0.0", ("Node7",))
    (True, True)
    """
    name = f"[{host}]" if ":" in host else host
    if name.lower() in LOOPBACK_NAMES or name.startswith("127."):
        return LOOPBACK_NAMES | {name.lower()}
    names = {each.lower() for each in (name, *own_names) if each}
    return LOOPBACK_NAMES | names | {ANY_ADDRESS}


def _is_address(name: str) -> bool:
    """Return True for an IP address, as it is written in the address line of a browser."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _local(path: str) -> str:
    """Return a path that begins with one slash, for a redirection: "//other.example" would lead to another site."""
    return "/" + path.lstrip("/\\")
