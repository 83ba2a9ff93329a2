"""Handling of Ctrl-C, SIGTERM, SIGHUP and SIGQUIT, and of Ctrl-Z, during a run.

An exception raised by a signal handler could interrupt the cleanup at any line. So the signals are only counted here,
and every loop that waits checks the count. After the first signal, the run shuts down in an orderly way. After the
second signal, the shutdown no longer waits for anything.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
}
"""The signals that end a run, each with its default handler in Python."""


class Interrupted(KeyboardInterrupt):
    """Raised when a run was ended by Ctrl-C.

    Attributes:
        words: message that says which processes have ended.
        summary: the summary of the run up to that point; {} if training had not begun.
    """

    def __init__(self, words: str, summary: dict[str, Any]) -> None:
        super().__init__(words)
        self.words = words
        self.summary = summary


class Terminated(SystemExit):
    """Raised when a run was ended by SIGTERM, SIGHUP or SIGQUIT.

    The exit code is 128 plus the number of the signal, as in a shell.

    Attributes:
        number: number of the signal.
        words: message that says which processes have ended.
        summary: the summary of the run up to that point; {} if training had not begun.
    """

    def __init__(self, number: int, words: str, summary: dict[str, Any]) -> None:
        super().__init__(128 + number)
        self.number = number
        self.words = words
        self.summary = summary


class Interruption:
    """A context manager that counts the signals that ask a run to end.

    Signals that the program ignores, or handles itself, are not counted. Outside the main thread, no signals are
    counted, because Python handles signals only in the main thread.

    Args:
        suspends: True if the program looks at `suspended`, and then calls `suspend`. Otherwise, Ctrl-Z stops this
            process as usual.

    Attributes:
        count: number of signals received.
        since_s: time on the monotonic clock at which the first signal was received.
        suspended: True if Ctrl-Z has asked the run to stop until it is continued. See `suspend`.
    """

    def __init__(self, *, suspends: bool = False) -> None:
        self.count = 0
        self.since_s = 0.0
        self.suspended = False
        self._suspends = suspends
        self._number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._note)
            if self._suspends and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._note_suspension)
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

    def exception(self, words: str, summary: dict[str, Any]) -> Interrupted | Terminated:
        """Return the exception for the first signal. `words` says which processes have ended."""
        if self._number is None or self._number == signal.SIGINT:
            return Interrupted(words, summary)
        return Terminated(self._number, words, summary)

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z does by default. Return when the process has been continued."""
        self.suspended = False
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            os.kill(os.getpid(), signal.SIGTSTP)
        finally:
            signal.signal(signal.SIGTSTP, handler)

    def _note_suspension(self, number: int, frame: FrameType | None) -> None:
        self.suspended = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.count:
            self.since_s = time.monotonic()
        self.count += 1
        self._number = number if self._number is None else self._number
