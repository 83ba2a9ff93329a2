"""The generators that scripts draw from without saying so: torch's default one, Python's, NumPy's global one.

Simulated workers take turns at them, and a computation that may be dropped notes them before it begins. NumPy takes
70 us to hand out its state and to take it back, ten times as long as the others together. So its memory, at the
address that NumPy publishes for such ends, tells whether somebody has drawn, and what is given back is written there.

One thing is not seen: the second normal deviate of a pair, kept for later, if a script brings it back by `set_state`
with a state that differs in nothing else from what the generator was when it was noted.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, NamedTuple

import torch

__all__ = ["GeneratorStates"]

_KEY_BYTES = 624 * 4
_RAW_BYTES = _KEY_BYTES + 4  # the key, then the position in it, an int


class GeneratorStates:
    """What they were at one moment. NumPy's is left alone in a process that has not imported NumPy."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = _numpy.state() if "numpy" in sys.modules else None

    @classmethod
    def seeded(cls, seed: int) -> GeneratorStates:
        """What they are after seeding all of them; they stay as they were."""
        before = cls()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every accelerator's, too
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
            _numpy.give_back(self._numpy)


class _NumpyState(NamedTuple):
    """A state of NumPy's global generator.

    Attributes:
        whole: as NumPy hands it out.
        raw: the Mersenne Twister's own part, if that is all there is to it: no normal deviate is kept for later.
    """

    whole: dict[str, Any]
    raw: bytes | None


class _NumpyGenerator:
    """NumPy's global generator, of which nothing is asked that its memory tells."""

    def __init__(self) -> None:
        self._seen: _NumpyState | None = None  # what it was when it was last looked at
        self._bits: Any = None  # the bit generator that lies at the address
        self._address = 0

    def state(self) -> _NumpyState:
        """What it is now."""
        if not self._unchanged():
            whole = sys.modules["numpy"].random.get_state(legacy=False)
            self._bits = sys.modules["numpy"].random.get_bit_generator()
            self._address = self._bits.ctypes.state_address
            plain = whole["bit_generator"] == "MT19937" and not whole["has_gauss"]
            self._seen = _NumpyState(whole, self._raw(whole) if plain else None)
        assert self._seen is not None
        return self._seen

    def give_back(self, state: _NumpyState) -> None:
        """Have it go on from a state. Written to memory only where no kept deviate has to come or go."""
        if state.raw is not None and self._unchanged():
            with self._bits.lock:
                ctypes.memmove(self._address, state.raw, _RAW_BYTES)
        else:
            sys.modules["numpy"].random.set_state(state.whole)
        self._seen = state

    def _unchanged(self) -> bool:
        """Has nobody drawn since it was looked at, and was no deviate kept then?"""
        return (
            self._seen is not None
            and self._seen.raw is not None
            and sys.modules["numpy"].random.get_bit_generator() is self._bits
            and self._memory() == self._seen.raw
        )

    def _raw(self, whole: dict[str, Any]) -> bytes | None:
        """What lies in memory, if that is what was handed out; a NumPy that arranges it otherwise is always asked."""
        raw = self._memory()
        key, position = whole["state"]["key"], whole["state"]["pos"]
        same = raw == key.tobytes() + position.to_bytes(_RAW_BYTES - _KEY_BYTES, sys.byteorder)
        return raw if same else None

    def _memory(self) -> bytes:
        with self._bits.lock:
            return ctypes.string_at(self._address, _RAW_BYTES)


_numpy = _NumpyGenerator()
