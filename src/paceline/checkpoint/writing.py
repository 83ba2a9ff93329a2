"""Writes a checkpoint beside training.

    Draft.begin     creates NUMBER.partial with all large files in full size, so that the disk cannot fill up later
    ShardWriter     writes the bytes of one shard to their places in these files. Each shard has a writer, in the
                    server's own process if it sees the same file system, else in the process that receives the bytes
    Draft.finish    adds the small files, waits for the disk, writes the manifest, and renames the directory to NUMBER

So each byte is written once, nothing is put together in memory, and a checkpoint is complete or absent. All functions
wait for the disk. Call them in a thread or a process of their own, never in an event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import safetensors.torch
import torch

from .. import __version__
from ..core.protocol.layout import ShardSlice, item_bytes
from ..core.protocol.model_spec import ModelSpec
from ..core.protocol.state_entries import StateEntries
from ..errors import CheckpointError
from ..shard.buffer_bytes import bytes_of
from ..shard.vectors import Vectors, segment_views, torch_dtype
from .manifest import FORMAT, FileRecord, Manifest, OptimizerRecord, files_in, read_manifest, record_of
from .pace import Pace
from .places import MODEL, ParamGroups, Places, lay_out, optimizer_file

__all__ = ["NAME", "PARTIAL", "Draft", "ShardWriter", "name_of", "next_number", "numbers_in", "shard_content"]

PIECE_BYTES = 1024 * 1024
"""Number of bytes after which a writer keeps to its pace."""

SYNC_BYTES = 32 * PIECE_BYTES
"""Number of bytes after which a writer waits for the disk, so that a full cache does not delay other processes."""

SPARE_BYTES = 16 * 2**20
"""Space that is left free on the disk, among others for the manifest."""

FROZEN = "frozen.safetensors"
PLACES = "places.json"
PARTIAL = ".partial"
NAME = re.compile(r"\d{6,}")


def name_of(number: int) -> str:
    """Return the name of a checkpoint's directory: "000012" for 12."""
    return f"{number:06d}"


def numbers_in(directory: Path, suffix: str = "") -> list[int]:
    """Return the numbers of the checkpoints in a directory, in ascending order; [] if there is no such directory.

    Args:
        directory: the directory.
        suffix: end of the names: "" for complete checkpoints, ".partial" for those that are not.
    """
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if NAME.fullmatch(stem))


def next_number(directory: Path) -> int:
    """Return the number of the next checkpoint in a directory: 1 more than the highest, or 1."""
    return max([0, *numbers_in(directory), *numbers_in(directory, PARTIAL)]) + 1


