"""Virtual time: the same sync models, hosted by a heap of events instead of sockets and a clock."""
