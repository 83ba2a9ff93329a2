"""Estimates of the memory and file descriptors that a run needs, and functions that return the available amounts.

Let P be the size of all parameters in bytes (including padding), n the number of workers, and s the number of state
vectors that the optimizer stores for each vector of weights. When the workers have created their models and training
begins, a run still needs this memory (`footprint`):

    (1 + s) P    at the servers: weights and optimizer state
    n P          the region of each worker. It has 2 P for weights and gradients, but the weights in the region replace
                 the weights of the worker's model, whose memory is freed
    3 P          at the end, while the weights are read: a copy that is queued at the servers, the vectors into which
                 the launcher receives this copy, and the named tensors that the launcher creates from the vectors
    2 n P        only if gradients and weights travel over streams, not in shared memory: the gradient of each worker at
                 the servers, and answers that are still being sent when the weights change
    2 n c P      if gradients are encoded on their way (`--wire`), where c is 1/2 (bf16), 1/4 (int8) or 1/7 (int4)
    (n + 1) c P  if weights are encoded on their way: at each worker, and once at the servers for all workers
    n P          if gradients travel as int4: the rounding errors of the last gradient, at each worker
    (n + 1) P    if weights travel as int8 or int4: the base (see `core.layout`), at each worker, and once at the
                 servers

If workers join from other machines, a machine needs memory for its servers (`served_shortage`): for the weights and
the state of the parameters that they hold, and for the servers' ends of the streams. The machine that serves the run
also needs the 3 P for reading the weights.

The processes themselves need memory before training begins: `PROCESS_BYTES` each for the launcher and the fork server,
which have imported torch, and `FORKED_BYTES` for each server and worker, which share the memory of the fork server.
Before the model is known, only two amounts are checked: the memory of the processes that the launcher starts
(`child_bytes`), and the number of file descriptors of the process that needs the most descriptors.

The estimate excludes:

- memory that belongs to the script: data, activations, and gradients before they are copied into the region;
- small amounts of memory, such as buffers and partly filled pages;
- memory for the initial weights and optimizer state on their way to the servers, before the first gradients exist;
- copies of shards for checkpoints, (1 + s) P: if this memory is not available, no checkpoint is written;
- pushes that servers copy so that the workers can continue, and snapshots that a script requests from `launch`.

This module only computes sizes and reads small files, and does not import torch. If a system does not report its
memory, the memory is treated as unlimited.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.layout import CODECS, ModelSpec, WireFormat, dtype_of

PROCESS_BYTES = 200 * 1024 * 1024
"""Estimated memory of a process that has imported torch and Paceline.

Measured: the launcher has 160 MiB of private memory, and the fork server has 100 MiB that it shares with its children
(torch 2.13 on the CPU). In both cases, the rest of the 200 MiB is for shared libraries.
"""

FORKED_BYTES = 50 * 1024 * 1024
"""Estimated memory of a server or worker, besides the memory that it shares with its fork server.

Measured: a server has 11 MiB of private memory, and a worker that trains a tiny model has 14 MiB. All eight processes
of a run with four workers and two servers use 450 MiB (the sum of Pss in /proc/<pid>/smaps_rollup). A process that
cannot be forked (see `start.processes.spawn`) needs 155 MiB, which is not taken into account.
"""

DESCRIPTOR_HEADROOM = 16
"""Spare file descriptors per process, for importing modules, starting child processes and the script's own files."""

STATE_VECTORS = dict.fromkeys(("Adagrad", "ASGD", "Muon", "Adafactor"), 1) | dict.fromkeys(
    ("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop"), 2
)
"""Optimizer -> number of state vectors, if this number does not depend on the hyper-parameters."""

MOST_STATE_VECTORS = 3  # number assumed for an unknown optimizer

