"""Studies: sync models compared on simulated clusters, with seeds, intervals, tables and figures.

- `description`: what a study consists of, read from a TOML file or from Python.
- `generators`: kinds of clusters by name and number of workers.
- `trained`, `problems`: what is trained: functions, scripts, and the problems that come with Paceline.
- `cells`: the runs of a study. `work`: makes those that are missing, in several processes or on Ray.
- `plan`: which cells there are, and which hyper-parameters are chosen.
- `statistics`, `curves`: pure functions of numbers. `results`: what the cells say.
- `tables`, `pages`, `figures`: what is written.
- `study`: all of it, from a description to a folder of results.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `settings`, `train`, `run`, `look`, `sim` and
`lab`.
"""
