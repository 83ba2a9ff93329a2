"""The placement and the lifetime of the processes of a run."""
