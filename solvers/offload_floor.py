"""The floor with a host tier: the least budget for which a plan with copies is found, and a bound from below."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from solvers.bounds import Floor, FloorBound, find_floor
from solvers.paging import least_paged_bytes, paged, touched_only
from solvers.problem import Problem
from solvers.simulate import compute_order
from solvers.solution import Solution

_PLAIN_SHARE = 0.5  # of the time limit, for the floor without copies


def find_offload_floor(problem: Problem, *, tolerance: float = 0.005, time_limit_s: float = math.inf) -> Floor:
    """Look for the least budget with a plan, copies to the host allowed; the problem's own budget does not matter.

    That is the floor without copies where :func:`lower_with_copies` finds nothing below it.
    """
    start = time.perf_counter()
    plain = find_floor(problem.with_link(None, 0), time_limit_s=_PLAIN_SHARE * time_limit_s).plan
    left = time_limit_s - (time.perf_counter() - start)
    plan, lower = lower_with_copies(problem, plain, tolerance=tolerance, time_limit_s=left)
    return Floor(plan or plain, lower)


def lower_with_copies(
    problem: Problem, known: Solution, *, tolerance: float = 0.005, time_limit_s: float = math.inf
) -> tuple[Solution | None, FloorBound]:
    """The plan of least peak below that of a plan that is known, and what no schedule fits below.

    Both are those of :func:`solvers.paging.touched_only`, whose schedules are orders that page. Where the host has not
    room for all that these copy, the least budget that it has room for is looked for by bisection.

    Args:
        problem: with a host tier; its own budget does not matter.
        known: a plan without copies.
        tolerance: as a fraction of the peak of ``known``.
        time_limit_s: bound on the search.

    """
    floor = find_floor(touched_only(problem), tolerance=tolerance, time_limit_s=min(time_limit_s, 30.0))
    best: Solution | None = None
    least = known.peak_bytes
    for order in (compute_order(floor.plan.steps), compute_order(known.steps)):
        found = _least_paged(problem, order, least - 1, tolerance * known.peak_bytes)
        if found is not None:
            best, least = found, found.peak_bytes
    return best, floor.lower_bound


def _least_paged(problem: Problem, order: Sequence[int], most: int, slack: float) -> Solution | None:
    """The plan of an order that pages within the least budget, no more than ``most``."""
    low = least_paged_bytes(problem, order)
    if low > most:
        return None
    best = paged(problem.with_budget(low), order)
    if best is not None:
        return best
    high = most + 1  # the host has no room for what least memory takes
    while high - low > max(slack, 1):
        candidate = (low + high) // 2
        found = paged(problem.with_budget(candidate), order)
        if found is None:
            low = candidate
        else:
            best, high = found, candidate
    return best
