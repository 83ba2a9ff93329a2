"""What would be uploaded: the distributions, their metadata, and the wheel in an environment of its own.

Only `make release` runs these tests. They build the distributions into `dist/`, and install the wheel from an index of
packages, with all that it requires, in an environment that has nothing else.
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

import paceline

if not os.environ.get("PACELINE_RELEASE"):
    pytest.skip("only `make release` builds and installs the package", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-release" / "bin"
DIST = ROOT / "dist"
NAME = f"paceline-{paceline.__version__}"
MOST_BYTES = 2_000_000
EXPECTED_S = 600.0
WORKERS = 3


class Built(NamedTuple):
    """The two distributions."""

    wheel: Path
    sdist: Path


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program without the checkout on its path, and return what it prints. Fail with this if it fails."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PACELINE_"))
    }
    ended = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=EXPECTED_S,
    )
    assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


def build(what: str, source: Path, to: Path) -> Path:
    """Build a distribution, and return its path."""
    run(TOOLS / "python", "-m", "build", "--no-isolation", f"--{what}", "--outdir", to, source, cwd=to.parent)
    [path] = to.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def built() -> Built:
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    return Built(build("wheel", ROOT, DIST), build("sdist", ROOT, DIST))


@pytest.fixture(scope="module")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(built.sdist) as file:
        file.extractall(folder, filter="data")
    return folder / NAME


@pytest.fixture(scope="module")
def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as file:
        return email.message_from_bytes(file.read(f"{NAME}.dist-info/METADATA"))


class Environment(NamedTuple):
    """An environment with the wheel and what it requires, and a folder away from the checkout."""

    bin: Path
    folder: Path


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    run(programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt", built.wheel, cwd=folder)
    yield Environment(programs, folder)
    shutil.rmtree(folder / "venv")  # more than a gigabyte


def test_wheels_from_the_tree_and_from_the_sdist_are_equal(
    built: Built, unpacked: Path, tmp_path: Path
) -> None:
    (again := tmp_path / "dist").mkdir()
    assert build("wheel", unpacked, again).read_bytes() == built.wheel.read_bytes()
    assert build("sdist", unpacked, again).read_bytes() == built.sdist.read_bytes()


def test_an_index_would_accept_the_distributions(built: Built) -> None:
    said = run(TOOLS / "twine", "check", "--strict", *built, cwd=DIST)
    assert said.count("PASSED") == 2


def test_the_distributions_are_small_and_contain_what_users_run(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as file:
        names = file.namelist()
    with tarfile.open(built.sdist) as archive:
        beside = {
            name for each in archive.getnames() if not (name := each.partition("/")[2]).startswith("src/")
        }
    assert built.wheel.stat().st_size < MOST_BYTES
    assert built.sdist.stat().st_size < MOST_BYTES
    assert {name.partition("/")[0] for name in names} == {"paceline", f"{NAME}.dist-info"}
    assert "paceline/py.typed" in names
    tracked = run("git", "ls-files", "src/paceline", cwd=ROOT).splitlines()
    assert {f"src/{name}" for name in names if name.startswith("paceline/")} == {*tracked}
    assert beside == {
        *(".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md"),
        *("hatch_build.py", "pyproject.toml"),
    }


def test_links_and_pictures_of_the_description_work_away_from_the_repository(metadata: Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    repository = re.escape(dict(each.split(", ") for each in metadata.get_all("Project-URL", []))["Source"])
    targets = re.findall(r"\]\(([^)\s]+)\)|\ssrc(?:set)?=\"([^\"]+)\"", description)
    assert len(targets) > 10
    for target in map("".join, targets):
        if target.startswith("#"):
            continue
        assert target.startswith("https://"), target
        if found := re.fullmatch(rf"{repository}/(blob|raw)/v{paceline.__version__}/([^#]+)(#.*)?", target):
            assert (ROOT / found[2]).exists(), target
            assert (found[1] == "raw") == (Path(found[2]).suffix in {".png", ".svg"}), target


def test_the_metadata_say_what_the_project_is(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("paceline", paceline.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    links = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))
    assert {*links} == {"Documentation", "Source", "Issues", "Changelog"}
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_wheel_says_its_version_and_trains_away_from_the_checkout(installed: Environment) -> None:
    program, folder = installed.bin / "paceline", installed.folder
    assert run(program, "--version", cwd=folder).strip() == f"paceline {paceline.__version__}"
    said = run(program, "demo", "--quick", "--run-dir", "demo", cwd=folder)
    print(said)
    rows = {row["sync"] + row["batch"]: row for row in json.loads((folder / "demo/summary.json").read_text())}
    assert {*rows} == {"bspequal", "bspbalanced", "aspequal"}
    assert all(row["samples_per_s"] > 0 for row in rows.values())


def test_the_script_of_the_readme_trains_on_three_workers(installed: Environment) -> None:
    """The first block of Python in the README that imports what it uses."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    scripts = [block for block in blocks if "import torch" in block and "import paceline" in block]
    if not scripts:
        pytest.skip("the README has no whole script")
    folder = installed.folder
    (folder / "train.py").write_text(scripts[0])
    run(installed.bin / "python", "train.py", cwd=folder)
    options = ("--workers", str(WORKERS), "--run-dir", "readme")
    print(run(installed.bin / "paceline", "run", *options, "train.py", cwd=folder))
    summary = json.loads((folder / "readme" / "summary.json").read_text())
    assert len(summary["iterations"]) == WORKERS
    assert min(summary["iterations"].values()) > 0
    assert (summary["lost_workers"], summary["faults"]) == ([], [])
    assert (folder / "readme" / "weights.safetensors").stat().st_size > 0


