"""A function that is called again and again on a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Repeating"]


class Repeating:
    """A context in which a background thread calls a function repeatedly.

    On exit, the context waits for the end of a call that is in progress. If a call raises an exception, there are no
    further calls, and the exception is raised on exit, unless the context ends with another exception.

    Args:
        function: the function to call.
        interval_s: time before the first call, and between the end of a call and the beginning of the next one.
        name: name of the thread.
    """

    def __init__(self, function: Callable[[], None], interval_s: float, name: str) -> None:
        self._function = function
        self._interval_s = interval_s
        self._ending = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._interval_s):
                self._function()
        except BaseException as error:
            self._error = error
