"""Checkpoints of a run: directories that are complete or absent, and that other programs can read.

`places` lays out the files, `writing` fills and completes the files, `manifest` checks whether a checkpoint is whole,
and `reading` finds the newest whole checkpoint and reads slices of it. This folder does not know how a run makes a
checkpoint or resumes: the states of the job and of its workers are bytes. `docs/reference/checkpoints.md` describes the
files.

Read first: `manifest`, then `writing`.

Imports from `errors`, `files`, `core` and `shard`.
"""
