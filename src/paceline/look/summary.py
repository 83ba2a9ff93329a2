"""The summary of a run as pairs of short texts, which `paceline run` prints, and plots of loss and accuracy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import convert

from ..trace.digest import fairness, shares_of_updates
from ..trace.measures import PushFates, unapplied_pushes
from ..trace.report import Resumption
from ..words import named_workers
from .models import styles_of
from .timelines import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_SHOWN = 8  # maximum number of workers whose sample counts are shown separately
FAIR = 0.995  # Jain's index above which the shares of the workers are not shown
LEAST_S = 0.1  # the summary does not mention shorter idle or wasted times


def summary_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the summary: mapping from the name of a row to its text.

    Args:
        summary: the summary of a run, as in `RunResult.summary` and `summary.json`.
    """
    # There are no statistics if the traces of the run could not be read.
    measured = "duration_s" in summary
    shown = {"warning": warning} if measured and (warning := unapplied_in(summary)) else {}
    shown["sync"] = str(summary["sync"])
    if "choices" in summary:
        shown["chosen"] = " ".join(summary["choices"]) or "bsp until the end: no model saves 10 % of an epoch"
    if summary["ended"] != "finished":
        shown["ended"] = str(summary["ended"])
    if resumptions := summary.get("resumptions"):
        shown["resumed"] = convert(resumptions[-1], Resumption).words
    if measured:
        shown |= _figures(summary)
    if repeated := summary.get("repeated_bases", 0):
        shown["sent again"] = f"all weights of a shard, {repeated} times, to a worker with a wrong copy"
    if (main := summary.get("main_worker", 0)) > 0:
        shown["main worker"] = f"worker {main} at the end (see paceline.is_main)"
    if "devices" in summary:
        shown["devices"] = _devices(summary["devices"])
    if summary["emulated"]:
        shown["emulated"] = str(summary["emulated"])
    return shown


def _devices(devices: Mapping[str, str]) -> str:
    """Return a text that names the workers on each device, or their number if there are many devices.

    >>> _devices({"0": "cuda:0 (NVIDIA H100)", "1": "cpu", "2": "cpu"})
    'worker 0: cuda:0 (NVIDIA H100); workers 1, 2: cpu'
    """
    users: dict[str, list[int]] = {}
    for worker, device in devices.items():
        users.setdefault(device, []).append(int(worker))
    return "; ".join(f"{named_workers(workers)}: {device}" for device, workers in users.items())


def unapplied_in(summary: Mapping[str, Any]) -> str:
    """Return a sentence about pushes that were never applied; "" if there are none, or they were not counted."""
    pushes = summary.get("ledger", {}).get("pushes", {})
    if "unapplied" not in summary or not pushes.keys() >= {*PushFates.__struct_fields__}:
        return ""
    return unapplied_pushes(PushFates(**pushes), summary["unapplied"])


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    shards = summary["shards"]
    # In each iteration, a worker pushes once to every shard.
    pushes = sum(summary["iterations"].values()) * shards
    to_shards = f" to {shards} shards" if shards > 1 else ""
    shown = {
        "duration": f"{summary['duration_s']:.1f} s",
        **_speed(summary),
        "fairness": _fairness(summary),
        "per worker": _per_worker(list(summary["worker_samples"].values())),
        "left out": f"{summary['dropped_pushes']} of {pushes} pushes{to_shards} (no usable gradient, or too late)",
        "waiting": f"{summary['waiting_share']:.1%} of the workers' time",
        "barriers": _barriers(summary),
        "idle": _idle(summary),
        "restarts": str(summary["restarts"]),
        "wasted": _wasted(summary),
        "paused": _paused(summary),
        "staleness": f"mean {summary['mean_staleness']:.2f}, maximum {summary['max_staleness']} (in updates)",
        "clipping": "each worker's own gradient, before the mean",
        "gap": f"maximum {summary['max_gap']} (in iterations)",
    }
    figures = {"left out": "dropped_pushes", "restarts": "restarts", "clipping": "clipped_alone"}
    absent = {name for name, figure in figures.items() if not summary.get(figure)}
    samples = summary.get("ledger", {}).get("samples", {})
    if samples.get("used") and not samples.get("dropped"):
        absent.add("left out")  # the dropped pushes, such as edits, had no samples
    return {name: text for name, text in shown.items() if text and name not in absent}


