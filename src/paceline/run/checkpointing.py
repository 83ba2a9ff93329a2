"""The checkpoints that the coordinator writes with the servers and the workers, while training goes on.

Each server first reserves memory. When the job is cut (see `core.job_cut`), each server copies its shards, and reports
the entries of their optimizer states. A thread of the coordinator's process then creates the files, and the servers
write their copies into the files. If a server is on a machine that does not see the files, the thread fetches the
server's copies in pieces, and writes them. Finally, the thread completes the checkpoint. Training waits only for the
copying. If anything fails, the checkpoint is given up, and the run goes on.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from msgspec import structs

from ..checkpoints.manifest import REST, Pace, origin_of, yield_to_training
from ..checkpoints.writing import PIECE_BYTES, Draft, ShardWriter, is_draft, shard_content
from ..core.job_cut import JobCut, LoopCut
from ..core.layout import ModelSpec, ShardSlice, StateEntries
from ..core.messages import (
    MOST_STATES_BYTES,
    CopiesReserved,
    CutCopied,
    CutPiece,
    CutWritten,
    FetchCut,
    KeepWorkerState,
    ReserveCopies,
    WriteCut,
)
from ..core.requests import TakeCut
from ..errors import CheckpointError, PacelineError, ProtocolError, first_line
from ..shard.store import Store
from ..shard.vectors import bytes_of, packed_bytes, unpack
from .footprint import available_bytes
from .job import Job
from .resuming import described

STATES_S = 10.0
"""If a checkpoint has waited for the states of scripts for this time, the user is told."""

BYTES_PER_S = 200e6
"""Maximum average rate at which a process reads and writes the files of a checkpoint. See `Pace`."""

CLOSING_S = 3.0
"""Maximum time for which the end of a run waits for a checkpoint to be given up. A slow disk may delay this."""


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint that was written.

    Attributes:
        path: the directory of the checkpoint.
        cut: the state of the job.
        at_s: time of the cut, in seconds since the run began.
        took_s: time that it took to write the checkpoint, in seconds.
    """

    path: Path
    cut: JobCut
    at_s: float
    took_s: float


class _Answer(NamedTuple):
    """An answer of a server, for which the thread of a checkpoint waits.

    Attributes:
        fault: why the checkpoint cannot be written; "" if nothing has failed.
        server: index of the server.
        seen: True if the server has written its copies, False if its machine does not see the files.
        piece: a piece of the server's copy, if this is an answer to `FetchCut`.
    """

    fault: str = ""
    server: int = -1
    seen: bool = True
    piece: bytearray = bytearray()


class Completion(NamedTuple):
    """The information with which a checkpoint is completed, or the reason why the checkpoint must be given up.

    Attributes:
        fault: why the checkpoint must be given up, as a clause; "" if it can be completed.
        states: (worker, label) of each state of a script that belongs to the checkpoint.
        loop: the place of the job in its training loops.
    """

    fault: str = ""
    states: tuple[tuple[int, int], ...] = ()
    loop: LoopCut = LoopCut()


