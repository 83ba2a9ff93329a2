"""The protocol of a run, without I/O. Each kind of process (worker, server and coordinator) has a class, its *core*.

A core processes one message at a time, given the current time. It returns requests, and its host carries them out.
"""
