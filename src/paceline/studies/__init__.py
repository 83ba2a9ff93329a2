"""Studies: sync models compared on simulated clusters, with seeds, intervals, tables and figures.

Only the command line depends on them. Read first: `study`, from a description to a folder of results.

- `description`: what a study consists of, read from a TOML file or from Python.
- `trained`: what is trained: functions, scripts, and the problems that come with Paceline.
- `cells`: the runs of a study, and which hyper-parameters are chosen. `lab.pool` carries them out.
- `results`: what the cells say. `statistics`: pure functions of numbers and curves.
- `pages`, `figures`: what is written.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `settings`, `train`, `run`, `look`, `sim` and
`lab`.
"""
