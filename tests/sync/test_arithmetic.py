"""Exponential, logarithm and normal quantile: close to the C library's, and the same on any machine."""

from __future__ import annotations

import math
import struct
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.conditions import exp, log, normal_quantile


@given(st.floats(-700.0, 700.0))
def test_exp_is_within_two_units_in_the_last_place(x: float) -> None:
    assert abs(exp(x) - math.exp(x)) <= 2 * math.ulp(math.exp(x))


@given(st.floats(1e-300, 1e300))
def test_log_is_within_four_units_in_the_last_place(x: float) -> None:
    assert abs(log(x) - math.log(x)) <= 4 * math.ulp(math.log(x))


@given(st.floats(1e-300, 1.0, exclude_max=True).filter(lambda p: abs(p - 0.5) > 1e-9))
def test_the_normal_quantile_is_right_to_nine_digits(p: float) -> None:
    assert normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=2e-9, abs=1e-9)


def test_the_ends() -> None:
    assert (exp(0.0), log(1.0), exp(710.0), exp(-800.0)) == (1.0, 0.0, math.inf, 0.0)


def test_these_bits_come_out_on_any_machine() -> None:
    values = [exp(0.1 * k - 5) for k in range(100)] + [log(0.1 * k + 0.05) for k in range(100)]
    values += [normal_quantile((k + 0.5) / 100) for k in range(100)]
    combined = 0
    for value in values:
        (bits,) = struct.unpack("<Q", struct.pack("<d", value))
        combined = (combined * 31 + bits) % 2**64
    assert combined == BITS


BITS = 0xF6E0ADC95045C671