class Checkpoints:
    """Writes the checkpoints of a run. All methods are called on the thread of the coordinator's event loop.

    Args:
        job: the configuration of the run.
        tell: sends a message to a server.
        cut: cuts the job.
        call: schedules a function call on the thread of the event loop.
        warn: called with a sentence if a checkpoint was not written, unless the previous checkpoint also failed.

    Attributes:
        saved: the newest checkpoint that this run has written; None before the first one.
        fault: why no checkpoint has been written since `saved`, as a sentence; "" if no checkpoint has failed since
            then.
    """

    def __init__(
        self,
        job: Job,
        tell: Callable[[int, ReserveCopies | WriteCut | FetchCut], None],
        cut: Callable[[], None],
        call: Callable[[Callable[[], None]], None],
        warn: Callable[[str], None],
    ) -> None:
        self.saved: Saved | None = None
        self.fault = ""
        self._job = job
        self._tell = tell
        self._cut = cut
        self._call = call
        self._warn = warn
        # number of a cut -> shard -> entries of the shard's optimizer state
        self._copied: dict[int, dict[int, StateEntries]] = {}
        self._buffers: list[bytearray] = []  # the buffers that were copied most recently
        # worker -> the state that is being received from this worker
        self._incoming: dict[int, bytearray] = {}
        self._completion: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        # the time since which the checkpoint lacks only the states of workers
        self._waits_since_s: float | None = None
        # number of a cut -> worker -> label of the worker's last push -> the state of the worker's script
        self._states: dict[int, dict[int, dict[int, bytearray]]] = {}
        self._pieces: dict[int, bytearray] = {}  # server -> the piece of a copy that is being received
        self._unreserved: set[int] = set()  # servers that are still reserving memory
        self._cutting = False  # True while the job is being cut
        self._number = 0  # number of the checkpoint that is being written, or that was last written
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._due_s = job.checkpoint_every_s
        self._wanted = False  # True if a requested checkpoint has not begun
        self._last: Literal["", "wanted", "begun", "ended"] = ""  # stage of the final checkpoint

    def request(self) -> None:
        """Record that a script has requested a checkpoint."""
        self._wanted = True

    def request_last(self) -> None:
        """Request the final checkpoint of a run that must end. It begins after any checkpoint that is being written."""
        self._wanted, self._last = True, "wanted"

    @property
    def last_ended(self) -> bool:
        """True if the final checkpoint has been written, or has failed. See `request_last`."""
        return self._last == "ended"

    def due(self, now_s: float) -> bool:
        """Return True if the job must be cut now. If so, the time until the next cut begins now.

        Args:
            now_s: time since the run began.
        """
        every_s = self._job.checkpoint_every_s
        if self._busy or not (self._wanted or (every_s and now_s >= self._due_s)):
            return False
        self._due_s, self._wanted = now_s + every_s, False
        return True

    def begin(self) -> None:
        """Let the servers reserve memory for their copies. The job is cut when all servers have reserved memory."""
        if self._last == "wanted":
            self._last = "begun"
        self._unreserved = set(self._job.placement.servers)
        for server in self._job.placement.servers:
            self._tell(server, ReserveCopies())

    def reserved(self, server: int, message: CopiesReserved) -> None:
        """Record that a server has reserved memory. When all servers have reserved memory, cut the job.

        If the server could not reserve memory, give up the checkpoint.
        """
        if message.fault:
            self._unreserved.clear()
            self._fail(f"No checkpoint was written: {message.fault}.")
            self._end()
        elif server in self._unreserved:
            self._unreserved.remove(server)
            if not self._unreserved:
                self._cutting = True
                self._cut()

    @property
    def next_s(self) -> float | None:
        """The time at which the job is cut next; None if this time is unknown."""
        return self._due_s if self._job.checkpoint_every_s and not self._busy else None

    @property
    def _busy(self) -> bool:
        """True while servers reserve memory, while the job is cut, and while a checkpoint is written.

        No other cut may begin in this time, because it would replace copies that have not been written yet. A cut may
        take long, because it waits for the next step of training.
        """
        return self._thread is not None or self._cutting or bool(self._unreserved)

    def targets(
        self, sender: int, message: CutCopied | CutPiece | KeepWorkerState, size_bytes: int, model: ModelSpec
    ) -> Sequence[memoryview]:
        """Return the memory into which the payload of a message is received.

        Each sender has memory of its own, because payloads of several senders may arrive at the same time.

        Args:
            sender: index of the server, or of the worker if the message is a `KeepWorkerState`.
            message: the message.
            size_bytes: size of its payload.
            model: the model that is trained.
        """
        if size_bytes > MOST_STATES_BYTES:
            raise ProtocolError(f"a state has {size_bytes} bytes, expected at most {MOST_STATES_BYTES}")
        if isinstance(message, KeepWorkerState):
            state = self._incoming[sender] = bytearray(size_bytes)
            return [memoryview(state)]
        if isinstance(message, CutPiece):
            piece = bytearray(min(size_bytes, PIECE_BYTES))  # a larger piece is refused
            self._pieces[sender] = piece
            return [memoryview(piece)]
        if message.shard or not size_bytes:
            return []
        self._buffers = [bytearray(packed_bytes(spec)) for spec in model.buffers]
        return [memoryview(part) for part in self._buffers]

    def copied(self, message: CutCopied) -> None:
        """Record that a server has copied a shard, and the entries of the shard's optimizer state."""
        self._copied.setdefault(message.number, {})[message.shard] = message.entries

    def keep(self, worker: int, message: KeepWorkerState) -> None:
        """Keep the state of a worker's script."""
        state = self._incoming.pop(worker, bytearray())  # before training begins, `targets` is not called
        self._states.setdefault(message.number, {}).setdefault(worker, {})[message.iteration] = state
        for number in sorted(self._states)[:-2]:  # earlier states belong to cuts that were given up
            del self._states[number]

    def written(self, server: int, message: CutWritten) -> None:
        """Tell the checkpoint's thread that a server has written its copies, or that it could not write them."""
        if message.number == self._number:
            self._answers.put(_Answer(message.fault, server, message.seen))

    def arrived(self, server: int, message: CutPiece) -> None:
        """Pass a piece of a server's copy to the checkpoint's thread."""
        piece = self._pieces.pop(server, bytearray())  # before training begins, `targets` is not called
        if message.number == self._number:
            self._answers.put(_Answer(piece=piece))

    def worker_gone(self, worker: int) -> None:
        """Drop the state that a worker was sending when its connection ended."""
        self._incoming.pop(worker, None)

    def server_gone(self, server: int) -> None:
        """Give up the checkpoint that is being written, because a server is lost."""
        self._pieces.pop(server, None)
        self._unreserved.clear()
        if self._thread is not None:
            self._answers.put(_Answer(f"server {server} was lost"))
            self._completion.put(Completion("the run has ended"))

    def complete(self, number: int, completion: Completion) -> None:
        """If the checkpoint with this number is being written, complete it or give it up, as `completion` says.

        If the checkpoint is given up, the job is cut again.
        """
        if number != self._number:
            return
        self._completion.put(completion)
        if completion.fault:
            self._answers.put(_Answer(completion.fault))  # the thread may still wait for answers of servers
            self._cutting = True

    @property
    def waits_s(self) -> float:
        """Number of seconds for which the checkpoint that is being written has lacked only the states of workers.

        0 if no checkpoint is being written, or if the checkpoint lacks more than these states.
        """
        since_s = self._waits_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def save(self, cut: JobCut) -> None:
        """Begin to write a checkpoint. It is completed after `complete` has been called."""
        self._cutting = False
        entries, buffers, before = self._copied[cut.number], self._buffers, self._thread
        self._copied.clear()  # earlier cuts were given up
        self._number, self._answers, self._completion = cut.number, queue.SimpleQueue(), queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._write,
            args=(
                before,
                cut,
                [entries[shard] for shard in sorted(entries)],
                buffers,
                self._answers,
                self._completion,
            ),
            name="paceline-checkpoint",
            daemon=True,
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = before
            self._fail(f"Checkpoint {cut.number} was not written: {_no_thread(error)}.")
            self._end()

    def close(self) -> None:
        """If a checkpoint is being written, give it up. Wait for at most `CLOSING_S` until this is done."""
        self._closed.set()
        self._answers.put(_Answer("the run has ended"))
        self._completion.put(Completion("the run has ended"))
        if self._thread is not None:
            self._thread.join(CLOSING_S)

    def _end(self) -> None:
        """If the checkpoint that has been written or has failed was the final checkpoint, record this."""
        if self._last == "begun":
            self._last = "ended"

    def _fail(self, fault: str) -> None:
        if not self.fault:
            self.fault = fault
            self._warn(fault)

    # -- on the thread of a checkpoint --------------------------------------------------------------------

    def _write(
        self,
        before: threading.Thread | None,
        cut: JobCut,
        entries: Sequence[StateEntries],
        buffers: Sequence[bytearray],
        answers: queue.SimpleQueue[_Answer],
        completion: queue.SimpleQueue[Completion],
    ) -> None:
        """Write a checkpoint, after the thread `before`, which gives up an earlier checkpoint, has ended."""
        began_s, at_s = time.monotonic(), self._job.now_s()
        thread, fault = threading.current_thread(), ""
        if before is not None:
            before.join()
        try:
            path = self._write_files(cut, entries, buffers, answers, completion)
            # set before the upload: if the run ends during the upload, this is the newest checkpoint of the run
            self.saved = Saved(path, cut, at_s, time.monotonic() - began_s)
            if self._job.bucket is not None:
                from ..checkpoints.buckets import upload  # imports fsspec

                upload(path, self._job.bucket, self._job.keep, self._rest)
        except PacelineError as error:
            fault = str(error)
        except Exception as error:  # without a report, no further checkpoint would begin
            fault = f"Checkpoint {cut.number} was not completed: {first_line(error)}."

        def done() -> None:
            self._states.pop(cut.number, None)
            if self._thread is thread:
                self._thread = None
                if not self._cutting:
                    self._end()
            if not fault:
                self.fault = ""
            elif not self._closed.is_set():
                self._fail(fault)

        self._call(done)

    def _write_files(
        self,
        cut: JobCut,
        entries: Sequence[StateEntries],
        buffers: Sequence[bytearray],
        answers: queue.SimpleQueue[_Answer],
        completion: queue.SimpleQueue[Completion],
    ) -> Path:
        tensors = {
            spec.name: unpack(spec, part) for spec, part in zip(cut.model.buffers, buffers, strict=True)
        }
        pace = Pace(BYTES_PER_S, sleep_s=partial(self._pause, cut.number))
        draft = Draft.begin(
            self._job.checkpoints,
            cut.number,
            cut.model,
            cut.slices,
            entries,
            tensors=tensors,
            origin=origin_of(Path(self._job.origin)) if self._job.origin else "",
        )
        try:
            self._write_shards(cut, draft, entries, answers, pace)
            completed = self._await_completion(cut.number, completion)
            states = {worker: self._states[cut.number][worker][label] for worker, label in completed.states}
        except Exception:
            draft.discard()
            raise
        yield_to_training()
        return draft.finish(
            msgspec.json.encode(structs.replace(cut, loop=completed.loop)),
            {worker: bytes(state) for worker, state in states.items()},
            versions=[shard.version for shard in cut.shards],
            further=described(Path(self._job.run_dir)),
            keep=self._job.keep,
            spared=0 if self._job.resumed is None else self._job.resumed.number,
            pace=pace,
        )

    def _write_shards(
        self,
        cut: JobCut,
        draft: Draft,
        entries: Sequence[StateEntries],
        answers: queue.SimpleQueue[_Answer],
        pace: Pace,
    ) -> None:
        """Let the servers write their copies. Write the copies of servers that do not see the draft."""
        placement, number = self._job.placement, cut.number
        for server in placement.servers:
            self._call(partial(self._tell, server, WriteCut(number, str(draft.path), draft.token)))
        written = [_await_answer(number, answers) for _ in placement.servers]
        unseen = [shard for each in written if not each.seen for shard in placement.shards_of(each.server)]
        for shard in unseen:
            with ShardWriter(draft.path, draft.token, cut.slices[shard], entries[shard], pace) as writer:
                for begin in range(0, writer.size_bytes, PIECE_BYTES):
                    asked_s = time.monotonic()
                    wanted = FetchCut(number, shard, begin, min(PIECE_BYTES, writer.size_bytes - begin))
                    self._call(partial(self._tell, placement.server_of[shard], wanted))
                    writer.write(_await_answer(number, answers).piece)
                    self._rest(time.monotonic() - asked_s)

    def _pause(self, number: int, time_s: float) -> None:
        """Interrupt the writing of a checkpoint for this time, so that training can use the disk.

        Raises:
            CheckpointError: the run has ended.
        """
        if self._closed.wait(time_s):
            raise CheckpointError(f"Checkpoint {number} was not written: the run has ended.")

    def _rest(self, took_s: float) -> bool:
        """After a piece that took `took_s`, send nothing for a while, so that training can use the network.

        Return True if the run has ended.
        """
        return self._closed.wait(REST * took_s)

    def _await_completion(self, number: int, completion: queue.SimpleQueue[Completion]) -> Completion:
        """Wait until all workers have given the states of their scripts.

        Raises:
            CheckpointError: the run has ended, or the checkpoint cannot be completed.
        """
        self._waits_since_s = time.monotonic()
        try:
            completed = completion.get()
        finally:
            self._waits_since_s = None
        if completed.fault:
            raise CheckpointError(f"Checkpoint {number} was not written: {completed.fault}.")
        return completed


