"""Writes a checkpoint while training goes on.

    Draft.begin     creates the directory NUMBER.partial, with a mark that names the lineage, and all large files in
                    full size, so that the disk cannot fill up later
    ShardWriter     writes the bytes of one shard to their places in these files. Each shard has a writer. If the
                    process of the shard's server sees the files, the writer is in this process; otherwise, the writer
                    is in the process that receives the bytes
    Draft.finish    adds the small files, waits for the disk, writes the manifest, and renames the directory to NUMBER

So each byte is written once, no file is assembled in memory, and a checkpoint is complete or absent. Only the drafts of
earlier writers of the same lineage are removed (see `manifest`). All functions wait for the disk. Call them in a
separate thread or process, never in an event loop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from .. import VERSION
from ..core.layout import ModelSpec, ShardSlice, StateEntries, item_bytes, joint_counters
from ..errors import CheckpointError
from ..files import read_regular
from ..shard.optimizers import vectors_in
from ..shard.vectors import Vectors, bytes_of, segment_views, torch_dtype
from .manifest import (
    DRAFT,
    FORMAT,
    MANIFEST,
    PARTIAL,
    DraftMark,
    FileRecord,
    Manifest,
    OptimizerRecord,
    Pace,
    await_disk,
    carries,
    files_in,
    identity_of,
    name_of,
    numbers_in,
    read_draft,
    record_of,
)
from .places import MODEL, PLACES, Places, Settings, lay_out, optimizer_file

BEGUN = ".begun"
"""End of the name of a directory that will be a draft, or a copy of a checkpoint, as soon as it contains its mark."""

SPARE_BYTES = 16 * 2**20
"""Space that is left free on the disk, for example for the manifest."""


class Draft:
    """A checkpoint that is being written. Returned by `begin`.

    Attributes:
        path: the directory that contains the files until the checkpoint is complete.
        size_bytes: size of all tensors in the files.
        token: a random text by which a process recognizes the draft. See `DraftMark`.
    """

    def __init__(
        self, directory: Path, number: int, model: ModelSpec, entries: Sequence[StateEntries], origin: str
    ) -> None:
        self.path = directory / (name_of(number) + PARTIAL)
        self.size_bytes = 0
        self.token = secrets.token_hex(16)
        self._directory = directory
        self._lineage = identity_of(directory)
        self._origin = origin
        self._number = number
        self._model = model
        self._entries = entries
        self._members: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def begin(
        cls,
        directory: Path,
        number: int,
        model: ModelSpec,
        slices: Sequence[ShardSlice],
        entries: Sequence[StateEntries],
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        settings: Sequence[Settings] = (),
        origin: str = "",
    ) -> Draft:
        """Remove the drafts of earlier attempts, create the directory of the draft, and lay out its files.

        Args:
            directory: directory of all checkpoints of the lineage. The name of the directory is the identity of the
                lineage. The directory is created if necessary.
            number: number of the checkpoint.
            model: the model.
            slices: the slices of all shards, in order.
            entries: the entries of each shard's optimizer state.
            tensors: values of the model's buffers, by name.
            settings: the hyper-parameters in the groups of each of the script's optimizers. They include settings that
                servers do not know, such as `initial_lr`, and the settings of `paceline.LARS`.
            origin: the checkpoint with which this lineage has begun, if that checkpoint is of another lineage; else "".

        Raises:
            CheckpointError: there is too little space, or the files cannot be written. All files of the draft have been
                removed.
        """
        draft = cls(directory, number, model, entries, origin)
        assert draft._lineage, f"{directory} is not named after a lineage"
        draft.size_bytes = _size_bytes(model, slices, entries, tensors or {})
        with draft._or_discarded():
            directory.mkdir(parents=True, exist_ok=True)
            remove_drafts(directory)
            draft._require_space(draft.size_bytes)
            draft._require_free(draft.path)
            mark_new(directory, DraftMark(draft._lineage, draft.token), draft.path)
            places = lay_out(draft.path, model, slices, entries, tensors or {}, settings)
            draft._members = places.members
            for path in files_in(draft.path):
                with path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            with (draft.path / MODEL).open("r+b") as file:
                for name, tensor in (tensors or {}).items():
                    file.seek(places.tensors[name])
                    file.write(bytes_of(tensor.detach().contiguous().reshape(-1)))
            (draft.path / PLACES).write_bytes(msgspec.json.encode(places))
        return draft

    def finish(
        self,
        job: bytes,
        workers: Mapping[int, bytes],
        *,
        versions: Sequence[int],
        further: Mapping[str, bytes] | None = None,
        keep: int = 3,
        spared: int = 0,
        pace: Pace | None = None,
    ) -> Path:
        """Complete the checkpoint, after all shards have been written, and remove the oldest checkpoints.

        Args:
            job: the state of the job.
            workers: the state of each worker.
            versions: for each shard, the number of updates that its weights include.
            further: name of each further file -> its content.
            keep: number of checkpoints to keep.
            spared: number of a checkpoint that is kept in addition, because workers that join late begin with this
                checkpoint.
            pace: rate at which the files are read for their checksums; None for no limit.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: a shard has not been written, or a file cannot be written. All files of the draft have been
                removed.
        """
        with self._or_discarded():
            self._require_own()
            for index in range(len(versions)):
                if not (written := _written_file(self.path, index)).exists():
                    raise CheckpointError(
                        f"Checkpoint {self._number} was not written: shard {index} is missing."
                    )
                written.unlink()
            (self.path / PLACES).unlink()
            for name, content in {"job.json": job, **(further or {})}.items():
                (self.path / name).write_bytes(content)
            (self.path / "workers").mkdir()
            for worker, state in workers.items():
                (self.path / "workers" / f"{worker}.bin").write_bytes(state)
            self._manifest(versions, pace or Pace()).write(self.path)
            complete = self._directory / name_of(self._number)
            self._require_own()
            self._require_free(complete)
            for folder in (self.path / "workers", self.path):
                await_disk(folder)
            self.path.rename(complete)
            await_disk(self._directory)
        with contextlib.suppress(OSError):
            (complete / DRAFT).unlink()
            numbers = numbers_in(self._directory)
            own = [number for number in numbers if carries(self._directory / name_of(number), self._lineage)]
            for number in {*own[: -max(keep, 1)]} - {spared}:
                remove(self._directory / name_of(number))
        return complete

    def discard(self) -> None:
        """Remove the files, unless the directory now belongs to another draft."""
        with contextlib.suppress(OSError):
            if is_draft(self.path, self.token):
                remove(self.path)

    def _manifest(self, versions: Sequence[int], pace: Pace) -> Manifest:
        records: dict[str, FileRecord] = {}
        for path in files_in(self.path):
            await_disk(path)
            records[str(path.relative_to(self.path))] = record_of(path, pace)
        counters = joint_counters(each.counters for each in self._entries)
        optimizers = tuple(
            OptimizerRecord(
                spec.name,
                spec.replaced,
                names,
                counters[index] if counters else (),
                spec.whole or msgspec.UNSET,
            )
            for index, (spec, names) in enumerate(zip(self._model.optimizers, self._members, strict=True))
        )
        return Manifest(
            FORMAT,
            VERSION,
            self._number,
            tuple(versions),
            optimizers,
            records,
            self._lineage,
            self._origin,
        )

    def _require_own(self) -> None:
        if not is_draft(self.path, self.token):
            raise CheckpointError(
                f"Checkpoint {self._number} was not written: somebody has removed {self.path}, or another run writes "
                "to the same directory."
            )

    def _require_free(self, place: Path) -> None:
        if os.path.lexists(place):
            raise CheckpointError(
                f"Checkpoint {self._number} was not written: {place} is there already, and this run has not written "
                "it."
            )

    def _require_space(self, size_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._directory).free
        needed_bytes = size_bytes + SPARE_BYTES
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"Checkpoint {self._number} was not written: it needs {needed_bytes / 1e9:.3g} GB, but only "
                f"{free_bytes / 1e9:.3g} GB are free in {self._directory}. Free space there, or choose another "
                "directory."
            )

    @contextlib.contextmanager
    def _or_discarded(self) -> Iterator[None]:
        """Remove the files if an exception occurs, and raise `CheckpointError` for an `OSError`."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise CheckpointError(
                f"Checkpoint {self._number} was not written to {self._directory}: {error.strerror or error}. Earlier "
                "checkpoints are unchanged."
            ) from error
        except BaseException:
            self.discard()
            raise


