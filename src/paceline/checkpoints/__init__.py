"""Checkpoints of a run: directories that are complete or absent, and that other programs can read.

`places` lays out the files, `shard_writing` fills them, `writing` completes them, `manifest` tells whether they are
whole, and `reading` finds the newest whole checkpoint and reads slices of it. This room does not know how a run takes
a checkpoint or resumes: the states of the job and of its workers are bytes to it. `docs/checkpoints.md` describes the
files.

Imports from `errors`, `files`, `core` and `shard`.
"""
