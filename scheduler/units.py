"""Sizes and times as people read them. Inside the code sizes are int bytes and times int nanoseconds."""

from __future__ import annotations

from typing import Final

_BYTE_UNITS: Final = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_TIME_UNITS: Final = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))


def format_bytes(size: int) -> str:
    """Size in decimal units with four significant digits or fewer: ``7.52 GB``, ``351.2 MB``, ``12 B``."""
    for unit, name in _BYTE_UNITS:
        if abs(size) >= unit:
            return f"{_shorten(size / unit)} {name}"
    return f"{size} B"


def format_time(nanoseconds: int) -> str:
    """Time in the largest unit that leaves a figure of at least one: ``1.25 s``, ``351.2 ms``, ``12 ns``."""
    for unit, name in _TIME_UNITS:
        if abs(nanoseconds) >= unit:
            return f"{_shorten(nanoseconds / unit)} {name}"
    return f"{nanoseconds} ns"


def scale_of_bytes(size: int) -> tuple[int, str]:
    """The unit in which to draw sizes up to ``size``: its bytes and its name, ``(10**6, "MB")``."""
    return next((scale for scale in _BYTE_UNITS if size >= scale[0]), (1, "B"))


def scale_of_time(nanoseconds: int) -> tuple[int, str]:
    """The unit in which to draw times up to ``nanoseconds``: its nanoseconds and its name, ``(10**6, "ms")``."""
    return next((scale for scale in _TIME_UNITS if nanoseconds >= scale[0]), (1, "ns"))


def budget_that_covers(size: int) -> str:
    """The ``budget_gb`` argument, rounded up to three digits, that allows ``size`` bytes: ``0.352``."""
    step = 10 ** max(0, len(str(size)) - 3)
    return f"{-(-size // step) * step / 10**9:.9f}".rstrip("0").rstrip(".")


def _shorten(figure: float) -> str:
    """Two decimals below 100, one from there on."""
    return f"{figure:.2f}" if abs(figure) < 100 else f"{figure:.1f}"
