"""Time and workspace of one call on a real device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from graphs.costs.memory_events import peak_bytes, record_op_memory

_SLOW_NS: Final = 25_000_000
"""An op that takes longer runs three times in all, warm-up included."""

_VERY_SLOW_NS: Final = 250_000_000
"""An op that takes longer runs twice."""

_BATCH_NS: Final = 100_000
"""Fast ops are timed in batches of about this length, long against the clock and the loop around them."""

_SAMPLING_NS: Final = 10_000_000
"""Time that the samples of one op together take at most, where each sample allows it."""

_MOST_SAMPLES: Final = 7
_LEAST_SAMPLES: Final = 3
_MOST_CALLS_PER_BATCH: Final = 50


def measure_call(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Time in nanoseconds of a warm call, and the bytes it allocates at most beyond what it returns.

    On a CUDA device the time is the median of some samples. On a CPU it is the least: what else runs there only ever
    adds to it. With one torch thread it is moreover the processor time of that thread, which others cannot add to. What
    an op waits for is then not counted; none of torch's own waits, and others are not measured.

    Results of a call are freed before the next one starts, so no more than one set of results is alive.

    Args:
        call: runs one op on arguments that exist already.
        device: a CPU or CUDA device; the calling thread must have no active profiler.

    """
    return _measure_cuda(call, device) if device.type == "cuda" else _measure_cpu(call)


def _measure_cpu(call: Callable[[], Any]) -> tuple[int, int]:
    clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    elapsed: list[int] = []

    def timed() -> Any:
        start = clock()
        result = call()
        elapsed.append(clock() - start)
        return result

    timed()  # warm-up: primitive caches, pages, code paths
    result, deltas = record_op_memory(timed)
    workspace = peak_bytes(deltas) - max(0, sum(deltas))
    del result
    fastest = min(elapsed)
    if fastest > _SLOW_NS:
        if fastest <= _VERY_SLOW_NS:
            timed()
        return min(elapsed), workspace
    calls, samples_wanted = _batches(fastest)
    return min(_batch_ns(call, calls, clock) for _ in range(samples_wanted)), workspace


def _batches(call_ns: float) -> tuple[int, int]:
    """Calls per batch and number of batches for a call of about this length."""
    calls = max(1, min(_MOST_CALLS_PER_BATCH, round(_BATCH_NS / max(1, call_ns))))
    affordable = int(_SAMPLING_NS / max(1, call_ns * calls))
    return calls, max(_LEAST_SAMPLES, min(_MOST_SAMPLES, affordable))


def _batch_ns(call: Callable[[], Any], calls: int, clock: Callable[[], int]) -> int:
    start = clock()
    for _ in range(calls):
        call()
    return round((clock() - start) / calls)


def _measure_cuda(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Measure with events on the current stream. Resets the allocator's peak statistics of the device."""
    call()  # warm-up: handles and workspaces of libraries, autotuning, loading of modules
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter_ns()
    result = call()
    torch.cuda.synchronize(device)
    once_ns = time.perf_counter_ns() - start
    workspace = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del result
    calls, samples_wanted = _batches(once_ns)
    samples = []
    new_event: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
    for _ in range(samples_wanted):
        begin, end = new_event(), new_event()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e6 / calls)
    return round(statistics.median(samples)), workspace
