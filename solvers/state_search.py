"""Best-first search over all schedules of a small problem: what no relaxation leaves open is settled here."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time

from solvers.problem import Problem
from solvers.simulate import compute_order, simulate, with_frees
from solvers.solution import Solution, Status, Step
from solvers.states import State, StateSpace, ops_of_path

_NAME = "state-search"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSearchSolver:
    """A* over states (p, R): ops before p have executed, the storages in R are resident.

    The states and edges are those of :class:`solvers.brute_force.BruteForceSolver`, each edge at the time it *adds* to
    the keep-all step: w_v for executing v again, nothing for a first execution. What a state still costs is at least::

        h(p, R) = Σ w_v over the ops v < p that must execute again:
                  those that make a storage outside R which an op ≥ p reads when it first executes, or which must be
                  live at the end; and those that make an input outside R of such an op

    h is infinite where one of them must not be recomputed. Executing v removes nothing but v from the sum, and dropping
    storages only adds to it, so that h is consistent: a state is final when it is taken from the queue. At any time the
    least g + h in the queue is a lower bound on the time that every schedule adds, however often it recomputes.

    Seconds at 20 ops, and more than the work allowed at 25 to 30. Deterministic unless the time limit is hit.

    Attributes:
        max_states: states expanded at most.
        time_limit_s: wall-clock limit.

    """

    max_states: int = 100_000
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
        limit = math.inf if known is None else known.step_time_ns - problem.keep_all_time_ns
        search = _Search(problem, limit)
        proven = problem.capacity_bytes < 0 or search.run(self.max_states, started + self.time_limit_s)
        if search.goal is not None:
            steps: tuple[Step, ...] = with_frees(problem, ops_of_path(search.came_from, search.goal))
        else:
            steps = () if known is None else with_frees(problem, compute_order(known.steps))
        found = search.goal is not None or known is not None
        figures = simulate(problem, steps) if found else None
        if figures is not None:
            status = Status.OPTIMAL if proven else Status.FEASIBLE
        else:
            status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        bound = problem.keep_all_time_ns + (search.bound if math.isfinite(search.bound) else 0)
        return Solution(
            status=status,
            steps=steps,
            step_time_ns=figures.step_time_ns if figures else 0,
            peak_bytes=figures.peak_bytes if figures else 0,
            lower_bound_ns=min(int(bound), figures.step_time_ns) if figures else int(bound),
            solver=_NAME if search.goal is not None or known is None else known.solver,
            solve_seconds=time.perf_counter() - started,
            message="" if found or not proven else f"proven: no schedule fits {problem.budget_bytes:,} bytes",
        )


class _Search:
    """One search.

    Attributes:
        goal: the last state of a least-time path that costs less than the limit, once there is one.
        bound: no schedule adds less than this, or than the limit.
        came_from: per state reached, the one before it and the op between them.

    """

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem = problem
        self.limit = limit
        self.space = StateSpace(problem)
        self.awaited = [self._awaited_from(p) for p in range(len(problem.time_ns) + 1)]
        self.came_from: dict[State, tuple[State, int]] = {}
        self.goal: State | None = None
        self.bound: float = 0.0

    def run(self, max_states: int, deadline: float) -> bool:
        """Search until the least time is proven (true), or the work or time allowed is spent (false)."""
        space = self.space
        start: State = (0, 0)
        added: dict[State, int] = {start: 0}
        done: set[State] = set()
        tie = itertools.count()
        queue: list[tuple[float, int, int, State]] = [(0.0, 0, next(tie), start)]
        while queue:
            estimate, _, _, state = heapq.heappop(queue)
            if state in done:
                continue
            self.bound = max(self.bound, estimate)
            if space.is_goal(state):
                self.goal = state
                return True
            if len(done) >= max_states or time.perf_counter() > deadline:
                return False
            done.add(state)
            for op, successor in space.successors(state):
                cost = added[state] + (self.problem.time_ns[op] if op < state[0] else 0)
                if successor in done or cost >= added.get(successor, math.inf):
                    continue
                estimate = cost + self._to_come(successor)
                if estimate < self.limit:
                    added[successor] = cost
                    self.came_from[successor] = (state, op)
                    heapq.heappush(queue, (estimate, -successor[0], next(tie), successor))
        self.bound = self.limit
        return True

    def _awaited_from(self, position: int) -> int:
        """Storages made before ``position`` that a first execution from there on reads, or that stay to the end."""
        space = self.space
        wanted = space.live_at_end
        for inputs in space.inputs[position:]:
            wanted |= inputs
        made = 0
        for outputs in space.outputs[:position]:
            made |= outputs
        return wanted & made

    def _to_come(self, state: State) -> float:
        """h: time of what must execute again."""
        position, resident = state
        problem, space = self.problem, self.space
        missing = self.awaited[position] & ~resident
        seen = missing
        ops: set[int] = set()
        while missing:
            lowest = missing & -missing
            missing ^= lowest
            op = problem.producer[lowest.bit_length() - 1]
            if op not in ops:
                if not problem.recomputable[op]:
                    return math.inf
                ops.add(op)
                fresh = space.inputs[op] & ~resident & ~seen
                seen |= fresh
                missing |= fresh
        return sum(problem.time_ns[op] for op in ops)
