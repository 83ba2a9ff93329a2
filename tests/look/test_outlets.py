"""What users want to look at during a run: the options are checked before anything starts."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli import app
from paceline.cli.options import completed
from paceline.errors import ConfigurationError
from paceline.look import show_process as wanted_module
from paceline.look.show_process import Outlets, open_outlets

PORT_RANGE = "expected a port from 0 to 65535."
EXPECTED = "expected a port such as 8000, or HOST:PORT such as 0.0.0.0:8000."


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_without_options_there_is_no_outlet() -> None:
    assert not open_outlets()
    assert not open_outlets(dashboard=False)
    assert open_outlets() == Outlets()


@pytest.mark.parametrize(
    ("wanted", "host"), [(True, "127.0.0.1"), ("", "127.0.0.1"), (0, "127.0.0.1"), ("[::1]:0", "::1")]
)
def test_the_page_listens_on_loopback_by_default(wanted: bool | int | str, host: str) -> None:
    with open_outlets(dashboard=wanted) as outlets:
        assert outlets
        assert outlets.dashboard is not None
        assert outlets.dashboard.host == host
        assert outlets.dashboard.sock.getsockname()[:2] == (host, outlets.dashboard.port)


@pytest.mark.parametrize("wanted", ["abc", "99999", 99999, "-1", "127.0.0.1", ":8000", "127.0.0.1:x", "80 "])
@pytest.mark.parametrize("name", ["dashboard", "metrics_port"])
def test_a_port_that_is_none_is_refused(name: str, wanted: int | str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        open_outlets(**{name: wanted})  # type: ignore[arg-type]
    assert str(refusal.value) in {f"{name} is {wanted!r}, {words}" for words in (PORT_RANGE, EXPECTED)}


def test_a_port_that_is_taken_is_refused(taken: int) -> None:
    with pytest.raises(ConfigurationError, match=f"^dashboard is {taken}: .*it is in use"):
        open_outlets(dashboard=taken)
    with pytest.raises(ConfigurationError, match=f"^metrics_port is '127.0.0.1:{taken}': .*it is in use"):
        open_outlets(dashboard=True, metrics_port=f"127.0.0.1:{taken}")


def test_a_directory_for_tensorboard_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(
            ConfigurationError, match=r"one of its parent folders, is a file; give the path of a directory\.$"
        ):
            open_outlets(tensorboard=path)
    with pytest.raises(ConfigurationError, match="cannot be created"):
        open_outlets(tensorboard="")
    assert open_outlets(tensorboard=tmp_path / "new").tensorboard == str(tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("metrics_port", "prometheus-client")]
)
def test_a_missing_package_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(wanted_module, "find_spec", lambda module: None)
    extra = "tensorboard" if name == "tensorboard" else "metrics"
    words = (
        f"{name} requires the package {package}, which is not installed; run: pip install 'paceline[{extra}]'"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(words)}$"):
        open_outlets(**{name: "0"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dashboard", "PORT"], "it is in use"),
        (["--dashboard=PORT"], "it is in use"),
        (["--dashboard", "99999"], "from 0 to 65535"),
        (["--metrics-port", "x"], "expected a port"),
        (["--tensorboard", "FILE"], "is a file"),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_the_command_line_refuses_in_one_sentence_before_anything_starts(
    tmp_path: Path, taken: int, command: str, options: list[str], words: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    given = [option.replace("PORT", str(taken)).replace("FILE", str(script)) for option in options]
    run_dir = tmp_path / "run"
    arguments = [command, f"--run-dir={run_dir}", *given, *([str(script)] if command == "run" else [])]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)
    assert not run_dir.exists()


def test_launch_refuses_before_anything_starts(tmp_path: Path, taken: int) -> None:
    with pytest.raises(ConfigurationError, match="it is in use"):
        paceline.launch(print, workers=1, dashboard=taken, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_leaves_the_port_free(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    result = CliRunner().invoke(app, ["run", "--dashboard", "--dry-run", str(script)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dashboard", "train.py"], ["--dashboard=", "train.py"]),
        (["--dashboard", "8000", "train.py"], ["--dashboard=8000", "train.py"]),
        (["--dashboard", "--", "train.py"], ["--dashboard=", "--", "train.py"]),
        (["--", "train.py", "--dashboard"], ["--", "train.py", "--dashboard"]),
        (["train.py", "--dashboard", "7"], ["train.py", "--dashboard", "7"]),
        (["-n", "--dashboard", "x"], ["-n", "--dashboard", "x"]),
        (["--seed=3", "--dashboard"], ["--seed=3", "--dashboard="]),
        (["-m", "--dashboard", "[::1]:80", "module"], ["-m", "--dashboard=[::1]:80", "module"]),
    ],
)
def test_an_option_with_an_optional_value_takes_only_what_looks_like_one(
    arguments: list[str], expected: list[str]
) -> None:
    assert completed(arguments, {"-n", "--seed", "--dashboard"}) == expected


def test_a_command_without_a_script_takes_any_word_for_the_value() -> None:
    assert completed(["--dashboard", "x"], set(), mixed=True) == ["--dashboard=x"]
    assert completed(["--dashboard", "-n4"], set(), mixed=True) == ["--dashboard=", "-n4"]


def test_help_shows_the_options() -> None:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert "[[HOST:]PORT]" in result.output
    assert "Looking at the run" in result.output
