"""The floor with a host tier: the least budget for which a plan with copies is found, and a bound from below."""

from __future__ import annotations

import dataclasses
import math
import time

from solvers.bounds import Floor, FloorBound, find_floor
from solvers.offload import OffloadSolver, offload_floor
from solvers.problem import Problem
from solvers.solution import Status
from solvers.store_all import keep_all_peak_op

_PLAIN_SHARE = 0.4  # of the time limit, for the floor without copies
# Any plan at all, soon: it is called a dozen times.
_SOLVER = OffloadSolver(gap=1.0, max_rounds=6, time_limit_s=10.0)


def find_offload_floor(problem: Problem, *, tolerance: float = 0.005, time_limit_s: float = math.inf) -> Floor:
    """Look for the least budget with a plan, copies to the host allowed; the problem's own budget does not matter.

    Bisection by the offload solver, between :func:`solvers.offload.offload_floor` and the floor without copies, to
    ``tolerance`` of the latter. What the solver proves infeasible raises the lower bound.
    """
    start = time.perf_counter()
    plan = find_floor(problem.with_link(None, 0), time_limit_s=_PLAIN_SHARE * time_limit_s).plan
    lower = offload_floor(problem)
    low = lower.bytes
    slack = tolerance * plan.peak_bytes
    candidate = low
    while candidate < plan.peak_bytes:
        left = time_limit_s - (time.perf_counter() - start)
        if left <= 0:
            break
        solver = dataclasses.replace(_SOLVER, time_limit_s=min(_SOLVER.time_limit_s, left))
        found = solver.solve(problem.with_budget(candidate))
        if found.status.has_plan:
            plan = found
        else:
            if found.status is Status.INFEASIBLE:
                lower = FloorBound(candidate + 1, keep_all_peak_op(problem))
            low = candidate + 1
        if plan.peak_bytes - low <= slack:
            break
        candidate = (low + plan.peak_bytes) // 2
    return Floor(plan, lower)
