"""A checkpoint that is not whole is recognized, and the one before it is used."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from paceline.checkpoints.manifest import (
    DRAFT,
    FORMAT,
    DraftMark,
    FileRecord,
    Pace,
    files_in,
    numbers_in,
    read_manifest,
    record_of,
)
from paceline.checkpoints.reading import Checkpoint, NewestCheckpoint, newest_whole
from paceline.checkpoints.writing import Draft, ShardWriter, shard_content
from paceline.core.coordinator import Coordinator
from paceline.core.job_cut import EpochCut, JobCut, LoaderCut, WorkerTimes
from paceline.core.lease import DataOrder, Lease
from paceline.errors import CheckpointError
from paceline.run.resuming import require_meaningful
from paceline.sync.schedule import read_schedule
from tests.support.sharded import LINEAGE, Net, Shards, model_of
from tests.support.small_disk import fill, small_disk

FILES = [
    *("model.safetensors", "optimizer-0.pt", "job.json", "workers/0.bin", "workers/12.bin"),
    "manifest.json",
]


ORDER = DataOrder(100, 8, False, "dynamic", "digest")
LOADER = LoaderCut(
    name="loader",
    opened=2,
    order=ORDER,
    epochs=(EpochCut(1, ORDER, 40),),
    returned=(Lease(1, 8, 8, 8, 1),),
    total=140,
    used=132,
    times=(WorkerTimes(0, 1.5, ((8, 0.1), (8, 0.2))),),
)


def shards() -> Shards:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    made = Shards(model_of(net, [optimizer]), 2, net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step(net, [optimizer])
    return made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints."""
    directory = tmp_path_factory.mktemp("checkpoints") / LINEAGE
    made = shards()
    made.write(directory, 1)
    made.write(directory, 2)
    assert newest_whole(directory).faults == ()
    return directory


@pytest.fixture
def directory(two: Path, tmp_path: Path) -> Path:
    """A directory with two checkpoints that the test may damage."""
    return shutil.copytree(two, tmp_path / LINEAGE)


def the_first_is_used(found: NewestCheckpoint) -> str:
    """Check that the first of two checkpoints is used. Return why the second one is not."""
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.number == 1
    (fault,) = found.faults
    assert fault.startswith("Checkpoint 2 is not used: ")
    assert fault.endswith(".")
    assert "\n" not in fault
    return fault


def test_these_are_all_files(two: Path) -> None:
    path = two / "000002"
    assert [str(file.relative_to(path)) for file in files_in(path)] == sorted(FILES)
    assert {*read_manifest(path).files, "manifest.json"} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_recognized(name: str, directory: Path) -> None:
    file = directory / "000002" / name
    file.write_bytes(file.read_bytes()[:-1])
    if name == "manifest.json":
        # Only the line break is missing. The manifest means what it meant.
        assert newest_whole(directory).faults == ()
        file.write_bytes(file.read_bytes()[:-1])
    assert name in the_first_is_used(newest_whole(directory))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_recognized(name: str, place: float, directory: Path) -> None:
    file = directory / "000002" / name
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 4
    file.write_bytes(data)
    assert f"{name} is damaged" in the_first_is_used(newest_whole(directory))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_recognized(name: str, directory: Path) -> None:
    (directory / "000002" / name).unlink()
    fault = the_first_is_used(newest_whole(directory))
    assert fault == f"Checkpoint 2 is not used: {Path(name).name} cannot be read: No such file or directory."


def test_a_checkpoint_in_another_format_is_recognized(directory: Path) -> None:
    manifest = read_manifest(directory / "000002")
    msgspec.structs.replace(manifest, format=FORMAT + 1, paceline="9.1").write(directory / "000002")
    fault = the_first_is_used(newest_whole(directory))
    assert f"Paceline 9.1 has written it in format {FORMAT + 1}, but Paceline" in fault


def test_a_checkpoint_that_was_being_written_is_recognized(directory: Path) -> None:
    (directory / "000002").rename(directory / "000002.partial")
    fault = the_first_is_used(newest_whole(directory))
    assert fault == "Checkpoint 2 is not used: the run ended while it was being written."


