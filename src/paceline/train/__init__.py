"""The side of the training script: the distributed optimizer, the distributed loader, and the worker's session.

The session connects the optimizer and the loader with the servers. Live and simulated workers each bring their own
session, so nothing here knows sockets, processes, or virtual time.

Read first: `session`, then `optimizer` and `training` for a step, and `data` for the loader.

Imports from `errors`, `files`, `sync`, `core` and `shard`.
"""
