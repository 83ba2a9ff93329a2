"""The protocol of a run, without I/O: each core takes messages and the time, and returns requests to its host."""
