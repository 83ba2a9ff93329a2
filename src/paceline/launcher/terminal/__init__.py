"""What a run shows on the screen, what it writes to logs, and the terminal that worker 0 uses as if it ran alone."""
