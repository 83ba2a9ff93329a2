"""The protocol of a run, without I/O: each kind of process (worker, server, coordinator) has a class, its *core*.

A core handles one message at a time, given the current time, and returns requests, which its host carries out. The
same cores run live, in the simulator, in replay and in exhaustive search, so nothing here reads a clock, opens a
file, or knows a tensor.

Read first: `requests` (what a core may ask of its host), then `worker`, `server` and `coordinator`. A server leaves the
decisions of its shards to `shard`. The coordinator leaves members, data and the changes of a run to `members`,
`data_ledger` and `reconfiguration`.

Imports from `errors`, `state` and `sync`.
"""
