"""Exhaustive search over all schedules of a tiny problem: the oracle against which every other solver is held."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator

from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Solution, Status, Step

_State = tuple[int, int]  # (next op to execute for the first time, resident storages as a bit set)


class _TooManyStatesError(Exception):
    """The search has expanded as many states as it may."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BruteForceSolver:
    """Shortest path over states (p, R): ops before p have executed, the storages in R are resident.

    ::

        start   (0, ∅)                                                   goal  p = n and R ⊇ live_at_end
        edge    (p, R) --w_v--> (p + [v = p], K ∪ outputs(v))
                for v = p, and for every recomputable v < p with an output outside R
                where inputs(v) ⊆ K ⊆ R − outputs(v)  and  bytes(K) + bytes(outputs(v)) + workspace(v) ≤ capacity

    Dijkstra's algorithm finds the least-time path, which is the optimum over *all* schedules with the given order of
    first executions, each op any number of times. Freeing is part of the edge: only what must go to make room goes, so
    K ranges over the inclusion-maximal sets that fit. Nothing is lost, since whatever a schedule frees earlier than
    that can be freed later: if R contains the resident set of some schedule, so does some successor of (p, R). Storages
    that no future op can need are dropped at once.

    The number of states grows as 2^storages: meant for about a dozen ops. Deterministic.

    Attributes:
        max_states: the search gives up with ``TIME_LIMIT`` after expanding this many states.
        find_floor: whether an infeasible problem is answered with the least feasible budget (by bisection, several
            searches more).

    """

    max_states: int = 500_000
    find_floor: bool = True

    def solve(self, problem: Problem) -> Solution:
        """Return an optimal plan, or ``INFEASIBLE`` with the exact floor, or ``TIME_LIMIT`` without a plan."""
        started = time.perf_counter()
        keep_all = problem.keep_all_time_ns
        try:
            steps = self._least_time(problem)
            floor = self._floor(problem) if steps is None and self.find_floor else None
        except _TooManyStatesError:
            seconds = time.perf_counter() - started
            message = f"gave up after {self.max_states} states: the problem is too large for exhaustive search"
            return Solution(Status.TIME_LIMIT, (), 0, 0, keep_all, "brute_force", seconds, message)
        seconds = time.perf_counter() - started
        if steps is None:
            known = "" if floor is None else f"; the least budget that any schedule fits is {floor:,} bytes"
            message = f"no schedule fits {problem.budget_bytes:,} bytes{known}"
            return Solution(Status.INFEASIBLE, (), 0, 0, keep_all, "brute_force", seconds, message, floor, floor)
        figures = simulate(problem, steps)
        return Solution(
            status=Status.OPTIMAL,
            steps=steps,
            step_time_ns=figures.step_time_ns,
            peak_bytes=figures.peak_bytes,
            lower_bound_ns=figures.step_time_ns,
            solver="brute_force",
            solve_seconds=seconds,
            message="least time of all schedules, by exhaustive search",
        )

    def _least_time(self, problem: Problem) -> tuple[Step, ...] | None:
        """Dijkstra's algorithm; ``None`` where no path reaches the goal."""
        if problem.capacity_bytes < 0:
            return None
        space = _Space(problem)
        start: _State = (0, 0)
        best: dict[_State, int] = {start: 0}
        came_from: dict[_State, tuple[_State, int]] = {}
        done: set[_State] = set()
        tie = itertools.count()
        queue = [(0, next(tie), start)]
        while queue:
            elapsed, _, state = heapq.heappop(queue)
            if state in done:
                continue
            if space.is_goal(state):
                return with_frees(problem, _ops_of_path(came_from, state))
            done.add(state)
            if len(done) > self.max_states:
                raise _TooManyStatesError
            for op, successor in space.successors(state):
                arrival = elapsed + problem.time_ns[op]
                if successor not in best or arrival < best[successor]:
                    best[successor] = arrival
                    came_from[successor] = (state, op)
                    heapq.heappush(queue, (arrival, next(tie), successor))
        return None

    def _floor(self, problem: Problem) -> int:
        """Least budget for which some schedule exists, static bytes included."""
        too_little = problem.budget_bytes
        keep_all = with_frees(problem, range(len(problem.time_ns)))
        enough = simulate(problem, keep_all).peak_bytes
        while enough - too_little > 1:
            middle = (enough + too_little) // 2
            steps = self._least_time(problem.with_budget(middle))
            if steps is None:
                too_little = middle
            else:
                enough = simulate(problem, steps).peak_bytes
        return enough


