"""In which order a step is planned: the one of its capture, or another in which keeping everything takes less memory.

Where the plain step fits the budget it is left as it is. Otherwise an order of lower keep-all peak is looked for
(:mod:`solvers.order`), and where the peak falls by :data:`LEAST_SHARE` at least, the step is solved in both: what the
one keeps at the peak the other need not, so that a budget between the two peaks costs no time at all, and a lower one
less. The faster plan is taken, of equals the one in the plain order. Networks that run layer after layer have no such
order: autograd frees early by itself.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from graphs.ir import Costs, TrainingGraph
from graphs.order import precedence
from scheduler.units import format_bytes
from solvers.bounds import floor_lower_bound
from solvers.live import LiveBytes
from solvers.order import least_order_bound, least_peak_order
from solvers.problem import Problem
from solvers.solution import Solution
from solvers.store_all import keep_all_peak

logger = logging.getLogger(__name__)

#: Share of the keep-all peak, static bytes included, by which another order must lower it to be considered.
LEAST_SHARE: Final = 0.01


class Solver(Protocol):
    """Anything with ``solve(problem) -> Solution``."""

    def solve(self, problem: Problem) -> Solution:
        """Find a schedule."""


class OrderedStep(NamedTuple):
    """A step in one order, with the costs of its ops in that order."""

    graph: TrainingGraph
    costs: Costs

    @property
    def captured(self) -> OrderedStep:
        """The step in the order of its capture."""
        return self.in_order(())

    def in_order(self, order: tuple[int, ...]) -> OrderedStep:
        """The step in another order, see :meth:`TrainingGraph.in_order`."""
        return OrderedStep(self.graph.in_order(order), self.costs.in_order(order))

    def problem_like(self, problem: Problem) -> Problem:
        """Its problem with the budget, static bytes and host tier of a problem of the same step in another order."""
        own = Problem.from_graph(self.graph, self.costs, problem.budget_bytes, static_bytes=problem.static_bytes)
        return dataclasses.replace(own, link=problem.link, host_bytes=problem.host_bytes, movable=problem.movable)


class SolvedStep(NamedTuple):
    """A step in the order in which it was solved, its problem, and what the solver returned."""

    step: OrderedStep
    problem: Problem
    solution: Solution


def in_lower_order(step: OrderedStep, problem: Problem) -> OrderedStep | None:
    """A step in an order whose keep-all peak is lower, by :data:`LEAST_SHARE` at least; ``None`` where none was found.

    Args:
        step: in the order of its capture.
        problem: of the step; its budget does not matter.

    """
    plain = keep_all_peak(problem)
    wanted = plain - LEAST_SHARE * plain
    known = precedence(step.graph)
    if least_order_bound(problem, known) > wanted:
        return None
    order = least_peak_order(problem, known)
    peak = LiveBytes(problem).peak(order)
    if peak > wanted:
        return None
    logger.info(
        "%s: keeping everything takes %s in another order of the ops, and %s in that of the capture",
        *(step.graph.name, format_bytes(peak), format_bytes(plain)),
    )
    return step.in_order(order)


def solve_in_orders(step: OrderedStep, problem: Problem, solver: Callable[[float], Solver]) -> SolvedStep:
    """Solve a step in the order of its capture, and in another where that may be faster.

    Without a plan, the least budgets are those of both orders together.

    Args:
        step: in the order of its capture.
        problem: of the step, with its budget.
        solver: gives the solver for such a share of the time.

    """
    lower = None if keep_all_peak(problem) <= problem.budget_bytes else in_lower_order(step, problem)
    if lower is None:
        return SolvedStep(step, problem, solver(1.0).solve(problem))
    moved = lower.problem_like(problem)
    reordered = SolvedStep(lower, moved, solver(0.5).solve(moved))
    if reordered.solution.status.has_plan and reordered.solution.step_time_ns <= problem.keep_all_time_ns:
        return reordered
    plain = SolvedStep(step, problem, solver(0.5).solve(problem))
    both = (plain, reordered)
    planned = [found for found in both if found.solution.status.has_plan]
    if planned:
        return min(planned, key=lambda found: found.solution.step_time_ns)
    least = min(both, key=lambda found: (found.solution.floor_bytes is None, found.solution.floor_bytes))
    bounds = [found.solution.floor_lower_bound_bytes or floor_lower_bound(found.problem).bytes for found in both]
    return least._replace(solution=dataclasses.replace(least.solution, floor_lower_bound_bytes=min(bounds)))
