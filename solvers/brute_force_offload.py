"""Exhaustive search over all schedules of a tiny problem with a host tier: the oracle of the offload solver."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time

from solvers.host_states import HostState, HostStateSpace, all_settled, steps_to
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Solution, Status, Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadBruteForceSolver:
    """Dijkstra's algorithm over the states of computation, memory, and both directions of the link.

    Every step of a plan is an edge of its own, whose length is what computation advances by: an execution takes the
    wait for its inputs and its time, a free the wait for copies of the storage, the start of a copy nothing. The goal
    is reached through an edge that waits for all copies. Nothing is pruned but storages that nothing can need, which
    are freed, or never copied. For about six ops.

    Attributes:
        max_states: the search gives up with ``TIME_LIMIT`` after expanding this many states.

    """

    max_states: int = 300_000

    def solve(self, problem: Problem) -> Solution:
        """Return an optimal plan, or ``INFEASIBLE``, or ``TIME_LIMIT`` without a plan."""
        start = time.perf_counter()
        steps, exhausted = self._least_time(problem)
        seconds = time.perf_counter() - start
        if steps is None:
            status = Status.INFEASIBLE if exhausted else Status.TIME_LIMIT
            return Solution(status, (), 0, 0, problem.keep_all_time_ns, "brute_force_offload", seconds)
        figures = simulate(problem, steps)
        found = figures.step_time_ns
        return Solution(Status.OPTIMAL, steps, found, figures.peak_bytes, found, "brute_force_offload", seconds)

    def _least_time(self, problem: Problem) -> tuple[tuple[Step, ...] | None, bool]:
        """The steps of a shortest path, or ``None`` and whether all states were seen."""
        if problem.capacity_bytes < 0:
            return None, True
        space = HostStateSpace(problem)
        start = space.start
        best = {start: 0}
        came_from: dict[HostState, tuple[HostState, Step]] = {}
        done: set[HostState] = set()
        tie = itertools.count()
        queue: list[tuple[int, int, HostState | None, HostState]] = [(0, next(tie), start, start)]
        while queue:
            elapsed, _, state, last = heapq.heappop(queue)
            if state is None:  # the goal, reached from ``last``
                return steps_to(came_from, last), True
            if state in done:
                continue
            done.add(state)
            if len(done) > self.max_states:
                return None, False
            if space.is_goal(state):
                heapq.heappush(queue, (elapsed + all_settled(state), next(tie), None, state))
            for step, took, successor in space.successors(state):
                if successor not in best or elapsed + took < best[successor]:
                    best[successor] = elapsed + took
                    came_from[successor] = (state, step)
                    heapq.heappush(queue, (elapsed + took, next(tie), successor, successor))
        return None, True
