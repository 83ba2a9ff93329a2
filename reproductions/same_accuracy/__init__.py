"""Does a script reach the same accuracy under every sync model with the hyper-parameters that it has under bsp?

- `schedules`: who pushes when, on which weights and which data. Recorded once, in a simulation without a network.
- `problems`: the interface of a problem. `digits`, `quadratics`, `ratings`, `text`: the problems.
- `ensemble`: trains many runs along one schedule: all rates and seeds, with raw and translated hyper-parameters.
- `guarding`: the guards of the runs.
- `plan`: which runs the table consists of. `table`: makes the runs that are missing, and keeps their results.
- `summary`: what the results say.
"""