FUSED = frozenset({"SGD", "Adam", "AdamW"})
FUSED_DTYPES = frozenset({"float32", "float64"})

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def footprint(
    parameters_bytes: int, vectors: int, workers: int, *, shared: bool, wire: WireFormat = WireFormat()
) -> int:
    """Return the memory that a run still needs when training begins, if all of its processes are on this machine.

    Args:
        parameters_bytes: size of all parameters in bytes (P in the module's docstring). See `Layout.size_bytes`.
        vectors: number of state vectors (s in the module's docstring). See `state_vectors`.
        workers: number of workers.
        shared: True if the servers share the memory of the workers. Otherwise, gradients and weights travel.
        wire: the format in which gradients and weights travel. All parameters count as float32.

    Example:
        >>> format_size(footprint(2**30, vectors=1, workers=4, shared=True))
        '9.0 GiB'
        >>> format_size(footprint(2**30, vectors=1, workers=4, shared=False))
        '17.0 GiB'
    """
    needed_bytes = (1 + vectors + workers + 3) * parameters_bytes
    return needed_bytes if shared else needed_bytes + _streams_bytes(parameters_bytes, workers, wire, ends=2)


def _streams_bytes(size_bytes: int, workers: int, wire: WireFormat, *, ends: int) -> int:
    """Return the memory of streams at the servers or, if `ends` is 2, also at the workers."""
    receivers = (ends - 1) * workers
    residuals = receivers if CODECS[wire.gradients].feedback else 0
    bases = 1 + receivers if CODECS[wire.weights].based else 0
    return (
        (2 * workers + residuals + bases) * size_bytes
        + ends * workers * _encoded_bytes(size_bytes, wire.gradients)
        + (1 + receivers) * _encoded_bytes(size_bytes, wire.weights)
    )


def _encoded_bytes(size_bytes: int, codec: str) -> int:
    """Return the memory for a vector in the format in which it travels; 0 if the vector is not encoded."""
    return 0 if codec == "float32" else CODECS[codec].encoded_bytes(size_bytes) // 4


def state_vectors(
    optimizer: str, groups: Sequence[Mapping[str, Any]], dtypes: Iterable[str], *, fractions: bool = False
) -> int:
    """Return the number of weight-sized vectors that the optimizer state and the mean of pushes occupy.

    Args:
        optimizer: name of the optimizer's class in `torch.optim`.
        groups: hyper-parameters of each parameter group. The group that needs the most vectors determines the result.
        dtypes: dtypes of the parameters.
        fractions: True if the optimizer takes fractions of steps, for which copies are needed (see `slice_optimizers`).

    Example:
        >>> state_vectors("SGD", [{"momentum": 0.9}], ["float32"])
        1
    """
    vectors = max((_state_vectors(optimizer, group) for group in groups), default=0)
    fused = optimizer in FUSED and FUSED_DTYPES.issuperset(dtypes)
    if fused:
        return vectors
    # Without a fused update, the mean of the gradients needs a separate vector; see `slice_optimizers`. For fractions
    # of steps, the weights and the state are copied, and some classes need a running mean of the gradient.
    return vectors + 1 + (vectors + 2 if fractions else 0)


def vectors_of(model: ModelSpec, *, fractions: bool = False) -> int:
    """Return the largest number of state vectors that an optimizer of the model needs. See `state_vectors`."""
    dtypes = {dtype_of(vector) for vector in model.layout.sizes}
    return max(
        state_vectors(each.name, each.groups, dtypes, fractions=fractions) for each in model.optimizers
    )


def _state_vectors(optimizer: str, group: Mapping[str, Any]) -> int:
    """Return the number of state vectors that the optimizer stores for one parameter group."""
    match optimizer:
        case "SGD":
            return 1 if group.get("momentum") else 0
        case "Adam" | "AdamW":
            return 3 if group.get("amsgrad") else 2
        case "RMSprop":
            return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
        case _:
            return STATE_VECTORS.get(optimizer, MOST_STATE_VECTORS)


