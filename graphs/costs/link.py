"""The link of a CUDA device, measured once: copies between pinned host memory and the device, remembered on disk."""

from __future__ import annotations

import statistics
from typing import Final

import torch

from graphs.costs.cache import CostCache, cache_directory, device_name, environment
from graphs.links import Link

LARGE: Final = 256 * 2**20
SMALL: Final = 4096
_REPEATS: Final = 9


def measured_link(device: torch.device) -> Link:
    """Bandwidth each way and latency of a CUDA device's link, from the cache of costs or measured now (a second).

    Each figure is the median of nine copies. The bandwidth is what a large copy takes beyond a small one; the latency
    is that of the small one. Whether the link is duplex is not measured: those of today are.
    """
    cache = CostCache(cache_directory(), environment(device))
    known = cache.load()
    wanted = [(size, outward) for size in (SMALL, LARGE) for outward in (True, False)]
    missing = [case for case in wanted if _signature(*case) not in known]
    if missing:
        fresh = {_signature(size, outward): (_time_ns(size, device, outward=outward), 0) for size, outward in missing}
        cache.add(fresh)
        known = {**known, **fresh}
    times = {case: known[_signature(*case)][0] for case in wanted}

    def rate(outward: bool) -> float:  # noqa: FBT001 - local
        return (LARGE - SMALL) * 1e9 / max(times[LARGE, outward] - times[SMALL, outward], 1)

    return Link(
        to_host_bytes_per_s=rate(True),
        to_device_bytes_per_s=rate(False),
        latency_ns=max(times[SMALL, True], times[SMALL, False]),
        name=f"link of {device_name(device)}",
        source="measured",
    )


def _signature(size: int, outward: bool) -> str:  # noqa: FBT001 - half of a key
    return f"copy of {size} bytes to {'host' if outward else 'device'}, pinned"


def _time_ns(size: int, device: torch.device, *, outward: bool) -> int:
    with torch.cuda.device(device):  # events and copies are on the stream of the current device
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        target, source = (host, there) if outward else (there, host)
        times: list[float] = []
        for _ in range(_REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end) * 1e6)
    return max(1, round(statistics.median(times[1:])))
