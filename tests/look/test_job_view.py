"""What the terminal shows of a job: in every width and height, no word is cut, and what matters most is there."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from paceline.core.status import JobStatus, WorkerStatus
from paceline.look.models import ModelsTable, page_text, pages
from paceline.look.status import LONG_LINE, StatusView, figures, progress_line, progress_words, title
from paceline.start import display as run_display
from paceline.words import shortened

WIDTHS = (40, 60, 80, 120, 200)
STATES = ("computing", "computing", "waiting", "pulling", "computing", "stopped by a signal")


def job(workers: int) -> JobStatus:
    """A job in which all others wait for worker 3."""
    rows = tuple(
        WorkerStatus(
            worker,
            "this machine",
            "computing" if worker == 3 else STATES[worker % len(STATES)],
            0.1 * worker,
            100 + worker if worker != 3 else 90,
            0.25 + worker / 100,
            12.5 * worker,
            worker,
            "" if worker == 3 else "2 of 4 workers have pushed for round 12",
            () if worker == 3 else (3,),
        )
        for worker in range(workers)
    )
    return JobStatus(
        "elastic-bsp:lookahead=4",
        2,
        75.2,
        rows,
        progress=0.376,
        left_s=12.4,
        samples_per_s=1240.3,
        loss=0.3104,
        epoch=4,
        epochs=10,
        epoch_progress=0.76,
        awaited=(3,),
        awaited_s=2.5,
    )


def drawn(status: JobStatus, width: int, height: int = 24, lines: int | None = None) -> list[str]:
    return printed(StatusView(status, lines=lines), width, height)


def printed(shown: RenderableType, width: int, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(shown, crop=False)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_line_of_progress_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the state may still be the one before; and a long run's line may stay as it is."""
    monkeypatch.setattr(run_display, "PLAIN_INTERVAL_S", 0.0)
    run: Any = SimpleNamespace(
        job=SimpleNamespace(workers=4, joined=False, emulated=""), status=job(4), refresh=lambda: None
    )
    console = Console(file=io.StringIO(), width=200)
    output = console.file
    assert isinstance(output, io.StringIO)
    progress = run_display.ProgressDisplay(run, console)
    progress.update()
    progress.update()
    run.status = msgspec.structs.replace(run.status, elapsed_s=75.3)
    progress.update()
    assert output.getvalue().splitlines() == [progress_line(job(4))]
    run.status = msgspec.structs.replace(run.status, progress=0.5)
    progress.update()
    assert len(output.getvalue().splitlines()) == 2


def words(lines: Sequence[str]) -> set[str]:
    """The words of a text, without the ellipses after shortened texts."""
    return {word.rstrip("…").rstrip(",;:") for line in lines for word in line.split()} - {""}


@pytest.mark.parametrize("workers", [1, 4, 64])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_cut_and_no_line_is_too_long(width: int, workers: int) -> None:
    lines = drawn(job(workers), width)
    assert max(map(len, lines)) <= width
    assert words(lines) <= words(drawn(job(workers), LONG_LINE))
    said = " ".join(lines)
    assert (
        "37 % (epoch 4 of 10), 1,240 samples/s, loss 0.31, 12 s left; waiting for worker 3 (for 2.5 s)"
        in said
    )


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (40, ["worker", "state", "iteration"]),
        (60, ["worker", "state", "for", "iteration", "loss"]),
        (80, ["worker", "state", "for", "iteration", "loss", "samples/s"]),
        (120, ["worker", "state", "for", "iteration", "loss", "samples/s", "staleness", "waits", "for"]),
        (200, ["worker", "state", "for", "iteration", "loss", "samples/s", "staleness", "waits", "for"]),
    ],
)
def test_less_important_columns_are_left_out_in_a_narrow_terminal(width: int, columns: list[str]) -> None:
    for workers in (6, 64):
        [heading] = [line for line in drawn(job(workers), width) if line.startswith("worker  ")]
        assert heading.split() == columns


def test_the_reason_of_a_wait_ends_after_a_word() -> None:
    reason = "2 of 4 workers have pushed for round 12; last: worker 3"
    assert drawn(job(4), 200)[3].endswith(reason)
    assert drawn(job(4), 90)[4].endswith("  2 of 4 workers have…")


