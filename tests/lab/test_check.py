"""`paceline check`: a corpus of scripts with one mistake each, and of clean scripts; the rules on their own."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigurationError
from paceline.lab.check import _error_message, check_script
from paceline.lab.mistakes import CATALOG, ScriptEvidence, find_mistakes
from paceline.lab.observations import ScriptObservation, SourceCall, unreduced_metrics
from paceline.lab.probe import compares_samples

SCRIPTS = Path(__file__).parent / "checked_scripts"
MISTAKES = sorted(SCRIPTS.glob("mistakes/*.py"))
CLEAN = sorted(SCRIPTS.glob("clean/*.py"))

# These two scripts run with every test run; `make chaos` runs all of them.
ALWAYS = {"clipping", "own_optimizer"}


def some(paths: list[Path]) -> list[Any]:
    chaos = [pytest.mark.chaos]
    return [pytest.param(each, id=each.stem, marks=() if each.stem in ALWAYS else chaos) for each in paths]


def test_the_corpus_has_at_least_twenty_mistakes_and_ten_clean_scripts() -> None:
    assert len(MISTAKES) >= 20
    assert len(CLEAN) >= 10


@pytest.mark.parametrize("script", some(MISTAKES))
def test_each_planted_mistake_is_found(script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The docstring of each script names the mistake, and a comment marks its line."""
    monkeypatch.chdir(tmp_path)
    text = script.read_text()
    expected = re.search(r"Expected: (.*)\.\"\"\"", text)
    assert expected is not None
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    found = check_script(script)
    places = [mistake.line for mistake in found if mistake.name == expected[1]]
    assert places, found
    assert not lines or lines[0] in places, found


