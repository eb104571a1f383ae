"""Best-first search over all schedules of a small problem with a host tier: it settles what the moments leave open."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time

from solvers.host_states import HostState, HostStateSpace, all_settled, steps_to
from solvers.problem import Problem
from solvers.simulate import simulate
from solvers.solution import Solution, Status, Step

_NAME = "host-search"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSearchSolver:
    """A* over the states of computation, memory and both directions of the link, from a plan that is known.

    The states and edges are those of :class:`solvers.brute_force_offload.OffloadBruteForceSolver`. What a state still
    costs is at least::

        h = Σ w_v over the ops v that have not executed yet
          + Σ w_v over those that must execute again: they make a storage, neither resident nor on the host, which an op
            that has not executed yet reads or which must be live at the end; or an input, neither resident nor on the
            host, of such an op

    h is infinite where one of them must not be recomputed. An execution of v takes no less than w_v and removes nothing
    but v from the sums; freeing only adds to them, and copies take nothing away, since what is on the host stays there.
    So h is consistent: a state is final when it is taken from the queue, and at any time the least g + h in the queue
    is a lower bound on the time of every schedule. States that cannot lead to a plan faster than the known one are left
    out.

    A second at six ops, and more than the work allowed at about ten. Deterministic unless the time limit is hit.

    Attributes:
        max_states: states expanded at most.
        time_limit_s: wall-clock limit.

    """

    max_states: int = 50_000
    time_limit_s: float = 60.0

    def solve(self, problem: Problem, known: Solution | None = None) -> Solution:
        """Return a plan of least time, or a proof that there is none.

        Args:
            problem: what to schedule.
            known: a plan of it; only faster ones are looked for.

        Returns:
            ``OPTIMAL`` or ``INFEASIBLE`` where proven. Where the work allowed does not suffice, ``known`` as
            ``FEASIBLE`` with the bound proven so far, or ``TIME_LIMIT``.

        """
        started = time.perf_counter()
        search = _Search(problem, math.inf if known is None else known.step_time_ns)
        proven = problem.capacity_bytes < 0 or search.run(self.max_states, started + self.time_limit_s)
        seconds = time.perf_counter() - started
        bound = int(search.bound) if math.isfinite(search.bound) else problem.keep_all_time_ns
        if search.steps is not None:
            figures = simulate(problem, search.steps)
            time_ns, peak = figures.step_time_ns, figures.peak_bytes
            return Solution(Status.OPTIMAL, search.steps, time_ns, peak, time_ns, _NAME, seconds)
        if known is not None:
            status = Status.OPTIMAL if proven else Status.FEASIBLE
            bound = min(bound, known.step_time_ns)
            return dataclasses.replace(known, status=status, lower_bound_ns=bound, solve_seconds=seconds)
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        message = f"proven: no schedule fits {problem.budget_bytes:,} bytes" if proven else ""
        return Solution(status, (), 0, 0, bound, _NAME, seconds, message)


class _Search:
    """One search.

    Attributes:
        steps: a plan of least time that is faster than the limit, once there is one.
        bound: no schedule is faster than this, or than the limit.

    """

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem = problem
        self.limit = limit
        self.space = HostStateSpace(problem)
        self.steps: tuple[Step, ...] | None = None
        self.bound: float = 0.0
        ops = len(problem.time_ns)
        self.to_execute = [sum(problem.time_ns[position:]) for position in range(ops + 1)]
        self.awaited = [
            frozenset(
                s
                for s, made in enumerate(problem.producer)
                if made < p and (s in problem.live_at_end or any(r >= p for r in problem.readers[s]))
            )
            for p in range(ops + 1)
        ]

    def run(self, max_states: int, deadline: float) -> bool:
        """Search until the least time is proven (true), or the work or time allowed is spent (false)."""
        space = self.space
        elapsed: dict[HostState, int] = {space.start: 0}
        came_from: dict[HostState, tuple[HostState, Step]] = {}
        done: set[HostState] = set()
        tie = itertools.count()
        # (g + h, -ops executed, tie, whether only copies are waited for, state)
        queue = [(float(self.to_execute[0]), 0, next(tie), False, space.start)]
        while queue:
            estimate, _, _, is_over, state = heapq.heappop(queue)
            self.bound = max(self.bound, estimate)
            if is_over:
                self.steps = steps_to(came_from, state)
                return True
            if state in done:
                continue
            if len(done) >= max_states or time.perf_counter() > deadline:
                return False
            done.add(state)
            over = elapsed[state] + all_settled(state)
            if space.is_goal(state) and over < self.limit:
                heapq.heappush(queue, (over, -state.position, next(tie), True, state))
            for step, took, successor in space.successors(state):
                cost = elapsed[state] + took
                if successor in done or cost >= elapsed.get(successor, math.inf):
                    continue
                estimate = cost + self._to_come(successor)
                if estimate < self.limit:
                    elapsed[successor] = cost
                    came_from[successor] = (state, step)
                    heapq.heappush(queue, (estimate, -successor.position, next(tie), False, successor))
        self.bound = self.limit
        return True

    def _to_come(self, state: HostState) -> float:
        """h: time of what has not executed yet, and of what must execute again."""
        problem = self.problem
        there = state.resident.union(s for s, _ in state.departing)
        missing = list(self.awaited[state.position] - there)
        seen = set(missing)
        ops: set[int] = set()
        while missing:
            op = problem.producer[missing.pop()]
            if op not in ops:
                if not problem.recomputable[op]:
                    return math.inf
                ops.add(op)
                fresh = [s for s in problem.inputs[op] if s not in there and s not in seen]
                seen.update(fresh)
                missing.extend(fresh)
        return self.to_execute[state.position] + sum(problem.time_ns[op] for op in ops)
