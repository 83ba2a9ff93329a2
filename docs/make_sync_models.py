"""Write `docs/models/index.md`, a page for each model, and their pictures: `python docs/make_sync_models.py`.

The text comes from the module docstring of each model, and the pictures show simulations in virtual time. With
--check, nothing is written, and the exit code is 0 if the pages match the docstrings, 1 otherwise.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from paceline.look.models import Page, flowing, pages
from paceline.look.timelines import activity_of, save, timeline_picture
from paceline.sim import Cluster, Uniform, simulate
from paceline.sync import MODELS, Conditions

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # `docs` is not installed

from docs import pseudo_code  # noqa: E402

FOLDER = HERE / "models"
PICTURES = HERE / "pictures"

UNTIL_S = 20.0
LATENCY_S = 0.02
SLOW_S = 3.0
CLUSTER = Cluster(
    compute_s=[Uniform(low=0.9 * mean_s, high=1.1 * mean_s) for mean_s in (1.0, 1.0, 1.0, SLOW_S)],
    latency_s=LATENCY_S,
)
WIDTH = 112

SHOWN = {name: model.shown or (name,) for name, model in MODELS.items()}
"""For each model, the settings for which a timeline is drawn."""

INTRODUCTION = """\
# The synchronization models

A synchronization model, or *sync model*, decides when a worker may start its next iteration and when it has to wait,
and whether a push is applied, held back or dropped. In Python, a sync model is an object (see `paceline.sync`); on
the command line, it is a name with parameters. `paceline sync` lists all models, and `paceline sync ssp` describes
one of them.

The following terms are used for every model. c_p is the number of iterations that worker p has pushed, and min c is
the smallest c_p of all live workers. *Progress* is c_p - 1, the index of the iteration that was just pushed. A
*round* is complete when every live worker has pushed its gradient for this round (some models define a complete
round differently), and V_train is the number of complete rounds. A *delayed pull* is a pull that is not
answered on arrival. Each picture shows a simulation in virtual time, which runs the same synchronization code
as a live run. One of the four simulated workers is three times slower than the others, and iteration times vary
randomly by up to 10 %.

Different shards may run different models, and the model may change during a run:

    paceline run --workers 4 --servers 2 --sync 'bsp|ssp:staleness=3' train.py    # shard 0, shard 1
    paceline run --workers 4 --sync bsp@0,elastic-bsp@epoch:5 train.py            # from the 6th epoch on

A script can change the model with `paceline.set_sync("elastic-bsp")`. All shards change at the same boundary: for
each worker, the old model ends with the worker's next push, and the new model begins when every worker has sent its
next push. Pushes that were held back are averaged and applied at the boundary, so no push is lost, and all workers have
the same c_p when the new model begins. Some models must run on all shards, because they plan for the whole job:
`elastic-bsp` and `spec-sync`. `rennala` and `ringmaster` need a single shard (`--servers 1`), because a push could
otherwise be applied at one shard and dropped at another.

