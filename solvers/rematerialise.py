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
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.extract import missing_ops
from solvers.heuristic import heuristic_solution
from solvers.moments_model import Decisions
from solvers.problem import Problem
from solvers.prune import prune
from solvers.solution import Solution
from solvers.store_all import keep_all_peak_op

SMALL = 0.003
MOST_WORK = 30  # ops looked at per op of the step
MOST_LEVELS = 60  # of rebuilding inside rebuilding; more means that the walk goes in circles


class OutOfBudgetError(Exception):
    """The walk found no room for an op. ``op`` is the one whose first execution was due."""

    def __init__(self, op: int) -> None:
        super().__init__(f"no room for op {op}")
        self.op = op


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """Exponents of the eviction score, time to rebuild ** time / (bytes ** size · distance ** distance).

    ``pin_late``: storages made in the backward phase, or where there are no phases, after the peak of the keep-all
    schedule, are not evicted, nor are those that must live at the end. Gradients look cheap to lose when they have just
    been made, and are out of reach once what they were made from is gone.
    """

    time: float = 1.0
    size: float = 1.0
    distance: float = 1.0
    pin_late: bool = True


RULES = (
    EvictionRule(time=2.0, distance=0.5),  # the best first guess on transformers and convolutional networks
    EvictionRule(time=1.5, distance=0.5),
    EvictionRule(time=1.0, distance=1.0),
    EvictionRule(time=4.0, size=2.0, distance=1.0),
    EvictionRule(time=2.0, distance=0.5, pin_late=False),
    EvictionRule(time=1.0, distance=1.0, pin_late=False),
    EvictionRule(time=0.5, distance=2.0, pin_late=False),
)


