"""`paceline check`: runs a script for a few iterations, and lists what would go wrong with several workers."""
