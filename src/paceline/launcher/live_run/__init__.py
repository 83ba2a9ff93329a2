"""A live run: its processes on this machine, what it waits for, and its results."""
