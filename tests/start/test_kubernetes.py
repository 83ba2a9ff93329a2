"""The manifests in examples/cluster/kubernetes: valid, and with options that the programs have.

`make ray` also runs these tests, with the package that contains the published schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli import app

FOLDER = Path(paceline.__file__).parents[2] / "examples" / "cluster" / "kubernetes"


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; `make ray` runs this test")
    return [found for path in FOLDER.glob("*.yaml") for found in yaml.safe_load_all(path.read_text())]


def containers(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        container
        for manifest in manifests
        if manifest["kind"] == "Job"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    ]


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_manifests_match_the_published_schemas(version: str, manifests: list[dict[str, Any]]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed; `make ray` runs this test"
    )

    assert [manifest["kind"] for manifest in manifests] == [
        *("Service", "PersistentVolumeClaim", "Job", "Job", "NetworkPolicy")
    ]
    for manifest in manifests:
        validate.validate(manifest, version, strict=True)


def test_the_commands_have_these_options(manifests: list[dict[str, Any]]) -> None:
    for container in containers(manifests):
        program, command = container["command"]
        listed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        options = [argument.partition("=")[0] for argument in container["args"] if argument.startswith("--")]

        assert program == "paceline"
        assert options
        assert all(option in listed for option in options)


def test_the_secret_comes_from_a_secret_and_nowhere_else(manifests: list[dict[str, Any]]) -> None:
    for container in containers(manifests):
        [secret] = [variable for variable in container["env"] if variable["name"] == "PACELINE_SECRET"]

        assert secret["valueFrom"] == {"secretKeyRef": {"name": "paceline", "key": "secret"}}
