"""The floor with a host tier: the least budget for which a plan with copies is found, and a bound from below."""

from __future__ import annotations

import dataclasses
import math
import time

from solvers.bounds import Floor, FloorBound, find_floor
from solvers.offload import OffloadSolver, offload_floor
from solvers.problem import Problem
from solvers.solution import Solution, Status
from solvers.store_all import keep_all_peak_op

_PLAIN_SHARE = 0.4  # of the time limit, for the floor without copies
# Any plan at all, soon: it is called a dozen times.
_SOLVER = OffloadSolver(gap=1.0, max_rounds=6, time_limit_s=10.0)


def find_offload_floor(problem: Problem, *, tolerance: float = 0.005, time_limit_s: float = math.inf) -> Floor:
    """Look for the least budget with a plan, copies to the host allowed; the problem's own budget does not matter.

    That is the floor without copies where :func:`lower_with_copies` finds nothing below it.
    """
    start = time.perf_counter()
    plain = find_floor(problem.with_link(None, 0), time_limit_s=_PLAIN_SHARE * time_limit_s).plan
    left = time_limit_s - (time.perf_counter() - start)
    plan, lower = lower_with_copies(problem, plain.peak_bytes, tolerance=tolerance, time_limit_s=left)
    return Floor(plan or plain, lower)


def lower_with_copies(
    problem: Problem, known_bytes: int, *, tolerance: float = 0.005, time_limit_s: float = math.inf
) -> tuple[Solution | None, FloorBound]:
    """The plan of least peak below a budget that is known to do, and what no schedule fits below.

    Bisection by the offload solver, down to :func:`solvers.offload.offload_floor`, to ``tolerance`` of the known
    budget. What the solver proves infeasible raises the bound.

    Args:
        problem: with a host tier; its own budget does not matter.
        known_bytes: for which there is a plan.
        tolerance: as a fraction of ``known_bytes``.
        time_limit_s: bound on the search.

    """
    start = time.perf_counter()
    plan: Solution | None = None
    least = known_bytes
    lower = offload_floor(problem)
    low = candidate = lower.bytes
    while candidate < least:
        left = time_limit_s - (time.perf_counter() - start)
        if left <= 0:
            break
        solver = dataclasses.replace(_SOLVER, time_limit_s=min(_SOLVER.time_limit_s, left))
        found = solver.solve(problem.with_budget(candidate))
        if found.status.has_plan:
            plan, least = found, found.peak_bytes
        else:
            if found.status is Status.INFEASIBLE:
                lower = FloorBound(candidate + 1, keep_all_peak_op(problem))
            low = candidate + 1
        if least - low <= tolerance * known_bytes:
            break
        candidate = (low + least) // 2
    return plan, lower
