"""Write `docs/papers.md`, what the papers report and what our results say about it: `python docs/make_papers.py`.

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
from reproductions.verdicts import Judged, judged  # noqa: E402

TARGET = ROOT / "docs" / "papers.md"

HEAD = """\
# What the papers claim

Paceline implements the systems of three papers. This page says for each result that the papers print whether ours
agree with it. A verdict follows from the paper's number and from the interval of ours, by the rules of
`reproductions/verdicts.py`:

- *agrees*: the interval of ours holds the paper's number, as precisely as the paper prints it. With "up to" and
  "over", a larger effect agrees, too.
- *agrees in direction*: the whole interval shows an effect of the same sign, but of another size.
- *contradicts*: the whole interval shows no effect, less than a tenth of the paper's, or one of the other sign.
- *cannot tell*: the interval holds both an effect and none, which more seeds would tell; or the number depends on the
  paper's machines and data, for which others stand in.
- *not reproduced*: no exhibit measures it.

Where training is involved, a small network on small images in virtual time stands in for the paper's network, data and
machines, and the same number is given in two ways: with all models at the same learning rate, as in the papers, and
with each model at its own best one, as somebody who tunes them would see it. Brackets hold 95 % intervals over seeds;
"..." is an open end, because runs did not reach the target. A number without brackets has no interval: it is a count,
one simulation without training, or a time on the machine that is named in the result.

    python -m reproductions --list       # every number with its verdict
    python -m reproductions NAME...      # make an exhibit: its text, numbers and picture
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


NOT_YET = "There is no kept result with an interval yet."
CHAOS = (
    "Where runs with 40 workers converge, the models differ by less than the interval. From twice this rate, it "
    "depends on the seed whether a run converges at all, so that one run of each model may show any ratio."
)
LARGE = "One rate for all models decides it. At its own best rate, each model is about as fast as the other."

SPEC_SYNC = {"cannot tell": CHAOS, "agrees in direction": LARGE, "contradicts": LARGE}

HEADLINES = (
    Headline(
        "elasticbsp",
        "fig7-candidates",
        {"agrees": "In the authors' data, ZipLine evaluates the same sets and finds the same barrier."},
    ),
    Headline(
        "elasticbsp",
        "faster-than-bsp",
        {
            "agrees": "Stale gradients of a few workers cost less than the waiting at a barrier.",
            "agrees in direction": "The saving is that of the waiting time of the simulated slow machine.",
            "cannot tell": "At the common rate, the runs under both models reach the target at about the same time.",
            "contradicts": "At the common rate, stale gradients cost as much as the saved waiting gains.",
        },
    ),
    Headline(
        "elasticbsp",
        "more-accurate-than-bsp",
        {
            "agrees in direction": "BSP makes fewer updates in the same number of epochs.",
            "cannot tell": "After all epochs, both models have learned what the small network can learn.",
            "contradicts": "After all epochs, both models have learned what the small network can learn.",
        },
    ),
    Headline(
        "specsync", "faster-mf", {"cannot tell": CHAOS, "agrees in direction": LARGE, "contradicts": LARGE}
    ),
    Headline(
        "specsync",
        "faster-cifar10",
        {"cannot tell": CHAOS, "agrees in direction": LARGE, "contradicts": LARGE},
    ),
    Headline(
        "specsync",
        "fewer-iterations",
        {"cannot tell": CHAOS, "agrees in direction": LARGE, "contradicts": LARGE},
    ),
    Headline(
        "specsync",
        "fig12-rate",
        {"contradicts": "A restarted computation pulls again, and each pull carries all weights."},
    ),
    Headline(
        "fluentps",
        "overlap-and-eps-save",
        {
            "agrees in direction": (
                "Nearly all of it comes from slices of equal size. The costs of PS-Lite's scheduler and of its work "
                "for each message, which the paper's baseline pays as well, are not simulated."
            )
        },
    ),
    Headline(
        "fluentps",
        "fewer-delayed-pulls-soft",
        {
            "agrees": "A fast worker waits at its bound at each step under SSP, in a tenth of the steps under PSSP.",
            "agrees in direction": (
                "A fast worker waits at its bound at each step under SSP, and in a tenth of the steps under PSSP. How "
                "many pulls this saves depends on how the machines differ: with random pauses or jitter, PSSP delays "
                "more."
            ),
        },
    ),
    Headline(
        "fluentps",
        "pssp-more-accurate",
        {
            "agrees in direction": "ASP's gradients are the stalest.",
            "cannot tell": "With updates scaled by 1/n, all models learn about the same here.",
            "contradicts": "With updates scaled by 1/n, all models learn about the same here.",
        },
    ),
)
"""The ten headlines, with a reason for each verdict that the results may lead to."""


