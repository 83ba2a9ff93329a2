"""How much memory and how many descriptors a run needs on this machine, and how much there is.

With P the bytes of all parameters (padding included), n workers and an optimizer that keeps s vectors per vector of
weights, a run holds

    over shared memory  (4 + s) P + 2 n P    the servers' weights, P, and optimizer state, s P; each worker's region,
                                             its weights and its gradients; 3 P while the weights are read at the end
    over streams        (4 + s) P + 4 n P    the same; for each worker an inbox for its gradient at the servers, and
                                             up to P of answers that were still on their way when the weights changed

and `PROCESS_BYTES` for each process: launcher, servers, workers. Of a region the n P of weights take the place of the
model's own, which exist already when a run begins and are given back: what is *still to come* then is n P less. So a
worker costs at most 3 P beyond its model, P over shared memory. It is less where the weights are read in place, over
shared memory under a model that goes in lockstep: the region's weights are then touched at the end only.

The 3 P are a copy that is queued at the servers and, at the launcher, the vectors that it is received into and the
tensors with names. It reads when the last worker has left, whose memory may still be there.

Not counted, for it is the script's own: data, activations, and gradients before they are taken into the region. Nor
what is small (buffers, pages that are not full), what is there for a moment before the gradients are (the first
weights and an optimizer's state on their way to the servers), a push that is held while its worker goes on, and the
snapshots that `launch` was asked to keep.

Before there is a model, only the processes are known: of each child `PROCESS_BYTES`, and the descriptors that the
busiest process has open, which is nearly always the launcher.

Arithmetic and reading of small files: no tensor, no torch. A system that says nothing of its memory has no limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

__all__ = [
    "DESCRIPTOR_HEADROOM",
    "PROCESS_BYTES",
    "Footprint",
    "available_bytes",
    "descriptor_limit",
    "descriptor_shortage",
    "descriptors",
    "footprint",
    "in_words",
    "open_descriptors",
    "process_shortage",
    "shortage",
    "state_vectors",
]

PROCESS_BYTES = 200 * 1024 * 1024
"""Of a process that has imported torch and Paceline: the five of a run with a tiny model hold 960 to 1100 MiB
together (the sum of Pss in /proc/<pid>/smaps_rollup, torch 2.13 on the CPU); 155 of each are its own, the rest is
libraries that they share. What a memory cgroup charges at the peak is 146 MiB for each server and 216 for each worker
that trains a tiny model."""

DESCRIPTOR_HEADROOM = 16
"""For each process: modules that are being imported, a child that is being started, files that a script opens."""

KEPT = {"Adagrad": 1, "Adadelta": 2, "Adamax": 2, "ASGD": 1, "NAdam": 2, "RAdam": 2, "Rprop": 2}
"""Optimizer -> how many vectors of state it keeps, where that does not depend on its hyper-parameters."""

MOST_KEPT = 3  # of an optimizer that is not known

FUSED = frozenset({"SGD", "Adam", "AdamW"})
FUSED_DTYPES = frozenset({"float32", "float64"})

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Footprint(msgspec.Struct, frozen=True):
    """The memory of one run, in bytes.

    Attributes:
        weights: those that the servers update.
        state: the optimizer's, and the mean of several pushes where that is a vector of its own.
        regions: each worker's weights and gradients.
        inboxes: over streams, where the servers take gradients in.
        answers: over streams, what is at most copied of answers that are on their way.
        reading: of the final weights on their way to the launcher.
        models: each worker's own weights before the region's take their place.
        processes: the interpreters with their libraries.
    """

    weights: int
    state: int
    regions: int
    inboxes: int
    answers: int
    reading: int
    models: int
    processes: int

    @property
    def total_bytes(self) -> int:
        """All that the run holds at most."""
        vectors = self.weights + self.state + self.regions + self.inboxes + self.answers + self.reading
        return vectors + self.processes

    @property
    def to_come_bytes(self) -> int:
        """What is not there yet when all processes run, each with its model, and training is about to begin."""
        return self.total_bytes - self.processes - self.models


def footprint(parameters_bytes: int, vectors: int, workers: int, servers: int, transport: str) -> Footprint:
    """The memory of a run whose processes are all on this machine. See the module for the formula.

    Args:
        parameters_bytes: P, `Layout.size_bytes`.
        vectors: s, see `state_vectors`.
        workers: how many.
        servers: how many; only their interpreters depend on it.
        transport: "shm", "unix" or "tcp".

    Example:
        >>> in_words(footprint(2**30, vectors=1, workers=4, servers=2, transport="shm").to_come_bytes)
        '9.0 GiB'
        >>> in_words(footprint(2**30, vectors=1, workers=4, servers=2, transport="tcp").to_come_bytes)
        '17.0 GiB'
    """
    each = workers * parameters_bytes
    streamed = 0 if transport == "shm" else each
    return Footprint(
        weights=parameters_bytes,
        state=vectors * parameters_bytes,
        regions=2 * each,
        inboxes=streamed,
        answers=streamed,
        reading=3 * parameters_bytes,
        models=each,
        processes=(1 + servers + workers) * PROCESS_BYTES,
    )


def state_vectors(optimizer: str, groups: Sequence[Mapping[str, Any]], dtypes: Iterable[str]) -> int:
    """How many vectors as long as the weights an optimizer keeps at most, at the servers.

    Args:
        optimizer: its class in `torch.optim`.
        groups: the hyper-parameters of each group; the group that keeps most counts for all.
        dtypes: of the parameters.

    Example:
        >>> state_vectors("SGD", [{"momentum": 0.9}], ["float32"])
        1
    """
    kept = max((_kept(optimizer, group) for group in groups), default=0)
    fused = optimizer in FUSED and FUSED_DTYPES.issuperset(dtypes)
    return kept if fused else kept + 1  # torch's own code takes the mean as a vector; see `slice_optimizers`


def _kept(optimizer: str, group: Mapping[str, Any]) -> int:
    match optimizer:
        case "SGD":
            return 1 if group.get("momentum") else 0
        case "Adam" | "AdamW":
            return 3 if group.get("amsgrad") else 2
        case "RMSprop":
            return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
        case _:
            return KEPT.get(optimizer, MOST_KEPT)


def shortage(needed: Footprint, available: int | None, what: str) -> str:
    """Why a run cannot begin for want of memory, in a sentence, and what to do; "" if it can, or nobody knows.

    Args:
        needed: the run's.
        available: bytes that can still be taken, see `available_bytes`; None where that is not known.
        what: the run in words: "4 workers over tcp".
    """
    if available is None or needed.to_come_bytes <= available:
        return ""
    return (
        f"not enough memory: {what} with {in_words(needed.weights)} of parameters need "
        f"{in_words(needed.to_come_bytes)} for weights, gradients and optimizer state, and {in_words(available)} "
        "can still be had. Ask for fewer workers"
        + (", use transport 'shm' (a third for each worker)" if needed.inboxes else "")
        + ", train a smaller model, or give the machine or container more memory."
    )


def process_shortage(workers: int, servers: int, available: int | None) -> str:
    """Return why the processes of a run do not fit into memory; "" if they do, or if the size of it is unknown.

    Args:
        workers: how many.
        servers: how many.
        available: bytes that can still be taken, besides what the launcher has, see `available_bytes`.
    """
    count = workers + servers
    needed = count * PROCESS_BYTES
    if available is None or needed <= available:
        return ""
    return (
        f"not enough memory: {_many(workers, 'worker')} and {_many(servers, 'server')} are {count} processes of "
        f"about {in_words(PROCESS_BYTES)} each before anything is trained, {in_words(needed)}, and "
        f"{in_words(available)} can still be had. Ask for fewer workers or servers, or give the machine or container "
        "more memory."
    )


def descriptors(workers: int, servers: int, shards: int, transport: str, open_now: int) -> int:
    """How many descriptors the process of a run that has most of them has open at once, with `DESCRIPTOR_HEADROOM`.

    Args:
        workers: how many.
        servers: how many.
        shards: how many.
        transport: "shm", "unix" or "tcp".
        open_now: of the launcher, before the run.
    """
    # A listening socket, a selector, a pair of sockets, a trace, the weights' memory and its mapping. Each child's
    # connection, input, output and log. Two readers of the weights, with a connection for each shard.
    launcher = open_now + 7 + 4 * (workers + servers) + 2 * shards
    # The standard three, a listening socket, a selector, the coordinator, the weights' memory and its mapping. Each
    # worker's connection and mapping. Its shards' traces and readers.
    shared = transport == "shm"
    server = 6 + 2 * shared + (1 + shared) * workers + 3 * -(-shards // servers)
    # A worker has a connection to each server and at most eleven others: always fewer than the launcher.
    return max(launcher, server) + DESCRIPTOR_HEADROOM


def descriptor_shortage(
    workers: int, servers: int, shards: int, transport: str, open_now: int, limit: int | None
) -> str:
    """Return why a run has too few descriptors to begin, and what to do; "" if it has enough.

    Args:
        workers, servers, shards, transport, open_now: see `descriptors`.
        limit: of each process, see `descriptor_limit`.
    """
    needed = descriptors(workers, servers, shards, transport, open_now)
    if limit is None or needed <= limit:
        return ""
    return (
        f"too few descriptors: with {_many(workers, 'worker')}, {_many(servers, 'server')} and "
        f"{_many(shards, 'shard')} one process may have {needed} files and connections open, and the limit is "
        f"{limit}. Raise it with 'ulimit -n {needed}' before the start, or ask for fewer workers, servers or shards."
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def in_words(size_bytes: int) -> str:
    """A size as people read it."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size_bytes} bytes"


