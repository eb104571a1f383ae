"""Local repair of an order of executions that exceeds the budget here and there: drop something, rebuild it later.

The inverse of :mod:`solvers.prune`. It turns near misses of the moments solver, above all those inside rebuilt
stretches where the relaxation does not look, into plans at the price of a few cheap recomputations.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from solvers.extract import missing_ops
from solvers.problem import Problem

_WORK = 400_000  # executions simulated at most, all trials together
_TRIALS = 6  # storages tried per violated execution


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of a storage: made at a position of the order, last used at ``end``, read at ``reads``, ascending."""

    storage: int
    made: int
    end: int
    reads: tuple[int, ...]


def _copies(problem: Problem, order: Sequence[int]) -> list[_Copy]:
    """All copies in an order, each living to its last read before the storage is made again."""
    made: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    copies: list[_Copy] = []

    def close(s: int, *, last: bool) -> None:
        stays = last and s in problem.live_at_end
        end = len(order) if stays else max(reads[s], default=made[s])
        copies.append(_Copy(s, made[s], end, tuple(reads[s])))

    for position, op in enumerate(order):
        for s in problem.inputs[op]:
            reads[s].append(position)
        for s in problem.outputs[op]:
            if s in made:
                close(s, last=False)
            made[s] = position
            reads[s] = []
    for s in made:
        close(s, last=True)
    return copies


def _live(problem: Problem, order: Sequence[int], copies: Sequence[_Copy]) -> list[int]:
    """Bytes live during each execution, static ones left out."""
    change = [0] * (len(order) + 2)
    for copy in copies:
        change[copy.made] += problem.storage_bytes[copy.storage]
        change[copy.end + 1] -= problem.storage_bytes[copy.storage]
    live = []
    total = 0
    for position, op in enumerate(order):
        total += change[position]
        live.append(total + problem.workspace_bytes[op])
    return live


def _overflow(live: Sequence[int], capacity: int) -> int:
    return sum(b - capacity for b in live if b > capacity)


def repair(problem: Problem, order: Sequence[int], *, deadline: float = math.inf) -> tuple[int, ...]:
    """Insert recomputations until the order fits the budget, or until nothing helps; the result may be over it still.

    At the first execution over the budget, the storages that are only held there for a later read are ranked by the
    time to rebuild them at that read per byte that counts. The first whose loss reduces the overflow (bytes over the
    budget, summed over executions) is dropped. Deterministic, unless ``deadline`` (``time.perf_counter``) passes.
    """
    capacity = problem.capacity_bytes
    current = tuple(order)
    copies = _copies(problem, current)
    live = _live(problem, current, copies)
    work = 0
    while work < _WORK and time.perf_counter() < deadline:
        overflow = _overflow(live, capacity)
        if not overflow:
            break
        where = next(i for i, b in enumerate(live) if b > capacity)
        for candidate in _splits(problem, current, copies, where, live[where] - capacity):
            work += len(candidate)
            new_copies = _copies(problem, candidate)
            new_live = _live(problem, candidate, new_copies)
            if _overflow(new_live, capacity) < overflow:
                current, copies, live = candidate, new_copies, new_live
                break
        else:
            break
    return current


def _splits(
    problem: Problem, order: tuple[int, ...], copies: Sequence[_Copy], where: int, excess: int
) -> list[tuple[int, ...]]:
    """Orders in which one storage is dropped before ``where`` and rebuilt right before its next read, best first."""
    options: list[tuple[float, int, int, list[int]]] = []
    storage, made, end = np.array([(c.storage, c.made, c.end) for c in copies]).T
    for copy in copies:
        if not copy.made < where < copy.end or where in copy.reads or not problem.storage_bytes[copy.storage]:
            continue
        again = next((r for r in copy.reads if r > where), len(order))
        resident = set(storage[(made < again) & (again <= end)].tolist()) - {copy.storage}
        try:
            ops = missing_ops(problem, (copy.storage,), resident)
        except ValueError:
            continue
        time = sum(problem.time_ns[op] for op in ops) + 1
        options.append((time / min(problem.storage_bytes[copy.storage], excess), copy.storage, again, ops))
    options.sort()
    return [(*order[:again], *ops, *order[again:]) for _, _, again, ops in options[:_TRIALS]]
