"""The numbers quoted from the papers: they come from one file, and what is shown elsewhere agrees with it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reproductions import papers
from reproductions.catalogue import EXHIBITS, coverage
from reproductions.papers import ELASTIC_BSP, FLUENT_PS, PAPERS, SPEC_SYNC, Paper, Quote, QuotedTable


def quotes_of(paper: Paper) -> list[Quote]:
    """Return all numbers that are quoted from a paper, those in tables included."""
    places = (
        (table, row, column)
        for table in paper.tables.values()
        for row in table.rows
        for column in table.columns
    )
    return [*paper.numbers.values(), *(table.cell(row, column) for table, row, column in places)]


ROOT = Path(papers.__file__).parents[1]
QUOTES = [quote for paper in PAPERS.values() for quote in quotes_of(paper)]
SOURCES = sorted(
    path
    for pattern in ("reproductions/*.py", "benchmarks/zipline.py", "benchmarks/overlap/[bm]*.py")
    for path in ROOT.glob(pattern)
    if path.name != "papers.py"
)


TEXTS = ROOT.parent / "shared" / "papers"
needs_papers = pytest.mark.skipif(not TEXTS.is_dir(), reason=f"the text of the papers is not there: {TEXTS}")


@needs_papers
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("elasticbsp", "elasticbsp-zipline-journal-2021.txt"),
        ("specsync", "specsync-icdcs-2018.txt"),
        ("fluentps", "fluentps-cluster-2019.txt"),
    ],
)
def test_every_quoted_number_is_printed_in_its_paper(name: str, file: str) -> None:
    text = (TEXTS / file).read_text().replace(",", "")
    printed = {float(number.replace(" ", "")) for number in re.findall(r"\d+(?:\.\d+)?(?:e ?\d+)?", text)}
    assert [quote for quote in quotes_of(PAPERS[name]) if quote.value not in printed] == []
    for author in PAPERS[name].authors:
        assert re.search(rf"\b{author}(?![a-z])", text[:2000])


@pytest.mark.parametrize("name", PAPERS)
def test_every_statement_names_a_file_with_its_tests(name: str) -> None:
    for number, statement in PAPERS[name].statements.items():
        text = (ROOT / statement.tests).read_text().lower().replace("_", " ")
        for each in number.lower().replace("lemmas 1 and 2", "lemma 1, lemma 2").split(", "):
            assert each in text, number


@pytest.mark.parametrize("name", PAPERS)
def test_every_algorithm_and_theorem_of_the_papers_is_listed(name: str) -> None:
    listed = {
        "elasticbsp": "Algorithm 1, Algorithm 2, Theorem 1, Corollary 1, Theorem 2, Lemmas 1 and 2, Theorem 3, "
        "Section 3",
        "specsync": "Algorithm 1, Algorithm 2",
        "fluentps": "Algorithm 1, Proposition 1, Theorem 1, Theorem 2",
    }
    assert ", ".join(PAPERS[name].statements) == listed[name]


def roman(count: int) -> list[str]:
    return ["I", "II", "III", "IV"][:count]


@pytest.mark.parametrize(
    ("name", "tables", "figures"),
    [
        ("elasticbsp", ["1", "2", "3", "4"], 15),
        ("specsync", roman(2), 13),
        ("fluentps", roman(4), 11),
    ],
)
def test_every_table_and_figure_of_the_papers_is_listed(name: str, tables: list[str], figures: int) -> None:
    listed = PAPERS[name].exhibits
    numbers = list(dict.fromkeys(re.sub(r"(?<=\d)[abc]$|,.*", "", item) for item in listed))
    assert numbers == [
        *(f"Table {number}" for number in tables),
        *(f"Fig. {number}" for number in range(1, figures + 1)),
    ]


def test_every_listed_table_or_figure_has_one_state_and_every_exhibit_reproduces_a_listed_one() -> None:
    rows = {row.item: row for row in coverage()}
    for exhibit in EXHIBITS.values():
        assert set(exhibit.covers) <= rows.keys(), exhibit.name
    for paper in PAPERS.values():
        for number, listed in paper.exhibits.items():
            row = rows[f"{paper.name}, {number}"]
            assert not (row.exhibits and listed.only_quoted), row.item
    assert rows["ElasticBSP, Fig. 6"].state == "reproduced"
    assert rows["FluentPS, Fig. 9"].state == "reproduced on a stand-in"
    assert rows["SpecSync, Fig. 1"].state == "quoted only: a diagram without measurements"


def test_the_authors_are_those_of_the_papers() -> None:
    assert SPEC_SYNC.authors == ("Zhang", "Tian", "Wang", "Yan")
    assert FLUENT_PS.authors == ("Yao", "Wu", "Wang")
    assert ELASTIC_BSP.authors == ("Zhao", "Papagelis", "An", "Chen", "Liu", "Hu")


def test_numbers_are_written_with_their_bound_and_percent_sign() -> None:
    written = [str(SPEC_SYNC.numbers[f"faster-{name}"]) for name in ("mf", "cifar10", "imagenet")]
    assert written == ["up to 2.97", "up to 2.25", "up to 3"]
    assert str(ELASTIC_BSP.numbers["fig7-candidates"]) == "13,795"
    assert str(FLUENT_PS.numbers["overlap-and-eps-save"]) == "up to 93.7 %"
    assert str(FLUENT_PS.tables["table4-delayed"].cell("ResNet-56 on CIFAR-10", "soft P=1")) == "15,160"


def test_the_headline_of_fluent_ps_follows_from_its_table() -> None:
    """The abstract's factor is that between SSP with the soft barrier and with lazy execution."""
    delayed = FLUENT_PS.tables["table4-delayed"]
    soft, lazy = (delayed.cell("ResNet-56 on CIFAR-10", f"{kind} P=1").value for kind in ("soft", "lazy"))
    assert int(soft / lazy) == FLUENT_PS.numbers["more-delayed-pulls"].value


