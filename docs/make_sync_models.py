"""Write `docs/sync-models.md` and its pictures: `python docs/make_sync_models.py`.

The text comes from the module docstring of each model, and the pictures show simulations in virtual time. With
--check, nothing is written, and the exit code is 0 if the page matches the docstrings, 1 otherwise.
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
    "rennala": ["rennala:batch=4"],
    "ringmaster": ["ringmaster:threshold=4", "ringmaster:threshold=4,stop=true"],
    "conditions": ["conditions"],
}
"""For each model, the settings for which a timeline is drawn."""

INTRODUCTION = """\
# The synchronization models

A synchronization model, or *sync model*, decides when a worker may start its next iteration and when it has to wait,
and whether a push is applied, held back or dropped. In Python, a sync model is an object (see `paceline.sync`); on
the command line, it is a name with parameters. `paceline sync` lists all models, and `paceline sync ssp` describes
one of them.

The following terms are used for every model. c_p is the number of iterations that worker p has pushed, and min c is
the smallest c_p of all live workers. *Progress* is c_p - 1, the index of the iteration that was just pushed. A
*round* is complete when every live worker has pushed its gradient for this round (some models define this
differently), and V_train is the number of complete rounds. A *delayed pull* is a pull that is not answered on
arrival. Each picture shows a simulation in virtual time, which runs the same synchronization code as a live run. One
of the four simulated workers is three times slower than the others, and iteration times vary randomly by up to 10 %.

Different shards may run different models, and the model may change during a run:

    paceline run --workers 4 --servers 2 --sync 'bsp|ssp:staleness=3' train.py    # shard 0, shard 1
    paceline run --workers 4 --sync bsp@0,elastic-bsp@epoch:5 train.py            # from the 6th epoch on

A script can change the model with `paceline.set_sync("elastic-bsp")`. All shards change at the same boundary: for
each worker, the old model ends with the worker's next push, and the new model begins when all workers have sent this
push. Pushes that were held back are averaged and applied at the boundary, so no push is lost, and all workers have
the same c_p when the new model begins. Some models must run on all shards: `drop-stragglers`, `elastic-bsp`,
`spec-sync`, and `conditions` with `pushes=average`. `rennala` and `ringmaster` need a single shard (the default, with
one server), because a push could otherwise be applied at one shard and dropped at another.

`--sync auto` lets the run choose: it begins with `bsp` and balanced batches, and changes to another model at the
beginning of an epoch if that saves at least 10 % of the time per epoch. See [the guide](guide.md#let-the-run-choose).

A model decides which pushes are applied, and when. How far an update then moves the weights follows from the
script's hyper-parameters, which by default refer to the joint batch: see
[the guide](guide.md#what-hyper-parameters-mean). The papers apply each push with the hyper-parameters as they are.
`--hyperparameters raw` does the same, and a model with a `push_scale` other than 1 always does.

"""


def picture_name(sync: str) -> str:
    """Return the file name of a model's picture in docs/pictures."""
    return sync.replace(":", "-").replace("=", "-").replace(",", "-") + ".png"


def draw(sync: str, path: Path) -> None:
    """Simulate one model and save its timeline."""
    model = Conditions(pull=lambda state: state.gap <= 2) if sync == "conditions" else sync
    result = simulate(CLUSTER, model, iterations=None, until_s=2 * UNTIL_S, record=True)
    save(timeline_picture(timeline_of(result.records, result.trace[:-1]), UNTIL_S), path)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap the paragraphs of a text, but leave indented paragraphs unchanged."""
    paragraphs = [
        part
        if part.startswith(" ")
        else textwrap.fill(
            part, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for part in flowing(text).split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def section(page: Page) -> str:
    """Return the section about one model."""
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
    """Return the whole page."""
    return INTRODUCTION + "\n".join(section(page) for page in pages())


def main() -> int:
    """Write the page and its pictures or, with --check, only check the page. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return TARGET.read_text() != text()
    PICTURES.mkdir(exist_ok=True)
    for sync in [sync for shown in SHOWN.values() for sync in shown]:
        draw(sync, PICTURES / picture_name(sync))
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
