"""Where the processes of a run come from: placement and lifetime, nothing else."""