def text() -> str:
    """Return the page."""
    return "\n".join([HEAD, *headlines(), *(line for prefix in PAPERS for line in section(prefix))])


def headlines() -> Iterator[str]:
    """Yield the lines of the table of headlines."""
    rows = {(prefix, row.key): row for prefix in PAPERS for row in judged(prefix)}
    yield "## The headlines"
    yield ""
    yield from table(
        ("paper", "claim", "paper", "ours", "ours, own rates", "verdict", "why"),
        (_headline(each, rows[each.prefix, each.key]) for each in HEADLINES),
    )


def _headline(each: Headline, row: Judged) -> Sequence[str]:
    word = row.verdict.word
    paper = f"{row.quote} {unit(row.quote)}".strip()
    if word == "not reproduced":
        return (
            str(PAPERS[each.prefix]),
            row.quote.means,
            f"{row.quote} {unit(row.quote)}".strip(),
            "-",
            "-",
            word,
            NOT_YET,
        )
    if word not in each.why:
        raise SystemExit(
            f"{each.key}: the verdict is now {word!r}, for which no reason is given in docs/make_papers.py."
        )
    others = next((str(other) for other in row.others if other.how == AT_BEST), "-")
    ours = "-" if row.ours is None else f"{row.ours}"
    return (
        str(PAPERS[each.prefix]),
        row.quote.means,
        paper,
        ours,
        others,
        f"{word} ({linked(row.exhibit)})" if row.exhibit else word,
        each.why[word],
    )


def section(prefix: str) -> Iterator[str]:
    """Yield the lines of the section on a paper."""
    paper = PAPERS[prefix]
    rows = judged(prefix)
    numbers = [row for row in rows if row.key in paper.numbers]
    yield f"## {paper}"
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
            "Settings that the paper states: " + "; ".join(f"{each.means}, {each}" for each in settings) + "."
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


def measured(row: Judged) -> str:
    """Return our measurements of a number: that which the verdict is about, and the others with their conditions."""
    if row.ours is None:
        return "-"
    others = (f"{each.how}: {each}" for each in row.others)
    return "; ".join([str(row.ours), *others])


def tables(paper: Paper, rows: Sequence[Judged]) -> Iterator[str]:
    """Yield how many numbers of each table of the paper have which verdict."""
    lines = []
    for name, each in paper.tables.items():
        own = [row for row in rows if row.key.startswith(f"{name}: ")]
        if not own:
            continue
        counts = Counter(row.verdict.word for row in own)
        exhibits = dict.fromkeys(linked(row.exhibit) for row in own if row.exhibit)
        relative = f", relative to {each.relative_to}" if each.relative_to else ""
        verdicts = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        lines.append((each.where, each.means + relative, str(len(own)), verdicts, ", ".join(exhibits)))
    if lines:
        yield from table(("table", "numbers", "count", "verdicts", "exhibit"), lines)


def linked(name: str) -> str:
    """Return the name of an exhibit, with a link to the kept result of a full run if there is one."""
    kept = f"reproductions/results/{name}.txt"
    return f"[`{name}`](../{kept})" if (ROOT / kept).exists() else f"`{name}`"


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
    """Write the page or, with --check, only check it. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return TARGET.read_text() != text()
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
