"""Draw the two pictures of `docs/overview.md` from the code: `python docs/make_overview.py`.

- The folders: each after those from which it imports, with the first sentence of its docstring. A line joins a folder
  to those from which it imports, unless these are also reached through a third one.
- The way of a push: a training step is traced in the live hosts of a worker and a server, each on a thread, and the
  picture shows the functions in `WAY`, in the order in which they were called.

With --check, nothing is written, and the exit code is 0 if the pictures match the code, 1 otherwise.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import textwrap
import threading
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

import paceline
from paceline.run.coordinator import CoordinatorHost
from paceline.run.job import Assignment
from paceline.run.job_options import make_job
from paceline.run.server import ServerHost
from paceline.run.worker import WorkerSession
from paceline.train.session import install

ROOT = Path(paceline.__file__).parent
PICTURES = Path(__file__).parent / "pictures"

sys.path.insert(0, str(ROOT.parent.parent))  # `tests` is not installed

from tests.test_rooms import PURE as PURE_FOLDERS  # noqa: E402
from tests.test_rooms import declared, in_order  # noqa: E402

FOLDERS = in_order()

FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
INK, PALE, PURE, LIVE, OTHER = "#1f2933", "#7b8794", "#dcebf7", "#fbe6d4", "#eef0f2"

STEPS_BEFORE = 3


class Waypoint(NamedTuple):
    """A function that a push passes.

    Attributes:
        process: "worker" or "server".
        place: the file under `src/paceline`.
        function: the qualified name of the function.
        what: what happens there.
    """

    process: str
    place: str
    function: str
    what: str


WAY = (
    Waypoint("worker", "train/optimizer.py", "DistributedOptimizer.step", "the script calls step()"),
    Waypoint("worker", "train/training.py", "WorkerTraining.commit", "check weights and gradients"),
    Waypoint("worker", "train/gradients.py", "Gradients.collect", "copy the gradients to the vector"),
    Waypoint("worker", "train/gradients.py", "Gradients.norm", "look for NaN and inf"),
    Waypoint("worker", "run/worker.py", "WorkerSession.commit", "describe the push to each shard"),
    Waypoint("worker", "core/worker.py", "Worker.push", "decide: which messages, with which flags"),
    Waypoint("worker", "core/requests.py", "Host.carry_out", "carry out what the core requests"),
    Waypoint("worker", "wire/stream.py", "Stream.send", "frame and send the commit"),
    Waypoint("server", "wire/stream.py", "Stream.receive", "receive the commit and its gradients"),
    Waypoint("server", "run/server.py", "ServerHost.received", "read what the push contains"),
    Waypoint("server", "core/server.py", "Server.handle", "decide: the commit is a push and a pull"),
    Waypoint("server", "core/shard.py", "ShardSync.handle", "check the order of events"),
    Waypoint(
        "server",
        "sync/conditions.py",
        "ConditionMachine.handle",
        "decide: apply, hold or drop; answer or wait",
    ),
    Waypoint("server", "core/shard.py", "Shard._record", "record event and actions in the trace"),
    Waypoint("server", "core/requests.py", "Host.carry_out", "carry out what the core requests"),
    Waypoint("server", "shard/store.py", "Store.apply", "update the weights of the slice"),
    Waypoint("server", "wire/stream.py", "Stream.send", "send the answer with the new weights"),
    Waypoint("worker", "wire/stream.py", "Stream.receive", "receive the weights into the vector"),
    Waypoint("worker", "core/worker.py", "Worker.handle", "decide: has the last shard answered?"),
    Waypoint("worker", "train/weights.py", "Weights.mark_pulled", "tell autograd; step() returns"),
)
"""The way of a push under `bsp`, over sockets, on the CPU."""


# -- the folders --------------------------------------------------------------------------------------------


def reduced(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Leave out each import of a folder that is reached through another one."""

    def reached(folder: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in imports[folder]))

    return {
        folder: {other for other in others if not any(other in reached(third) for third in others - {other})}
        for folder, others in imports.items()
    }


