"""Communication between processes: framed streams, rings and shared memory.

This folder carries bytes between addresses. It does not know tensors, synchronization models, or how processes are
started.

Read first: `stream` (messages over a connection), then `transports` and `memory` (memory that processes share).

Imports from `errors` and `core`.
"""
