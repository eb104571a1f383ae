"""Allocations of torch's CPU allocator while something runs, in order, from a profiler's memory events.

Three recorders, for three needs:

* :func:`record_cpu_memory` for a whole training step: :mod:`torch.profiler`. There can be one per process: a second
  one started inside a first silently takes over its events.
* :func:`record_op_memory` for a single op: torch's older per-thread profiler. It starts in microseconds and, on a
  thread of its own, runs beside a profiler of the user.
* :class:`ThreadRecording` for what a thread does between two calls of ours, the user's code included: the same
  profiler, which gives way to any that the user starts meanwhile.

Only the allocator's view is seen: scratch that a library allocates by itself is not.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from graphs._torch import (
    disable_thread_profiler,
    enable_thread_profiler,
    in_backward,
    is_profiled,
    notice_profiler_start,
)

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


#: Sizes that are allocated and released, one after the other, to mark a place among the events.
_MARK: Final = (40_487, 31_769)
_MARK_EVENTS: Final = [sign * size for size in _MARK for sign in (1, -1)]


class ThreadRecording:
    """Memory events of one thread, from :meth:`start` on, with marks in between.

    Autograd restores a thread's profilers after each node of a backward, so that a recording can be marked in a
    backward, and must be started and ended outside of one.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._forget: Callable[[], None] | None = None

    @property
    def can_stop(self) -> bool:
        """Whether it records, on the calling thread, and that thread is in no backward."""
        return self._forget is not None and self._thread == threading.get_ident() and not in_backward()

    def start(self, give_way: Callable[[], None]) -> bool:
        """Start on the calling thread; ``False`` in a backward, or where a profiler is active, which is left alone.

        Args:
            give_way: called before another profiler starts on the thread, which it cannot as long as this one runs.

        """
        if is_profiled() or in_backward():
            return False
        enable_thread_profiler()
        self._thread = threading.get_ident()
        self._forget = notice_profiler_start(give_way)
        return True

    def mark(self) -> None:
        """Mark this place, on the thread that is recorded."""
        for size in _MARK:
            torch.empty(size, dtype=torch.uint8)

    def stop(self) -> list[list[int]] | None:
        """End, only where :attr:`can_stop`: the signed bytes of the events before the first mark, after it, and so on.

        What is allocated and released for the marks is left out. ``None`` where something else has ended the recording.
        """
        assert self._forget is not None
        self._forget()
        self._forget = None
        try:
            deltas = disable_thread_profiler()
        except RuntimeError:  # the thread's profilers were replaced, by autograd or by another profiler
            return None
        pieces: list[list[int]] = [[]]
        for delta in deltas:
            pieces[-1].append(delta)
            if pieces[-1][-len(_MARK_EVENTS) :] == _MARK_EVENTS:
                del pieces[-1][-len(_MARK_EVENTS) :]
                pieces.append([])
        return pieces


def peak_bytes(deltas: Iterable[int]) -> int:
    """Greatest running sum of signed byte counts, counted from 0; 0 where there are none."""
    return max(itertools.accumulate(deltas, initial=0))
