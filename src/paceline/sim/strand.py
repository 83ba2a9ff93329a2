"""A blocking function that runs on its own thread and can be paused and resumed.

Threads are used instead of coroutines, because the user's function is ordinary blocking code, and because torch
stores its modes (such as grad mode and autocast) per thread. Only one of the threads runs at any time: the thread
that resumes a strand waits until the strand pauses or ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import UsageError

__all__ = ["Strand"]

PATIENCE = 100  # maximum number of times that a function may pause after it was told to end
CHECK_INTERVAL_S = 0.02  # time between two checks of whether the function has ended


class _Ended(BaseException):
    """Raised to end a strand's function. This is a `BaseException`, so `except Exception` does not catch it."""


class Strand:
    """Runs a function on a separate thread, and can pause and resume it.

    Args:
        function: the function to run.
        name: name of the thread.

    Attributes:
        ended: True if the function has ended.
        error: the exception that the function raised; None if there was no exception.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.ended = False
        self.error: BaseException | None = None
        # Each lock is acquired by one thread and released by the other. Semaphores would be slower, because they are
        # implemented in Python and consist of several locks.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._message: Any = None
        self._ending = False
        self._refusals = 0  # number of pauses of the function after it was told to end
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def resume(self, message: Any = None) -> None:
        """Let the function run until it pauses or ends. In the function, `pause` returns `message`.

        Ctrl-C may interrupt this method at any point. After that, only `end` may be called.
        """
        self._message = message
        self._go.release()
        self._back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> Any:
        """Pause until the strand is resumed. Return the message from `resume`. Call this only from the strand."""
        if not self._ending:
            self._back.release()
            self._go.acquire()
        if self._ending:
            self._refusals += 1
            # The function cannot be stopped, so block it until the process exits.
            if self._refusals > PATIENCE:
                threading.Event().wait()
            raise _Ended
        return self._message

    def require_own_thread(self) -> None:
        """Raise `UsageError` unless the caller runs on the strand's thread. Only this thread can be paused."""
        if threading.current_thread() is not self._thread:
            raise UsageError(
                "In a simulation, call Paceline and iterate over its loaders only on the thread that runs the "
                "training function."
            )

    def end(self) -> None:
        """End the function by raising an exception in it at its current or next pause.

        After Ctrl-C, it is unknown which thread is running. This does not matter, because resuming the strand again
        is harmless here.

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
                f"{self._thread.name} cannot be stopped, because its function catches BaseException and continues. "
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
            # The caller of `resume` handles the function's exceptions.
            self.error = error
        finally:
            self.ended = True
            if self._back.locked():
                self._back.release()
