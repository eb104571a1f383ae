"""Other budgets for a step that is captured already: re-solving a plan, and the whole trade-off curve.

Capturing a step takes longer than solving it. A :class:`~scheduler.plan.Plan` holds the captured graph and its costs:
any number of budgets can be solved from one, on any machine and without the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from scheduler.ordering import SolvedStep, Solver, in_lower_order, solve_in_orders
from scheduler.plan import Plan
from scheduler.planner import infeasible
from scheduler.units import format_bytes
from solvers.auto import AutoSolver
from solvers.bounds import Floor, find_floor
from solvers.offload_floor import find_offload_floor
from solvers.problem import Problem
from solvers.solution import Solution
from solvers.store_all import StoreAllSolver, keep_all_peak
from solvers.strategies import BY_HAND
from solvers.validate import validate

DEFAULT_POINTS: Final = 15


@dataclasses.dataclass(frozen=True, slots=True)
class SweepPoint:
    """One budget of a sweep, with the best plan known for it.

    Attributes:
        budget_bytes: the budget, static bytes included.
        peak_bytes: predicted peak of the plan.
        step_time_ns: predicted time of forward and backward.
        lower_bound_ns: no schedule within the budget is faster.
        overhead: added time / keep-all time.
        solve_seconds: wall time of the solve; 0 where the plan of another budget serves this one.

    """

    budget_bytes: int
    peak_bytes: int
    step_time_ns: int
    lower_bound_ns: int
    overhead: float
    solve_seconds: float

    @property
    def gap(self) -> float:
        """(step time − lower bound) / lower bound."""
        return self.step_time_ns / self.lower_bound_ns - 1 if self.lower_bound_ns else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """What a strategy applied by hand needs and costs: a point beside the curve.

    Attributes:
        name: for a person.
        peak_bytes: what it needs, static bytes included.
        step_time_ns: its predicted step time.
        overhead: added time / keep-all time.
        plan: the plan whose budget is that peak; ``None`` where none was found.

    """

    name: str
    peak_bytes: int
    step_time_ns: int
    overhead: float
    plan: SweepPoint | None

    @property
    def plan_overhead(self) -> float | None:
        """Overhead of the plan for the same peak."""
        return None if self.plan is None else self.plan.overhead


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The trade-off between memory and time of one step.

    Attributes:
        plan: the plan whose step was swept.
        points: from the least budget to the keep-all peak.
        baselines: strategies applied by hand, each with the peak that it needs.
        knee: index in ``points`` of the budget below which memory becomes dear; ``None`` for a curve without one.

    """

    plan: Plan
    points: tuple[SweepPoint, ...]
    baselines: tuple[Baseline, ...]
    knee: int | None

    @property
    def solved(self) -> tuple[SweepPoint, ...]:
        """All that was solved, by budget: the points, and the plans at the baselines' peaks."""
        found = {p.budget_bytes: p for p in (*self.points, *(b.plan for b in self.baselines if b.plan is not None))}
        return tuple(found[budget] for budget in sorted(found))


def replan(
    plan: Plan, budget_bytes: int, *, solver: Solver | None = None, time_limit_s: float = 60.0, gap: float = 0.005
) -> Plan:
    """Solve the step of a plan again under another budget, in whatever order is faster, as planning does.

    Args:
        plan: any plan of the step.
        budget_bytes: most bytes live at once, static ones included.
        solver: ``None`` for the portfolio that :func:`scheduler.schedule` uses.
        time_limit_s: bound on solving, in seconds.
        gap: relative gap to the lower bound at which solving may stop.

    Raises:
        Infeasible: no plan was found within the budget.

    """

    def solver_for(share: float) -> Solver:
        return solver or AutoSolver(time_limit_s=share * time_limit_s, gap=gap)

    problem = plan.captured_problem.with_budget(budget_bytes)
    return _with_solution(plan, solve_in_orders(plan.step.captured, problem, solver_for))


def _with_solution(plan: Plan, found: SolvedStep) -> Plan:
    """A plan with another solution of its step, once that is validated.

    Raises:
        Infeasible: the solution has no steps.

    """
    graph, costs = found.step
    if not found.solution.status.has_plan:
        raise infeasible(found.problem, found.solution, graph)
    validate(found.problem, found.solution)
    budget = found.problem.budget_bytes
    return dataclasses.replace(plan, graph=graph, costs=costs, solution=found.solution, budget_bytes=budget)


