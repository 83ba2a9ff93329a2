"""What users see of a run: summaries, advice, tables, pictures, the page, and live exports to other programs.

This folder reads the files of a run directory, and asks the coordinator for the state of a job. A separate process of
low priority serves the live page and the exports (`show_process`), because threads in the launcher would compete with
the coordinator, and so delay all workers.

Read first: `run_reading`, then `causes` and `page`.

Imports from `errors`, `files`, `words`, `sync`, `core`, `trace`, `wire` and `run`.
"""
