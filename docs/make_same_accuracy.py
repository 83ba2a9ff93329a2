"""Write the pages `docs/models/same-accuracy*.md` from the results of the table: `python docs/make_same_accuracy.py`.

    python -m reproductions same-accuracy
    python docs/make_same_accuracy.py

The results are in `reproductions/results/same-accuracy.jsonl`. With --check, nothing is written, and the exit code is
0 if the page matches the results, 1 otherwise. Every number on the page is computed from the results, and the page
says which of them are missing.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # `reproductions` is not installed

from docs.by_study import of_same_accuracy  # noqa: E402
from reproductions.same_accuracy.plan import (  # noqa: E402
    CLUSTERS,
    FACTORS,
    GPT_MODELS,
    GPT_PLACES,
    MANY,
    MODELS,
    MODELS_OF_MANY,
    PROBLEMS,
    SEEDS,
    Scope,
    jobs,
    kinds_of,
)
from reproductions.same_accuracy.reasons import reasons  # noqa: E402
from reproductions.same_accuracy.summary import cells_of, findings, tables  # noqa: E402
from reproductions.same_accuracy.table import Result, Tuned, read  # noqa: E402

RESULTS = ROOT / "reproductions" / "results" / "same-accuracy.jsonl"
TARGET = ROOT / "docs" / "models" / "same-accuracy.md"
TARGET_OF_RESULTS = TARGET.with_name("same-accuracy-results.md")

QUESTION = (
    "Does a script with unchanged hyper-parameters learn the same under every sync model? Under each of the other "
    "models, several problems are trained with hyper-parameters that were tuned for `bsp` only, for as many epochs as "
    "`bsp`, once with the hyper-parameters as they are (*raw*), and once with *translated* hyper-parameters, which "
    "are the default of a run. A *cell* is a problem in a cluster under a model at one learning rate, with the mean "
    "over the seeds."
)

PROBLEM_LINES = (
    "`digits-mlp`: 64-64-10 network on scikit-learn's digits, SGD with momentum 0.9, joint batch 128, 10 epochs. "
    "Accuracy on 360 test images.",
    "`digits-cnn`: two convolutions with BatchNorm, SGD with momentum 0.9 and weight decay 0.0005, joint batch "
    "128, 10 epochs. BatchNorm's statistics for the test are computed from training images with the final "
    "weights.",
    "`text-gpt`: 4 layers, 205,000 parameters, on the characters of Python's standard library; AdamW with weight "
    "decay 0.1, a warm-up and a cosine, joint batch 80 sequences of 16 characters, 200 joint steps. Loss on text "
    "from other files.",
    "`ratings`: factorization of a matrix of 12,000 ratings with noise, SGD without momentum, joint batch 240, 10"
    " epochs. Mean squared error on other ratings.",
    "`quadratic-8`, `-64`, `-256`: noisy quadratics with 4,096 coordinates whose curvatures differ by up to the "
    "factor in the name, SGD with momentum 0.9, joint batch 128, 110 joint steps. The exact loss.",
    "`digits-mlp-...`: the network of `digits-mlp` with other optimizers, only under `asp` and `elastic-bsp` in the "
    "cluster steady 3x with 4 and 16 workers: SGD without momentum, with Nesterov's momentum and weight decay, and "
    "with momentum 0.98 (`slow`); Adam, AdamW with betas 0.9 and 0.95, RMSprop, Adagrad, NAdam, Adamax; and Lion, a "
    "class that is not torch's.",
    "`digits-cnn-...` and `small-gpt-...`: optimizers that normalize, with rates that rise and fall to 0, only "
    "translated, under `asp`, `ssp`, `elastic-bsp` and `drop-stragglers` in the cluster steady 3x with 4 and 16 "
    "workers. The optimizers are Lion, Adafactor, and Muon (for the matrices inside the network; AdamW trains the "
    "other parameters). The schedule-free AdamW is also tested, with a constant rate; it is evaluated with the "
    "weights that its `eval()` sets. `digits-cnn-...` is the network of `digits-cnn` on 1,408 images. "
    "`small-gpt-...` is a GPT like that of `text-gpt`, but with two layers, half the width, a joint batch of 64 "
    "sequences and 120 joint steps, and is trained only at the best rate.",
)

REASONS = (
    "`rennala` drops every gradient whose weights are outdated. If a mean has as many gradients as there are workers, "
    "40 to 46 % of the gradients are dropped in the cluster steady 3x. An update makes up for dropped gradients only "
    "up to a whole step, so an epoch moves the weights less far than under `bsp`. At small rates, training needs this "
    "distance in every epoch, so little is learned.",
    "`drop-stragglers` and `ringmaster` drop gradients, too. Their updates make up for the distance, but not for "
    "the noise: a mean of three gradients has 4/3 of the noise of a mean of four. This matters where the loss is "
    "mostly noise: on the quadratics, at the best rate and half of it.",
    "The correction for delayed gradients makes momentum lag behind by half of the delay, which costs about 0.5 m / "
    "(1 - m) joint steps at the beginning, where m is the momentum: 4.5 of 112 joint steps for a momentum of 0.9, and "
    "25 for 0.98 (`digits-mlp-slow`). Without this correction, larger steps oscillate: on `quadratic-256` at the best "
    "rate, with 16 workers under `asp` in the cluster steady 3x, the loss is 8 % above that of `bsp`, instead of 10 % "
    "below it.",
    "Adamax divides by the largest recent gradient. The noise of a single push is larger than that of a joint "
    "gradient, so the steps of Adamax are shorter. For optimizers that divide by a mean of squares, the noise is "
    "taken into account. Optimizers that normalize their updates, such as Muon, Adafactor and Lion, receive a "
    "running mean of gradients that has the noise of a joint gradient. This mean lags by up to half a joint step. "
    "The result suffers most on `small-gpt-muon`, whose best rate is the largest that was tried, and whose runs "
    "have 120 joint steps.",
    "Under `ssp`, `dssp`, `dsps` and `pssp`, the delay of the gradients is not known at the beginning, and is "
    "predicted as under `asp`: 0.93 joint steps with 16 workers. In the cluster steady 3x, the delay is only 0.5, "
    "because the fast workers wait for the slow ones. It takes 30 joint steps until most of the difference is "
    "noticed. Until then, momentum builds up more slowly than it should. This matters at small rates: on "
    "`quadratic-8` without noise, at a quarter of the best rate, with 16 workers under `ssp`, the loss is 2.8 % "
    "above that of `bsp`. With a constant delay of 0.58, which is the mean over the run, the loss is the same as "
    "that of `bsp`.",
)

METHOD = (
    "*Clusters.* One server, and a latency of 0.02 s. A gradient takes about 1 s. *Steady 3x*: a quarter of the "
    "workers always take 3 times as long. *Jitter*: log-normal times with sigma 0.5. *Pauses*: each worker is 10 "
    "times slower for 5 s in every 50 s. A worker's batch is the joint batch divided by the number of workers.",
    "*Tuning.* The best rate is that with the best mean quality over three seeds, under `bsp` with 4 workers. Each "
    "rate that was tried is twice as large as the next smaller rate. Where the best rate is the largest one that was "
    "tried, a larger rate may be better. The table uses the best rate, half and a quarter of it, and eight other "
    "seeds.",
    "*Runs.* All runs are in virtual time, as with `paceline.simulate`. The times of the pushes do not depend on "
    "the weights. So each schedule of pushes is recorded once, and all rates and seeds are trained along this "
    "schedule, with the optimizers and the translation of a real run; a test compares such a run with "
    "`simulate(train_fn=...)`. So all seeds of a cell have the same times of the workers, and differ in their "
    "initial weights and the order of their data.",
    "*Guard.* Each of these runs has a guard that says when training diverges (`--guard tell`). With "
    "`--hyperparameters 'translated without delay'`, the command below makes the runs without the correction for "
    "delayed gradients.",
    "*Bounds.* A cell is within the bounds if it is worse than `bsp` by at most 3 points of accuracy or 6 % of the "
    "loss at the best rate, and by at most 1 point or 2 % at half and a quarter of this rate. A run has learned "
    "nothing (*lost*: a cell with such a run) if its accuracy is at most 0.15, or its loss is at least 0.9 on the "
    "quadratics, 1 on `ratings` or 3.15 on `text-gpt`, or not finite.",
    "*Time.* The quality is computed 40 times in a run. The time to `bsp`'s quality, under `bsp` and under the other "
    "model, is the virtual time at which the mean over the seeds first reaches `bsp`'s final quality at the same rate, "
    "to within the bound. All runs of a cell have the same schedule, so this time depends on which workers the "
    "schedule slows down, and when, most of all in the cluster *pauses* (see the last section of the results).",
)


def markdown(table: Table) -> list[str]:
    """Return the lines of a table with its title."""
    heads = [str(column.header).replace("\n", " ") for column in table.columns]
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    title = str(table.title)
    return [
        f"## {title[0].upper()}{title[1:]}",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def bullets(sentences: Iterable[str]) -> list[str]:
    """Return a list of sentences."""
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, 118, initial_indent="- ", subsequent_indent="  ")
    ]


def completeness(results: Sequence[Result]) -> str:
    """Return how much of the table there is."""
    scope = Scope.chosen([], [], [], [])
    wanted = [(job, problem) for job in jobs(scope) for problem in job.problems]
    count = sum(len(kinds_of(problem, job.model, ("raw", "translated"))) for job, problem in wanted)
    runs = sum(len(run.finals) for result in results for run in result.runs)
    hours = sum(result.took_s for result in results) / 3600
    left = f"{count - len(results)} of {count} results are still missing. " if len(results) < count else ""
    models = ", ".join(f"`{model}`" for model in GPT_MODELS)
    places = ", ".join(f"{cluster} with {workers} workers" for cluster, workers in GPT_PLACES)
    return (
        f"There are {len(results)} results with {runs} training runs, which have taken {hours:.1f} hours of one core. "
        f"{left}The GPT is trained only under {models}, and only in these clusters: {places}. Its runs take much "
        f"longer than all other runs. With {MANY} workers, all models are trained in the cluster "
        f"{next(iter(CLUSTERS))}, and only {', '.join(f'`{model}`' for model in MODELS_OF_MANY)} in the other clusters."
    )


def rates(tuned: dict[str, Tuned]) -> list[str]:
    """Return the table of the best rates for bsp."""
    lines = [
        "## The best rates for bsp",
        "",
        "| problem | rate: mean quality over three seeds | best |",
        "|---|---|---|",
    ]
    for name in PROBLEMS:
        if (each := tuned.get(name)) is not None:
            found = zip(PROBLEMS[name]().rates, each.finals, strict=True)
            tried = ", ".join(
                f"{rate:g}: {'-' if value is None else f'{value:.3g}'}" for rate, value in found
            )
            lines.append(f"| {name} | {tried} | {each.best:g} |")
    return [*lines, ""]


def texts() -> dict[Path, str]:
    """Return the pages."""
    tuned, every = read(RESULTS)
    results = {
        key: result
        for key, result in every.items()
        if result.seeds == len(SEEDS) and result.problem in PROBLEMS and result.model in MODELS
    }
    cells = cells_of(results)
    lines = ["# The same hyper-parameters under every model", "", *textwrap.wrap(QUESTION, 118), ""]
    lines += [*bullets(findings(cells)), ""] if cells else []
    lines += ["[The results](same-accuracy-results.md) have all tables.", ""]
    lines += [*textwrap.wrap(completeness(list(results.values())), 118), ""]
    lines += [
        "## Where the result is not the same, and why",
        "",
        *bullets([*REASONS, *reasons(cells, results)]),
        "",
        "## How it was measured",
        "",
    ]
    lines += ["*Problems.*", "", *bullets(PROBLEM_LINES), ""]
    for paragraph in METHOD:
        lines += [*textwrap.wrap(paragraph, 118), ""]
    lines += [
        *textwrap.wrap(
            "The following commands repeat the table and write its pages. If the first command is stopped and "
            "started again, it continues where it was stopped:",
            118,
        ),
        "",
        "    python -m reproductions same-accuracy --results DIR/same-accuracy.jsonl",
        "    python docs/make_same_accuracy.py",
    ]
    tabled = [
        "# The same hyper-parameters: the results",
        "",
        "[The same hyper-parameters under every model](same-accuracy.md) says what was measured.",
        "",
        *textwrap.wrap(
            f"Each column belongs to a rate ({', '.join(f'{factor:g}' for factor in FACTORS)} of the best one for "
            "`bsp`), and shows the number of cells within the bounds and the number of all cells.",
            118,
        ),
        "",
        *(line for table in (tables(cells) if cells else ()) for line in markdown(table)),
        *rates(tuned),
        *of_same_accuracy(results),
    ]
    made = {TARGET: lines, TARGET_OF_RESULTS: tabled}
    return {path: "\n".join(each).rstrip() + "\n" for path, each in made.items()}


def main() -> int:
    """Write the pages or, with --check, only check them. Return the exit code."""
    if "--check" in sys.argv[1:]:
        return any(path.read_text() != text for path, text in texts().items())
    for path, text in texts().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
