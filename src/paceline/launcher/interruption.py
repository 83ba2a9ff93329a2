"""Handling of Ctrl-C and of the signals that ask a program to end, during a run.

An exception that may be raised at any line cannot end a run in an orderly way, since it would also interrupt the
cleanup. So the signals are only counted here, and all code that waits checks the count. After the first signal the
run is ended in an orderly way. From the second signal on, no step of the shutdown is given any more time.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interruption", "Terminated"]

DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""The signals that end a run, each with the default handler of a Python program."""


class Terminated(SystemExit):
    """The exception that is raised when a run was ended by SIGTERM or SIGHUP.

    Its exit code is 128 plus the number of the signal, as in a shell.

    Attributes:
        number: number of the signal.
        words: message that says what has been ended.
    """

    def __init__(self, number: int, words: str) -> None:
        super().__init__(128 + number)
        self.number = number
        self.words = words


class Interruption:
    """A context manager in which the signals that end a run are counted.

    A handler that the program has installed itself stays in place, and a signal that it ignores stays ignored.
    Outside of the main thread no handler is changed, because Python handles signals only in the main thread.

    Attributes:
        count: number of signals received.
    """

    def __init__(self) -> None:
        self.count = 0
        self._number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """True if a signal has asked the run to end."""
        return self.count > 0

    def hurried(self) -> bool:
        """Return True if the run must end immediately."""
        return self.count > 1

    def exception(self, words: str) -> BaseException:
        """Return the exception that the first signal stands for, with a message that says what has been ended."""
        if self._number in (None, signal.SIGINT):
            return KeyboardInterrupt(words)
        assert self._number is not None
        return Terminated(self._number, words)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._number = number if self._number is None else self._number
