"""Assigns a device to each worker of a machine, and hides all other devices from the worker.

This process never initializes an accelerator. It asks another process which accelerators there are (see `counting`),
but only if torch may have accelerators. This module does not import torch to find this out.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from ...errors import ConfigurationError, nearest
from ...run.compute_devices import CPU, Device
from ...run.installed import folder_of_torch
from ...run.job import Job
from ...settings import SETTINGS
from ...sync.plugins import load_models
from .program import Companion

PROGRAM = str(Path(__file__).with_name("counting.py"))
"""Path of the program that counts accelerators; see `counting`."""

DRIVERS = {"cuda": "libcuda.so.1", "rocm": "/dev/kfd", "xpu": "/dev/dri"}
"""Kind of accelerator (see `MASKS`) -> library or file without which no driver can work."""

AUTO = "auto"
BACKENDS = "torch.backends"  # group of entry points that torch loads by itself
ENTRY = re.compile(r"([a-z][a-z0-9_]*)(?::([0-9]{1,4}))?")


class Accelerators(msgspec.Struct, frozen=True):
    """The accelerators that another process has found; see `counting`.

    Attributes:
        chosen: the kind that torch chooses; None if there is no accelerator.
        torch: version of torch.
        found: kind -> the devices of this kind.
    """

    chosen: str | None
    torch: str
    found: dict[str, list[CountedDevice]]

    def devices(self, kind: str | None) -> list[Device]:
        """Return the devices of a kind; [] for None."""
        if kind is None:
            return []
        return [
            Device(kind=kind, index=index, model=each.model, memory_bytes=each.memory_bytes, own_index=index)
            for index, each in enumerate(self.found.get(kind, ()))
        ]

    def __str__(self) -> str:
        labels = [device.label for kind in self.found for device in self.devices(kind)]
        return ", ".join([*labels, CPU.name])


class CountedDevice(msgspec.Struct, frozen=True):
    """One accelerator. See `Device` for the attributes."""

    model: str
    memory_bytes: int


class Assigned(NamedTuple):
    """The workers of this machine.

    Attributes:
        workers: number of workers.
        devices: the device of each worker; () if none was assigned, so that all of them use the CPU.
    """

    workers: int
    devices: tuple[Device, ...] = ()


def assign_devices(
    wanted: object,
    workers: int | None,
    *,
    usual: int,
    imports: Sequence[str] = (),
    masked: bool = True,
) -> Assigned:
    """Return how many workers to start on this machine, and the device of each.

    Args:
        wanted: the devices that the user wants, as a sequence or separated by commas, such as "cuda:0,cpu"; one
            worker for each. None and "auto" stand for all accelerators of the kind that torch chooses.
        workers: the number of workers that the user wants; None for one per device.
        usual: the number of workers if there is no accelerator and the user has given no number.
        imports: modules to import, such as modules that add kinds of devices to torch.
        masked: True to hide other accelerators from each worker.

    Raises:
        ConfigurationError: the devices cannot be used, or do not fit the number of workers.
    """
    entries = _entries(wanted)
    some = type(workers) is int and workers > 0  # other numbers are refused when the job is made
    if entries is None:
        found = _chosen_devices(imports) if workers is None or some else []
        if not found:
            return Assigned(usual if workers is None else workers)
        count = len(found) if workers is None else workers
        devices = [found[worker % len(found)] for worker in range(count)]
    else:
        if len(entries) == 1 and workers is not None and some:
            entries = entries * workers
        if workers is not None and workers != len(entries):
            raise ConfigurationError(
                f"workers is {workers}, but devices names {len(entries)}, and there is one worker for each of them; "
                "omit workers, or name as many devices."
            )
        devices = _named("devices", entries, imports)
    return Assigned(len(devices), tuple(alone(devices) if masked else devices))


def devices_of_servers(
    wanted: str, workers: Sequence[Device] = (), imports: Sequence[str] = ()
) -> tuple[Device, ...]:
    """Return the devices among which the servers of this machine are divided; () if all of them use the CPU.

    Args:
        wanted: the device that the user wants: "cpu", "auto", or the name of a device. "auto" stands for all
            accelerators of the kind that torch chooses, except for those that workers use.
        workers: the devices of the workers of this machine.
        imports: modules to import, such as modules that add kinds of devices to torch.

    Raises:
        ConfigurationError: there is no such device.
    """
    if SETTINGS["server_device"].value(wanted) == CPU.kind:
        return ()
    if (entries := _entries(wanted)) is not None:
        found = _named("server_device", entries, imports)
    else:
        used = {device.name for device in workers}
        found = [device for device in _chosen_devices(imports) if device.name not in used]
    return tuple(alone(found)) if found else ()


def with_server_devices(job: Job) -> Job:
    """Return the configuration of a run with the devices of the servers that the launcher starts.

    Raises:
        ConfigurationError: there is no such device.
    """
    if job.server_devices:
        return job
    found = devices_of_servers(job.server_device, job.devices, job.imports)
    return structs.replace(job, server_devices=found)


def device_of_process(place: int, imports: Sequence[str] = ()) -> Device | None:
    """Return the device of the only worker of a process that a scheduler has started; None if none is assigned.

    The worker sees all accelerators that the scheduler makes visible.

    Args:
        place: index of the process among those on its machine, or 0 if the scheduler hides the other accelerators.
        imports: modules to import, such as modules that add kinds of devices to torch.
    """
    found = _chosen_devices(imports)
    return found[place % len(found)] if found else None


def _chosen_devices(imports: Sequence[str]) -> list[Device]:
    """Return the accelerators of the kind that torch chooses; [] if there are none."""
    if not may_have_accelerators(imports):
        return []
    accelerators = count_accelerators(imports)
    return accelerators.devices(accelerators.chosen)


def shared(devices: Sequence[Device]) -> str:
    """Return a warning about accelerators that several workers use; "" if there are none.

    >>> shared([Device(kind="cuda"), Device(kind="cuda"), CPU, CPU]).partition(" so ")[0]
    '2 workers share cuda:0,'
    """
    users = Counter(device.name for device in devices if device.kind != CPU.kind)
    several = [f"{count} workers share {name}" for name, count in users.items() if count > 1]
    if not several:
        return ""
    return (
        f"{', '.join(several)}, so they slow each other down and their memory adds up; use fewer workers "
        "(--workers), or name a device for each (--devices)."
    )


def _entries(wanted: object) -> list[tuple[str, int]] | None:
    """Return the kind and the index of each device that the user wants; None for all accelerators."""
    if wanted is None:
        return None
    each = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else str(wanted).split(",")
    words = [str(word).strip() for word in each]
    if words == [AUTO]:
        return None
    entries = []
    for word in words:
        read = ENTRY.fullmatch(word)
        if read is None or word == AUTO or (read[1] == CPU.kind and read[2]):
            raise ConfigurationError(
                f"devices contains {word!r}, expected 'auto' alone, or a list of devices such as 'cuda:0,cuda:1,cpu'."
            )
        entries.append((read[1], int(read[2] or 0)))
    return entries


def _named(name: str, entries: Sequence[tuple[str, int]], imports: Sequence[str]) -> list[Device]:
    """Return the devices that the user has named in a setting.

    Raises:
        ConfigurationError: there is no such device.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in entries if kind != CPU.kind))
    if not kinds:
        return [CPU] * len(entries)
    load_models("", imports)
    accelerators = count_accelerators(imports, kinds)
    devices = []
    for kind, index in entries:
        found = [CPU] if kind == CPU.kind else accelerators.devices(kind)
        if index >= len(found):
            raise ConfigurationError(f"{name} contains {_missing(kind, index, accelerators)}")
        devices.append(found[index])
    return devices


