"""The secret of a run: where it comes from, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.wire.secret import new_secret, read_secret, write_secret


def test_a_secret_is_read_as_it_was_written(tmp_path: Path) -> None:
    secret, file = new_secret(), tmp_path / "secret"
    write_secret(secret, file)

    assert len(bytes.fromhex(secret)) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret({}, file) == secret
    assert read_secret({"PACELINE_SECRET": f" {secret.upper()}\n"}) == secret
    assert read_secret({}) == ""


def test_a_secret_is_never_written_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("precious")
    with pytest.raises(FileExistsError):
        write_secret(new_secret(), tmp_path / "secret")


@pytest.mark.parametrize("text", ["correct horse battery staple", "0" * 63, "0" * 65, "g" * 64, " "])
def test_passphrases_and_short_secrets_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected 64 hexadecimal digits") as caught:
        read_secret({"PACELINE_SECRET": text})
    assert not text.strip() or text not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    secret, file = new_secret(), tmp_path / "secret"
    write_secret(secret, file)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"its mode is {mode:o}, expected 600") as caught:
        read_secret({}, file)
    assert secret not in str(caught.value)


def test_what_is_not_a_file_with_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff" * 64)
    (tmp_path / "bytes").chmod(0o600)
    for name, reason in [("missing", "No such file"), (".", "Is a directory"), ("bytes", "it is not text")]:
        with pytest.raises(ConfigurationError, match=f"cannot be read: {reason}"):
            read_secret({}, tmp_path / name)


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        read_secret({}, tmp_path / "pipe")
