"""The launcher, which starts the processes of a run, monitors them, and ends them."""
