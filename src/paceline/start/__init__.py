"""Starting, watching and ending the processes of a run: on one or more machines, with Ray and with schedulers.

Users call `launch`. The folder `processes` starts the processes of `paceline.run`. The code here does not depend on the
commands of the terminal.

Read first: `launch`, then `run` (a run from its start to its end) and `local` (its processes on this machine).

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `checkpoints`, `settings`,
`train`, `run` and `look`.
"""
