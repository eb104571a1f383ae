"""Plans that a module has made, remembered for the next shapes.

A batch of another length gives a graph of the same structure with other sizes: the same ops read and make the same
storages. A schedule of the one is then a schedule of the other, and a replay says whether it fits the budget there.
With ``dynamic="bucket"`` the solver runs only where no schedule that is known fits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from graphs.ir import Costs, TrainingGraph
from graphs.joint import Capture
from scheduler.ordering import OrderedStep, SolvedStep
from scheduler.plan import Plan
from scheduler.planner import Settings, budget_of, cost_model, make_plan, plan_from, problem_of
from solvers.simulate import simulate
from solvers.solution import Solution, Status
from solvers.store_all import StoreAllSolver
from solvers.validate import validate

logger = logging.getLogger(__name__)

#: Shapes of one structure that are planned before a warning says what that costs.
SHAPES_BEFORE_WARNING: Final = 8


class RememberedPlans:
    """The plans of one module, by the structure of their graphs.

    Args:
        given: a plan to begin with.

    Attributes:
        warned: what was said about a plan's first step, see :class:`scheduler.first_step.FirstStep`.

    """

    def __init__(self, given: Plan | None = None) -> None:
        self._solved: dict[str, list[Plan]] = {}
        self._solve_seconds = 0.0
        self.warned: set[str] = set()
        if given is not None:
            self._solved[structure_of(given.graph.captured)] = [given]

    def plan(self, capture: Capture, static: Mapping[str, int], settings: Settings) -> Plan:
        """The plan of a captured step: one made earlier where that serves, else a new one.

        Args:
            capture: the step.
            static: bytes resident throughout, by category.
            settings: how to plan.

        Raises:
            Infeasible: no plan was found within the budget.

        """
        structure = structure_of(capture.graph)
        known = self._solved.setdefault(structure, [])
        found = self._same_step(known, capture, static, settings)
        if found is None and settings.dynamic == "bucket" and known:
            found = _reuse(known, capture, static, settings)
        if found is not None:
            return found
        plan = make_plan(capture, static, settings)
        known.append(plan)
        self._solve_seconds += plan.solution.solve_seconds
        if len(known) == SHAPES_BEFORE_WARNING:
            self._warn(capture.graph.name, settings)
        return plan

    def forget(self, plan: Plan) -> None:
        """Serve a plan no more: it cannot be run here."""
        for known in self._solved.values():
            known[:] = [other for other in known if other is not plan]

    @staticmethod
    def _same_step(
        known: Sequence[Plan], capture: Capture, static: Mapping[str, int], settings: Settings
    ) -> Plan | None:
        """A plan of exactly this step, captured anew, with as much or more resident beside it."""
        added = sum(static.values())
        for plan in known:
            if (
                plan.graph.captured.fingerprint != capture.graph.fingerprint
                or plan.budget_bytes != settings.budget_bytes
            ):
                continue
            peak = plan.peak_bytes + added - plan.static_bytes
            if added >= plan.static_bytes and (plan.budget_bytes is None or peak <= plan.budget_bytes):
                solution = dataclasses.replace(plan.solution, peak_bytes=peak)
                return dataclasses.replace(plan, solution=solution, static=static)  # its measurement is its own
        return None

    def _warn(self, name: str, settings: Settings) -> None:
        advice = (
            "call it once with the largest batch first, whose schedule then serves the smaller ones"
            if settings.dynamic == "bucket"
            else 'schedule(..., dynamic="bucket") plans for the largest and reuses its schedule for smaller ones'
        )
        logger.warning(
            "%s was planned for %d input shapes by now (%.1f s in the solver), and each further shape is captured and "
            "planned when it first comes; %s. Padding to a few lengths saves the captures too.",
            *(name, SHAPES_BEFORE_WARNING, self._solve_seconds, advice),
        )


def structure_of(graph: TrainingGraph) -> str:
    """A hash of everything about a graph but its sizes and names."""
    digest = hashlib.sha256(f"{graph.forward_ops}\n".encode())
    for storage in graph.storages:
        digest.update(f"s {storage.kind} {storage.producer}\n".encode())
    for op in graph.ops:
        digest.update(f"o {op.target} {op.phase} {op.inputs} {op.outputs} {op.recomputable}\n".encode())
    return digest.hexdigest()


def _reuse(known: Sequence[Plan], capture: Capture, static: Mapping[str, int], settings: Settings) -> Plan | None:
    """A plan with the fastest of the known schedules that fits, or with none of them.

    Keeping all comes first: in the order of the capture, then in those that the known schedules have.
    """
    costs, borrowed = _costs(known, capture, settings)
    step = OrderedStep(capture.graph, costs)
    problem = problem_of(*step, static)
    problem = problem.with_budget(budget_of(problem, capture, static, settings))
    orders: dict[tuple[int, ...], SolvedStep] = {(): SolvedStep(step, problem, StoreAllSolver().solve(problem))}
    for order in (plan.graph.order for plan in known):
        if order not in orders:
            moved = step.in_order(order)
            here = moved.problem_like(problem)
            orders[order] = SolvedStep(moved, here, StoreAllSolver().solve(here))
    found = next((kept for kept in orders.values() if kept.solution.status.has_plan), None)
    if found is None:
        fitting = [
            s for s in (_transferred(plan.solution, orders[plan.graph.order]) for plan in known) if s is not None
        ]
        if not fitting:
            return None
        found = min(fitting, key=lambda s: (s.solution.step_time_ns, s.solution.peak_bytes))
    validate(found.problem, found.solution)
    logger.info("%s: planned for another shape by %s", capture.graph.name, found.solution.solver)
    note = ("op times and workspaces are those of a larger step of the same structure",) if borrowed else ()
    budget = problem.budget_bytes
    return plan_from(*found.step, found.solution, budget_bytes=budget, static=static, settings=settings, notes=note)


def _costs(known: Sequence[Plan], capture: Capture, settings: Settings) -> tuple[Costs, bool]:
    """Costs of the step, and whether they are borrowed from the least of the larger steps, rather than measured."""
    if settings.costs == "profiled":
        sizes = [s.bytes for s in capture.graph.storages]  # whose numbers no order changes
        larger = [
            plan for plan in known if all(s.bytes >= size for s, size in zip(plan.graph.storages, sizes, strict=True))
        ]
        if larger:
            return min(larger, key=lambda plan: plan.plain_peak_bytes).costs.in_order(()), True
    return cost_model(capture, settings), False


def _transferred(solution: Solution, kept: SolvedStep) -> SolvedStep | None:
    """The schedule of another step of the same structure, with the figures that it has here; ``None``: too large."""
    problem = kept.problem
    replayed = simulate(problem, solution.steps)
    if replayed.peak_bytes > problem.budget_bytes:
        return None
    solver = solution.solver if solution.solver.endswith("(reused)") else f"{solution.solver} (reused)"
    here = Solution(
        status=Status.FEASIBLE,
        steps=solution.steps,
        step_time_ns=replayed.step_time_ns,
        peak_bytes=replayed.peak_bytes,
        lower_bound_ns=problem.keep_all_time_ns,
        solver=solver,
        message="the schedule was found for another shape of the step",
    )
    return kept._replace(solution=here)
