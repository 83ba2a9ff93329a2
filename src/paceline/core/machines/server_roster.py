"""The servers of a run, as the coordinator knows them: who brings them, which are connected, and which are lost."""

from __future__ import annotations

from collections.abc import Collection

from ...errors import ConfigurationError
from ...state import stateful
from ..protocol.placement import Placement

__all__ = ["ServerRoster"]


@stateful(decides="vacant addresses _ready", history="lost", fixed="_count _late")
class ServerRoster:
    """The servers of a run.

    Args:
        placement: the servers of the shards.
        late: servers that are absent at the start, because machines that join bring them.

    Attributes:
        vacant: the servers that no machine has brought yet.
        addresses: connected server -> its address.
        lost: server without which the run has ended -> a clause that says why it is lost.
    """

    def __init__(self, placement: Placement, late: Collection[int] = ()) -> None:
        self.vacant = set(late)
        self.addresses: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self._ready: set[int] = set()  # servers that have received their shards
        self._count = len(placement.servers)
        self._late = frozenset(late)

    @property
    def complete(self) -> bool:
        """True if all servers are connected."""
        return len(self.addresses) >= self._count

    @property
    def shortage(self) -> str:
        """How many servers the run has and needs, if machines have yet to bring some; else ""."""
        return f"{self._count - len(self.vacant)} of {self._count} servers" if self.vacant else ""

    def expects(self, server: int) -> bool:
        """Return True if this server may connect now."""
        excluded = server in self.addresses or server in self.vacant
        return 0 <= server < self._count and not excluded

    def ready(self, server: int) -> bool:
        """Handle a server that has received its shards. Return True if all servers have."""
        self._ready.add(server)
        return len(self._ready) >= self._count

    def lose(self, server: int, how: str, *, begun: bool) -> bool:
        """Handle the loss of a server.

        Args:
            server: index of the server.
            how: a clause that says why it is lost.
            begun: True if the run has begun. Otherwise, a server that machines bring becomes vacant.

        Returns:
            True if the run has lost the server for good.
        """
        self.addresses.pop(server, None)
        if not begun and server in self._late:
            self.release(server)
            return False
        self.lost.setdefault(server, how)
        return True

    def invite(self, count: int) -> tuple[int, ...]:
        """Expect `count` of the servers that machines bring, and return their indices.

        Raises:
            ConfigurationError: the run needs fewer servers.
        """
        missing = len(self.vacant)
        if count > missing:
            more = f"{missing or 'no'} more server{'s' * (missing != 1)}"
            late = len(self._late)
            raise ConfigurationError(
                f"this machine offers --servers {count}, but the run needs {more}: of its {self._count}, the "
                f"machine that serves it has {self._count - late}, and machines that have joined have "
                f"{late - missing}. Join with --servers {missing}, or start the run with more of them (--servers N "
                "--remote-servers M)."
            )
        invited = tuple(sorted(self.vacant)[:count])
        self.vacant.difference_update(invited)
        return invited

    def release(self, server: int) -> None:
        """Let another machine bring a server, because its machine has left before the run has begun."""
        self.vacant.add(server)
