"""Checkpoints of a run: directories that are complete or absent, and that other programs can read.

`places` lays out the files, `writing` fills them, `manifest` tells whether they are whole, and `reading` finds the
newest whole checkpoint and reads slices of it. This room does not know how a run takes a checkpoint or resumes: the
state of the job and of the workers are bytes to it. `docs/checkpoints.md` describes the files.
"""
