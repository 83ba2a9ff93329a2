"""Write the pages `docs/models/when-it-pays*.md` from the results of a study: `python docs/make_when_it_pays.py`.

    python -m reproductions evidence --estimate
    python -m reproductions evidence
    python docs/make_when_it_pays.py

The results are in `reproductions/results/evidence-quadratics.jsonl`. With --check, nothing is written, and the exit
code is 0 if the page matches the results, 1 otherwise. Every sentence about the contenders is made from the
comparisons that it sums up, so that no sentence can claim a lead whose interval holds 1.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # `reproductions` is not installed

from docs.by_study import of_digits  # noqa: E402
from docs.on_accelerators import section as on_accelerators  # noqa: E402
from docs.slow_links import section as on_slow_links  # noqa: E402
from reproductions.evidence.on_networks import SIX, STUDIES, TWO  # noqa: E402
from reproductions.evidence.on_quadratics import BATCHES, QUADRATICS  # noqa: E402
from reproductions.evidence.places import CONTENDERS, PLACES  # noqa: E402
from reproductions.evidence.study import Cell, read_cells  # noqa: E402
from reproductions.evidence.verdicts import (  # noqa: E402
    BASELINE,
    Comparison,
    Key,
    check_inequality,
    comparisons,
    ranks,
)

FOLDER = ROOT / "reproductions" / "results"
RESULTS = FOLDER / "evidence-quadratics.jsonl"
FOLDER_OF_PAGES = ROOT / "docs" / "models"
TARGET = FOLDER_OF_PAGES / "when-it-pays.md"
TARGET_OF_LINKS = FOLDER_OF_PAGES / "when-it-pays-on-links.md"
TARGET_OF_PROBLEMS = FOLDER_OF_PAGES / "when-it-pays-on-problems.md"
TARGET_OF_TIMES = FOLDER_OF_PAGES / "when-it-pays-times.md"
PICTURE = ROOT / "docs" / "pictures" / "when-it-pays.png"

TIME, EQUAL_TIME, EQUAL_GRADIENTS = "time to 0.1", "loss at equal time", "loss at equal gradients"
MEASURES = (TIME, EQUAL_TIME, EQUAL_GRADIENTS)
NOISY, QUIET = ("0.1 each", "1 in all"), ("1 each", "10 each", "10 in all")

METHOD = """\
## How it was measured

*Problem.* Noisy quadratics: the loss is a sum over eight curvatures from 1 to 1/64, and the covariance of the
gradient's noise is proportional to the curvature. Given the order in which gradients are computed and applied, which
the simulator records, the expected loss of SGD with momentum follows exactly, without sampling
(`reproductions/evidence/quadratics.py`). So results differ between seeds only because the random times of the workers
differ. The loss begins at 1. The size of a batch is stated in units of the *critical batch*, at which noise and
curvature slow down a step equally when the loss is 0.1: a worker's batch is 0.1, 1 or 10 critical batches ("each"),
or the batches of all workers together are 1 or 10 critical batches ("in all").

*Clusters.* One server, and a latency of 0.02 s. A gradient takes about 1 s. *Steady 2x* and *steady 4x*: a quarter of
the workers always take 2 or 4 times as long. *Jitter*: log-normal times with sigma 0.5. *Pauses*: each worker is 10
times slower for 5 s in every 50 s. *Slow links*: the messages of a quarter of the workers take 0.5 s in each
direction. *Equal*: 40 workers that differ by up to 3 % at random. With *half fixed*, half of a worker's time for a
gradient does not depend on the size of the batch.

*Tuning.* For each measure, each contender uses its own best learning rate, momentum (0, 0.5 or 0.9) and parameters of
its own. Learning rates differ by a factor of the square root of 2. Each contender starts with 48 settings, however
many parameters it has, and more learning rates are added until the best rate is neither the smallest nor the largest
one. Settings are chosen by the median over three seeds. If the loss of a setting rises above 2 with any of these
seeds, the setting is rejected.

*Evaluation.* 16 other seeds. Contenders are paired by seed. A ratio is the geometric mean of the ratios of a
contender's results to those of `bsp`, with a 95 % interval (Student's, on the logarithms). If a result is "never",
because the target is not reached or the loss rises above 2, it counts as infinite, and the interval is that of the
sign test for the median. *Tie* means that the interval contains 1, or that the difference does not remain significant
after Holm's correction for all {count:,} comparisons.