def in_lower_order_of(plan: Plan) -> Plan:
    """The keep-all plan of a plan's step in an order of lower peak; the plan itself where there is none."""
    lower = None if plan.graph.order else in_lower_order(plan.step, plan.problem)
    if lower is None:
        return plan
    problem = lower.problem_like(plan.problem)
    problem = problem.with_budget(keep_all_peak(problem))
    kept = _with_solution(plan, SolvedStep(lower, problem, StoreAllSolver().solve(problem)))
    return dataclasses.replace(kept, budget_bytes=None)


@dataclasses.dataclass(frozen=True)
class MinimumBudget:
    """The least budget of a step, from both sides; static bytes are included in both.

    Attributes:
        plan: a plan for the least budget found; run it with ``schedule(model, plan=...)``.
        lower_bound_bytes: proven: no schedule in an order that was considered fits in less.
        binding_op: the op at which the lower bound arises.
        binding_module: path of its module.

    """

    plan: Plan
    lower_bound_bytes: int
    binding_op: str
    binding_module: str

    @property
    def bytes(self) -> int:
        """The least budget for which a plan was found."""
        return self.plan.peak_bytes

    def __str__(self) -> str:
        """Both figures, what is static, and what binds."""
        where = f" in module {self.binding_module!r}" if self.binding_module else ""
        return (
            f"least budget {format_bytes(self.bytes)} (overhead {self.plan.overhead:.2%}), proven to be at least "
            f"{format_bytes(self.lower_bound_bytes)}, where {self.binding_op}{where} binds; "
            f"{format_bytes(self.plan.static_bytes)} of it are static"
        )


def least_budget(plan: Plan, *, time_limit_s: float = 60.0) -> MinimumBudget:
    """Find the least budget of a plan's step, in the order of its capture and in one of lower keep-all peak.

    Args:
        plan: any plan of the step.
        time_limit_s: bound on the search, in seconds.

    """
    captured, problem = plan.step.captured, plan.captured_problem
    lower = in_lower_order(captured, problem)
    orders = [(captured, problem)] if lower is None else [(captured, problem), (lower, lower.problem_like(problem))]
    search = find_offload_floor if problem.has_host_tier else find_floor
    searched = [(*ordered, search(ordered[1], time_limit_s=time_limit_s / len(orders))) for ordered in orders]
    step, problem, floor = min(searched, key=lambda found: found[2].bytes)
    _, named, weakest = min(searched, key=lambda found: found[2].lower_bound.bytes)
    bound = weakest.lower_bound
    return MinimumBudget(
        plan=_with_solution(plan, SolvedStep(step, problem.with_budget(floor.bytes), floor.plan)),
        lower_bound_bytes=bound.bytes,
        binding_op=named.op_names[bound.op],
        binding_module=named.op_modules[bound.op],
    )


