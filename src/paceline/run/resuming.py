"""Finds the newest whole checkpoint of a run that is to be resumed. The resuming run begins with this checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import structs

from ..checkpoints.manifest import (
    MANIFEST,
    identity_of,
    is_lineage,
    name_of,
    new_lineage,
    number_of,
    origin_of,
)
from ..core.job_cut import JobCut, require_plausible
from ..errors import CheckpointError, ConfigurationError, ProtocolError
from ..files import Unfinished, read_regular
from ..settings.checks import is_bucket
from ..trace.report import NAME, RunFile, parse_run_file, read_run_file, write_run_file
from ..trace.run_dir import require_usable
from ..trust import is_own, printable
from ..words import counted
from .job import CHECKPOINTS, Job, ResumedFrom
from .run_lock import RUNS, await_free, ending_of, newest_lock

if TYPE_CHECKING:
    from ..checkpoints.buckets import LineageThere
    from ..checkpoints.reading import Checkpoint, NewestCheckpoint


SOURCE = "script.py"
"""Name of the copy of the script, or of the training function, in a run directory."""


def described(run_dir: Path) -> dict[str, bytes]:
    """Return the files of a run directory that are part of a checkpoint. Files that cannot be read are left out."""
    found = {}
    for name in (NAME, SOURCE):
        with contextlib.suppress(OSError):
            found[name] = read_regular(run_dir / name)
    return found


class Fetched(NamedTuple):
    """A run that goes on from a bucket.

    Attributes:
        run_dir: the run's directory on this machine.
        bucket: the URL of the bucket for the run's next checkpoints.
    """

    run_dir: Path
    bucket: str


def fetch_run(url: str, run_dir: str | None, *, force: bool = False) -> Fetched:
    """Copy a run's description, source and newest checkpoint from a bucket to a directory on this machine.

    The run that goes on here has a new identity, because the earlier run may go on elsewhere. If the directory already
    contains a run that has gone on from this bucket, nothing is copied, because that run goes on from its own
    checkpoints, which the bucket also has.

    Args:
        url: the URL of the bucket, or of the folder of a lineage in the bucket.
        run_dir: the directory of the run on this machine; None for the directory in ./runs whose name is the last part
            of the URL.
        force: see `earlier_run`.

    Raises:
        ConfigurationError: the bucket cannot be read, has no whole checkpoint, or has checkpoints of several runs; or
            the directory belongs to another run, or to a run that is in progress.
    """
    bucket, chosen = url.rstrip("/"), ""
    if is_lineage(bucket.rpartition("/")[2]):
        bucket, _, chosen = bucket.rpartition("/")
    if run_dir:
        require_usable(run_dir)
    folder = Path(run_dir or RUNS / PurePosixPath(bucket).name)
    if (folder / NAME).exists():
        file = earlier_run(folder, force=force)
        if file.value_of("--checkpoint-dir").rstrip("/") != bucket:
            raise ConfigurationError(
                f"resume is {url!r}, but {folder} is the directory of a run with checkpoints elsewhere; name another "
                "directory with run_dir (--run-dir)."
            )
        if chosen not in ("", file.lineage, identity_of(Path(file.origin).parent)):
            raise ConfigurationError(
                f"resume is {url!r}, but {folder} is the directory of the run {file.lineage}; name another directory "
                "with run_dir (--run-dir)."
            )
        return Fetched(folder, bucket)
    found = _newest_in(bucket, url, chosen, folder / CHECKPOINTS)
    if found.checkpoint is None:
        why = " ".join(found.faults) or "Name the URL that was given as --checkpoint-dir."
        raise ConfigurationError(f"resume is {url!r}, but there is no whole checkpoint. {why}")
    files = described(found.checkpoint.path)
    try:
        run = parse_run_file(files.get(NAME, b""))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"resume is {url!r}, but {NAME} in its checkpoint cannot be read: {error}."
        ) from None
    if SOURCE in files:
        with Unfinished(folder / SOURCE) as place:
            place.write_bytes(files[SOURCE])
    origin = str(found.checkpoint.path.absolute())
    here = structs.replace(run, run_dir=str(folder.absolute()), lineage=new_lineage(), origin=origin)
    # This file is written last, because it makes the directory a run directory. It is signed only if the
    # original was signed: copying must not sign a description that another user has written.
    write_run_file(here, folder, sign=bool(run.signature))
    return Fetched(folder, bucket)


def _newest_in(bucket: str, url: str, chosen: str, usual: Path) -> NewestCheckpoint:
    """Copy the newest whole checkpoint of a lineage from a bucket: of `chosen`, or else of the only possible lineage.

    Raises:
        ConfigurationError: the bucket cannot be read, or has checkpoints of several runs.
    """
    from ..checkpoints.buckets import lineages_at, newest_from
    from ..checkpoints.reading import NewestCheckpoint

    try:
        there = {each.name: each for each in lineages_at(bucket)}
        name = chosen or (_only(list(there.values()), url, f"--resume {bucket}/") if there else "")
        until, seen, faults = None, set[str](), tuple[str, ...]()
        while True:
            seen.add(name)
            found = newest_from(bucket, usual, name, until=until, use=require_meaningful)
            faults += found.faults
            origin = there[name].origin if name in there else ""
            if found.checkpoint is None and origin:
                name, until = identity_of(Path(origin).parent), number_of(Path(origin).name)
            if found.checkpoint is not None or name in seen:
                return NewestCheckpoint(found.checkpoint, faults)
    except CheckpointError as error:
        raise ConfigurationError(f"{error}. Try again, or name another place.") from None


def _only(there: Sequence[LineageThere], place: str, command: str) -> str:
    """Return the lineage with which a run goes on: the only lineage that no other lineage has continued.

    Raises:
        ConfigurationError: there are several such lineages.
    """
    ends = [each for each in there if not any(each.is_continued_by(other) for other in there)]
    if len(ends) == 1:
        return ends[0].name
    raise ConfigurationError(
        f"resume is {place!r}, where {counted(len(ends), 'run')} have checkpoints: {_listed(ends)}. Name one of "
        f"them, as in {command}{ends[-1].name}"
    )


def _listed(there: Sequence[LineageThere]) -> str:
    """Return a description of lineages."""
    return "; ".join(f"{each.name or 'a run of an earlier version'} ({_about(each)})" for each in there)


def _about(lineage: LineageThere) -> str:
    newest = f"newest checkpoint {name_of(lineage.numbers[-1])}"
    try:
        run = msgspec.json.decode(lineage.run, type=RunFile)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return newest
    return printable(f"{newest}, begun at {run.begun_at}: {run.command or 'in a notebook'}")


def earlier_run(run_dir: Path, *, force: bool = False) -> RunFile:
    """Return the description of the run that is to be resumed.

    If the launcher of the run cannot be seen, this takes up to the time of three heartbeats. See `run_lock`.

    Args:
        run_dir: the directory of the run.
        force: True if the run may be in progress, because the caller will end it.

    Raises:
        ConfigurationError: the directory contains no run, or the run is still in progress.
    """
    if not run_dir.is_dir():
        raise ConfigurationError(
            f"resume is {str(run_dir)!r}, but there is no such directory; name the directory of a run, such as "
            "runs/NAME."
        )
    try:
        # A checkpoint also contains a description of its run, but is not the directory of the run.
        file = None if (run_dir / MANIFEST).exists() else read_run_file(run_dir)
        if file is not None and file.lineage and not is_lineage(file.lineage):
            raise msgspec.ValidationError(f"its lineage is {file.lineage!r}")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"the run in {run_dir} cannot be resumed: run.json cannot be read: {reason}."
        ) from None
    if file is None:
        raise ConfigurationError(
            f"resume is {str(run_dir)!r}, which is not the directory of a run; {_what_is_there(run_dir)}"
        )
    if not force:
        await_free(run_dir)
    return file


def _what_is_there(directory: Path) -> str:
    """Return advice, as a sentence, for a user who has named a directory that is not the directory of a run."""
    from ..checkpoints.buckets import lineages_at  # imports torch

    usual = "name a directory that a run has made, such as runs/NAME."
    if (directory / MANIFEST).exists():
        directory = directory.parent
    base = directory.parent if is_lineage(directory.name) else directory
    try:
        there = [each for each in lineages_at(str(base)) if base == directory or each.name == directory.name]
    except (CheckpointError, ConfigurationError):
        return usual
    if not there:
        return usual
    return (
        f"its checkpoints are those of {counted(len(there), 'run')}: {_listed(there)}. Name the directory of the "
        "run. If this directory is lost, the checkpoints suffice: --resume "
        f"file://{Path(base, there[-1].name).absolute()}"
    )


def trusts(file: RunFile, run_dir: Path) -> bool:
    """Return True if a run directory can be trusted: it belongs to this user, and this user has started the run."""
    return bool(file.signature) and is_own(run_dir, run_dir / NAME)


def require_trust(file: RunFile, run_dir: Path, named: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` if values from a run directory would be used, but the directory cannot be trusted.

    Args:
        file: the description of the run.
        run_dir: the directory of the run.
        named: the values from the directory that would be used: the command, and options with their values. If this is
            empty, no trust is needed.
    """
    if not named or trusts(file, run_dir):
        return
    listed = " and ".join(f"{name} {printable(value)!r}" for name, value in named.items())
    why = "its run.json is not signed with your key" if is_own(run_dir) else "it belongs to another user"
    raise ConfigurationError(
        f"the directory {run_dir} would decide about {listed}, but {why}, so somebody else may have written these "
        "values; check them, and add --trust (trust=True) if you accept them, or specify them yourself."
    )


