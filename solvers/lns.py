"""Large-neighbourhood search: free a part of a plan, solve that part exactly with the rest fixed, and repeat.

A neighbourhood is a set of ops, chosen around a recomputation that costs time, and a stretch of the plan. Within it the
recomputations of these ops may be left out, and others may be inserted: right before an execution that reads what such
an op makes, where memory was short since that was last used. What comes of it is a superorder of the plan, whose best
sub-order CP-SAT finds (:mod:`solvers.suborder`). There are three kinds:

- *moment*: what is not used over one execution at which memory is short, be it held or made again later;
- *region*: ops that follow each other in the order of first executions, over the whole plan;
- *window*: recomputations that follow each other in the plan, and what makes their inputs, over that stretch alone.

Neighbourhoods grow while they are solved to the optimum, and shrink where they are not.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from solvers.live import LiveBytes
from solvers.problem import Problem
from solvers.prune import pruned
from solvers.simulate import compute_order, simulate, with_frees
from solvers.solution import Solution, Status
from solvers.suborder import Superorder, best_suborder

_log = logging.getLogger(__name__)

_SHORT = 0.9  # of the capacity: memory is short where so much is live
_WORK = 0.04  # of CP-SAT per neighbourhood, some tenths of a second
_WORK_IN_ALL = (0.1, 5e-4)  # of CP-SAT for a plan: at least, and per op
_EASY = 0.25  # of that work: a neighbourhood solved with less was too small
_OPTIONAL = (8, 100, 500)  # optional executions: fewest, at first, most
_OPS = (4.0, 16.0)  # ops of a neighbourhood: fewest, at first
_SHRINKS = 8  # of one neighbourhood that has too many optional executions
_WORTH = 2e-4  # of the step: less than this within `patience` neighbourhoods is not worth going on


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighbourhoodSearch:
    """Improves a plan. Proves nothing. Deterministic unless the time limit is hit.

    Attributes:
        time_limit_s: wall-clock limit. The work of CP-SAT has a limit of its own, by the number of ops.
        most: neighbourhoods tried at most.
        patience: it ends when so many neighbourhoods together have gained next to nothing.
        seed: of the choice of neighbourhoods.

    """

    time_limit_s: float = 60.0
    most: int = 400
    patience: int = 24
    seed: int = 0

    def improve(self, problem: Problem, plan: Solution, *, enough_ns: int = 0) -> Solution:
        """The plan, or a faster one; the search ends with one that takes at most ``enough_ns``."""
        start = time.perf_counter()
        deadline = start + self.time_limit_s
        search = _Search(problem, compute_order(plan.steps), random.Random(self.seed))  # noqa: S311
        recent: list[int] = []
        while len(recent) < self.most and search.plan.again and search.time_ns > enough_ns:
            worth = _WORTH * problem.keep_all_time_ns
            if len(recent) >= self.patience and sum(recent[-self.patience :]) <= worth:
                break
            left = deadline - time.perf_counter()
            if left <= 0 or search.work > _WORK_IN_ALL[0] + _WORK_IN_ALL[1] * len(problem.time_ns):
                break
            before = search.time_ns
            search.try_one(_KINDS[len(recent) % len(_KINDS)], left)
            recent.append(before - search.time_ns)
        if search.time_ns >= plan.step_time_ns:
            return plan
        steps = with_frees(problem, search.plan.order)
        figures = simulate(problem, steps)
        found = Solution(
            status=Status.FEASIBLE,
            steps=steps,
            step_time_ns=figures.step_time_ns,
            peak_bytes=figures.peak_bytes,
            lower_bound_ns=plan.lower_bound_ns,
            solver="neighbourhoods",
            solve_seconds=plan.solve_seconds + time.perf_counter() - start,
        )
        return pruned(problem, found, deadline=deadline)


class _Plan:
    """An order of executions that fits, laid out for the choice of neighbourhoods.

    Attributes:
        order: the ops that execute.
        stage: per execution the op that is next to execute for the first time.
        again: recomputations, as positions.

    """

    def __init__(self, problem: Problem, order: Sequence[int], live: LiveBytes) -> None:
        self.problem = problem
        self.order = tuple(order)
        self.stage: list[int] = []
        self.again: list[int] = []
        self.recomputed_in: dict[int, set[int]] = {}  # op -> stages
        self.events: list[list[int]] = [[] for _ in problem.storage_bytes]
        self.reads: list[list[int]] = [[] for _ in problem.storage_bytes]
        due = 0
        for position, op in enumerate(order):
            self.stage.append(due)
            if op == due:
                due += 1
            else:
                self.again.append(position)
                self.recomputed_in.setdefault(op, set()).add(due)
            for s in problem.inputs[op]:
                self.reads[s].append(position)
                self.events[s].append(position)
            for s in problem.outputs[op]:
                self.events[s].append(position)
        self.short = live.during(order) >= _SHORT * problem.capacity_bytes
        self._short_before = np.concatenate(([0], np.cumsum(self.short)))
        self.weights = [problem.time_ns[order[position]] + 1 for position in self.again]

    def last_event(self, s: int, position: int) -> int:
        """The last execution before ``position`` that reads or makes ``s``."""
        return self.events[s][bisect.bisect_left(self.events[s], position) - 1]

    def is_short_since(self, s: int, position: int) -> bool:
        """Whether memory is short between the last event of ``s`` and ``position``."""
        return bool(self._short_before[position] > self._short_before[self.last_event(s, position) + 1])

    @functools.cached_property
    def waits(self) -> NDArray[np.int64]:
        """Storages that are not used between two executions, held or dropped and made again: three rows."""
        found = [
            (s, since, until)
            for s, events in enumerate(self.events)
            if self.problem.storage_bytes[s]
            for since, until in itertools.pairwise(events)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 3).T


@dataclasses.dataclass(frozen=True)
class _Neighbourhood:
    """Ops that may be recomputed or not at the executions from ``start`` up to ``stop``."""

    ops: frozenset[int]
    start: int
    stop: int


def _moment(plan: _Plan, position: int, size: int, draw: random.Random) -> _Neighbourhood:
    problem = plan.problem
    op = plan.order[position]
    ops = {op}
    since = min((plan.last_event(s, position) for s in problem.outputs[op]), default=position)
    short = np.flatnonzero(plan.short[since + 1 : position]) + since + 1
    if len(short):
        at = int(draw.choice(short.tolist()))
        storage, start, end = plan.waits
        idle = storage[(start < at) & (at < end)].tolist()
        weights = [problem.storage_bytes[s] ** 0.5 for s in idle]
        while idle and len(ops) < size:
            (index,) = draw.choices(range(len(idle)), weights)
            ops.add(problem.producer[idle.pop(index)])
            weights.pop(index)
    return _Neighbourhood(frozenset(ops), 0, len(plan.order))


def _region(plan: _Plan, position: int, size: int, draw: random.Random) -> _Neighbourhood:
    start = max(0, plan.order[position] - draw.randrange(size))
    return _Neighbourhood(frozenset(range(start, min(start + size, len(plan.problem.time_ns)))), 0, len(plan.order))


def _window(plan: _Plan, position: int, size: int, draw: random.Random) -> _Neighbourhood:
    first = bisect.bisect_left(plan.again, position) - draw.randrange(size)
    inside = plan.again[max(first, 0) : max(first, 0) + size]
    start, stop = inside[0], inside[-1] + 1
    ops = {plan.order[p] for p in inside}
    problem = plan.problem
    ops |= {problem.producer[s] for p in range(start, stop) for s in problem.inputs[plan.order[p]]}
    return _Neighbourhood(frozenset(ops), start, stop)


_Kind = Callable[[_Plan, int, int, random.Random], _Neighbourhood]
_KINDS: Final[tuple[_Kind, ...]] = (_moment, _region, _window)


def superorder_of(plan: _Plan, neighbourhood: _Neighbourhood) -> Superorder:
    """The plan with the recomputations of a neighbourhood optional, and those inserted that might replace others."""
    inserted = _insertions(plan, neighbourhood)
    ops: list[int] = []
    optional: list[bool] = []
    known: list[bool] = []
    again = {
        p for p in plan.again if neighbourhood.start <= p < neighbourhood.stop and plan.order[p] in neighbourhood.ops
    }
    for position, op in enumerate(plan.order):
        extra = sorted(inserted.get(position, ()))
        ops.extend((*extra, op))
        optional.extend((*(True for _ in extra), position in again))
        known.extend((*(False for _ in extra), True))
    return Superorder(tuple(ops), tuple(optional), tuple(known))


def _insertions(plan: _Plan, neighbourhood: _Neighbourhood) -> dict[int, list[int]]:
    """Per position, ops that might be recomputed right before it, each once per stage.

    Descending, so that what an inserted op reads may be made before it in turn.
    """
    problem = plan.problem
    inserted: dict[int, list[int]] = {}
    wanted: dict[int, dict[int, int]] = {}  # storage -> stage -> first position before which an inserted op reads it
    for op in sorted(neighbourhood.ops, reverse=True):
        if not problem.recomputable[op]:
            continue
        places: dict[int, int] = {}
        for s in problem.outputs[op]:
            reads = plan.reads[s]
            within = reads[
                bisect.bisect_left(reads, neighbourhood.start) : bisect.bisect_left(reads, neighbourhood.stop)
            ]
            for position in (*within, *wanted.get(s, {}).values()):
                stage = plan.stage[position]
                if stage > op and plan.is_short_since(s, position):
                    places[stage] = min(position, places.get(stage, position))
        for stage in places.keys() - plan.recomputed_in.get(op, set()):
            position = places[stage]
            inserted.setdefault(position, []).append(op)
            for s in problem.inputs[op]:
                first = wanted.setdefault(s, {})
                first[stage] = min(position, first.get(stage, position))
    return inserted


class _Search:
    """The best plan so far, and how large neighbourhoods of each kind are."""

    def __init__(self, problem: Problem, order: Sequence[int], draw: random.Random) -> None:
        self.problem = problem
        self.live = LiveBytes(problem)
        self.draw = draw
        self.plan = _Plan(problem, order, self.live)
        self.time_ns = self.live.time_ns(order)
        self.work = 0.0
        self.ops = dict.fromkeys(_KINDS, _OPS[1])
        self.optional = dict.fromkeys(_KINDS, float(_OPTIONAL[1]))

    def try_one(self, kind: _Kind, time_limit_s: float) -> None:
        """Solve one neighbourhood, and take over what is faster."""
        superorder = self._choose(kind)
        found = best_suborder(self.problem, superorder, most_work=_WORK, time_limit_s=time_limit_s, live=self.live)
        self.work += found.work
        if not found.proven:
            self.optional[kind] = max(self.optional[kind] / 1.3, _OPTIONAL[0])
        elif found.work < _EASY * _WORK:
            self.optional[kind] = min(1.1 * self.optional[kind], _OPTIONAL[2])
            if sum(superorder.optional) < 0.7 * self.optional[kind]:
                self.ops[kind] = min(1.2 * self.ops[kind], len(self.problem.time_ns))
        if found.ops is None:
            return
        time_ns = self.live.time_ns(found.ops)
        if time_ns < self.time_ns and self.live.peak(found.ops) <= self.problem.budget_bytes:
            _log.debug("%s: %d -> %d ns", kind.__name__, self.time_ns, time_ns)
            self.time_ns = time_ns
            self.plan = _Plan(self.problem, found.ops, self.live)

    def _choose(self, kind: _Kind) -> Superorder:
        """A neighbourhood of some recomputation, those that cost most time first, with not too many optional ops."""
        (position,) = self.draw.choices(self.plan.again, self.plan.weights)
        for _ in range(_SHRINKS):
            superorder = superorder_of(self.plan, kind(self.plan, position, max(1, int(self.ops[kind])), self.draw))
            if sum(superorder.optional) <= self.optional[kind]:
                break
            self.ops[kind] = max(0.8 * self.ops[kind], _OPS[0])
        return superorder
