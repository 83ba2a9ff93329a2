"""Several runs and whatever else there is share one directory: each run finds, replaces and removes its own alone."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from msgspec import structs

from paceline.checkpoints.buckets import lineages_at, newest_from, upload
from paceline.checkpoints.manifest import (
    MANIFEST,
    is_lineage,
    lineages_in,
    new_lineage,
    numbers_in,
    origin_of,
    read_manifest,
)
from paceline.checkpoints.reading import Checkpoint, newest_whole
from paceline.checkpoints.writing import Draft, ShardWriter, shard_content
from paceline.errors import CheckpointError, ConfigurationError
from paceline.run.job import ResumedFrom
from paceline.run.job_options import make_job
from paceline.run.resuming import earlier_run, fetch_run, find_resumed, has_finished, newest_of
from paceline.trace.report import ReportedSetting, Resumption, RunFile, read_run_file, write_run_file
from tests.support.sharded import LINEAGE, Net, Shards, model_of

OTHER = "paceline-fedcba9876543210"


@pytest.fixture(scope="module")
def shards() -> Shards:
    net = Net()
    return Shards(model_of(net, [torch.optim.SGD(net.parameters(), lr=0.1)]), 2, net)


def foreign_to(directory: Path) -> dict[str, bytes]:
    """Put what others may have in a directory there, and return the content of all of it."""
    for name in (
        "4711001",
        "4711002",
        "20240101",
        "000001",
        "000009",
        "20240102.partial",
        "000003.partial",
        "data",
    ):
        (directory / name / "deep").mkdir(parents=True)
        (directory / name / "deep" / "file").write_text(name)
    (directory / "4711003").write_text("a file")
    (directory / "4711004").symlink_to(directory / "4711001")
    for name in ("000002", "000004.partial"):  # where another run is at work, or was killed
        (directory / OTHER / name).mkdir(parents=True)
        (directory / OTHER / name / "model.safetensors").write_bytes(b"theirs")
    return everything_in(directory)


def everything_in(directory: Path, without: str = LINEAGE) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files if without not in path.parts}


def test_nothing_outside_of_its_own_folder_is_touched_however_many_checkpoints_a_run_writes(
    shards: Shards, tmp_path: Path
) -> None:
    before = foreign_to(tmp_path)
    for number in range(1, 7):
        shards.write(tmp_path, number, keep=2)
    assert everything_in(tmp_path) == before
    assert numbers_in(tmp_path / LINEAGE) == [5, 6]


def test_inside_of_its_own_folder_only_what_carries_its_identity_is_removed(
    shards: Shards, tmp_path: Path
) -> None:
    shards.write(tmp_path, 4, lineage=OTHER)
    shutil.copytree(tmp_path / OTHER / "000004", tmp_path / LINEAGE / "000004")  # a user has tidied up
    shards.write(tmp_path, 5)
    (tmp_path / LINEAGE / "000005" / MANIFEST).write_text("{}")  # it can no longer be said whose it is
    for name in ("000001", "000002.partial", "notes"):
        (tmp_path / LINEAGE / name).mkdir()
        (tmp_path / LINEAGE / name / "file").write_text("mine")
    before = everything_in(tmp_path / LINEAGE, without="")
    for number in range(6, 10):
        shards.write(tmp_path, number, keep=1)
    after = everything_in(tmp_path / LINEAGE, without="000009")
    assert after == before
    assert newest_whole(tmp_path / LINEAGE).faults == ()


def test_a_name_is_that_of_a_checkpoint_only_in_one_form() -> None:
    assert lineages_in(["0000012", "12", "٠٠٠٠١٢", "paceline-12", "000012.partial"]) == []
    assert lineages_in(["notes", OTHER, "000012", LINEAGE]) == ["", LINEAGE, OTHER]
    assert is_lineage(new_lineage())
    assert new_lineage() != new_lineage()


def begun(
    shards: Shards, directory: Path, number: int = 1
) -> tuple[Draft, Callable[[int], ShardWriter], list[Any]]:
    states = [store.optimizer_state() for store in shards.stores]
    entries = [store.state_entries(s) for store, s in zip(shards.stores, states, strict=True)]
    draft = Draft.begin(directory, number, shards.model, shards.slices, entries)
    content = [
        shard_content(bounds, store.weights, state)
        for bounds, store, state in zip(shards.slices, shards.stores, states, strict=True)
    ]
    return (
        draft,
        lambda shard: ShardWriter(draft.path, draft.token, shards.slices[shard], entries[shard]),
        content,
    )


def test_a_draft_says_whose_it_is_as_soon_as_it_is_there_and_another_runs_draft_stays(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def there(*arguments: object) -> None:
        seen.append(sorted(path.name for path in (tmp_path / LINEAGE / "000001.partial").iterdir()))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.checkpoints.writing.lay_out", there)
    with pytest.raises(CheckpointError, match="No space left on device"):
        begun(shards, tmp_path / LINEAGE)
    assert seen == [["draft.json"]]
    assert list((tmp_path / LINEAGE).iterdir()) == []


def test_a_writer_whose_draft_another_run_has_replaced_stops_and_leaves_the_other_alone(
    shards: Shards, tmp_path: Path
) -> None:
    """Two runs with the same identity: somebody has copied a run directory to another machine, and resumed both."""
    first, writer_of, content = begun(shards, tmp_path / LINEAGE)
    with contextlib.ExitStack() as opened:
        writer = opened.enter_context(writer_of(0))
        writer.write(content[0][0])
        second, second_writer_of, _ = begun(shards, tmp_path / LINEAGE)
        with pytest.raises(CheckpointError, match="somebody has removed this draft, or another run writes"):
            writer.write(content[0][1])
        with pytest.raises(CheckpointError, match="are missing"):
            opened.close()
    with pytest.raises(CheckpointError, match="cannot be written"):
        writer_of(1)
    with pytest.raises(CheckpointError, match=r"^Checkpoint 1 was not written: somebody has removed"):
        first.finish(b"", {}, versions=[1, 1])
    first.discard()
    for shard in (0, 1):
        with second_writer_of(shard) as writer:
            for part in content[shard]:
                writer.write(part)
    second.finish(b"{}", {}, versions=[1, 1])
    Checkpoint(tmp_path / LINEAGE / "000001")


def test_a_draft_that_is_foreign_is_not_overwritten(shards: Shards, tmp_path: Path) -> None:
    for name in ("000001.partial", "000002"):
        (tmp_path / LINEAGE / name).mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"000001\.partial is there already, and this run has not written it"
    ):
        shards.write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"000002 is there already, and this run has not written it"):
        shards.write(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / LINEAGE).iterdir()) == ["000001.partial", "000002"]


@pytest.mark.parametrize("name", ["000002", "000003.partial"])
def test_what_carries_another_identity_is_not_resumed(name: str, shards: Shards, tmp_path: Path) -> None:
    shards.write(tmp_path, 1)
    shards.write(tmp_path, 2, lineage=OTHER)
    draft, _, _ = begun(shards, tmp_path / OTHER, 3)
    (tmp_path / OTHER / name).rename(tmp_path / LINEAGE / name)
    found = newest_whole(tmp_path / LINEAGE)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.number == 1
    [fault] = found.faults
    number = draft.path.name[5] if name.endswith("partial") else "2"
    assert fault.startswith(
        f"Checkpoint {number} is not used: it is of another run: it carries the identity {OTHER}"
    )


def test_a_checkpoint_that_was_renamed_is_recognized(shards: Shards, tmp_path: Path) -> None:
    shards.write(tmp_path, 1).rename(tmp_path / LINEAGE / "000007")
    found = newest_whole(tmp_path / LINEAGE)
    assert found.faults == ("Checkpoint 7 is not used: its name says 7, but it is checkpoint 1.",)


# -- runs of earlier versions ---------------------------------------------------------------------------------------


def without_identity(checkpoint: Path, directory: Path) -> Path:
    """Move a checkpoint to where an earlier version would have written it, with the manifest of that version."""
    manifest = structs.replace(read_manifest(checkpoint), format=1, lineage="", origin="")
    manifest.write(checkpoint)
    content = msgspec.json.decode((checkpoint / MANIFEST).read_bytes())
    del content["lineage"], content["origin"]
    (checkpoint / MANIFEST).write_bytes(msgspec.json.encode(content))
    directory.mkdir(parents=True, exist_ok=True)
    return checkpoint.rename(directory / checkpoint.name)


def run_file(**more: Any) -> RunFile:
    return RunFile(
        **{
            **{"version": "", "begun_at": "2026-01-02", "command": "paceline run train.py", "folder": ""},
            **{"sync": "bsp", "workers": 1, "servers": 1, "shards": 1, **more},
        }
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("place", ["run directory", "directory", "bucket"])
def test_a_checkpoint_of_an_earlier_version_is_resumed_and_never_removed(
    place: str, shards: Shards, tmp_path: Path, run_dir: Path
) -> None:
    elsewhere = run_dir / "checkpoints" if place == "run directory" else tmp_path / "shared"
    named = {"run directory": "", "directory": str(elsewhere), "bucket": f"file://{elsewhere}"}[place]
    for number in (1, 2, 3):
        without_identity(shards.write(tmp_path / "new", number), elsewhere)
    (elsewhere / "4711001").mkdir()  # of a Slurm job
    settings = (ReportedSetting("--checkpoint-dir", named),) if named else ()
    write_run_file(run_file(settings=settings), run_dir)
    job = make_job(workers=1, resume=run_dir, dry_run=True)
    assert job.resumed is not None
    assert (job.resumed.number, job.resumed.faults) == (3, ())
    assert is_lineage(job.lineage)
    assert (job.checkpoints.name, job.origin) == (job.lineage, job.resumed.path)
    # The run goes on, and is killed before it has written a checkpoint.
    write_run_file(run_file(settings=settings, lineage=job.lineage, origin=job.origin), run_dir)
    again = make_job(workers=1, resume=run_dir, dry_run=True)
    assert again.resumed is not None
    assert (again.resumed.number, again.lineage, again.origin) == (3, job.lineage, job.origin)
    for number in (4, 5):
        shards.write(job.checkpoints, number, keep=1, origin=origin_of(Path(job.origin)))
        if job.bucket is not None:
            upload(job.checkpoints / f"{number:06d}", job.bucket, keep=1)
    last = make_job(workers=1, resume=run_dir, dry_run=True)
    assert last.resumed is not None
    assert last.resumed.path == str(job.checkpoints / "000005")
    assert numbers_in(elsewhere) == [1, 2, 3, 4711001]


# -- resuming -------------------------------------------------------------------------------------------------------


def test_two_runs_in_one_directory_each_go_on_from_their_own(shards: Shards, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    foreign_to(shared)
    for name, lineage, number in (("one", LINEAGE, 2), ("two", "paceline-00000000000000aa", 9)):
        shards.write(shared, number, lineage=lineage)
        settings = (ReportedSetting("--checkpoint-dir", str(shared)),)
        (tmp_path / name).mkdir()
        write_run_file(
            run_file(settings=settings, lineage=lineage, run_dir=str(tmp_path / name)), tmp_path / name
        )
        job = make_job(workers=1, resume=tmp_path / name, dry_run=True)
        assert (job.lineage, job.resumed) == (
            lineage,
            ResumedFrom(str(shared / lineage / f"{number:06d}"), highest=number, lock=0),
        )
    shutil.rmtree(shared / LINEAGE)
    with pytest.raises(ConfigurationError, match=f"no whole checkpoint in {shared / LINEAGE}"):
        make_job(workers=1, resume=tmp_path / "one", dry_run=True)


def test_a_copy_of_a_run_directory_goes_on_as_another_run_and_a_moved_one_as_the_same(
    shards: Shards, tmp_path: Path, run_dir: Path
) -> None:
    shards.write(run_dir / "checkpoints", 3)
    write_run_file(run_file(lineage=LINEAGE, run_dir=str(run_dir)), run_dir)
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    job = make_job(workers=1, resume=copy, dry_run=True)
    assert job.resumed is not None
    assert job.lineage != LINEAGE
    assert job.origin == job.resumed.path == str(copy / "checkpoints" / LINEAGE / "000003")
    moved = run_dir.rename(tmp_path / "moved")
    assert make_job(workers=1, resume=moved, dry_run=True).lineage == LINEAGE


def test_a_run_with_a_new_place_for_its_checkpoints_goes_on_from_the_one_with_which_it_has_begun(
    shards: Shards, tmp_path: Path, run_dir: Path
) -> None:
    begun = shards.write(tmp_path / "old", 3)
    settings = (ReportedSetting("--checkpoint-dir", str(tmp_path / "new")),)
    resumption = Resumption(begun_at="2026-01-02", checkpoint=str(begun), updates=1, samples=1, elapsed_s=1.0)
    file = run_file(lineage=LINEAGE, settings=settings, resumptions=(resumption,))
    write_run_file(file, run_dir)
    job = make_job(workers=1, resume=run_dir, dry_run=True)
    assert job.resumed is not None
    assert (job.resumed.path, job.resumed.highest) == (str(begun), 3)
    found = newest_of(job)  # it loses a server before it has written a checkpoint
    assert found.checkpoint is not None
    assert (found.checkpoint.path, found.highest) == (begun, 3)
    later = shards.write(tmp_path / "new", 4)
    found = newest_of(job)
    assert found.checkpoint is not None
    assert found.checkpoint.path == later
    shutil.rmtree(tmp_path / "new")
    write_run_file(file, run_dir, sign=False)  # what another user has written names no place
    with pytest.raises(ConfigurationError, match="no whole checkpoint"):
        make_job(workers=1, resume=run_dir, checkpoint_dir=tmp_path / "new", dry_run=True)


def test_the_number_of_a_damaged_checkpoint_is_not_used_again(shards: Shards, run_dir: Path) -> None:
    for number in (1, 2):
        shards.write(run_dir / "checkpoints", number)
    (run_dir / "checkpoints" / LINEAGE / "000002" / MANIFEST).unlink()
    (run_dir / "checkpoints" / LINEAGE / "000003.partial").mkdir()
    write_run_file(run_file(lineage=LINEAGE), run_dir)
    job = make_job(workers=1, resume=run_dir, dry_run=True)
    assert job.resumed is not None
    assert (job.resumed.number, job.resumed.highest) == (1, 3)


@pytest.mark.parametrize("identity", ["../../etc", "paceline-12", "x" * 300])
def test_a_run_file_with_another_identity_than_ours_is_refused(identity: str, run_dir: Path) -> None:
    write_run_file(run_file(lineage=identity), run_dir)
    with pytest.raises(ConfigurationError, match=r"run\.json cannot be read: its lineage is"):
        earlier_run(run_dir)


# -- several runs in one bucket -------------------------------------------------------------------------------------


def described(lineage: str, url: str) -> dict[str, bytes]:
    command = f"paceline run --checkpoint-dir {url} train.py"
    settings = (ReportedSetting("--checkpoint-dir", url),)
    return {"run.json": msgspec.json.encode(run_file(lineage=lineage, command=command, settings=settings))}


def test_a_bucket_with_the_checkpoints_of_several_runs_is_refused_and_all_are_named(
    shards: Shards, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    url = f"file://{bucket}"
    foreign_to(bucket)
    assert lineages_at(url) == []
    for number, lineage in ((2, LINEAGE), (3, OTHER)):
        shards.write(bucket, number, lineage=lineage, further=described(lineage, url))
    with pytest.raises(ConfigurationError) as refusal:
        fetch_run(url, str(tmp_path / "here"))
    about = f"begun at 2026-01-02: paceline run --checkpoint-dir {url} train.py"
    assert str(refusal.value) == (
        f"resume is '{url}', where 2 runs have checkpoints: {LINEAGE} (newest checkpoint 000002, {about}); {OTHER} "
        f"(newest checkpoint 000003, {about}). Name one of them, as in --resume {url}/{OTHER}"
    )
    with pytest.raises(ConfigurationError) as refusal:
        earlier_run(bucket)
    assert "its checkpoints are those of 2 runs" in str(refusal.value)
    assert str(refusal.value).endswith(f"the checkpoints suffice: --resume {url}/{OTHER}")
    for inside in (bucket / LINEAGE, bucket / LINEAGE / "000002"):
        with pytest.raises(ConfigurationError, match=f"those of 1 run: {LINEAGE} "):
            earlier_run(inside)
    fetched = fetch_run(f"{url}/{LINEAGE}", str(tmp_path / "here"))
    assert fetched.bucket == url
    job = make_job(workers=1, resume=f"{url}/{LINEAGE}", run_dir=tmp_path / "here", dry_run=True)
    assert job.resumed is not None
    assert job.resumed.path == str(tmp_path / "here" / "checkpoints" / LINEAGE / "000002")
    assert (job.bucket, job.resumed.number) == (url, 2)
    assert job.lineage not in (LINEAGE, OTHER)


def test_a_run_that_has_continued_another_one_stands_for_it(shards: Shards, tmp_path: Path) -> None:
    """From one machine to the next and to a third, only the bucket is left each time."""
    bucket = tmp_path / "bucket"
    url, lineage, origin = f"file://{bucket}", LINEAGE, ""
    for number, machine in ((2, "first"), (4, "second"), (6, "third")):
        shards.write(bucket, number, lineage=lineage, origin=origin, further=described(lineage, url))
        job = make_job(workers=1, resume=url, run_dir=tmp_path / machine, dry_run=True)
        assert job.resumed is not None
        assert (job.resumed.number, Path(job.resumed.path).parent.name) == (number, lineage)
        lineage, origin = job.lineage, origin_of(Path(job.origin))
        assert make_job(workers=1, resume=url, run_dir=tmp_path / machine, dry_run=True).lineage == lineage
    # The second machine's only checkpoint, with which the third one has begun, is damaged, and the third has none.
    (second,) = [each.name for each in lineages_at(url) if each.numbers == (4,)]
    (third,) = [each.name for each in lineages_at(url) if each.numbers == (6,)]
    for damaged, number in ((second, 4), (third, 6)):
        (bucket / damaged / f"{number:06d}" / "model.safetensors").write_bytes(b"")
    job = make_job(workers=1, resume=url, run_dir=tmp_path / "fourth", dry_run=True)
    assert job.resumed is not None
    assert job.resumed.number == 2
    # The first machine was not lost after all, and both go on.
    shards.write(bucket, 3, lineage=LINEAGE, further=described(LINEAGE, url))
    with pytest.raises(ConfigurationError, match="where 2 runs have checkpoints"):
        fetch_run(url, str(tmp_path / "fifth"))


def test_only_its_own_copies_are_removed_from_a_bucket(shards: Shards, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    before = foreign_to(bucket)
    (bucket / LINEAGE / "000001").mkdir(parents=True)
    (bucket / LINEAGE / "000001" / "notes").write_text("mine")
    for number in range(2, 7):
        upload(shards.write(tmp_path, number), f"file://{bucket}", keep=2)
        if number == 2:  # a machine is lost while it copies
            (bucket / LINEAGE / "000002" / MANIFEST).rename(bucket / LINEAGE / "000002" / "draft.json")
    assert everything_in(bucket) == before
    assert numbers_in(bucket / LINEAGE) == [1, 5, 6]


def test_incomplete_copies_take_no_place_of_whole_ones_in_a_bucket(shards: Shards, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    url = f"file://{bucket}"
    for number in (1, 2, 3):
        upload(shards.write(tmp_path, number), url)
    for number in (4, 5):
        with pytest.raises(CheckpointError, match="the run has ended"):
            upload(shards.write(tmp_path, number), url, pause=lambda took_s: True)
    for number, whole in ((6, (2, 3, 6)), (7, (3, 6, 7)), (8, (6, 7, 8))):
        upload(shards.write(tmp_path, number), url)
        assert [each.numbers for each in lineages_at(url)] == [whole]
    assert numbers_in(bucket / LINEAGE) == [6, 7, 8]


def test_a_foreign_file_in_a_checkpoint_is_neither_used_nor_copied(shards: Shards, tmp_path: Path) -> None:
    path = shards.write(tmp_path, 1)
    for name in ("._model.safetensors", "workers/._0.bin", "workers/notes.bin", "workers/.DS_Store"):
        (path / name).write_bytes(b"\x00\x05\x16\x07")
    assert [*Checkpoint(path).workers] == [0, 12]
    upload(path, f"file://{tmp_path}/bucket")
    found = newest_from(f"file://{tmp_path}/bucket", tmp_path / "copy", LINEAGE).checkpoint
    assert found is not None
    assert {str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file()} == {
        *(MANIFEST, *found.manifest.files)
    }


def test_a_damaged_copy_that_nobody_can_tell_to_be_ours_is_set_aside_for_one_from_the_bucket(
    shards: Shards, tmp_path: Path
) -> None:
    system = fsspec.filesystem("file")
    here = tmp_path / "here"
    path = shards.write(here, 2)
    upload(path, f"file://{tmp_path}/bucket")
    (path / MANIFEST).write_text("nonsense")
    found = newest_from(f"file://{tmp_path}/bucket", here, LINEAGE).checkpoint
    assert found is not None
    [aside] = system.glob(f"{here}/{LINEAGE}/000002.damaged-*")
    assert Path(aside, MANIFEST).read_text() == "nonsense"


def test_a_pipe_in_the_place_of_a_file_lets_nobody_wait(
    shards: Shards, tmp_path: Path, run_dir: Path
) -> None:
    path = shards.write(tmp_path, 1)
    for name in ("model.safetensors", MANIFEST):
        (path / name).unlink()
        os.mkfifo(path / name)
        [fault] = newest_whole(tmp_path / LINEAGE).faults
        assert "it is a pipe or a device, expected a file" in fault or "has 0 bytes" in fault
    for name in ("run.json", "summary.json", "running.json"):
        os.mkfifo(run_dir / name)
    with pytest.raises(OSError, match="it is a pipe or a device"):
        read_run_file(run_dir)
    with pytest.raises(ConfigurationError, match=r"run\.json cannot be read: it is a pipe or a device"):
        find_resumed(earlier_run(run_dir), run_dir, None)
    assert not has_finished(run_dir)