@pytest.mark.parametrize("script", some(CLEAN))
def test_nothing_is_found_in_a_clean_script(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert check_script(script, tell=said.append) == []
    if script.stem == "own_optimizer":
        words = "2 workers x 8 = 16 samples an update; the script says 8: --joint-batch keeps 8"
        assert f"in such a run: {words}" in said


@pytest.mark.thorough
def test_the_joint_batch_is_checked_with_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [script] = [each for each in CLEAN if each.stem == "own_optimizer"]
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert check_script(script, joint_batch=True, tell=said.append) == []
    assert "in such a run: 8 samples an update, divided over 2 workers" in said
    [mistake] = check_script(script, joint_batch=True, workers=9)
    assert "cannot be divided among 9 workers" in mistake.text


def test_a_script_that_fails_alone_is_not_run_with_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\nraise ValueError('no data')\n")
    command = [sys.executable, "-m", "paceline", "check", "--json", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    (mistake,) = json.loads(ended.stdout)
    assert (mistake["name"], mistake["severity"], mistake["line"]) == ("fails alone", "error", 3)
    assert mistake["text"] == "The script fails in a single process, too: ValueError: no data"


def test_a_script_that_is_killed_alone_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n\nprint('working')\nos.kill(os.getpid(), 9)\n")
    [mistake] = check_script(script)
    expected = "The script fails in a single process, too: it was terminated by signal SIGKILL: working"
    assert mistake.text == expected


def test_bad_input_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    with pytest.raises(ConfigurationError, match=r"train\.py' does not exist"):
        check_script(script)
    script.touch()
    with pytest.raises(ConfigurationError, match="workers is 1, expected a number >= 2"):
        check_script(script, workers=1)
    with pytest.raises(ConfigurationError, match="iterations is 0, expected a number >= 1"):
        check_script(script, iterations=0)
    for timeout_s in (0.5, math.nan, math.inf):
        with pytest.raises(ConfigurationError, match=f"timeout is {timeout_s}, expected a number >= 1"):
            check_script(script, timeout_s=timeout_s)


# -- the rules --------------------------------------------------------------------------------------------

STEP = ScriptObservation("stepped", "distributed", "train.py", 9)


def names(
    *workers: list[ScriptObservation], alone: list[ScriptObservation] | None = None, **rest: object
) -> list[str]:
    evidence = ScriptEvidence([STEP] if alone is None else alone, workers, **rest)  # type: ignore[arg-type]
    return [mistake.name for mistake in find_mistakes(evidence)]


def gradients(*digests: str) -> list[ScriptObservation]:
    return [STEP, *(ScriptObservation("gradient", digest, iteration=i) for i, digest in enumerate(digests))]


ASKED = ScriptObservation("asked")


def test_equal_gradients_in_every_step_are_a_mistake() -> None:
    assert names(gradients("a", "b"), gradients("a", "b")) == ["identical workers"]
    assert names([ASKED, *gradients("a", "b")], gradients("a", "c")) == []
    assert names([ASKED, *gradients("", "")], gradients("", "")) == [], "no gradients at all"


def test_a_file_is_written_by_several_only_if_different_workers_write_it() -> None:
    mine, other = (ScriptObservation("wrote", path, "train.py", 3) for path in ("/a", "/b"))
    ours = [ASKED, STEP]
    assert names([*ours, mine, mine], [*ours, other]) == []
    assert names([*ours, mine], [*ours, mine]) == ["file written by several workers"]
    write = SourceCall("open", "train.py", 3)
    assert names([*ours, mine], [*ours, mine], writes=[write]) == ["file written by several workers"]
    assert names(ours, ours, writes=[write]) == ["file written by every worker"]


def test_a_library_that_writes_a_file_of_its_own_is_not_reported() -> None:
    assert names(*[[ASKED, STEP, ScriptObservation("wrote", "/a/cache")]] * 2) == []


def test_a_loss_that_compares_the_samples_of_a_batch_is_noted() -> None:
    compared = ScriptObservation("compared", "8", "train.py", 12)
    [mistake] = find_mistakes(ScriptEvidence([STEP], [[STEP, SHARED, compared]] * 2))
    assert (mistake.name, mistake.severity, mistake.line) == ("negatives of the worker's batch", "note", 12)
    assert "8 samples of a batch" in mistake.text
    assert "7 negatives" in mistake.text
    assert "With --joint-batch, exempt this loader" in mistake.fix  # the 8 samples may be a part of a batch


def test_labels_of_an_ordinary_classification_compare_no_samples() -> None:
    diagonal = torch.arange(8)
    assert compares_samples(torch.zeros(8, 8), diagonal)
    assert not compares_samples(torch.zeros(8, 9), diagonal), "more classes than samples"
    assert not compares_samples(torch.zeros(8, 8), diagonal.flip(0))
    assert not compares_samples(torch.zeros(8, 8), torch.eye(8)), "probabilities"
    assert not compares_samples(torch.zeros(8, 8, 8), diagonal[:, None].expand(8, 8))
    assert not compares_samples(torch.zeros(2, 2), torch.arange(2)), "two labels are often in order"


def test_errors_come_before_wrong_results_and_notes() -> None:
    worker = [
        ScriptObservation("warned", "the gradient is sparse"),
        ScriptObservation("clipped", "clip_grad_norm_", "train.py", 8),
        ScriptObservation("raised", "ValueError: 3", "train.py", 10),
        ASKED,
        STEP,
    ]
    assert names(worker, worker) == ["fails in a run", "clipping by the worker's norm", "warning"]


SCHEDULED = [
    ScriptObservation("scheduled", "CosineAnnealingLR of 48 steps", "train.py", 5, i) for i in (1, 2)
]
SHARED = ScriptObservation("distributed", "7")


def test_a_schedule_by_the_workers_iterations_is_a_mistake_unless_the_script_counts_its_part() -> None:
    assert names([STEP, SHARED, *SCHEDULED]) == ["schedule by the worker's iterations"]
    assert names([STEP, SHARED, SCHEDULED[0]]) == [], "once per epoch"
    assert names([STEP, SHARED, *SCHEDULED, ScriptObservation("measured part")]) == []
    assert names([STEP, SHARED, *SCHEDULED, ScriptObservation("asked", "worker_count")]) == []
    assert names([STEP, ASKED, *SCHEDULED]) == [], "each worker makes all iterations"
    limited = ScriptObservation("looped by progress", "updates=120")
    (mistake,) = find_mistakes(ScriptEvidence([STEP], [[STEP, ASKED, *SCHEDULED, limited]]))
    assert "updates=120" in mistake.text


@pytest.mark.parametrize(
    ("loop", "schedule", "expected"),
    [
        ("3 0", "48 16", 0),  # 3 epochs of 16 batches
        ("3 0", "24 16", 1),  # the steps of one of two workers
        ("3 0", "48 8", 1),  # a single process's, but the loader has 8 batches, because it was distributed
        ("3 0", "3 16", 0),  # once per epoch
        ("0 120", "120 0", 0),
        ("0 120", "60 0", 1),
        ("3 0", "0 16", 0),
        ("3 0", "30 16", 0),
    ],
)
def test_the_length_of_a_prepared_schedule_is_that_of_a_single_process(
    loop: str, schedule: str, expected: int
) -> None:
    worker = [
        STEP,
        ASKED,
        ScriptObservation("looped", loop),
        ScriptObservation("prepared schedule", schedule, "train.py", 4),
    ]
    assert names(worker, worker) == ["length of a part for the schedule"] * expected


def test_metrics_that_differ_are_a_mistake_and_those_that_were_not_seen_are_a_note() -> None:
    ours = [ASKED, STEP]
    one, other = (ScriptObservation("metric", value, "train.py", 7) for value in ("0.5", "0.6"))
    call = SourceCall("schedule.step(loss)", "train.py", 7)
    assert names([*ours, one], [*ours, other], metrics=[call]) == ["metric of one worker"]
    assert names([*ours, one], [*ours, one], metrics=[call]) == []
    assert names(ours, ours, metrics=[call]) == ["metric not reduced"]
    assert names(ours, ours) == []


def test_hyper_parameters_that_differ_at_every_step_are_a_mistake() -> None:
    def rates(*values: float) -> list[ScriptObservation]:
        used = [
            ScriptObservation("hyper-parameters", f"lr={value}", "train.py", 9, i)
            for i, value in enumerate(values)
        ]
        return [ASKED, STEP, *used]

    assert names(rates(0.1, 0.1), rates(0.2, 0.2)) == ["different hyper-parameters"]
    assert names(rates(0.1, 0.2), rates(0.1, 0.1)) == []
    assert names(rates(0.1), rates(0.2)) == [], "one step says little"
    prepared = ScriptObservation("prepared schedule", "0 0")
    assert names([*rates(0.1, 0.1), prepared], rates(0.2, 0.2)) == []


def test_the_source_shows_metrics_that_are_not_reduced(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "class Trainer:\n"
        "    def fit(self, sgd, loss):\n"
        "        self.plan = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)\n"
        "        self.plan.step(loss)\n"
        "        mean = paceline.reduce(loss)\n"
        "        self.plan.step(mean)\n"
        "        self.plan.step(paceline.reduce({'loss': loss})['loss'])\n"
        "        sgd.step(loss)\n"
    )
    assert [(each.call, each.line) for each in unreduced_metrics([script])] == [("self.plan.step(loss)", 4)]


def test_a_script_without_steps_is_an_error() -> None:
    assert names(alone=[]) == ["no steps"]
    (mistake,) = find_mistakes(ScriptEvidence([ScriptObservation("timed out")]))
    assert mistake.text == "The script made no step of an optimizer in the given time."
    assert "--timeout" in mistake.fix


def test_every_text_of_the_catalog_is_a_sentence() -> None:
    for _, text, fix in CATALOG.values():
        assert text[0].isupper() or text[0] in "{l"
        assert fix.endswith((".", "}"))


def test_the_whole_message_of_a_run_is_kept_without_its_traceback_and_its_files() -> None:
    lines = ["epoch 0", "error: every worker waits:", "  worker 0 waits", "the logs are in /tmp/f/run"]
    assert _error_message(lines, "/tmp/f") == "every worker waits:\n  worker 0 waits"
    assert _error_message([*lines[:2], "Traceback (most recent call last):", "  x"], "/tmp/f") == lines[1][7:]
    assert _error_message(["epoch 0"], "/tmp/f") == ""
