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
        self._function = function
        # Bare locks, which one side acquires and the other releases: a semaphore is several, and Python code.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._out = False  # it has the turn
        self._message: Any = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self, message: Any = None) -> None:
        """Let it run until it pauses or is over. `pause` returns the message."""
        self._message = message
        self._out = True
        self._go.release()
        self._take_back()

    def _take_back(self) -> None:
        """Wait until it gives the turn back. May be interrupted, by Ctrl-C, and done again."""
        self._back.acquire()
        self._out = False
        if self.ended:
            self._thread.join()

    def pause(self) -> Any:
        """Called by the function: give the turn back until it is resumed."""
        self._back.release()
        self._go.acquire()
        if self._ending:
            raise _Ended
        return self._message

    def end(self) -> None:
        """Have it be over, whatever it was about: an exception is raised where it has paused."""
        self._ending = True
        if self._out:
            self._take_back()
        for _ in range(PATIENCE):  # more than once, if it pauses on its way out
            if self.ended:
                return
            self.resume()
        raise UsageError(
            f"{self._thread.name} cannot be ended: its function catches BaseException and goes on. Let those through "
            "that are no Exception."
        )

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._ending:
                self._function()
        except _Ended:
            pass
        except SystemExit as end:
            self.error = end if end.code not in (None, 0) else None
        except BaseException as error:  # the function's own: whoever resumed the strand deals with it
            self.error = error
        finally:
            self.ended = True
            self._back.release()