`--sync auto` lets the run choose: it begins with `bsp` and balanced batches, and changes to another model at the
beginning of an epoch if the change saves at least 10 % of the time per epoch. See
[the guide](../how-to/choose-a-model.md#let-the-run-choose).

A model decides which pushes are applied, and when. How far an update then moves the weights follows from the
script's hyper-parameters, which by default refer to the joint batch: see
[the guide](hyper-parameters.md). The papers apply each push with the hyper-parameters as they are.
`--hyperparameters raw` does the same. A model with a `push_scale` other than 1 always applies pushes in this
way.

"""

WHICH = """\
## Which model to use

The right synchronization model depends on how your workers differ, and on the noise of your gradients. The
following table summarizes [When it pays](when-it-pays.md), which compares 18 contenders in 11 simulated
clusters, with intervals. The problem is a noisy quadratic, for which the expected loss is known exactly; it is
not a neural network, so treat the recommendations as a starting point. A ratio is the time that a model takes
to reach a target loss, divided by the time of `bsp`, each with its own best settings. The comparisons have
different sizes of batches and numbers of workers. The three numbers in brackets count the comparisons in which
the model is better, the ties, and the comparisons in which the model is worse. A tie means that the data does
not show a difference.

"""

CHOICES = (
    (
        "your workers",
        "recommended model",
        "ratios",
    ),
    (
        "are equally fast",
        "`bsp`: every worker waits for all others",
        "on 40 equal machines, `asp` 2.08 to 3.23 (0, 0, 5)",
    ),
    (
        "differ persistently, and the result must match that of a single process",
        "`bsp` with `--batch balanced`: the slower a worker, the smaller its batch",
        "if a quarter of the workers were 2 times slower, `bsp balanced` 0.66 to 0.89 (10, 0, 0); if they "
        "were 4 times slower, `bsp balanced` 0.43 to 0.81 (10, 0, 0), or `bsp balanced, half fixed` 0.60 to "
        "0.90 (10, 0, 0) if half of the time for a batch did not depend on its size",
    ),
    (
        "draw from the same data, so that late gradients may be dropped",
        "`drop-stragglers`: a round ends after some of the pushes",
        "in all clusters, `drop-stragglers` 0.18 to 1.06 (47, 7, 1) and `rennala` 0.26 to 1.89 (36, 9, 10)",
    ),
    (
        "differ persistently: some are 4 times slower",
        "`asp`: no worker waits. Check the accuracy",
        "`asp` 0.43 to 0.61 (10, 0, 0); but if they were only 2 times slower, `asp` 0.81 to 1.04 (2, 0, 2) "
        "with small batches, and `asp` 1.30 to 1.46 (0, 0, 6) with larger ones",
    ),
    (
        "have iteration times that vary strongly at random",
        "with many workers, `asp`, after a check of the accuracy; with few, `bsp`",
        "with 16 workers, `asp` 0.80 to 0.90 (4, 1, 0); with 4, `asp` 0.87 to 1.18 (1, 4, 0)",
    ),
    (
        "pause occasionally",
        "with many workers, `asp`, after a check of the accuracy; with few, `bsp`",
        "with 16 workers, `asp` 0.39 to 0.63 (3, 2, 0); with 4, `asp` 0.89 to 1.71 (0, 5, 0)",
    ),
    (
        "have slow links",
        "`bsp`, unless batches are small",
        "`asp` 0.84 to 1.05 (1, 1, 2) with small batches, and `asp` 1.31 to 1.54 (0, 0, 6) with larger ones",
    ),
)
"""The headings and the rows of the table of recommendations. The ratios are those of `when-it-pays.md`."""

WHICH_IN_DETAIL = """\
Only `bsp`, with or without balanced batches, gives the result of a single process. `drop-stragglers` and
`rennala` apply no stale gradients, but drop late ones. Under all other models, workers wait less, but gradients
have *staleness*: while a worker computes a gradient, other workers update the weights.

`--batch balanced` gives each worker a batch in proportion to its speed, and works with every model. When one of
four workers was 3 times slower, ten epochs took 24.4 s under `bsp`, 11.2 s under `bsp` with balanced batches,
and 9.9 s under `asp` (`python -m benchmarks unequal`). Balanced batches help less if a large part of the time
of an iteration does not depend on the size of the batch. They do not help against random variations and pauses,
which end before the sizes can adapt.

"""


def picture_name(sync: str) -> str:
    """Return the file name of a model's picture in docs/pictures."""
    return sync.replace(":", "-").replace("=", "-").replace(",", "-") + ".png"


def draw(sync: str, path: Path) -> None:
    """Simulate one model and save its timeline."""
    model = Conditions(pull=lambda state: state.gap <= 2) if sync == "conditions" else sync
    result = simulate(CLUSTER, model, iterations=None, until_s=2 * UNTIL_S, record=True)
    save(timeline_picture(activity_of(result.records, result.trace), UNTIL_S), path)


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


def text_of(page: Page) -> str:
    """Return the page about one model."""
    lines = [f"# {page.name}", "", f"**{page.title}**", ""]
    if page.theory:
        lines += [wrapped(page.theory), ""]
    lines += [wrapped(f"*Admission.* {page.parts['Admission']}"), ""]
    for sync in SHOWN[page.name]:
        shown = "Conditions(pull=lambda state: state.gap <= 2)" if sync == "conditions" else sync
        lines += [f"![{shown}](../pictures/{picture_name(sync)})", "", f"`{shown}`", ""]
    for label in ("Guarantee", "Use", "Reference", "Deviations"):
        lines += [wrapped(f"*{label}.* {page.parts[label]}"), ""]
    lines += [f"    --sync {page.notation}", ""]
    lines += [wrapped(f"- `{key}`: {what}", indent="  ") for key, what in page.parameters]
    if any("c_p" in line or "V_train" in line for line in lines):
        lines[4:4] = ["[The synchronization models](index.md) defines c_p, min c, progress and V_train.", ""]
    return "\n".join(lines).rstrip() + "\n"


LISTED = """\
## Pages

You can also write [a model of your own](../how-to/own-model.md) as a class, or define it
[by conditions](../how-to/conditions.md).

"""

OTHERS = """\
- [What hyper-parameters mean](hyper-parameters.md): how far an update moves the weights
- [When it pays](when-it-pays.md): how much time each model saves
- [When it pays: on accelerators and slow links](when-it-pays-on-links.md)
- [When it pays: on real problems](when-it-pays-on-problems.md)
- [When it pays: all times](when-it-pays-times.md)
- [The same hyper-parameters under every model](same-accuracy.md): what is learned
- [The same hyper-parameters: the results](same-accuracy-results.md)
- [The papers' pseudo-code, line by line](pseudo-code.md)
"""


def texts() -> dict[Path, str]:
    """Return the pages."""
    headings, *rows = (f"| {' | '.join(row)} |\n" for row in CHOICES)
    table = "".join([headings, "|---" * len(CHOICES[0]), "|\n", *rows])
    listed = "".join(f"- [{page.name}]({page.name}.md): {page.title.rstrip('.')}\n" for page in pages())
    index = f"{INTRODUCTION}{WHICH}{table}\n{WHICH_IN_DETAIL}{LISTED}{listed}{OTHERS}"
    return {
        FOLDER / "index.md": index,
        FOLDER / "pseudo-code.md": pseudo_code.text(),
        **{FOLDER / f"{page.name}.md": text_of(page) for page in pages()},
    }


def main() -> int:
    """Write the pages and their pictures or, with --check, only check the pages. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return any(path.read_text() != text for path, text in texts().items())
    PICTURES.mkdir(exist_ok=True)
    for sync in [sync for shown in SHOWN.values() for sync in shown]:
        draw(sync, PICTURES / picture_name(sync))
    for path, text in texts().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
