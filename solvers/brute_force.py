"""Exhaustive search over all schedules of a tiny problem: the oracle against which every other solver is held."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time

from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Solution, Status, Step
from solvers.states import State, StateSpace, ops_of_path


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
        space = StateSpace(problem)
        start: State = (0, 0)
        best: dict[State, int] = {start: 0}
        came_from: dict[State, tuple[State, int]] = {}
        done: set[State] = set()
        tie = itertools.count()
        queue = [(0, next(tie), start)]
        while queue:
            elapsed, _, state = heapq.heappop(queue)
            if state in done:
                continue
            if space.is_goal(state):
                return with_frees(problem, ops_of_path(came_from, state))
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
