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
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from .. import __version__
from ..core.protocol.layout import ShardSlice, item_bytes
from ..core.protocol.model_spec import ModelSpec
from ..core.protocol.state_entries import StateEntries
from ..errors import CheckpointError
from ..shard.buffer_bytes import bytes_of
from ..shard.vectors import torch_dtype
from .directory import PARTIAL, name_of, numbers_in, sync
from .manifest import FORMAT, FileRecord, Manifest, OptimizerRecord, files_in, record_of
from .pace import Pace
from .places import MODEL, PLACES, Settings, lay_out
from .shard_writing import mark_of

__all__ = ["Draft"]

SPARE_BYTES = 16 * 2**20
"""Space that is left free on the disk, among others for the manifest."""


class Draft:
    """A checkpoint that is being written. Returned by `begin`.

    Attributes:
        path: the directory in which the files are until the checkpoint is complete.
        size_bytes: size of all tensors in the files.
        token: what the files say about themselves. See `Places`.
    """

    def __init__(
        self, directory: Path, number: int, model: ModelSpec, entries: Sequence[StateEntries]
    ) -> None:
        self.path = directory / (name_of(number) + PARTIAL)
        self.size_bytes = 0
        self.token = ""
        self._directory = directory
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
            settings: the hyper-parameters in the groups of each of the script's optimizers. They add what servers do
                not know, such as `initial_lr`, and the settings of `paceline.LARS`.
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
            places = lay_out(draft.path, model, slices, entries, tensors or {}, settings)
            draft._members, draft.token = places.members, places.token
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
        """Complete the checkpoint, after all shards have been written, and remove the oldest ones.

        Args:
            job: the state of the job.
            workers: the state of each worker.
            versions: for each shard, the number of updates that its weights include.
            further: name of each further file -> its content.
            keep: number of checkpoints to keep.
            spared: number of a checkpoint that is kept besides: workers that join late begin with it, too.
            pace: rate at which the files are read for their checksums; None for no limit.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: a shard has not been written, or a file cannot be written. Nothing is left of them.
        """
        with self._or_discarded():
            for index in range(len(versions)):
                if not mark_of(self.path, index).exists():
                    raise CheckpointError(
                        f"Checkpoint {self._number} was not written: shard {index} is missing."
                    )
                mark_of(self.path, index).unlink()
            (self.path / PLACES).unlink()
            for name, content in {"job.json": job, **(further or {})}.items():
                (self.path / name).write_bytes(content)
            (self.path / "workers").mkdir()
            for worker, state in workers.items():
                (self.path / "workers" / f"{worker}.bin").write_bytes(state)
            self._manifest(versions, pace or Pace()).write(self.path)
            for folder in (self.path / "workers", self.path):
                sync(folder)
            complete = self._directory / name_of(self._number)
            self.path.rename(complete)
            sync(self._directory)
        for number in {*numbers_in(self._directory)[: -max(keep, 1)]} - {spared}:
            shutil.rmtree(self._directory / name_of(number), ignore_errors=True)
        return complete

    def discard(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _manifest(self, versions: Sequence[int], pace: Pace) -> Manifest:
        records: dict[str, FileRecord] = {}
        for path in files_in(self.path):
            sync(path)
            records[str(path.relative_to(self.path))] = record_of(path, pace)
        counters = self._entries[0].counters
        optimizers = tuple(
            OptimizerRecord(spec.name, spec.replaced, names, counters[index] if counters else ())
            for index, (spec, names) in enumerate(zip(self._model.optimizers, self._members, strict=True))
        )
        return Manifest(FORMAT, __version__, self._number, tuple(versions), optimizers, records)

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
            segment = bounds.segments[int(name.partition("/")[0])]
            state += (segment.stop - segment.start) * torch_dtype(dtype).itemsize
    return weights + state + sum(tensor.nbytes for tensor in tensors.values())
