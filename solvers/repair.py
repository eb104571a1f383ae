"""Local repair of an order of executions that exceeds the budget here and there: drop something, rebuild it later.

The inverse of :mod:`solvers.prune`. It turns near misses of the moments solver, above all those inside rebuilt
stretches where the relaxation does not look, into plans at the price of a few cheap recomputations.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.extract import missing_ops
from solvers.live import Copies, LiveBytes
from solvers.problem import Problem

_WORK = 400_000  # executions simulated at most, all trials together
_TRIALS = 6  # storages tried per violated execution


def repair(problem: Problem, order: Sequence[int], *, deadline: float = math.inf) -> tuple[int, ...]:
    """Insert recomputations until the order fits the budget, or until nothing helps; the result may be over it still.

    At the first execution over the budget, the storages that are only held there for a later read are ranked by the
    time to rebuild them at that read per byte that counts. The first whose loss reduces the overflow (bytes over the
    budget, summed over executions) is dropped. Deterministic, unless ``deadline`` (``time.perf_counter``) passes.
    """
    capacity = problem.capacity_bytes
    bytes_of = LiveBytes(problem)
    current = tuple(order)
    copies = bytes_of.copies(current)
    live = bytes_of.of(current, copies)
    work = 0
    while work < _WORK and time.perf_counter() < deadline:
        overflow = _overflow(live, capacity)
        if not overflow:
            break
        where = int((live > capacity).argmax())
        for candidate in _splits(problem, current, copies, where, int(live[where]) - capacity):
            work += len(candidate)
            new_copies = bytes_of.copies(candidate)
            new_live = bytes_of.of(candidate, new_copies)
            if _overflow(new_live, capacity) < overflow:
                current, copies, live = candidate, new_copies, new_live
                break
        else:
            break
    return current


def _overflow(live: NDArray[np.int64], capacity: int) -> int:
    return int(np.maximum(live - capacity, 0).sum())


def _splits(
    problem: Problem, order: tuple[int, ...], copies: Copies, where: int, excess: int
) -> Iterator[tuple[int, ...]]:
    """Orders in which one storage is dropped before ``where`` and rebuilt right before its next read, best first."""
    waiting = np.sort(copies.storage[(copies.start < where) & (where < copies.end)])
    reads = zip(waiting.tolist(), copies.next_use(waiting, where).tolist(), strict=True)
    candidates = []
    for s, again in reads:
        if problem.storage_bytes[s] and s not in problem.inputs[order[where]]:
            counted = min(problem.storage_bytes[s], excess)
            candidates.append(((problem.time_ns[problem.producer[s]] + 1) / counted, counted, s, again))
    candidates.sort()
    options: list[tuple[float, int, int, list[int]]] = []
    resident_at: dict[int, set[int]] = {}
    for at_least, counted, s, again in candidates:  # whoever is rebuilt takes the time of its producer at least
        if len(options) >= _TRIALS and at_least > options[_TRIALS - 1][0]:
            break
        if again not in resident_at:
            resident_at[again] = set(copies.storage[(copies.start < again) & (again <= copies.end)].tolist())
        try:
            ops = missing_ops(problem, (s,), resident_at[again] - {s})
        except ValueError:
            continue
        bisect.insort(options, ((sum(problem.time_ns[op] for op in ops) + 1) / counted, s, again, ops))
    return ((*order[:again], *ops, *order[again:]) for _, _, again, ops in options[:_TRIALS])
