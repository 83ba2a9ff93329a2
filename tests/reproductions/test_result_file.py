"""Files of results to which a command appends, so that it can continue where it was stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigurationError
from reproductions.result_file import append_results, read_results


class Rate(msgspec.Struct, frozen=True, tag="rate"):
    """A kind of result."""

    rate: float


class Loss(msgspec.Struct, frozen=True, tag="loss"):
    """Another kind of result."""

    values: list[float]


RESULTS = [Rate(0.1), Loss([0.5, 0.25]), Rate(0.2)]


def test_results_are_read_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert read_results(path, Rate) == []
    append_results(path, RESULTS[0])
    append_results(path, *RESULTS[1:])
    assert read_results(path, Rate, Loss) == RESULTS


@pytest.mark.parametrize("lost", range(1, 14))
def test_a_line_that_was_cut_off_is_ignored_and_replaced(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "results.jsonl"
    append_results(path, *RESULTS)
    path.write_bytes(path.read_bytes()[:-lost])
    assert read_results(path, Rate, Loss) == RESULTS[:2]
    append_results(path, RESULTS[2])
    assert read_results(path, Rate, Loss) == RESULTS


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results(path, *RESULTS)
    with pytest.raises(ConfigurationError, match=r"results\.jsonl is not a file of results: .*\$\[1\]"):
        read_results(path, Rate)
