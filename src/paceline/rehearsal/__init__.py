"""Comparisons of sync models on a simulated cluster, and advice after a run: `paceline simulate` and `advise`."""
