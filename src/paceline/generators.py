"""The generators that scripts draw from without saying so: torch's default one, Python's, NumPy's global one."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["GeneratorStates"]


class GeneratorStates:
    """What they were at one moment. NumPy's is left alone in a process that has not imported NumPy."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    @classmethod
    def seeded(cls, seed: int) -> GeneratorStates:
        """What they are after seeding all of them; they stay as they were."""
        before = cls()
        torch.manual_seed(seed)
        random.seed(seed)
        if before._numpy is not None:
            sys.modules["numpy"].random.seed(seed % 2**32)
        seeded = cls()
        before.give_back()
        return seeded

    def give_back(self) -> None:
        """Have them go on from here."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
