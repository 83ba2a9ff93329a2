"""Studies, which compare sync models on simulated clusters over several seeds, and write tables and figures.

Only the command line depends on studies. Read first: `study`, from a description to a folder of results.

- `description`: the parts of a study, read from a TOML file or from Python.
- `trained`: what is trained: functions, scripts, and the problems that come with Paceline.
- `cells`: the runs of a study, which `lab.pool` carries out, and the choice of hyper-parameters.
- `results`: times, final values and comparisons. `statistics`: pure functions of numbers and curves.
- `pages`, `figures`: the files that a study writes.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `settings`, `train`, `run`, `look`, `sim` and
`lab`.
"""
