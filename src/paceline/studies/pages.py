"""`summary.md`: what a study says, in a page that can be read without the figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean

from ..errors import first_line
from ..report.words import counted
from ..sync.schedule import read_schedule
from .description import Study
from .results import Row, StudyResult
from .statistics import CONFIDENCE, Estimate
from .tables import interval_text, keys_of, value_text, whole_percent

__all__ = ["summary_md"]


def summary_md(result: StudyResult, figures: Sequence[str], left_out: str = "") -> str:
    """Return the page.

    Args:
        result: the result of the study.
        figures: names of the figures, without their endings.
        left_out: why there are no figures.
    """
    study = result.study
    parts = [f"# {study.name}", _method(study)]
    for cluster in study.clusters:
        rows = result.of_cluster(cluster)
        parts.append(f"## {cluster}")
        parts.append(_cluster(study, rows) if rows else "All runs on this cluster have failed.")
        if rows:
            parts += [
                _table(result, rows),
                "\n".join(f"- {sentence}" for sentence in _sentences(study, rows)),
            ]
    parts += list(_failures(result))
    if figures or left_out:
        parts.append("## Figures")
        parts += [f"Note: {left_out}"] * bool(left_out)
        parts += [f"![{name}](figures/{name}.png)" for name in figures]
    return "\n\n".join(parts) + "\n"


def _method(study: Study) -> str:
    target = study.target
    kinds = {contender.hyperparameters for contender in study.contenders}
    limits = {"seconds": "virtual seconds", "updates": "updates", "samples": "samples"}
    ends = [f"{value:g} {words}" for key, words in limits.items() if (value := getattr(study.budget, key))]
    aim = (
        f"{target.metric} {value_text(target.value)}"
        if target.value is not None
        else f"the mean final {target.metric} of {target.of}"
        + (f", up to {target.within:g}" if target.within else "")
    )
    tuned = any(len(contender.points) > 1 for contender in study.contenders)
    sentences = [
        f"{counted(len(study.contenders), 'model')} on {counted(len(study.clusters), 'cluster')} train "
        f"`{study.trained.title}` with {counted(len(study.seeds), 'seed')}.",
        f"The target is {aim}; {'higher' if target.higher_is_better else 'lower'} values are better.",
        f"Hyper-parameters are {' or '.join(sorted(kinds))}.{_as_they_are(study)}",
        f"A run ends after {' or '.join(ends)} at the latest."
        if ends
        else "A run ends with its training function.",
    ]
    if tuned:
        whose = (
            "Each model has its own best hyper-parameters of the grid on each cluster"
            if study.tuning == "each"
            else f"All models have the best hyper-parameters of {study.reference} on each cluster"
        )
        sentences.append(
            f"{whose}: those with the smallest median time to the target with {len(study.tuning_seeds)} other seeds, "
            "or, if these are equal, with the best final value."
        )
    sentences += [
        f"Brackets are {CONFIDENCE:.0%} intervals. Times are geometric means over the seeds. A run that never "
        "reaches the target counts as longer than it lasted; if such runs leave the upper end of an interval open, "
        "it is called never.",
        f"Ratios are times divided by those of {study.reference}, "
        + ("paired by seed." if study.paired else "not paired by seed."),
        "A ratio or difference is called significant if it is so after Holm's correction for all comparisons of its "
        "kind in this study.",
    ]
    return " ".join(sentences)


def _as_they_are(study: Study) -> str:
    """Return a sentence about the models whose hyper-parameters are not translated, although they are to be."""
    names = [
        contender.name
        for contender in study.contenders
        if contender.hyperparameters == "translated"
        and any(model.scales_pushes for step in read_schedule(contender.sync).steps for model in step.models)
    ]
    if not names:
        return ""
    return f" Those of {'; '.join(names)} are used as they are, because such a model scales gradients itself."


def _cluster(study: Study, rows: Sequence[Row]) -> str:
    return f"{study.clusters[rows[0].cluster].workers} workers; target {value_text(rows[0].target)}."


def _table(result: StudyResult, rows: Sequence[Row]) -> str:
    keys = keys_of(result)
    metric = result.study.target.metric
    lines = [
        ["model", *keys, "seconds to target", "ratio", "reached", f"final {metric}", "staleness", "waiting"],
        ["---"] * (len(keys) + 7),
    ]
    for row in rows:
        values = dict(row.choice.point)
        lines.append(
            [
                f"**{row.contender.name}**" if row.front else row.contender.name,
                *(str(values.get(key, "-")) for key in keys),
                interval_text(row.time["seconds"]),
                "1" if row.ratio is None else _starred(Estimate(*row.ratio[:3]), row.ratio_p),
                f"{row.reached} of {len(row.outcomes)}",
                interval_text(row.final) if row.lead is None else _starred(row.final, row.lead_p),
                value_text(fmean(each.mean_staleness for each in row.outcomes.values())),
                whole_percent(fmean(each.time["waiting"] for each in row.outcomes.values())),
            ]
        )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\nBold: no other model is sooner at the target and ends with a better value. "
        "\\*: significantly different from the reference."
    )


def _starred(estimate: Estimate, p: float) -> str:
    return interval_text(estimate) + (" \\*" if p <= 1 - CONFIDENCE else "")


def _sentences(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the rows of a cluster say, each claim only if its interval supports it."""
    surely = [row for row in rows if row.ratio is not None and row.ratio_p <= 1 - CONFIDENCE]
    for words, chosen in (
        ("sooner", [row for row in surely if row.ratio is not None and row.ratio.high < 1]),
        ("later", [row for row in surely if row.ratio is not None and row.ratio.low > 1]),
    ):
        if chosen:
            named = "; ".join(f"{row.contender.name} ({_factor(row)})" for row in chosen)
            yield f"Significantly {words} at the target than {study.reference}: {named}."
    others = [row for row in rows if row.ratio is not None and row not in surely]
    if others:
        named = "; ".join(row.contender.name for row in others)
        yield f"Not significantly different from {study.reference} in time to target: {named}."
    front = [row.contender.name for row in rows if row.front]
    if front:
        yield f"Not dominated in time to target and final {study.target.metric}: {'; '.join(front)}."
    for row in rows:
        if row.reached < len(row.outcomes):
            yield (
                f"{row.contender.name} never reaches the target in {len(row.outcomes) - row.reached} of "
                f"{len(row.outcomes)} runs."
            )
    for row in rows:
        if row.choice.edges:
            yield f"{row.contender.name}: {' and '.join(row.choice.edges)}, so a better value may lie beyond it."


def _factor(row: Row) -> str:
    assert row.ratio is not None
    if row.ratio.ratio == 0 or math.isinf(row.ratio.ratio):
        return "one of them never reaches it"
    return f"{value_text(row.ratio.ratio)} of its time"


def _failures(result: StudyResult) -> Iterator[str]:
    if result.failures:
        yield "## Failed runs"
        yield "The other runs were compared without these."
        yield "\n".join(f"- {failure.name}: {first_line(failure.error)}" for failure in result.failures)
    if findings := list(_findings(result.rows)):
        yield "## Findings"
        yield "\n".join(f"- {finding}" for finding in findings)


def _findings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each finding about a model on a cluster once, although its numbers differ between seeds."""
    for row in rows:
        alike: dict[str, list[tuple[int, str]]] = {}
        for seed, outcome in row.outcomes.items():
            for finding in outcome.findings:
                alike.setdefault(re.sub(r"\d+(\.\d+)?", "", finding), []).append((seed, finding))
        for (first, finding), *others in alike.values():
            seeds = f"{len(others) + 1} seeds, for example {first}" if others else f"seed {first}"
            yield f"{row.contender.name} on {row.cluster}, {seeds}: {finding}"
