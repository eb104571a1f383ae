"""The answer of a solver that finds orders of executions and proves nothing about them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Solution, Status


def heuristic_solution(
    problem: Problem,
    order: Sequence[int] | None,
    *,
    solver: str,
    start: float,
    message: str = "",
    floor_bytes: int | None = None,
) -> Solution:
    """The solution that an order within the budget stands for; without one ``INFEASIBLE``, which is no proof.

    Args:
        problem: what was to be solved.
        order: executions; ``None`` where none was found.
        solver: name of the solver.
        start: when it began, as ``time.perf_counter`` had it.
        message: as in :class:`~solvers.solution.Solution`.
        floor_bytes: as there.

    Returns:
        ``OPTIMAL`` only where nothing is recomputed; the lower bound is the keep-all time.

    """
    steps = () if order is None else with_frees(problem, order)
    figures = None if order is None else simulate(problem, steps)
    if figures is None:
        status = Status.INFEASIBLE
    else:
        status = Status.OPTIMAL if figures.step_time_ns == problem.keep_all_time_ns else Status.FEASIBLE
    return Solution(
        status=status,
        steps=steps,
        step_time_ns=figures.step_time_ns if figures else 0,
        peak_bytes=figures.peak_bytes if figures else 0,
        lower_bound_ns=problem.keep_all_time_ns,
        solver=solver,
        solve_seconds=time.perf_counter() - start,
        message=message,
        floor_bytes=floor_bytes,
    )
