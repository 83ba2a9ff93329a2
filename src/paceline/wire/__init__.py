"""Communication between processes: framed streams, rings and shared memory.

It carries bytes between addresses. It does not know tensors, synchronization models, or how processes are started.

Read first: `stream` (messages over a connection), then `transports` and `memory` (what two processes share).

Imports from `errors` and `core`.
"""
