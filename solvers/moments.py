"""Moments solver: check memory at a few ops only, and add ops where the plan that comes out exceeds the budget.

One moment, the peak of the keep-all schedule, is usually enough: the relaxation of :mod:`solvers.moments_model` then
yields a plan within the budget whose time equals its lower bound. Where the plan exceeds the budget elsewhere, the
worst of those places become moments too. Places inside a rebuilt stretch are no moments; the capacity of the model is
then reduced a little, or the strict-budget walk follows the model's decisions as far as it can.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from solvers.extract import just_in_time
from solvers.milp import FEASIBILITY_TOLERANCE, Milp, MilpResult, MilpStatus, SolverFailedError
from solvers.moments_model import Decisions, MomentsModel
from solvers.problem import Problem
from solvers.prune import prune
from solvers.rematerialise import OutOfBudgetError, rematerialised_order
from solvers.repair import repair
from solvers.simulate import simulate, with_frees
from solvers.solution import Compute, Solution, Status, Step
from solvers.store_all import StoreAllSolver, keep_all_peak_op

_log = logging.getLogger(__name__)

_FEW_COLUMNS = 300  # HiGHS needs no help below


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentsSolver:
    """Least recomputation subject to memory at lazily added moments; see :mod:`solvers.moments_model`.

    Its lower bound is valid for every schedule that first executes the ops in the given order, however often it
    recomputes. Deterministic as long as the time limit is not hit.

    Attributes:
        gap: stop when (step time − lower bound) / lower bound of the best plan is at most this.
        time_limit_s: wall-clock limit of the whole solve.
        model_gap: gap to which each model is solved, as a fraction of the step; 0.4 ``gap`` where ``None``.
        max_moments: no more moments than this are added.
        moments_per_round: how many violated ops become moments at once.
        max_rounds: models solved with the full capacity.
        shrink_rounds: models solved with a reduced capacity, which yield plans but no bounds.

    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    model_gap: float | None = None
    max_moments: int = 24
    moments_per_round: int = 3
    max_rounds: int = 12
    shrink_rounds: int = 6

    def solve(self, problem: Problem) -> Solution:
        """Solve; ``INFEASIBLE`` means proven so, ``TIME_LIMIT`` that neither a plan nor a proof was found in time."""
        return _Search(self, problem).run()


