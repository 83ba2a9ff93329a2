"""Write `docs/reference/codecs.md` from the results of the training runs: `python docs/make_codecs.py`.

    python -m reproductions wire
    python docs/make_codecs.py

The results are in `reproductions/results/wire.jsonl`. With --check, nothing is written, and the exit code is 0 if the
page matches the results, 1 otherwise. Every number of the results is computed from them, and the page says which of
them are missing.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # `reproductions` is not installed

from docs.make_same_accuracy import bullets, markdown  # noqa: E402
from reproductions.kept_runs import KeptRun, KeptRuns  # noqa: E402
from reproductions.result_file import read_results  # noqa: E402
from reproductions.wire import (  # noqa: E402
    ALL,
    ASP,
    OPTIMIZERS,
    PROBLEMS,
    Run,
    cells,
    found,
    missing,
    result_tables,
)

RESULTS = ROOT / "reproductions" / "results" / "wire.jsonl"
TARGET = ROOT / "docs" / "reference" / "codecs.md"
SEEDS = {"digits-mlp": 6, "digits-cnn": 6, "text-gpt": 8}

QUESTION = (
    "What do the codecs of [`--wire`](../how-to/slow-links.md) cost in the quality of the result? Each run is "
    "compared with a float32 run that has the same seed, the same batches in the same order, and the same "
    "hyper-parameters. A *cell* is a combination of a problem, an optimizer, a set of workers, and a codec. The goal "
    "is met if the accuracy is lower by at most 0.5 points. For `text-gpt`, whose result is a loss, the goal is met if "
    "the loss is higher by at most 1 %."
)

METHOD = (
    "*Problems.* `digits-mlp`: 64-64-10 network on scikit-learn's digits; `digits-cnn`: two convolutions with "
    "BatchNorm on the same images. A joint batch has 128 images. The networks are trained on 600 images, and the "
    "accuracy is measured on the other 1,197: with more images for training, nearly all runs get the same few images "
    "wrong, regardless of the codec. `text-gpt`: a transformer with one layer and about 60,000 parameters on the bytes "
    "of Python's standard library. A joint batch has 16 sequences of 64 bytes. The loss is measured on 8,192 later "
    "bytes, which are not used for training.",
    "*Optimizers.* `sgd`: momentum 0.9. `adamw`: betas 0.9 and 0.95, weight decay 0.1. `muon`: Muon for the four "
    "matrices inside `text-gpt`, and the same AdamW for the rest, tested only with four workers and three codecs. The "
    "learning rates are near the best ones of a single process with float32 and other seeds. They fall to 0 over the "
    "200 joint steps of a run, or over the 5,000 joint steps of the longest runs.",
    "*Workers.* All workers share the joint batch. The sync model is `bsp` unless another one is named. *Balanced*: "
    "one of four workers is three times slower, and has a third of the samples of each other worker. *Replaced*: "
    "one of four workers is lost in the middle of the run, and another worker joins ten steps later. Runs under `asp` "
    "are compared with runs under `asp` with float32.",
    "*Runs.* All runs are in virtual time, with `paceline.simulate(wire=...)`. Values are rounded as in a live run "
    "between machines. *int4 without feedback* is not a codec of `--wire`: it does not add the rounding error of a "
    "gradient to the next gradient.",
    "*Result.* The result of a run is the mean of the last five of 50 evaluations, with the weights of the servers. "
    "A table shows the mean loss of quality over the seeds and its standard error; a number below 0 is better than "
    "float32. *Open*: the goal is within two standard errors of the mean.",
)

LIMITS = (
    "There are no results for larger networks or longer runs, apart from the 5,000 steps of the smallest network.",
    "There are no results for constant learning rates. With rates that fall to 0, the last steps average over the "
    "noise that rounding adds.",
    "The results show little of the benefit of feedback, because most of these problems are learned as well without "
    "feedback.",
    "Cells that differ only in their codecs share their float32 runs, so their errors are not independent.",
)


def everything() -> dict[Run, tuple[float, float, str]]:
    """Return what each cell has lost."""
    return {
        run: lost
        for problem, seeds in SEEDS.items()
        for run, lost in found(cells([problem]), seeds, RESULTS).items()
    }


def findings(results: dict[Run, tuple[float, float, str]]) -> list[str]:
    """Return for each codec how many cells meet the goal, which do not, and where most is lost."""
    lines = []
    for codec in (*ALL, ASP):
        own = {cell: lost for cell, lost in results.items() if cell.codec == codec}
        count = Counter(verdict for *_, verdict in own.values())
        most = [
            named(max(of_kind, key=lambda cell: own[cell][0]), results)
            for relative in (False, True)
            if (of_kind := [cell for cell in own if PROBLEMS[cell.problem].relative == relative])
        ]
        others = [
            f"{named(cell, results)}, {verdict}" for cell, (*_, verdict) in own.items() if verdict != "met"
        ]
        kind = f"`{codec}` under `asp`" if codec == ASP else f"`{codec}`"
        but = f" Not met: {'; '.join(others)}." if others else ""
        met = f"{kind}: the goal is met in {count['met']} of {len(own)} cells."
        lines.append(f"{met}{but} The largest losses of quality: {'; '.join(most)}.")
    return lines


def named(cell: Run, results: dict[Run, tuple[float, float, str]]) -> str:
    """Return a cell with what it has lost."""
    mean, error, _ = results[cell]
    unit = "%" if PROBLEMS[cell.problem].relative else "points"
    return f"{mean:+z.2f} ± {error:.2f} {unit} ({cell.problem}, {cell.optimizer}, {cell.place})"


def exact() -> str:
    """Return what is reached with float32."""
    kept, reached = KeptRuns(RESULTS), []
    for problem, optimizer in product(PROBLEMS, OPTIMIZERS):
        if problem not in OPTIMIZERS[optimizer].rates:
            continue
        runs = [
            Run(problem, optimizer, "4 workers", "float32", seed).parameters for seed in range(SEEDS[problem])
        ]
        values = [fmean(outcome["values"]) for run in runs if (outcome := kept.get(run)) is not None]
        unit = " bits per byte" if PROBLEMS[problem].relative else " %"
        reached.append(f"{problem} {fmean(values):.2f}{unit} with {optimizer}")
    return f"With float32 and four workers, the means over the seeds are: {', '.join(reached)}."


def text() -> str:
    """Return the page."""
    kept = read_results(RESULTS, KeptRun)
    minutes = sum(run.outcome["took_s"] for run in kept) / 60
    left = [run for problem, seeds in SEEDS.items() for run in missing(cells([problem]), seeds, RESULTS)]
    results = everything()
    seeds = ", ".join(f"{count} ({problem})" for problem, count in SEEDS.items())
    counted = (
        f"{len(results)} of {len(cells())} cells; seeds: {seeds}. {len(kept)} training runs, which have taken "
        f"{minutes:.0f} minutes of processor time. {len(left)} runs are missing. {exact()}"
    )
    lines = ["# What codecs cost", "", *textwrap.wrap(QUESTION, 118, break_on_hyphens=False), ""]
    lines += [*bullets(findings(results)), "", *textwrap.wrap(counted, 118), "", "## How it was measured", ""]
    for paragraph in METHOD:
        lines += [*textwrap.wrap(paragraph, 118), ""]
    again = (
        "The following commands repeat the runs, and write this page. Runs that the file already contains are not "
        "repeated:"
    )
    lines += [*textwrap.wrap(again, 118), ""]
    lines += [
        "    python -m reproductions wire --results DIR/wire.jsonl",
        "    python -m reproductions wire --results DIR/wire.jsonl --problem text-gpt --seeds 8",
        "    python docs/make_codecs.py",
        "",
    ]
    lines += ["## Limits of these results", "", *bullets(LIMITS), ""]
    tables = (line for table in result_tables(results) for line in markdown(table))
    lines += ["## Results", "", *(f"#{line}" if line.startswith("#") else line for line in tables)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page or, with --check, only check it. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return TARGET.read_text() != text()
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
