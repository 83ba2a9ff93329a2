"""What the launcher tells the process that shows a run."""

from __future__ import annotations

import msgspec

__all__ = ["Served", "ShowOrder"]


class Served(msgspec.Struct, frozen=True):
    """A socket that the process inherits, and serves.

    Attributes:
        descriptor: its file descriptor.
        host: the address that the user has given.
        port: the port.
    """

    descriptor: int
    host: str
    port: int


class ShowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that the process reads from its standard input. A second line, or the end, follows the run.

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
    dashboard: Served | None = None
    token: str = ""
    metrics: Served | None = None
    tensorboard: str = ""
