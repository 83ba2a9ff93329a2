"""The protocol of a run, without I/O: the cores take messages and the time, and return requests to their hosts."""
