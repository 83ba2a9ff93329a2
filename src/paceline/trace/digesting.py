"""The process that digests the oldest segments of a run and deletes them, with a low priority:

    python -m paceline.trace.digesting RUN_DIR --shards 0,1 --workers 0,1,2,3

The launcher starts it when the first segment is full. A segment is deleted only when a state that contains it is on
the disk. The process ends when its standard input does, so also when the launcher is killed.

It digests only files that are written on this machine. Servers and workers on other machines delete their own oldest
segments.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from pathlib import Path

from ..errors import ConfigurationError
from .digest import Digest, Source
from .segments import KEPT_SEGMENTS, earlier_segments

__all__ = ["trim"]

SETTLED_S = 5.0
"""Age at which a segment is digested. By then, what was recorded before its end is in the other files, too."""

POLL_S = 1.0
NICENESS = 3  # with 19, it would fall behind while training occupies all cores; it needs 30 us per iteration


def trim(digest: Digest, kept: int = KEPT_SEGMENTS, settled_s: float = SETTLED_S) -> bool:
    """Digest the segments that are not kept, and delete them. Return True if there were any.

    Args:
        digest: the digest of the run.
        kept: number of segments of each file that are kept in addition to the newest one.
        settled_s: time in seconds since a segment was written after which it is digested.

    Raises:
        ConfigurationError: a file is damaged.
        OSError: the state cannot be written, or a segment cannot be deleted.
    """
    digest.find()
    written_before_s = time.time() - settled_s
    excess: list[tuple[Source, dict[int, Path]]] = []
    for source in digest.sources:
        segments = list(earlier_segments(source.path).items())[:-kept]
        settled = {
            number: segment for number, segment in segments if segment.stat().st_mtime <= written_before_s
        }
        if settled:
            excess.append((source, settled))
    if not excess:
        return False
    digest.advance(max(source.last_ticks(settled[max(settled)]) for source, settled in excess))
    digest.save()
    for source, settled in excess:
        for number, segment in settled.items():
            if number < source.position.segment:
                segment.unlink()
    return True


def main() -> None:
    """Trim a run directory until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--shards", type=_indices, required=True)
    parser.add_argument("--workers", type=_indices, required=True)
    arguments = parser.parse_args()
    os.nice(NICENESS)
    try:
        digest = Digest(arguments.run_dir, shards=arguments.shards, workers=arguments.workers)
        while not select.select([sys.stdin], [], [], POLL_S)[0]:
            trim(digest)
    except (ConfigurationError, OSError) as error:
        sys.exit(str(error))


def _indices(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
