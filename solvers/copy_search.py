"""Copies on top of a plan that recomputes: what may be left out since a storage is copied to the host instead?

The moments of :mod:`solvers.offload_model` are first executions, so that it does not know how short memory is where a
stretch is rebuilt: at low budgets few of its plans fit. Here the executions of a plan that fits are given, and
:mod:`solvers.host_suborder` looks at memory during any of them. First the whole program is solved, with few moments;
then, as in :mod:`solvers.lns`, for the storages of some ops at a time, with the rest as in the plan so far. Steps are
taken over where the simulator says that they fit and are faster. Where they exceed the budget, or computation waits,
the program looks too from then on.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from solvers.extract_offload import steps_of
from solvers.host_spans import Point, Span, events_of, spans_of, stays_of
from solvers.host_suborder import HostSuborder
from solvers.milp import MilpResult, MilpStatus, SolverFailedError
from solvers.problem import Problem
from solvers.simulate import Simulation, compute_order, simulate
from solvers.solution import Compute, Free, Solution, Status, Step
from solvers.suborder import Superorder

_log = logging.getLogger(__name__)

# Of the whole program
_ROUNDS = 8
_WHOLE_SHARE = 0.6  # of the time limit
_WHOLE_NODES = 1000  # of branch and bound
_WHOLE_GAP = 0.1  # per cent of the step
_TIGHT, _FEW = 0.9, 20  # moments at first: executions that take so much of the capacity; at most
_ROOM_SHARE = 0.01  # of the capacity, taken from the program where its plan stalls all the same
# Of its parts
_NODES = 100
_FREE = (20.0, 200.0, 1000.0)  # integer columns of a neighbourhood: fewest, at first, most
_SHRINKS = 8  # of one neighbourhood that has too many
_GAP = 0.01  # per cent of the step
_SHORT, _MANY = 0.8, 48  # moments, as above
_OPS = (4.0, 24.0)  # of a neighbourhood: fewest, at first
_WORTH = 2e-4  # of the step: less than this within `patience` neighbourhoods is not worth going on

_STALL = 1e-4  # of the step: shorter waits do not matter


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySearch:
    """Improves a plan with copies to the host. Proves nothing.

    Deterministic unless the time limit is hit, or the shares of it that solves of the whole program have.

    Attributes:
        time_limit_s: wall-clock limit; most of it may go into the whole program.
        most: neighbourhoods tried at most.
        patience: it ends when so many neighbourhoods together have gained next to nothing.
        seed: of the choice of neighbourhoods.

    """

    time_limit_s: float = 30.0
    most: int = 200
    patience: int = 15
    seed: int = 0

    def improve(self, problem: Problem, plan: Solution, *, enough_ns: int = 0) -> Solution:
        """The plan, or a faster one; the search ends with one that takes at most ``enough_ns``.

        Raises:
            ValueError: the problem has no host tier.

        """
        if not problem.has_host_tier:
            raise ValueError("the problem has no link to a host, or no bytes there: there is nothing to copy")
        start = time.perf_counter()
        search = _Search(problem, plan.steps, random.Random(self.seed), start + self.time_limit_s)  # noqa: S311
        search.solve_whole(start + _WHOLE_SHARE * self.time_limit_s, enough_ns)
        search.solve_parts(self.most, self.patience, enough_ns)
        found = search.plan.figures
        if found.step_time_ns >= plan.step_time_ns:
            return plan
        _log.debug("%d -> %d ns", plan.step_time_ns, found.step_time_ns)
        return Solution(
            status=Status.FEASIBLE,
            steps=search.plan.steps,
            step_time_ns=found.step_time_ns,
            peak_bytes=found.peak_bytes,
            lower_bound_ns=problem.keep_all_time_ns,
            solver="copies",
            solve_seconds=plan.solve_seconds + time.perf_counter() - start,
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A plan of a sub-order.

    Attributes:
        steps: of the plan.
        figures: what the simulator says of it.
        executed: positions of the superorder that take place.
        spans: for each storage when it is on the device, in positions of the superorder.

    """

    steps: tuple[Step, ...]
    figures: Simulation
    executed: tuple[int, ...]
    spans: list[list[Span]]