def mark_new(directory: Path, mark: DraftMark, path: Path | None = None) -> Path:
    """Create a directory that contains only a mark, and return its path.

    Args:
        directory: the directory of the lineage.
        mark: the mark, which names the lineage.
        path: path of the new directory; None for a temporary name.

    Raises:
        OSError: the directory cannot be created. Files that were already created have been removed.
    """
    begun = directory / (mark.token + BEGUN)
    begun.mkdir()
    try:
        (begun / DRAFT).write_bytes(msgspec.json.encode(mark))
        return begun if path is None else begun.rename(path)
    except OSError:
        shutil.rmtree(begun, ignore_errors=True)
        raise


def remove_drafts(directory: Path) -> None:
    """Remove the drafts that earlier writers of a lineage have left in the directory of the lineage.

    Raises:
        OSError: a file cannot be removed.
    """
    for path in directory.iterdir():
        if path.name.endswith((PARTIAL, BEGUN)) and carries(path, identity_of(directory)):
            remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, complete or not.

    The file that names the lineage is removed last. So if the removal is interrupted, a later call can complete the
    removal.

    Raises:
        OSError: a file cannot be removed.
    """
    last = {checkpoint / DRAFT, checkpoint / MANIFEST}
    for path in sorted(checkpoint.iterdir(), key=lambda path: (path in last, path.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    checkpoint.rmdir()


def _size_bytes(
    model: ModelSpec,
    slices: Sequence[ShardSlice],
    entries: Sequence[StateEntries],
    tensors: Mapping[str, torch.Tensor],
) -> int:
    """Return the size of all tensors of a checkpoint."""
    weights = sum(p.size * item_bytes(p.dtype) * len(p.names) for p in model.layout.parameters)
    state = 0
    for bounds, found in zip(slices, entries, strict=True):
        for name, dtype in found.vectors.items():
            state += found.size_of(name, bounds) * torch_dtype(dtype).itemsize
    return weights + state + sum(tensor.nbytes for tensor in tensors.values())


# -- Writes the content of one shard to its places in the files of a checkpoint, in pieces and at a limited rate
#
# A draft may be removed while it is being written, and another draft may get its name. So a writer knows the token
# of its draft, and compares this token with the token in the directory whenever it writes.

PIECE_BYTES = 1024 * 1024
"""Number of bytes after which a writer pauses to keep to its pace."""

SYNC_BYTES = 32 * PIECE_BYTES
"""Number of bytes after which a writer waits for the disk, so that a full cache does not delay other processes."""


def shard_content(bounds: ShardSlice, weights: Vectors, state: Vectors) -> list[memoryview]:
    """Return the content of a shard in the order in which a `ShardWriter` expects it.

    The content shares the memory of the vectors.

    Args:
        bounds: the shard.
        weights: the shard's slice of the weights.
        state: the shard's optimizer state, as returned by `Store.optimizer_state()`.
    """
    vectors = [vector.contiguous() for vector in vectors_in(state).values()]
    return [bytes_of(vector.reshape(-1)) for vector in [*segment_views(bounds, weights), *vectors]]


class ShardWriter:
    """Writes the content of one shard to its places in the files of a draft.

    As a context manager, the writer closes the files on exit. The shard counts as written only if all of its content is
    on the disk when the writer exits.

    Args:
        path: the directory of the draft.
        token: `Draft.token`.
        bounds: the shard.
        entries: the entries of the shard's optimizer state, as given to `Draft.begin`.
        pace: the rate at which to write; None for no limit.

    Attributes:
        size_bytes: size of the content.

    Raises:
        CheckpointError: the draft has been discarded, or another run writes a draft with this name.
    """

    def __init__(
        self, path: Path, token: str, bounds: ShardSlice, entries: StateEntries, pace: Pace | None = None
    ) -> None:
        self._path = path
        self._token = token
        self._shard = bounds.index
        self._pace = pace or Pace()
        self._files: dict[str, int] = {}
        self._unsynced_bytes = 0
        try:
            with self._explained():
                places = msgspec.json.decode(read_regular(path / PLACES), type=Places)
                parts = [part for part in _parts(places, bounds, entries) if part[0]]  # without empty parts
                self._left = parts[::-1]
                for _, targets in self._left:
                    for name, _ in targets:
                        if name not in self._files:
                            self._files[name] = os.open(path / name, os.O_WRONLY)
            self._require_own()  # after all files have been opened
        except CheckpointError:
            self._close()
            raise
        self.size_bytes = sum(size_bytes for size_bytes, _ in self._left)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._complete()
        finally:
            self._close()

    def _close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the next part of the content, which may have any size.

        Raises:
            CheckpointError: the data cannot be written, the draft has been removed, or there is more data than fits.
        """
        self._require_own()
        view = memoryview(data).cast("B")
        with self._explained():
            while view.nbytes:
                if not self._left:
                    raise CheckpointError(f"shard {self._shard} has more than {self.size_bytes} bytes")
                size_bytes, targets = self._left.pop()
                piece = view[: min(size_bytes, PIECE_BYTES)]
                for name, begin in targets:
                    _write_at(self._files[name], piece, begin)
                    self._spend(piece.nbytes)
                view = view[piece.nbytes :]
                if piece.nbytes < size_bytes:
                    rest = [(name, begin + piece.nbytes) for name, begin in targets]
                    self._left.append((size_bytes - piece.nbytes, rest))

    def _spend(self, size_bytes: int) -> None:
        self._pace.spend(size_bytes)
        self._unsynced_bytes += size_bytes
        if self._unsynced_bytes >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        self._unsynced_bytes = 0
        for descriptor in self._files.values():
            os.fdatasync(descriptor)
        self._require_own()

    def _require_own(self) -> None:
        """Raise `CheckpointError` if the draft has been removed, or if another draft has taken its name."""
        if not is_draft(self._path, self._token):
            raise CheckpointError(
                f"shard {self._shard} cannot be written to {self._path}: somebody has removed this draft, or another "
                "run writes to the same directory"
            )

    def _complete(self) -> None:
        if self._left:
            left_bytes = sum(size_bytes for size_bytes, _ in self._left)
            raise CheckpointError(
                f"{left_bytes} of the {self.size_bytes} bytes of shard {self._shard} are missing"
            )
        with self._explained():
            self._sync()
            _written_file(self._path, self._shard).touch()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise `CheckpointError` for an `OSError`."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"shard {self._shard} cannot be written to {self._path}: {error.strerror or error}"
            ) from error


