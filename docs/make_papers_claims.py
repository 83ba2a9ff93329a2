"""Write `docs/papers-claims.md` from the results in the folders DIR: `python docs/make_papers_claims.py DIR...`.

    python -m reproductions claim-elastic-bsp claim-pssp claim-lazy claim-spec-sync specsync-fig8 fluentps-fig6 \\
        --out DIR

This command produces all results that the page needs. A section whose results are in none of the folders keeps its
present text. So the results of a single exhibit are enough to renew its section.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE / "papers-claims.md"

HEAD = """\
# The papers' claims

This page repeats some of the papers' comparisons on stand-ins. Unless a section says otherwise, a network of 9,802
parameters was trained in virtual time on scikit-learn's digits, with each model at its own best learning rate, and
the numbers are medians over a few seeds, without intervals. They show whether a claim can be repeated at all, but not
which model is the best one for a cluster: no ratio on this page should be read as a lead, because its uncertainty is
unknown. See [When it pays](when-it-pays.md) for comparisons with intervals. These commands generate this page:

    python -m reproductions claim-elastic-bsp claim-pssp claim-lazy claim-spec-sync specsync-fig8 fluentps-fig6 \\
        --out DIR
    python docs/make_papers_claims.py DIR
"""


def found(folders: list[Path], name: str) -> dict[str, Any] | None:
    """Return the stored results with this name from the last folder that contains them, or None."""
    for folder in reversed(folders):
        path = folder / f"{name}.json"
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())
            return kept
    return None


def section(title: str, text: str, kept: dict[str, Any]) -> str:
    """Return one section of the page, from the stored results."""
    lines = [f"## {title}", "", textwrap.fill(text, 118)] if title else [textwrap.fill(text, 118)]
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
    "claim-elastic-bsp": (
        "ElasticBSP compared with BSP",
        "One of four workers is three times slower than the others. Each model is trained with three values of "
        "momentum, and with the best learning rate for each value.",
    ),
    "claim-pssp": (
        "PSSP compared with SSP at the same regret bound",
        "The table shows the share of delayed pulls for three kinds of differences between the workers. The right "
        "half of the table compares PSSP(3, 1/10) with SSP(12).",
    ),
    "claim-lazy": (
        "Lazy execution compared with the soft barrier",
        "All runs use SSP(3). The workers differ in the same three ways as in the previous section.",
    ),
    "claim-spec-sync": (
        "SpecSync compared with ASP",
        "The table compares the two models in three clusters of 40 workers: one in which pushes arrive evenly, one "
        "in which they arrive in bursts, and one in which the workers have different speeds.",
    ),
    "specsync-fig8": (
        "",
        "The next table is for the paper's Cluster 1, with the paper's message sizes and convergence criterion:",
    ),
    "fluentps-fig6": (
        "Overlap and even slicing",
        "All settings run under BSP. With slicing by key, the server with the largest share of the parameters "
        "determines the communication time. Even slicing (EPS) gives all servers equal shares.",
    ),
}


def main() -> int:
    """Write the page. Return the exit code."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    results = {name: kept for name in SECTIONS if (kept := found(folders, name)) is not None}
    if not results:
        print(
            f"No results were found. Give the directories that `python -m reproductions {' '.join(SECTIONS)} --out "
            "DIR` has written.",
            file=sys.stderr,
        )
        return 2
    parts = present_sections()
    for name, kept in results.items():
        parts[name] = section(*SECTIONS[name], kept)
    TARGET.write_text(HEAD + "\n" + "\n\n".join(f"{mark(name)}\n{parts[name]}" for name in SECTIONS) + "\n")
    return 0


def mark(name: str) -> str:
    """Return the invisible line above the section with the results of an exhibit."""
    return f"<!-- results of {name} -->"


def present_sections() -> dict[str, str]:
    """Return the sections of the page as it is: name of the exhibit -> text."""
    _, *parts = re.split(r"^<!-- results of (.+) -->$", TARGET.read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


if __name__ == "__main__":
    sys.exit(main())
