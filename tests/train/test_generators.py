"""Saved and restored states of the generators: the numbers drawn afterwards are the same again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from paceline.train.generator_states import GeneratorStates

NUMPY: Any = np.random  # its stubs lack the functions that replace the bit generator


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, bits = GeneratorStates(), NUMPY.get_bit_generator()
    yield
    NUMPY.set_bit_generator(bits)
    before.give_back()


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "uniform": lambda: np.random.rand(),
    "one normal of two": lambda: np.random.randn(),
    "two normals": lambda: np.random.randn(2),
    "many": lambda: np.random.rand(1000),
    "seeded": lambda: np.random.seed(3),
    "all three": lambda: (np.random.rand(), random.random(), torch.rand(())),
}


def numbers() -> list[float]:
    """Return the next numbers, a normal deviate first because one may have been kept."""
    return [
        float(np.random.randn()),
        *map(float, np.random.rand(3)),
        random.random(),
        float(torch.rand(())),
    ]


@pytest.mark.parametrize("before", DRAWS)
@pytest.mark.parametrize("between", DRAWS)
def test_what_was_noted_goes_on_from_there(before: str, between: str) -> None:
    np.random.seed(1)
    DRAWS[before]()
    noted = GeneratorStates()
    expected = numbers()
    noted.give_back()
    DRAWS[between]()
    other = GeneratorStates()
    noted.give_back()
    assert numbers() == expected
    noted.give_back()
    assert numbers() == expected
    other.give_back()
    noted.give_back()
    assert numbers() == expected


def test_taking_turns_changes_nobodys_numbers() -> None:
    def drawn(seed: int, turns: list[str]) -> list[float]:
        GeneratorStates.seeded(seed).give_back()
        found: list[float] = []
        for turn in turns:
            DRAWS[turn]()
            found.append(float(np.random.randn()))
        return found

    turns = list(DRAWS)
    alone = [drawn(seed, turns) for seed in (1, 2)]
    states = [GeneratorStates.seeded(seed) for seed in (1, 2)]
    together: list[list[float]] = [[], []]
    for turn in turns:
        for worker in (0, 1):
            states[worker].give_back()
            DRAWS[turn]()
            together[worker].append(float(np.random.randn()))
            states[worker] = GeneratorStates()
    assert together == alone


def test_another_kind_of_generator_in_numpys_place_is_noted_as_well() -> None:
    GeneratorStates().give_back()
    NUMPY.set_bit_generator(np.random.PCG64(7))
    noted = GeneratorStates()
    expected = numbers()
    noted.give_back()
    assert numbers() == expected
    NUMPY.set_bit_generator(np.random.MT19937(7))
    noted = GeneratorStates()
    NUMPY.set_bit_generator(np.random.MT19937(8))
    noted.give_back()
    again = numbers()
    noted.give_back()
    assert numbers() == again


def test_seeding_a_state_leaves_the_generators_as_they_were() -> None:
    expected = GeneratorStates()
    first = numbers()
    expected.give_back()
    GeneratorStates.seeded(11)
    assert numbers() == first
