"""`python -m benchmarks peers`: Paceline beside other systems on the same work, each on emulated machines.

The programs of the other systems run in an environment in which these systems are installed but Paceline is not, so
this module and `work` import nothing of Paceline.
"""
