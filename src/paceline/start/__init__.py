"""Starting, watching and ending the processes of a run: on this machine, on several, with Ray and with schedulers.

`launch` is what users call. It starts the processes that `paceline.run` consists of; `processes` knows how. Commands of
the terminal are not known here.

Read first: `launch`, then `run` (a run from its start to its end) and `local` (its processes on this machine).

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `checkpoints`, `settings`,
`train`, `run` and `look`.
"""
