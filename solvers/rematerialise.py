"""Strict-budget rematerialisation: walk the step, rebuild what is missing, evict what is cheapest to lose.

The walk never lets the live bytes exceed the budget. Before an op first executes, each missing input is rebuilt from
what is resident, through as many levels as that takes. Room is made by evicting the storage with the least

    time to rebuild it / (bytes · distance to its next use),

where the time counts the ops it takes now, evicted ancestors included, and the distance is in ops of the keep-all
order. This is the eviction rule of dynamic tensor rematerialisation (Kirisame et al., 2021) with the future known.
Useless recomputations are pruned afterwards (:mod:`solvers.prune`).
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Iterable

import numpy as np

from solvers.extract import missing_ops
from solvers.moments_model import Decisions
from solvers.problem import Problem
from solvers.prune import prune
from solvers.simulate import simulate, with_frees
from solvers.solution import Solution, Status


class OutOfBudgetError(Exception):
    """The walk found no room for an op. ``op`` is the one whose first execution was due."""

    def __init__(self, op: int) -> None:
        super().__init__(f"no room for op {op}")
        self.op = op


class _Walk:
    """State of one walk over the step: what is resident, what is held, when each storage is next needed."""

    def __init__(self, problem: Problem, guide: Decisions | None, execution_limit: int) -> None:
        self.problem = problem
        self.order: list[int] = []
        self.position = 0
        self.live = 0
        self.execution_limit = execution_limit
        storages = len(problem.storage_bytes)
        self.never = 4 * len(problem.time_ns) + 4
        self.resident: set[int] = set()
        self.bytes = np.array(problem.storage_bytes, dtype=np.float64)
        self.evictable = np.zeros(storages, dtype=bool)  # resident, of some bytes, held by nobody
        self.held = [0] * storages
        self.use = np.full(storages, self.never, dtype=np.float64)  # next use as far as known, >= position
        self.rebuild = np.array([problem.time_ns[op] + 1 for op in problem.producer], dtype=np.float64)
        self.weight = np.ones(storages)
        self._guide = list(zip(guide.moments, guide.kept, strict=True)) if guide else []
        self._follow_guide()

    # --- the walk ---------------------------------------------------------------------------------------------

    def run(self) -> tuple[int, ...]:
        """Execute the whole step and return the order of executions."""
        problem = self.problem
        for op, inputs in enumerate(problem.inputs):
            self.position = op
            self._assemble(op)
            self._execute(op)
            for s in inputs:
                self._set_use(s, self._next_read(s))
            for s in problem.outputs[op]:
                self._set_use(s, self._next_read(s))
            if self._guide and op == self._guide[0][0]:
                self._guide.pop(0)
                self._follow_guide()
        self.position = len(problem.time_ns)
        for s in sorted(problem.live_at_end):
            self._hold((s,), 1)
        self._bring_in(sorted(problem.live_at_end))
        return tuple(self.order)

    def _next_read(self, s: int) -> float:
        """First op after the current one that reads ``s`` when it first executes; the end where it must live then."""
        readers = self.problem.readers[s]
        index = bisect.bisect_right(readers, self.position)
        if index < len(readers):
            return readers[index]
        return len(self.problem.time_ns) if s in self.problem.live_at_end else self.never

    def _set_use(self, s: int, use: float) -> None:
        self.use[s] = use

    def _follow_guide(self) -> None:
        """Make what the next moment keeps dear, and what it does not keep cheap, to the eviction rule."""
        self.weight[:] = 1.0
        if self._guide:
            moment, kept = self._guide[0]
            self.weight[self.use > moment] = 1.0
            self.dropped_after = float(moment)
            self.kept = np.zeros(len(self.bytes), dtype=bool)
            self.kept[list(kept)] = True
        else:
            self.dropped_after = float("inf")

    # --- bringing in and executing ----------------------------------------------------------------------------

    def _hold(self, storages: Iterable[int], amount: int) -> None:
        for s in storages:
            self.held[s] += amount
            self.evictable[s] = self.held[s] == 0 and s in self.resident and self.problem.storage_bytes[s] > 0

    def _assemble(self, op: int) -> None:
        """Make all inputs of ``op`` resident and hold them, and make room for its outputs and workspace."""
        inputs = self.problem.inputs[op]
        self._hold(inputs, 1)
        self._bring_in(inputs)

    def _bring_in(self, storages: Iterable[int]) -> None:
        """Make the storages resident, each held by the caller; those that take most to rebuild come first."""
        missing = [s for s in storages if s not in self.resident]
        while missing:
            costs = {s: missing_ops(self.problem, (s,), self.resident) for s in missing}
            s = max(missing, key=lambda m: (sum(self.problem.time_ns[v] for v in costs[m]), m))
            ops = costs[s]
            for v in ops:
                for u in self.problem.outputs[v]:
                    self.use[u] = min(self.use[u], self.position)
                for u in self.problem.inputs[v]:
                    self.use[u] = min(self.use[u], self.position)
            for v in ops:
                if any(u not in self.resident for u in self.problem.outputs[v]):
                    self._assemble(v)
                    self._execute(v)
            for v in ops:
                for u in (*self.problem.outputs[v], *self.problem.inputs[v]):
                    self.use[u] = self._next_need(u)
            missing = [m for m in missing if m not in self.resident]

    def _next_need(self, s: int) -> float:
        """Next direct read, counting one by the current op, or the first need of an evicted storage made from ``s``."""
        readers = self.problem.readers[s]
        index = bisect.bisect_left(readers, self.position)
        best = float(readers[index]) if index < len(readers) else float(self.never)
        if s in self.problem.live_at_end:
            best = min(best, len(self.problem.time_ns))
        for reader in readers[: bisect.bisect_left(readers, self.position)]:
            for u in self.problem.outputs[reader]:
                if u not in self.resident:
                    best = min(best, float(self.use[u]))
        return best

    def _execute(self, op: int) -> None:
        """Execute ``op``, whose inputs are resident and held by :meth:`_assemble`, and release them."""
        problem = self.problem
        if len(self.order) >= self.execution_limit:
            raise OutOfBudgetError(self.position)
        for s in problem.outputs[op]:
            if s in self.resident and not self.held[s]:
                self._drop(s)
        grown = sum(problem.storage_bytes[s] for s in problem.outputs[op])
        self._make_room(grown + problem.workspace_bytes[op])
        self.order.append(op)
        for s in problem.outputs[op]:
            if s not in self.resident:
                self.resident.add(s)
                self.live += problem.storage_bytes[s]
            self.evictable[s] = self.held[s] == 0 and problem.storage_bytes[s] > 0
        self._hold(problem.inputs[op], -1)

    # --- evicting ---------------------------------------------------------------------------------------------

    def _drop(self, s: int) -> None:
        self.resident.discard(s)
        self.evictable[s] = False
        self.live -= self.problem.storage_bytes[s]

    def _make_room(self, size: int) -> None:
        """Evict until ``size`` more bytes fit."""
        while self.live + size > self.problem.capacity_bytes:
            victim = self._victim()
            if victim is None:
                raise OutOfBudgetError(self.position)
            self._drop(victim)
            self._support(victim)

    def _support(self, s: int) -> None:
        """After ``s`` was evicted, what it is made from is needed when it is."""
        stack = [(s, float(self.use[s]))]
        while stack:
            t, use = stack.pop()
            if use >= self.never:
                continue
            for u in self.problem.inputs[self.problem.producer[t]]:
                if use < self.use[u]:
                    self.use[u] = use
                    if u not in self.resident:
                        stack.append((u, use))

    def _victim(self) -> int | None:
        """The storage whose eviction costs least; costs are brought up to date for those that come first."""
        indices = np.flatnonzero(self.evictable)
        if not len(indices):
            return None
        distance = np.maximum(self.use[indices] - self.position, 0.5)
        factor = 1.0 / (self.bytes[indices] * distance)
        factor[self.use[indices] >= self.never] *= 1e-9
        if self._guide:
            beyond = self.use[indices] > self.dropped_after
            kept = self.kept[indices]
            factor[beyond & ~kept] *= 1e-4
            factor[beyond & kept] *= 1e4
        scores = factor * self.rebuild[indices]
        for _ in range(len(indices)):
            best = int(np.argmin(scores))
            if not np.isfinite(scores[best]):
                return None
            s = int(indices[best])
            cost = self._rebuild_time(s)
            if cost <= self.rebuild[s] * 1.0001:
                self.rebuild[s] = max(cost, 1.0)
                if np.isfinite(cost):
                    return s
            if np.isfinite(cost):
                self.rebuild[s] = cost
            scores[best] = factor[best] * cost
        return None

    def _rebuild_time(self, s: int) -> float:
        """Time of all ops that it takes to produce ``s`` again once evicted; infinite where that is impossible."""
        if self.use[s] >= self.never:
            return 1.0
        try:
            self.resident.discard(s)
            ops = missing_ops(self.problem, (s,), self.resident)
        except ValueError:
            return float("inf")
        finally:
            self.resident.add(s)
        return float(sum(self.problem.time_ns[v] for v in ops) + 1)


def rematerialised_order(problem: Problem, guide: Decisions | None = None, *, improve: bool = True) -> tuple[int, ...]:
    """Order of executions whose live bytes, with frees after last use, never exceed the budget; pruned.

    Args:
        problem: what to schedule.
        guide: decisions of a moments model: what they keep is evicted last, what they drop first.
        improve: whether to prune the order.

    Raises:
        OutOfBudgetError: the walk found no room for an op, which proves nothing about other schedules.

    """
    walk = _Walk(problem, guide, execution_limit=30 * len(problem.time_ns) + 200)
    order = walk.run()
    return prune(problem, order) if improve else order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialiser:
    """Heuristic solver: the strict-budget walk, then pruning. Proves no bound beyond the keep-all time."""

    def solve(self, problem: Problem) -> Solution:
        """Return the walk's schedule, ``OPTIMAL`` only where it recomputes nothing, or ``INFEASIBLE``."""
        start = time.perf_counter()
        try:
            order = rematerialised_order(problem)
        except OutOfBudgetError as error:
            return Solution(
                status=Status.INFEASIBLE,
                steps=(),
                step_time_ns=0,
                peak_bytes=0,
                lower_bound_ns=problem.keep_all_time_ns,
                solver="rematerialise",
                solve_seconds=time.perf_counter() - start,
                message=f"no room for {problem.describe_op(min(error.op, len(problem.time_ns) - 1))}",
            )
        steps = with_frees(problem, order)
        simulation = simulate(problem, steps)
        optimal = simulation.step_time_ns == problem.keep_all_time_ns
        return Solution(
            status=Status.OPTIMAL if optimal else Status.FEASIBLE,
            steps=steps,
            step_time_ns=simulation.step_time_ns,
            peak_bytes=simulation.peak_bytes,
            lower_bound_ns=problem.keep_all_time_ns,
            solver="rematerialise",
            solve_seconds=time.perf_counter() - start,
        )
