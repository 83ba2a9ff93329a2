"""The command that runs the script of a recorded run again, under another sync model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ..core.protocol.lease import BatchSizing
from ..sync.schedule import read_schedule
from ..trace.kept_models import modules_of_models

__all__ = ["command_for"]


def command_for(summary: Mapping[str, Any], sync: str, batch: BatchSizing) -> str:
    """Return the command line, or the call of `launch` in Python, that runs a script under a sync model.

    Args:
        summary: the summary of the run. It tells how the run was launched, and names the modules to import.
        sync: the sync model.
        batch: sizes of the workers' batches.
    """
    modules = dict.fromkeys([*summary.get("imports", ()), *modules_of_models(read_schedule(sync).models)])
    kind, *words = summary.get("program") or ["serve" if "least_workers" in summary else "script", "SCRIPT"]
    workers = str(summary["workers"])
    if kind == "serve" and summary["least_workers"] < summary["workers"]:
        workers = f"{summary['least_workers']}:{workers}"
    settings = {"workers": workers, "servers": str(summary["servers"])}
    if (shards := summary.get("shards", summary["servers"])) != summary["servers"]:
        settings["shards"] = str(shards)
    named = {"sync": sync}
    if batch == "balanced":
        named["batch"] = batch
    if (split := summary.get("split") or "auto") != "auto":
        named["split"] = split  # as simulated; a split that the script fixes is the same
    if summary.get("hyperparameters") == "raw":
        named["hyperparameters"] = "raw"
    joint = bool(summary.get("joint_batch"))
    if kind == "function":
        numbers = "".join(f", {name}={value}" for name, value in settings.items())
        imports = f", imports={list(modules)!r}" if modules else ""
        texts = "".join(f", {name}={value!r}" for name, value in named.items())
        flag = ", joint_batch=True" if joint else ""
        return f"paceline.launch(FUNCTION{numbers}{texts}{flag}{imports})"
    settings |= named
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    options += ["--joint-batch"] * joint
    options += [word for name in modules for word in ("--import", name)]
    program = {"serve": [], "module": ["-m", *words]}.get(kind, words)
    return shlex.join(["paceline", "serve" if kind == "serve" else "run", *options, *program])