class _Search:
    """The best plan so far, the moments at which memory is looked at, and how large neighbourhoods of each kind are."""

    def __init__(self, problem: Problem, steps: tuple[Step, ...], draw: random.Random, deadline: float) -> None:
        self.problem = problem
        self.draw = draw
        self.deadline = deadline
        self.superorder = _recomputations_optional(compute_order(steps))
        self.step_ns = max(problem.keep_all_time_ns, 1)
        self.events = events_of(problem, self.superorder.ops)
        self.length = len(self.superorder.ops)
        self.plan = self._plan(steps, tuple(range(self.length)))
        live = self.plan.figures.live_bytes
        self.live = np.array([b for step, b in zip(steps, live, strict=True) if isinstance(step, Compute)])
        self.moments: list[int] = []
        self.model: HostSuborder | None = None
        self.tried: set[frozenset[int]] = set()  # neighbourhoods of this plan, with these moments
        self.size: dict[_Kind, float] = dict.fromkeys(_KINDS, _OPS[1])
        self.free: dict[_Kind, float] = dict.fromkeys(_KINDS, _FREE[1])

    def _plan(self, steps: tuple[Step, ...], executed: tuple[int, ...]) -> _Plan:
        figures = simulate(self.problem, steps)
        return _Plan(steps, figures, executed, spans_of(self.problem, steps, executed, self.length))

    def solve_whole(self, until: float, enough_ns: int) -> None:
        """Solve for everything, with ever more moments or ever less capacity, until a plan fits and does not stall."""
        problem = self.problem
        self.moments = self._fullest(_TIGHT, _FEW, self.length // 60)
        capacity = problem.capacity_bytes
        for _ in range(_ROUNDS):
            left = until - time.perf_counter()
            if not self.moments or left <= 0 or self.plan.figures.step_time_ns <= enough_ns:
                break
            model = HostSuborder(problem, self.superorder, self.moments, capacity)
            values = _near_whole(model, 0.5 * left)
            if values is None:
                break
            tried = self._offer(model.point(values))
            if tried is None:
                break
            excess = tried.figures.peak_bytes - problem.budget_bytes
            if self._look_at_faults(tried, 2 * _FEW // 5):
                continue
            if excess <= 0 and tried.figures.stall_ns <= _STALL * self.step_ns:
                break
            capacity -= max(excess // 2, int(_ROOM_SHARE * problem.capacity_bytes), 1)
            if capacity <= 0:
                break

    def solve_parts(self, most: int, patience: int, enough_ns: int) -> None:
        """Solve for the storages of some ops at a time."""
        self.moments = sorted({*self.moments, *self._fullest(_SHORT, _MANY, self.length // 100)})
        gains: list[int] = []
        while self.moments and len(gains) < most and self.plan.figures.step_time_ns > enough_ns:
            worth = _WORTH * self.step_ns
            if len(gains) >= patience and sum(gains[-patience:]) <= worth:
                break
            if time.perf_counter() > self.deadline:
                break
            before = self.plan.figures.step_time_ns
            self._solve_part(_KINDS[len(gains) % len(_KINDS)])
            gains.append(before - self.plan.figures.step_time_ns)

    def _solve_part(self, kind: _Kind) -> None:
        """Solve for one neighbourhood, and take over what is faster."""
        problem = self.problem
        if self.model is None:
            self.model = HostSuborder(problem, self.superorder, self.moments, problem.capacity_bytes)
        free, fixed = self._choose(self.model, kind)
        if free in self.tried:
            return
        self.tried.add(free)
        found = _solve(self.model, fixed, _NODES, _GAP, self.deadline - time.perf_counter())
        if found is None or found.status is MilpStatus.LIMIT:
            self.free[kind] = max(self.free[kind] / 1.3, _FREE[0])
        elif self.model.milp.integers - len(fixed) > 0.7 * self.free[kind]:
            self.free[kind] = min(1.1 * self.free[kind], _FREE[2])
        else:
            self.size[kind] = min(1.2 * self.size[kind], len(problem.time_ns))
        now = 100.0 * self.plan.figures.step_time_ns / self.step_ns
        if found is not None and found.values and found.objective < now - 0.5 * _GAP:
            tried = self._offer(self.model.point(found.values))
            if tried is not None and self._look_at_faults(tried, _FEW // 5):
                self.model = None
                self.tried.clear()

    def _choose(self, model: HostSuborder, kind: _Kind) -> tuple[frozenset[int], dict[int, float]]:
        """Storages that leave not too many columns free, and what the other ones fix."""
        for _ in range(_SHRINKS):
            ops = kind(self, max(1, int(self.size[kind])))
            free = frozenset(s for op in ops for s in self.problem.outputs[op])
            fixed = model.fixed(self.plan.spans, free)
            if model.milp.integers - len(fixed) <= self.free[kind]:
                break
            self.size[kind] = max(0.8 * self.size[kind], _OPS[0])
        return free, fixed

    def _offer(self, point: Point) -> _Plan | None:
        """The plan of a point, taken over if it fits and is faster; ``None`` where the solver's tolerances spoil it."""
        problem = self.problem
        order = [self.superorder.ops[q] for q in point.executed]
        leave_by = {s: bisect.bisect_left(point.executed, q) for s, q in point.leave_by.items()}
        stays = stays_of(problem, self.events, point)
        try:
            tried = self._plan(steps_of(problem, order, stays, leave_by), point.executed)
        except ValueError as error:
            _log.debug("a point that cannot be executed: %s", error)
            return None
        fits = tried.figures.peak_bytes <= problem.budget_bytes and tried.figures.host_bytes <= problem.host_bytes
        if fits and tried.figures.step_time_ns < self.plan.figures.step_time_ns:
            self.plan = tried
            self.tried.clear()
        return tried

    def _fullest(self, share: float, count: int, distance: int) -> list[int]:
        """Executions of the first plan at which memory is fullest, not too near to each other, ascending."""
        enough = self.problem.static_bytes + share * self.problem.capacity_bytes
        chosen: list[int] = []
        for position in np.argsort(-self.live, kind="stable").tolist():
            if self.live[position] < enough or len(chosen) == count:
                break
            if all(abs(position - c) >= distance for c in chosen):
                chosen.append(position)
        return sorted(chosen)

    def _look_at_faults(self, tried: _Plan, count: int) -> bool:
        """Add moments where a plan exceeds the budget or computation waits; say whether there were new ones."""
        distance = self.length // 150
        fresh: list[int] = []
        for position in self._faults(tried):
            if position not in self.moments and all(abs(position - f) >= distance for f in fresh):
                fresh.append(position)
        self.moments = sorted({*self.moments, *fresh[:count]})
        return bool(fresh)

    def _faults(self, tried: _Plan) -> list[int]:
        """Executions during or before which a plan exceeds the budget or computation waits, worst first."""
        problem, figures = self.problem, tried.figures
        weight: dict[int, float] = {}
        done = now = 0
        for step, live, start in zip(tried.steps, figures.live_bytes, figures.start_ns, strict=True):
            excess = max(live - problem.budget_bytes, 0) / max(problem.budget_bytes, 1)
            waited = 0.0
            if isinstance(step, Compute | Free):
                waited = (start - now) / self.step_ns
                now = max(now, start)
            if excess > 0 or waited > _STALL:
                position = tried.executed[min(done, len(tried.executed) - 1)]
                weight[position] = weight.get(position, 0.0) + excess + waited
            if isinstance(step, Compute):
                now += problem.time_ns[step.op]
                done += 1
        return sorted(weight, key=lambda position: (-weight[position], position))

    def recomputations(self) -> list[int]:
        """Executions of the plan that are not first ones."""
        return [q for q in self.plan.executed if self.superorder.optional[q]]

    def choose(self, positions: Sequence[int]) -> int:
        """One of some executions, those that take long first."""
        weights = [self.problem.time_ns[self.superorder.ops[q]] + 1 for q in positions]
        (position,) = self.draw.choices(positions, weights)
        return position


def _region(search: _Search, size: int) -> set[int]:
    """Ops that follow each other in the order of first executions, around one that is recomputed."""
    op = search.superorder.ops[search.choose(search.recomputations() or search.plan.executed)]
    start = max(0, op - search.draw.randrange(size))
    return set(range(start, min(start + size, len(search.problem.time_ns))))


def _moment(search: _Search, size: int) -> set[int]:
    """What makes storages that wait over one moment, and an op that is recomputed."""
    problem, again = search.problem, search.recomputations()
    ops = {search.superorder.ops[search.choose(again)]} if again else set()
    at = search.draw.choice(search.moments)
    waiting = [s for s, events in enumerate(search.events) if events[0][0] < at < events[-1][0]]
    weights = [problem.storage_bytes[s] ** 0.5 for s in waiting]
    while any(weights) and len(ops) < size:
        (index,) = search.draw.choices(range(len(waiting)), weights)
        ops.add(problem.producer[waiting[index]])
        weights[index] = 0.0
    return ops


def _window(search: _Search, size: int) -> set[int]:
    """Ops whose recomputations follow each other in the plan, and what makes their inputs."""
    again = search.recomputations()
    if not again:
        return _region(search, size)
    first = max(0, bisect.bisect_left(again, search.choose(again)) - search.draw.randrange(size))
    inside = [search.superorder.ops[q] for q in again[first : first + size]]
    return {*inside, *(search.problem.producer[s] for op in inside for s in search.problem.inputs[op])}


_Kind = Callable[[_Search, int], set[int]]
_KINDS: Final[tuple[_Kind, ...]] = (_region, _moment, _window)


def _near_whole(model: HostSuborder, time_limit_s: float) -> Sequence[float] | None:
    """A good point: what the relaxation has whole is fixed, then only what is dear to change; ``None`` without any."""
    deadline = time.perf_counter() + time_limit_s
    try:
        relaxation = model.milp.relax(time_limit_s=time_limit_s)
    except SolverFailedError:
        return None
    if relaxation.status is not MilpStatus.SOLVED:
        return None
    best: MilpResult | None = None
    for tolerance, share in ((-1.0, 0.3), (0.01 * _WHOLE_GAP, 1.0)):
        found = _solve(
            model,
            model.milp.near(relaxation, tolerance, integers_only=True),
            _WHOLE_NODES,
            0.3 * _WHOLE_GAP,
            share * (deadline - time.perf_counter()),
            hint=best.values if best else (),
            target=relaxation.bound + _WHOLE_GAP,
        )
        if found is not None and found.values and (best is None or found.objective < best.objective):
            best = found
    return None if best is None else best.values


def _solve(
    model: HostSuborder,
    fixed: dict[int, float],
    nodes: int,
    gap: float,
    time_limit_s: float,
    *,
    hint: Sequence[float] = (),
    target: float = -float("inf"),
) -> MilpResult | None:
    """Solve a program some of whose columns are fixed; ``None`` where the solver fails."""
    try:
        return model.milp.solve(
            absolute_gap=gap, time_limit_s=time_limit_s, node_limit=nodes, hint=hint, fixed=fixed, target=target
        )
    except SolverFailedError as error:
        _log.debug("%s", error)
        return None


def _recomputations_optional(order: Sequence[int]) -> Superorder:
    """An order of which all recomputations may be left out."""
    due = 0
    optional = []
    for op in order:
        optional.append(op != due)
        due += op == due
    return Superorder(tuple(order), tuple(optional), (True,) * len(order))