Part = tuple[int, list[tuple[str, int]]]
"""A part of a shard's content: its size in bytes, and the files and offsets to which it is written."""


def _parts(places: Places, bounds: ShardSlice, entries: StateEntries) -> Iterator[Part]:
    """Yield the parts of a shard's content, in the order of `shard_content`."""
    for segment in bounds.segments:
        item = item_bytes(segment.dtype)
        begin = segment.offset * item
        size_bytes = (segment.stop - segment.start) * item
        yield size_bytes, [(MODEL, place + begin) for place in places.weights[segment.parameter]]
    for name in sorted(entries.vectors):
        position, _, key = name.partition("/")
        segment = bounds.segments[int(position)]
        item = torch_dtype(entries.vectors[name]).itemsize
        size_bytes = entries.size_of(name, bounds) * item
        begin = places.state[segment.parameter][key] + segment.offset * item
        yield size_bytes, [(optimizer_file(places.optimizer[segment.parameter]), begin)]


def is_draft(path: Path, token: str) -> bool:
    """Return True if a directory is the draft with this token, and not a different draft with the same path.

    Args:
        path: the directory.
        token: `Draft.token`.
    """
    draft = read_draft(path)
    return draft is not None and draft.token == token


def _write_at(descriptor: int, data: memoryview, begin: int) -> None:
    written = 0
    while written < data.nbytes:
        written += os.pwrite(descriptor, data[written:], begin + written)


def _written_file(path: Path, shard: int) -> Path:
    """Return the path of the empty file that exists once a shard has been written."""
    return path / f"shard-{shard}.written"