def shortage(
    parameters_bytes: int, needed_bytes: int, available: int | None, what: str, *, could_share: bool
) -> str:
    """Return an error message if a run needs more memory than is available; otherwise, return "".

    Args:
        parameters_bytes: size of all parameters in bytes.
        needed_bytes: memory that the run needs, see `footprint`.
        available: available memory in bytes, see `available_bytes`. If it is None (unknown), the result is "".
        what: description of the run, such as "4 workers over tcp".
        could_share: True if the run would need less memory with shared memory, and this system supports shared memory.
    """
    if available is None or needed_bytes <= available:
        return ""
    share = ", use transport 'shm' (which needs one third of the memory per worker)" if could_share else ""
    return (
        f"not enough memory: {what} with {format_size(parameters_bytes)} of parameters need "
        f"{format_size(needed_bytes)} for weights, gradients and optimizer state, but only "
        f"{format_size(available)} is available. Use fewer workers{share}, train a smaller model, or give the "
        "machine or container more memory."
    )


def served_shortage(
    held_bytes: int,
    vectors: int,
    workers: int,
    available: int | None,
    *,
    read_bytes: int = 0,
    wire: WireFormat = WireFormat(),
) -> str:
    """Return an error message if this machine has too little memory for its servers, else "".

    This is for runs that workers join from other machines.

    Args:
        held_bytes: size of the parameters that the servers on this machine hold.
        vectors: number of state vectors. See `state_vectors`.
        workers: number of workers.
        available: available memory in bytes, see `available_bytes`. If it is None (unknown), the result is "".
        read_bytes: size of all parameters if their weights are read on this machine at the end of the run.
        wire: the format in which gradients and weights travel. All parameters count as float32.
    """
    needed = (1 + vectors) * held_bytes + _streams_bytes(held_bytes, workers, wire, ends=1) + 3 * read_bytes
    if available is None or needed <= available:
        return ""
    return (
        f"not enough memory: servers with {format_size(held_bytes)} of parameters need {format_size(needed)} for "
        f"weights, optimizer state and the gradients of {_count(workers, 'worker')}, but only "
        f"{format_size(available)} is available on this machine. Let other machines bring servers "
        "(--remote-servers), use fewer workers, train a smaller model, or give the machine or container more memory."
    )


def child_bytes(workers: int, servers: int) -> int:
    """Return the estimated memory of all processes that the launcher starts, before training begins."""
    return PROCESS_BYTES + (workers + servers) * FORKED_BYTES


def process_shortage(workers: int, servers: int, available: int | None) -> str:
    """Return an error message if the processes of a run do not fit into the available memory; otherwise, return "".

    Args:
        workers: number of workers.
        servers: number of servers.
        available: available memory in bytes, not counting the memory that the launcher already uses, see
            `available_bytes`. If it is None (unknown), the result is "".
    """
    count = workers + servers
    needed = child_bytes(workers, servers)
    if available is None or needed <= available:
        return ""
    return (
        f"not enough memory: {_count(workers, 'worker')} and {_count(servers, 'server')} are {count} processes, "
        f"which need about {format_size(needed)} in total before training begins, but only {format_size(available)} "
        "is available. Use fewer workers or servers, or give the machine or container more memory."
    )


