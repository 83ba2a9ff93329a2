"""Write `docs/when-it-pays.md` from exhibits in the folders DIR: `python docs/make_when_it_pays.py DIR...`.

    python -m reproductions map claim-elastic-bsp claim-pssp claim-lazy claim-spec-sync specsync-fig8 fluentps-fig6 \\
        --out DIR

makes everything that the page is about; it takes more than an hour.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE / "when-it-pays.md"
PICTURES = HERE / "pictures"

HEAD = """\
# When it pays

Which synchronization model pays depends on how workers differ, on how much of an iteration goes into transfers, and
on how many workers there are. This page was measured, by training in virtual time: scikit-learn's digits, a network
of 9,802 parameters, every model at its own best learning rate. It says what to expect, not what to believe:
`paceline simulate your-cluster.toml --script your_script.py` says it of your own.

    python -m reproductions map claim-elastic-bsp claim-pssp claim-lazy claim-spec-sync specsync-fig8 fluentps-fig6 \\
        --out DIR
    python docs/make_when_it_pays.py DIR

## The map

![Which model is first, and how much sooner than BSP](pictures/when-it-pays.png)

Rows: in which way and how much workers are unequal. Columns: which share of an iteration transfers would take if all
were equal (one server, whose card they share), and how many workers. In each place: the model that came first to the
target, and how much sooner than BSP. `ssp` has staleness 3, `elastic-bsp` lookahead 15; `spec-sync` tunes itself.
"""


def found(folders: list[Path], name: str) -> dict[str, Any] | None:
    """What was kept of an exhibit, from the last folder that has it."""
    for folder in reversed(folders):
        path = folder / f"{name}.json"
        if path.exists():
            if name == "map":
                shutil.copy(folder / "map.png", PICTURES / "when-it-pays.png")
            kept: dict[str, Any] = json.loads(path.read_text())
            return kept
    return None


def section(title: str, text: str, kept: dict[str, Any] | None) -> str:
    """What was found of one thing."""
    if kept is None:
        return ""
    lines = [f"## {title}", "", text] if title else [text]
    for table in kept["tables"]:
        head = [heading or " " for heading in table["columns"]]
        lines += ["", f"{table['title'][0].upper()}{table['title'][1:]}:", ""]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in table["rows"]]
    lines.append("")
    for note in (*kept["notes"], kept["differs"]):
        lines += textwrap.wrap(
            f"- {note}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


SECTIONS = {
    "map": ("", HEAD),
    "claim-elastic-bsp": (
        "ElasticBSP against BSP",
        "One straggler of four that is three times slower; three momenta, each model at its own best rate there.",
    ),
    "claim-pssp": (
        "PSSP against the SSP of the same bound on regret",
        "How many pulls are delayed, by the way in which workers are unequal.",
    ),
    "claim-lazy": (
        "Lazy execution against the soft barrier",
        "SSP(3), by the way in which workers are unequal.",
    ),
    "claim-spec-sync": ("SpecSync against ASP", "By the way in which pushes arrive, 40 workers."),
    "specsync-fig8": ("", "On the paper's Cluster 1, with its network, and by its measure of convergence:"),
    "fluentps-fig6": ("Overlap and even slicing", "Under BSP, by one server's share of what is sent."),
}


def main() -> int:
    """Write the page."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    kept = {name: found(folders, name) for name in SECTIONS}
    if kept["map"] is None:
        print("give directories that `python -m reproductions map ...` has made", file=sys.stderr)
        return 2
    parts = [section(title, text, kept[name]) for name, (title, text) in SECTIONS.items()]
    TARGET.write_text("\n\n".join(part for part in parts if part) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
