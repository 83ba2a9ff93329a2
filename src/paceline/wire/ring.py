"""A ring buffer in shared memory for small messages, with one writer and one reader.

A system call that wakes another process takes longer than all other work in an iteration of a small model. A reader
that polls the ring receives messages without a system call. A reader that has polled for some time without success
marks itself as *asleep* in the ring and then blocks. The writer wakes such a reader through a socket (see `Stream`).

    word 0    total number of bytes written so far
    word 8    total number of bytes read so far
    word 16   1 while the reader is asleep, else 0
    from 24   frames, each with its length and its bytes, padded to whole words. The length of an empty frame is 0. If
              a frame does not fit before the end of the ring, the length 2**64 - 1 marks the rest as unused.

Each of the three words has its own cache line and is written by one end only. On x86-64, stores become visible in
program order, so it is sufficient to write the bytes of a frame before word 0. Falling asleep requires a stronger
guarantee: the reader's flag (word 16) must be visible before the reader checks the ring for the last time, and the
writer's count (word 0) must be visible before the writer reads the flag. This requires a memory fence. Python has no
memory fence, but acquiring a lock acts as a fence. On processors other than x86-64, rings are not used (see
`available`).

The peer can write anything into this memory at any time. So each end keeps its own counts, reads each of the peer's
words only once per operation, and raises `ValueError` if a correct peer could not have written the value. Whatever
the memory contains, the work of a reader is bounded by the size of the ring.
"""

from __future__ import annotations

import platform
import threading

DATA_BYTES = 64 * 1024  # a power of two
WORD_BYTES = 8
LINE_WORDS = 8  # number of words in a cache line
HEADER_BYTES = 3 * LINE_WORDS * WORD_BYTES
RING_BYTES = HEADER_BYTES + DATA_BYTES
SKIP = 2**64 - 1

WRITTEN, READ, ASLEEP = 0, LINE_WORDS, 2 * LINE_WORDS

_fence = threading.Lock()


def available() -> bool:
    """Return True if the processor guarantees the order of stores that a ring relies on."""
    return platform.machine() in ("x86_64", "AMD64")


class Ring:
    """One end of a ring buffer that carries frames from one process to another.

    Args:
        memory: `RING_BYTES` bytes, aligned to a cache line and filled with zeros before the first use.
    """

    __slots__ = ("_bytes", "_read", "_taken", "_words", "_written")

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        self._bytes = memory[HEADER_BYTES:RING_BYTES]
        # The numbers of bytes that this end has written and read. These numbers are never read from the shared memory,
        # because the peer could have changed them in that memory.
        self._written = 0
        self._read = 0
        # The number of bytes that the reader had read when `write` was last called.
        self._taken = 0

    # -- the writer's end ---------------------------------------------------------------------------------

    def write(self, frame: bytes) -> bool:
        """Put a frame into the ring. Return False if the ring currently has no room for it.

        Raises:
            ValueError: the reader reports a number of bytes that it cannot have read.
        """
        taken = self._words[READ]
        if not self._taken <= taken <= self._written:
            raise ValueError(
                f"the reader reports that it has read {taken} bytes, expected {self._taken} to {self._written}"
            )
        self._taken = taken
        length = len(frame)
        padded = WORD_BYTES + (length + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
        offset = self._written % DATA_BYTES
        left = DATA_BYTES - offset  # bytes up to the end of the ring
        skipped = left if padded > left else 0
        if self._written + skipped + padded - taken > DATA_BYTES:
            return False
        if skipped:
            self._words[(HEADER_BYTES + offset) // WORD_BYTES] = SKIP
            offset = 0
        self._words[(HEADER_BYTES + offset) // WORD_BYTES] = length
        self._bytes[offset + WORD_BYTES : offset + WORD_BYTES + length] = frame
        self._written += skipped + padded
        self._words[WRITTEN] = self._written
        return True

    @property
    def reader_asleep(self) -> bool:
        """True if the reader must be woken to read the frames that have just been written."""
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
        """The total number of bytes written, for use with `read`. Raises `ValueError` if the number is invalid."""
        written = self._words[WRITTEN]
        if not 0 <= written - self._read <= DATA_BYTES or written % WORD_BYTES:
            raise ValueError(
                f"the writer reports that it has written {written} bytes, of which {self._read} have been read: "
                f"expected a multiple of {WORD_BYTES} and at most {DATA_BYTES} unread bytes"
            )
        return written

    def read(self, end: int | None = None) -> bytes | None:
        """Return the next frame before `end`, or None if there is no such frame.

        `end` is a value that the property `end` has returned. Default: the current value of this property.

        Raises:
            ValueError: the content of the ring cannot have been written by a correct writer.
        """
        end = self.end if end is None else end
        while self._read != end:
            offset, written = self._read % DATA_BYTES, end - self._read
            left = DATA_BYTES - offset  # bytes up to the end of the ring
            length = self._words[(HEADER_BYTES + offset) // WORD_BYTES]
            size_bytes = WORD_BYTES + (length + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
            if size_bytes <= left and size_bytes <= written:
                frame = bytes(self._bytes[offset + WORD_BYTES : offset + WORD_BYTES + length])
                self._advance(size_bytes)
                return frame
            # A correct writer never skips a whole ring.
            if length != SKIP or not offset or left > written:
                raise ValueError(
                    f"a frame in a ring has {length} bytes, but only {min(left, written)} are left"
                )
            self._advance(left)
        return None

    def fall_asleep(self) -> bool:
        """Announce that the writer must wake this reader from now on.

        If a frame has arrived in the meantime, withdraw the announcement and return False. Otherwise, return True.
        """
        self._words[ASLEEP] = 1
        with _fence:
            pass
        if self.ready:
            self._words[ASLEEP] = 0
            return False
        return True

    def wake_up(self) -> None:
        """Announce that this reader polls the ring again and need not be woken."""
        self._words[ASLEEP] = 0

    def _advance(self, size_bytes: int) -> None:
        self._read += size_bytes
        self._words[READ] = self._read