*Measures.* The time until the loss is 0.1 with a constant learning rate; and the loss after a given time, and after a
given number of gradients, with a learning rate that decays linearly to 0. The results also contain the times to 0.3
and 0.03.

The following commands repeat the study, which takes about {minutes} minutes on one core, and write its pages:

    python -m reproductions evidence --results DIR/evidence-quadratics.jsonl
    python docs/make_when_it_pays.py
"""

LET_THE_RUN_CHOOSE = """\
## Let the run choose

`--sync auto` begins with `bsp` and balanced batches, and changes to another model at the beginning of an epoch if the
change saves at least 10 % of the time per epoch ([details](../how-to/choose-a-model.md#let-the-run-choose)). `python
-m benchmarks auto` simulates such runs on 60 clusters of 4 to 16 workers, with 24 epochs of 30 iterations each. It
compares the durations of these runs, until all data is used, with the durations under `bsp`, `bsp` with balanced
batches, `drop-stragglers`, `ssp`, `elastic-bsp` and `asp`. An epoch is assumed to reduce the loss by the same amount
under each model, which is the aim of translated hyper-parameters. Dropped data is not counted as used.

| ten clusters each | behind the best fixed choice | time / `bsp` | time / `bsp balanced` | changes |
|---|---|---|---|---|
| some workers always 1.5 to 4 times slower | 2.9 to 6.1 % | 0.33 to 0.76 | 0.80 to 1.00 | 1 |
| random variation, sigma 0.1 to 0.7 | 1.0 to 10.3 % | 0.38 to 1.00 | 0.35 to 1.00 | 10 |
| pauses | 0.6 to 13.3 % | 0.32 to 0.87 | 0.32 to 0.86 | 12 |
| slow links, 0.05 to 0.59 s per message | 1.6 to 5.9 % | 0.56 to 1.00 | 0.56 to 1.00 | 9 |
| equal machines | 1.7 to 2.5 % | 1.00 | 1.00 | 0 |
| changes in mid-run | 2.8 to 10.2 % | 0.31 to 0.58 | 0.53 to 1.00 | 9 |

So `--sync auto` stays within 15 % of the best fixed choice in all 60 clusters, and is never slower than `bsp`."""

RESERVATION = (
    "A ratio does not tell what happens to a script that keeps settings that were found under `bsp`: here, each "
    "contender has its own best settings. Only `bsp`, with or without balanced batches, has the result of a single "
    "process at the settings of a single process. `drop-stragglers` and `rennala` apply no stale gradients, but drop "
    "late ones. Under all other models, gradients are stale, which changes how training proceeds: check the accuracy "
    "of your script before you use them."
)

CANNOT = (
    "whether these results hold for the networks that people train: the problems here are quadratics and the small "
    "problems in [On real problems](when-it-pays-on-problems.md), trained by SGD.",
    "whether late gradients may be dropped if workers hold different data. Here, all workers draw from the same "
    "data, the best case for `drop-stragglers`, `rennala` and `ringmaster`.",
    "anything about ratios between 0.9 and 1.1, even if they are significant: neighboring learning rates differ by "
    "41 %, so an optimum between them can be missed by a few percent.",
    "which settings are safe: the best settings were chosen with three seeds, and some of them diverge with other "
    'seeds. Such a result counts as "never".',
    "by how much final losses would differ on a real problem: without noise, a quadratic's loss falls exponentially.",
)

REFINED = (
    "asp n/tau",
    "asp 1/tau",
    "ringmaster",
    "elastic-bsp",
    "spec-sync",
    "ssp",
    "pssp",
    "naive-waiting",
)
"""Models that resemble `asp`."""


SHORT = {
    "ratings": "a matrix factorization",
    "digits": "a convolutional network",
    "text-transformer": "a transformer",
}

PROBLEMS = {
    "ratings": "Matrix factorization: 12,000 ratings with noise, of 200 users and 300 items, batches of 64.",
    "digits": "A convolutional network with BatchNorm on scikit-learn's 1,797 handwritten digits, batches of 16.",
    "text-transformer": "A byte-level transformer with about 60,000 parameters, trained for one pass over 1 MB of the "
    "source files of Python's standard library, batches of 512 bytes.",
}
"""The problems of the studies that follow the quadratics, in the order of the page."""

REAL = (
    "These studies follow the protocol of [When it pays](when-it-pays.md#how-it-was-measured), with six contenders "
    f"that were chosen before any result was known. There are two clusters ({TWO[0]}; {TWO[1]}), and all batches of "
    "a problem have the same size. Settings are chosen by the time to the first target in the tables, with a "
    "constant learning rate, and used for all measures. The tuning begins with 18 settings, and the evaluation uses "
    "16 seeds. The loss is measured on held-out data, and a target is a share of the loss at the beginning. Holm's "
    "correction covers all comparisons of a problem."
)


class Page(NamedTuple):
    """What the page is made from.

    Attributes:
        cells: all results on quadratics.
        found: every comparison with `bsp` on quadratics.
        with_asp: comparisons of times with `asp` on quadratics.
        real: study -> every comparison with `bsp`, for the studies on real problems that are complete.
    """

    cells: list[Cell]
    found: dict[Key, Comparison]
    with_asp: dict[Key, Comparison]
    real: dict[str, dict[Key, Comparison]]


def some(
    found: dict[Key, Comparison],
    contender: str,
    kinds: Sequence[str],
    batches: Sequence[str],
    measure: str = TIME,
) -> list[Comparison]:
    """Return the comparisons of a contender at the places whose names begin with one of `kinds`."""
    return [
        comparison
        for key, comparison in found.items()
        if key.contender == contender
        and key.batches in batches
        and key.measure == measure
        and key.place.startswith(tuple(kinds))
    ]


def span(found: Iterable[Comparison]) -> str:
    """Return the smallest and the largest ratio: "0.43 to 0.61"."""
    ratios = [comparison.ratio.ratio for comparison in found]
    low, high = min(ratios), max(ratios)
    return f"{_number(low)} to {_number(high)}" if _number(low) != _number(high) else _number(low)


def _number(ratio: float) -> str:
    return "never" if math.isinf(ratio) else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def standing(
    found: dict[Key, Comparison],
    contender: str,
    kinds: Sequence[str] = ("",),
    batches: Sequence[str] = BATCHES,
    measure: str = TIME,
) -> str:
    """Return a contender's ratios, and how many are better, ties and worse: "`asp` 0.5 to 0.6 (5, 0, 0)"."""
    chosen = some(found, contender, kinds, batches, measure)
    count = Counter(comparison.verdict for comparison in chosen)
    verdicts = f"{count['better']}, {count['tie'] + count['neither']}, {count['worse']}"
    return f"`{contender}` {span(chosen)} ({verdicts})"


def findings(page: Page) -> list[str]:
    """Return what can be said, in one sentence for each situation."""
    found, asp = page.found, page.with_asp
    checked, helped = check_inequality(page.cells, BATCHES, (TIME, EQUAL_TIME))
    balanced = ("bsp balanced", "bsp balanced, half fixed")

    def of(contenders: Sequence[str], kinds: Sequence[str], batches: Sequence[str] = BATCHES) -> str:
        return ", ".join(standing(found, contender, kinds, batches) for contender in contenders)

    def of_asp(contenders: Sequence[str]) -> str:
        return ", ".join(standing(asp, contender) for contender in contenders)

    def at_equal_gradients(contenders: Sequence[str]) -> str:
        return ", ".join(standing(found, c, measure=EQUAL_GRADIENTS) for c in contenders)

    real = [
        f"*On {SHORT[name]}*, with 4 workers: if one is 4 times slower, {on_real(name, each, TWO[0])}; with random "
        f"variation, {on_real(name, each, TWO[1])}."
        for name, each in page.real.items()
    ]
    return [
        f"*Some workers always 4 times slower*: {of((*balanced, 'asp'), ['steady 4x'])}.",
        f"*Some workers always 2 times slower*: {of(balanced, ['steady 2x'])}. With small batches (0.1 each or 1 in "
        f"all), {of(['asp'], ['steady 2x'], NOISY)}; with larger ones, {of(['asp'], ['steady 2x'], QUIET)}.",
        f"*Strong random variation*: with 16 workers, {of(['asp'], ['jitter, 16'])}; with 4, "
        f"{of(['asp'], ['jitter, 4'])}.",
        f"*Pauses*: with 16 workers, {of(['asp'], ['pauses, 16'])}; with 4, {of(['asp'], ['pauses, 4'])}.",
        f"*Slow links*: with small batches, {of(['asp'], ['slow links'], NOISY)}; with larger ones, "
        f"{of(['asp'], ['slow links'], QUIET)}.",
        f"*Forty equal machines*: {of(['asp', 'rennala', 'drop-stragglers'], ['equal'])}.",
        f"*Dropping late gradients*, all clusters: {of(['drop-stragglers', 'rennala'], [''])}.",
        f"*Compared with `asp`* instead of `bsp`, all clusters: {of_asp(REFINED)}.",
        *real,
        f"*With the same number of gradients* instead of the same time, ratios of losses: "
        f"{at_equal_gradients(('asp', 'spec-sync', 'rennala', 'drop-stragglers'))}.",
        "*A check*: a contender should not be faster in a cluster with more inequality. It is faster, by more than "
        f"the noise, in {len(helped)} of {checked} pairs of *steady 2x* and *steady 4x*: {_names(helped)}. In "
        "expectation, a slow worker's outdated gradients disturb less if there are fewer of them, so the ratios of "
        "these models at 2x do not hold for other degrees of inequality.",
    ]


def on_real(name: str, found: dict[Key, Comparison], place: str) -> str:
    """Return the ratios of the times to the second target in a study, with the verdict if it is not "better"."""
    shown = []
    for contender in SIX[1:]:
        comparison = found[Key(place, contender, "fixed", STUDIES[name].tune_by)]
        word = "" if comparison.verdict == "better" else f" ({comparison.verdict})"
        shown.append(f"`{contender}` {_number(comparison.ratio.ratio)}{word}")
    return ", ".join(shown)


def _names(helped: Sequence[tuple[Key, object]]) -> str:
    counts = Counter(key.contender for key, _ in helped)
    return ", ".join(f"`{contender}` ({count})" for contender, count in counts.most_common())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def times(page: Page, batches: str) -> list[str]:
    """Return the tables of the times to the target for one size of the batches."""
    lines = [f"## Batches: {batches}", ""]
    for workers in ((4,), (16, 40)):
        places = [place for place in PLACES.values() if place.workers in workers]
        head = [" ", *(place.name.removesuffix(" workers") for place in places)]
        rows = [
            [f"`{c}`", *(page.found[Key(place.name, c, batches, TIME)].text for place in places)]
            for c in CONTENDERS
            if c != BASELINE
        ]
        lines += table(head, rows)
    return lines


def overview(page: Page) -> list[str]:
    """Return the table of ranks and verdicts."""
    rank = {measure: ranks(page.cells, BATCHES, measure) for measure in MEASURES}
    rows = []
    for contender in sorted(CONTENDERS, key=rank[TIME].__getitem__):
        cells = [f"`{contender}`"]
        for measure in MEASURES:
            count = Counter(c.verdict for c in some(page.found, contender, ("",), BATCHES, measure))
            verdicts = f"{count['better']} / {count['tie'] + count['neither']} / {count['worse']}"
            cells += [f"{rank[measure][contender]:.1f}", "-" if contender == BASELINE else verdicts]
        rows.append(cells)
    head = [" "]
    for measure in MEASURES:
        head += [f"{measure}: rank", "better / tie / worse"]
    return table(head, rows)


def results() -> Page:
    """Return the results and the comparisons."""
    cells = [cell for cell in read_cells(RESULTS) if cell.place in PLACES and cell.contender in CONTENDERS]
    return Page(
        cells,
        comparisons(cells, BATCHES, MEASURES),
        comparisons(cells, BATCHES, [TIME], "asp"),
        {name: real for name in PROBLEMS if (real := comparisons_on(name))},
    )


def comparisons_on(name: str) -> dict[Key, Comparison]:
    """Return the comparisons with `bsp` in a study on a real problem; {} unless the study is complete."""
    study = STUDIES[name]
    cells = read_cells(FOLDER / f"evidence-{name}.jsonl")
    if len(cells) < len(study.places) * len(study.contenders):
        return {}
    return comparisons(cells, study.batches, study.measures)


def on_real_problems(page: Page) -> list[str]:
    """Return the tables of the studies on real problems."""
    lines = ["# When it pays: on real problems", "", *textwrap.wrap(REAL, 118), ""]
    for name, found in page.real.items():
        study = STUDIES[name]
        measures = study.measures[1:]
        lines += [f"## {name}", "", *textwrap.wrap(PROBLEMS[name], 118), ""]
        for place in TWO:
            head = [place.removesuffix(" workers"), *measures]
            rows = [
                [f"`{c}`", *(found[Key(place, c, "fixed", measure)].text for measure in measures)]
                for c in SIX
                if c != BASELINE
            ]
            lines += table(head, rows)
        if name == "digits":
            lines += of_digits(read_cells(FOLDER / "evidence-digits.jsonl"), found)
    return lines


def texts() -> dict[Path, str]:
    """Return the pages."""
    page = results()
    count = len(page.found) + len(page.with_asp)
    lines = [
        "# When it pays",
        "",
        *textwrap.wrap(
            f"This page compares {len(CONTENDERS)} contenders in {len(PLACES)} simulated clusters, with "
            f"{len(BATCHES)} sizes of batches, on a problem whose expected loss is known exactly. A ratio is a "
            "contender's time to a loss of 0.1, divided by that of `bsp`, each with its own best settings. The three "
            "numbers in brackets count the comparisons in which the contender is better, the ties (the interval "
            "contains 1, or the difference is not significant), and the comparisons in which the contender is worse.",
            118,
        ),
        "",
        *textwrap.wrap(RESERVATION, 118),
        "",
        "What can be said with confidence:",
        "",
        *_bullets(findings(page)),
        "",
        "What cannot be said:",
        "",
        *_bullets(CANNOT),
        "",
        *textwrap.wrap(
            "To compare the models on your own cluster and script, run `paceline simulate your-cluster.toml --script "
            "your_script.py`. Instead of the description of a cluster, the command also accepts the directory of a "
            "recorded run.",
            118,
        ),
        "",
        "More pages: [on accelerators and slow links](when-it-pays-on-links.md), [on real",
        "problems](when-it-pays-on-problems.md), and [all times](when-it-pays-times.md).",
        "",
        *LET_THE_RUN_CHOOSE.splitlines(),
        "",
        METHOD.format(
            count=count,
            minutes=round(
                sum(QUADRATICS.estimate_s(p, c) for p in QUADRATICS.places for c in QUADRATICS.contenders)
                / 60
            ),
        ),
        "## All contenders",
        "",
        *textwrap.wrap(
            'Mean ranks over all clusters, sizes of batches and seeds (1 is the best, and "never" shares the last '
            "rank), and the numbers of comparisons with `bsp`: those in which the contender is better, ties, and "
            "those in which the contender is worse:",
            118,
        ),
        "",
        *overview(page),
    ]
    links = ["# When it pays: on accelerators and slow links", "", *on_accelerators(), *on_slow_links()]
    all_times = [
        "# When it pays: all times",
        "",
        "Times to a loss of 0.1, compared with `bsp`. [When it pays](when-it-pays.md) says how they were measured.",
        "",
        "![Ratios of all contenders, for three sizes of the batches](../pictures/when-it-pays.png)",
        "",
        *(line for batches in BATCHES for line in times(page, batches)),
    ]
    made = {TARGET: lines, TARGET_OF_LINKS: links, TARGET_OF_TIMES: all_times}
    if page.real:
        made[TARGET_OF_PROBLEMS] = on_real_problems(page)
    return {path: "\n".join(each).rstrip() + "\n" for path, each in made.items()}