class _Search:
    """One solve: the best plan and bound so far."""

    def __init__(self, options: MomentsSolver, problem: Problem) -> None:
        self.options = options
        self.problem = problem
        self.start = time.perf_counter()
        self.bound_ns = problem.keep_all_time_ns
        self.best: tuple[int, tuple[Step, ...]] | None = None
        self.tried: set[tuple[int, ...]] = set()
        self.notes: list[str] = []

    def run(self) -> Solution:
        """Keep all if that fits, else solve models with ever more moments, then with ever less capacity."""
        problem, options = self.problem, self.options
        keep_all = StoreAllSolver().solve(problem)
        if keep_all.status is Status.OPTIMAL:
            return dataclasses.replace(keep_all, solver="moments")
        moments: tuple[int, ...] = (keep_all_peak_op(problem),)
        decisions: Decisions | None = None
        for _ in range(options.max_rounds):
            decisions_now, proven_infeasible = self._solve_model(moments, problem.capacity_bytes, decisions)
            if proven_infeasible:
                return self._infeasible(moments)
            if decisions_now is None:
                break
            decisions = decisions_now
            violated = self._consider(decisions)
            if self._done() or self._out_of_time():
                break
            fresh = _spaced([op for _, op in violated if op not in moments], options.moments_per_round, problem)
            if not fresh or len(moments) >= options.max_moments:
                break
            moments = tuple(sorted({*moments, *fresh}))
        if not self._done() and decisions is not None:
            self._shrink(moments, decisions)
        return self._solution()

    def _shrink(self, moments: tuple[int, ...], decisions: Decisions) -> None:
        """Reduce the capacity of the model by what its plan exceeds the budget by, and see whether that plan fits."""
        problem = self.problem
        capacity = problem.capacity_bytes
        for _ in range(self.options.shrink_rounds):
            if self._done() or self._out_of_time():
                return
            excess = self._excess(decisions)
            if excess <= 0:
                return
            capacity -= max(excess // 2, problem.capacity_bytes // 200)
            if capacity <= 0:
                return
            shrunk, proven_infeasible = self._solve_model(moments, capacity, decisions)
            if proven_infeasible or shrunk is None:
                return
            decisions = shrunk
            violated = self._consider(decisions)
            fresh = _spaced([op for _, op in violated if op not in moments], 1, problem)
            if fresh and len(moments) < self.options.max_moments:
                moments = tuple(sorted({*moments, *fresh}))

    def _solve_model(
        self, moments: tuple[int, ...], capacity: int, hint: Decisions | None
    ) -> tuple[Decisions | None, bool]:
        """Solve one model, raise the lower bound where it has the full capacity; say whether it is infeasible."""
        problem, options = self.problem, self.options
        model = MomentsModel(problem, moments, capacity)
        if not model.feasible:
            return None, True
        share = 0.9 * options.gap if options.model_gap is None else options.model_gap
        above = max(self.bound_ns / max(problem.keep_all_time_ns, 1), 1.0)  # gaps are relative to the bound
        try:
            result = _near_relaxation(
                model.milp,
                absolute_gap=100.0 * share * above,
                time_limit_s=0.6 * self._time_left(),  # the rest is for the next model
                hint=model.hint(hint) if hint else (),
            )
        except SolverFailedError as error:  # the search goes on with what it has
            _log.warning("moments %s: %s", moments, error)
            return None, False
        _log.debug("moments %s, capacity %d: %s %s", moments, capacity, result.status, (result.bound, result.objective))
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

    def _consider(self, decisions: Decisions) -> list[tuple[int, int]]:
        """Try the plans that the decisions suggest; return (excess bytes, op) where the plain one is too large."""
        problem = self.problem
        order = just_in_time(problem, decisions)
        violated = _violations(problem, order)
        if not violated:
            self._offer(order)
            return []
        deadline = self.start + self.options.time_limit_s
        self._offer(prune(problem, repair(problem, order, deadline=deadline), deadline=deadline))
        try:
            self._offer(rematerialised_order(problem, decisions, time_limit_s=self._time_left()))
        except OutOfBudgetError as error:
            _log.debug("guided walk: %s", error)
        return violated

    def _excess(self, decisions: Decisions) -> int:
        order = just_in_time(self.problem, decisions)
        return simulate(self.problem, with_frees(self.problem, order)).peak_bytes - self.problem.budget_bytes

    def _offer(self, order: Sequence[int]) -> None:
        """Keep the plan if it fits and is the fastest so far."""
        steps = with_frees(self.problem, order)
        simulation = simulate(self.problem, steps)
        if simulation.peak_bytes <= self.problem.budget_bytes and (
            self.best is None or simulation.step_time_ns < self.best[0]
        ):
            self.best = (simulation.step_time_ns, steps)

    def _done(self) -> bool:
        return self.best is not None and self.best[0] - self.bound_ns <= self.options.gap * self.bound_ns

    def _time_left(self) -> float:
        return self.options.time_limit_s - (time.perf_counter() - self.start)

    def _out_of_time(self) -> bool:
        return self._time_left() <= 0

    def _infeasible(self, moments: tuple[int, ...]) -> Solution:
        names = ", ".join(self.problem.describe_op(op) for op in moments)
        return Solution(
            status=Status.INFEASIBLE,
            steps=(),
            step_time_ns=0,
            peak_bytes=0,
            lower_bound_ns=self.bound_ns,
            solver="moments",
            solve_seconds=time.perf_counter() - self.start,
            message=f"proven: no schedule fits {self.problem.budget_bytes:,} bytes while these run: {names}",
        )

    def _solution(self) -> Solution:
        elapsed = time.perf_counter() - self.start
        if self.best is None:
            return Solution(
                status=Status.TIME_LIMIT,
                steps=(),
                step_time_ns=0,
                peak_bytes=0,
                lower_bound_ns=self.bound_ns,
                solver="moments",
                solve_seconds=elapsed,
                message="no plan within the budget was found, and none was proven impossible",
            )
        time_ns, steps = self.best
        return Solution(
            status=Status.OPTIMAL if self._done() else Status.FEASIBLE,
            steps=steps,
            step_time_ns=time_ns,
            peak_bytes=simulate(self.problem, steps).peak_bytes,
            lower_bound_ns=min(self.bound_ns, time_ns),
            solver="moments",
            solve_seconds=elapsed,
        )


def _near_relaxation(milp: Milp, *, absolute_gap: float, time_limit_s: float, hint: Sequence[float] = ()) -> MilpResult:
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


def _violations(problem: Problem, order: Sequence[int]) -> list[tuple[int, int]]:
    """(excess bytes, op) of every op whose first execution, or the rebuilding before it, exceeds the budget.

    Worst first; ops before whose first execution only the rebuilding does come after those that do themselves.
    """
    steps = with_frees(problem, order)
    live = simulate(problem, steps).live_bytes
    first: dict[int, int] = {}
    rebuilding: dict[int, int] = {}
    due = 0
    for step, bytes_ in zip(steps, live, strict=True):
        if isinstance(step, Compute):
            excess = bytes_ - problem.budget_bytes
            if step.op == due:
                due += 1
                if excess > 0:
                    first[step.op] = excess
            elif excess > 0:
                at = min(due, len(problem.time_ns) - 1)
                rebuilding[at] = max(excess, rebuilding.get(at, 0))
    ranked = sorted(((e, op) for op, e in first.items()), key=lambda v: (-v[0], v[1]))
    ranked += sorted(((e, op) for op, e in rebuilding.items() if op not in first), key=lambda v: (-v[0], v[1]))
    return ranked


def _spaced(ops: Sequence[int], count: int, problem: Problem) -> list[int]:
    """The first ``count`` of ``ops`` that keep a distance of a fiftieth of the step from each other."""
    chosen: list[int] = []
    distance = max(1, len(problem.time_ns) // 50)
    for op in ops:
        if all(abs(op - c) >= distance for c in chosen):
            chosen.append(op)
            if len(chosen) == count:
                break
    return chosen