def test_without_a_whole_checkpoint_there_is_none(directory: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        (directory / f"00000{number}" / "manifest.json").unlink()
    found = newest_whole(directory)
    assert found.checkpoint is None
    assert len(found.faults) == 2
    assert newest_whole(tmp_path / "nowhere") == NewestCheckpoint(None, ())


def test_only_the_newest_checkpoints_are_kept(directory: Path) -> None:
    made = shards()
    for number in (3, 4, 5):
        made.write(directory, number, keep=2)
    assert numbers_in(directory) == [4, 5]


def test_the_checkpoint_with_which_the_run_has_begun_is_kept_as_well(directory: Path) -> None:
    made = shards()
    for number in (3, 4, 5):
        made.write(directory, number, keep=2, spared=2)
    assert numbers_in(directory) == [2, 4, 5]


def test_a_checkpoint_is_complete_even_if_the_earlier_ones_cannot_be_listed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> list[int]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("paceline.checkpoints.writing.numbers_in", fail)
    assert shards().write(directory, 3, keep=1) == directory / "000003"
    assert numbers_in(directory) == [1, 2, 3]


def test_the_next_checkpoint_removes_what_a_killed_writer_has_left(directory: Path) -> None:
    (directory / "000007.partial").mkdir()
    (directory / "000007.partial" / "model.safetensors").write_bytes(bytes(100))
    (directory / "000007.partial" / DRAFT).write_bytes(msgspec.json.encode(DraftMark(LINEAGE, "killed")))
    shards().write(directory, 8)
    assert sorted(path.name for path in directory.iterdir()) == ["000001", "000002", "000008"]


def test_a_shard_that_is_not_written_completely_leaves_no_checkpoint(directory: Path) -> None:
    made = shards()
    states = [store.optimizer_state() for store in made.stores]
    entries = [store.state_entries(s) for store, s in zip(made.stores, states, strict=True)]
    draft = Draft.begin(directory, 3, made.model, made.slices, entries)
    first, second = (
        shard_content(bounds, store.weights, state)
        for bounds, store, state in zip(made.slices, made.stores, states, strict=True)
    )
    with ShardWriter(draft.path, draft.token, made.slices[0], entries[0]) as writer:
        for part in first:
            writer.write(part)
        with pytest.raises(CheckpointError, match="shard 0 has more than"):
            writer.write(b"more")
    with contextlib.ExitStack() as opened:
        writer = opened.enter_context(ShardWriter(draft.path, draft.token, made.slices[1], entries[1]))
        for part in second[:-1]:
            writer.write(part)
        with pytest.raises(CheckpointError, match="bytes of shard 1 are missing"):
            opened.close()
    with pytest.raises(CheckpointError, match=r"^Checkpoint 3 was not written: shard 1 is missing\.$"):
        draft.finish(b"", {}, versions=[1, 1])
    assert sorted(path.name for path in directory.iterdir()) == ["000001", "000002"]
    with pytest.raises(CheckpointError, match="No such file"):
        ShardWriter(draft.path, draft.token, made.slices[1], entries[1])


def test_a_writer_that_cannot_open_all_files_closes_the_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shards()
    entries = [store.state_entries(store.optimizer_state()) for store in made.stores]
    draft = Draft.begin(directory, 3, made.model, made.slices, entries)
    (draft.path / "model.safetensors").unlink()
    opened: list[int] = []
    usual = os.open

    def noted(*arguments: Any, **options: Any) -> int:
        opened.append(usual(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(os, "open", noted)
    with pytest.raises(CheckpointError, match="No such file"):
        ShardWriter(draft.path, draft.token, made.slices[0], entries[0])
    assert opened
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 32 * 2**20) as folder:
        yield folder / LINEAGE


def test_a_disk_that_is_too_small_is_recognized_before_anything_is_written(disk: Path) -> None:
    made = shards()
    made.write(disk, 1)
    fill(disk.parent)
    with pytest.raises(CheckpointError) as refusal:
        made.write(disk, 2)
    assert "Checkpoint 2 was not written: it needs" in str(refusal.value)
    assert f"only 0 GB are free in {disk}" in str(refusal.value)
    assert sorted(path.name for path in disk.iterdir()) == ["000001"]
    found = newest_whole(disk)
    assert found.checkpoint is not None
    assert found.faults == ()


def test_the_draft_of_a_killed_writer_takes_no_space_from_the_next_checkpoint(disk: Path) -> None:
    left = disk / "000007.partial"
    left.mkdir(parents=True)
    (left / DRAFT).write_bytes(msgspec.json.encode(DraftMark(LINEAGE, "killed")))
    fill(left)
    shards().write(disk, 8)
    assert sorted(path.name for path in disk.iterdir()) == ["000008"]


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_leaves_the_earlier_one(disk: Path) -> None:
    made = shards()
    made.write(disk, 1)
    states = [store.optimizer_state() for store in made.stores]
    entries = [store.state_entries(s) for store, s in zip(made.stores, states, strict=True)]
    draft = Draft.begin(disk, 2, made.model, made.slices, entries)
    fill(disk.parent)
    for bounds, store, state, of in zip(made.slices, made.stores, states, entries, strict=True):
        with ShardWriter(draft.path, draft.token, bounds, of) as writer:
            for part in shard_content(bounds, store.weights, state):
                writer.write(part)  # the space is reserved
    with pytest.raises(CheckpointError, match="No space left on device"):
        draft.finish(bytes(10000), {}, versions=[1, 1])
    found = newest_whole(disk)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.number == 1
    assert sorted(path.name for path in disk.iterdir()) == ["000001"]


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from paceline.checkpoints.reading import newest_whole
from itertools import count
from tests.checkpoints.test_damaged_checkpoints import shards
from tests.support.sharded import LINEAGE, Shards

directory, chance, made, last = Path(sys.argv[1], LINEAGE), random.Random(0), shards(), 0
for _ in range(6):
    read, write = os.pipe()
    if not (child := os.fork()):
        for number in count(last + 1):
            made.write(directory, number)
            os.write(write, b".")
    os.close(write)
    assert os.read(read, 1), "the writer has failed"
    os.close(read)
    time.sleep(chance.random() / 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    checkpoint, faults, _ = newest_whole(directory)
    assert checkpoint.manifest.number > last
    assert all("the run ended while it was being written" in fault for fault in faults), faults
    last = checkpoint.manifest.number
    Shards(made.model, 3).restore(checkpoint)
"""


@pytest.mark.processes
def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = tmp_path / "program" / "kills.py"
    program.parent.mkdir()
    program.write_text(KILLS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, str(program), str(tmp_path)], env=environment, check=True)


# -- nonsense that somebody has signed again ------------------------------------------------------------------------


def sign_again(checkpoint: Path, **more: Any) -> None:
    """Give a checkpoint the manifest that fits its files as they are now."""
    manifest = read_manifest(checkpoint)
    files = {name: record_of(checkpoint / name, Pace()) for name in manifest.files}
    msgspec.structs.replace(manifest, **{"files": files, **more}).write(checkpoint)


def the_first_is_used_instead(directory: Path) -> str:
    return the_first_is_used(newest_whole(directory, use=require_meaningful))


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"nonsense", bytes(100), b'{"number": 2, "model": []}'], ids=repr
)
def test_nonsense_that_was_signed_again_is_refused_in_a_sentence(
    name: str, content: bytes, directory: Path
) -> None:
    (directory / "000002" / name).write_bytes(content)
    sign_again(directory / "000002")
    assert f"{name} " in the_first_is_used_instead(directory)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../000001/job.json", "workers/../../x", "notes.txt", "workers/-1.bin"]
)
def test_a_manifest_that_names_other_files_is_refused(name: str, directory: Path) -> None:
    manifest = read_manifest(directory / "000002")
    files = {**manifest.files, name: FileRecord(0, "")}
    msgspec.structs.replace(manifest, files=files).write(directory / "000002")
    assert f"manifest.json names {name!r}, which is no file of a checkpoint" in the_first_is_used_instead(
        directory
    )


def test_parts_of_two_checkpoints_that_do_not_fit_are_refused(directory: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = Shards(model_of(net, [optimizer]), 2, net).write(directory.parent / "other", 2)
    for name in ("model.safetensors", "optimizer-0.pt", "job.json"):
        shutil.copy(other / name, directory / "000002" / name)
        sign_again(directory / "000002")
        the_first_is_used_instead(directory)
    shutil.copy(directory / "000001" / "job.json", directory / "000002" / "job.json")
    sign_again(directory / "000002")
    assert "job.json belongs to checkpoint 1" in the_first_is_used_instead(directory)


NONSENSE: tuple[Any, ...] = (-7, 2**60, "nonsense", None, [], 0.5, {})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    else:
        yield path


@pytest.mark.thorough
def test_a_job_with_any_other_number_is_refused_or_means_something(directory: Path) -> None:
    """Each number, text and list of the job's state is replaced, one after the other."""
    content = msgspec.json.decode((directory / "000002" / "job.json").read_bytes())
    content["loaders"] = msgspec.to_builtins([LOADER])
    content["workers"] = [{"worker": 0, "incarnation": 0, "iteration": 5}]
    original = msgspec.json.encode(content)
    checkpoint = Checkpoint(directory / "000002")
    refused = 0
    for path in list(leaves(content)):
        for nonsense in NONSENSE:
            changed = msgspec.json.decode(original)
            *way, last = path
            inner = changed
            for step in way:
                inner = inner[step]
            inner[last] = nonsense
            (directory / "000002" / "job.json").write_bytes(msgspec.json.encode(changed))
            try:
                require_meaningful(checkpoint)
            except CheckpointError:
                refused += 1
            else:
                cut = msgspec.json.decode(checkpoint.job, type=JobCut)
                Coordinator(read_schedule("bsp"), workers=1, servers=2, shards=2, resumed=cut)
    assert refused > 300
