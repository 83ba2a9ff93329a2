"""What a terminal shows at the end, as text: the log of a process that writes to a terminal.

A progress bar writes the same line hundreds of times. The log contains the line as it was last shown. Colors and
other attributes are dropped.
"""

from __future__ import annotations

import codecs
import re
from typing import BinaryIO

__all__ = ["Transcript"]

HEIGHT = 100
"""Number of lines that can still be changed. Programs move the cursor up by a few lines only."""

TOKEN = re.compile(
    r"\x1b\[(?P<number>\d{0,5})[\d;:]*(?P<command>[@-~])"  # a control sequence
    r"|\x1b\[[\x20-?]*[@-~]"  # a private control sequence, for example to hide the cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # a command to the terminal's window, such as its title or a link
    r"|\x1b[\x20-/]*[0-Z\\^-~]"  # a short sequence
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f])"
    r"|(?P<text>[^\x00-\x1f\x7f]+)"
)
LONGEST_SEQUENCE = 4096  # an unfinished sequence that is longer is shown as text


class Transcript:
    """Writes the final text of a terminal's lines to a file.

    Only the last `HEIGHT` lines are kept in memory and written again when they change.

    Args:
        file: the file, opened for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the beginning of a control sequence
        self._lines: list[list[str]] = [[]]
        self._row = 0
        self._column = 0

    def write(self, data: bytes) -> None:
        """Write what a program has written to its terminal."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        place = 0
        while place < len(text):
            token = TOKEN.match(text, place)
            if token is None:
                if len(text) - place < LONGEST_SEQUENCE:
                    self._rest = text[place:]
                    break
                place += 1  # without the escape character, the rest is text
                continue
            place = token.end()
            if token["text"]:
                self._put(token["text"])
            elif token["control"]:
                self._control(token["control"])
            elif token["command"]:
                self._command(token["command"], token["number"])
        self._save()

    def _put(self, text: str) -> None:
        line, column = self._lines[self._row], self._column
        line.extend(" " * (column - len(line)))
        line[column : column + len(text)] = text
        self._column += len(text)

    def _control(self, character: str) -> None:
        if character == "\n":
            # A terminal receives "\r\n" for each line end, unless the program has changed its settings.
            self._column = 0
            self._move(1)
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\t":
            self._put("\t")

    def _command(self, command: str, number: str) -> None:
        """Carry out a control sequence that moves the cursor or erases text."""
        count = max(1, int(number or 1))
        line = self._lines[self._row]
        match command:
            case "A":
                self._row = max(0, self._row - count)
            case "B":
                self._move(count)
            case "C":
                self._column += count
            case "D":
                self._column = max(0, self._column - count)
            case "G":
                self._column = count - 1
            case "K" if number in ("", "0"):
                del line[self._column :]
            case "K" if number == "1":
                line[: self._column] = " " * self._column
            case "K":
                line.clear()
            case "J" if number in ("", "0"):
                del line[self._column :]
                del self._lines[self._row + 1 :]
            case _:
                pass  # colors, and movements on the whole screen

    def _move(self, count: int) -> None:
        self._row += min(count, HEIGHT)
        while len(self._lines) <= self._row:
            self._lines.append([])

    def _save(self) -> None:
        """Write the lines, and leave the file's position at the start of the lines that may still change."""
        texts = ["".join(line).rstrip(" ") for line in self._lines]
        final = max(0, len(texts) - HEIGHT)
        self._file.write("".join(text + "\n" for text in texts[:final]).encode(errors="replace"))
        place = self._file.tell()
        self._file.write("\n".join(texts[final:]).encode(errors="replace"))
        self._file.truncate()
        self._file.seek(place)
        del self._lines[:final]
        self._row = max(0, self._row - final)
