"""Emulates a network on one machine: network namespaces that are connected by links with a given rate.

The context manager `network` creates the namespaces and their devices, and removes them on exit. Each emulated
machine has one link: a veth pair to a switch. The switch is a bridge in its own namespace, so the firewall of the
host does not affect it. A token bucket (tc-tbf) limits the rate of each direction of a link separately, so a machine
can send and receive at the full rate at the same time, as with a full-duplex cable. If the kernel has netem, each
packet that a machine sends is also delayed. The launcher runs outside the namespaces and reaches the switch over a
link with no rate limit. The launcher's end of this link is the only device that is created outside the namespaces.

All emulated machines share the processors of the host.

The names of namespaces and devices contain the process id of the launcher that created them. If a launcher was killed
before it could remove its namespaces, the next launcher removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigurationError
from paceline.start.local import HostMachine, ProcessPlacement

__all__ = ["Network", "NetworkLink", "network", "rate_bps", "why_not"]

NAMESPACES = Path("/var/run/netns")  # directory in which `ip netns` registers namespaces
DEVICES = Path("/sys/class/net")
# Matches the names of namespaces and devices that this module creates. Linux limits device names to 15 characters,
# which is enough because a process id has at most 7 digits.
OURS = re.compile(r"paceline(\d+)(-.*)?")

SUBNETS = 512  # number of /24 subnets in 198.18.0.0/15, which is reserved for benchmarks (RFC 2544)
MOST_MACHINES = 250
LAUNCHER = 254  # last number in the launcher's address

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FASTEST_BPS = 100 * 10**9
SLOWEST_BPS = 10**6

BURST_S = 0.001  # largest burst that may exceed the link's rate, given as the time to send it at this rate
SMALLEST_BURST_BYTES = (
    16 * 1024
)  # the kernel splits larger packets. With a large burst, small messages would pass without delay.
PACKETS = 100_000  # maximum number of packets that netem can hold at a time


class NetworkLink(msgspec.Struct, frozen=True):
    """The link of an emulated machine."""

    rate: str = "1gbit"  # rate in each direction, in tc's notation, for example "1gbit"
    delay_s: float = 0.001  # delay of each packet that the machine sends, if the kernel can delay packets
    # Length of the queue of each direction, as the time to send a full queue. A packet that does not fit into the queue
    # is dropped.
    queue_s: float = 0.05


class Network(msgspec.Struct, frozen=True):
    """A network of emulated machines."""

    host: str  # address of the launcher
    # For each machine, its address and the command prefix that runs a process on it.
    machines: tuple[HostMachine, ...]
    delayed: bool  # True if packets are delayed; False if no delay was requested or the kernel lacks netem

    def placement(self, servers: int) -> ProcessPlacement:
        """Return a placement with one server on each of the first machines, and one worker on each other machine."""
        return ProcessPlacement(self.host, self.machines[:servers], self.machines[servers:])


def rate_bps(rate: str) -> float:
    """Convert a rate to bits per second.

    Raises:
        ConfigurationError: the rate is not in tc's notation, or is outside the range from 1mbit to 100gbit.

    >>> rate_bps("1gbit"), rate_bps("2.5mbit")
    (1000000000.0, 2500000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    bps = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not SLOWEST_BPS <= bps <= FASTEST_BPS:
        raise ConfigurationError(
            f"rate is {rate!r}, expected a rate from 1mbit to 100gbit: a number followed by kbit, mbit or gbit, for "
            "example 250mbit."
        )
    return bps


def why_not() -> str:
    """Return what this process lacks to create network namespaces; "" if nothing is missing."""
    missing = [f"the command {name!r}" for name in ("ip", "tc") if shutil.which(name) is None]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        missing.insert(0, "root (try sudo)")
    return " and ".join(missing)


@contextlib.contextmanager
def network(
    count: int, link: NetworkLink, others: Mapping[int, NetworkLink] | None = None
) -> Iterator[Network]:
    """Create a network of machines with one link each, and remove it when the context exits.

    A process can have only one network at a time.

    Args:
        count: number of machines.
        link: settings of each machine's link.
        others: index of a machine, counted from 0 -> settings of its link, for machines with different links.

    Raises:
        ConfigurationError: an argument is invalid, a command or permission is missing, or a command failed.
    """
    links = [(others or {}).get(index, link) for index in range(count)]
    for each in [link, *links]:
        rate_bps(each.rate)
    if not 1 <= count <= MOST_MACHINES:
        raise ConfigurationError(
            f"count is {count}, expected a number of machines from 1 to {MOST_MACHINES}."
        )
    if missing := why_not():
        raise ConfigurationError(f"creating network namespaces needs {missing}.")
    for owner in {int(match[1]) for name in _present() if (match := OURS.fullmatch(name))}:
        if not Path(f"/proc/{owner}").exists():
            _remove(owner)
    try:
        yield _make(f"paceline{os.getpid()}", links)
    finally:
        with _uninterrupted():
            _remove(os.getpid())


def _make(name: str, links: Sequence[NetworkLink]) -> Network:
    subnet = _free_subnet()
    switch = f"{name}-switch"
    _do(f"ip netns add {switch}")
    _do(f"ip -n {switch} link add bridge type bridge")
    _do(f"ip -n {switch} link set bridge up")
    _do(f"ip link add {name} type veth peer name launcher netns {switch}")
    _do(f"ip -n {switch} link set launcher master bridge up")
    _do(f"ip addr add {subnet}.{LAUNCHER}/24 dev {name}")
    _do(f"ip link set {name} up")
    delayed = any(link.delay_s > 0 for link in links) and _has_netem(switch)
    machines = []
    for index, link in enumerate(links):
        machine, port, host = f"{name}-{index}", f"port{index}", f"{subnet}.{index + 1}"
        _do(f"ip netns add {machine}")
        _do(f"ip -n {machine} link set lo up")
        _do(f"ip -n {machine} link add eth0 type veth peer name {port} netns {switch}")
        _do(f"ip -n {machine} addr add {host}/24 dev eth0")
        _limit(machine, "eth0", link, link.delay_s if delayed else 0.0)
        _limit(switch, port, link, 0.0)
        _do(f"ip -n {machine} link set eth0 up")
        _do(f"ip -n {switch} link set {port} master bridge up")
        machines.append(HostMachine(host, ("ip", "netns", "exec", machine)))
    return Network(f"{subnet}.{LAUNCHER}", tuple(machines), delayed)


def _limit(namespace: str, device: str, link: NetworkLink, delay_s: float) -> None:
    """Limit the rate at which a device sends. If `delay_s` is not 0, each packet is first delayed."""
    bps = rate_bps(link.rate)
    parent = "root"
    if delay_s:
        delay_us = round(delay_s * 1e6)
        _do(
            f"tc -n {namespace} qdisc add dev {device} root handle 1: netem delay {delay_us}us limit {PACKETS}"
        )
        parent = "parent 1:"
    burst_bytes = max(SMALLEST_BURST_BYTES, round(bps / 8 * BURST_S))
    queue_bytes = burst_bytes + round(bps / 8 * link.queue_s)
    _do(
        f"tc -n {namespace} qdisc add dev {device} {parent} tbf rate {bps:.0f}bit burst {burst_bytes} "
        f"limit {queue_bytes}"
    )


def _has_netem(switch: str) -> bool:
    """Return True if the kernel has netem. This is tested on the launcher's device, which has no rate limit."""
    tried = _run(f"tc -n {switch} qdisc add dev launcher root netem delay 1us")
    if tried.returncode == 0:
        _do(f"tc -n {switch} qdisc del dev launcher root")
    return tried.returncode == 0


def _free_subnet() -> str:
    """Return the first three numbers of an unused subnet. Each process begins its search at a different subnet."""
    known = _do("ip -4 route show table all")
    for number in range(os.getpid(), os.getpid() + SUBNETS):
        subnet = f"198.{18 + number % SUBNETS // 256}.{number % 256}"
        if f"{subnet}." not in known:
            return subnet
    raise ConfigurationError(
        f"creating network namespaces needs a free /24 subnet of 198.18.0.0/15, but all {SUBNETS} are in use."
    )


def _present() -> list[str]:
    """Return the names of all network namespaces and devices on the host."""
    folders = [folder for folder in (NAMESPACES, DEVICES) if folder.is_dir()]
    return sorted(path.name for folder in folders for path in folder.iterdir())


def _remove(owner: int) -> None:
    """Remove all namespaces and devices that a process has created. Removing a namespace also removes its devices."""
    for name in _present():
        match = OURS.fullmatch(name)
        if match is not None and int(match[1]) == owner:
            _run(f"ip netns del {name}" if match[2] else f"ip link del {name}")


def _do(command: str) -> str:
    """Run a command and return its output. Raises `ConfigurationError` if the command failed."""
    done = _run(command)
    if done.returncode != 0:
        raise ConfigurationError(
            f"creating network namespaces failed: {command!r} printed {done.stderr.strip()!r}."
        )
    return done.stdout


def _run(command: str) -> subprocess.CompletedProcess[str]:
    # The command has its own process group, so that Ctrl-C interrupts only the launcher and not a running command.
    return subprocess.run(
        command.split(),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in this context. Outside the main thread, do nothing: only the main thread receives Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
