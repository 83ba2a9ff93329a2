"""Random numbers that are computed from a key, such as (seed, worker, iteration), and need no generator.

All shards compute the same value for the same key, so the number of shards does not affect the decisions. A replay
needs no generator state, and a rejected event does not change later numbers. The finalizer of SplitMix64 (Steele,
Lea, Flood, "Fast splittable pseudorandom number generators", 2014) mixes the parts of the key one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def uniform(*key: int) -> float:
    """Return a number in [0, 1) that depends only on the key. Different keys give practically independent numbers.

    >>> uniform(0, 1, 2) == uniform(0, 1, 2)
    True
    """
    return (_state(key) >> 11) * 2.0**-53


def uniforms(*key: int) -> Callable[[int], float]:
    """Return a faster equivalent of `lambda last: uniform(*key, last)`."""
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
