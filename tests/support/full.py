"""`make full`: run every suite of the Makefile but those that take an hour, and end with a table.

A suite that fails does not stop the others. What a suite prints is in a file of its own. Before the first suite
starts, all programs that any of them needs must be there. This file uses nothing but the standard library, because it
runs before the first environment exists.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["LEFT_OUT", "SUITES", "Outcome", "counts", "main", "table", "what_lacks"]

FOLDER = Path("build", "full")
VULKAN = "/usr/share/vulkan/icd.d"  # where drivers of devices are listed

ROOT = {"root": ""}  # no package gives this
NAMESPACES = {**ROOT, "ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
MACHINES = {
    **NAMESPACES,
    "nsenter": "util-linux",
    "hostname": "hostname",
    "mount": "mount",
}
SLURM = dict.fromkeys(("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue"), "slurm-wlm")

SUITES: dict[str, dict[str, str]] = {
    "test": NAMESPACES,
    "thorough": NAMESPACES,
    "siege": ROOT,
    "clusters": {**NAMESPACES, **SLURM, "munged": "munge", "openssl": "openssl"},
    "porting": {},
    "ray": NAMESPACES,
    "look": {"chromium": "chromium", "npm": "npm"},
    "accelerator": {"libvulkan.so.1": "libvulkan1", VULKAN: "mesa-vulkan-drivers"},
    "release": {},
    "peers": MACHINES,
    "examples": {},
    "site": {},
}
"""Each suite, which is a target of the Makefile -> what it needs, and Debian's package that contains this."""

LEFT_OUT = ("check-models", "stress", "chaos", "fuzz", "versions", "paper")
"""The suites that take an hour."""

CLOSING = re.compile(r"^=*\s*((?:\d+ [a-z]+,? )+)in [\d.]+s\b", re.MULTILINE)  # the last line of pytest


class Outcome(NamedTuple):
    """How a suite has ended."""

    suite: str
    code: int
    passed: int
    failed: int  # tests that failed or could not be set up
    skipped: int
    time_s: float
    file: Path

    @property
    def result(self) -> str:
        return "ok" if self.code == 0 else f"exit code {self.code}; see {self.file}"


def counts(output: str) -> tuple[int, int, int]:
    """Return how many tests passed, failed and were skipped, from all closing lines of pytest in some output.

    >>> counts("3 passed in 0.2s\\n1 failed, 2 passed, 4 skipped, 9 deselected, 1 error in 61.00s (0:01:01)\\n")
    (5, 2, 4)
    """
    found: dict[str, int] = {}
    for line in CLOSING.findall(output):
        for number, kind in re.findall(r"(\d+) ([a-z]+)", line):
            found[kind.removesuffix("s")] = found.get(kind.removesuffix("s"), 0) + int(number)
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0), found.get("skipped", 0)


def is_there(needed: str) -> bool:
    """Return True if this process is root, or if this machine has a program, a library or a filled folder."""
    if needed in ROOT:
        return os.geteuid() == 0
    if needed.startswith("/"):
        return Path(needed).is_dir() and any(Path(needed).iterdir())
    if ".so" in needed:
        return ctypes.util.find_library(needed.removeprefix("lib").partition(".")[0]) is not None
    return shutil.which(needed) is not None


def what_lacks(suites: Iterable[str]) -> str:
    """Return what this machine lacks for some suites and what to type, or "" if it lacks nothing."""
    needed = {name: package for suite in suites for name, package in SUITES[suite].items()}
    lacking = {name: package for name, package in needed.items() if not is_there(name)}
    lines = []
    if packages := sorted({*lacking.values()} - {""}):
        missing = ", ".join(name for name in lacking if name not in ROOT)
        lines += [f"These are missing: {missing}. With Debian's packages, type:"]
        lines += [f"    apt-get install {' '.join(packages)}"]
    if lacking.keys() & ROOT:
        lines += [
            "Some suites emulate machines or start a cluster, which needs root. Type:",
            "    sudo make full",
        ]
    if lines:
        lines += [f"To leave suites out, name the others, of {' '.join(SUITES)}:"]
        lines += ["    make full SUITES='porting examples'"]
    return "\n".join(lines)


def table(outcomes: list[Outcome]) -> str:
    """Return how each suite has ended, one in a line."""
    rows = [["suite", "passed", "failed", "skipped", "time", "result"]]
    for each in outcomes:
        numbers = [str(number) for number in (each.passed, each.failed, each.skipped)]
        rows.append([each.suite, *numbers, f"{each.time_s / 60:.1f} min", each.result])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, result in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=False)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, result]))
    return "\n".join(lines)


def run(suite: str) -> Outcome:
    """Run one suite, and return how it has ended."""
    file = FOLDER / f"{suite}.txt"
    began_s = time.monotonic()
    with file.open("w") as output:
        command = [*os.environ.get("MAKE", "make").split(), suite]
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    return Outcome(suite, code, *counts(file.read_text(errors="replace")), time.monotonic() - began_s, file)


def main(arguments: list[str]) -> int:
    """Run the suites that are named, or all, and return the exit code."""
    suites = arguments or [*SUITES]
    if unknown := [name for name in suites if name not in SUITES]:
        print(f"There is no suite {unknown[0]!r}. The suites are: {', '.join(SUITES)}.")
        return 2
    if lacks := what_lacks(suites):
        print(lacks)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    try:
        for suite in suites:
            print(f"{time.strftime('%H:%M:%S')} {suite}, whose output is {FOLDER / suite}.txt", flush=True)
            outcomes.append(run(suite))
    finally:  # Ctrl-C shows what there is
        print(f"\n{table(outcomes)}", flush=True)
    return int(any(each.code for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
