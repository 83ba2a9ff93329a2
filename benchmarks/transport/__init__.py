"""`python -m benchmarks transport`: the time of a training step, compared with other ways to move the same bytes.

The compared systems:

- `floor`: one process per worker, all at the same time. Each process copies its gradients into a flat vector, makes
  one pass of SGD over this vector, and copies the weights once. No step over shared memory can do less.
- `socket`: servers echo the same bytes over TCP on loopback and apply SGD. There is no framing and no backward pass.
- `gloo`: all-reduce of the flat gradient, then fused SGD. This is what DDP does on a CPU.
- `paceline`: `zero_grad()`, backward and `step()` of a `DistributedOptimizer`, in processes started by `launch`.
- `optimizer`: one update of a `Shard` in a single process, compared with the time for copying as many bytes as the
  update reads and writes.

The time of `zero_grad()` and backward alone is subtracted from the times of gloo and Paceline. This time is measured
in the same processes while all of them compute, since cores that share memory slow each other down.

For each time, the median over iterations is computed first, then the mean over workers, then the median over rounds.
In each round, the systems are measured in turn, so that a change in the machine's speed affects all systems. Every
process has one thread.

A model consists of 8 tensors of equal size, or of one tensor if it is smaller than 64 KB. An MB is 2**20 bytes; sizes
are rounded to whole KB. A run of Paceline is measured under ASP and then changes to BSP, because starting its
processes takes longer than the measurement. For all other systems, processes are forked from a fork server, which
has imported torch but has computed nothing.
"""

from __future__ import annotations

from .measurement import measure
from .plan import TransportPlan, TransportRow, estimate_s
from .tables import tables

__all__ = ["TransportPlan", "TransportRow", "estimate_s", "measure", "tables"]
