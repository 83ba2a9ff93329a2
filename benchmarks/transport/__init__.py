"""`paceline bench transport`: how long a step takes, against what the same bytes cost without Paceline.

Owns what is measured, how, and the goals; and the table of both. Reads the clock, starts processes.

    floor      in as many processes as there are workers, at once: copy each gradient into its place of a flat vector,
               one pass of SGD over it, one copy of the weights. No step through shared memory can do less
    socket     a bare echo of the same bytes over TCP on loopback, with SGD at the servers: no framing, no backward
    gloo       what DDP does on a CPU: all-reduce of the flat gradient, then fused SGD
    paceline   `zero_grad()`, backward, `step()` of a `DistributedOptimizer`, in processes that `launch` starts
    optimizer  one update of a `Shard`, without processes, against its memory traffic at the speed of a copy

Of gloo and Paceline a bare `zero_grad()` and backward is taken off. It is timed in the same processes while all of
them do it, since cores that share a memory slow each other down.

Each figure is a median over iterations, then the mean of the workers, then the median over rounds. Within a round
everything takes its turn, so that a machine whose speed drifts treats all alike. Every process has one thread.

A model is 8 tensors of equal size, or one tensor if it has less than 64 KB. MB is 2**20 bytes; a size is rounded to
whole KB. A run of Paceline's is measured under ASP, then told to change to BSP: starting its processes takes longer
than measuring does. The other processes are forked, from one that has torch loaded and has computed nothing (*the
crew*).
"""

from __future__ import annotations

from .measurement import measure
from .plan import Plan, Row, estimate_s
from .tables import tables

__all__ = ["Plan", "Row", "estimate_s", "measure", "tables"]
