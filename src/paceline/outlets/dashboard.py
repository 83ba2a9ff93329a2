"""The live page: the report of a run, which the browser fetches again and again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from ..report.page import page_of
from ..report.run_report import RunReport
from .door import Answer, Request
from .live_report import LiveReport

__all__ = ["Dashboard"]

DATA = "/data"

CONTENT: dict[str, tuple[str, Callable[[RunReport], bytes]]] = {
    "/": ("text/html; charset=utf-8", lambda report: page_of([report], live=DATA[1:]).encode()),
    DATA: ("application/json", msgspec.json.encode),
}
"""Path -> the type of its content, and the content that belongs to a report."""

# A page asks for data every two seconds, and less often while its answers take long.
LEAST_PATIENCE_S = 2.5
MOST_PATIENCE_S = 15.0


class Dashboard:
    """Answers the requests of those who may see the page.

    Args:
        live: the report of the run.
    """

    def __init__(self, live: LiveReport) -> None:
        self._live = live
        self._sent_s = -math.inf  # when a report was last sent, on the monotonic clock
        self._interval_s = 0.0  # between the last two times
        self._told = False  # True once a report was sent that says that the run has ended
        self._of: RunReport | None = None
        # (path, compressed) -> the answer for this report
        self._answers: dict[tuple[str, bool], Answer] = {}

    async def reply(self, request: Request) -> Answer:
        """Return the page, its data, or the answer that there is nothing else."""
        if request.path == "/favicon.ico":
            return Answer(HTTPStatus.NO_CONTENT)
        if request.path not in CONTENT:
            return Answer.text(HTTPStatus.NOT_FOUND, "There is nothing here. The page is at /.")
        report = await self._live.get()
        if report is not self._of:
            self._of, self._answers = report, {}
        key = request.path, "gzip" in request.headers.get("accept-encoding", "")
        if key not in self._answers:
            self._answers[key] = await asyncio.to_thread(_answer, report, *key)
        before_s, self._sent_s = self._sent_s, time.monotonic()
        self._interval_s = self._sent_s - before_s if before_s > -math.inf else 0.0
        self._told = self._told or report.state != "running"
        return self._answers[key]

    async def tell(self, over: asyncio.Event) -> None:
        """Wait for the last report, and then until the pages that are open have it, unless that takes too long."""
        await over.wait()
        over_s = time.monotonic()
        patience_s = min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, 2 * self._interval_s))
        if over_s - self._sent_s > patience_s:
            return  # no page is open
        while time.monotonic() < over_s + patience_s:
            await asyncio.sleep(0.05)
            if self._told and time.monotonic() > over_s + LEAST_PATIENCE_S:
                return  # several pages may be open


def _answer(report: RunReport, path: str, compressed: bool) -> Answer:
    """Return the answer to a request for a path of `CONTENT`."""
    kind, content = CONTENT[path]
    answer = Answer(HTTPStatus.OK, content(report), {"Content-Type": kind})
    return answer.compressed() if compressed else answer
