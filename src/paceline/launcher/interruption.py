"""Ctrl-C and the signals by which a system asks a program to end, while a run is under way.

An exception that is thrown at any line cannot end a run in order: it would interrupt the clean-up itself. So the
signals are counted here, and whoever waits looks at the count. The first one ends the run in order; from the second
on, nothing and nobody is given any more time.
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
"""The signals that end a run, each with the handler that a program has which has set none."""


class Terminated(SystemExit):
    """A run was ended by SIGTERM or SIGHUP. Its code is what a shell gives to such an end.

    Attributes:
        number: the signal.
        words: what has been ended.
    """

    def __init__(self, number: int, words: str) -> None:
        super().__init__(128 + number)
        self.number = number
        self.words = words


class Interruption:
    """A context in which those signals are counted.

    A handler that the program has set itself stays in place, and so does the decision to ignore a signal. Outside of
    the main thread nothing is changed: no signal arrives there.

    Attributes:
        count: how many have come.
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
        """True if the run is to end."""
        return self.count > 0

    def hurried(self) -> bool:
        """True if it is to end at once."""
        return self.count > 1

    def exception(self, words: str) -> BaseException:
        """What the program would have seen of the first signal, with what has been ended in words."""
        if self._number in (None, signal.SIGINT):
            return KeyboardInterrupt(words)
        assert self._number is not None
        return Terminated(self._number, words)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._number = number if self._number is None else self._number
