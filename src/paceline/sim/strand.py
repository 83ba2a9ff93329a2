"""A blocking function that runs on its own thread and can be paused and resumed.

Threads are used instead of coroutines, because the function is written by the user, and because torch stores its
modes (such as grad mode and autocast) per thread. Only one of the threads runs at any time: the thread that resumes a
strand waits until the strand pauses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import UsageError

__all__ = ["Strand"]

PATIENCE = 100  # maximum number of times that a function may pause although it was told to end
CHECK_INTERVAL_S = 0.02  # time between two checks of whether it has ended


class _Ended(BaseException):
    """Raised in a strand to end it. It is not an `Exception`, so that the function's handlers do not catch it."""


class Strand:
    """A function that runs on its own thread.

    Args:
        function: the function to run.
        name: name of the thread.

    Attributes:
        ended: True if the function has ended.
        error: the exception that the function raised; None if it raised none.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.ended = False
        self.error: BaseException | None = None
        # Each lock is acquired by one thread and released by the other one. Semaphores would be slower: each consists
        # of several locks, and they are implemented in Python.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._message: Any = None
        self._ending = False
        self._refusals = 0  # number of times that the function was told to end but did not
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def resume(self, message: Any = None) -> None:
        """Let the function run until it pauses or ends. `message` is returned by `pause` in the function.

        Ctrl-C may interrupt this method at any point. Afterwards only `end` may be called.
        """
        self._message = message
        self._go.release()
        self._back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> Any:
        """Pause until the strand is resumed, and return the message. To be called by the function."""
        if not self._ending:
            self._back.release()
            self._go.acquire()
        if self._ending:
            self._refusals += 1
            # Block for the rest of the process.
            if self._refusals > PATIENCE:
                threading.Event().wait()
            raise _Ended
        return self._message

    def end(self) -> None:
        """End the function: an exception is raised in it at its current or next pause.

        It does not matter which thread is running, which is unknown after Ctrl-C, because an additional resume of the
        strand does no harm here.

        Raises:
            UsageError: the function does not end.
        """
        self._ending = True
        while not self.ended and self._refusals <= PATIENCE:
            if self._go.locked():
                self._go.release()
            self._thread.join(CHECK_INTERVAL_S)
        if not self.ended:
            raise UsageError(
                f"{self._thread.name} cannot be ended, because its function catches BaseException and continues. "
                "Catch only Exception."
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
        except BaseException as error:
            # Exceptions of the function are handled by the caller of `resume`.
            self.error = error
        finally:
            self.ended = True
            if self._back.locked():
                self._back.release()
