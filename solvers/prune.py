"""Local improvement of an order of executions: drop recomputations whose storage could have been kept all along."""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from solvers.problem import Problem
from solvers.simulate import compute_order, simulate, with_frees
from solvers.solution import Solution


class _Copies:
    """Productions and reads of one storage over an order, and the copies they define.

    A copy lives from its production to its last read before the next production, the last one of a storage that is
    live at the end to the end of the order.
    """

    def __init__(self) -> None:
        self.made: list[int] = []
        self.read: list[int] = []

    def last_use(self, production: int, end: int | None) -> int:
        """Last position at which the copy made at ``production`` lives; ``end`` for a last copy that must stay."""
        index = bisect.bisect_right(self.made, production)
        if index == len(self.made):
            if end is not None:
                return end
            following = len(self.read)
        else:
            following = bisect.bisect_left(self.read, self.made[index])
        last = self.read[following - 1] if following else -1
        return max(last, production)

    def previous(self, production: int) -> int:
        """The production before ``production``."""
        return self.made[bisect.bisect_left(self.made, production) - 1]


class _Profile:
    """Live bytes per execution of an order, kept up to date while recomputations are removed."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem = problem
        self.order = order
        self.copies = [_Copies() for _ in problem.storage_bytes]
        self.live = np.zeros(len(order) + 1, dtype=np.int64)
        self.blocked: dict[
            int, tuple[int, int]
        ] = {}  # per removal that failed: a place without room, bytes needed there
        for position, op in enumerate(order):
            for s in problem.inputs[op]:
                self.copies[s].read.append(position)
            for s in problem.outputs[op]:
                self.copies[s].made.append(position)
            self.live[position] += problem.workspace_bytes[op]
        for s, copies in enumerate(self.copies):
            for production in copies.made:
                self.live[production : self._last_use(s, production) + 1] += problem.storage_bytes[s]

    def _last_use(self, s: int, production: int) -> int:
        end = len(self.order) if s in self.problem.live_at_end else None
        return self.copies[s].last_use(production, end)

    def try_remove(self, position: int, capacity: int) -> bool:
        """Remove the recomputation at ``position`` if the copies it would have to extend fit; say whether it was."""
        problem = self.problem
        if position in self.blocked:
            place, needed = self.blocked[position]
            if self.live[place] + needed > capacity:
                return False
        op = self.order[position]
        changes: list[tuple[int, int, int]] = []
        for s in problem.outputs[op]:
            size = problem.storage_bytes[s]
            last = self._last_use(s, position)
            before = self._last_use(s, self.copies[s].previous(position))
            if last > position:
                changes.append((before + 1, position, size))
            else:
                changes.append((position, position + 1, -size))
        for start, stop, size in changes:
            self.live[start:stop] += size
        low = min((start for start, _, _ in changes), default=position)
        worst = low + int(self.live[low:position].argmax()) if low < position else position
        if worst < position and self.live[worst] > capacity:
            for start, stop, size in changes:
                self.live[start:stop] -= size
            needed = sum(size for start, stop, size in changes if start <= worst < stop)
            self.blocked[position] = (worst, needed)
            return False
        self._forget(position)
        return True

    def _forget(self, position: int) -> None:
        """Take the execution at ``position`` out of the books; its inputs then die at their last other read."""
        problem = self.problem
        op = self.order[position]
        for s in problem.outputs[op]:
            self.copies[s].made.remove(position)
        for s in problem.inputs[op]:
            copies = self.copies[s]
            production = copies.made[bisect.bisect_left(copies.made, position) - 1]
            before = self._last_use(s, production)
            copies.read.remove(position)
            after = self._last_use(s, production)
            self.live[after + 1 : before + 1] -= problem.storage_bytes[s]
            self.blocked.pop(production, None)  # it may have lost its last read
        self.live[position] = 0


def prune(problem: Problem, order: Sequence[int], *, deadline: float = math.inf) -> tuple[int, ...]:
    """Remove recomputations from ``order`` while the live bytes stay within the budget.

    Without a recomputation the previous copy of each of its outputs stays from its last use on. Those that save most
    time per byte and execution of extended life are tried first, until none can be removed. The order must be
    executable; it need not be within the budget where it is left alone. Deterministic, unless ``deadline``
    (``time.perf_counter``) passes.
    """
    profile = _Profile(problem, order)
    last_seen: dict[int, int] = {}
    candidates: list[tuple[float, int]] = []
    for position, op in enumerate(order):
        if op in last_seen:
            size = sum(problem.storage_bytes[s] for s in problem.outputs[op])
            stretch = (position - last_seen[op]) * max(size, 1)
            candidates.append((-(problem.time_ns[op] + 1) / stretch, position))
        last_seen[op] = position
    candidates.sort()
    removed: set[int] = set()
    progress = True
    while progress:
        progress = False
        for _, position in candidates:
            if time.perf_counter() > deadline:
                return tuple(op for position, op in enumerate(order) if position not in removed)
            if position not in removed and profile.try_remove(position, problem.capacity_bytes):
                removed.add(position)
                progress = True
    return tuple(op for position, op in enumerate(order) if position not in removed)


def pruned(problem: Problem, solution: Solution, *, deadline: float = math.inf) -> Solution:
    """The plan of a solution, pruned within the budget of ``problem`` until ``deadline``."""
    steps = with_frees(problem, prune(problem, compute_order(solution.steps), deadline=deadline))
    figures = simulate(problem, steps)
    return dataclasses.replace(solution, steps=steps, step_time_ns=figures.step_time_ns, peak_bytes=figures.peak_bytes)
