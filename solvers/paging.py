"""Demand paging to the host: when memory is short, what is used furthest in the future leaves, and comes back for it.

For a given order of executions this is Belady's rule (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966), with storages of different sizes for pages. It needs no more
memory than what each execution touches and what may not leave, so that it finds a plan wherever any with that order
does, in time O(n log n) in the events of the order; :mod:`solvers.extract_offload` then has the copies run beside
computation. What it does not know is the price of a copy: it is for budgets where other searches find nothing, and for
orders that recompute what a slow link has no time for.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from solvers.extract_offload import Stay, steps_of
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Solution, Status

_NAME = "paging"


def paged(problem: Problem, order: Sequence[int]) -> Solution | None:
    """The plan that executes ops in this order and pages to the host, or ``None`` where it does not fit.

    Args:
        problem: with a host tier.
        order: ops that execute, each of whose inputs was made before; as of :func:`solvers.simulate.compute_order`.

    """
    paging = _Paging(problem, order)
    if not paging.run():
        return None
    best: Solution | None = None
    for leave_by in (None, paging.leave_by):  # copies out in the order of production, and in that of need
        stays = [dataclasses.replace(stay) for stay in paging.stays]  # they are moved to where copies end and begin
        steps = steps_of(problem, order, stays, leave_by)
        figures = simulate(problem, steps)
        fits = figures.peak_bytes <= problem.budget_bytes and figures.host_bytes <= problem.host_bytes
        if fits and (best is None or figures.step_time_ns < best.step_time_ns):
            status, bound_ns = Status.FEASIBLE, problem.keep_all_time_ns
            best = Solution(status, steps, figures.step_time_ns, figures.peak_bytes, bound_ns, _NAME)
    return best


def least_paged_bytes(problem: Problem, order: Sequence[int]) -> int:
    """The least budget for which :func:`paged` has a plan of this order, if the host has room for all that may leave.

    That is what an execution touches, with what waits meanwhile and may not leave: the most over the order.
    """
    following = _following(problem, order)
    staying = most = 0
    held: set[int] = set()  # what may not leave, from its production to its last use
    for position, op in enumerate(order):
        inputs, outputs = problem.inputs[op], problem.outputs[op]
        touched = {s for s in (*inputs, *outputs) if s not in held}
        most = max(most, staying + _bytes(problem, touched) + problem.workspace_bytes[op])
        for s in (*inputs, *outputs):
            waits = following[position][s] < math.inf and not problem.may_offload(s)
            if waits and s not in held:
                held.add(s)
                staying += problem.storage_bytes[s]
            elif not waits and s in held:
                held.remove(s)
                staying -= problem.storage_bytes[s]
    return problem.static_bytes + max(most, _bytes(problem, problem.live_at_end))


def touched_only(problem: Problem) -> Problem:
    """The problem in which what may leave takes memory only while an execution touches it, and copies take no time.

    Its schedules are orders for :func:`paged`, the least of their peaks is that of :func:`least_paged_bytes`, and no
    schedule of ``problem`` fits where none of this does.
    """
    sizes = [0 if problem.may_offload(s) else size for s, size in enumerate(problem.storage_bytes)]
    workspaces = [
        workspace + sum(problem.storage_bytes[s] - sizes[s] for s in (*inputs, *outputs))
        for workspace, inputs, outputs in zip(problem.workspace_bytes, problem.inputs, problem.outputs, strict=True)
    ]
    fewer = dataclasses.replace(problem, storage_bytes=tuple(sizes), workspace_bytes=tuple(workspaces))
    return fewer.with_link(None, 0)


def _bytes(problem: Problem, storages: set[int] | frozenset[int]) -> int:
    return sum(problem.storage_bytes[s] for s in storages)


def _following(problem: Problem, order: Sequence[int]) -> list[dict[int, float]]:
    """For each position and what is touched there, the position that reads it next.

    Infinite where nothing does before it is made again. What lives to the end is read at the length of the order.
    """
    upcoming: dict[int, float] = dict.fromkeys(problem.live_at_end, len(order))
    following: list[dict[int, float]] = [{} for _ in order]
    for position in reversed(range(len(order))):
        op = order[position]
        for s in (*problem.inputs[op], *problem.outputs[op]):
            following[position][s] = upcoming.get(s, math.inf)
        for s in problem.outputs[op]:
            upcoming[s] = math.inf
        for s in problem.inputs[op]:
            upcoming[s] = position
    return following


class _Paging:
    """A walk along the order.

    Attributes:
        stays: of all storages so far.
        leave_by: for what has left, the position by which it first had to.

    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem = problem
        self.order = order
        self.stays: list[Stay] = []
        self.leave_by: dict[int, int] = {}
        self._following = _following(problem, order)
        self._resident: dict[int, Stay] = {}
        self._next: dict[int, float] = {}  # of what is resident: the position that reads it next
        self._candidates: list[tuple[float, int, int]] = []  # (-next, -bytes, storage): a heap, with outdated ones
        self._live = problem.static_bytes
        self._host_left = problem.host_bytes

    def run(self) -> bool:
        """Whether everything fits."""
        problem = self.problem
        for position, op in enumerate(self.order):
            for s in problem.inputs[op]:
                if s not in self._resident:
                    self._begin(s, position, fetched=True)
            grown = sum(problem.storage_bytes[s] for s in problem.outputs[op]) + problem.workspace_bytes[op]
            if not self._make_room(position, problem.budget_bytes - grown):
                return False
            for s in problem.outputs[op]:
                self._begin(s, position, fetched=False)
            for s in (*problem.inputs[op], *problem.outputs[op]):
                self._touch(s, position)
        end = len(self.order)
        for s in sorted(problem.live_at_end):
            if s not in self._resident:
                self._begin(s, end, fetched=True)
            self._resident[s].last = end
        return self._live <= problem.budget_bytes

    def _begin(self, s: int, position: int, *, fetched: bool) -> None:
        stay = Stay(s, position, position, fetched)
        self.stays.append(stay)
        self._resident[s] = stay
        self._next[s] = position
        self._live += self.problem.storage_bytes[s]

    def _touch(self, s: int, position: int) -> None:
        """Note a use, and what follows; what nothing reads any more is dropped."""
        if s not in self._resident:
            return
        self._resident[s].last = position
        self._next[s] = self._following[position][s]
        if math.isinf(self._next[s]):
            self._drop(s)
        elif self.problem.may_offload(s):
            heapq.heappush(self._candidates, (-self._next[s], -self.problem.storage_bytes[s], s))

    def _drop(self, s: int) -> None:
        del self._resident[s]
        self._live -= self.problem.storage_bytes[s]

    def _make_room(self, position: int, most: int) -> bool:
        """Have storages leave that are not read here, the furthest next use first, until no more is live."""
        too_much: list[tuple[float, int, int]] = []  # for the host
        while self._live > most and self._candidates:
            candidate = heapq.heappop(self._candidates)
            following, size, s = -candidate[0], -candidate[1], candidate[2]
            if s not in self._resident or self._next[s] != following:
                continue
            if following <= position:
                heapq.heappush(self._candidates, candidate)
                break
            if s not in self.leave_by:
                if size > self._host_left:
                    too_much.append(candidate)
                    continue
                self.leave_by[s] = position
                self._host_left -= size
            self._drop(s)
        for candidate in too_much:
            heapq.heappush(self._candidates, candidate)
        return self._live <= most
