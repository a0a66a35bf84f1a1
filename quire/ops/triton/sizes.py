"""Sizes of grids and tiles, as plain arithmetic: Triton's functions of these names cost microseconds per call."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n is at least 1."""
    return 1 << (n - 1).bit_length()
