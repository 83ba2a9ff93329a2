"""Checks for sync models: an exhaustive search, and a job in miniature to search."""