def _missing(kind: str, index: int, accelerators: Accelerators) -> str:
    """Return the name of a device, why it cannot be used, and what to do."""
    there = f"on this machine, torch {accelerators.torch} has found: {accelerators}"
    if found := accelerators.devices(kind):
        last = f"{kind}:0" if len(found) == 1 else f"{kind}:0 to {kind}:{len(found) - 1}"
        return f"'{kind}:{index}', but {there}; use {last}."
    if kind in BUILT_IN:
        return (
            f"'{kind}', but {there}; name one of these, or install a driver and a build of torch for {kind}."
        )
    known = sorted({*accelerators.found, *BUILT_IN, CPU.kind} - {kind})
    meant = f" (did you mean {near!r}?)" if (near := nearest(kind, known)) else ""
    return (
        f"'{kind}', but {there}; name one of these{meant}, or import the package that adds this "
        "kind of device to torch (--import PACKAGE)."
    )


def may_have_accelerators(imports: Sequence[str]) -> bool:
    """Return False if it is certain that torch has no accelerator here.

    This is certain if neither the build of torch nor a package adds a kind of accelerator. It is also certain if the
    driver is missing. The build alone does not tell, because the default builds in package indexes are for
    accelerators, and are installed on machines without accelerators, too.

    Raises:
        ConfigurationError: a module cannot be imported.
    """
    load_models("", imports)
    torch = sys.modules.get("torch")
    if torch is not None:  # the next call neither initializes an accelerator nor asks a driver
        chosen = torch.accelerator.current_accelerator()
        return chosen is not None and _may_have_driver(chosen.type)
    return any(map(_may_have_driver, torch_build().kinds)) or bool(entry_points(group=BACKENDS))


def _may_have_driver(kind: str) -> bool:
    """Return False if the driver of a kind of accelerator is missing. A library is loaded, but not initialized."""
    driver = DRIVERS.get("rocm" if kind == "cuda" and torch_build().rocm else kind, "/")
    if driver.startswith("/"):
        return Path(driver).exists()
    try:
        ctypes.CDLL(driver)
    except OSError:
        return False
    return True