def find_resumed(
    earlier: RunFile, run_dir: Path, checkpoint_dir: str | None, *, trust: bool = False
) -> ResumedFrom:
    """Return the checkpoint with which a resuming run begins.

    Args:
        earlier: the description of the run that is resumed.
        run_dir: the directory of the run that is resumed.
        checkpoint_dir: directory, or URL of a bucket, for the checkpoints of the resuming run; None for the usual
            directory. Earlier checkpoints are also looked for in this place. If a bucket has a newer checkpoint, this
            checkpoint is copied to the usual directory.
        trust: True to look for checkpoints wherever the description says, even if another user has written the
            description.

    Raises:
        ConfigurationError: there is no whole checkpoint, or a bucket cannot be read.
    """
    usual, lock = run_dir / CHECKPOINTS, newest_lock(run_dir)
    trust = trust or trusts(earlier, run_dir)
    named = earlier.value_of("--checkpoint-dir") if trust else ""
    begun = earlier.resumptions[-1].checkpoint if trust and earlier.resumptions else ""
    places = list(dict.fromkeys(filter(None, [named or str(usual), checkpoint_dir])))
    # A description that is not trusted must not name a place outside of this directory. In this case, the checkpoint of
    # origin is looked for only in this directory, to which it may have been copied.
    origin = earlier.origin if trust or not earlier.origin else str(usual / origin_of(Path(earlier.origin)))
    found = newest_checkpoint(places, usual, earlier.lineage, begun, origin)
    if (resumed := resumed_with(found)) is not None:
        return structs.replace(resumed, lock=lock)
    every = earlier.value_of("--checkpoint-every") or "off"
    why = " ".join(found.faults) or f"The run had --checkpoint-every {every}."
    folders = [f"{place}/{earlier.lineage}".rstrip("/") for place in places]
    raise ConfigurationError(
        f"the run in {run_dir} cannot be resumed, because there is no whole checkpoint in {' or '.join(folders)}. "
        f"{why} Start the run again without --resume."
    )


