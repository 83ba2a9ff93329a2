"""The command line: what it explains, what it refuses, what it starts."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec import structs

import paceline
from paceline import cli
from paceline.cli.console import new_folder
from paceline.cli.run import _tell_how_to_join
from paceline.errors import ConfigurationError
from paceline.run.job_options import make_job
from paceline.studies.trained import of_script
from paceline.sync import MODELS
from tests.support.marks import chaos, thorough
from tests.support.scheduled import SLURM
from tests.support.warm import bare_environment

DEADLINE_S = 120.0  # a safety net: nothing here takes that long unless something hangs

SCRIPT = """
import sys

import torch

import paceline

print(f"worker {paceline.worker_index()} of {paceline.worker_count()}: {sys.argv}")
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
print("loss", closure().item())
"""


@dataclass
class Ended:
    """How a call of the program ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """Its standard error without frames and line breaks."""
        return " ".join(re.sub("[╭╮╰╯│─]", " ", self.stderr).split())


Call = Callable[..., Ended]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """call(*arguments): the program in this process, in an empty directory but for `train.py`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "dumb")
    for forces_colour in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(forces_colour, raising=False)

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        stdout, stderr = capsys.readouterr()
        return Ended(code, stdout, stderr)

    return call


def run_program(*arguments: str, folder: Path, **variables: str) -> Ended:
    """The program in a process of its own."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        env=bare_environment(**variables),
    ) as program:
        stdout, stderr = program.communicate(timeout=DEADLINE_S)
    return Ended(program.returncode, stdout, stderr)


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- what it explains ----------------------------------------------------------------------------------------


def test_help_says_what_the_program_is_and_names_its_commands(call: Call) -> None:
    ended = call("--help")

    assert ended.code == 0
    assert ended.stderr == ""
    assert "training on machines of unequal speed" in ended.stdout
    assert re.search(
        r"run\s+Run a script in several worker processes. python script.py runs the same script in",
        ended.stdout,
    )
    assert re.search(
        r"demo\s+Compare four sync models, and bsp with balanced batches, by training", ended.stdout
    )
    assert "--version" in ended.stdout
    assert "[bold]" not in ended.stdout


def test_help_and_messages_keep_their_brackets(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of extras stand in brackets, and rich takes these for the names of styles."""
    monkeypatch.setenv("COLUMNS", "1000")
    group = cli.console.command_line(cli.app)
    seen = []
    for name, command in [("", group), *group.commands.items()]:
        shown = " ".join(call(*name.split(), "--help").stdout.split())
        for text in [command.help, *(getattr(parameter, "help", "") for parameter in command.params)]:
            for bracketed in re.findall(r"\S*\[[^\]]*\]", (text or "").replace("\\[", "[")):
                assert bracketed in shown, name
                seen.append(bracketed)
    assert seen.count("paceline[tensorboard]") >= 2  # `run` and `serve`
    ended = call("run", "--dry-run", "train.py", "--only", "[red]", "[/]")
    assert ended.code == 0, ended.stderr
    assert ended.stdout.rstrip().endswith("train.py --only '[red]' '[/]'")


def test_every_console_prints_text_as_it_is() -> None:
    """A console that looks for the names of styles in brackets would take the extras and users' names for them."""
    source = Path(paceline.__file__).parent
    makers = [path for path in source.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())]
    assert makers == [source / "start" / "terminal.py"]


NOT_PYTHON = {
    b"if True print(1)\n": (
        "has a syntax error in line 1: invalid syntax. Nothing was started.\n",
        ", line 1\n    if True print(1)\n            ^^^^^\n",
    ),
    b"print(1)\nreturn 1\n": (
        "has a syntax error in line 2: 'return' outside function. Nothing was started.\n",
        ", line 2\n    return 1\n    ^^^^^^^^\n",
    ),
    "print('é')".encode("latin-1"): (
        "in line 1: (unicode error) 'utf-8' codec can't decode byte",
        "",
    ),
    b"print(1)\0": ("cannot be compiled: ", ""),
}
"""Bytes of a script -> what is said, and the file, the line and the caret below."""


@pytest.mark.parametrize("content", NOT_PYTHON)
def test_a_script_that_cannot_be_compiled_is_refused_before_anything_starts(
    content: bytes, call: Call
) -> None:
    words, lines = NOT_PYTHON[content]
    Path("train.py").write_bytes(content)
    before = contents(Path())
    for command in ("run", "run -m", "join 127.0.0.1:1", "check", "simulate elastic-bsp --script"):
        ended = call(*command.split(), "train" if "-m" in command else "train.py")
        assert ended.code == 2, ended
        assert ended.stderr.startswith("error: the script '")
        assert words in ended.stderr
        assert ended.stderr.endswith(lines)
        assert re.search(r'\n  File "[^"]*train.py", line', ended.stderr) or not lines
    with pytest.raises(ConfigurationError, match=r"the script .*train\.py'"):  # of a study
        of_script("train.py", Path())
    assert contents(Path()) == before


