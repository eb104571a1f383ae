"""Copies on top of a plan that recomputes: free what a part of the plan decides, solve for it, and repeat.

The moments of :mod:`solvers.offload_model` are first executions, so that what it knows of stretches that are rebuilt,
where memory is short too, is what their inputs take. Here the executions of a known plan are given, and
:mod:`solvers.host_suborder` looks at memory during any of them: which recomputations can be left out since their
storage is copied to the host and back instead? That is solved for the storages of some ops at a time, the rest as it
is in the plan so far. The steps that come of it are taken over where the simulator says that they fit and are faster;
where they do not fit, or stall, the program looks there too from then on.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import random
import time
from collections.abc import Sequence

import numpy as np

from solvers.extract_offload import Stay, steps_of
from solvers.host_suborder import HostSuborder, Point, Span
from solvers.live import LiveBytes
from solvers.milp import MilpStatus, SolverFailedError
from solvers.problem import Problem
from solvers.simulate import Simulation, compute_order, simulate
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status, Step
from solvers.suborder import Superorder

_log = logging.getLogger(__name__)

_SHORT = 0.8
_MOMENTS = 48
_OPS = 24.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySearch:
    time_limit_s: float = 20.0
    most: int = 200
    patience: int = 20
    seed: int = 0

    def improve(self, problem: Problem, plan: Solution, *, enough_ns: int = 0) -> Solution:
        start = time.perf_counter()
        search = _Search(problem, plan.steps, random.Random(self.seed), start + self.time_limit_s)
        search.run(self.most, self.patience, enough_ns)
        if search.figures.step_time_ns >= plan.step_time_ns:
            return plan
        return Solution(
            status=Status.FEASIBLE,
            steps=search.steps,
            step_time_ns=search.figures.step_time_ns,
            peak_bytes=search.figures.peak_bytes,
            lower_bound_ns=plan.lower_bound_ns,
            solver="copies",
            solve_seconds=plan.solve_seconds + time.perf_counter() - start,
        )


class _Search:
    def __init__(self, problem: Problem, steps, draw, deadline) -> None:
        self.problem = problem
        self.deadline = deadline
        self.draw = draw
        order = compute_order(steps)
        self.superorder = _superorder(order)
        self.length = len(order)
        self.steps = steps
        self.executed: tuple[int, ...] = tuple(range(len(order)))
        self.figures = simulate(problem, steps)
        self.live = np.array([b for step, b in zip(steps, self.figures.live_bytes, strict=True) if isinstance(step, Compute)])
        self.spans = spans_of(problem, steps, self.executed, self.length)
        self.moments = self._first_moments()
        self.model = None
        self.sizes = {}

    def _first_moments(self):
        live = self.live - self.problem.static_bytes
        distance = max(1, self.length // 100)
        chosen: list[int] = []
        for p in np.argsort(-live, kind="stable").tolist():
            if live[p] < _SHORT * self.problem.capacity_bytes or len(chosen) == _MOMENTS:
                break
            if all(abs(p - c) >= distance for c in chosen):
                chosen.append(p)
        return sorted(chosen)

    def run_whole(self, share=0.5, rounds=8):
        t0 = time.perf_counter()
        until = t0 + share * (self.deadline - t0)
        all_moments = self.moments
        live = self.live - self.problem.static_bytes
        chosen = []
        for p in np.argsort(-live, kind="stable").tolist():
            if live[p] < 0.9 * self.problem.capacity_bytes or len(chosen) == 20:
                break
            if all(abs(p - c) >= self.length // 60 for c in chosen):
                chosen.append(p)
        moments = sorted(chosen)
        capacity = self.problem.capacity_bytes
        for n in range(rounds):
            left = until - time.perf_counter()
            if left <= 0.2: break
            tb = time.perf_counter()
            model = HostSuborder(self.problem, self.superorder, moments, capacity)
            values, obj, bound = solve_whole(model, 0.5 * left if n else 0.4 * left)
            if values is None:
                _log.debug("whole: nothing"); break
            point = model.point(values)
            before = self.figures.step_time_ns
            self.moments = moments
            steps, figures, better = self._offer(model, point)
            ka = self.problem.keep_all_time_ns
            fresh = [p for p in self._faults(steps, figures, point.executed) if p not in moments]
            _log.debug("whole K %d cap %.3f: obj %.3f bound %.3f added %.3f stall %.3f peak %.3f best %.3f, %.2f s, fresh %d", len(moments), capacity / self.problem.capacity_bytes, obj - 100, bound - 100, 100 * (figures.step_time_ns / ka - 1), 100 * figures.stall_ns / ka, figures.peak_bytes / self.problem.budget_bytes, 100 * (self.figures.step_time_ns / ka - 1), time.perf_counter() - tb, len(fresh))
            if fresh:
                spaced = []
                for p in fresh:
                    if all(abs(p - c) >= self.length // 150 for c in spaced): spaced.append(p)
                moments = sorted({*moments, *spaced[:8]})
            elif figures.stall_ns * 2000 > ka or figures.peak_bytes > self.problem.budget_bytes:
                capacity -= max((figures.peak_bytes - self.problem.budget_bytes) // 2, self.problem.capacity_bytes // 100)
            else:
                break
        self.moments = sorted({*all_moments, *moments})
        self.model = None

    def run(self, most, patience, enough_ns):
        self.run_whole()
        gains = []
        kinds = (self._region, self._moment, self._recomputed)
        for n in range(most):
            if self.figures.step_time_ns <= enough_ns or time.perf_counter() > self.deadline:
                break
            kind = kinds[n % 3]
            size = self.sizes.get(kind, _OPS)
            before = self.figures.step_time_ns
            ops = kind(int(size))
            t = time.perf_counter()
            done, status = self._try(ops)
            took = time.perf_counter() - t
            if status is MilpStatus.SOLVED and took < 0.3: self.sizes[kind] = min(size * 1.25, len(self.problem.time_ns))
            elif status is MilpStatus.LIMIT: self.sizes[kind] = max(size * 0.75, 4)
            _log.debug("%s %d: %s %s %.2f s, %.3f -> %.3f, K %d", kind.__name__, size, done, status, took, 100 * (before / self.problem.keep_all_time_ns - 1),  100 * (self.figures.step_time_ns / self.problem.keep_all_time_ns - 1), len(self.moments))
            gains.append(before - self.figures.step_time_ns)

    def _again(self):
        return [q for q in self.executed if self.superorder.optional[q]]

    def _region(self, size):
        again = self._again()
        ops = [self.superorder.ops[q] for q in again] or list(range(len(self.problem.time_ns)))
        weights = [self.problem.time_ns[op] + 1 for op in ops]
        (op,) = self.draw.choices(ops, weights)
        start = max(0, op - self.draw.randrange(size))
        return set(range(start, min(start + size, len(self.problem.time_ns))))

    def _moment(self, size):
        again = self._again()
        ops = {self.superorder.ops[q] for q in self.draw.choices(again, [self.problem.time_ns[self.superorder.ops[q]] + 1 for q in again], k=2)} if again else set()
        at = self.draw.choice(self.moments)
        idle = []
        for s, events in enumerate(self.model.events):
            if not self.problem.storage_bytes[s]: continue
            if events[0][0] < at < events[-1][0]:
                idle.append(s)
        weights = [self.problem.storage_bytes[s] ** 0.5 for s in idle]
        while idle and len(ops) < size:
            (index,) = self.draw.choices(range(len(idle)), weights)
            ops.add(self.problem.producer[idle.pop(index)])
            weights.pop(index)
        return ops

    def _recomputed(self, size):
        again = self._again()
        if not again: return self._region(size)
        (q,) = self.draw.choices(again, [self.problem.time_ns[self.superorder.ops[q]] + 1 for q in again])
        first = max(0, bisect.bisect_left(again, q) - self.draw.randrange(size))
        inside = again[first : first + size]
        ops = {self.superorder.ops[q] for q in inside}
        return ops | {self.problem.producer[s] for q in inside for s in self.problem.inputs[self.superorder.ops[q]]}

    def _build(self):
        if self.model is None:
            self.model = HostSuborder(self.problem, self.superorder, self.moments, self.problem.capacity_bytes)

    def _try(self, ops):
        self._build()
        free = {s for op in ops for s in self.problem.outputs[op]}
        fixed = self.model.fixed(self.spans, free)
        try:
            res = self.model.milp.solve(absolute_gap=0.01, time_limit_s=min(1.0, self.deadline - time.perf_counter()), node_limit=300, fixed=fixed)
        except SolverFailedError:
            return False, MilpStatus.LIMIT
        if not res.values:
            return False, res.status
        if res.objective >= 100 * self.figures.step_time_ns / self.problem.keep_all_time_ns - 0.005:
            return None, res.status
        return self._take(self.model.point(res.values)), res.status

    def _offer(self, model, point):
        problem = self.problem
        order = [self.superorder.ops[q] for q in point.executed]
        where = {q: i for i, q in enumerate(point.executed)}
        leave = {s: bisect.bisect_left(point.executed, q) for s, q in point.leave_by.items()}
        steps = steps_of(problem, order, stays_of(problem, model.events, point), leave)
        figures = simulate(problem, steps)
        fits = figures.peak_bytes <= problem.budget_bytes and figures.host_bytes <= problem.host_bytes
        faster = figures.step_time_ns < self.figures.step_time_ns
        if fits and faster:
            self.steps, self.figures, self.executed = steps, figures, point.executed
            self.spans = spans_of(problem, steps, point.executed, self.length)
        return steps, figures, fits and faster

    def _take(self, point):
        steps, figures, better = self._offer(self.model, point)
        fresh = self._faults(steps, figures, point.executed)
        fresh = [p for p in fresh if p not in self.moments][:4]
        if fresh:
            self.moments = sorted({*self.moments, *fresh})
            self.model = None
            self._build()
        return better

    def _faults(self, steps, figures, executed):
        """Positions at which steps exceed the budget or computation waits, worst first."""
        problem = self.problem
        weight = {}
        position = -1
        now = 0
        for step, live, start in zip(steps, figures.live_bytes, figures.start_ns, strict=True):
            if isinstance(step, Compute):
                position += 1
                at = position
            else:
                at = min(position + 1, len(executed) - 1)
            q = executed[at]
            if live > problem.budget_bytes:
                weight[q] = weight.get(q, 0) + (live - problem.budget_bytes) / problem.budget_bytes
            if isinstance(step, (Compute, Free)):
                if start - now > 1e-4 * problem.keep_all_time_ns:
                    weight[q] = weight.get(q, 0) + (start - now) / problem.keep_all_time_ns
                now = max(now, start)
                if isinstance(step, Compute):
                    now += problem.time_ns[step.op]
        return sorted(weight, key=lambda q: (-weight[q], q))


def solve_whole(model, limit):
    t = time.perf_counter()
    milp = model.milp
    rel = milp.relax(time_limit_s=limit)
    if rel.status is not MilpStatus.SOLVED: return None, 0, 0
    best = None
    for tolerance, share in ((-1.0, 0.3), (1e-3, 1.0)):
        res = milp.solve(absolute_gap=0.03, time_limit_s=share * (limit - (time.perf_counter() - t)), hint=best.values if best else (), fixed=milp.near(rel, tolerance, integers_only=True), target=rel.bound + 0.1)
        if res.values and (best is None or res.objective < best.objective): best = res
    return (best.values, best.objective, rel.bound) if best else (None, 0, 0)


def _superorder(order: Sequence[int]) -> Superorder:
    due = 0
    optional = []
    for op in order:
        optional.append(op != due)
        due += op == due
    return Superorder(tuple(order), tuple(optional), (True,) * len(order))


def spans_of(problem: Problem, steps, executed, length) -> list[list[Span]]:
    """When each storage is on the device, in positions of a superorder."""
    spans: list[list[Span]] = [[] for _ in problem.storage_bytes]
    begun: dict[int, tuple[int, bool]] = {}
    position = -1

    def end(s, last):
        start, fetched = begun.pop(s)
        spans[s].append(Span(start, last, fetched))

    for step in steps:
        if isinstance(step, Compute):
            position += 1
            for s in problem.outputs[step.op]:
                if s not in begun:
                    begun[s] = (executed[position], False)
        elif isinstance(step, Prefetch):
            begun[step.storage] = (executed[position + 1] if position + 1 < len(executed) else length, True)
        elif isinstance(step, Free):
            end(step.storage, executed[position])
    for s in sorted(begun):
        end(s, length)
    return spans


def stays_of(problem: Problem, events, point: Point) -> list[Stay]:
    where = {q: i for i, q in enumerate(point.executed)}
    length = len(point.executed)
    stays = []
    for s, happens in enumerate(events):
        current = None
        for i, (q, makes) in enumerate(happens):
            if i and not point.resident[s][i - 1]:
                current = None
            if q not in where:
                continue
            at = where[q]
            if makes or current is None:
                current = Stay(s, at, at, fetched=not makes)
                stays.append(current)
            current.last = at
        if s in problem.live_at_end:
            if current is None or not point.resident[s][-1]:
                current = Stay(s, length, length, fetched=True)
                stays.append(current)
            current.last = length
    stays.sort(key=lambda stay: (stay.start, stay.storage))
    return stays