def resumed_with(found: NewestCheckpoint) -> ResumedFrom | None:
    """Return the result of a search as the checkpoint with which a job begins; None if no checkpoint was found."""
    if found.checkpoint is None:
        return None
    return ResumedFrom(str(found.checkpoint.path.absolute()), found.faults, found.highest)


def newest_of(job: Job) -> NewestCheckpoint:
    """Return the newest whole checkpoint with which a run can go on, as `find_resumed` does.

    Raises:
        ConfigurationError: a bucket cannot be read.
    """
    usual, begun = Path(job.run_dir, CHECKPOINTS), "" if job.resumed is None else job.resumed.path
    return newest_checkpoint([job.checkpoint_dir or str(usual)], usual, job.lineage, begun, job.origin)


def newest_checkpoint(
    places: Sequence[str], usual: Path, lineage: str, begun: str = "", origin: str = ""
) -> NewestCheckpoint:
    """Return the newest whole checkpoint of a lineage, or else the checkpoint with which the run has begun.

    Args:
        places: directories with a folder of the lineage, or URLs of buckets.
        usual: directory to which a newer checkpoint in a bucket is copied.
        lineage: the identity of the lineage; "" for a run of an earlier version, which has no identity. Without an
            identity, a place may have the checkpoints of other runs, so only the first place with a whole checkpoint
            is used.
        begun: directory of the checkpoint with which the run was resumed last; "" if it was not resumed. The
            checkpoints of the resumed run may have another place.
        origin: directory of the checkpoint with which this lineage has begun, if that checkpoint is of another lineage;
            else "".

    Raises:
        ConfigurationError: a bucket cannot be read.
    """
    from ..checkpoints.reading import NewestCheckpoint, newest_whole

    found = NewestCheckpoint(None, ())
    for group in [places] if lineage else [[place] for place in places]:
        if found.checkpoint is None:
            folders = [Path(place, lineage) for place in group if not is_bucket(place)]
            if lineage or not folders:
                folders.append(usual / lineage)
            newest = newest_whole(*folders, use=require_meaningful)
            for bucket in filter(is_bucket, group):
                newest = _or_newer(newest, bucket, usual, lineage)
            found = NewestCheckpoint(newest.checkpoint, (*found.faults, *newest.faults), newest.highest)
    for path in map(Path, filter(None, (begun, origin))):
        if found.checkpoint is None:
            folder = usual / identity_of(path.parent)
            before = newest_whole(path.parent, folder, until=number_of(path.name), use=require_meaningful)
            faults = dict.fromkeys((*found.faults, *before.faults))  # a folder may be searched twice
            own = before.highest if identity_of(path.parent) == lineage else 0
            found = NewestCheckpoint(before.checkpoint, tuple(faults), max(found.highest, own))
    return found