def draw(page: Page) -> None:
    """Draw the ratios of all contenders at all places, for three sizes of the batches."""
    from paceline.look.timelines import new_figure, save

    names = [contender for contender in CONTENDERS if contender != BASELINE]
    figure = new_figure(16.0, 6.4)
    for axes, batches in zip(figure.subplots(1, 3, sharey=True), BATCHES, strict=False):
        grid = [[page.found[Key(place, c, batches, TIME)] for place in PLACES] for c in names]
        colors = [[_tint(comparison) for comparison in row] for row in grid]
        axes.imshow(colors, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
        for y, row in enumerate(grid):
            for x, comparison in enumerate(row):
                word = {"tie": "tie", "neither": "-"}.get(comparison.verdict, _number(comparison.ratio.ratio))
                axes.text(x, y, word, ha="center", va="center", fontsize=7)
        places = [place.removesuffix(" workers") for place in PLACES]
        axes.set_xticks(range(len(places)), places, rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(f"batches: {batches}", fontsize=10)
    save(figure, PICTURE)


def _tint(comparison: Comparison) -> float:
    """Return the logarithm of a ratio to the base 2, from -2 to 2; 0 for a tie."""
    if comparison.verdict in ("tie", "neither"):
        return 0.0
    return max(-2.0, min(2.0, math.log2(comparison.ratio.ratio))) if comparison.ratio.ratio else -2.0


def _bullets(items: Iterable[str]) -> list[str]:
    return [
        line
        for item in items
        for line in textwrap.wrap(
            f"- {item}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    ]


def main() -> int:
    """Write the pages or, with --check, only check them. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return any(path.read_text() != text for path, text in texts().items())
    for path, text in texts().items():
        path.write_text(text)
    draw(results())
    return 0


if __name__ == "__main__":
    sys.exit(main())
