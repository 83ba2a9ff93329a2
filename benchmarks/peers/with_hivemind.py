"""hivemind: peers that average gradients as soon as these make up a joint batch, or weights after local updates.

Peers find each other in a distributed hash table, which they enter through the peer on machine 0. hivemind's guide
recommends 3 to 15 s of matchmaking and joint batches of thousands of samples. Here, the joint batch is that of the
other systems: 42 samples, which take a fraction of a second. So the times are short: a peer searches at most 0.5 s for
a group (with 1 or 2 s, runs were slower), and averages as soon as all three peers are in the group. A peer asks for the
progress of the other peers at most every 0.05 s. Requests to other peers may take at most 0.3 s: if they may take
longer than the search, hivemind can deadlock. Gradients are accumulated in batches of 7 samples, so a fast peer
contributes more batches. With local updates, weights are averaged after every 8 joint batches. On slow links, numbers
are sent in 8 bits, or in 16 bits for small tensors, as in the ALBERT example.

If a late peer loads the state of another peer, the samples of the late peer since the last average are given up.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from .work import JOINT_BATCH, WORKERS, Task, Text, Worker, loss_of, new_model, new_optimizer

PART = 7  # samples of a gradient
LOCAL_BATCHES = 8  # joint batches between two averages of local weights
GROUP = {"target_group_size": WORKERS, "request_timeout": 0.3}
SMALL = 2**12  # tensors with fewer elements are sent in 16 bits


def main() -> None:
    """Train until the launcher ends the run."""
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    task = Task.given()
    worker = Worker(task)
    local = task.system == "hivemind-local"
    size = worker.share if local else PART
    model = new_model(task.seed)
    optimizer = hivemind.Optimizer(
        dht=joined_table(task, worker),
        run_id="peers",
        batch_size_per_step=size,
        target_batch_size=JOINT_BATCH * (LOCAL_BATCHES if local else 1),
        optimizer=new_optimizer(model, task.lr),
        use_local_updates=local,
        matchmaking_time=0.5,
        averaging_timeout=10.0,
        next_chunk_timeout=10.0,
        averager_opts=GROUP,
        grad_averager_factory=None if local else partial(GradientAverager, **GROUP),
        tracker_opts={"min_refresh_period": 0.05, "default_refresh_period": 0.1},
        **(compression() if task.slow_link else {}),
    )
    loads = _counted_loads(optimizer)
    if task.again:
        optimizer.load_state_from_peers()
    batches = Text().batches(task.seed + 500 * task.again, worker.machine, size)
    worker.begin()
    while not worker.ended:
        worker.pace(size)
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        worker.computed(size)
        epoch, loaded = optimizer.local_epoch, len(loads)
        optimizer.step()
        if len(loads) > loaded:
            worker.discarded()
        elif optimizer.local_epoch > epoch:
            worker.kept()
        # With local updates, weights are averaged in the background, so the peers never have the same weights.
        if local or optimizer.local_epoch > epoch:
            worker.save(model)


def joined_table(task: Task, worker: Worker) -> Any:
    """Join the distributed hash table of the run, and return the table."""
    import hivemind

    settings: dict[str, Any] = {
        "host_maddrs": [f"/ip4/{task.addresses[worker.machine]}/tcp/0"],
        "startup_timeout": 60.0,
        "start": True,
    }
    if worker.machine:
        return hivemind.DHT(initial_peers=json.loads(worker.awaited("peers")), **settings)
    table = hivemind.DHT(**settings)
    worker.publish("peers", json.dumps([str(each) for each in table.get_visible_maddrs()]))
    return table


def compression() -> dict[str, Any]:
    """Return the settings for slow links."""
    from hivemind.compression import Float16Compression, SizeAdaptiveCompression, Uniform8BitQuantization

    sizes = SizeAdaptiveCompression(
        threshold=SMALL, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    )
    return {"grad_compression": sizes, "state_averaging_compression": sizes}


def _counted_loads(optimizer: Any) -> list[None]:
    """Return a list to which each download of another peer's state adds an element."""
    loads: list[None] = []
    load = optimizer.load_state_from_peers

    def counted(**kwargs: Any) -> Any:
        loads.append(None)
        return load(**kwargs)

    optimizer.load_state_from_peers = counted
    return loads


if __name__ == "__main__":
    main()
