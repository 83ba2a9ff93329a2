"""The process that shows a run while it goes on. See the package."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from ..report.run_reading import ReportReader
from .door import Door, hosts_of
from .http import HttpServer, Reply
from .live_report import LiveReport, LiveStatus
from .show_orders import Served, ShowOrder

__all__ = ["main"]

NICENESS = 10  # the workers' computations come first

Outlet = Coroutine[Any, Any, None]


def main() -> None:
    """Show the run that the first line of standard input describes, until another line or its end.

    Exit with code 1 if an outlet has failed. Then the last line of standard error says which one, and why.
    """
    os.nice(NICENESS)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ShowOrder)
    failures = asyncio.run(_show(order))
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


async def _show(order: ShowOrder) -> list[str]:
    """Serve and write what is wanted, until the run has ended and all outlets know. Return what has failed."""
    ended, over = asyncio.Event(), asyncio.Event()  # the run has ended; the last report is there
    loop, source = asyncio.get_running_loop(), sys.stdin.fileno()

    def hear() -> None:
        loop.remove_reader(source)
        ended.set()

    loop.add_reader(source, hear)
    status = LiveStatus(order.address, order.secret)
    reader = ReportReader(Path(order.run_dir), lambda run_dir: not ended.is_set())
    live = LiveReport(reader.read, status)
    failures: list[str] = []
    servers: list[asyncio.Task[None]] = []
    others: list[asyncio.Task[None]] = []

    def start(name: str, outlet: Outlet, tasks: list[asyncio.Task[None]]) -> None:
        tasks.append(asyncio.create_task(_alone(name, outlet, failures)))

    # What only some outlets need is imported for them: the packages may not be installed.
    if order.dashboard is not None:
        from .dashboard import Dashboard

        dashboard = Dashboard(live)
        start("the live page", _server(order.dashboard, order.token, dashboard.reply).serve(), servers)
        start("the live page", dashboard.tell(over), others)
    if order.metrics is not None:
        from .openmetrics import MetricsPage

        start("--metrics-port", _server(order.metrics, "", MetricsPage(live).reply).serve(), servers)
    if order.tensorboard:
        from .tensorboard import write_until

        start("--tensorboard", write_until(over, live, Path(order.tensorboard)), others)
    await ended.wait()
    await live.end()
    over.set()
    await asyncio.gather(*others)
    for server in servers:
        server.cancel()
    await asyncio.gather(*servers, return_exceptions=True)
    status.close()
    return failures


async def _alone(name: str, outlet: Outlet, failures: list[str]) -> None:
    """Run an outlet. If it fails, note why, and let the others go on."""
    try:
        await outlet
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{name} has ended early: {error!r}")


def _server(served: Served, token: str, reply: Reply) -> HttpServer:
    """Return a server for an inherited socket."""
    door = Door(served.port, hosts_of(served.host, (socket.gethostname(),)), token)
    return HttpServer(socket.socket(fileno=served.descriptor), door, reply)