def test_the_speed_of_pssp_follows_from_the_table() -> None:
    """It is the ratio of the average times of Table IV, so ours is that of the mean times of the workers."""
    times = FLUENT_PS.tables["table4-time"]
    ssp, pssp = (times.cell("AlexNet on CIFAR-10", f"soft P={p}").value for p in (1, 0.5))
    assert round(ssp / pssp, 2) == FLUENT_PS.numbers["pssp-faster"].value


def test_the_bytes_that_spec_sync_saves_follow_from_the_totals() -> None:
    original, adaptive, saved = (
        SPEC_SYNC.numbers[f"bytes-{name}"] for name in ("original", "adaptive", "saved")
    )
    least, most = saved.range
    assert least <= 100 * (1 - adaptive.value / original.value) <= most


def test_the_pairs_of_figure_9_have_the_same_regret_bound() -> None:
    for inverse, s in FLUENT_PS.tables["fig9-models"].rows.values():
        assert 3 + inverse - 1 == s


def test_a_table_with_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="row 'b' has 1 values for 2 columns"):
        QuotedTable(where="Table 9", means="", columns=("x", "y"), rows={"a": (1, 2), "b": (1,)})


# -- no literals ---------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e\d+)?(\s?%)?")


def significant(value: float) -> int:
    """Return the number of significant digits.

    >>> [significant(value) for value in (1.77, 13795.0, 400.0, 0.5)]
    [3, 5, 1, 1]
    """
    return len(f"{value:.10e}".partition("e")[0].replace(".", "").rstrip("0"))


TELLING = {quote.value for quote in QUOTES if significant(quote.value) >= 3}
TELLING |= {
    round(quote.value * 100, 6) for quote in QUOTES if quote.value < 1 and significant(quote.value) >= 3
}
PERCENTAGES = {quote.value for quote in QUOTES if quote.unit == "%"} - {100.0}
"""Numbers that can hardly be anything but quotes: those with three significant digits, and percentages."""