def spread_budgets(problem: Problem, count: int = DEFAULT_POINTS, *, floor: Floor | None = None) -> tuple[int, ...]:
    """``count`` budgets in equal steps from the least one with a plan to the keep-all peak, both included.

    Args:
        problem: whose budgets.
        count: how many.
        floor: of the problem, where it is known.

    Raises:
        ValueError: ``count`` is below 2.

    """
    if count < 2:
        raise ValueError(f"a sweep needs at least 2 budgets, and got {count}")
    low = (floor or find_floor(problem)).bytes
    high = keep_all_peak(problem)
    return tuple(low + (high - low) * i // (count - 1) for i in range(count))


def sweep(
    plan: Plan,
    budgets: Sequence[int] | None = None,
    *,
    count: int = DEFAULT_POINTS,
    time_limit_s: float = 10.0,
    gap: float = 0.005,
    floor: Floor | None = None,
    on_point: Callable[[], object] = lambda: None,
) -> Sweep:
    """Solve the step of a plan at many budgets.

    Budgets are solved from the largest to the least. A plan whose peak is within a smaller budget serves that one too,
    and in the end each budget takes the fastest plan of those that are no larger and the greatest lower bound of those
    that are no smaller: both hold there. Budgets for which no plan is found are left out. The peaks of the strategies
    applied by hand (:data:`BY_HAND`) are solved as budgets too. All is solved in one order of the ops: the plan's, or
    where that is the one of the capture and another has a lower keep-all peak, that.

    Args:
        plan: any plan of the step.
        budgets: bytes, static ones included; ``None`` for :func:`spread_budgets`.
        count: how many, where ``budgets`` is ``None``.
        time_limit_s: bound on each solve, in seconds.
        gap: as in :func:`replan`.
        floor: of the step, where it is known: its plan serves where the time limit is too short to find one.
        on_point: called after each budget, those of the baselines included.

    """
    plan = in_lower_order_of(plan)
    problem = plan.problem
    if budgets is None:
        floor = floor or find_floor(problem)
        budgets = spread_budgets(problem, count, floor=floor)
    plain = plan.captured_problem.with_budget(2**62)  # who checkpoints by hand does so in the plain order
    by_hand = {name: strategy.solve(plain) for name, strategy in BY_HAND.items()}
    chosen = sorted({*budgets, *(solution.peak_bytes for solution in by_hand.values())}, reverse=True)
    found: list[tuple[int, Solution]] = []
    bound = problem.keep_all_time_ns
    for budget in chosen:
        solution = _solved(plan, budget, found[-1][1] if found else None, floor, time_limit_s=time_limit_s, gap=gap)
        if solution is not None:
            bound = max(bound, solution.lower_bound_ns)
            found.append((budget, dataclasses.replace(solution, lower_bound_ns=bound)))
        on_point()
    points: dict[int, SweepPoint] = {}
    best: Solution | None = None
    for budget, solution in reversed(found):  # ascending: a plan for less memory serves wherever it is faster
        if best is None or solution.step_time_ns < best.step_time_ns:
            best = solution
        points[budget] = _point(problem, budget, best, solution)
    asked = tuple(points[budget] for budget in sorted(set(budgets)) if budget in points)
    beside = tuple(
        Baseline(name, s.peak_bytes, s.step_time_ns, _overhead(problem, s.step_time_ns), points.get(s.peak_bytes))
        for name, s in by_hand.items()
    )
    return Sweep(plan, asked, beside, knee_of(asked))


def _solved(
    plan: Plan, budget: int, larger: Solution | None, floor: Floor | None, *, time_limit_s: float, gap: float
) -> Solution | None:
    """A solution for one budget of a sweep: the next larger one's where it fits, else a new one, else the floor's."""
    if larger is not None and larger.peak_bytes <= budget:
        return dataclasses.replace(larger, solve_seconds=0.0)
    problem = plan.problem.with_budget(budget)
    solution = AutoSolver(time_limit_s=time_limit_s, gap=gap).solve(problem)
    if solution.status.has_plan:
        validate(problem, solution)
        return solution
    return floor.plan if floor is not None and floor.bytes <= budget else None


def knee_of(points: Sequence[SweepPoint]) -> int | None:
    """The point farthest below the straight line between the ends of the curve, both axes scaled to their range.

    ``None`` for fewer than three points, or a curve that nowhere lies below that line.
    """
    if len(points) < 3:
        return None
    first, last = points[0], points[-1]
    width = last.budget_bytes - first.budget_bytes
    height = first.step_time_ns - last.step_time_ns
    if width <= 0 or height <= 0:
        return None
    below = [
        1 - (p.budget_bytes - first.budget_bytes) / width - (p.step_time_ns - last.step_time_ns) / height
        for p in points
    ]
    index = max(range(len(points)), key=below.__getitem__)
    return index if below[index] > 1e-9 else None


def _point(problem: Problem, budget: int, plan: Solution, solved: Solution) -> SweepPoint:
    return SweepPoint(
        budget_bytes=budget,
        peak_bytes=plan.peak_bytes,
        step_time_ns=plan.step_time_ns,
        lower_bound_ns=min(solved.lower_bound_ns, plan.step_time_ns),
        overhead=_overhead(problem, plan.step_time_ns),
        solve_seconds=solved.solve_seconds,
    )


def _overhead(problem: Problem, step_time_ns: int) -> float:
    """Added time / keep-all time."""
    return step_time_ns / problem.keep_all_time_ns - 1 if problem.keep_all_time_ns else 0.0