def _no_thread(error: RuntimeError) -> str:
    """Return a clause that says why a thread of a checkpoint did not start, and what to do."""
    return f"no thread can be started ({error}); raise the limit on the number of processes (ulimit -u)"


def _await_answer(number: int, answers: queue.SimpleQueue[_Answer]) -> _Answer:
    """Wait for an answer, and return it.

    Raises:
        CheckpointError: the answer is that the checkpoint cannot be written.
    """
    answer = answers.get()
    if answer.fault:
        raise CheckpointError(f"Checkpoint {number} was not written: {answer.fault}.")
    return answer


# -- The copies of a server's shards for a cut of the job, which a thread writes to the files of a checkpoint
#
# The event loop copies a shard at the moment of the cut, so training waits only for the copying. Copying into newly
# allocated memory would take several times longer, because the system provides each page when it is first touched. So a
# thread touches the memory before the cut, and the memory is kept for the next cuts.

TOUCHED_BYTES = 4 * 2**20
"""Number of bytes of new memory that are touched at a time."""


class Copy(NamedTuple):
    """A copy of a shard: the number of the cut, the shard's slice, the entries of its optimizer state, the content."""

    number: int
    bounds: ShardSlice
    entries: StateEntries
    content: memoryview


class ShardCopies:
    """Copies shards and writes the copies. There is at most one copy of each shard.

    Attributes:
        bell: a socket that is readable when a thread has made a report.
    """

    def __init__(self) -> None:
        self.bell, self._ringer = socket.socketpair()
        self.bell.setblocking(False)
        self._memory: dict[int, memoryview] = {}  # shard -> memory for its copy
        self._copies: dict[int, Copy] = {}
        self._reports: queue.SimpleQueue[CopiesReserved | CutWritten] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def reserve(self, stores: Mapping[int, Store]) -> None:
        """Reserve the memory for copies in a thread."""
        sizes = {
            shard: sum(part.nbytes for part in [*store.weights.values(), *store.optimizer_state().values()])
            for shard, store in stores.items()
        }
        self._begin(partial(self._reserve, sizes), CopiesReserved)

    def take(self, request: TakeCut, store: Store) -> StateEntries:
        """Copy the current content of a shard, and return the entries of its optimizer state."""
        state = store.optimizer_state()
        entries = store.state_entries(state)
        parts = shard_content(store.bounds, store.weights, state)
        size_bytes = sum(part.nbytes for part in parts)
        memory = self._memory.get(request.shard)
        if memory is None or memory.nbytes < size_bytes:  # the model or the state has changed meanwhile
            memory = self._memory[request.shard] = memoryview(bytearray(size_bytes))
        begin = 0
        for part in parts:
            memory[begin : begin + part.nbytes] = part
            begin += part.nbytes
        self._copies[request.shard] = Copy(request.number, store.bounds, entries, memory[:begin])
        return entries

    def write(self, message: WriteCut) -> None:
        """Start a thread that writes the copies if this machine sees the files."""
        copies = [copy for copy in self._copies.values() if copy.number == message.number]
        self._begin(partial(_write_copies, message, copies), partial(CutWritten, message.number))

    def piece(self, message: FetchCut) -> memoryview:
        """Return a piece of a copy; an empty piece if there is no such copy."""
        copy = self._copies.get(message.shard)
        if copy is None or copy.number != message.number:
            return memoryview(b"")
        return copy.content[message.begin : message.begin + message.size_bytes]

    def take_reports(self) -> list[CopiesReserved | CutWritten]:
        """Return the reports that the threads have made since the last call."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
        found = []
        while not self._reports.empty():
            found.append(self._reports.get_nowait())
        return found

    def close(self) -> None:
        """Close the bell."""
        self.bell.close()
        self._ringer.close()

    def _begin(
        self,
        work: Callable[[], CopiesReserved | CutWritten],
        failed: Callable[[str], CopiesReserved | CutWritten],
    ) -> None:
        """Do the given work in a thread, after all earlier work, and report its result.

        `failed` returns the report of work that has raised an exception, given the reason.
        """
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                yield_to_training()
                report = work()
            except Exception as error:  # without a report, the coordinator would wait for ever
                report = failed(first_line(error))
            self._report(report)

        thread = threading.Thread(target=run, name="paceline-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._report(failed(_no_thread(error)))
        else:
            self._thread = thread

    def _report(self, report: CopiesReserved | CutWritten) -> None:
        """Make a report, and ring the bell."""
        self._reports.put(report)
        with contextlib.suppress(OSError):  # the server has ended
            self._ringer.send(b"x")

    def _reserve(self, sizes: Mapping[int, int]) -> CopiesReserved:
        pace = Pace(BYTES_PER_S)
        for shard, size_bytes in sizes.items():
            if shard in self._memory and self._memory[shard].nbytes >= size_bytes:
                continue
            free_bytes = available_bytes()
            if free_bytes is not None and free_bytes < size_bytes:
                return CopiesReserved(
                    f"a copy of shard {shard} needs {size_bytes / 1e9:.3g} GB of memory, but only "
                    f"{free_bytes / 1e9:.3g} GB are available"
                )
            memory = torch.empty(size_bytes, dtype=torch.uint8)
            for piece in memory.split(TOUCHED_BYTES):
                piece.zero_()
                pace.spend(piece.nbytes)
            self._memory[shard] = bytes_of(memory)
        return CopiesReserved()


def _write_copies(message: WriteCut, copies: list[Copy]) -> CutWritten:
    """Write copies to the files of a checkpoint, if this machine sees the files."""
    path, pace = Path(message.path), Pace(BYTES_PER_S)
    if not is_draft(path, message.token):
        return CutWritten(message.number, seen=False)
    try:
        for copy in copies:
            with ShardWriter(path, message.token, copy.bounds, copy.entries, pace) as writer:
                writer.write(copy.content)
    except CheckpointError as error:
        return CutWritten(message.number, str(error))
    return CutWritten(message.number)
