"""Exponential, logarithm and normal quantile, computed only with + - * / and the square root.

The results of the C library's functions can differ in the last bit between machines. The functions in this module
return the same results on every machine, because IEEE 754 defines the rounding of every operation that they use.
Therefore simulations that use these functions also give bit-identical results on every machine. The errors of `exp`
and `log` are at most a few units in the last place; the relative error of `normal_quantile` is at most 1.2e-9.
"""

from __future__ import annotations

import math

__all__ = ["exp", "log", "normal_quantile"]

LN2_HIGH = (
    0.693147180369123816490  # the leading 32 bits of ln 2, so that the product with a small integer is exact
)
LN2_LOW = 1.90821492927058770002e-10  # ln 2 - LN2_HIGH
SQRT_HALF = 0.7071067811865476
MOST, LEAST = 709.0, -745.0  # `exp` returns infinity above MOST and 0 below LEAST
TERMS = 17  # number of terms in each series; more terms would not change the result

# Acklam's rational approximation (2003), with separate coefficients for the tails and for the middle.
TAIL = 0.02425
TAIL_OVER = (
    -7.784894002430293e-03,
    -3.223964580411365e-01,
    -2.400758277161838e00,
    -2.549732539343734e00,
    4.374664141464968e00,
    2.938163982698783e00,
)
TAIL_UNDER = (
    7.784695709041462e-03,
    3.224671290700398e-01,
    2.445134137142996e00,
    3.754408661907416e00,
    1.0,
)
MIDDLE_OVER = (
    -3.969683028665376e01,
    2.209460984245205e02,
    -2.759285104469687e02,
    1.383577518672690e02,
    -3.066479806614716e01,
    2.506628277459239e00,
)
MIDDLE_UNDER = (
    -5.447609879822406e01,
    1.615858368580409e02,
    -1.556989798598866e02,
    6.680131188771972e01,
    -1.328068155288572e01,
    1.0,
)


def exp(x: float) -> float:
    """Return e^x, but infinity for `x` > 709 and 0 for `x` < -745.

    >>> round(exp(1.0), 12)
    2.718281828459
    """
    if x > MOST:
        return math.inf
    if x < LEAST:
        return 0.0
    halvings = round(x / (LN2_HIGH + LN2_LOW))
    rest = (x - halvings * LN2_HIGH) - halvings * LN2_LOW
    value = 1.0
    for term in range(TERMS, 0, -1):
        value = 1.0 + rest / term * value
    return math.ldexp(value, halvings)


def log(x: float) -> float:
    """Return the natural logarithm of `x`, for `x` > 0.

    >>> round(log(10.0), 12)
    2.302585092994
    """
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 0.0
    for term in range(2 * TERMS + 1, 0, -2):
        series = series * square + 1.0 / term
    return exponent * LN2_HIGH + (2.0 * ratio * series + exponent * LN2_LOW)


def normal_quantile(p: float) -> float:
    """Return the x for which P(X < x) = `p`, where X is a standard normal variable and 0 < `p` < 1.

    >>> round(normal_quantile(0.975), 6)
    1.959964
    """
    if p > 0.5:
        return -normal_quantile(1.0 - p)
    if p < TAIL:
        q = math.sqrt(-2.0 * log(p))
        return _polynomial(TAIL_OVER, q) / _polynomial(TAIL_UNDER, q)
    q = p - 0.5
    return q * _polynomial(MIDDLE_OVER, q * q) / _polynomial(MIDDLE_UNDER, q * q)


def _polynomial(coefficients: tuple[float, ...], x: float) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value
