"""Draw random sentences from the project's prose, for proofreading.

    python docs/draw_sentences.py --seed 1 --count 200

The sentences come from the documentation, docstrings, help texts, error messages and comments. A reader who does not
know the code marks those that are unclear or unnatural. Each sentence is printed with its file and line.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src/**/*.py", "examples/*.py", "benchmarks/**/*.py", "reproductions/*.py")
DOCUMENTS = ("*.md", "docs/**/*.md")

Passage = tuple[Path, int, str]
"""A file, the line at which a passage begins, and the text of the passage."""


def passages_of_code(path: Path) -> Iterator[Passage]:
    """Yield each string literal, including docstrings, and each block of comments in a Python file."""
    source = path.read_text()
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"{{{_source(part)}}}"
                for part in node.values
            )
            yield path, node.lineno, words
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield path, node.lineno, node.value
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#(!| type:| noqa| --)", token.string):
            first = first if block else token.start[0]
            block.append(token.string.lstrip("# "))
        elif block and token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield path, first, " ".join(block)
            block = []


def passages_of_document(path: Path) -> Iterator[Passage]:
    """Yield each paragraph, list item and table cell of a Markdown file, without code blocks."""
    text = re.sub(r"```.*?```", lambda match: "\n" * match.group().count("\n"), path.read_text(), flags=re.S)
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*[-*|\d]))", text):
        for cell in block.split("|"):
            if not block.startswith("    "):
                yield path, line, cell
        line += block.count("\n")


def sentences(passage: Passage) -> Iterator[tuple[str, str]]:
    """Yield each sentence of a passage that has at least five words, as (place, sentence)."""
    path, line, text = passage
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:\w+: |- |>>> ))", text):
        if ">>>" in paragraph or re.match(r"\n? {8}.*\n {8}", paragraph):
            continue  # code in a docstring
        prose = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.:;?!])\s+(?=[A-Z`\"'(\[])", prose):
            if len(sentence.split()) >= 5 and re.search(r"[a-z]{3} ", sentence):
                yield f"{path.relative_to(ROOT)}:{line}", sentence.strip("# -*")


def _source(part: ast.expr) -> str:
    return ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    passages = [
        p for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) for p in passages_of_code(path)
    ]
    passages += [
        p for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern)) for p in passages_of_document(path)
    ]
    found = sorted({sentence: place for p in passages for place, sentence in sentences(p)}.items())
    for number, (sentence, place) in enumerate(random.Random(options.seed).sample(found, options.count), 1):
        print(f"{number}. [{place}] {sentence}")


if __name__ == "__main__":
    main()
