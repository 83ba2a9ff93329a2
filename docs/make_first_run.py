"""Run the script of the README under three models, and draw its picture: `python docs/make_first_run.py`.

The three runs take a minute, on an idle machine. Their losses are kept in `docs/pictures/first-run.json`. With --draw,
nothing is run, and the pictures are drawn from what is kept.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from paceline.trace.run_dir import read_metrics

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
KEPT = PICTURES / "first-run.json"
RUN = ("--workers", "3", "--pace", ".06,.06,.18", "--joint-batch")
MODELS = {
    "bsp": ("--sync", "bsp"),
    "bsp, balanced batches": ("--sync", "bsp", "--batch", "balanced"),
    "asp": ("--sync", "asp"),
}
SAMPLES = 500  # over which the loss is averaged
THEMES = {
    "light": ("#1f2328", "#d1d9e0", ("#6e7781", "#0969da", "#bc4c00")),
    "dark": ("#f0f6fc", "#3d444d", ("#9198a1", "#4493f8", "#f0883e")),
}
"""The colors of the text, of the grid and of the lines, for light and dark pages."""

PLACES = ((12, "right"), (-14, "left"), (-14, "right"))
"""Where the label of each line stands: points above its end, and alignment."""


def script() -> str:
    """Return the script of the README: its first block of Python."""
    [found, *_] = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return str(found)


def run(options: tuple[str, ...]) -> dict[str, Any]:
    """Run the script once, and return what is kept of it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script())
        command = ["-m", "paceline", "run", *RUN, *options, "--run-dir", "run", "train.py"]
        subprocess.run([sys.executable, *command], cwd=folder, check=True)
        points = read_metrics(Path(folder) / "run")["loss"].points
        duration_s = json.loads((Path(folder) / "run" / "summary.json").read_text())["duration_s"]
    samples = [point.samples for point in points]
    per_point = SAMPLES * len(points) // samples[-1] or 1
    return {
        "duration_s": round(duration_s, 1),
        "time_s": [round(part[-1].time_s, 2) for part in map(list, _parts(points, per_point))],
        "loss": [round(fmean(point.value for point in part), 4) for part in _parts(points, per_point)],
    }


def _parts(points: Any, size: int) -> list[Any]:
    return [points[begin : begin + size] for begin in range(0, len(points), size)]


def draw(kept: dict[str, dict[str, Any]], theme: str) -> None:
    """Draw the losses for a light or a dark page."""
    text, grid, colours = THEMES[theme]
    figure, axes = pyplot.subplots(figsize=(7.2, 3.0), layout="constrained")
    for (label, one), colour, (above, side) in zip(kept.items(), colours, PLACES, strict=True):
        before_s = one["time_s"][-1] - one["duration_s"]  # until training began
        times_s = [time_s - before_s for time_s in one["time_s"]]
        axes.plot(times_s, one["loss"], color=colour, linewidth=1.8)
        axes.annotate(
            f"{label}: {one['duration_s']:.0f} s",
            (times_s[-1], one["loss"][-1]),
            xytext=(0, above),
            textcoords="offset points",
            color=colour,
            ha=side,
            va="center",
            fontsize=9,
        )
    axes.set(xlabel="seconds", ylabel="training loss", xlim=(0, None), ylim=(0, None))
    for part in (axes.xaxis, axes.yaxis):
        part.label.set_color(text)
    axes.tick_params(colors=text)
    axes.grid(color=grid, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(text)
    figure.savefig(PICTURES / f"first-run-{theme}.png", dpi=200, transparent=True)
    pyplot.close(figure)


def main() -> None:
    """Run the script unless --draw is given, and draw both pictures."""
    if sys.argv[1:] != ["--draw"]:
        kept = {label: run(options) for label, options in MODELS.items()}
        KEPT.write_text(json.dumps(kept) + "\n")
    kept = json.loads(KEPT.read_text())
    for theme in THEMES:
        draw(kept, theme)


if __name__ == "__main__":
    main()
