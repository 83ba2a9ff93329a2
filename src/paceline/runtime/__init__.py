"""The live hosts: loops around the pure machines that read the clock, feed events and carry out actions.

One file each for the server, the coordinator, the worker's session and the reader. What they share: `job`, the
validated description of a run.
"""