def _or_newer(here: NewestCheckpoint, bucket: str, usual: Path, lineage: str) -> NewestCheckpoint:
    """Return a newer whole checkpoint in a bucket, or else the checkpoint on this machine.

    Raises:
        ConfigurationError: the bucket cannot be read, and there is no checkpoint on this machine.
    """
    from ..checkpoints.buckets import newest_from
    from ..checkpoints.reading import NewestCheckpoint

    number = 0 if here.checkpoint is None else here.checkpoint.manifest.number
    try:
        there = newest_from(bucket, usual, lineage, after=number, use=require_meaningful)
    except CheckpointError as error:
        if here.checkpoint is None:
            raise ConfigurationError(f"{error}. Try again, or give --checkpoint-dir another place.") from None
        return NewestCheckpoint(
            here.checkpoint, (*here.faults, f"Newer checkpoints are not used: {error}."), here.highest
        )
    highest = max(here.highest, there.highest)
    return NewestCheckpoint(there.checkpoint or here.checkpoint, (*there.faults, *here.faults), highest)


def lineage_of(earlier: RunFile, run_dir: Path, resumed: ResumedFrom) -> tuple[str, str]:
    """Return the identity of a resuming run, and the checkpoint with which its lineage has begun.

    A run that goes on in the same directory keeps its identity. If the directory is a copy of an original directory
    that still exists, the run gets a new identity, because the run in the original directory may go on as well.

    Args:
        earlier: the description of the run that is resumed.
        run_dir: the directory in which the run goes on.
        resumed: the checkpoint with which the run goes on.
    """
    if earlier.lineage and not _is_copy(earlier, run_dir):
        return earlier.lineage, earlier.origin
    return new_lineage(), str(Path(resumed.path).absolute())


def _is_copy(earlier: RunFile, run_dir: Path) -> bool:
    """Return True if a run directory is a copy of a directory that still exists. A moved directory is not a copy."""
    try:
        if not earlier.run_dir or Path(earlier.run_dir).samefile(run_dir):
            return False
        there = read_run_file(Path(earlier.run_dir))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False  # the original directory no longer exists
    return there is not None and there.lineage == earlier.lineage


