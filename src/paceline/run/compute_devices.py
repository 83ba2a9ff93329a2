"""The devices on which workers compute: accelerators, and the CPU."""

from __future__ import annotations

import os

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The device of one worker.

    Attributes:
        kind: type of the device in torch's notation, such as "cuda" or "cpu".
        index: index of an accelerator among the accelerators of its kind that the launcher sees; 0 for the CPU.
        model: name of the accelerator's model, such as "NVIDIA H100"; "" for the CPU, or if unknown.
        memory_bytes: size of the accelerator's memory; 0 for the CPU, or if unknown.
        own_index: index of the accelerator in the worker's process, which may see fewer accelerators than the launcher.
        environment: environment variables that hide other accelerators from the worker's process.
    """

    kind: str
    index: int = 0
    model: str = ""
    memory_bytes: int = 0
    own_index: int = 0
    environment: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The device in torch's notation, with the index that the user knows.

        >>> Device(kind="cuda", index=3).name, CPU.name
        ('cuda:3', 'cpu')
        """
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def own_name(self) -> str:
        """The device in torch's notation, as the worker's process addresses it.

        >>> Device(kind="cuda", index=3).own_name
        'cuda:0'
        """
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.own_index}"

    @property
    def label(self) -> str:
        """The name of the device and of its model, for the user.

        >>> Device(kind="cuda", index=3, model="NVIDIA H100").label
        'cuda:3 (NVIDIA H100)'
        """
        return f"{self.name} ({self.model})" if self.model else self.name


CPU = Device(kind="cpu")


def usable_cores() -> int:
    """Return the number of cores that this process may use. A scheduler such as Slurm may permit only a few."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux
        return os.cpu_count() or 0
