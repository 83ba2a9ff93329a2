"""`python -m benchmarks peers`: Paceline beside other systems on the same work, each on emulated machines.

The programs of the systems run in an environment that has these systems but not Paceline, so this module and `work`
import nothing of Paceline.
"""
