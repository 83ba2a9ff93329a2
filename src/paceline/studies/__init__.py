"""Studies: sync models compared on simulated clusters, with seeds, intervals, tables and figures.

Only the command line depends on studies. Read first: `study`, from a description to a folder of results.

- `description`: the parts of a study, read from a TOML file or from Python.
- `trained`: what is trained: functions, scripts, and the problems that come with Paceline.
- `cells`: the runs of a study, and which hyper-parameters are chosen. `lab.pool` carries them out.
- `results`: times, final values and comparisons. `statistics`: pure functions of numbers and curves.
- `pages`, `figures`: the files that a study writes.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `settings`, `train`, `run`, `look`, `sim` and
`lab`.
"""
