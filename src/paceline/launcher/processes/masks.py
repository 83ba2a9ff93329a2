"""Hides the accelerators of other workers from a worker.

A worker sees its own accelerator only, so it neither occupies memory on another one nor trains on it by mistake. What
hides accelerators depends on their driver, so it exists for the kinds in `MASKS` only. Workers on other kinds see all
accelerators, and theirs is made torch's current one.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from ...runtime.compute_devices import Device

__all__ = ["BUILT_IN", "MASKS", "Build", "alone", "environment_of", "torch_build"]

BUILT_IN = ("cuda", "mps", "xpu")
"""The kinds of accelerators that a build of torch may have, without another package."""


class Mask(NamedTuple):
    """What hides accelerators of one kind from a process, if it is set before the driver is initialized.

    Attributes:
        variable: environment variable with a list of accelerators, separated by commas.
        otherwise: variable that the driver reads if the first one is not set; "" for none.
        nothing: value that hides all accelerators.
    """

    variable: str
    otherwise: str
    nothing: str


MASKS: Mapping[str, Mask] = {
    "cuda": Mask("CUDA_VISIBLE_DEVICES", "", ""),
    # ROCm applies ROCR_VISIBLE_DEVICES first. Indices in this variable refer to what the other one leaves.
    "rocm": Mask("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "-1"),
    # The driver takes an empty list for all accelerators, and leaves out indices that do not exist.
    "xpu": Mask("ZE_AFFINITY_MASK", "", "65535"),
}
"""Kind of accelerator -> its mask. In torch's notation, accelerators under ROCm are of the kind "cuda", too."""


class Build(NamedTuple):
    """What torch was built for, as its file `version.py` says.

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

    If the user has already hidden accelerators, the index of a device refers to the others.

    Args:
        device: the worker's device.
        hidden: kinds of accelerators; those of the device's own kind are hidden except for the device.
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
    """Return devices whose workers see no accelerator but their own, where this is possible."""
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
    """Return what torch was built for, without importing it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    rocm = version.get("hip") is not None
    kinds = {kind for kind in BUILT_IN if version.get(kind) is not None}
    return Build(frozenset(kinds | ({"cuda"} if rocm else set())), rocm)