RUN_OPTIONS = {
    "--checkpoint-every": "Time between two checkpoints, such as 30s, 5min or 1h",
    "--server-device": "Device on which the servers make the steps",
    "--keep": "Number of the newest checkpoints that are kept",
    "--checkpoint-dir": "Directory for the run's checkpoints",
    "--resume": "Go on with the run in this directory",
    "--accept-changes": "Resume even if the script has changed",
    "--trust": "Do what the run directory says",
    "--force": "Use the run directory even if a run in progress holds it",
    "--on-server-loss": "if a server is lost, the run goes on from its newest checkpoint",
    "--workers": "Number of workers",
    "--devices": "Devices of the workers, one worker for each",
    "--servers": "Number of servers",
    "--sync": "bsp, asp, ssp:staleness=3, elastic-bsp:lookahead=15",
    "--import": "Import this module, which defines your own synchronization models",
    "--shards": "Number of slices",
    "--slicing": "slice the parameters into equal parts",
    "--overlap": "each shard answers pulls independently",
    "--transport": "shared memory",
    "--port": "0 means any free port",
    "--seed": "Random seed for the data order, the jitter",
    "--on-nan": "stop the run or skip the push",
    "--hyperparameters": "translated: the learning rate",
    "--guard": "What happens if training diverges",
    "--traces": "What is kept of the traces and records",
    "--run-dir": "logs, traces and results",
    "--show-all": "each line with the name of its process",
    "--stall-timeout": "silent for this many seconds",
    "--torchrun-env": "Set RANK, LOCAL_RANK, WORLD_SIZE",
    "--wire": "Codec with which gradients and weights travel",
    "--split": "How paceline.distribute divides an epoch",
    "--batch": "Sizes of the batches",
    "--joint-batch": "The batch size in the script is the size of",
    "--pace": "Minimum duration of an iteration in seconds",
    "--slowdown": "Factors >= 1",
    "--jitter": "uniform random factor",
    "--dashboard": "Serve the report of the run as a live page",
    "--tensorboard": "Write TensorBoard files with the speed, the staleness, the waiting",
    "--metrics-port": "Serve the state of the run as OpenMetrics",
    "--dry-run": "show what would be started",
}


def test_help_of_run_explains_every_option(call: Call) -> None:
    ended = call("run", "--help")

    assert ended.code == 0
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ended.stdout.partition("Options")[2]))
    assert named == {*RUN_OPTIONS, "--help"}
    for option, words in RUN_OPTIONS.items():
        [line] = [line for line in ended.stdout.splitlines() if re.search(rf"^\W*{option}\s", line)]
        assert words in line
    assert "paceline run --workers 4 --servers 2 --sync elastic-bsp:lookahead=15 train.py" in ended.stdout
    assert "Emulating unequal machines" in ended.stdout
    assert "Python script that uses paceline" in ended.stdout
    assert "Arguments of the script" in ended.stdout
    assert "[bold]" not in ended.stdout


def test_help_of_demo_explains_every_option(call: Call) -> None:
    ended = call("demo", "--help")

    assert ended.code == 0
    assert (
        "four sync models, and bsp with balanced batches, by training on handwritten digits" in ended.stdout
    )
    assert "about three minutes on two cores" in ended.stdout
    for option, words in {
        "--seeds": "median",
        "--all": "all sync models",
        "--run-dir": "logs, traces and results",
    }.items():
        [line] = [line for line in ended.stdout.splitlines() if re.search(rf"^\W*{option}\s", line)]
        assert words in line


def test_without_a_command_the_program_shows_its_help(call: Call) -> None:
    ended = call()

    assert "Run a script in several worker processes" in ended.stdout + ended.stderr


def test_the_commands_are_those_that_users_need(call: Call) -> None:
    listed = call("--help").stdout.partition("Commands")[2]

    assert re.findall(r"^\W*([a-z]+)  ", listed, re.MULTILINE) == [
        "run",
        "check",
        "serve",
        "join",
        "status",
        "report",
        "demo",
        "simulate",
        "advise",
        "study",
        "replay",
        "sync",
    ]


def test_the_version_is_the_packages(call: Call) -> None:
    ended = call("--version")

    assert (ended.code, ended.stdout, ended.stderr) == (0, f"paceline {paceline.__version__}\n", "")


def test_a_dry_run_shows_what_would_start_and_makes_nothing(call: Call, tmp_path: Path) -> None:
    ended = call(
        *("run", "--dry-run", "--workers", "4", "--servers", "2", "--sync", "elastic-bsp", "--seed", "7"),
        *("--pace", "0.05,0.05,0.05,0.15", "--jitter", "0.2", "--transport", "tcp", "--run-dir", "out/here"),
        *("train.py", "--epochs", "3", "a b"),
    )

    assert (ended.code, ended.stderr) == (0, "")
    shown = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in ended.stdout.splitlines())
    assert shown == {
        "sync model": "elastic-bsp:lookahead=15",
        "workers": "4",
        "servers": "2",
        "shards": "2, with the parameters sliced evenly, except tensors that an optimizer needs whole (auto)",
        "overlap": "each shard answers pulls independently (shards)",
        "transport": "TCP on loopback (tcp)",
        "wire": "float32",
        "data": "divided in equal shares if the sync model keeps all workers in lockstep, else on demand (auto)",
        "batches": "of equal size in all workers (equal)",
        "hyper-parameters": "of the joint batch, translated for each update (translated)",
        "emulated": "--pace 0.05,0.05,0.05,0.15 (minimum seconds per iteration), --jitter 0.2",
        "on NaN": "stop",
        "guard": "says when training diverges (tell)",
        "traces": "the last 100 MB are kept (recent)",
        "seed": "7",
        "run directory": "out/here",
        "command": f"{sys.executable} train.py --epochs 3 'a b'",
    }
    assert contents(tmp_path) == ["train.py"]


