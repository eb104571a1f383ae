"""The portfolio that plans a training step: keep all where it fits, else moments, else chain, walk, and by hand."""

from __future__ import annotations

import dataclasses
import time

from solvers.baselines import BASELINES
from solvers.bounds import FLOOR_RULES, Floor, find_floor, floor_lower_bound
from solvers.chain_solver import ChainSolver
from solvers.exact import ExactSolver
from solvers.moments import MomentsSolver
from solvers.offload import OffloadSolver, offload_floor
from solvers.problem import Problem
from solvers.prune import pruned
from solvers.rematerialise import Rematerialiser
from solvers.solution import Solution, Status
from solvers.store_all import StoreAllSolver
from solvers.strategies import BY_HAND

_Solver = Rematerialiser | ExactSolver | MomentsSolver | ChainSolver

_FLOOR_SHARE = 0.4  # of the time limit
_FLOOR_S = 10.0  # at least: more than the search takes on all but large problems
_HOST_SHARE = 0.5  # of the time limit, for plans with copies; plans without come after it
_MOMENTS_SHARE = 0.4  # of the time limit; other solvers come after it
_WALK_SHARE = 0.5  # of what is left then, where there is no plan yet
_SHARE = 0.7  # of what is left then, for the chain solver and for the walk: the next ones, and baselines, come after
_TINY = 20  # ops up to which the exact program is solved too: mostly within a second
_EXACT_S = 5.0  # and for no longer than this


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoSolver:
    """Best plan and best bound of the solvers that suit the problem. Deterministic unless the time limit is hit.

    Attributes:
        time_limit_s: wall-clock limit of the whole solve; looking for the floor may take 10 s where that is more.
        gap: a plan is ``OPTIMAL`` when (step time − lower bound) / lower bound is at most this; the search stops there.

    """

    time_limit_s: float = 60.0
    gap: float = 0.005

    def solve(self, problem: Problem) -> Solution:
        """Return the fastest plan found, or ``INFEASIBLE`` with the floor from both sides and the op that binds.

        Status ``INFEASIBLE`` says in its message whether that is proven or no solver found a plan.
        """
        start = time.perf_counter()
        keep_all = StoreAllSolver().solve(problem)
        if keep_all.status is Status.OPTIMAL:
            return keep_all
        if problem.has_host_tier:
            return self._with_host(problem, start)
        if floor_lower_bound(problem).bytes > problem.budget_bytes:
            return self._infeasible(problem, keep_all, start, None)
        moments = MomentsSolver(gap=self.gap, time_limit_s=self.time_limit_s * _MOMENTS_SHARE).solve(problem)
        if moments.status is Status.INFEASIBLE:
            return self._infeasible(problem, moments, start, None)
        best = moments
        if moments.status is not Status.OPTIMAL:
            known = [solution for strategy in BY_HAND.values() if (solution := strategy.solve(problem)).status.has_plan]
            if not known and not moments.status.has_plan:
                known = self._any_plan(problem, start)
            if not known and not moments.status.has_plan:
                floor = self._floor(problem)
                if floor.bytes > problem.budget_bytes:
                    return self._infeasible(problem, moments, start, floor)
                known = [floor.plan]
            best = self._best(problem, moments, known, start)
        return dataclasses.replace(
            best,
            status=Status.OPTIMAL if self._within(best, moments.lower_bound_ns) else Status.FEASIBLE,
            lower_bound_ns=min(moments.lower_bound_ns, best.step_time_ns),
            message="",
            solve_seconds=time.perf_counter() - start,
        )

    def _any_plan(self, problem: Problem, start: float) -> list[Solution]:
        """A plan of the walk, under the rules that the floor is looked for with, if there is one."""
        walk = Rematerialiser(rules=FLOOR_RULES, time_limit_s=_WALK_SHARE * self._left(start)).solve(problem)
        return [walk] if walk.status.has_plan else []

    def _with_host(self, problem: Problem, start: float) -> Solution:
        """The plan of the offload solver, or a faster one without copies where that is not within the gap."""
        moved = OffloadSolver(gap=self.gap, time_limit_s=self.time_limit_s * _HOST_SHARE).solve(problem)
        if moved.status is Status.OPTIMAL:
            return moved
        solver = dataclasses.replace(self, time_limit_s=max(self._left(start), 1.0))
        plain = solver.solve(problem.with_link(None, 0))
        best = _fastest([moved, plain])
        if not best.status.has_plan:
            bound = offload_floor(problem)
            how = "no schedule fits" if moved.status is Status.INFEASIBLE else "no schedule was found that fits"
            known = (
                ""
                if plain.floor_bytes is None
                else f"; without copies a plan exists from {plain.floor_bytes:,} bytes on"
            )
            return dataclasses.replace(
                plain,
                message=f"{how} {problem.budget_bytes:,} bytes with {problem.host_bytes:,} bytes of host memory{known}",
                floor_lower_bound_bytes=bound.bytes,
                lower_bound_ns=moved.lower_bound_ns,
            )
        return dataclasses.replace(
            best,
            status=Status.OPTIMAL if self._within(best, moved.lower_bound_ns) else Status.FEASIBLE,
            lower_bound_ns=min(moved.lower_bound_ns, best.step_time_ns),
            solve_seconds=time.perf_counter() - start,
        )

    def _best(self, problem: Problem, moments: Solution, known: list[Solution], start: float) -> Solution:
        """The plan of the moments solver, or a faster one of the other solvers where that is not within the gap.

        ``known`` are plans found already, before they are pruned.
        """
        deadline = start + self.time_limit_s
        best = _fastest([moments, *(pruned(problem, plan, deadline=deadline) for plan in known)])
        others: list[_Solver] = [ChainSolver(), Rematerialiser()]
        if len(problem.time_ns) <= _TINY:
            others.append(ExactSolver(gap=self.gap / 2, time_limit_s=_EXACT_S))
        for solver in others:
            if not self._within(best, moments.lower_bound_ns) and self._left(start) > 0:
                best = _fastest([best, self._limited(solver, start).solve(problem)])
        for baseline in BASELINES.values():
            if not self._within(best, moments.lower_bound_ns) and self._left(start) > 0:
                found = dataclasses.replace(baseline, time_limit_s=self._left(start)).solve(problem)
                if found.status.has_plan:
                    best = _fastest([best, pruned(problem, found, deadline=deadline)])
        return best

    def _limited(self, solver: _Solver, start: float) -> _Solver:
        """The solver with no more than its share of the time that is left."""
        share = _SHARE if isinstance(solver, ChainSolver | Rematerialiser) else 1.0
        return dataclasses.replace(solver, time_limit_s=min(solver.time_limit_s, share * self._left(start)))

    def _within(self, plan: Solution, bound_ns: int) -> bool:
        """Whether there is a plan that is at most the gap that was asked for above the bound."""
        return plan.status.has_plan and plan.step_time_ns - bound_ns <= self.gap * bound_ns

    def _floor(self, problem: Problem) -> Floor:
        """The floor, searched alike whatever the budget: a budget that an ``INFEASIBLE`` answer names has a plan."""
        return find_floor(problem, time_limit_s=max(self.time_limit_s * _FLOOR_SHARE, _FLOOR_S))

    def _left(self, start: float) -> float:
        return self.time_limit_s - (time.perf_counter() - start)

    def _infeasible(self, problem: Problem, found: Solution, start: float, floor: Floor | None) -> Solution:
        """The answer without a plan: how much is needed, from both sides, and which op binds.

        ``floor`` is what was found where infeasibility is not proven, ``None`` where it is.
        """
        how = "no schedule fits" if floor is None else "no schedule was found that fits"
        floor = floor or self._floor(problem)
        return Solution(
            status=Status.INFEASIBLE,
            steps=(),
            step_time_ns=0,
            peak_bytes=0,
            lower_bound_ns=found.lower_bound_ns,
            solver="auto",
            solve_seconds=time.perf_counter() - start,
            message=(
                f"{how} {problem.budget_bytes:,} bytes, of which {problem.static_bytes:,} are static; a plan "
                f"exists from {floor.bytes:,} bytes on, and every schedule needs at least {floor.lower_bound.bytes:,} "
                f"while {problem.describe_op(floor.lower_bound.op)} runs"
            ),
            floor_bytes=floor.bytes,
            floor_lower_bound_bytes=floor.lower_bound.bytes,
        )


def _fastest(solutions: list[Solution]) -> Solution:
    """The fastest plan, the first of equal ones; the first solution where none has a plan."""
    return min(solutions, key=lambda s: (not s.status.has_plan, s.step_time_ns if s.status.has_plan else 0))
