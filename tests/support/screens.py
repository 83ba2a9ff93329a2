"""Programs in terminals of their own, for tests: what their screens show, and the keys that they receive."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time

from tests.support.live import DEADLINE_S
from tests.support.warm import take_terminal

__all__ = ["Screen"]


class Screen:
    """A program in a terminal of its own, of 77 columns unless it says otherwise."""

    def __init__(self, *arguments: str, columns: int = 77) -> None:
        self.text = ""
        self.main, self.other = pty.openpty()
        termios.tcsetwinsize(self.other, (20, columns))
        self.settings = termios.tcgetattr(self.other)
        self.program = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=self.other,
            stdout=self.other,
            stderr=self.other,
            start_new_session=True,
            preexec_fn=take_terminal,
            env=dict(
                os.environ
            ),  # without the width of our own terminal, which readline keeps in the C environment
        )

    def read(self) -> None:
        if select.select([self.main], [], [], 0.05)[0]:
            self.text += os.read(self.main, 65536).decode(errors="replace")

    def await_text(self, text: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in self.text:
            assert time.monotonic() < deadline_s, f"never shown: {text!r}; only {self.text}"
            self.read()

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def end(self) -> int:
        """Wait for the program to end, and return its exit code."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.program.poll() is None:
            assert time.monotonic() < deadline_s, f"never ended: {self.text}"
            self.read()
        while select.select([self.main], [], [], 0)[0]:
            self.read()
        return self.program.returncode

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait()
        os.close(self.main)
        os.close(self.other)