@pytest.mark.parametrize(
    "module", ["train.train", "train.__main__", "package", "package.train.more", "package.no"]
)
def test_a_module_that_does_not_exist_is_refused(module: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    ended = call("run", "--dry-run", "-m", module)

    assert (ended.code, ended.stdout) == (2, "")
    assert f"the module '{module}' was not found, or is a package without __main__.py" in ended.stderr


@pytest.mark.parametrize("module", ["installed", "installed.inner.train"])
def test_a_module_is_found_by_any_finder_that_python_asks(
    module: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Editable:  # as setuptools makes for a package that is installed in editable mode
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return PathFinder.find_spec(name, [str(tmp_path / "src")]) if name == "installed" else None

    (tmp_path / "src" / "installed" / "inner").mkdir(parents=True)
    for file in ("__init__", "__main__", "inner/train"):
        (tmp_path / "src" / "installed" / f"{file}.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    ended = call("run", "--dry-run", "-m", module)

    assert (ended.code, ended.stderr) == (0, "")
    assert f"{sys.executable} -m {module}" in ended.stdout


def test_a_dry_run_without_a_run_directory_makes_none(call: Call, tmp_path: Path) -> None:
    ended = call("run", "--dry-run", "train.py")

    assert ended.code == 0
    assert "a new directory in ./runs" in ended.stdout
    assert contents(tmp_path) == ["train.py"]


# -- what it refuses -----------------------------------------------------------------------------------------

BAD_INPUT = {
    "an unknown model": (
        ["--sync", "elastic-bps", "train.py"],
        "error: unknown sync model 'elastic-bps'; did you mean 'elastic-bsp'? Choices: asp, auto, bsp, conditions, ",
    ),
    "an empty model": (
        ["--sync", "", "train.py"],
        "error: unknown sync model ''. Choices: asp, auto, bsp",
    ),
    "a misspelt auto": (
        ["--sync", "auot", "train.py"],
        "unknown sync model 'auot'; did you mean 'auto'? Choices: asp, auto, ",
    ),
    **{
        f"{text} with auto": (
            ["--sync", text, "train.py"],
            "'auto' is not a sync model, but chooses the models for the whole run",
        )
        for text in (
            "auto,bsp@3",
            "bsp,auto@3",
            "auto,asp",
            "ssp:staleness=2,auto@5",
            "bsp@0,auto@5",
            "bsp|auto",
            "auto:",
        )
    },
    **{
        f"{text} without a start": (
            ["--sync", text, "train.py"],
            "lists several models. Say when each of them begins, as in",
        )
        for text in ("bsp,asp", "bsp,asp@3", "ssp:staleness=2,bsp@3", "bsp@0,ssp,asp:push_scale=1/n@3")
    },
    "an unknown key": (
        ["--sync", "ssp:stalenes=3", "train.py"],
        "'stalenes'; did you mean 'staleness'? Choices: execution, push_scale, staleness.",
    ),
    "a key for a model without keys": (
        ["--sync", "bsp:staleness=3", "train.py"],
        "error: unknown parameter of sync model 'bsp': 'staleness'. This model has no parameters.",
    ),
    "a key without a value": (
        ["--sync", "ssp:staleness", "train.py"],
        "'staleness' does not have the form key=value",
    ),
    "a key given twice": (
        ["--sync", "ssp:staleness=1,staleness=2", "train.py"],
        "'staleness' is given twice",
    ),
    "a value that is no number": (
        ["--sync", "ssp:staleness=three", "train.py"],
        "staleness is 'three', expected a number",
    ),
    "a negative staleness": (["--sync", "ssp:staleness=-1", "train.py"], "staleness is -1, expected"),
    "a schedule that does not begin at 0": (
        ["--sync", "bsp@5,asp@9", "train.py"],
        "the first model must begin at iteration 0",
    ),
    "a schedule without a time": (["--sync", "bsp@0,asp", "train.py"], "'asp' does not say when"),
    "a time that is none": (["--sync", "bsp@0,asp@noon", "train.py"], "'noon' is not a valid start"),
    "steps out of order": (
        ["--sync", "bsp@0,asp@9,bsp@5", "train.py"],
        "iteration 5 is listed after iteration 9",
    ),
    "more models than shards": (
        ["--servers", "1", "--sync", "bsp|asp", "train.py"],
        "names 2 sync models for 1 shards",
    ),
    "a model of the whole job for one shard": (
        ["--servers", "2", "--sync", "bsp|elastic-bsp", "train.py"],
        "elastic-bsp:lookahead=15 applies to the whole job",
    ),
    "a condition that cannot be imported": (
        ["--sync", "conditions:pull=nowhere:f", "train.py"],
        "'nowhere:f' cannot be imported here: No module named 'nowhere'",
    ),
    "a module that cannot be imported": (
        ["--import", "json", "--import", "nowhere", "train.py"],
        "the module 'nowhere' cannot be imported: ModuleNotFoundError",
    ),
    "a condition without a module": (
        ["--sync", "conditions:pull=f", "train.py"],
        "pull is 'f', expected a function or its name in the form 'module:function'",
    ),
    "an abort time without a rate": (
        ["--sync", "spec-sync:abort_time_s=1", "train.py"],
        "give both, or neither to have them tuned",
    ),
    "a base that is none": (["--sync", "spec-sync:base=bsp", "train.py"], "base is bsp, expected asp or ssp"),
    "a quorum of more workers than there are": (
        ["--workers", "2", "--sync", "bsp@0,drop-stragglers:quorum=3@9", "train.py"],
        "quorum is 3, expected at most 2, the number of workers",
    ),
    "a probability above 1": (["--sync", "pssp:probability=2", "train.py"], "probability is 2, expected"),
    "a lower bound above the upper": (
        ["--sync", "dssp:lower=5,upper=3", "train.py"],
        "lower is 5 and upper is 3, expected lower <= upper",
    ),
    "half a staleness": (["--sync", "ssp:staleness=1.5", "train.py"], "staleness is 1.5, expected"),
    "lookahead 0": (["--sync", "elastic-bsp:lookahead=0", "train.py"], "lookahead is 0, expected"),
    "0 workers": (["--workers", "0", "train.py"], "error: workers is 0, expected a whole number >= 1."),
    "-1 workers": (["--workers", "-1", "train.py"], "error: workers is -1, expected a whole number >= 1."),
    "0 servers": (["--servers", "0", "train.py"], "error: servers is 0, expected a whole number >= 1."),
    "a negative seed": (["--seed", "-1", "train.py"], "error: seed is -1, expected a whole number >= 0."),
    "a seed that no message can contain": (
        ["--seed", str(2**64), "train.py"],
        f"error: seed is {2**64}, expected a whole number < 2**64.",
    ),
    "traces of any size": (
        ["--traces", f"recent:{10**12}", "train.py"],
        f"error: traces is 'recent:{10**12}'",
    ),
    "paces that do not match the workers": (
        ["--workers", "3", "--pace", "0.1,0.2", "train.py"],
        "error: pace has 2 values for 3 workers; give one value per worker, for example 0.1,0.2,0.2.",
    ),
    "slowdowns that do not match the workers": (
        ["--workers", "2", "--slowdown", "1,1,3", "train.py"],
        "error: slowdown has 3 values for 2 workers; give one value per worker, for example 1,1.",
    ),
    "a pace that is no number": (
        ["--pace", "0.1,fast", "train.py"],
        "error: pace is '0.1,fast', expected numbers of seconds separated by commas, for example .05,.05,.15",
    ),
    "a slowdown that is no number": (
        ["--slowdown", "1,", "train.py"],
        "error: slowdown is '1,', expected numbers",
    ),
    "an empty pace": (["--pace", "", "train.py"], "error: pace is '', expected numbers"),
    "a negative pace": (
        ["--pace", "0.1,-0.1", "train.py"],
        "error: pace is -0.1 for one worker, expected a number >= 0.",
    ),
    "a pace that begins with a minus": (
        ["--pace", "-0.1,0.1", "train.py"],
        "error: pace is -0.1 for one worker",
    ),
    "a pace of nan": (["--pace", "0.1,nan", "train.py"], "error: pace is nan for one worker"),
    "a slowdown that speeds up": (
        ["--slowdown", "1,0.5", "train.py"],
        "error: slowdown is 0.5 for one worker, expected a number >= 1.",
    ),
    "a jitter of 1": (["--jitter", "1", "train.py"], "error: jitter is 1.0, expected a number in [0, 1)"),
    "a negative jitter": (
        ["--jitter", "-0.1", "train.py"],
        "error: jitter is -0.1, expected a number in [0, 1)",
    ),
    "a jitter of nan": (["--jitter", "nan", "train.py"], "error: jitter is nan, expected a number in [0, 1)"),
    "a jitter of nothing": (
        ["--jitter", "0.2", "train.py"],
        "error: jitter is 0.2, but it has no effect without pace or slowdown, and neither is set. "
        "Set one of them, or omit jitter.",
    ),
    "a port without TCP": (
        ["--port", "4242", "train.py"],
        "error: port is 4242 and transport is 'auto', but only 'tcp' uses a port, and 'auto' never chooses "
        "'tcp'. Use transport 'tcp', or omit port.",
    ),
    "a port of sockets of one machine": (
        ["--port", "4242", "--transport", "unix", "train.py"],
        "error: port is 4242 and transport is 'unix'",
    ),
    "a missing script": (["trian.py"], "error: the script 'trian.py' does not exist"),
    "a directory for a script": (["."], "error: the script '.' is not a file"),
    "no script": ([], "script"),
    "port 70000": (["--port", "70000", "train.py"], "error: port is 70000, expected a number from 0"),
    "a negative port": (["--port", "-1", "train.py"], "error: port is -1, expected a number from 0"),
    "a run directory inside a file": (
        ["--run-dir", "train.py/run", "train.py"],
        "error: the run directory train.py/run cannot be written; choose another one.",
    ),
    "a run directory that is a file": (
        ["--run-dir", "train.py", "train.py"],
        "error: the run directory train.py cannot be written; choose another one.",
    ),
    "an empty run directory": (
        ["--run-dir", "", "train.py"],
        "error: the name of the run directory is empty",
    ),
    "an unknown transport": (
        ["--transport", "udp", "train.py"],
        "error: unknown transport 'udp'. Choices: auto, shm, tcp, unix.",
    ),
    "an unknown slicing": (
        ["--slicing", "random", "train.py"],
        "error: unknown slicing 'random'. Choices: auto, by-parameter, even.",
    ),
    "fewer shards than servers": (
        ["--servers", "3", "--shards", "2", "train.py"],
        "error: shards is 2 and servers is 3, but each server needs at least one shard.",
    ),
    "no overlap under a model of other waits": (
        ["--overlap", "off", "--sync", "asp", "train.py"],
        "error: overlap is 'off', which requires the sync model bsp, but the sync model is asp.",
    ),
    "a stall timeout of 0": (
        ["--stall-timeout", "0", "train.py"],
        "error: stall_timeout is 0.0, expected a number of seconds > 0",
    ),
    "an unknown way with NaN": (
        ["--on-nan", "ignore", "train.py"],
        "error: unknown on_nan 'ignore'. Choices: skip, stop.",
    ),
    "unknown hyper-parameters": (
        ["--hyperparameters", "scaled", "train.py"],
        "error: unknown hyperparameters 'scaled'; did you mean 'translated'? Choices: raw, translated.",
    ),
    "an unknown overlap": (
        ["--overlap", "of", "train.py"],
        "error: unknown overlap 'of'; did you mean 'off'? Choices: off, shards.",
    ),
    "an unknown split": (
        ["--split", "dynamc", "train.py"],
        "error: unknown split 'dynamc'; did you mean 'dynamic'? Choices: auto, dynamic, static.",
    ),
    "unknown sizes of batches": (
        ["--batch", "balaned", "train.py"],
        "error: unknown batch 'balaned'; did you mean 'balanced'? Choices: balanced, equal.",
    ),
    "workers that are no number": (
        ["--workers", "two", "train.py"],
        "error: workers is 'two', expected a whole number >= 1.",
    ),
    "an unknown option": (["--worker", "3", "train.py"], "--workers"),
}


@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2_and_makes_nothing(
    case: str, dry: bool, call: Call, tmp_path: Path
) -> None:
    arguments, words = BAD_INPUT[case]
    ended = call("run", *(["--dry-run"] if dry else []), *arguments)

    assert words in ended.words
    assert (ended.code, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    if ended.stderr.startswith("error: "):
        assert ended.stderr.count("\n") == 1
    assert contents(tmp_path) == ["train.py"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "tr\udce4in.py"),
        ("run", "train.py", "\udce4"),
        ("run", "--run-dir", "\udce4", "train.py"),
        ("join", "127.0.0.1:1", "train.py", "\udce4"),
        ("status", "\udce4"),
    ],
    ids=ascii,
)
def test_a_command_that_is_not_utf_8_is_refused(
    arguments: tuple[str, ...], call: Call, tmp_path: Path
) -> None:
    ended = call(*arguments)

    assert (ended.code, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: '.*\\udce4.*' is not UTF-8; .*\.\n", ended.stderr)
    assert contents(tmp_path) == ["train.py"]


def test_a_current_directory_that_is_not_utf_8_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "\udce4").mkdir()
    monkeypatch.chdir(tmp_path / "\udce4")
    ended = call("run", "../train.py")

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.endswith("use only UTF-8 in the command and in the name of the current directory.\n")
    assert contents(Path()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "a" * 300),
        ("run", "--resume", "a" * 300),
        ("report", "a" * 300),
        ("status", "a" * 300),
        ("simulate", "a" * 300),
        ("simulate", "cluster.toml", "--sync", "bsp", "--iterations", "1", "--out", "a" * 300),
    ],
    ids=lambda arguments: " ".join(arguments[:-1]),
)
def test_a_path_that_the_system_does_not_allow_is_refused(
    arguments: tuple[str, ...], call: Call, tmp_path: Path
) -> None:
    (tmp_path / "cluster.toml").write_text("[[workers]]\ncompute = '1 s'\n")
    ended = call(*arguments)

    assert (ended.code, ended.stdout) == (2, "")
    assert re.fullmatch("error: .*'a{300}'.*File name too long\\.\n", ended.stderr)


