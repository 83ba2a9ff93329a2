"""Experiments: comparing sync models in simulation, studies, `paceline check`, and the demo.

Everything here starts runs, simulated or live, and judges the results. Nothing else in the package depends on it but
the command line.

Read first: `comparison` (`paceline simulate`), `advice` (`paceline advise`), `studies.study` or `check`, whichever
command you look for.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `train`, `run`, `look`, `sim`
and `start`.
"""