def _speed(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows for the speed: in samples, or in gradients if the number of samples is unknown.

    Updates per second are not shown, because updates under different sync models contain different numbers of
    gradients.
    """
    unit = speed_unit([summary["samples_per_s"]])
    shown: dict[str, str] = {unit: f"{summary[unit]} ({summary[f'{unit}_per_s']:.1f} per second)"}
    shown["updates"] = "0"
    if summary["updates"]:
        share = summary["gradients"] / summary["updates"]
        shown["updates"] = f"{summary['updates']} ({share:.3g} gradient{'s' * (share != 1)} each, on average)"
    return shown


def _per_worker(samples: Sequence[int]) -> str:
    """Return a text about the number of samples that each worker used; "" if these numbers are unknown."""
    if not any(samples):
        return ""
    if len(samples) <= MOST_SHOWN:
        return f"{', '.join(map(str, samples))} samples"
    return f"{min(samples)} to {max(samples)} samples, median {median(samples):.0f}"


def _fairness(summary: Mapping[str, Any]) -> str:
    """Return a text about the workers' shares of the updates; "" if they are almost equal, or unknown."""
    shares = shares_of_updates(summary["worker_samples"], summary.get("worker_gradients", {}))
    index = fairness(shares)
    if index > FAIR:
        return ""
    return (
        f"a worker's share of the updates is {min(shares.values()):.1%} to {max(shares.values()):.1%} (Jain's index "
        f"{index:.2f}; 1 if all shares are equal)"
    )


def _barriers(summary: Mapping[str, Any]) -> str:
    """Return a text about the cost of synchronization; "" if no worker waited at a barrier."""
    if not summary.get("barriers"):
        return ""
    predicted_s = summary["predicted_sync_cost_s"]
    predicted = "" if predicted_s is None else f", predicted {predicted_s:.2f} s"
    return f"{summary['barriers']}, whose longest waits add up to {summary['sync_cost_s']:.2f} s (c_sync{predicted})"


def _wasted(summary: Mapping[str, Any]) -> str:
    """Return a text about the computations from which no gradient was pushed; "" if they took hardly any time."""
    wasted_s = summary["wasted_s"]
    return f"{wasted_s:.1f} s of computation (aborted, or lost with a worker)" if wasted_s >= LEAST_S else ""


def _paused(summary: Mapping[str, Any]) -> str:
    """Return a text about the pauses of the run; "" if there were none."""
    share = summary.get("paused_share", 0.0)
    return f"{share:.1%} of the workers' time, because the run had too few workers" if share else ""


def _idle(summary: Mapping[str, Any]) -> str:
    """Return a text that says how many workers finished early, and how early; "" if no worker did."""
    idle_s = [seconds for seconds in summary["idle_s"].values() if seconds >= LEAST_S]
    if not idle_s:
        return ""
    workers = f"{len(idle_s)} worker{'s' * (len(idle_s) > 1)}"
    share = summary["idle_share"]
    return f"{workers} finished up to {max(idle_s):.1f} s before the last worker ({share:.1%} of the workers' time)"


# -- A plot of training loss over virtual time, with one curve per sync model --------------------------------

NOTE_COLUMNS = 130


class LossCurve(msgspec.Struct, frozen=True):
    """One curve of the plot: training loss over virtual time.

    Attributes:
        label: name of the curve in the legend.
        points: (virtual time in seconds, training loss) pairs.
    """

    label: str
    points: list[tuple[float, float]]


def loss_picture(title: str, note: str, curves: Sequence[LossCurve]) -> Figure:
    """Draw all curves in one picture. The loss axis is logarithmic if the losses differ by more than a factor of 20.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(10.0, 5.2)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(note, NOTE_COLUMNS), fontsize=9.5)
    styles = styles_of(curve.label for curve in curves)
    for curve in curves:
        axes.plot(
            [time_s for time_s, _ in curve.points],
            [loss for _, loss in curve.points],
            color=styles[curve.label].color,
            linestyle=styles[curve.label].dashes,
            linewidth=1.7,
            label=curve.label,
        )
    losses = [loss for curve in curves for _, loss in curve.points if loss > 0]
    if losses and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=True, fontsize=9)
    return figure


# -- The unit in which the speeds of runs are compared -------------------------------------------------------


def speed_unit(samples_per_s: Iterable[float]) -> Literal["samples", "gradients"]:
    """Return the unit in which runs are compared: samples if their number is known for every run, else gradients.

    Updates are never the unit, because an update contains one gradient under some sync models and one gradient of
    each worker under others.

    Args:
        samples_per_s: the samples per second of each run; 0 if they are unknown.

    >>> speed_unit([800.0, 1200.0]), speed_unit([800.0, 0.0])
    ('samples', 'gradients')
    """
    return "samples" if all(samples_per_s) else "gradients"