def can_resume(run_dir: Path, *, force: bool = False) -> bool:
    """Return True if a directory has a whole checkpoint of a run that has not finished.

    Also True if the run is in progress, or if its description is not trusted and names a place for its checkpoints. In
    these cases, --resume is refused with a message that states the reason.

    Args:
        run_dir: the directory.
        force: see `earlier_run`.
    """
    try:
        if not force:
            await_free(run_dir)
    except ConfigurationError:
        return True
    try:
        file = earlier_run(run_dir, force=True)
        if file.value_of("--checkpoint-dir") and not trusts(file, run_dir):
            return not has_finished(run_dir)
        find_resumed(file, run_dir, None)
    except ConfigurationError:
        return False
    return not has_finished(run_dir)


def has_finished(run_dir: Path) -> bool:
    """Return True if the scripts of a run have ended normally."""
    return ending_of(run_dir) == "finished"


def require_meaningful(checkpoint: Checkpoint) -> None:
    """Check the content of a checkpoint whose files are undamaged.

    Whoever can write a checkpoint can also write a matching manifest. A run must refuse a checkpoint with invalid
    content, as it refuses an incomplete checkpoint, instead of failing later.

    Raises:
        CheckpointError: the content is not valid for this version of Paceline.
    """
    from ..shard.vectors import require_states  # imports torch
    from .registration import require_sound_parameters

    try:
        cut = msgspec.json.decode(checkpoint.job, type=JobCut)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"job.json cannot be read: {error}; use the version of Paceline that has begun the run"
        ) from None
    if cut.number != checkpoint.manifest.number:
        raise CheckpointError(f"job.json belongs to checkpoint {cut.number}")
    try:
        require_sound_parameters(cut.model)
        require_plausible(cut)
    except ProtocolError as error:
        raise CheckpointError(f"job.json is not valid: {error}") from None
    if len(checkpoint.manifest.versions) != len(cut.shards):
        raise CheckpointError("job.json and the manifest differ in the number of shards")
    checkpoint.require_content(cut.model)
    for path in checkpoint.workers.values():
        try:
            require_states(path.read_bytes())
        except (OSError, ProtocolError) as error:
            raise CheckpointError(f"workers/{path.name} cannot be read: {error}") from None


def cut_of(resumed: ResumedFrom) -> JobCut:
    """Return the state of the job in a checkpoint.

    Raises:
        ConfigurationError: this version of Paceline cannot read the checkpoint.
    """
    path = Path(resumed.path, "job.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobCut)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}. Resume the run with the version of Paceline that has begun it."
        ) from None


def keep_source(source: str, run_dir: Path) -> None:
    """Write the source of a run's script or training function to the run directory, for comparison with later sources.

    Raises:
        OSError: the source cannot be written.
    """
    with Unfinished(run_dir / SOURCE) as place:
        place.write_text(source, encoding="utf-8")


def require_same_source(name: str, source: str, run_dir: Path, accept: str) -> str:
    """Require that a script or a training function has not changed since a run began.

    Args:
        name: name of the script or function in messages.
        source: the source of the script or function; "" if unknown.
        run_dir: the directory of the run.
        accept: the option with which a user accepts changes.

    Returns:
        Why the sources cannot be compared, as a sentence; "" if nothing has changed.

    Raises:
        ConfigurationError: the source has changed. The message states the first difference.
    """
    if not source:
        return f"it is unknown whether {name} has changed since the run began, because its source cannot be read."
    try:
        before = read_regular(run_dir / SOURCE).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return f"it is unknown whether {name} has changed since the run began, because {run_dir} has no copy of it."
    except OSError as error:
        raise ConfigurationError(
            f"{run_dir / SOURCE} cannot be read: {error.strerror}. Remove it, or add {accept}."
        ) from None
    for number, (old, new) in enumerate(zip_longest(before, source.splitlines()), start=1):
        if old != new:
            raise ConfigurationError(
                f"{name} has changed since the run began: line {number} {_was(old)}, and {_is(new)}. Restore it, or "
                f"add {accept} to resume with it as it is."
            )
    return ""


def _was(line: str | None) -> str:
    return "did not exist" if line is None else f"was {line.strip()!r}"


def _is(line: str | None) -> str:
    return "does not exist now" if line is None else f"is now {line.strip()!r}"
