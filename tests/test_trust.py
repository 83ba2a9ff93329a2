"""The key of a user, with which a launcher signs what later commands do: who has it, and what it vouches for."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.trust import is_signed, key_file, printable, signature_of

CONTENT = {"command": "paceline run train.py", "workers": 2}


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a user who has no key yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = key_file()
    assert file == tmp_path / "config" / "paceline" / "key"
    return file


def test_a_key_is_made_at_its_first_use_and_only_its_owner_may_read_it(key: Path) -> None:
    assert not is_signed({**CONTENT, "signature": "00"})
    assert not key.exists()  # to look makes no key
    signed = {**CONTENT, "signature": signature_of(CONTENT)}
    assert is_signed(signed)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(bytes.fromhex(key.read_text())) == 32
    assert is_signed(dict(reversed(signed.items())))
    assert not is_signed({**signed, "workers": 3})
    assert not is_signed({**signed, "more": 1})
    others: list[object] = [CONTENT, [], None, {"signature": 1}, {"signature": "\u00e9"}]
    assert not any(map(is_signed, others))


def test_of_several_first_uses_at_once_all_have_the_same_key(key: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: signature_of(CONTENT), range(64)))) == 1
    assert [path.name for path in key.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o644])
def test_a_key_that_others_may_read_vouches_for_nothing(
    key: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    signed = {**CONTENT, "signature": signature_of(CONTENT)}
    key.chmod(mode)
    assert not is_signed(signed)
    assert "is not used, because it is not a file that only you can read; remove it" in caplog.text
    assert signature_of(CONTENT) == ""


def test_without_a_place_for_a_key_nothing_is_signed(key: Path) -> None:
    key.parent.parent.write_text("not a folder")
    assert signature_of(CONTENT) == ""
    assert not is_signed({**CONTENT, "signature": ""})


def test_a_damaged_key_is_no_key(key: Path) -> None:
    key.parent.mkdir(parents=True)
    for text in ("", "abc", "00" * 31, "zz" * 32):
        key.write_text(text)
        key.chmod(0o600)
        assert signature_of(CONTENT) == ""


def test_nothing_that_is_shown_controls_a_terminal() -> None:
    assert printable("a\x1b[2Jb\r\n\u202e") == "a\\x1b[2Jb\\r\\n\\u202e"
    assert printable(["a", "b"]) == "a, b"