class Draft:
    """A checkpoint that is being written. Returned by `begin`.

    Attributes:
        path: the directory in which the files are until the checkpoint is complete.
        size_bytes: size of all tensors in the files.
    """

    def __init__(
        self, directory: Path, number: int, model: ModelSpec, entries: Sequence[StateEntries]
    ) -> None:
        self.path = directory / (name_of(number) + PARTIAL)
        self.size_bytes = 0
        self._directory = directory
        self._number = number
        self._model = model
        self._entries = entries
        self._members: tuple[tuple[str, ...], ...] = ()
        self._frozen: dict[str, str] = {}

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
        frozen: Mapping[str, torch.Tensor] | None = None,
        param_groups: Sequence[ParamGroups] | None = None,
        further_bytes: int = 0,
    ) -> Draft:
        """Create the directory and lay out its files, after everything that an earlier attempt has left is removed.

        Args:
            directory: directory of all checkpoints of the run. It is created if necessary.
            number: number of the checkpoint.
            model: the model.
            slices: the slices of all shards, in order.
            entries: the entries of each shard's optimizer state.
            tensors: values of the model's buffers, by name.
            frozen: values of the model's frozen parameters, by name. They are written once: later checkpoints refer
                to the same file.
            param_groups: the groups of each optimizer, in the form of `ParamGroups`; None to derive them from what
                the servers know. Servers lack the settings that only the script's optimizer has, such as `initial_lr`
                and those of `paceline.LARS`.
            further_bytes: size of the other files.

        Raises:
            CheckpointError: there is too little space, or the files cannot be written. Nothing is left of them.
        """
        draft = cls(directory, number, model, entries)
        draft.size_bytes = _size_bytes(model, slices, entries, tensors or {})
        with draft._or_discarded():
            directory.mkdir(parents=True, exist_ok=True)
            draft._require_space(draft.size_bytes + further_bytes)
            for earlier in numbers_in(directory, PARTIAL):
                shutil.rmtree(directory / (name_of(earlier) + PARTIAL))
            draft.path.mkdir()
            places = lay_out(draft.path, model, slices, entries, tensors or {}, param_groups)
            draft._members = places.members
            for path in files_in(draft.path):
                with path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            with (draft.path / MODEL).open("r+b") as file:
                for name, tensor in (tensors or {}).items():
                    file.seek(places.tensors[name])
                    file.write(bytes_of(tensor.detach().contiguous().reshape(-1)))
            draft._add_frozen(frozen or {})
            (draft.path / PLACES).write_bytes(msgspec.json.encode(places))
        return draft

    def finish(
        self,
        job: bytes,
        workers: Mapping[int, bytes],
        *,
        versions: Sequence[int],
        tracked: bytes | None = None,
        keep: int = 3,
        pace: Pace | None = None,
    ) -> Path:
        """Complete the checkpoint, after all shards have been written, and remove the oldest ones.

        Args:
            job: the state of the job.
            workers: the state of each worker.
            versions: for each shard, the number of updates that its weights include.
            tracked: the states of the objects that the script tracks; None if there are none.
            keep: number of checkpoints to keep.
            pace: rate at which the files are read for their checksums; None for no limit.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: a shard has not been written, or a file cannot be written. Nothing is left of them.
        """
        with self._or_discarded():
            for index in range(len(versions)):
                if not _mark_of(self.path, index).exists():
                    raise CheckpointError(
                        f"Checkpoint {self._number} was not written: shard {index} is missing."
                    )
                _mark_of(self.path, index).unlink()
            (self.path / PLACES).unlink()
            (self.path / "job.json").write_bytes(job)
            (self.path / "workers").mkdir()
            for worker, state in workers.items():
                (self.path / "workers" / f"{worker}.bin").write_bytes(state)
            if tracked is not None:
                (self.path / "tracked.bin").write_bytes(tracked)
            self._manifest(versions, pace or Pace()).write(self.path)
            for folder in (self.path / "workers", self.path):
                _sync(folder)
            complete = self._directory / name_of(self._number)
            self.path.rename(complete)
            _sync(self._directory)
        for number in numbers_in(self._directory)[: -max(keep, 1)]:
            shutil.rmtree(self._directory / name_of(number), ignore_errors=True)
        return complete

    def discard(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _manifest(self, versions: Sequence[int], pace: Pace) -> Manifest:
        records: dict[str, FileRecord] = {}
        for path in files_in(self.path):
            _sync(path)
            if path.name != FROZEN:
                records[str(path.relative_to(self.path))] = record_of(path, pace)
        counters = self._entries[0].counters
        optimizers = tuple(
            OptimizerRecord(spec.name, spec.replaced, names, counters[index] if counters else ())
            for index, (spec, names) in enumerate(zip(self._model.optimizers, self._members, strict=True))
        )
        return Manifest(FORMAT, __version__, self._number, tuple(versions), optimizers, self._frozen, records)

    def _add_frozen(self, frozen: Mapping[str, torch.Tensor]) -> None:
        """Write the frozen parameters, or refer to the file of the newest checkpoint if it has the same ones."""
        self._frozen = {spec.name: spec.digest for spec in self._model.frozen if spec.name in frozen}
        if not self._frozen:
            return
        for number in reversed(numbers_in(self._directory)):
            earlier = self._directory / name_of(number)
            with contextlib.suppress(CheckpointError, OSError):
                if read_manifest(earlier).frozen == self._frozen:
                    os.link(earlier / FROZEN, self.path / FROZEN)
                    return
        self._require_space(sum(tensor.nbytes for tensor in frozen.values()))
        safetensors.torch.save_file(
            {name: frozen[name].detach().contiguous() for name in self._frozen}, self.path / FROZEN
        )

    def _require_space(self, size_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes < size_bytes + SPARE_BYTES:
            raise CheckpointError(
                f"Checkpoint {self._number} was not written: it needs {size_bytes / 1e9:.3g} GB, but only "
                f"{free_bytes / 1e9:.3g} GB are free in {self._directory}. Free space there, or choose another "
                "directory."
            )

    @contextlib.contextmanager
    def _or_discarded(self) -> Iterator[None]:
        """Remove the files if an exception occurs."""
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


def shard_content(bounds: ShardSlice, weights: Vectors, state: Vectors) -> list[memoryview]:
    """Return the content of a shard in the order in which a `ShardWriter` expects it.

    The content shares the memory of the vectors.

    Args:
        bounds: the shard.
        weights: the shard's slice of the weights.
        state: the shard's optimizer state, as returned by `Store.optimizer_state()`.
    """
    vectors = [state[name].contiguous() for name in sorted(state) if state[name].dim()]
    return [bytes_of(vector.reshape(-1)) for vector in [*segment_views(bounds, weights), *vectors]]


class ShardWriter:
    """Writes the content of one shard to its places in the files of a draft.

    As a context manager, it closes the files in the end. The shard counts as written only if all of its content is on
    the disk by then.

    Args:
        path: the directory of the draft.
        bounds: the shard.
        entries: the entries of its optimizer state, as given to `Draft.begin`.
        pace: the rate at which to write; None for no limit.

    Attributes:
        size_bytes: size of the content.

    Raises:
        CheckpointError: the draft has been discarded.
    """

    def __init__(
        self, path: Path, bounds: ShardSlice, entries: StateEntries, pace: Pace | None = None
    ) -> None:
        self._path = path
        self._shard = bounds.index
        self._pace = pace or Pace()
        self._files: dict[str, int] = {}
        self._unsynced_bytes = 0
        with self._explained():
            places = msgspec.json.decode((path / PLACES).read_bytes(), type=Places)
            self._left = list(reversed(list(_regions(places, bounds, entries))))
            for _, targets in self._left:
                for name, _ in targets:
                    if name not in self._files:
                        self._files[name] = os.open(path / name, os.O_WRONLY)
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
            for descriptor in self._files.values():
                os.close(descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the next part of the content, which may have any size.

        Raises:
            CheckpointError: the data cannot be written, or there is more than expected.
        """
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

    def _complete(self) -> None:
        if self._left:
            left_bytes = sum(size_bytes for size_bytes, _ in self._left)
            raise CheckpointError(
                f"{left_bytes} of the {self.size_bytes} bytes of shard {self._shard} are missing"
            )
        with self._explained():
            self._sync()
            _mark_of(self._path, self._shard).touch()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"shard {self._shard} cannot be written to {self._path}: {error.strerror or error}"
            ) from error


def _size_bytes(
    model: ModelSpec,
    slices: Sequence[ShardSlice],
    entries: Sequence[StateEntries],
    tensors: Mapping[str, torch.Tensor],
) -> int:
    """Return the size of all tensors of a checkpoint, without frozen parameters."""
    weights = sum(p.size * item_bytes(p.dtype) * len(p.names) for p in model.layout.parameters)
    state = 0
    for bounds, found in zip(slices, entries, strict=True):
        for name, dtype in found.vectors.items():
            segment = bounds.segments[int(name.partition("/")[0])]
            state += (segment.stop - segment.start) * torch_dtype(dtype).itemsize
    return weights + state + sum(tensor.nbytes for tensor in tensors.values())


Region = tuple[int, list[tuple[str, int]]]
"""A part of a shard's content: its size in bytes, and the files and offsets to which it is written."""


def _regions(places: Places, bounds: ShardSlice, entries: StateEntries) -> Iterator[Region]:
    """Return the regions of a shard's content, in the order of `shard_content`."""
    for segment in bounds.segments:
        item = item_bytes(segment.dtype)
        begin = segment.offset * item
        size_bytes = (segment.stop - segment.start) * item
        yield size_bytes, [(MODEL, place + begin) for place in places.weights[segment.parameter]]
    for name in sorted(entries.vectors):
        position, _, key = name.partition("/")
        segment = bounds.segments[int(position)]
        item = torch_dtype(entries.vectors[name]).itemsize
        size_bytes = (segment.stop - segment.start) * item
        place = places.state[segment.parameter].get(key)
        file = optimizer_file(places.optimizer[segment.parameter])
        # An optimizer that has replaced another one may not train all parameters of its set.
        targets = [] if place is None else [(file, place + segment.offset * item)]
        yield size_bytes, targets


def _write_at(descriptor: int, data: memoryview, begin: int) -> None:
    written = 0
    while written < data.nbytes:
        written += os.pwrite(descriptor, data[written:], begin + written)


def _mark_of(path: Path, shard: int) -> Path:
    """Return the path of the empty file that exists once a shard has been written."""
    return path / f"shard-{shard}.written"


def _sync(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