def count_accelerators(imports: Sequence[str], kinds: Sequence[str] = ()) -> Accelerators:
    """Count the accelerators of this machine in another process.

    Args:
        imports: modules to import, such as modules that add kinds of devices to torch.
        kinds: kinds of accelerators to count besides the kind that torch chooses.

    Raises:
        ConfigurationError: the accelerators cannot be counted.
    """
    asked = json.dumps({"path": sys.path, "imports": list(imports), "kinds": list(kinds)})
    counting = Companion([PROGRAM])
    counting.end(lambda: False, asked.encode())
    if counting.exit_code:
        last = counting.last or f"exit code {counting.exit_code}"
        raise ConfigurationError(
            f"the accelerators of this machine cannot be counted ({last}); train on the CPU (--devices cpu), or make "
            "torch.accelerator.device_count() work."
        )
    return msgspec.json.decode(counting.said, type=Accelerators)


# -- Hides the accelerators of other workers from a worker ---------------------------------------------------
#
# A worker sees only its own accelerator, so it cannot occupy memory or train on another accelerator by
# mistake. How accelerators are hidden depends on their driver, so this is possible only for the kinds in
# `MASKS`. Workers on other kinds see all accelerators, and their own accelerator is made torch's current one.

BUILT_IN = ("cuda", "mps", "xpu")
"""The kinds of accelerators that a build of torch may have, without another package."""


class Mask(NamedTuple):
    """An environment variable that hides accelerators of one kind, if it is set before the driver is initialized.

    Attributes:
        variable: environment variable with a list of accelerators, separated by commas.
        otherwise: variable that the driver reads if `variable` is not set; "" for none.
        nothing: value that hides all accelerators.
    """

    variable: str
    otherwise: str
    nothing: str


MASKS: Mapping[str, Mask] = {
    "cuda": Mask("CUDA_VISIBLE_DEVICES", "", ""),
    # ROCm applies ROCR_VISIBLE_DEVICES first. HIP_VISIBLE_DEVICES then counts only the visible accelerators.
    "rocm": Mask("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "-1"),
    # To the driver, an empty list means all accelerators. The driver ignores indices that do not exist, so a list
    # with only such an index hides all accelerators.
    "xpu": Mask("ZE_AFFINITY_MASK", "", "65535"),
}
"""Kind of accelerator -> its mask. In torch's notation, accelerators under ROCm are of the kind "cuda", too."""


class Build(NamedTuple):
    """The accelerators that torch was built for, according to its file `version.py`.

    Attributes:
        kinds: kinds of accelerators.
        rocm: True if the kind "cuda" stands for ROCm.
    """

    kinds: frozenset[str]
    rocm: bool


def environment_of(
    device: Device, hidden: Iterable[str], environment: Mapping[str, str], *, rocm: bool = False
) -> dict[str, str]:
    """Return the environment variables with which a worker sees no accelerator but its own.

    If the user has already hidden accelerators, the index of a device counts only the visible ones.

    Args:
        device: the worker's device.
        hidden: kinds of accelerators to hide. Of the device's own kind, all accelerators but the device are hidden.
        environment: the environment of the launcher.
        rocm: True if the kind "cuda" stands for ROCm.

    >>> environment_of(Device(kind="cuda", index=1), ["xpu"], {"CUDA_VISIBLE_DEVICES": "4,6"})
    {'CUDA_VISIBLE_DEVICES': '6', 'ZE_AFFINITY_MASK': '65535'}
    """
    variables = {}
    for kind in dict.fromkeys([device.kind, *hidden]):
        mask = MASKS.get("rocm" if rocm and kind == "cuda" else kind)
        if mask is None:
            continue
        visible = environment.get(mask.variable) or environment.get(mask.otherwise, "")
        listed = [each.strip() for each in visible.split(",")] if visible else []
        if kind != device.kind:
            variables[mask.variable] = mask.nothing
        elif not listed:
            variables[mask.variable] = str(device.index)
        elif device.index < len(listed):  # otherwise, an entry of this list stands for several devices
            variables[mask.variable] = listed[device.index]
    return variables


def alone(devices: Sequence[Device]) -> list[Device]:
    """Return the devices, with variables that hide all other accelerators from their workers where this is possible."""
    build = torch_build()
    kinds = sorted({device.kind for device in devices} | build.kinds)
    masked = []
    for device in devices:
        variables = environment_of(device, kinds, os.environ, rocm=build.rocm)
        mask = MASKS.get("rocm" if build.rocm and device.kind == "cuda" else device.kind)
        own_index = 0 if mask is not None and mask.variable in variables else device.index
        masked.append(structs.replace(device, environment=variables, own_index=own_index))
    return masked


def torch_build() -> Build:
    """Return the accelerators that torch was built for, without importing torch.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    version = runpy.run_path(str(folder_of_torch() / "version.py"))
    rocm = version.get("hip") is not None
    kinds = {kind for kind in BUILT_IN if version.get(kind) is not None}
    return Build(frozenset(kinds | ({"cuda"} if rocm else set())), rocm)
