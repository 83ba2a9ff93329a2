"""Write `docs/internals/papers*.md`, what the papers report and what our results say: `python docs/make_papers.py`.

The numbers come from `reproductions/papers.toml`, the results from `reproductions/results`, and the verdicts follow
from both. With --check, nothing is written, and the exit code is 0 if the page is up to date, 1 otherwise.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `reproductions` is not installed

from reproductions.catalogue import coverage  # noqa: E402
from reproductions.comparing import AT_BEST  # noqa: E402
from reproductions.papers import PAPERS, Paper, Quote  # noqa: E402
from reproductions.verdicts import RUNS, Judged, judged, with_unit  # noqa: E402

TARGET = ROOT / "docs" / "internals" / "papers.md"

HEAD = """\
# What the papers claim

Paceline implements the systems of three papers. For each number that the papers print as a result, these pages say
whether our number agrees, by the rules of `reproductions/verdicts.py`:

- *agrees*: our interval contains a value that the paper would print as its number ("about": a value within 10 % of the
  number). If the number is an effect, the whole interval must show an effect. If the paper reports no effect ("about
  1"), the whole interval must lie within 10 % of the number; if only a part does, we cannot tell. With "up to", "over",
  "above" and "at least", a larger number agrees, too; with "below" and "at most", a smaller number.
- *agrees in direction*: the whole interval shows an effect of the same sign, but of another size.
- *contradicts*: the whole interval shows no effect, an effect of less than a tenth of the paper's, or an effect of
  the opposite sign. A number that is not an effect, such as a count, is contradicted by any other number.
- *cannot tell*: the interval includes both an effect and no effect, so more seeds would be needed; or the number
  depends on the paper's machines and data, which are replaced by other machines and data here.
- *not reproduced*: no result in `reproductions/results` measures the number.

Where training is involved, a small network, small data and virtual time stand in for the paper's network, data and
machines, and the same number is given in two ways: with all models at the same learning rate, as in the papers, and
with each model at its own best learning rate, as a user who tunes the models would see it. Brackets contain 95 %
intervals over seeds. Where the paper draws the input of ZipLine at random, the brackets contain the interval in which
the results for nine tenths of our inputs lie. In an interval, "..." is an open end, because some runs did not reach
the target. A number without brackets has no interval: it is a count, one simulation without training, or a time on
the machine that is named in the result. Where the paper only says "faster" or "similar", the number is "above 1" or
"about 1".

    python -m reproductions --list       # every number with its verdict
    python -m reproductions NAME...      # reproduce an exhibit (a table or a figure): its text, numbers and picture
    python -m reproductions NAME --again # reproduce it at one learning rate, and compare it with the kept result
    pytest FILE                          # the tests of an algorithm or theorem
"""


class Headline(NamedTuple):
    """A result for which a paper is cited.

    Attributes:
        prefix: the paper.
        key: the number.
        why: verdict -> the reason for it, as far as it is known. A verdict without a reason fails the generation of
            the page, so that no reason outlives its verdict.
    """

    prefix: str
    key: str
    why: dict[str, str]


NOT_YET = "There is no kept result yet."
BY_SEED = "The runs differ more by seed than by model."
CHAOS = (
    "The runs differ more by seed than by model. At twice the learning rate, it depends on the seed whether a run "
    "with 40 workers converges; at four times this rate, no run converges."
)
FRESHER = "Restarted computations use fresher weights, which saves more time than the restarts cost."
NO_FRESHER = "Restarts cost nearly as much time as fresher weights save, or more."
FEWER_ITERATIONS = "Restarted computations use fresher weights."
UNREACHED = "Too few runs reach the target."
SLICES = (
    "Nearly all of the effect comes from slices of equal size. The costs of PS-Lite's scheduler and of its work for "
    "each message, which the paper's baseline pays as well, are not simulated."
)
SLOW_MACHINE = "Fast machines wait less for the slow one. How slow this machine is, and when, is our choice."
FEWER_UPDATES = "BSP makes fewer updates in the same number of epochs."
STALEST = "ASP's gradients are the stalest."

SPEC_SYNC = {
    "agrees": FRESHER,
    "agrees in direction": FRESHER,
    "cannot tell": BY_SEED,
    "contradicts": NO_FRESHER,
}

HEADLINES = (
    Headline(
        "elasticbsp",
        "faster-than-bsp",
        {
            "agrees": SLOW_MACHINE,
            "agrees in direction": SLOW_MACHINE,
            "cannot tell": BY_SEED,
            "contradicts": "At the common rate, stale gradients cost nearly as much as less waiting saves, or more.",
        },
    ),
    Headline(
        "elasticbsp",
        "more-accurate-than-bsp",
        {
            "agrees": FEWER_UPDATES,
            "agrees in direction": FEWER_UPDATES,
            "cannot tell": BY_SEED,
            "contradicts": "BSP makes fewer updates, but enough for the small network.",
        },
    ),
    Headline(
        "elasticbsp",
        "fig7-candidates",
        {"agrees": "In the authors' data, ZipLine evaluates the same sets and finds the same d_Z."},
    ),
    Headline(
        "elasticbsp",
        "table1: zipline-opt-bs, n",
        {
            "agrees": "The measured exponent contains the logarithm: n log n has the exponent 1.2 (50 to 400 workers).",
            "contradicts": "The measured exponent is larger even than that of n log n from 50 to 400 workers, 1.2.",
        },
    ),
    Headline("specsync", "faster-mf", SPEC_SYNC),
    Headline("specsync", "faster-cifar10", {**SPEC_SYNC, "cannot tell": CHAOS}),
    Headline("specsync", "faster-imagenet", SPEC_SYNC),
    Headline(
        "specsync",
        "fewer-iterations",
        {
            "agrees": FEWER_ITERATIONS,
            "agrees in direction": FEWER_ITERATIONS,
            "cannot tell": CHAOS,
            "contradicts": "Fresher weights save few iterations here, or none.",
        },
    ),
    Headline(
        "specsync",
        "fig12-rate",
        {"contradicts": "A restarted computation pulls again, and each pull carries all weights."},
    ),
    Headline("fluentps", "faster-than-ps-lite", {"agrees in direction": SLICES}),
    Headline("fluentps", "overlap-and-eps-save", {"agrees in direction": SLICES}),
    Headline(
        "fluentps",
        "more-delayed-pulls",
        {
            "contradicts": (
                "After a lazy wait, a worker is level with the slowest worker. How soon it is ahead again depends "
                "on how the machines differ, which the paper does not say."
            )
        },
    ),
    Headline(
        "fluentps",
        "lazy-faster",
        {
            "contradicts": (
                "With both kinds of execution, workers at their bound under SSP are as slow as the slowest worker. "
                "The cost of a delayed pull for the server is not simulated."
            )
        },
    ),
    Headline(
        "fluentps",
        "fewer-delayed-pulls-soft",
        {
            "agrees in direction": (
                "A fast worker waits at its bound at each step under SSP, and in a tenth of the steps under PSSP. The "
                "number of pulls that this saves depends on how the machines differ: with random pauses or jitter, "
                "PSSP delays more pulls than SSP."
            ),
        },
    ),
    Headline(
        "fluentps",
        "pssp-faster",
        {
            "agrees in direction": (
                "At its bound, a fast worker waits in each step under SSP, and in half of them under PSSP. The time "
                "is the mean over the workers, as in Table IV: the slowest workers take the same time under both "
                "models."
            )
        },
    ),
    Headline(
        "fluentps",
        "pssp-more-accurate",
        {
            "agrees": STALEST,
            "agrees in direction": STALEST,
            "cannot tell": BY_SEED,
            "contradicts": "With updates scaled by 1/n, staler gradients cost no accuracy here.",
        },
    ),
)
"""The numbers of the abstracts and conclusions, and others, with a reason for each verdict that may come out."""


def texts() -> dict[Path, str]:
    """Return the pages: the headlines, and a page for each paper."""
    pages = {prefix: TARGET.with_name(f"papers-{prefix}.md") for prefix in PAPERS}
    others = [f"- [{PAPERS[prefix]}]({page.name}): all numbers" for prefix, page in pages.items()]
    made = {TARGET: [HEAD, *headlines(), *others]} | {
        page: [*section(prefix)] for prefix, page in pages.items()
    }
    return {path: "\n".join(lines).rstrip() + "\n" for path, lines in made.items()}


def headlines() -> Iterator[str]:
    """Yield the lines of the table of headlines."""
    rows = {(prefix, row.key): row for prefix in PAPERS for row in judged(prefix)}
    yield "## The headlines"
    yield ""
    yield "The table has the numbers in the papers' abstracts and conclusions, and seven other numbers."
    yield ""
    yield from table(
        ("paper", "claim", "paper", "ours", "ours, own rates", "verdict", "why"),
        (_headline(each, rows[each.prefix, each.key]) for each in HEADLINES),
    )


def _headline(each: Headline, row: Judged) -> Sequence[str]:
    word = row.verdict.word
    if word not in each.why and row.ours is not None:
        raise SystemExit(
            f"{each.key}: the verdict is now {word!r}, for which no reason is given in docs/make_papers.py."
        )
    why = UNREACHED if row.verdict.reason == RUNS else each.why.get(word, NOT_YET)
    best = next((other for other in row.others if other.how == AT_BEST), None)
    return (
        str(PAPERS[each.prefix]),
        row.quote.means,
        f"{row.quote} {unit(row.quote)}".strip(),
        with_unit(row.ours, row.quote),
        with_unit(best, row.quote),
        f"{row.verdict} ({linked(row.exhibit)})" if row.exhibit else str(row.verdict),
        why,
    )


def section(prefix: str) -> Iterator[str]:
    """Yield the lines of the page on a paper."""
    paper = PAPERS[prefix]
    rows = judged(prefix)
    numbers = [row for row in rows if row.key in paper.numbers]
    yield f"# {paper}"
    yield ""
    yield textwrap.fill(f"{', '.join(paper.authors)}: *{paper.title}*. {paper.published}.", 118)
    yield ""
    counts = Counter(row.verdict.word for row in rows)
    yield f"{len(rows)} results: {', '.join(f'{count} {word}' for word, count in counts.most_common())}."
    yield ""
    yield from table(
        ("reported", "unit", "what it measures", "where", "ours", "verdict", "exhibit"),
        (
            (
                str(row.quote),
                unit(row.quote),
                row.quote.means,
                row.quote.where,
                measured(row),
                str(row.verdict),
                linked(row.exhibit) if row.exhibit else "",
            )
            for row in numbers
        ),
    )
    yield from tables(paper, rows)
    if settings := [quote for quote in paper.numbers.values() if quote.setting]:
        yield (
            "Settings and examples of the paper: "
            + "; ".join(f"{each.means}, {each} {unit(each)}".strip() for each in settings)
            + "."
        )
        yield ""
    yield from table(
        ("table or figure", "shows", "state", "name"),
        (
            (
                row.item.removeprefix(f"{paper.name}, "),
                row.shows,
                row.state,
                ", ".join(linked(exhibit.name) for exhibit in row.exhibits),
            )
            for row in coverage()
            if row.item.startswith(f"{paper.name}, ")
        ),
    )
    yield from table(
        ("algorithm or theorem", "says", "found", "tests"),
        (
            (name, each.says, each.found, f"[`{each.tests}`](../../{each.tests})")
            for name, each in paper.statements.items()
        ),
    )


def measured(row: Judged) -> str:
    """Return our measurements of a number: that which the verdict is about, and the others with their conditions."""
    others = (f"{each.how}: {with_unit(each, row.quote)}" for each in row.others if each != row.ours)
    return "; ".join([with_unit(row.ours, row.quote), *others])


def tables(paper: Paper, rows: Sequence[Judged]) -> Iterator[str]:
    """Yield how many numbers of each table of the paper have which verdict."""
    lines = []
    for name, each in paper.tables.items():
        own = [row for row in rows if row.key.startswith(f"{name}: ")]
        if not own:
            continue
        counts = Counter(str(row.verdict) for row in own)
        exhibits = dict.fromkeys(linked(row.exhibit) for row in own if row.exhibit)
        relative = f", relative to {each.relative_to}" if each.relative_to else ""
        verdicts = "; ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        lines.append((each.where, each.means + relative, str(len(own)), verdicts, ", ".join(exhibits)))
    if lines:
        yield from table(("table", "numbers", "count", "verdicts", "exhibit"), lines)


def linked(name: str) -> str:
    """Return the name of an exhibit, with a link to the kept result of a full run if there is one."""
    kept = f"reproductions/results/{name}.txt"
    return f"[`{name}`](../../{kept})" if (ROOT / kept).exists() else f"`{name}`"


def unit(quote: Quote) -> str:
    """Return the unit, unless it is already part of the text of the quote."""
    return {"%": "", "x": "times"}.get(quote.unit, quote.unit)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table and an empty line."""
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def main() -> int:
    """Write the pages or, with --check, only check them. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return any(not path.exists() or path.read_text() != text for path, text in texts().items())
    for path, text in texts().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
