"""The live page: the report of a run, which the browser fetches again and again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from msgspec import UNSET, structs

from ..core.status import JobStatus
from ..errors import ConfigurationError, DeadlineError, PeerLostError, ProtocolError
from ..run.observer import Observer
from ..trace.report import RunReport
from .http import HttpResponse, Request
from .page import page_of

DATA = "/data"

CONTENT: dict[str, tuple[str, Callable[[RunReport], bytes]]] = {
    "/": ("text/html; charset=utf-8", lambda report: page_of([report], live=DATA[1:]).encode()),
    DATA: ("application/json", msgspec.json.encode),
}
"""Path -> the type of the content at this path, and a function that makes the content from a report."""

# A page asks the server for data every two seconds, and less often while the server is slow to answer.
LEAST_PATIENCE_S = 2.5
MOST_PATIENCE_S = 15.0


class Dashboard:
    """Answers the requests of readers who may see the page.

    Args:
        live: the report of the run.
    """

    def __init__(self, live: LiveReport) -> None:
        self._live = live
        self._sent_s = -math.inf  # when a report was last sent, on the monotonic clock
        self._interval_s = 0.0  # time between the last two reports
        self._told = False  # True once a report was sent that says that the run has ended
        self._answered: RunReport | None = None  # the report to which `_answers` belong
        # (path, compressed) -> the answer
        self._answers: dict[tuple[str, bool], HttpResponse] = {}

    async def reply(self, request: Request) -> HttpResponse:
        """Return the page or its data. For any other path, return an error."""
        if request.path == "/favicon.ico":
            return HttpResponse(HTTPStatus.NO_CONTENT)
        if request.path not in CONTENT:
            return HttpResponse.text(HTTPStatus.NOT_FOUND, "There is nothing here. The page is at /.")
        report = await self._live.get()
        if report is not self._answered:
            self._answered, self._answers = report, {}
        answers = self._answers  # during the next wait, a newer report may get answers of its own
        key = request.path, "gzip" in request.headers.get("accept-encoding", "")
        if key not in answers:
            answers[key] = await asyncio.to_thread(_answer, report, *key)
        before_s, self._sent_s = self._sent_s, time.monotonic()
        self._interval_s = self._sent_s - before_s if before_s > -math.inf else 0.0
        self._told = self._told or report.state != "running"
        return answers[key]

    async def tell(self, over: asyncio.Event) -> None:
        """Wait for the last report, and then until the open pages have received it, but not for too long."""
        await over.wait()
        over_s = time.monotonic()
        patience_s = min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, 2 * self._interval_s))
        if over_s - self._sent_s > patience_s:
            return  # no page is open
        while time.monotonic() < over_s + patience_s:
            await asyncio.sleep(0.05)
            if self._told and time.monotonic() > over_s + LEAST_PATIENCE_S:
                return  # a page has the last report, and other open pages have had time to fetch it


def _answer(report: RunReport, path: str, compressed: bool) -> HttpResponse:
    """Return the answer to a request for a path of `CONTENT`."""
    kind, content = CONTENT[path]
    answer = HttpResponse(HTTPStatus.OK, content(report), {"Content-Type": kind})
    return answer.compressed() if compressed else answer


# -- The report of a run in progress, which is made only on request, and at most once a second -------

LEAST_AGE_S = 1.0

MOST_SHARE = 0.05
"""Maximum share of a core for making reports. To keep to it, the report of a large run is made less often."""


class LiveReport:
    """The report of a run as of now.

    Args:
        read: reads what is new in the files of the run, and returns the report. Its argument is the current time in
            seconds since the run began; None if unknown.
        ask: returns the state of the job; None if the coordinator does not answer.
    """

    def __init__(
        self, read: Callable[[float | None], RunReport], ask: Callable[[], JobStatus | None]
    ) -> None:
        self._read = read
        self._ask = ask
        self._lock = asyncio.Lock()  # only one report is made at a time
        self._report: RunReport | None = None
        self._made_until_s = -math.inf  # until this time on the monotonic clock, the report is new enough

    async def get(self) -> RunReport:
        """Return the report, which is about a second old at most."""
        # A request may be cancelled, but not the thread that makes a report. The lock is held until this thread ends.
        return await asyncio.shield(self._fresh())

    async def _fresh(self) -> RunReport:
        async with self._lock:
            if self._report is None or time.monotonic() > self._made_until_s:
                self._report = await asyncio.to_thread(self._make)
            return self._report

    async def end(self) -> None:
        """Make the last report, after the end of the run. From then on, `get` returns this report."""
        async with self._lock:
            self._report = await asyncio.to_thread(self._read, None)
            self._made_until_s = math.inf

    def _make(self) -> RunReport:
        begun_s = time.thread_time()
        status = self._ask()
        now_s = None if status is None else status.elapsed_s
        # The run counts as ended only when all of its files are complete, even if one of these files already says that
        # the run has ended.
        report = structs.replace(self._read(now_s), state="running", failure="", live=status, now_s=now_s)
        if status is not None:
            report = with_devices(report, status)
        took_s = time.thread_time() - begun_s
        self._made_until_s = time.monotonic() + max(LEAST_AGE_S, took_s / MOST_SHARE)
        return report


def with_devices(report: RunReport, status: JobStatus) -> RunReport:
    """Add the workers' devices to a report. The files of a run contain the devices only after its end."""
    devices = {
        worker.worker: worker.device for worker in status.workers if worker.device not in ("cpu", UNSET)
    }
    workers = (structs.replace(each, device=devices.get(each.worker, "")) for each in report.workers)
    return structs.replace(report, workers=tuple(workers))


class LiveStatus:
    """Asks the coordinator for the state of the job, over one connection that is opened when it is needed.

    Args:
        address: address of the coordinator.
        secret: the secret of the run.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._address = address
        self._secret = secret
        self._observer: Observer | None = None

    def __call__(self) -> JobStatus | None:
        """Return the state of the job; None if the coordinator does not answer, perhaps because the run is over."""
        try:
            if self._observer is None:
                self._observer = Observer(self._address, self._secret)
            return self._observer.fetch()
        except (PeerLostError, DeadlineError, ConfigurationError, ProtocolError):
            self.close()
            return None

    def close(self) -> None:
        """Close the connection."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None
