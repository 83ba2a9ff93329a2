"""Who may see the live page of a run, and that strangers can neither fill its server nor keep it busy."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from paceline.look import dashboard
from paceline.look.dashboard import Dashboard, LiveReport
from paceline.look.http import (
    HARDENING,
    HEAD_BYTES,
    MOST_UNAUTHENTICATED,
    AccessPolicy,
    HttpResponse,
    HttpServer,
    Request,
    hosts_of,
)
from paceline.trace.report import RunReport

TOKEN = "the-token"
LONG = b"x" * 5000


async def hello(request: Request) -> HttpResponse:
    if request.path == "/broken":
        raise ValueError("broken")
    return HttpResponse(
        HTTPStatus.OK, LONG if request.path == "/long" else b"hello", {"Content-Type": "text/plain"}
    )


class Served:
    """A server on a thread of its own."""

    def __init__(self, token: str) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        self.port: int = sock.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        server = HttpServer(sock, AccessPolicy(self.port, hosts_of("127.0.0.1"), token), hello)
        self._task = self._loop.create_task(server.serve())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """Return the answer to one request on a connection of its own, with its body in `text`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers={"Host": self.host, **given})
            response = connection.getresponse()
            response.text = response.read().decode()  # type: ignore[attr-defined]
            return response

    @property
    def cookie(self) -> str:
        return f"paceline-{self.port}={TOKEN}"

    def raw(self, data: bytes) -> bytes:
        """Return all that the server sends after it has received some bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as sock:
            sock.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(65536):
                    received += part
            return received


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    server = Served(getattr(request, "param", TOKEN))
    yield server
    server.stop()


def test_the_token_becomes_a_cookie_and_leaves_the_address(served: Served) -> None:
    response = served.ask(f"/?token={TOKEN}")
    assert response.status == 303
    assert response.headers["Location"] == "/"
    parts = response.headers["Set-Cookie"].split("; ")
    assert parts == [served.cookie, "HttpOnly", "SameSite=Strict", "Path=/"]
    page = served.ask("/", Cookie=parts[0], Sec_Fetch_Site="none")
    assert (page.status, page.text) == (200, "hello")  # type: ignore[attr-defined]
    for name, value in HARDENING.items():
        assert page.headers[name] == value


@pytest.mark.parametrize(
    ("path", "headers", "status", "words"),
    [
        ("/", {}, 403, "contains a token"),
        ("/data", {}, 403, "contains a token"),
        ("/?token=wrong", {}, 403, "token is wrong"),
        ("/?token=", {}, 403, "contains a token"),
        ("/?token=wrong", {"Cookie": "COOKIE"}, 403, "token is wrong"),
        ("/", {"Cookie": "paceline-1=the-token"}, 403, "contains a token"),
        ("/", {"Cookie": "paceline-PORT=the-tokem"}, 403, "contains a token"),
        ("/", {"Cookie": "paceline-PORT=\xe4"}, 403, "contains a token"),
        ("/", {"Cookie": "COOKIE", "Host": "evil.example:PORT"}, 421, "ssh -L"),
        ("/", {"Cookie": "COOKIE", "Host": "127.0.0.1:1"}, 421, "ssh -L"),
        ("/", {"Cookie": "COOKIE", "Host": "127.0.0.1"}, 421, "ssh -L"),
        ("/", {"Cookie": "COOKIE", "Host": "127.0.0.1.evil.example:PORT"}, 421, "ssh -L"),
        ("/", {"Cookie": "COOKIE", "Host": ""}, 421, "ssh -L"),
        ("/", {"Cookie": "COOKIE", "Origin": "http://evil.example"}, 403, "another site"),
        ("/", {"Cookie": "COOKIE", "Origin": "http://127.0.0.1:1"}, 403, "another site"),
        ("/", {"Cookie": "COOKIE", "Origin": "null"}, 403, "another site"),
        ("/data", {"Cookie": "COOKIE", "Sec-Fetch-Site": "cross-site"}, 403, "another site"),
        ("/data", {"Cookie": "COOKIE", "Sec-Fetch-Site": "same-site"}, 403, "another site"),
        ("/?token=the-token", {"Sec-Fetch-Site": "cross-site"}, 403, "another site"),
        ("/broken", {"Cookie": "COOKIE"}, 500, "broken"),
    ],
)
def test_strangers_are_refused_in_a_sentence(
    served: Served, path: str, headers: dict[str, str], status: int, words: str
) -> None:
    given = {
        name: value.replace("COOKIE", served.cookie).replace("PORT", str(served.port))
        for name, value in headers.items()
    }
    response = served.ask(path, **given)
    assert response.status == status
    assert words in response.text  # type: ignore[attr-defined]
    assert response.headers["X-Frame-Options"] == "DENY"
    assert "Set-Cookie" not in response.headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_the_names_of_this_machine_are_known(served: Served, host: str) -> None:
    response = served.ask(
        "/", Host=f"{host}:{served.port}", Cookie=served.cookie, Sec_Fetch_Site="same-origin"
    )
    assert response.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_the_page_can_only_be_read(served: Served, method: str) -> None:
    response = served.ask("/", method=method, Cookie=served.cookie)
    assert response.status == 405
    assert response.headers["Allow"] == "GET, HEAD"


def test_head_has_the_headers_only(served: Served) -> None:
    response = served.ask("/", method="HEAD", Cookie=served.cookie)
    assert (response.status, response.headers["Content-Length"], response.text) == (200, "5", "")  # type: ignore[attr-defined]


def test_a_redirection_stays_on_this_site() -> None:
    door = AccessPolicy(8000, hosts_of("127.0.0.1"), TOKEN)
    request = Request("GET", "//evil.example/", f"token={TOKEN}", {"host": "localhost:8000"})
    answer = door.answer(request)
    assert answer is not None
    assert answer.headers["Location"] == "/evil.example/"


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("192.168.0.7", True),
        ("[fe80::1]", True),
        ("node7", True),
        ("localhost", True),
        ("evil.example", False),
    ],
)
def test_other_machines_use_an_address_or_the_name_of_this_one(host: str, known: bool) -> None:
    door = AccessPolicy(8000, hosts_of("0.0.0.0", ("Node7",)))
    answer = door.answer(Request("GET", "/", "", {"host": f"{host}:8000"}))
    assert (answer is None) == known


def test_the_connection_of_a_guest_is_kept(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    with contextlib.closing(connection):
        socks = set()
        for _ in range(3):
            connection.request("GET", "/long", headers={"Cookie": served.cookie})
            assert connection.getresponse().read() == LONG
            socks.add(connection.sock)
        assert len(socks) == 1
        assert None not in socks


def test_the_page_and_its_data_are_compressed_for_those_who_accept_it() -> None:
    report = RunReport(name="r", run_dir="/runs/r", state="finished")

    async def ask(path: str, **headers: str) -> HttpResponse:
        return await Dashboard(LiveReport(lambda now_s: report, lambda: None)).reply(
            Request("GET", path, "", headers)
        )

    for path in ("/", "/data"):
        plain = asyncio.run(ask(path))
        packed = asyncio.run(ask(path, **{"accept-encoding": "gzip, br"}))
        assert "Content-Encoding" not in plain.headers
        assert packed.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed.body) == plain.body
    assert json.loads(plain.body)["name"] == "r"
    assert asyncio.run(ask("/report.html")).status == 404
    assert asyncio.run(ask("/favicon.ico")).status == 204


def test_a_request_that_is_cancelled_does_not_let_a_second_thread_read_the_run() -> None:
    begun, may_end = threading.Event(), threading.Event()
    reading: list[int] = []  # how many threads read the run, at the beginning of each reading
    threads = 0

    def read(now_s: float | None) -> RunReport:
        nonlocal threads
        threads += 1
        reading.append(threads)
        begun.set()
        may_end.wait()
        threads -= 1
        return RunReport(name="r", run_dir="/runs/r", state="running")

    async def ask_twice() -> None:
        live = LiveReport(read, lambda: None)
        first = asyncio.create_task(live.get())
        await asyncio.to_thread(begun.wait)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(live.get())
        done, _ = await asyncio.wait([second], timeout=0.1)  # a second thread would begin at once
        assert not done
        may_end.set()
        await second

    asyncio.run(ask_twice())
    assert max(reading) == 1


def test_the_last_report_is_not_replaced_by_an_older_one_whose_page_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    states = iter(("running", "finished"))

    def read(now_s: float | None) -> RunReport:
        return RunReport(name="r", run_dir="/runs/r", state=next(states))  # type: ignore[arg-type]

    def answer(report: RunReport, path: str, compressed: bool) -> HttpResponse:
        if report.state == "running":
            begun.set()
            may_end.wait()
        return HttpResponse(HTTPStatus.OK, report.state.encode())

    async def ask() -> list[bytes]:
        live = LiveReport(read, lambda: None)
        page, request = Dashboard(live), Request("GET", "/data")
        early = asyncio.create_task(page.reply(request))
        await asyncio.to_thread(begun.wait)
        await live.end()
        last = await page.reply(request)
        may_end.set()
        return [(await early).body, last.body, (await page.reply(request)).body]

    monkeypatch.setattr(dashboard, "_answer", answer)
    assert asyncio.run(ask()) == [b"running", b"finished", b"finished"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example:80\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2 * HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_malformed_requests_are_refused(served: Served, data: bytes) -> None:
    answer = served.raw(data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert served.ask("/", Cookie=served.cookie).status == 200


@pytest.mark.parametrize("path", ["/..", "/../etc/passwd", "/%2e%2e/secret", "http://other/", "*"])
def test_every_path_needs_the_token(served: Served, path: str) -> None:
    assert served.ask(path).status in (403, 404)


def test_silent_strangers_do_not_keep_others_out(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * MOST_UNAUTHENTICATED):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            sock.sendall(b"GET / HTT")
        assert served.ask("/", Cookie=served.cookie).status == 200


def test_a_guest_does_not_notice_a_flood(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    enough = threading.Event()

    def flood() -> None:
        while not enough.is_set():
            with contextlib.suppress(OSError), socket.socket() as sock:
                sock.settimeout(0.2)
                sock.connect(("127.0.0.1", served.port))
                sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    with contextlib.closing(connection):
        connection.request("GET", "/", headers={"Cookie": served.cookie})
        connection.getresponse().read()
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                connection.request("GET", "/", headers={"Cookie": served.cookie})
                assert connection.getresponse().read() == b"hello"
        finally:
            enough.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("served", [""], indirect=True)
def test_without_a_token_everybody_on_this_machine_is_let_in_but_no_page_of_another_site(
    served: Served,
) -> None:
    assert served.ask("/").status == 200
    assert served.ask("/", Host=f"evil.example:{served.port}").status == 421
    assert served.ask("/", Origin="http://evil.example").status == 403