def test_the_sdist_installs_the_same_files(built: Built, installed: Environment, tmp_path: Path) -> None:
    def record() -> dict[str, str]:
        [folder] = (installed.bin.parent / "lib").glob("python*/site-packages/paceline")
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }

    before = record()
    run(installed.bin / "pip", "install", "-q", "--no-deps", "--force-reinstall", built.sdist, cwd=tmp_path)
    assert record() == before
    assert run(installed.bin / "paceline", "--version", cwd=tmp_path).strip().endswith(paceline.__version__)


IMPORT = """
import json, sys, time
before = {*sys.modules}
began_s = time.process_time()
for name in sys.argv[1:]:
    exec(name)
print(json.dumps([time.process_time() - began_s, sorted({*sys.modules} - before)]))
"""


def test_what_is_imported_first_is_small(installed: Environment) -> None:
    """`import paceline` imports no package, and the names of a script add little to torch."""

    def imported(*statements: str) -> tuple[float, set[str]]:
        found = [
            json.loads(run(installed.bin / "python", "-c", IMPORT, *statements, cwd=installed.folder))
            for _ in range(3)
        ]
        return min(used_s for used_s, _ in found), {*found[0][1]}

    alone_s, alone = imported("import paceline")
    torch_s, torch = imported("import torch")
    script = (
        "import paceline; paceline.DistributedOptimizer, paceline.distribute, paceline.prepare, paceline.save"
    )
    both_s, both = imported("import torch", script)
    own = both - torch
    packages = {name.partition(".")[0] for name in own} - {"paceline", *sys.stdlib_module_names}
    print(
        f"import paceline: {alone_s:.3f} s of processor time and {len(alone)} modules; import torch: {torch_s:.3f} s "
        f"and {len(torch)}; what a script uses of Paceline adds {both_s - torch_s:.3f} s and {len(own)} modules, "
        f"of the packages {', '.join(sorted(packages))}"
    )
    assert {name.partition(".")[0] for name in alone} <= {"paceline", *sys.stdlib_module_names}
    assert alone_s < 0.1 * torch_s
    assert both_s < 1.5 * torch_s
    heavy = {
        "matplotlib",
        "scipy",
        "sklearn",
        "rich",
        "typer",
        "tensorboard",
        "ray",
        "cryptography",
        "fsspec",
    }
    assert not packages & heavy
    assert not own & {"torch._dynamo", "torch.distributed"}
