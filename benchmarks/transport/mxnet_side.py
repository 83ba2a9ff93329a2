"""A process of a job of MXNet's kvstore, run by a Python that has MXNet, but neither Paceline nor torch.

The environment variables DMLC_* say whether the process is the scheduler, a server or a worker. The argument of the
process is a `KvTask`. A worker prints its median times as JSON. Every process ends when the launcher closes its
standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from statistics import median
from typing import Any


class Worker:
    """A worker with one key for each tensor. To compute a layer, the worker sleeps, as `beside_mxnet.Layer` does."""

    def __init__(self, mx: Any, task: dict[str, Any]) -> None:
        self.mx, self.task = mx, task
        bsp = task["mode"] == "bsp"
        self.kv = mx.kv.create("dist_sync" if bsp else "dist_async")
        lengths = [length for layer in task["layers"] for length in layer]
        numbers = iter(range(len(lengths)))
        self.layers = [[next(numbers) for _ in layer] for layer in task["layers"]]
        self.weights, self.gradients = ([mx.nd.zeros(length) for length in lengths] for _ in range(2))
        self.slope = self.kv.rank + 1.0  # the gradients differ between workers
        self.scale = 1 / self.kv.num_workers if bsp else 1.0
        self.kv.init(list(range(len(lengths))), self.weights)
        if self.kv.rank == 0:
            self.kv.set_optimizer(mx.optimizer.SGD(learning_rate=task["lr"], rescale_grad=self.scale))
        self.kv._barrier()

    def exchange(self, *actions: str) -> None:
        """For each key, push the gradient, pull the weights, or do both. MXNet's engine does this in the background."""
        for key in range(len(self.weights)):
            self.queue(key, *actions)

    def queue(self, key: int, *actions: str) -> None:
        """Push or pull one key. Keys that the next forward pass needs first have priority, as in Gluon."""
        if "push" in actions:
            self.kv.push(key, self.gradients[key], priority=-key)
        if "pull" in actions:
            self.kv.pull(key, out=self.weights[key], priority=-key)

    def step(self, exchange: bool = True) -> None:
        """Compute gradients, and exchange them.

        With overlap, the gradients of a layer leave while earlier layers compute, and each layer of the next forward
        pass waits for its own weights only. Without overlap, all pushes follow the passes, and all pulls
        follow the pushes.
        """
        overlap = exchange and self.task["overlap"]
        layer_s = self.task["compute_s"] / 3 / len(self.layers)
        for layer in self.layers:
            for key in layer:
                self.weights[key].wait_to_read()
            time.sleep(layer_s)
        for layer in reversed(self.layers):
            time.sleep(2 * layer_s)
            for key in layer:
                self.gradients[key][:] = self.slope  # computed anew in each step, as in training
                if overlap:
                    self.queue(key, "push", "pull")
        if exchange and not overlap:
            self.exchange("push")
            self.mx.nd.waitall()
            self.exchange("pull")
            self.mx.nd.waitall()

    def median_s(self, *arguments: bool) -> float:
        """Return the median time from the beginning of a step to the beginning of the next step."""
        begun_s = []
        for _ in range(self.task["warm_up"] + self.task["iterations"]):
            begun_s.append(time.perf_counter())
            self.step(*arguments)
        self.mx.nd.waitall()
        begun_s = [*begun_s[self.task["warm_up"] :], time.perf_counter()]
        return median(begun_s[i + 1] - begun_s[i] for i in range(self.task["iterations"]))

    def require_trained(self) -> None:
        """Raise an error unless the weights are the result of the pushes of all workers."""
        self.kv._barrier()
        self.exchange("pull")
        steps, workers = self.task["warm_up"] + self.task["iterations"], self.kv.num_workers
        expected = -self.task["lr"] * self.scale * steps * workers * (workers + 1) / 2
        for key, weight in enumerate(self.weights):
            found = weight.min().asscalar(), weight.max().asscalar()
            if max(abs(each - expected) for each in found) > 1e-3 * abs(expected):
                raise ValueError(f"the weights of key {key} are {found}, expected {expected}")


def _end_with_the_launcher() -> None:
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """In a worker, measure. In any other process, serve until the job ends."""
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    import mxnet as mx  # the scheduler and the servers stay in this import

    worker = Worker(mx, json.loads(sys.argv[1]))
    whole_s = worker.median_s()
    worker.require_trained()
    print(json.dumps({"whole_s": whole_s, "bare_s": worker.median_s(False)}), flush=True)
    worker.kv._barrier()


if __name__ == "__main__":
    main()
