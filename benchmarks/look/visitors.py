"""`python -m benchmarks.look.visitors PAGE METRICS VISITED FLOODS RATE BLOCK_S`: clients that look at a run, or try to.

A browser that has the page open fetches its data every 2 seconds. A collector fetches the metrics every 3 seconds. A
flood of "requests" connects to the page RATE times per second, and sends a request without the token. A "busy" flood
connects to a socket of its own instead, so it uses about as much of the processor but has no effect on the run.

Cases take turns, for BLOCK_S seconds each. VISITED and FLOODS are JSON lists, which say for each case whether the
browser and the collector are active, and which flood is active. All processes of the benchmark know the turn from the
clock.

The program runs until it is terminated. Then the program prints how often data, metrics, and refusals were received,
how many requests each flood has sent, and for how many seconds the flood was active.
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
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import SplitResult, urlsplit

PAGE_INTERVAL_S = 2.0
METRICS_INTERVAL_S = 3.0
POLLING_INTERVAL_S = 0.05
HELD = 256  # number of connections that a flood keeps open to wait for an answer
TIMEOUT_S = 60.0

over = threading.Event()
counts: defaultdict[str, float] = defaultdict(float)

Turn = Callable[[], bool]
"""Returns True while it is the turn of a case in which the caller is active."""


def browse(page: SplitResult, is_turn: Turn) -> None:
    """Open the page and fetch its data again and again, over one connection for each turn."""
    connection = http.client.HTTPConnection(page.netloc, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        cookie = _get(connection, f"/?{page.query}", {}).headers["Set-Cookie"].partition(";")[0]
        headers = {"Cookie": cookie, "Accept-Encoding": "gzip", "Sec-Fetch-Site": "same-origin"}
        _get(connection, "/", headers)
        while not over.wait(PAGE_INTERVAL_S):
            if not is_turn():
                connection.close()  # the next request opens the connection again
                continue
            answer = _get(connection, "/data", headers)
            json.loads(
                gzip.decompress(answer.content) if answer.headers["Content-Encoding"] else answer.content
            )
            counts["data"] += 1


def collect(metrics: SplitResult, is_turn: Turn) -> None:
    """Fetch the metrics again and again, each time over a new connection."""
    while not over.wait(METRICS_INTERVAL_S):
        if not is_turn():
            continue
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


def flood(kind: str, page: SplitResult, rate_per_s: float, is_turn: Turn) -> None:
    """Send requests without the token, to the page or to a socket of this process, with the lowest priority.

    The priority is low because real strangers are on other machines, and use no processor of this machine.
    """
    os.nice(19)  # lowers the priority of this thread only
    listener = socket.create_server(("127.0.0.1", 0), backlog=HELD) if kind == "busy" else None
    place = listener.getsockname() if listener is not None else (page.hostname, page.port)
    request = f"GET /data HTTP/1.1\r\nHost: {page.netloc}\r\nAccept: */*\r\n\r\n".encode()
    held: deque[socket.socket] = deque()
    due_s = sent_s = time.monotonic()
    while not over.wait(max(0.0, due_s - time.monotonic())):
        if not is_turn():
            due_s = sent_s = time.monotonic() + POLLING_INTERVAL_S
            continue
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
        before_s, sent_s = sent_s, time.monotonic()
        counts[f"{kind} sent"] += 1
        counts[f"{kind} seconds"] += sent_s - before_s
        due_s += 1 / rate_per_s


def main(page: str, metrics: str, visited: str, floods: str, rate: str, block: str) -> None:
    """Look at the run until this program is terminated."""
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    block_s = float(block)

    def turn_of(active: Sequence[bool]) -> Turn:
        return lambda: active[int(time.time() // block_s) % len(active)]

    kinds = json.loads(floods)
    looks = turn_of(json.loads(visited))
    tasks: list[Callable[[], None]] = [
        lambda: browse(urlsplit(page), looks),
        lambda: collect(urlsplit(metrics), looks),
    ]
    for kind in filter(None, kinds):
        floods_now = turn_of([each == kind for each in kinds])
        tasks.append(partial(flood, kind, urlsplit(page), float(rate), floods_now))

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
