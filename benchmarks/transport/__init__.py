"""`python -m benchmarks transport`: the times of a training step and of other ways to move the same bytes.

The compared systems:

- `floor`: one process per worker; the processes run simultaneously. Each computes its gradients, copies them into a
  flat vector, makes one pass of SGD over this vector, and copies the weights once. Nothing is exchanged.
- `socket`: servers receive gradients over TCP on loopback, apply SGD and send weights. There is no framing.
- `gloo`: all-reduce of the flat gradient, then fused SGD. DDP does the same on a CPU.
- `paceline`: `zero_grad()`, `backward()` and `step()` with a `DistributedOptimizer`, in processes of a Paceline run.
- `optimizer`: one update of a `Shard` in a single process, compared with the time to copy as many bytes as the update
  reads and writes.

Whole steps are timed, with `zero_grad()` and `backward()` of the same model in all systems. Nothing is subtracted,
because the time of a backward pass depends on what the other processes do meanwhile.

For each time, the median over iterations is computed first, then the mean over workers, then the median over rounds.
In each round, the systems are measured in turn, so that a change in the machine's speed affects all systems. Every
process uses one thread.

A model consists of 8 tensors of equal size, or of one tensor if it is smaller than 64 KB. An MB is 2**20 bytes; sizes
are rounded to whole KB. Each run of Paceline is measured under ASP and then under BSP, because starting its processes
takes longer than the measurement. The processes of all other systems are forked from a fork server, which has
imported torch but has not computed anything.
"""

from __future__ import annotations

from .measurement import measure
from .plan import TransportPlan, TransportRow, estimate_s
from .tables import tables

__all__ = ["TransportPlan", "TransportRow", "estimate_s", "measure", "tables"]
