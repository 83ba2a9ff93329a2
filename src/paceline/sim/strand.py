"""A blocking function that runs a stretch at a time, on a thread of its own.

Threads and not coroutines, because the function is the user's own, and because torch keeps what it is about (grad
mode, autocast) for each thread apart. Of all threads exactly one runs: who resumes a strand waits until it pauses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import UsageError

__all__ = ["Strand"]

PATIENCE = 100  # pauses of a function that is to end
LOOK_S = 0.02  # between two looks at whether it has


class _Ended(BaseException):
    """Ends a strand from within. Not an `Exception`, so that the function's own handlers let it through."""


class Strand:
    """A function on its way.

    Args:
        function: what runs.
        name: of its thread.

    Attributes:
        ended: is it over.
        error: what it raised, if it did.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.ended = False
        self.error: BaseException | None = None
        # Bare locks, which one side acquires and the other releases: a semaphore is several, and Python code.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._message: Any = None
        self._ending = False
        self._refusals = 0  # to be over
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def resume(self, message: Any = None) -> None:
        """Let it run until it pauses or is over. `pause` returns the message.

        Ctrl-C may interrupt this anywhere; what then works is `end`.
        """
        self._message = message
        self._go.release()
        self._back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> Any:
        """Called by the function: give the turn back until it is resumed."""
        if not self._ending:
            self._back.release()
            self._go.acquire()
        if self._ending:
            self._refusals += 1
            if self._refusals > PATIENCE:
                threading.Event().wait()  # for ever: its thread ends with the process
            raise _Ended
        return self._message

    def end(self) -> None:
        """Have it be over, whatever it is about: an exception is raised where it has paused, or pauses next.

        Whose turn it is need not be known, and after Ctrl-C it is not: one turn too many does no harm here.

        Raises:
            UsageError: the function does not let itself be ended.
        """
        self._ending = True
        while not self.ended and self._refusals <= PATIENCE:
            if self._go.locked():
                self._go.release()
            self._thread.join(LOOK_S)
        if not self.ended:
            raise UsageError(
                f"{self._thread.name} cannot be ended: its function catches BaseException and goes on. Let those "
                "through that are no Exception."
            )
        self._thread.join()

    def _run(self, function: Callable[[], object]) -> None:
        self._go.acquire()
        try:
            if not self._ending:
                function()
        except _Ended:
            pass
        except SystemExit as end:
            self.error = end if end.code not in (None, 0) else None
        except BaseException as error:  # the function's own: whoever resumed the strand deals with it
            self.error = error
        finally:
            self.ended = True
            if self._back.locked():
                self._back.release()
