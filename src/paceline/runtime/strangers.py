"""Those who have called and have not shown the run's token: how many there may be, how long, and how loud.

Anybody on this machine can connect to a host, as often as the system lets him. So strangers are few beside what the
run needs (`MOST`, fewer where there are few descriptors). When all places are taken, the one that has been silent for
longest makes room for the next caller, once it has had time for its greeting; until then nobody more is accepted, and
callers wait in the system's queue. What strangers do is logged a few times, and then counted.

Should the process run out of descriptors all the same, the one that is held in reserve is given up for a moment: the
caller is accepted and closed. It would otherwise stay in the queue, which would be reported again and again.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Door", "Strangers"]

log = logging.getLogger("paceline.hub")

LEAST, MOST = 4, 256
SHARE_OF_DESCRIPTORS = 8  # strangers may have one in eight of those that this process may open
GREETING_TIMEOUT_S = 10.0
GREETING_S = 0.25  # a greeting follows its connection at once: who has been silent for so long may have to go
SAID_IN_FULL = 5  # lines
COUNT_INTERVAL_S = 10.0  # between two lines after these
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
GONE = (errno.ECONNABORTED, errno.EPROTO)  # before it was accepted

P = TypeVar("P")


class Door:
    """A listening socket, and a descriptor in reserve.

    Args:
        listener: owned by the door.

    Attributes:
        stuck: True if the last caller could not be accepted and is still there.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.stuck = False
        self._listener = listener
        self._reserve: int | None = None
        self._take_reserve()

    def fileno(self) -> int:
        """The listener's descriptor, for selectors."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """The next caller; None if there is none.

        Raises:
            OSError: it had gone, or there was no descriptor for it.
        """
        try:
            self.stuck = False
            return self._listener.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            out_of_descriptors = error.errno in OUT_OF_DESCRIPTORS
            self.stuck = error.errno not in GONE and not (out_of_descriptors and self._turn_away())
            raise

    def close(self) -> None:
        """Close the listener. Twice is as good as once: by then the number may be somebody else's."""
        self._listener.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _turn_away(self) -> bool:
        """Accept the next caller with the descriptor in reserve, and close it. False if that could not be done."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        try:
            self._listener.accept()[0].close()
        except OSError:  # another thread has taken what was given up
            return False
        finally:
            self._take_reserve()
        return True

    def _take_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class Strangers(Generic[P]):
    """The callers that have yet to show the token, in the order of their calls.

    Args:
        host: whose callers they are, for the log.
    """

    def __init__(self, host: str) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = (
            MOST if limit == resource.RLIM_INFINITY else max(LEAST, min(MOST, limit // SHARE_OF_DESCRIPTORS))
        )
        self._host = host
        self._since_s: dict[P, float] = {}
        self._said = 0
        self._left_out = 0
        self._last = ""
        self._count_due_s = 0.0
        self._rests_until_s = -math.inf

    @property
    def room(self) -> bool:
        """True if one more may be accepted, to a place of its own or to another's."""
        if time.monotonic() < self._rests_until_s:
            return False
        return len(self._since_s) < self._most or self._oldest_s() > GREETING_S

    def add(self, peer: P) -> None:
        """It has just called."""
        self._since_s[peer] = time.monotonic()

    def discard(self, peer: P) -> None:
        """It has shown the token, or is gone."""
        self._since_s.pop(peer, None)

    def to_make_room(self) -> P | None:
        """Whom to drop for the one that has been accepted, if anybody."""
        return next(iter(self._since_s)) if len(self._since_s) >= self._most else None

    def rest(self) -> None:
        """Accept nobody for a moment: it cannot be done."""
        self._rests_until_s = time.monotonic() + GREETING_S

    def late(self) -> Iterator[P]:
        """Those whose time is over; each is to be dropped before the next one is asked for."""
        self._count()
        while self._since_s and self._oldest_s() > GREETING_TIMEOUT_S:
            yield next(iter(self._since_s))

    def left_s(self, timeout_s: float | None) -> float | None:
        """How long a host may sleep: until something is to be done here, for `timeout_s` at most; None for ever."""
        left_s = math.inf if timeout_s is None else timeout_s
        if self._since_s:
            waits = (
                len(self._since_s) >= self._most and self._oldest_s() <= GREETING_S
            )  # for one to be that old
            patience_s = GREETING_S if waits else GREETING_TIMEOUT_S
            left_s = min(left_s, max(0.0, patience_s - self._oldest_s()) + 1e-3)
        if self._left_out:
            left_s = min(left_s, max(0.0, self._count_due_s - time.monotonic()))
        if self._rests_until_s > time.monotonic():
            left_s = min(left_s, GREETING_S)
        return None if left_s == math.inf else left_s

    def note(self, text: str) -> None:
        """Log what a stranger did; after some lines, only now and then how often."""
        if self._said < SAID_IN_FULL:
            self._said += 1
            self._count_due_s = time.monotonic() + COUNT_INTERVAL_S
            log.warning("%s", text)
        else:
            self._left_out += 1
            self._last = text
            self._count()

    def close(self) -> None:
        """Log the count of what was left out."""
        self._count(at_last=True)

    def _oldest_s(self) -> float:
        return time.monotonic() - next(iter(self._since_s.values()))

    def _count(self, *, at_last: bool = False) -> None:
        if self._left_out and (at_last or time.monotonic() >= self._count_due_s):
            log.warning("%s: %d more like these, the last one: %s", self._host, self._left_out, self._last)
            self._left_out = 0
            self._count_due_s = time.monotonic() + COUNT_INTERVAL_S
