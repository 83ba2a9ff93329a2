"""Runs on several machines: those that join a run, and those that Ray or a scheduler provides."""
