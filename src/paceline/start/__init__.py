"""Starting, watching and ending the processes of a run: on this machine, on several, with Ray and with schedulers.

`launch` is what users call. The processes that it starts consist of `paceline.run`. Commands of the terminal are not
known here.

Read first: `launch`, then `run` and `local`.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `checkpoints`, `settings`,
`train`, `run` and `look`.
"""
