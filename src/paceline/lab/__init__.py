"""Experiments: comparing sync models in simulation, `paceline check`, and the demo.

This folder starts runs, simulated or live, and judges the results. Only `studies` and the command line import it.

Read first: `comparison` (`paceline simulate`), `advice` (`paceline advise`) or `check`, depending on the command.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `shard`, `wire`, `train`, `run`, `look`, `sim`
and `start`.
"""