def test_a_script_that_is_an_open_file_of_the_command_is_refused(call: Call, tmp_path: Path) -> None:
    with (tmp_path / "train.py").open() as source:
        path = f"/dev/fd/{source.fileno()}"
        ended = call("run", "--dry-run", path)

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: the script '{path}' is not a file; save the script in a file, and give the path of this file.\n"
    )


def test_a_current_directory_that_was_deleted_is_named(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended = call("run", "train.py")

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == "error: the current directory was deleted; change to another directory.\n"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory in which nobody can make one")
def test_a_run_directory_that_nobody_can_make_is_refused(call: Call) -> None:
    ended = call("run", "--run-dir", "/proc/paceline-run", "train.py")

    assert ended.code == 2
    assert re.fullmatch(
        r"error: the run directory /proc/paceline-run cannot be written.*--run-dir\.\n", ended.stderr
    )


@pytest.mark.parametrize("command", ["run train.py", "simulate cluster.toml --iterations 1 --sync bsp"])
def test_a_runs_folder_that_is_a_link_to_nowhere_is_refused(command: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[[workers]]\ncompute = '1 s'\n")
    (tmp_path / "runs").symlink_to("nowhere")
    ended = call(*command.split())

    assert (ended.code, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: .*'?runs'?.*\.\n", ended.stderr)


def test_commands_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "simulate-now")
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as seen by two commands at the same time
    folders = [new_folder(None, "simulate") for _ in range(3)]

    assert folders == [Path("runs", f"simulate-now{number}") for number in ("", "-2", "-3")]


def test_a_runs_folder_that_cannot_be_made_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder of runs would be")
    ended = call("run", "train.py")

    assert ended.code == 2
    assert re.fullmatch(r"error: the run directory runs cannot be written.*--run-dir\.\n", ended.stderr)


@pytest.mark.parametrize("left", ["summary.json", "trace-shard-0.jsonl"])
def test_a_run_directory_that_holds_a_run_is_refused_and_left_alone(
    left: str, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / left).write_text("precious")
    ended = call("run", "--run-dir", "old", "train.py")

    assert ended.code == 2
    assert ended.stderr == "error: the run directory old already contains a run; choose another.\n"
    assert contents(tmp_path) == ["old", f"old/{left}", "train.py"]
    assert (tmp_path / "old" / left).read_text() == "precious"


def test_a_port_in_use_is_refused(call: Call, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = call("run", "--transport", "tcp", "--port", str(port), "train.py")

    assert ended.code == 2
    assert ended.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: it is in use. Choose another port, or 0 for any free port.\n"
    )
    assert contents(tmp_path) == ["train.py"]


def test_an_unknown_command_is_refused_with_the_nearest(call: Call) -> None:
    ended = call("rnu", "train.py")

    assert ended.code == 2
    assert ended.stderr == (
        "error: unknown command 'rnu'; did you mean 'run'? Choices: advise, check, demo, join, replay, report, run, "
        "serve, simulate, status, study, sync.\n"
    )


@pytest.mark.parametrize("seeds", ["0", "'some'"])
def test_a_demo_with_no_seeds_is_refused(seeds: str, call: Call, tmp_path: Path) -> None:
    ended = call("demo", "--seeds", seeds.strip("'"))

    assert ended.code == 2
    assert ended.stderr == f"error: seeds is {seeds}, expected a whole number >= 1.\n"
    assert contents(tmp_path) == ["train.py"]


NONSENSE = "nonsense!"
ANY_NAME = {
    "--run-dir",
    "--out",
    "--observer",
    "--command",
    "--tensorboard",
    "--checkpoint-dir",
}  # options whose value may be any text
NEED_SERVERS = {("join", "--listen"), ("join", "--server-device")}
REQUIRED = {  # what each command needs besides the option
    "run": ["--dry-run", "train.py"],
    "check": ["train.py"],
    "join": ["127.0.0.1:1", "train.py"],
    "join --slurm": ["train.py"],
    "status": ["127.0.0.1:1"],
    "simulate": ["elastic-bsp"],
    "advise": ["."],
    "replay": ["."],
    "study": ["study.toml"],
}


def options_with_values() -> list[tuple[str, str]]:
    """Every option of every command, except for flags."""
    commands: Mapping[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    return [
        (name, option)
        for name, command in commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.is_flag
        if (option := max(parameter.opts, key=len)) not in ANY_NAME
    ]


@pytest.mark.parametrize(("command", "option"), options_with_values())
def test_nonsense_for_any_option_is_refused_in_one_sentence_that_names_it(
    command: str, option: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SLURM, "PACELINE_SECRET": "0" * 64}.items():
        monkeypatch.setenv(name, value)
    brings = ["--servers", "1"] if (command, option) in NEED_SERVERS else []
    # The value of --dashboard may be left out, and what follows is then the script.
    given = [f"{option}={NONSENSE}"] if option == "--dashboard" else [option, NONSENSE]
    ended = call(*command.split(), *brings, *given, *REQUIRED.get(command, []))

    assert (ended.code, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: .*[.)]\n", ended.stderr)  # one line
    assert NONSENSE in ended.stderr
    key = option.removeprefix("--").replace("-", "_")
    assert f"{key} is {NONSENSE!r}, expected " in ended.stderr or key not in NUMBERS
    assert contents(tmp_path) == ["train.py"]


NUMBERS = {
    *(
        "workers",
        "servers",
        "shards",
        "seed",
        "port",
        "iterations",
        "samples",
        "batch_size",
        "seeds",
        "rejoin",
    ),
    *("wait", "timeout", "stall_timeout", "jitter", "pace", "slowdown", "remote_servers"),
}

WRONG_PLACES = {
    "neither a run nor an address": (
        ["status", "foo"],
        "error: there is no directory 'foo'; name the directory",
    ),
    "a directory that is no run": (["status", "/"], "error: / is not the directory of a run; name one"),
    "no run in progress": (["status"], "error: no run is in progress in ./runs; name the directory of a run"),
    "an address without a port": (["status", "foo:"], "error: the address is 'foo:', expected HOST:PORT"),
    "an address to join without a port": (
        ["join", "foo", "train.py"],
        "error: the address is 'foo', expected HOST:PORT",
    ),
    "a script in the place of the address": (
        ["join", "train.py"],
        "error: the address is 'train.py', expected HOST:PORT",
    ),
    "an address with a port that is none": (
        ["status", "foo:70000"],
        "error: the address is 'foo:70000', expected HOST:PORT",
    ),
    "a missing script to join with": (
        ["join", "foo:1", "trian.py"],
        "error: the script 'trian.py' does not exist",
    ),
    "a missing script to check": (["check", "trian.py"], "error: the script 'trian.py' does not exist"),
    "a missing script to simulate": (
        ["simulate", "elastic-bsp", "--script", "trian.py"],
        "error: the script 'trian.py' does not exist",
    ),
    "a directory of a run that does not exist": (
        ["advise", "nowhere"],
        "error: the directory 'nowhere' does not exist; give the directory of a run",
    ),
    "a directory of a run that is a file": (
        ["advise", "train.py"],
        "error: 'train.py' is not a directory; give the directory of a run",
    ),
    "a cluster file that does not exist": (
        ["simulate", "elastic-bps"],
        "error: the cluster file elastic-bps cannot be read: No such file or directory. Did you mean 'elastic-bsp'? "
        "Give the path of a TOML file",
    ),
}


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_a_wrong_place_is_named_before_a_secret_is_asked_for(case: str, call: Call, tmp_path: Path) -> None:
    arguments, words = WRONG_PLACES[case]
    ended = call(*arguments)

    assert ended.code == 2
    assert ended.stderr.startswith(words)
    assert contents(tmp_path) == ["train.py"]


@pytest.mark.processes
def test_bad_input_in_a_process_of_its_own_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run_program("-m", "paceline", "run", "--workers", "0", "train.py", folder=tmp_path)

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == "error: workers is 0, expected a whole number >= 1.\n"
    assert contents(tmp_path) == ["train.py"]


NEEDS_TORCH = [
    *("run --dry-run", "join 127.0.0.1:1"),
    *thorough("run --devices cpu", "serve", "demo --quick", "check"),
]


@pytest.mark.processes
@pytest.mark.parametrize("command", NEEDS_TORCH)
def test_without_torch_a_command_says_for_which_python_to_install_it(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    program = "import sys; sys.modules['torch'] = None; from paceline import cli; cli.main()"
    script = [] if command.startswith(("serve", "demo")) else ["train.py"]
    ended = run_program("-c", program, *command.split(), *script, folder=tmp_path)

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: torch is not installed for {sys.executable}, the Python that runs this command; run: "
        f"{sys.executable} -m pip install torch\n"
    )
    assert contents(tmp_path) == ["train.py"]


# -- options in the wrong place ------------------------------------------------------------------------------

STRAYS = {
    "with a value": (["--workers", "4"], "--workers"),
    "with a value after =": (["--workers=4"], "--workers"),
    "short": (["-n", "4"], "-n"),
    "short, with its value": (["-n4"], "-n"),
    "a flag": (["--epochs", "3", "--dry-run"], "--dry-run"),
    "several, one twice": (["--sync", "asp", "--lr", "1", "-n", "4", "--sync=bsp"], "--sync, -n"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_options_after_the_script_that_look_like_ours_are_warned_of_and_go_to_the_script(
    case: str, call: Call
) -> None:
    arguments, named = STRAYS[case]
    ended = call("run", "--dry-run", "train.py", *arguments)

    assert ended.code == 0
    assert ended.stderr == (
        f"warning: options after train.py are passed to the script: {named}. Options for paceline must come before "
        f"the script: paceline run {named.replace(',', '')} ... train.py. To silence this warning, write -- before "
        f"the script: paceline run -- train.py {named.replace(',', '')} ...\n"
    )
    assert re.search(r"^workers\s+2\s*$", ended.stdout, re.MULTILINE)
    assert " ".join([sys.executable, "train.py", *arguments]) in ended.stdout


@pytest.mark.parametrize("option", RUN_OPTIONS)
def test_every_option_of_run_is_known_to_the_warning(option: str, call: Call) -> None:
    assert f"passed to the script: {option}. " in call("run", "--dry-run", "train.py", option).stderr


NO_STRAYS = {
    "the script's own": ["--epochs", "3", "--worker", "4", "-m", "-name", "-", "workers", "--help"],
    "after a separator": ["--", "--workers", "4"],
    "none": [],
}


@pytest.mark.parametrize("case", NO_STRAYS)
def test_arguments_that_are_the_scripts_own_are_not_warned_of(case: str, call: Call) -> None:
    ended = call("run", "--dry-run", "--workers", "3", "train.py", *NO_STRAYS[case])

    assert (ended.code, ended.stderr) == (0, "")
    assert " ".join([sys.executable, "train.py", *NO_STRAYS[case]]) in ended.stdout


def test_a_separator_before_the_script_says_that_what_follows_is_the_scripts_own(call: Call) -> None:
    ended = call("run", "--dry-run", "--workers", "3", "--", "train.py", "--workers", "4")

    assert (ended.code, ended.stderr) == (0, "")
    assert f"{sys.executable} train.py --workers 4" in ended.stdout


# -- what it starts ------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_script_runs_alone_as_one_ordinary_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run_program("-W", "error", "train.py", "--epochs", "3", folder=tmp_path)

    assert (ended.code, ended.stderr) == (0, "")
    first, loss = ended.stdout.splitlines()
    assert first == "worker 0 of 1: ['train.py', '--epochs', '3']"
    assert loss.startswith("loss ")
    assert contents(tmp_path) == ["train.py"]


def test_serve_quotes_the_file_with_the_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my run").mkdir()
    job = make_job(workers=1, joined=True, transport="tcp", dry_run=True)
    job = structs.replace(job, run_dir=str(tmp_path / "my run"), token="0" * 64)
    _tell_how_to_join("tls:10.0.0.1:29600", job, None, is_new=True)
    file = tmp_path / "my run" / "secret"
    assert f"PACELINE_SECRET=$(cat '{file}') paceline join 10.0.0.1:29600 SCRIPT" in capsys.readouterr().err


@pytest.mark.processes
def test_run_gives_the_script_its_arguments_and_shows_what_worker_0_prints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = [
        "--epochs",
        "3",
        "--api-key",
        "open sesame",
        "--sync",
        "x",
        "--workers=9",
        "-n",
        "--help",
        "--",
        "-",
    ]
    ended = run_program(
        *("-m", "paceline", "run", "--workers", "2", "--servers", "1", "--sync", "asp", "train.py"),
        *arguments,
        folder=tmp_path,
    )

    assert ended.code == 0
    lines = ended.stdout.splitlines()
    assert lines[0] == f"worker 0 of 2: {['train.py', *arguments]}"
    assert lines[1].startswith("loss ")
    assert "worker 1 of 2" not in ended.stdout
    assert ended.stderr.startswith(
        "warning: options after train.py are passed to the script: --sync, --workers, -n. "
    )
    assert "Traceback" not in ended.stderr
    shown = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines[2:-2])
    assert shown.keys() - {"idle"} == {
        "sync",
        "duration",
        "gradients",
        "updates",
        "waiting",
        "staleness",
        "gap",
    }
    assert shown["sync"] == "asp"
    assert shown["gradients"].startswith("8 (")
    assert shown["updates"] == "8 (1 gradient each, on average)"
    assert shown["staleness"].endswith(" (in updates)")
    assert shown["gap"].endswith(" (in iterations)")
    [run_dir] = (tmp_path / "runs").iterdir()
    assert lines[-2:] == [f"weights, traces and logs: {run_dir}", f"report: {run_dir / 'report.html'}"]
    assert (run_dir / "worker-1.log").read_text().startswith(f"worker 1 of 2: {['train.py', *arguments]}\n")
    assert {"summary.json", "weights.safetensors", "trace-shard-0.jsonl"} <= set(contents(run_dir))
    for description in ("run.json", "summary.json"):  # secrets are hidden there
        assert "--api-key" in (run_dir / description).read_text()
        assert "open sesame" not in (run_dir / description).read_text()


@pytest.mark.processes
def test_characters_that_the_terminal_cannot_show_are_escaped_and_the_output_goes_on(tmp_path: Path) -> None:
    prints = """
import sys

for words in ("loss \u2193", "\xe4", "last words"):
    sys.stdout.buffer.write(f"{words}\\n".encode())
    sys.stdout.buffer.flush()
"""
    (tmp_path / "train.py").write_text(SCRIPT + prints, encoding="utf-8")
    ended = run_program(
        *("-m", "paceline", "run", "--workers", "1", "train.py"),
        folder=tmp_path,
        PYTHONIOENCODING="latin-1",
    )

    assert ended.code == 0, ended.stderr
    assert "loss \\u2193\n" in ended.stdout
    assert "last words\n" in ended.stdout
    assert "weights, traces and logs: " in ended.stdout
    assert "Traceback" not in ended.stderr


NAN_SCRIPT = """
import torch

import paceline

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for iteration in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    if iteration > 0:
        model.weight.grad[0, 1] = float("nan")
    optimizer.step()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shards", "pushes"), [(2, "76 of 80 pushes to 2 shards"), *chaos((1, "38 of 40 pushes"))]
)
def test_the_summary_says_how_many_pushes_were_left_out(shards: int, pushes: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAN_SCRIPT)
    ended = run_program(
        *("-m", "paceline", "run", "--workers", "2", "--servers", "1", "--shards", str(shards)),
        *("--on-nan", "skip", "train.py"),
        folder=tmp_path,
    )

    assert ended.code == 0
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("left out")]
    assert line.split(maxsplit=2)[2].rstrip() == f"{pushes} (no usable gradient, or too late)"


# -- paceline sync ---------------------------------------------------------------------------------------------


def test_sync_lists_every_model(call: Call) -> None:
    for arguments in (["sync"], ["sync", "--list"]):
        ended = call(*arguments)
        assert ended.code == 0
        for name in MODELS:
            assert re.search(rf"^{name}\b", ended.stdout, re.MULTILINE)


def test_sync_explains_one_model(call: Call) -> None:
    ended = call("sync", "dssp")
    assert ended.code == 0
    for words in ("DSSP, dynamic stale synchronous parallel", "Admission:", "Guarantee:", "Use:", "upper:"):
        assert words in ended.stdout


def test_sync_of_an_unknown_model_is_one_sentence(call: Call) -> None:
    ended = call("sync", "spec-snyc")
    assert ended.code == 2
    assert ended.stderr.startswith("error: unknown sync model 'spec-snyc'; did you mean 'spec-sync'?")
