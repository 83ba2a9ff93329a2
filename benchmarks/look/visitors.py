"""`python -m benchmarks.look.visitors PAGE METRICS FLOOD RATE`: those who look at a run, or try to.

A browser that has the page open fetches its data every 2 seconds, and a collector the metrics every 5 seconds. A
flood of "requests" connects to the page RATE times per second, and sends a request without the token. A "busy" flood
does the same with a socket of its own: it uses about as much of the processor, and does nothing to the run.

The program runs until it is terminated. Then it prints how often data, metrics, and refusals were received, and how
many requests a flood has sent in how many seconds.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

PAGE_INTERVAL_S = 2.0
METRICS_INTERVAL_S = 5.0
HELD = 256  # connections of a flood that wait for an answer
TIMEOUT_S = 60.0

over = threading.Event()
counts: Counter[str] = Counter()


def browse(page: SplitResult) -> None:
    """Open the page and fetch its data again and again, over one connection."""
    connection = http.client.HTTPConnection(page.netloc, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        cookie = _get(connection, f"/?{page.query}", {}).headers["Set-Cookie"].partition(";")[0]
        headers = {"Cookie": cookie, "Accept-Encoding": "gzip", "Sec-Fetch-Site": "same-origin"}
        _get(connection, "/", headers)
        while not over.wait(PAGE_INTERVAL_S):
            answer = _get(connection, "/data", headers)
            json.loads(
                gzip.decompress(answer.content) if answer.headers["Content-Encoding"] else answer.content
            )
            counts["data"] += 1


def collect(metrics: SplitResult) -> None:
    """Fetch the metrics again and again, each time over a new connection."""
    while not over.wait(METRICS_INTERVAL_S):
        with contextlib.closing(http.client.HTTPConnection(metrics.netloc, timeout=TIMEOUT_S)) as connection:
            _get(connection, metrics.path, {"Accept": "application/openmetrics-text"})
            counts["metrics"] += 1


class _Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.headers = response.headers
        self.content = response.read()


def _get(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> _Answer:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    answer = _Answer(response)
    if response.status not in (200, 303):
        raise RuntimeError(f"{path} was answered with {response.status}: {answer.content[:200]!r}")
    return answer


def flood(page: SplitResult, rate_per_s: float, *, own: bool) -> None:
    """Send requests without the token, to the page or to a socket of this process, with the lowest priority.

    Strangers on other machines use none of the processors of this one.
    """
    os.nice(19)  # of this thread only
    listener = socket.create_server(("127.0.0.1", 0), backlog=HELD) if own else None
    place = listener.getsockname() if listener is not None else (page.hostname, page.port)
    request = f"GET /data HTTP/1.1\r\nHost: {page.netloc}\r\nAccept: */*\r\n\r\n".encode()
    held: deque[socket.socket] = deque()
    begun_s, sent = time.monotonic(), 0
    while not over.is_set():
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(place)
        with contextlib.suppress(OSError):  # the system's queue is full, or the run is over
            sock.send(request)
        held.append(sock)
        if listener is not None:
            listener.accept()[0].close()
        if len(held) > HELD:
            with contextlib.suppress(OSError):
                counts["refused"] += b" 403 " in held[0].recv(64)
            held.popleft().close()
        sent += 1
        counts["sent"], counts["seconds"] = sent, int(time.monotonic() - begun_s)
        over.wait(max(0.0, begun_s + sent / rate_per_s - time.monotonic()))


def main(page: str, metrics: str, kind: str, rate: str) -> None:
    """Look at the run until this program is terminated."""
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    tasks: list[Callable[[], None]] = [lambda: browse(urlsplit(page)), lambda: collect(urlsplit(metrics))]
    if kind:
        tasks.append(lambda: flood(urlsplit(page), float(rate), own=kind == "busy"))

    def carry_out(task: Callable[[], None]) -> None:
        try:
            task()
        except (OSError, http.client.HTTPException) as error:  # the run is over
            counts[f"ended: {error!r}"] += 1

    threads = [threading.Thread(target=carry_out, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    over.wait()
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