class _Walk:
    """State of one walk over the step.

    A storage is *held* while an op that reads it is being assembled (it cannot be evicted), *pending* while it is part
    of a stretch that is being rebuilt (it is evicted last). ``position`` is the next op to execute for the first time.
    """

    def __init__(
        self,
        problem: Problem,
        rule: EvictionRule,
        guide: Decisions | None,
        *,
        execution_limit: int,
        deadline: float,
    ) -> None:
        storages = len(problem.storage_bytes)
        self.problem = problem
        self.rule = rule
        self.order: list[int] = []
        self.position = 0
        self.live = 0
        self.depth = 0
        self.execution_limit = execution_limit
        self.deadline = deadline
        self.work = 0  # ops in all stretches that rebuilding looked at
        self.never = float(4 * len(problem.time_ns) + 4)
        self.resident: set[int] = set()
        self.held = [0] * storages
        self.evictable = np.zeros(storages, dtype=bool)  # resident, of some bytes, held by nobody
        self.pending = np.zeros(storages, dtype=np.int64)
        self.use = np.full(storages, self.never)  # next need as far as known
        self.rebuild = np.array([problem.time_ns[op] + 1.0 for op in problem.producer])  # as far as known
        self.size = np.maximum(np.array(problem.storage_bytes, dtype=np.float64), 1.0) ** rule.size
        self.guide = list(zip(guide.moments, guide.kept, strict=True)) if guide else []
        self.guided = self._guided()
        self.pinned = _late(problem) if rule.pin_late else [False] * storages
        self.small = _small(problem)
        self.dead_after = _last_needs(problem)
        self.dying: list[list[int]] = [[] for _ in range(len(problem.time_ns) + 1)]
        for s, last in enumerate(self.dead_after):
            self.dying[last].append(s)

    def run(self) -> tuple[int, ...]:
        """Execute the whole step and return the order of executions."""
        for op, inputs in enumerate(self.problem.inputs):
            self._assemble(op)
            self._execute(op)
            self.position = op + 1
            for s in (*inputs, *self.problem.outputs[op]):
                self.use[s] = self._next_need(s)
                self._hold((s,), 0)
            for s in self.dying[op]:
                if s in self.resident:
                    self._discard(s)
            if self.guide and op == self.guide[0][0]:
                self.guide.pop(0)
                self.guided = self._guided()
        at_end = sorted(self.problem.live_at_end)
        self._hold(at_end, 1)
        self._bring_in(at_end)
        return tuple(self.order)

    def _guided(self) -> NDArray[np.float64] | None:
        """Weights by which the next moment of the guide makes what it keeps dear, and what it drops cheap."""
        if not self.guide:
            return None
        weights = np.full(len(self.held), 1e-4)
        weights[list(self.guide[0][1])] = 1e4
        return weights

    def _next_need(self, s: int) -> float:
        """The next op, at or after ``position``, that needs ``s``: reads it, or something lost that is made from it."""
        readers = self.problem.readers[s]
        due = bisect.bisect_left(readers, self.position)
        best = float(readers[due]) if due < len(readers) else self.never
        if s in self.problem.live_at_end:
            best = min(best, float(len(self.problem.time_ns)))
        for reader in readers[:due]:
            for u in self.problem.outputs[reader]:
                if u not in self.resident and self.use[u] < best:
                    best = float(self.use[u])
        return best

    def _hold(self, storages: Iterable[int], amount: int) -> None:
        for s in storages:
            self.held[s] += amount
            free = self.held[s] == 0 and s in self.resident and self.problem.storage_bytes[s] > 0
            self.evictable[s] = free and not self.small[s] and (not self.pinned[s] or self.use[s] >= self.never)

    def _assemble(self, op: int) -> None:
        """Make all inputs of ``op`` resident and hold them."""
        inputs = self.problem.inputs[op]
        self._hold(inputs, 1)
        try:
            self._bring_in(inputs)
        except OutOfBudgetError:
            self._hold(inputs, -1)
            raise

    def _bring_in(self, storages: Sequence[int]) -> None:
        """Make the storages, which the caller holds, resident together.

        Those that take most to rebuild come first, while little else is held. Where there is no room, the other way
        round; then by giving up those that are there and rebuilding them after the others.
        """
        for attempt in range(4):
            missing = [s for s in storages if s not in self.resident]
            if not missing:
                return
            if attempt >= 2:
                self._give_up(storages)
                missing = [s for s in storages if s not in self.resident]
            try:
                while missing:
                    missing.sort(key=self._rebuild_time, reverse=attempt % 2 == 0)
                    self._rebuild(missing[0])
                    missing = [s for s in missing if s not in self.resident]
            except OutOfBudgetError:
                if attempt == 3 or self._spent() or self._tired():
                    raise

    def _spent(self) -> bool:
        """Whether a limit on executions or time is reached."""
        return len(self.order) >= self.execution_limit or time.perf_counter() > self.deadline

    def _tired(self) -> bool:
        """Whether the walk has worked so much that it goes in circles."""
        return self.work > MOST_WORK * len(self.problem.time_ns) + 1000

    def _give_up(self, storages: Iterable[int]) -> None:
        """Drop those that can be rebuilt and that no other op being assembled holds."""
        for s in storages:
            if s in self.resident and self.held[s] == 1 and np.isfinite(self._rebuild_time(s)):
                self._drop(s)

    def _rebuild(self, s: int) -> None:
        """Execute, in index order, what it takes to make ``s`` resident."""
        ops = missing_ops(self.problem, (s,), self.resident)
        self.work += len(ops)
        stretch = sorted({u for v in ops for u in (*self.problem.inputs[v], *self.problem.outputs[v])})
        self.pending[stretch] += 1
        self.depth += 1
        try:
            if self.depth > MOST_LEVELS or self._tired():
                raise OutOfBudgetError(self.position)
            for v in ops:
                if s not in self.resident and any(u not in self.resident for u in self.problem.outputs[v]):
                    self._assemble(v)
                    self._execute(v)
        finally:
            self.depth -= 1
            self.pending[stretch] -= 1
        for u in stretch:
            self.use[u] = self._next_need(u)

    def _execute(self, op: int) -> None:
        """Execute ``op``, whose inputs are resident and held by :meth:`_assemble`, and release them."""
        problem = self.problem
        for s in problem.outputs[op]:
            if s in self.resident and not self.held[s]:
                self._drop(s)
        try:
            if self._spent():
                raise OutOfBudgetError(self.position)
            self._make_room(sum(problem.storage_bytes[s] for s in problem.outputs[op]) + problem.workspace_bytes[op])
        finally:
            self._hold(problem.inputs[op], -1)
        self.order.append(op)
        for s in problem.outputs[op]:
            if s not in self.resident and self.dead_after[s] >= self.position:
                self.resident.add(s)
                self.live += problem.storage_bytes[s]
        self._hold(problem.outputs[op], 0)

    def _discard(self, s: int) -> None:
        """Take ``s`` out of what is resident."""
        self.resident.discard(s)
        self.evictable[s] = False
        self.live -= self.problem.storage_bytes[s]

    def _drop(self, s: int) -> None:
        """Drop ``s``; what it is made from is then needed when it is."""
        self.use[s] = self._next_need(s)
        self._discard(s)
        stack = [s] if self.use[s] < self.never else []
        while stack:
            t = stack.pop()
            for u in self.problem.inputs[self.problem.producer[t]]:
                if self.use[t] < self.use[u]:
                    self.use[u] = self.use[t]
                    if u not in self.resident:
                        stack.append(u)

    def _make_room(self, size: int) -> None:
        """Evict until ``size`` more bytes fit."""
        while self.live + size > self.problem.capacity_bytes:
            victim = self._victim()
            if victim is None:
                raise OutOfBudgetError(self.position)
            self._drop(victim)

    def _victim(self) -> int | None:
        """The storage whose eviction costs least; what is known of those that come first is brought up to date."""
        indices = np.flatnonzero(self.evictable)
        scores = self._scores(indices)
        fresh: set[int] = set()
        while len(indices):
            best = int(np.argmin(scores))
            s = int(indices[best])
            finite = bool(np.isfinite(scores[best]))
            if finite and s in fresh:
                return s
            if not finite and len(fresh) == len(indices):
                return None
            stale = [best] if finite else range(len(indices))  # all is thought irreplaceable: look whether that holds
            for i in stale:
                s = int(indices[i])
                if s not in fresh:
                    fresh.add(s)
                    self.use[s] = self._next_need(s)
                    self.rebuild[s] = self._rebuild_time(s)
                    scores[i] = self._score(s)
        return None

    def _scores(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Score of each storage: the least is evicted first. Those that nothing needs come before all others."""
        rule = self.rule
        use = self.use[indices]
        distance = np.maximum(use - self.position, 0.5)
        scores: NDArray[np.float64] = self.rebuild[indices] ** rule.time / (
            self.size[indices] * distance**rule.distance
        )
        scores[use >= self.never] *= 1e-12
        scores[self.pending[indices] > 0] *= 1e9
        if self.guided is not None:
            later = use > self.guide[0][0]
            scores[later] *= self.guided[indices][later]
        return scores

    def _score(self, s: int) -> float:
        """The figure of :meth:`_scores` for one storage, without the overhead of arrays."""
        rule = self.rule
        use = float(self.use[s])
        distance = max(use - self.position, 0.5)
        score: float = float(self.rebuild[s]) ** rule.time / (float(self.size[s]) * distance**rule.distance)
        if use >= self.never:
            score *= 1e-12
        if self.pending[s] > 0:
            score *= 1e9
        if self.guided is not None and use > self.guide[0][0]:
            score *= float(self.guided[s])
        return score

    def _rebuild_time(self, s: int) -> float:
        """Time of all ops that it takes to produce ``s`` again were it lost; infinite where that is impossible."""
        if self.use[s] >= self.never:
            return 1.0
        there = s in self.resident
        self.resident.discard(s)
        try:
            return 1.0 + sum(self.problem.time_ns[v] for v in missing_ops(self.problem, (s,), self.resident))
        except ValueError:
            return float("inf")
        finally:
            if there:
                self.resident.add(s)


def _last_needs(problem: Problem) -> list[int]:
    """For each storage the last op at whose first execution it can be needed, be it to rebuild something else."""
    ops = len(problem.time_ns)
    last = [ops if s in problem.live_at_end else max(r, default=-1) for s, r in enumerate(problem.readers)]
    for op in range(ops - 1, -1, -1):
        latest = max((last[s] for s in problem.outputs[op]), default=-1) if problem.recomputable[op] else -1
        for s in problem.outputs[op]:
            last[s] = max(last[s], op)
        for s in problem.inputs[op]:
            last[s] = max(last[s], latest)
    return last


def _small(problem: Problem) -> list[bool]:
    """The least storages, up to ``SMALL`` of the capacity together: not worth losing what can be rebuilt from them."""
    room = SMALL * problem.capacity_bytes
    small = [False] * len(problem.storage_bytes)
    for size, s in sorted((size, s) for s, size in enumerate(problem.storage_bytes)):
        room -= size
        if room < 0:
            break
        small[s] = True
    return small


def _late(problem: Problem) -> list[bool]:
    """Whether each storage is one that ``pin_late`` means."""
    phases = 0 < problem.forward_ops < len(problem.time_ns)
    last = problem.forward_ops - 1 if phases else keep_all_peak_op(problem)
    return [op > last or s in problem.live_at_end for s, op in enumerate(problem.producer)]


def rematerialised_order(
    problem: Problem,
    guide: Decisions | None = None,
    *,
    rule: EvictionRule = RULES[0],
    improve: bool = True,
    time_limit_s: float = math.inf,
) -> tuple[int, ...]:
    """Order of executions whose live bytes, with frees after last use, never exceed the budget; pruned.

    Args:
        problem: what to schedule.
        guide: decisions of a moments model: what they keep is evicted last, what they drop first.
        rule: the eviction score.
        improve: whether to prune the order.
        time_limit_s: the walk ends after this, and so does pruning.

    Raises:
        OutOfBudgetError: the walk found no room for an op, or no time, which proves nothing about other schedules.

    """
    limit = 3 * len(problem.time_ns) + 500
    deadline = time.perf_counter() + time_limit_s
    walk = _Walk(problem, rule, guide, execution_limit=limit, deadline=deadline)
    order = walk.run()
    return prune(problem, order, deadline=deadline) if improve else order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialiser:
    """Heuristic solver: the strict-budget walk under several eviction rules. Proves nothing but the keep-all time.

    Attributes:
        rules: eviction rules to try, in order; the fastest plan is returned.
        improve: whether plans are pruned.
        time_limit_s: no walk goes on after this.

    """

    rules: tuple[EvictionRule, ...] = RULES
    improve: bool = True
    time_limit_s: float = 60.0

    def solve(self, problem: Problem) -> Solution:
        """Return the fastest plan, ``OPTIMAL`` only where it recomputes nothing, or ``INFEASIBLE`` without proof."""
        start = time.perf_counter()
        best: tuple[int, tuple[int, ...]] | None = None
        stuck = 0
        for rule in self.rules:
            left = self.time_limit_s - (time.perf_counter() - start)
            if left < 0:
                break
            try:
                order = rematerialised_order(problem, rule=rule, improve=self.improve, time_limit_s=left)
            except OutOfBudgetError as error:
                stuck = max(stuck, error.op)
                continue
            taken = sum(problem.time_ns[op] for op in order)
            if best is None or taken < best[0]:
                best = (taken, order)
        lost = f"the walk found no room for {problem.describe_op(min(stuck, len(problem.time_ns) - 1))}"
        return heuristic_solution(
            problem,
            None if best is None else best[1],
            solver="rematerialise",
            start=start,
            message=lost if best is None else "",
        )