# -- what there is ------------------------------------------------------------------------------------------


def available_bytes(root: Path = Path("/")) -> int | None:
    """How many bytes this process and its children can still take before the system kills one; None if unknown.

    The least of what the machine has (MemAvailable) and what each memory cgroup on this process's path, up to the
    root, leaves: its limit less what is in use there; file pages that have not been used for a while do not count,
    for the kernel drops them first.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    sizes = [*_of_machine(root), *_of_cgroups(root)]
    return min(sizes) if sizes else None


def descriptor_limit() -> int | None:
    """How many descriptors a process may have open; None for any number. What it starts has the same limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def open_descriptors() -> int:
    """How many this process has open; the standard three where it cannot be found out."""
    try:
        return len(os.listdir("/dev/fd")) - 1  # without the listing's own
    except OSError:
        return 3


def _of_machine(root: Path) -> Iterator[int]:
    size_kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    if size_kib is not None:
        yield size_kib * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, which is not mounted here: then only the mount itself is found.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            yield from _of_cgroup(mount.joinpath(*parts[:depth]), *files)


def _of_cgroup(directory: Path, limit_file: str, usage_file: str, inactive_key: str) -> Iterator[int]:
    limit, usage = _text(directory / limit_file).strip(), _text(directory / usage_file).strip()
    if limit.isdecimal() and usage.isdecimal():  # not "max", which is none
        inactive = _fields(directory / "memory.stat").get(inactive_key, 0)
        yield max(0, int(limit) - max(0, int(usage) - inactive))


def _fields(file: Path) -> dict[str, int]:
    """The lines "<name> <number> ..." of a file."""
    words = (line.split() for line in _text(file).splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _text(file: Path) -> str:
    """What a file holds; "" if it is not there or may not be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
