"""The protocol of a run, without I/O. There is one core for each kind of process: worker, server and coordinator.

A core takes messages and the current time, and returns requests, which its host carries out.
"""
