"""What the searches over moments share: one model solved, the bound, the best plan, and where it exceeds the budget.

:class:`solvers.moments.MomentsSolver` recomputes only, :class:`solvers.offload.OffloadSolver` copies to the host too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from solvers.milp import FEASIBILITY_TOLERANCE, Milp, MilpResult, MilpStatus, SolverFailedError
from solvers.moments_model import Decisions, MomentsModel
from solvers.problem import Problem
from solvers.simulate import Simulation, simulate
from solvers.solution import Compute, Solution, Status, Step

_log = logging.getLogger(__name__)

_FEW_COLUMNS = 300  # HiGHS needs no help below


class MomentsSearch:
    """One solve: the best plan and bound so far.

    Args:
        problem: what is solved.
        name: of the solver, for its answer.
        gap: the search is done when (step time − lower bound) / lower bound of the best plan is at most this.
        time_limit_s: wall-clock limit of the whole solve.

    """

    def __init__(self, problem: Problem, *, name: str, gap: float, time_limit_s: float) -> None:
        self.problem = problem
        self.name = name
        self.gap = gap
        self.time_limit_s = time_limit_s
        self.start = time.perf_counter()
        self.bound_ns = problem.keep_all_time_ns
        self.best: tuple[Simulation, tuple[Step, ...]] | None = None

    @property
    def deadline(self) -> float:
        """The end of the time limit, as ``time.perf_counter`` counts."""
        return self.start + self.time_limit_s

    def time_left(self) -> float:
        """Seconds until the time limit; not positive after it."""
        return self.deadline - time.perf_counter()

    def is_done(self) -> bool:
        """Whether the best plan is within the gap."""
        return self.best is not None and self.best[0].step_time_ns - self.bound_ns <= self.gap * self.bound_ns

    def solve_model(
        self, model: MomentsModel, capacity: int, *, model_gap: float, hint: Decisions | None = None
    ) -> tuple[Decisions | None, bool]:
        """Solve one model, raise the lower bound where it has the full capacity; say whether it is infeasible.

        Args:
            model: for some moments.
            capacity: bytes that it was built with.
            model_gap: gap to which it is solved, as a fraction of the step.
            hint: decisions to start from.

        """
        problem = self.problem
        if not model.feasible:
            return None, True
        above = max(self.bound_ns / max(problem.keep_all_time_ns, 1), 1.0)  # gaps are relative to the bound
        try:
            result = near_relaxation(
                model.milp,
                absolute_gap=100.0 * model_gap * above,
                time_limit_s=0.6 * self.time_left(),  # the rest is for the next model
                hint=model.hint(hint) if hint else (),
            )
        except SolverFailedError as error:  # the search goes on with what it has
            _log.warning("moments %s: %s", model.moments, error)
            return None, False
        found = (result.bound, result.objective)
        _log.debug("moments %s, capacity %d: %s %s", model.moments, capacity, result.status, found)
        if capacity == problem.capacity_bytes:
            self._raise_bound(result)
        if result.status is MilpStatus.INFEASIBLE:
            return None, True
        return (model.decisions(result.values) if result.values else None), False

    def _raise_bound(self, result: MilpResult) -> None:
        """Take over the model's dual bound, rounded to whole ns with room for the solver's tolerances."""
        if math.isfinite(result.bound):
            step = self.problem.keep_all_time_ns
            added = result.bound / 100.0 * step
            slack = 1e-3 + 2 * FEASIBILITY_TOLERANCE * step
            self.bound_ns = max(self.bound_ns, step + math.ceil(added - slack))

    def offer(self, steps: tuple[Step, ...]) -> Simulation:
        """Keep the plan if it fits and is the fastest so far; return what it needs."""
        simulation = simulate(self.problem, steps)
        fits = simulation.peak_bytes <= self.problem.budget_bytes and simulation.host_bytes <= self.problem.host_bytes
        if fits and (self.best is None or simulation.step_time_ns < self.best[0].step_time_ns):
            self.best = (simulation, steps)
        return simulation

    def infeasible(self, moments: Sequence[int]) -> Solution:
        """The answer where no schedule fits while the ops at these moments run."""
        names = ", ".join(self.problem.describe_op(op) for op in moments)
        message = f"proven: no schedule fits {self.problem.budget_bytes:,} bytes while these run: {names}"
        return self._without_plan(Status.INFEASIBLE, message)

    def solution(self) -> Solution:
        """The answer with the best plan, if there is one."""
        if self.best is None:
            message = "no plan within the budget was found, and none was proven impossible"
            return self._without_plan(Status.TIME_LIMIT, message)
        simulation, steps = self.best
        return Solution(
            status=Status.OPTIMAL if self.is_done() else Status.FEASIBLE,
            steps=steps,
            step_time_ns=simulation.step_time_ns,
            peak_bytes=simulation.peak_bytes,
            lower_bound_ns=min(self.bound_ns, simulation.step_time_ns),
            solver=self.name,
            solve_seconds=time.perf_counter() - self.start,
        )

    def _without_plan(self, status: Status, message: str) -> Solution:
        return Solution(
            status=status,
            steps=(),
            step_time_ns=0,
            peak_bytes=0,
            lower_bound_ns=self.bound_ns,
            solver=self.name,
            solve_seconds=time.perf_counter() - self.start,
            message=message,
        )


def near_relaxation(milp: Milp, *, absolute_gap: float, time_limit_s: float, hint: Sequence[float] = ()) -> MilpResult:
    """Solve a model whose relaxation is nearly whole already: fix what is, and solve for the rest.

    The linear relaxation of a moments model takes whole values in all but a few dozen columns, and its bound is close
    to the optimum. Branching over all columns, HiGHS takes long to find a point as good. Columns whose change would
    cost more than the gap are fixed without loss; first more are, which is faster and mostly good enough.
    """
    if milp.columns < _FEW_COLUMNS:
        return milp.solve(absolute_gap=absolute_gap, time_limit_s=time_limit_s, hint=hint)
    start = time.perf_counter()
    relaxation = milp.relax(time_limit_s=time_limit_s)
    if relaxation.status is MilpStatus.INFEASIBLE:
        return MilpResult(MilpStatus.INFEASIBLE, (), math.inf, math.inf)
    bound = relaxation.bound
    best: MilpResult | None = None
    if relaxation.status is MilpStatus.SOLVED:
        for share in (0.05, 0.3):
            found = milp.solve(
                absolute_gap=0.2 * absolute_gap,
                time_limit_s=0.5 * (time_limit_s - (time.perf_counter() - start)),
                hint=best.values if best is not None else hint,
                fixed=milp.near(relaxation, share * absolute_gap),
                target=bound + absolute_gap,
            )
            if found.values and (best is None or found.objective < best.objective):
                best = found
            if best is not None and best.objective - bound <= absolute_gap:
                return MilpResult(MilpStatus.SOLVED, best.values, best.objective, min(bound, best.objective))
    full = milp.solve(
        absolute_gap=absolute_gap,
        time_limit_s=time_limit_s - (time.perf_counter() - start),
        hint=best.values if best is not None else hint,
    )
    if full.status is MilpStatus.INFEASIBLE or not full.values:
        return full if best is None else dataclasses.replace(best, status=MilpStatus.LIMIT, bound=bound)
    return dataclasses.replace(full, bound=max(full.bound, bound))


def violations(
    problem: Problem, steps: Sequence[Step], live_bytes: Sequence[int], *, kinds: tuple[type, ...] = (Compute,)
) -> list[tuple[int, int]]:
    """(excess bytes, op) of every op whose first execution, or what comes before it, exceeds the budget.

    Worst first; ops before whose first execution only other steps do come after those that do themselves.

    Args:
        problem: what the steps are a plan of.
        steps: the plan.
        live_bytes: bytes live during each step.
        kinds: steps that count beside first executions; executions again by default.

    """
    first: dict[int, int] = {}
    before: dict[int, int] = {}
    due = 0
    for step, live in zip(steps, live_bytes, strict=True):
        excess = live - problem.budget_bytes
        if isinstance(step, Compute) and step.op == due:
            due += 1
            if excess > 0:
                first[step.op] = excess
        elif excess > 0 and isinstance(step, kinds):
            at = min(due, len(problem.time_ns) - 1)
            before[at] = max(excess, before.get(at, 0))
    ranked = sorted(((e, op) for op, e in first.items()), key=lambda v: (-v[0], v[1]))
    return ranked + sorted(((e, op) for op, e in before.items() if op not in first), key=lambda v: (-v[0], v[1]))


def spaced(ops: Sequence[int], count: int, problem: Problem) -> list[int]:
    """The first ``count`` of ``ops`` that keep a distance of a fiftieth of the step from each other."""
    chosen: list[int] = []
    distance = max(1, len(problem.time_ns) // 50)
    for op in ops:
        if all(abs(op - c) >= distance for c in chosen):
            chosen.append(op)
            if len(chosen) == count:
                break
    return chosen
