"""Machines out of one: network namespaces, joined by links of a given speed.

Owns the namespaces and what is in them: makes them, and removes them however their use ends. Each machine has one
link, a veth pair to a switch (a bridge in a namespace of its own, where no firewall of this system's forwards).
Both of its directions are limited by a token bucket (tc-tbf), so a machine sends and receives at the rate at once,
as with a full-duplex cable. Where the kernel has netem, what a machine sends is delayed besides. The launcher, which
is no machine, reaches the switch by a link without a limit; that is the only device outside the namespaces.

What all of this cannot give is cores: machines out of one share its processors.

Names hold the process id of whoever made them. A launcher that was killed cannot remove its own; the next one does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.errors import ConfigurationError
from paceline.launcher.local import Machine

__all__ = ["Link", "Network", "network", "rate_bps", "why_not"]

NAMESPACES = Path("/var/run/netns")  # where `ip netns` keeps them
DEVICES = Path("/sys/class/net")
OURS = re.compile(
    r"paceline(\d+)(-.*)?"
)  # a process id has 7 digits at most, the name of a device 15 characters

SUBNETS = 512  # in 198.18.0.0/15, which is set aside for benchmarks between networks (RFC 2544)
MOST_MACHINES = 250
LAUNCHER = 254  # its address in the subnet

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FASTEST_BPS = 100 * 10**9
SLOWEST_BPS = 10**6

BURST_S = 0.001  # of sending at the rate, that may leave at once
SMALLEST_BURST_BYTES = 128 * 1024  # two of the largest packets that TCP hands down
QUEUE_S = 0.05  # of sending at the rate: what waits beyond that is dropped, as at a switch
PACKETS = 100_000  # that may be under way in a delay


class Link(msgspec.Struct, frozen=True):
    """A machine's link.

    Attributes:
        rate: of each direction, in tc's notation: "1gbit".
        delay_s: of what a machine sends, where the kernel can delay it.
    """

    rate: str = "1gbit"
    delay_s: float = 0.001


class Network(msgspec.Struct, frozen=True):
    """Machines that are there.

    Attributes:
        host: the launcher's address.
        machines: in order.
        delayed: is the delay there. It is not where the kernel lacks netem.
    """

    host: str
    machines: tuple[Machine, ...]
    delayed: bool


def rate_bps(rate: str) -> float:
    """A rate in bits per second.

    Raises:
        ConfigurationError: it is not one that a link can have.

    >>> rate_bps("1gbit"), rate_bps("2.5mbit")
    (1000000000.0, 2500000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    bps = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not SLOWEST_BPS <= bps <= FASTEST_BPS:
        raise ConfigurationError(
            f"rate is {rate!r}, expected a number and kbit, mbit or gbit, from 1mbit to 100gbit, for example 1gbit."
        )
    return bps


def why_not() -> str:
    """What is missing for machines to be made here, in words; "" if nothing is."""
    missing = [f"the command {name!r}" for name in ("ip", "tc") if shutil.which(name) is None]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        missing.insert(0, "root (try sudo)")
    return " and ".join(missing)


@contextlib.contextmanager
def network(count: int, link: Link) -> Iterator[Network]:
    """So many machines with a link each, for as long as the context lasts. One network per process at a time.

    Raises:
        ConfigurationError: the link is none, something that is needed is missing, or this system refuses.
    """
    bps = rate_bps(link.rate)
    if not 1 <= count <= MOST_MACHINES:
        raise ConfigurationError(f"there are to be {count} machines, expected from 1 to {MOST_MACHINES}.")
    if missing := why_not():
        raise ConfigurationError(f"machines out of network namespaces need {missing}.")
    for owner in {int(match[1]) for name in _present() if (match := OURS.fullmatch(name))}:
        if not Path(f"/proc/{owner}").exists():
            _remove(owner)
    try:
        yield _make(f"paceline{os.getpid()}", count, link, bps)
    finally:
        with _uninterrupted():
            _remove(os.getpid())


def _make(name: str, count: int, link: Link, bps: float) -> Network:
    subnet = _free_subnet()
    switch = f"{name}-switch"
    _do(f"ip netns add {switch}")
    _do(f"ip -n {switch} link add bridge type bridge")
    _do(f"ip -n {switch} link set bridge up")
    _do(f"ip link add {name} type veth peer name launcher netns {switch}")
    _do(f"ip -n {switch} link set launcher master bridge up")
    _do(f"ip addr add {subnet}.{LAUNCHER}/24 dev {name}")
    _do(f"ip link set {name} up")
    delayed = link.delay_s > 0 and _has_netem(switch)
    machines = []
    for index in range(count):
        machine, port, host = f"{name}-{index}", f"port{index}", f"{subnet}.{index + 1}"
        _do(f"ip netns add {machine}")
        _do(f"ip -n {machine} link set lo up")
        _do(f"ip -n {machine} link add eth0 type veth peer name {port} netns {switch}")
        _do(f"ip -n {machine} addr add {host}/24 dev eth0")
        _limit(machine, "eth0", bps, link.delay_s if delayed else 0.0)
        _limit(switch, port, bps, 0.0)
        _do(f"ip -n {machine} link set eth0 up")
        _do(f"ip -n {switch} link set {port} master bridge up")
        machines.append(Machine(host, ("ip", "netns", "exec", machine)))
    return Network(f"{subnet}.{LAUNCHER}", tuple(machines), delayed)


def _limit(namespace: str, device: str, bps: float, delay_s: float) -> None:
    """Limit what a device sends; a delay comes first."""
    parent = "root"
    if delay_s:
        delay_us = round(delay_s * 1e6)
        _do(
            f"tc -n {namespace} qdisc add dev {device} root handle 1: netem delay {delay_us}us limit {PACKETS}"
        )
        parent = "parent 1:"
    burst_bytes = max(SMALLEST_BURST_BYTES, round(bps / 8 * BURST_S))
    queue_bytes = burst_bytes + round(bps / 8 * QUEUE_S)
    _do(
        f"tc -n {namespace} qdisc add dev {device} {parent} tbf rate {bps:.0f}bit burst {burst_bytes} "
        f"limit {queue_bytes}"
    )


def _has_netem(switch: str) -> bool:
    """Try it, on a device that has no limit."""
    tried = _run(f"tc -n {switch} qdisc add dev launcher root netem delay 1us")
    if tried.returncode == 0:
        _do(f"tc -n {switch} qdisc del dev launcher root")
    return tried.returncode == 0


def _free_subnet() -> str:
    """The first three numbers of one that this system does not reach yet, another for each process."""
    known = _do("ip -4 route show table all")
    for number in range(os.getpid(), os.getpid() + SUBNETS):
        subnet = f"198.{18 + number % SUBNETS // 256}.{number % 256}"
        if f"{subnet}." not in known:
            return subnet
    raise ConfigurationError("no subnet of 198.18.0.0/15 is free for the machines.")


def _present() -> list[str]:
    """Of all namespaces and devices, the names."""
    folders = [folder for folder in (NAMESPACES, DEVICES) if folder.is_dir()]
    return sorted(path.name for folder in folders for path in folder.iterdir())


def _remove(owner: int) -> None:
    """Remove what a process has made, as far as it has come. A namespace takes its devices with it."""
    for name in _present():
        match = OURS.fullmatch(name)
        if match is not None and int(match[1]) == owner:
            _run(f"ip netns del {name}" if match[2] else f"ip link del {name}")


def _do(command: str) -> str:
    """Run a command; what it printed. Raises `ConfigurationError` if it failed."""
    done = _run(command)
    if done.returncode != 0:
        raise ConfigurationError(
            f"this system does not let machines be made: {command!r} says {done.stderr.strip()!r}."
        )
    return done.stdout


def _run(command: str) -> subprocess.CompletedProcess[str]:
    # In a group of its own: Ctrl-C reaches the launcher alone, and no command stops half-way.
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
    """Ctrl-C is not heard meanwhile. (It is heard by the main thread only.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
