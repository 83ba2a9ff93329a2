"""The program that counts the accelerators of this machine: `python -P counting.py`.

A process that counts accelerators initializes their drivers, and cannot be forked any more. So
the accelerators are counted in a process that ends afterwards. This program imports nothing of Paceline.

Standard input is JSON: `path`, the module search path; `imports`, modules that add kinds of devices to torch; and
`kinds`, the kinds of devices to count besides the kind that torch chooses itself. Standard output is JSON: `chosen`,
the kind that torch chooses, or null if there is no accelerator; `torch`, the version of torch; and `found`, which
contains for each kind a list of devices, each with its `model` and its `memory_bytes`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def main() -> None:
    """Run the program. See the module's docstring."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    # Text that modules print while they are imported goes to standard error, so standard output is the result alone.
    result = os.dup(1)
    os.dup2(2, 1)

    import torch

    for name in asked["imports"]:
        import_module(name)
    current = torch.accelerator.current_accelerator(check_available=True)
    chosen = None if current is None else current.type
    kinds = dict.fromkeys([*([] if chosen is None else [chosen]), *asked["kinds"]])
    found = {kind: list(devices_of(kind)) for kind in kinds}
    with open(result, "w") as sink:
        json.dump({"chosen": chosen, "torch": torch.__version__, "found": found}, sink)


def devices_of(kind: str) -> Iterator[dict[str, Any]]:
    """Yield the model and the memory of each device of a kind; nothing if torch does not know this kind."""
    import torch

    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return
    if not module.is_available():
        return
    model_of = getattr(module, "get_device_name", lambda index: "")
    properties_of = getattr(module, "get_device_properties", lambda index: None)
    for index in range(module.device_count()):
        memory_bytes = getattr(properties_of(index), "total_memory", 0)
        yield {"model": str(model_of(index)), "memory_bytes": int(memory_bytes)}


if __name__ == "__main__":
    main()