def literals(source: str) -> Iterator[tuple[int, float, bool]]:
    """Yield the numbers of a module, those in its strings included: line, value, whether it is a percentage."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str):
            for found in NUMBER.finditer(node.value):
                number = found.group().rstrip("% ").replace(",", "")
                yield node.lineno, float(number), found.group(1) is not None
        elif isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node.lineno, float(node.value), False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_exhibit_has_a_quoted_number_of_its_own(path: Path) -> None:
    own = [
        (line, value)
        for line, value, percent in literals(path.read_text())
        if value in TELLING or (percent and value in PERCENTAGES)
    ]
    assert own == [], "take these numbers from reproductions/papers.toml"


def test_literals_are_found_in_numbers_and_in_text() -> None:
    found = {value for _, value, _ in literals('"""13,795 sets."""\nx = 1.77\ny = f"up to 97.1 % {x}"\n')}
    assert found == {13795.0, 1.77, 97.1}


# -- results and documentation -------------------------------------------------------------------------------------


def paper_cells(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return the cells in columns that are headed "paper", without those that are empty."""
    places = [index for index, heading in enumerate(columns) if heading.split()[-1:] == ["paper"]]
    return [row[index] for row in rows for index in places if row[index] != "-"]


WRITTEN = {str(quote) for quote in QUOTES}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "reproductions" / "results").glob("*.json")), ids=lambda p: p.name
)
def test_a_kept_result_is_complete_and_its_quoted_numbers_are_those_of_the_file(path: Path) -> None:
    kept = json.loads(path.read_text())
    for table in kept["tables"]:
        assert set(paper_cells(table["columns"], table["rows"])) <= WRITTEN
    assert kept["command"].endswith(f"python -m reproductions {path.stem}")  # a full run
    assert f"{kept['seconds']} s on {kept['machine']}" in path.with_suffix(".txt").read_text()
    assert path.with_suffix(".png").exists()


E, S, F = ELASTIC_BSP.numbers, SPEC_SYNC.numbers, FLUENT_PS.numbers
HOURS = SPEC_SYNC.tables["table2"]
SENTENCES: list[tuple[str, str]] = [
    (
        "docs/start/demo.md",
        f"The ElasticBSP paper reports a factor of {E['faster-than-bsp']} for VGG-16 on ImageNet",
    ),
    ("docs/start/demo.md", f"above or below the paper's {E['faster-than-bsp']}."),
    (
        "docs/start/demo.md",
        f"According to Table II of the paper, this search took {HOURS.cell('MF', 'hours in total')} to more than "
        f"{HOURS.cell('ImageNet', 'hours in total')} hours.",
    ),
    ("docs/internals/performance.md", f"FluentPS reports a saving of {F['overlap-saves']}, but"),
    ("docs/internals/performance.md", f"| 2.6 % | {F['overlap-saves']} |"),
    ("docs/internals/performance.md", f"| 74.1 % | {F['overlap-and-eps-save']} |"),
    (
        "src/paceline/sim/presets/fluent-ps-32.toml",
        f"{FLUENT_PS.tables['table4-time'].cell('ResNet-56 on CIFAR-10', 'soft P=0')} s per 100 iterations",
    ),
    (
        "src/paceline/sim/presets/fluent-ps-64.toml",
        f"{FLUENT_PS.tables['table4-time'].cell('AlexNet on CIFAR-10', 'soft P=0')} s per 100 iterations",
    ),
    (
        "src/paceline/sim/presets/spec-sync-1.toml",
        f"takes {SPEC_SYNC.tables['table1-iteration'].cell('CIFAR-10', 'iteration time')} s per iteration",
    ),
    (
        "src/paceline/zipline/searches.py",
        f"a success rate of {ELASTIC_BSP.tables['table3-success'].cell('full-grid-scan', 'success rate')} for",
    ),
]


@pytest.mark.parametrize(("name", "sentence"), SENTENCES)
def test_a_sentence_of_the_documentation_quotes_the_file(name: str, sentence: str) -> None:
    words = " ".join((ROOT / name).read_text().replace("\n#", "\n").split())
    assert sentence in words


def test_every_quote_says_where_it_is_printed_and_what_it_measures() -> None:
    assert all(isinstance(quote, Quote) for quote in QUOTES)
    for quote in QUOTES:
        assert re.search(r"Table|Fig\.|section|abstract", quote.where), quote
        assert quote.means
