"""Keep everything: every op executes once and every storage stays until its last read. Plain training."""

from __future__ import annotations

import dataclasses
import time

from solvers.problem import Problem
from solvers.simulate import simulate, with_frees
from solvers.solution import Compute, Solution, Status, Step


def store_all_steps(problem: Problem) -> tuple[Step, ...]:
    """Steps of plain training: ops in order, each storage freed right after its last read."""
    return with_frees(problem, range(len(problem.time_ns)))


def keep_all_peak(problem: Problem) -> int:
    """Peak of the step that keeps everything, in the order of the problem, static bytes included."""
    return simulate(problem, store_all_steps(problem)).peak_bytes


def keep_all_peak_op(problem: Problem) -> int:
    """The op during whose execution most bytes are live when everything is kept; the first of several."""
    steps = store_all_steps(problem)
    live = simulate(problem, steps).live_bytes
    _, op = max((size, -step.op) for step, size in zip(steps, live, strict=True) if isinstance(step, Compute))
    return -op


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreAllSolver:
    """The schedule of plain training. Optimal where it fits, since no schedule executes less than every op once."""

    def solve(self, problem: Problem) -> Solution:
        """Return the keep-all schedule, or ``INFEASIBLE`` with its peak in the message where it is over the budget."""
        start = time.perf_counter()
        steps = store_all_steps(problem)
        simulation = simulate(problem, steps)
        fits = simulation.peak_bytes <= problem.budget_bytes
        return Solution(
            status=Status.OPTIMAL if fits else Status.INFEASIBLE,
            steps=steps if fits else (),
            step_time_ns=simulation.step_time_ns if fits else 0,
            peak_bytes=simulation.peak_bytes if fits else 0,
            lower_bound_ns=problem.keep_all_time_ns,
            solver="store-all",
            solve_seconds=time.perf_counter() - start,
            message=""
            if fits
            else f"keeping everything needs {simulation.peak_bytes:,} bytes; the budget is {problem.budget_bytes:,}",
            floor_bytes=simulation.peak_bytes,
        )
