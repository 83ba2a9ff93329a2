"""Benchmarks that measure Paceline on this machine. Run `python -m benchmarks` in a checkout to list them.

The installed package does not contain the benchmarks.
"""
