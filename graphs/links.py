"""The link between a device and host memory: how fast it copies each way, by name, as stated, or as measured.

This module is free of torch; :mod:`graphs.costs.link` measures the link of a device.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Final

DEFAULT_LATENCY_NS: Final = 10_000
"""Fixed time of a copy where none is stated: launching an asynchronous copy and its event takes about this on a GPU."""

PCIE_EFFICIENCY: Final = 0.8
"""Share of the raw rate of PCI Express that a copy from pinned memory reaches: packet headers and flow control take the
rest (25 of 31.5 GB/s is what bandwidth tests show on 4.0 x16)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What moves storages between a device and its host, beside computation.

    Copies of one direction follow each other in the order in which they were started. A copy takes the latency plus
    its bytes at the bandwidth of its direction.

    Attributes:
        to_host_bytes_per_s: bandwidth of copies out.
        to_device_bytes_per_s: bandwidth of copies back.
        latency_ns: fixed time of each copy.
        duplex: whether the two directions run beside each other at full bandwidth; else one copy at a time.
        least_bytes: smaller storages are never copied. By default what the link moves during one latency: below it a
            copy is mostly overhead.
        name: for messages.
        source: where the figures are from.

    """

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    latency_ns: int = DEFAULT_LATENCY_NS
    duplex: bool = True
    least_bytes: int = -1
    name: str = "stated"
    source: str = "stated by the caller"

    def __post_init__(self) -> None:
        """Refuse rates that are no rates; work out the least bytes where none are given."""
        for rate in (self.to_host_bytes_per_s, self.to_device_bytes_per_s):
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"a link's bandwidth must be a positive number of bytes per second, and is {rate!r}")
        if self.latency_ns < 0:
            raise ValueError(f"a link's latency must not be negative, and is {self.latency_ns} ns")
        if self.least_bytes < 0:
            slower = min(self.to_host_bytes_per_s, self.to_device_bytes_per_s)
            object.__setattr__(self, "least_bytes", math.ceil(slower * self.latency_ns / 1e9))

    def to_host_ns(self, size: int) -> int:
        """Time of copying ``size`` bytes out."""
        return self.latency_ns + math.ceil(size * 1e9 / self.to_host_bytes_per_s)

    def to_device_ns(self, size: int) -> int:
        """Time of copying ``size`` bytes back."""
        return self.latency_ns + math.ceil(size * 1e9 / self.to_device_bytes_per_s)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON; ``Link(**fields)`` reads them."""
        return dataclasses.asdict(self)


def _pcie(generation: int, gigatransfers: float) -> Link:
    raw = gigatransfers * 1e9 * 16 * (128 / 130) / 8
    rate = raw * PCIE_EFFICIENCY
    source = f"PCI Express Base Specification {generation}.0: {gigatransfers:g} GT/s a lane, 128b/130b, less 20 %"
    return Link(rate, rate, name=f"pcie{generation}-x16", source=source)


LINKS: Final[Mapping[str, Link]] = types.MappingProxyType(
    {
        "pcie3-x16": _pcie(3, 8),
        "pcie4-x16": _pcie(4, 16),
        "pcie5-x16": _pcie(5, 32),
        "nvlink-c2c": Link(
            450e9,
            450e9,
            name="nvlink-c2c",
            source="NVIDIA Grace Hopper Superchip Architecture, whitepaper: 450 GB/s each way",
        ),
    }
)
"""Links by name."""

_RATE = re.compile(r"([0-9.eE+-]+)\s*([kKMGT]?)(i?)B(?:/s|ps)", re.ASCII)
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_link(value: object) -> Link:
    """The link that a user states: a :class:`Link`, a name of :data:`LINKS`, or a bandwidth each way as ``"25GB/s"``.

    Raises:
        ValueError: neither; the message names the nearest name.
        TypeError: not a link and not a text.

    """
    if isinstance(value, Link):
        return value
    if not isinstance(value, str):
        raise TypeError(f"link={value!r}: give a bandwidth ('25GB/s'), a name ({', '.join(LINKS)}) or a Link")
    if value.lower() in LINKS:
        return LINKS[value.lower()]
    match = _RATE.fullmatch(value.strip())
    try:
        figure = float(match.group(1)) if match else math.nan
    except ValueError:
        figure = math.nan
    if match is None or not (math.isfinite(figure) and figure > 0):
        near = difflib.get_close_matches(value.lower(), LINKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"link={value!r}: give a bandwidth ('25GB/s') or one of {', '.join(LINKS)}{hint}")
    rate = figure * (1024 if match.group(3) else 1000) ** _POWER[match.group(2)]
    return Link(rate, rate, name=value.strip(), source="stated by the caller")