def descriptors(workers: int, servers: int, shards: int, open_now: int, *, shared: bool) -> int:
    """Return the maximum number of descriptors that any process of a run needs, including `DESCRIPTOR_HEADROOM`.

    Args:
        workers: number of workers.
        servers: number of servers.
        shards: number of shards.
        open_now: number of open descriptors in the launcher before the run.
        shared: True if the servers share the memory of the workers.
    """
    # The launcher has a listening socket, a selector, a pair of sockets, a trace, the shared memory for the weights
    # and its mapping; a connection to the fork server, and its output; a connection, an output, a log, a pidfd and a
    # socket for its exit code for each child; and two readers of the weights, each with a connection for each shard.
    launcher = open_now + 9 + 5 * (workers + servers) + 2 * shards
    # A server has the three standard streams, a listening socket, a selector, a connection to the coordinator, the
    # shared memory for the weights and its mapping; a connection and a mapping for each worker; and a trace and two
    # readers for each of its shards.
    server = 6 + 2 * shared + (1 + shared) * workers + 3 * -(-shards // servers)
    # A worker always has fewer descriptors than the launcher: a connection to each server and at most eleven others.
    return max(launcher, server) + DESCRIPTOR_HEADROOM


def descriptor_shortage(
    workers: int,
    servers: int,
    shards: int,
    open_now: int,
    limit: int | None,
    hard_limit: int | None = None,
    *,
    shared: bool,
) -> str:
    """Return an error message if a run needs more descriptors than a process may have; otherwise, return "".

    Args:
        workers, servers, shards, open_now, shared: see `descriptors`.
        limit: maximum number of descriptors per process, see `descriptor_limit`.
        hard_limit: number to which the user may raise the limit; None if the user may raise it to any number.
    """
    needed = descriptors(workers, servers, shards, open_now, shared=shared)
    if limit is None or needed <= limit:
        return ""
    how = f"Raise the limit with 'ulimit -n {needed}' before the run"
    if hard_limit is not None and needed > hard_limit:
        how = f"Let an administrator raise the hard limit, which is {hard_limit}"
    return (
        f"too few file descriptors: with {_count(workers, 'worker')}, {_count(servers, 'server')} and "
        f"{_count(shards, 'shard')}, one process needs up to {needed} open files and connections, but the limit is "
        f"{limit}. {how}, or use fewer workers, servers or shards."
    )


def file_shortage(needed_bytes: int, limit_bytes: int | None) -> str:
    """Return an error message if shared memory needs a larger file than a process may have; otherwise, return "".

    Args:
        needed_bytes: size of the shared memory of a worker.
        limit_bytes: see `paceline.wire.memory.file_limit`.
    """
    if limit_bytes is None or needed_bytes <= limit_bytes:
        return ""
    return (
        f"the shared memory of a worker needs {format_size(needed_bytes)}, but files may have at most "
        f"{format_size(limit_bytes)} here (ulimit -f). Raise the limit with 'ulimit -f unlimited' before the run, or "
        "use transport 'unix'."
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def format_size(size_bytes: int) -> str:
    """Return a size in human-readable form."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size_bytes} bytes"


# -- available resources ------------------------------------------------------------------------------------


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes of memory this process and its children can still allocate; None if this is unknown.

    This is the smallest of several amounts: the available memory of the machine (MemAvailable), and the remaining
    memory of each memory cgroup from this process's own cgroup up to the root. The remaining memory of a cgroup is
    its limit minus its usage. Inactive file pages do not count as usage, because the kernel reclaims them first.

    Args:
        root: directory in which `proc` and `sys` are mounted.
    """
    sizes = [*_available_on_machine(root), *_available_in_cgroups(root)]
    return min(sizes) if sizes else None


def descriptor_limit() -> int | None:
    """Return the maximum number of descriptors that one process may have open; None if there is no limit."""
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def hard_descriptor_limit() -> int | None:
    """Return the number to which this user may raise `descriptor_limit`; None if any number is permitted."""
    return None if os.geteuid() == 0 else _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def open_descriptors() -> int:
    """Return the number of descriptors that this process has open, or 3 if this number is unknown."""
    try:
        # Do not count the descriptor that the listing itself uses.
        return len(os.listdir("/dev/fd")) - 1
    except OSError:
        return 3


def _available_on_machine(root: Path) -> Iterator[int]:
    size_kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    if size_kib is not None:
        yield size_kib * 1024


def _available_in_cgroups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        # cgroup v2 has a single hierarchy. The line of this hierarchy lists no controllers.
        if not controllers:
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container, `path` may be a path on the host that does not exist here. If so, only `mount` itself is read.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            yield from _available_in_cgroup(mount.joinpath(*parts[:depth]), *files)


def _available_in_cgroup(
    directory: Path, limit_file: str, usage_file: str, inactive_key: str
) -> Iterator[int]:
    limit, usage = _text(directory / limit_file).strip(), _text(directory / usage_file).strip()
    # If there is no limit, the file contains "max" instead of a number.
    if limit.isdecimal() and usage.isdecimal():
        inactive = _fields(directory / "memory.stat").get(inactive_key, 0)
        yield max(0, int(limit) - max(0, int(usage) - inactive))


def _fields(file: Path) -> dict[str, int]:
    """Return a dictionary from name to number with one item for each line "<name> <number> ..." of a file."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(file: Path) -> str:
    """Return the content of a file; "" if it does not exist or cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
