"""Communication between processes: framed streams, rings and shared memory.

This package handles bytes and addresses. It does not depend on tensors, on synchronization models or on how processes
are started and stopped.
"""