def summary(folder: str) -> str:
    """Return the first sentence of a folder's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].replace("`", "").rstrip(".")


def draw_folders() -> str:
    """Return the picture of the folders, as SVG."""
    height, left, width = 40, 250, 1000
    middle = {folder: 30 + index * height + height // 2 for index, folder in enumerate(FOLDERS)}
    parts = []
    for folder, others in reduced({folder: declared(folder) & {*FOLDERS} for folder in FOLDERS}).items():
        for other in sorted(others):
            low, high = middle[folder], middle[other]
            reach = left - 14 - min(210, (low - high) * 0.36)
            parts.append(
                f'<path d="M {left} {low} C {reach:.0f} {low}, {reach:.0f} {high}, {left} {high}" fill="none" '
                f'stroke="{PALE}" stroke-width="1.2"/>'
            )
            parts.append(f'<circle cx="{left}" cy="{high}" r="3" fill="{PALE}"/>')
    for folder in FOLDERS:
        y = middle[folder] - height // 2 + 4
        fill = PURE if folder in PURE_FOLDERS else OTHER
        parts.append(
            f'<rect x="{left}" y="{y}" width="{width - left - 10}" height="{height - 8}" rx="5" fill="{fill}"/>'
        )
        parts.append(text(left + 12, middle[folder] + 5, folder, weight="bold", size=14))
        parts.append(
            text(
                left + 118,
                middle[folder] + 5,
                textwrap.shorten(summary(folder), 86, placeholder=" ..."),
                size=12,
            )
        )
    parts.append(text(left + 12, 20, "folder", size=12, fill=PALE))
    parts.append(text(left + 118, 20, "blue: pure, no clock, socket or tensor", size=12, fill=PALE))
    return picture(width, 30 + len(FOLDERS) * height + 10, parts)


# -- the way of a push --------------------------------------------------------------------------------------


def traced_step() -> list[tuple[str, str, str]]:
    """Return (process, file, function) for each call of a function of Paceline in a training step, in order.

    The coordinator's thread is left out: a push does not wait for it.
    """
    calls: list[tuple[str, str, str]] = []
    tracing = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        place = frame.f_code.co_filename
        if event == "call" and tracing.is_set() and place.startswith(str(ROOT)):
            calls.append(
                (
                    threading.current_thread().name,
                    Path(place).relative_to(ROOT).as_posix(),
                    frame.f_code.co_qualname,
                )
            )

    with tempfile.TemporaryDirectory() as folder:
        job = make_job(workers=1, servers=1, sync="bsp", transport="unix", run_dir=Path(folder) / "run")
        coordinator = CoordinatorHost.listen(job)
        coordinator.start()

        def work() -> None:
            session = WorkerSession.connect(
                Assignment(job=job, role="worker", index=0, coordinator=coordinator.address)
            )
            install(session, for_thread=True)
            model = nn.Linear(4, 4)
            optimizer = paceline.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model=model
            )
            for step in range(STEPS_BEFORE + 1):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).sum()
                if step == STEPS_BEFORE:
                    tracing.set()
                loss.backward()
                optimizer.step()
            tracing.clear()
            session.finish()
            session.close()

        server = ServerHost.connect(
            Assignment(job=job, role="server", index=0, coordinator=coordinator.address)
        )
        threading.setprofile(note)
        threads = [
            threading.Thread(target=server.run, name="server", daemon=True),
            threading.Thread(target=work, name="worker", daemon=True),
        ]
        for thread in threads:
            thread.start()
        threading.setprofile(None)
        threads[1].join()
        coordinator.over.wait()
        coordinator.collect().finished.wait()
        coordinator.stop()
        threads[0].join()
    return calls


def require_passed(calls: Sequence[tuple[str, str, str]]) -> None:
    """Check that the calls pass all waypoints in order.

    Raises:
        LookupError: they do not pass one.
    """
    rest = iter(calls)
    for waypoint in WAY:
        if waypoint[:3] not in rest:  # consumes the calls up to this one
            raise LookupError(
                f"a push does not pass {waypoint.place} {waypoint.function} after the waypoint before"
            )


def draw_way() -> str:
    """Return the picture of the way of a push, as SVG."""
    require_passed(traced_step())
    height, width, box = 44, 1000, 470
    lanes = {"worker": 10, "server": width - box - 10}
    parts = [
        text(lanes["worker"] + 12, 22, "a worker's process", size=14, weight="bold"),
        text(lanes["server"] + 12, 22, "a server's process", size=14, weight="bold"),
    ]
    for index, waypoint in enumerate(WAY):
        x, y = lanes[waypoint.process], 36 + index * height
        pure = waypoint.place.split("/")[0] in PURE_FOLDERS
        if index and (before := WAY[index - 1]).process != waypoint.process:
            start = lanes[before.process] + box / 2
            parts.append(
                f'<path d="M {start} {y - 8} C {start} {y + 12}, {x + box / 2} {y - 22}, {x + box / 2} {y}" '
                f'fill="none" stroke="{INK}" stroke-width="1.6" marker-end="url(#tip)"/>'
            )
        parts.append(
            f'<rect x="{x}" y="{y}" width="{box}" height="{height - 8}" rx="5" fill="{PURE if pure else LIVE}"/>'
        )
        parts.append(text(x + 12, y + 15, f"{index + 1}. {waypoint.what}", size=12, weight="bold"))
        parts.append(text(x + 12, y + 30, f"{waypoint.place}  {waypoint.function}", size=11))
    parts.append(text(lanes["server"], 36 + 2 * height, "blue: pure, decides", size=12, fill=PALE))
    parts.append(text(lanes["server"], 36 + 2 * height + 18, "orange: acts", size=12, fill=PALE))
    return picture(width, 36 + len(WAY) * height + 6, parts)


# -- SVG ----------------------------------------------------------------------------------------------------


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: int,
    weight: str = "normal",
    anchor: str = "start",
    fill: str = INK,
) -> str:
    """Return a text as SVG."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}" '
        f"{FONT}>{escape(content)}</text>"
    )


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    """Return a picture with a white background as SVG."""
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{INK}"/></marker></defs>'
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return (
        "\n".join([head, tip, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"])
        + "\n"
    )


def main() -> None:
    """Draw the pictures, or compare them with the code."""
    drawn = {PICTURES / "overview-rooms.svg": draw_folders(), PICTURES / "overview-push.svg": draw_way()}
    if "--check" in sys.argv[1:]:
        sys.exit(any(path.read_text() != content for path, content in drawn.items()))
    for path, content in drawn.items():
        path.write_text(content)


if __name__ == "__main__":
    main()
