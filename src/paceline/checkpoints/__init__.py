"""Checkpoints of a run: directories that are complete or absent, and that other programs can read.

`places` lays out the files, `writing` fills and completes them, `manifest` tells whether they are whole, and `reading`
finds the newest whole checkpoint and reads slices of it. How a run takes a checkpoint or resumes is not known here: the
states of the job and of its workers are bytes. `docs/reference/checkpoints.md` describes the files.

Read first: `manifest`, then `writing`.

Imports from `errors`, `files`, `core` and `shard`.
"""
