"""Small messages through shared memory: a ring of frames with one writer and one reader.

A system call that wakes another process takes longer than all else that a small step needs, so over shared memory a
peer that looks for messages finds them without one. Whoever has looked long enough in vain says in the ring that it
is *asleep* before it blocks; the writer then wakes it by other means (see `Stream`).

    word 0    how many bytes have been written, ever
    word 8    how many have been read
    word 16   1 while the reader is asleep
    then      frames: their length, their bytes, padded to whole words; a length of 0 stands for no bytes at all, and
              the largest number for the rest of the ring, which is left out because a frame does not fit into it

Each word is on a cache line of its own and has one writer. On x86-64 stores are seen in the order in which they are
made, which is all that a frame needs: its bytes, then the count. To fall asleep needs more: the flag must be seen
before the last look into the ring is made, and the count before the writer looks at the flag. That takes a fence,
which Python has not; taking a lock is one. On other processors there is no ring (`available`).

The peer can write anything into this memory, at any time. So each end keeps its own count, reads each word of the
peer's once, and believes it only within what an honest peer could have written; anything else is a `ValueError`. A
reader's work is bounded by the size of the ring, whatever its memory says.
"""

from __future__ import annotations

import platform
import threading

__all__ = ["RING_BYTES", "Ring", "available"]

DATA_BYTES = 64 * 1024  # a power of two
WORD_BYTES = 8
LINE_WORDS = 8  # of a cache line
HEADER_BYTES = 3 * LINE_WORDS * WORD_BYTES
RING_BYTES = HEADER_BYTES + DATA_BYTES
SKIP = 2**64 - 1

WRITTEN, READ, ASLEEP = 0, LINE_WORDS, 2 * LINE_WORDS

_fence = threading.Lock()


def available() -> bool:
    """True on processors whose order of stores a ring can rely on."""
    return platform.machine() in ("x86_64", "AMD64")


class Ring:
    """One direction between two processes.

    Args:
        memory: of `RING_BYTES`, zeroed before its first use, on a cache line's boundary.
    """

    __slots__ = ("_bytes", "_read", "_taken", "_words", "_written")

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        self._bytes = memory[HEADER_BYTES:RING_BYTES]
        self._written = 0  # by this end; of the memory's words only the other end's are ever believed
        self._read = 0  # by this end
        self._taken = 0  # by the other end, as it said last

    # -- the writer's end ---------------------------------------------------------------------------------

    def write(self, frame: bytes) -> bool:
        """Put a frame into the ring. False if there is no room for it now.

        Raises:
            ValueError: the reader says that it has read what it cannot have read.
        """
        taken = self._words[READ]
        if not self._taken <= taken <= self._written:
            raise ValueError(
                f"the reader says that it has read {taken} bytes, expected {self._taken} to {self._written}"
            )
        self._taken = taken
        length = len(frame)
        padded = WORD_BYTES + (length + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
        place = self._written % DATA_BYTES
        left = DATA_BYTES - place  # to the end of the ring
        skipped = left if padded > left else 0
        if self._written + skipped + padded - taken > DATA_BYTES:
            return False
        if skipped:
            self._words[(HEADER_BYTES + place) // WORD_BYTES] = SKIP
            place = 0
        self._words[(HEADER_BYTES + place) // WORD_BYTES] = length
        self._bytes[place + WORD_BYTES : place + WORD_BYTES + length] = frame
        self._written += skipped + padded
        self._words[WRITTEN] = self._written
        return True

    @property
    def reader_asleep(self) -> bool:
        """True if the reader must be woken to see what has just been written."""
        with _fence:
            pass
        return self._words[ASLEEP] == 1

    # -- the reader's end ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if there is a frame to read."""
        return self._words[WRITTEN] != self._read

    @property
    def end(self) -> int:
        """How far frames have been written, for `read`. Raises `ValueError` if that cannot be."""
        written = self._words[WRITTEN]
        if not 0 <= written - self._read <= DATA_BYTES or written % WORD_BYTES:
            raise ValueError(f"{written} bytes are said to be written, of which {self._read} have been read")
        return written

    def read(self, end: int | None = None) -> bytes | None:
        """The next frame, or None if there is none before `end`, by default as far as has been written by now.

        Raises:
            ValueError: no writer that keeps to the rules has written this.
        """
        end = self.end if end is None else end
        while self._read != end:
            place, written = self._read % DATA_BYTES, end - self._read
            left = DATA_BYTES - place  # to the end of the ring
            length = self._words[(HEADER_BYTES + place) // WORD_BYTES]
            size_bytes = WORD_BYTES + (length + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
            if size_bytes <= left and size_bytes <= written:
                frame = bytes(self._bytes[place + WORD_BYTES : place + WORD_BYTES + length])
                self._advance(size_bytes)
                return frame
            if length != SKIP or not place or left > written:  # a whole ring is never left out
                raise ValueError(f"a frame of {length} bytes in a ring that has {min(left, written)} there")
            self._advance(left)
        return None

    def fall_asleep(self) -> bool:
        """Say that the writer must wake this end from now on. False if a frame has come meanwhile: look again."""
        self._words[ASLEEP] = 1
        with _fence:
            pass
        if self.ready:
            self._words[ASLEEP] = 0
            return False
        return True

    def wake_up(self) -> None:
        """Look for frames again."""
        self._words[ASLEEP] = 0

    def _advance(self, size_bytes: int) -> None:
        self._read += size_bytes
        self._words[READ] = self._read
