"""Experiments: comparing sync models in simulation, `paceline check`, and the demo.

It starts runs, simulated or live, and judges the results. Only `studies` and the command line depend on it.

Read first: `comparison` (`paceline simulate`), `advice` (`paceline advise`) or `check`, whichever command you look for.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `train`, `run`, `look`, `sim`
and `start`.
"""
