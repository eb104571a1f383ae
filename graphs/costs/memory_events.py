"""Allocations of torch's CPU allocator while something runs, in order, from a profiler's memory events.

Two recorders, for two needs:

* :func:`record_cpu_memory` for a whole training step: :mod:`torch.profiler`. There can be one per process: a second
  one started inside a first silently takes over its events.
* :func:`record_op_memory` for a single op: torch's older per-thread profiler. It starts in microseconds and, on a
  thread of its own, runs beside a profiler of the user.

Only the allocator's view is seen: scratch that a library allocates by itself is not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch.profiler import DeviceType, ProfilerActivity, profile

from graphs._torch import disable_thread_profiler, enable_thread_profiler

Result = TypeVar("Result")

_MEMORY_EVENT = "[memory]"


def record_cpu_memory(run: Callable[[], Result]) -> tuple[Result, list[int]]:
    """Run something and list what it allocated and freed on the CPU.

    Args:
        run: called once, without arguments. What it returns is held until recording has ended, so that the returned
            tensors count as allocated and not as freed.

    Returns:
        What ``run`` returned, and one signed number of bytes per event in order of time: positive for an allocation,
        negative for a release.

    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes two lines to stderr each time it runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    return result, memory_deltas(profiler)


def memory_deltas(profiler: profile) -> list[int]:
    """Signed bytes of each CPU memory event of a finished profile, in order of time.

    Raises:
        ValueError: the profile has not run and ended.

    """
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise ValueError("the profile has no results: it must have run with profile_memory=True, and ended")
    recorded: Sequence[Any] = results.events()  # the stubs leave out nbytes
    events = [
        (event.start_ns(), event.nbytes())
        for event in recorded
        if event.name() == _MEMORY_EVENT and event.device_type() == DeviceType.CPU
    ]
    events.sort(key=lambda event: event[0])
    return [nbytes for _, nbytes in events]


def record_op_memory(run: Callable[[], Result]) -> tuple[Result, list[int]]:
    """Like :func:`record_cpu_memory`, for what runs on the calling thread alone.

    Raises:
        RuntimeError: a profiler is active on this thread.

    """
    enable_thread_profiler()
    try:
        result = run()
    finally:
        deltas = disable_thread_profiler()
    return result, deltas


def peak_bytes(deltas: Iterable[int]) -> int:
    """Greatest running sum of signed byte counts, counted from 0; 0 where there are none."""
    return max(itertools.accumulate(deltas, initial=0))
