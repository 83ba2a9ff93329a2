"""Writes `docs/sync-models.md` and its pictures: `python docs/make_sync_models.py`.

The words come from the head of each model's own file, the pictures from a rehearsal in virtual time. With --check,
nothing is written, and the exit code says whether the page is what the code says.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from paceline.report.canvas import save
from paceline.report.models import Page, flowing, pages
from paceline.report.picture import timeline_picture
from paceline.report.timeline import timeline_of
from paceline.sim import Cluster, Uniform, simulate
from paceline.sync import Conditions

HERE = Path(__file__).parent
TARGET = HERE / "sync-models.md"
PICTURES = HERE / "pictures"

UNTIL_S = 20.0
LATENCY_S = 0.02
SLOW_S = 3.0
CLUSTER = Cluster(
    compute_s=[Uniform(low=0.9 * mean_s, high=1.1 * mean_s) for mean_s in (1.0, 1.0, 1.0, SLOW_S)],
    latency_s=LATENCY_S,
)
WIDTH = 112

SHOWN: dict[str, list[str]] = {
    "bsp": ["bsp"],
    "asp": ["asp"],
    "ssp": ["ssp:staleness=3", "ssp:staleness=3,execution=lazy"],
    "dssp": ["dssp:lower=1,upper=6"],
    "dsps": ["dsps:lower=1,upper=15"],
    "pssp": ["pssp:staleness=1,probability=0.5"],
    "dynamic-pssp": ["dynamic-pssp:staleness=1"],
    "drop-stragglers": ["drop-stragglers:quorum=3"],
    "naive-waiting": ["naive-waiting:delay_s=0.3"],
    "elastic-bsp": ["elastic-bsp:lookahead=5"],
    "spec-sync": ["spec-sync:abort_time_s=0.3,abort_rate=0.2"],
    "conditions": ["conditions"],
}
"""What is pictured of each model."""

INTRODUCTION = """\
# The synchronization models

Which worker may go on, which waits, what happens to a push: that is a *sync model*. Each is a value
(`paceline.sync`), and a name with keys on the command line. `paceline sync` lists them; `paceline sync ssp`
shows one.

How to read this page. c_p is the number of iterations that worker p has pushed, min c the least of them among
the live workers. *Progress* is c_p - 1, the index of the iteration just pushed. V_train is the number of rounds
that are complete. A *delayed pull* is one that is not answered on arrival. Each picture is a rehearsal in
virtual time, by the very code that decides in a live run: four workers, one of them three times slower, each
iteration 10 % more or less than its mean at random.

Shards may run different models, and a run may change its model:

    paceline run --workers 4 --servers 2 --sync 'bsp|ssp:staleness=3' train.py    # shard 0, shard 1
    paceline run --workers 4 --sync bsp@0,elastic-bsp@epoch:5 train.py            # from the 6th epoch on

or, in the script, `paceline.set_sync("elastic-bsp")`. A change is made at a boundary that all shards share:
each worker ends the old model with its next push, and the new one begins when all have. What is held is
averaged then, nothing is lost, and everybody starts level. Models for the whole job (`drop-stragglers`,
`elastic-bsp`, `spec-sync`, and `conditions` that average) cannot be mixed with others.

"""


def picture_name(sync: str) -> str:
    """Its file, under docs/pictures."""
    return sync.replace(":", "-").replace("=", "-").replace(",", "-") + ".png"


def draw(sync: str, path: Path) -> None:
    """Rehearse one model and save its timeline."""
    model = Conditions(pull=lambda state: state.gap <= 2) if sync == "conditions" else sync
    result = simulate(CLUSTER, model, iterations=None, until_s=2 * UNTIL_S, record=True)
    save(timeline_picture(timeline_of(result.records, result.trace[0]), UNTIL_S), path)


def wrapped(text: str, indent: str = "") -> str:
    """Paragraphs in lines of equal length; what is indented stays as it is."""
    paragraphs = [
        part if part.startswith(" ") else textwrap.fill(part, WIDTH, subsequent_indent=indent)
        for part in flowing(text).split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def section(page: Page) -> str:
    """One model's part of the page."""
    lines = [f"## {page.name}", "", f"**{page.title}**", ""]
    if page.theory:
        lines += [wrapped(page.theory), ""]
    lines += [wrapped(f"*Admission.* {page.parts['Admission']}"), ""]
    for sync in SHOWN[page.name]:
        shown = "Conditions(pull=lambda state: state.gap <= 2)" if sync == "conditions" else sync
        lines += [f"![{shown}](pictures/{picture_name(sync)})", "", f"`{shown}`", ""]
    for label in ("Guarantee", "Use", "Reference", "Deviations"):
        lines += [wrapped(f"*{label}.* {page.parts[label]}"), ""]
    lines += [f"    --sync {page.notation}", ""]
    lines += [wrapped(f"- `{key}`: {what}", indent="  ") for key, what in page.parameters]
    return "\n".join(lines).rstrip() + "\n"


def text() -> str:
    """The whole page."""
    return INTRODUCTION + "\n".join(section(page) for page in pages())


def main() -> int:
    """Write, or check."""
    if "--check" in sys.argv[1:]:
        return TARGET.read_text() != text()
    PICTURES.mkdir(exist_ok=True)
    for sync in [sync for shown in SHOWN.values() for sync in shown]:
        draw(sync, PICTURES / picture_name(sync))
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
