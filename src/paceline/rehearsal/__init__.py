"""Comparisons of sync models on simulated clusters: `paceline simulate` and `paceline advise`."""