@pytest.mark.parametrize("height", [10, 12, 24, 60])
@pytest.mark.parametrize("workers", [4, 64, 1000])
def test_the_view_fits_the_height_and_shows_those_that_are_awaited_stopped_or_slowest(
    workers: int, height: int
) -> None:
    lines = drawn(job(workers), 80, lines=height)
    assert len(lines) == min(height, len(drawn(job(workers), 80)))
    heading = next(place for place, line in enumerate(lines) if line.startswith("worker  "))
    rows = [int(found[0]) for line in lines[heading + 1 :] if (found := re.match(r"\d+(?=  +[a-z])", line))]
    assert rows == sorted(rows)
    assert 3 in rows
    left_out = workers - len(rows)
    if not left_out:
        return
    rest = " ".join(lines[heading + 1 + len(rows) :])
    assert rest.startswith(f"{left_out} more workers: ")
    counts = [int(part.split()[0]) for part in rest.partition(": ")[2].split(", ")]
    assert sum(counts) == left_out
    assert counts == sorted(counts, reverse=True)
    stopped = [worker for worker in range(workers) if worker % len(STATES) == 5]
    assert set(rows) <= {3, *stopped} or set(stopped) < set(rows)


def test_the_line_of_progress_is_as_short_for_many_workers_as_for_few() -> None:
    figures = "37 % (epoch 4 of 10), 1,240 samples/s, loss 0.31, 12 s left"
    few = msgspec.structs.replace(job(4), sync="asp")
    assert (
        progress_line(few)
        == f"asp, 4 workers, 2 servers, 1 min 15 s: {figures}; waiting for worker 3 (for 2.5 s)"
    )
    many = progress_line(job(1000))
    counts = "501 computing, 167 waiting, 166 pulling, 166 stopped by a signal"
    assert f": {figures}; " in many
    assert sorted(counts.split(", ")) == sorted(many.split("; ")[1].split(", "))
    assert len(many) < len(progress_line(job(12))) + 20


def test_before_training_the_line_says_what_the_workers_do() -> None:
    rows = tuple(WorkerStatus(worker, "this machine", "before its first forward pass") for worker in (0, 1))
    status = JobStatus("bsp", 1, 4.0, (*rows, WorkerStatus(2, "this machine", "starting")))
    assert progress_line(status) == (
        "bsp, 3 workers, 1 server, 4 s: 2 before their first forward pass, 1 starting"
    )


def test_a_run_with_vacancies_says_how_many_workers_it_may_have() -> None:
    status = msgspec.structs.replace(job(4), sync="asp", shortage="1 of at least 2 workers", main_worker=2)
    assert title(status, 16) == (
        "asp, 4 of 16 workers, 2 servers, 1 min 15 s, worker 2 is the main worker, waits for others to join: "
        "1 of at least 2 workers"
    )


@pytest.mark.parametrize(
    ("known", "said"),
    {
        "nothing": ({}, []),
        "an epoch": ({"epoch": 3}, ["epoch 3"]),
        "a part of it": ({"epoch": 3, "epoch_progress": 0.801}, ["epoch 3 (80 % of it)"]),
        "a limit on updates": ({"progress": 0.5, "left_s": 7260.0}, ["50 %", "2 h 1 min left"]),
        "an end that is near": ({"progress": 0.999, "left_s": 0.2}, ["99 %", "0 s left"]),
        "the end": ({"progress": 1.0, "left_s": 0.0}, ["100 %", "0 s left"]),
        "no samples yet": ({"samples_per_s": 0.0}, ["0.0 samples/s"]),
        "a loss that diverges": ({"loss": math.nan}, ["loss nan"]),
        "a small loss": ({"loss": 0.00012345}, ["loss 0.000123"]),
    }.values(),
)
def test_what_is_unknown_is_left_out(known: dict[str, float], said: list[str]) -> None:
    status = JobStatus("asp", 1, 5.0, (), **known)  # type: ignore[arg-type]
    assert figures(status) == said
    assert progress_words(status) == ", ".join(said)


@pytest.mark.parametrize(
    ("width", "said"), [(30, "round 12; last: worker 1"), (18, "round 12; last…"), (9, "round 12…"), (5, "…")]
)
def test_a_text_is_shortened_after_a_word(width: int, said: str) -> None:
    assert shortened("round 12; last: worker 1", width) == said


# -- the descriptions of the sync models ----------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_the_descriptions_of_the_sync_models_are_divided_between_words(width: int) -> None:
    every: list[RenderableType] = [ModelsTable(pages()), *map(page_text, pages())]
    for shown in every:
        narrow, wide = (printed(shown, each) for each in (width, LONG_LINE))
        assert sorted(" ".join(narrow).split()) == sorted(" ".join(wide).split())
        # Only a word that is longer than a line is not divided.
        assert [line for line in narrow if len(line) > width and " " in line.strip()] == []


def test_a_narrow_terminal_shows_the_description_of_a_model_below_it() -> None:
    lines = printed(ModelsTable(pages()), 40)
    place = lines.index("asp:push_scale=1")
    assert lines[place + 1] == "    no worker waits."
    assert "asp:push_scale=1            no worker waits." in printed(ModelsTable(pages()), 80)
