"""Does a script reach the same accuracy under every sync model with the hyper-parameters that it has under bsp?

- `digits`, `quadratics`, `ratings`, `text`: the problems, which `reproductions.ensembles` trains.
- `guarding`: the guards of the runs.
- `plan`: which runs the table consists of. `table`: makes the runs that are missing, and keeps their results.
- `summary`: what the results say.
"""
