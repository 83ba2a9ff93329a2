"""The processes of a live run: event loops that read the clock, pass events to the cores, and carry out requests.

The coordinator, the server and the session of a worker are the hosts of the three cores. They share `job`, the
checked configuration of a run, and `hub`, which manages the connections of an event loop. This folder does not know how
processes are started, or what users see of a run.

Read first: `job`, then `coordinator`, `server` and `worker`.

Imports from `errors`, `files`, `trust`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `checkpoints`,
`settings` and `train`.
"""