class _Space:
    """The edges of the search: which states follow a state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.inputs = [_bits(storages) for storages in problem.inputs]
        self.outputs = [_bits(storages) for storages in problem.outputs]
        self.live_at_end = _bits(problem.live_at_end)
        self.needed = [self._needed_from(position) for position in range(len(problem.time_ns) + 1)]
        sizes = enumerate(problem.storage_bytes)
        self.largest_first = sorted(((size, storage) for storage, size in sizes if size), reverse=True)
        self.demand = [
            sum(problem.storage_bytes[storage] for storage in outputs) + workspace
            for outputs, workspace in zip(problem.outputs, problem.workspace_bytes, strict=True)
        ]

    def _needed_from(self, position: int) -> int:
        """Storages that a schedule can still need once the ops before ``position`` have executed."""
        problem = self.problem
        needed = self.live_at_end
        for op in range(len(problem.time_ns) - 1, -1, -1):
            if op >= position or (problem.recomputable[op] and self.outputs[op] & needed):
                needed |= self.inputs[op]
        return needed

    def is_goal(self, state: _State) -> bool:
        """Whether every op has executed and what must live to the end is resident."""
        position, resident = state
        return position == len(self.problem.time_ns) and not self.live_at_end & ~resident

    def successors(self, state: _State) -> Iterator[tuple[int, _State]]:
        """Each op that can execute now, with each state that can follow."""
        position, resident = state
        for op in range(min(position + 1, len(self.problem.time_ns))):
            wanted = self.outputs[op] & self.needed[position] & ~resident
            if self.inputs[op] & ~resident or (op < position and not (self.problem.recomputable[op] and wanted)):
                continue
            follower = max(position, op + 1)
            for kept in self._kept(resident & ~self.outputs[op], op):
                yield op, (follower, (kept | self.outputs[op]) & self.needed[follower])

    def _kept(self, resident: int, op: int) -> Iterator[int]:
        """Inclusion-maximal subsets of ``resident`` that hold the inputs of ``op`` and leave room for it to run."""
        held = [(size, storage) for size, storage in self.largest_first if resident >> storage & 1]
        excess = sum(size for size, _ in held) + self.demand[op] - self.problem.capacity_bytes
        droppable = [(size, storage) for size, storage in held if not self.inputs[op] >> storage & 1]
        for dropped in _least_drops(droppable, excess):
            yield resident & ~dropped


def _least_drops(largest_first: list[tuple[int, int]], excess: int) -> Iterator[int]:
    """Inclusion-minimal sets of (size, storage) whose sizes sum up to at least ``excess``, as bit sets.

    Items are taken from the largest down and no further once they suffice: without its last and smallest item a set
    falls short, so each set found is minimal, and each minimal set is found once.
    """
    if excess <= 0:
        yield 0
        return
    for i, (size, storage) in enumerate(largest_first):
        for rest in _least_drops(largest_first[i + 1 :], excess - size):
            yield 1 << storage | rest


def _bits(storages: Iterable[int]) -> int:
    """The set as the bits of an integer."""
    return sum(1 << storage for storage in set(storages))


def _ops_of_path(came_from: dict[_State, tuple[_State, int]], state: _State) -> list[int]:
    """Ops executed on the way from the start to ``state``, in order."""
    ops: list[int] = []
    while state in came_from:
        state, op = came_from[state]
        ops.append(op)
    ops.reverse()
    return ops
