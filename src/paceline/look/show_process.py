"""The process that shows a run in progress. See `paceline.look`.

A run is shown by *outlets*: the live page, the metrics for Prometheus, and the files for TensorBoard.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import ConfigurationError
from ..wire.transports import TCP
from .dashboard import LiveReport, LiveStatus
from .http import AccessPolicy, HttpServer, Reply, hosts_of
from .run_reading import ReportReader

NICENESS = 10  # the workers' computations come first

Outlet = Coroutine[Any, Any, None]


def main() -> None:
    """Show the run that the first line of standard input describes, until a second line arrives or the input ends.

    If an outlet has failed, exit with code 1. The last line of standard error then says which outlet failed, and why.
    """
    os.nice(NICENESS)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ShowOrder)
    failures = asyncio.run(_show(order))
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


async def _show(order: ShowOrder) -> list[str]:
    """Run the outlets until the run has ended and all outlets have the last report. Return what has failed."""
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
        tasks.append(asyncio.create_task(_run_outlet(name, outlet, failures)))

    # Modules for single outlets are imported only when needed, because their packages may not be installed.
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


async def _run_outlet(name: str, outlet: Outlet, failures: list[str]) -> None:
    """Run an outlet. If the outlet fails, note why, and let the other outlets go on."""
    try:
        await outlet
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{name} has ended early: {error!r}")


def _server(served: ServedSocket, token: str, reply: Reply) -> HttpServer:
    """Return a server for an inherited socket."""
    policy = AccessPolicy(served.port, hosts_of(served.host, (socket.gethostname(),)), token)
    return HttpServer(socket.socket(fileno=served.descriptor), policy, reply)


# -- What the launcher tells the process that shows a run ----------------------------------------------------


class ServedSocket(msgspec.Struct, frozen=True):
    """A socket that the process inherits, and serves.

    Attributes:
        descriptor: the file descriptor of the socket.
        host: the address that the user has given.
        port: the port.
    """

    descriptor: int
    host: str
    port: int


class ShowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of standard input. A second line, or the end of the input, means that the run has ended.

    Attributes:
        run_dir: path of the run directory.
        address: address of the coordinator.
        secret: the secret of the run.
        dashboard: where the live page is served; None for nowhere.
        token: the secret of the live page.
        metrics: where the metrics are served; None for nowhere.
        tensorboard: path of the directory for TensorBoard; "" for none.
    """

    run_dir: str
    address: str
    secret: str
    dashboard: ServedSocket | None = None
    token: str = ""
    metrics: ServedSocket | None = None
    tensorboard: str = ""


# -- The outlets of a run, where the run is shown. They are checked, and listen, before the run starts -------

LOOPBACK = "127.0.0.1"
EXAMPLES = "a port such as 8000, or HOST:PORT such as 0.0.0.0:8000"

Port = bool | int | str | None


class Listening(msgspec.Struct, frozen=True):
    """A socket that listens for the readers of an outlet.

    Attributes:
        sock: the socket.
        host: the address that the user has given; "127.0.0.1" by default.
        port: the port.
    """

    sock: socket.socket
    host: str
    port: int


class Outlets(msgspec.Struct, frozen=True):
    """The places where a run is shown. This context manager closes the sockets on exit, and is false without outlets.

    Attributes:
        dashboard: where the live page is served; None for nowhere.
        metrics: where the metrics are served; None for nowhere.
        tensorboard: absolute path of the directory for TensorBoard; "" for none.
    """

    dashboard: Listening | None = None
    metrics: Listening | None = None
    tensorboard: str = ""

    def __bool__(self) -> bool:
        return self != Outlets()

    def __enter__(self) -> Outlets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def opened_again(self) -> Outlets:
        """Return the same outlets with new sockets, after another process has used the sockets of this object.

        Raises:
            ConfigurationError: a port cannot be used.
        """

        def listening(before: Listening | None) -> Listening | None:
            if before is None:
                return None
            sock, _ = TCP.listen(before.host, before.port)
            return replace(before, sock=sock)

        return replace(self, dashboard=listening(self.dashboard), metrics=listening(self.metrics))

    def close(self) -> None:
        """Close the sockets in this process."""
        for listening in (self.dashboard, self.metrics):
            if listening is not None:
                listening.sock.close()


def open_outlets(
    dashboard: Port = None, tensorboard: str | os.PathLike[str] | None = None, metrics_port: Port = None
) -> Outlets:
    """Return the outlets that a user wants.

    Args:
        dashboard: the port of the live page, or "HOST:PORT"; True or "" for any free port; None or False for no page.
        tensorboard: the directory for TensorBoard; None for none.
        metrics_port: the port of the metrics, or "HOST:PORT"; None for none.

    Raises:
        ConfigurationError: a port cannot be used, the directory cannot be written, or a package is missing.
    """
    if tensorboard is not None:
        _require_package("tensorboard", "tensorboard", "tensorboard")
        _require_directory(tensorboard)
    if metrics_port is not None:
        _require_package("metrics_port", "prometheus_client", "metrics")
    page = _listen("dashboard", dashboard)
    try:
        metrics = _listen("metrics_port", metrics_port)
    except ConfigurationError:
        if page is not None:
            page.sock.close()
        raise
    return Outlets(page, metrics, "" if tensorboard is None else os.path.abspath(tensorboard))


def _listen(name: str, wanted: Port) -> Listening | None:
    """Return a listening socket for the value of an option; None if the option is not given."""
    if wanted is None or wanted is False:
        return None
    host, port = _place(name, wanted)
    try:
        sock, _ = TCP.listen(host, port)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name} is {wanted!r}: {error}") from error
    return Listening(sock, host, sock.getsockname()[1])


def _place(name: str, wanted: Port) -> tuple[str, int]:
    """Return the host and the port in the value of an option.

    >>> _place("dashboard", "0.0.0.0:8000"), _place("dashboard", 8000), _place("dashboard", True)
    (('0.0.0.0', 8000), ('127.0.0.1', 8000), ('127.0.0.1', 0))
    """
    if wanted is True or wanted == "":
        return LOOPBACK, 0
    host, _, port = str(wanted).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal()) or (":" in str(wanted) and not host):
        raise ConfigurationError(f"{name} is {wanted!r}, expected {EXAMPLES}.")
    if int(port) > 65535:
        raise ConfigurationError(f"{name} is {wanted!r}, expected a port from 0 to 65535.")
    return host or LOOPBACK, int(port)


def _require_package(name: str, module: str, extra: str) -> None:
    """Raise `ConfigurationError` unless the package that an option needs is installed."""
    if find_spec(module) is None:
        package = module.replace("_", "-")
        raise ConfigurationError(
            f"{name} requires the package {package}, which is not installed; run: pip install 'paceline[{extra}]'"
        )


def _require_directory(path: str | os.PathLike[str]) -> None:
    """Create the directory for TensorBoard.

    Raises:
        ConfigurationError: the directory cannot be created or written.
    """
    folder = Path(path)
    try:
        if not os.fspath(path):
            raise FileNotFoundError("its name is empty")
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(
            f"tensorboard is {str(path)!r}, but this path, or one of its parent folders, is a file; give the path of a "
            "directory."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"tensorboard is {str(path)!r}, but this directory cannot be created: {error.strerror or error}. Choose "
            "another one."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"tensorboard is {str(path)!r}, but you may not write to this directory; choose another one."
        )
