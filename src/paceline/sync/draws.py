"""Random numbers that are keyed instead of drawn one after another.

A model that asks for chance asks "what is the number of (seed, worker, iteration)?" All shards then agree, so
slicing does not change the model; a replay needs no state of a generator; and an event that is refused draws
nothing. The mixing is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014), applied to each part of the key in turn.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["uniform", "uniforms"]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def uniform(*key: int) -> float:
    """A number in [0, 1), the same for the same key, as good as independent for different ones.

    >>> uniform(0, 1, 2) == uniform(0, 1, 2)
    True
    """
    return (_state(key) >> 11) * 2.0**-53


def uniforms(*key: int) -> Callable[[int], float]:
    """The draws whose key is this one and one part more: `uniforms(*key)(last)` is `uniform(*key, last)`, sooner."""
    start = _state(key) + GOLDEN

    def draw(last: int) -> float:
        z = (start + last) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return ((z ^ z >> 31) >> 11) * 2.0**-53

    return draw


def _state(key: tuple[int, ...]) -> int:
    state = 0
    for part in key:
        state = _mixed((state + GOLDEN + part) & MASK)
    return state


def _mixed(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31
