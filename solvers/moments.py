"""Moments solver: check memory at a few ops only, and add ops where the plan that comes out exceeds the budget.

One moment, the peak of the keep-all schedule, is usually enough: the relaxation of :mod:`solvers.moments_model` then
yields a plan within the budget whose time equals its lower bound. Where the plan exceeds the budget elsewhere, the
worst of those places become moments too. Places inside a rebuilt stretch are no moments; the capacity of the model is
then reduced a little, or the strict-budget walk follows the model's decisions as far as it can.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from solvers.extract import just_in_time
from solvers.moments_model import Decisions, MomentsModel
from solvers.moments_search import MomentsSearch, spaced, violations
from solvers.problem import Problem
from solvers.prune import prune
from solvers.rematerialise import OutOfBudgetError, rematerialised_order
from solvers.repair import repair
from solvers.simulate import simulate, with_frees
from solvers.solution import Solution, Status
from solvers.store_all import StoreAllSolver, keep_all_peak_op

_log = logging.getLogger(__name__)


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


class _Search(MomentsSearch):
    """One solve."""

    def __init__(self, options: MomentsSolver, problem: Problem) -> None:
        super().__init__(problem, name="moments", gap=options.gap, time_limit_s=options.time_limit_s)
        self.options = options

    def run(self) -> Solution:
        """Keep all if that fits, else solve models with ever more moments, then with ever less capacity."""
        problem, options = self.problem, self.options
        keep_all = StoreAllSolver().solve(problem)
        if keep_all.status is Status.OPTIMAL:
            return dataclasses.replace(keep_all, solver="moments")
        moments: tuple[int, ...] = (keep_all_peak_op(problem),)
        decisions: Decisions | None = None
        for _ in range(options.max_rounds):
            decisions_now, proven_infeasible = self._solve(moments, problem.capacity_bytes, decisions)
            if proven_infeasible:
                return self.infeasible(moments)
            if decisions_now is None:
                break
            decisions = decisions_now
            violated = self._consider(decisions)
            if self.is_done() or self.time_left() <= 0:
                break
            fresh = spaced([op for _, op in violated if op not in moments], options.moments_per_round, problem)
            if not fresh or len(moments) >= options.max_moments:
                break
            moments = tuple(sorted({*moments, *fresh}))
        if not self.is_done() and decisions is not None:
            self._shrink(moments, decisions)
        return self.solution()

    def _shrink(self, moments: tuple[int, ...], decisions: Decisions) -> None:
        """Reduce the capacity of the model by what its plan exceeds the budget by, and see whether that plan fits."""
        problem = self.problem
        capacity = problem.capacity_bytes
        for _ in range(self.options.shrink_rounds):
            if self.is_done() or self.time_left() <= 0:
                return
            excess = self._excess(decisions)
            if excess <= 0:
                return
            capacity -= max(excess // 2, problem.capacity_bytes // 200)
            if capacity <= 0:
                return
            shrunk, proven_infeasible = self._solve(moments, capacity, decisions)
            if proven_infeasible or shrunk is None:
                return
            decisions = shrunk
            violated = self._consider(decisions)
            fresh = spaced([op for _, op in violated if op not in moments], 1, problem)
            if fresh and len(moments) < self.options.max_moments:
                moments = tuple(sorted({*moments, *fresh}))

    def _solve(self, moments: tuple[int, ...], capacity: int, hint: Decisions | None) -> tuple[Decisions | None, bool]:
        """Solve the model for these moments and this capacity."""
        options = self.options
        model_gap = 0.9 * options.gap if options.model_gap is None else options.model_gap
        model = MomentsModel(self.problem, moments, capacity)
        return self.solve_model(model, capacity, model_gap=model_gap, hint=hint)

    def _consider(self, decisions: Decisions) -> list[tuple[int, int]]:
        """Try the plans that the decisions suggest; return (excess bytes, op) where the plain one is too large."""
        problem = self.problem
        order = just_in_time(problem, decisions)
        steps = with_frees(problem, order)
        violated = violations(problem, steps, self.offer(steps).live_bytes)
        if not violated:
            return []
        deadline = self.deadline
        self._offer(prune(problem, repair(problem, order, deadline=deadline), deadline=deadline))
        try:
            self._offer(rematerialised_order(problem, decisions, time_limit_s=self.time_left()))
        except OutOfBudgetError as error:
            _log.debug("guided walk: %s", error)
        return violated

    def _excess(self, decisions: Decisions) -> int:
        order = just_in_time(self.problem, decisions)
        return simulate(self.problem, with_frees(self.problem, order)).peak_bytes - self.problem.budget_bytes

    def _offer(self, order: Sequence[int]) -> None:
        self.offer(with_frees(self.problem, order))
