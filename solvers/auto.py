"""The portfolio that plans a training step: keep all where it fits, else moments, else baselines, chain and walk.

What gap they leave, the large-neighbourhood search around the best of their plans narrows in the time that is left.
With a host tier, plans with copies are looked for first, then plans without, then ones that recompute down to a larger
budget and page the rest, and at last copies on top of the best of these.
"""

from __future__ import annotations

import dataclasses
import math
import time

from solvers.baselines import BASELINES
from solvers.bounds import FLOOR_RULES, Floor, find_floor, floor_lower_bound, known_plan
from solvers.chain_solver import ChainSolver
from solvers.copy_search import CopySearch
from solvers.host_search import HostSearchSolver
from solvers.lns import NeighbourhoodSearch
from solvers.moments import MomentsSolver
from solvers.offload import OffloadSolver
from solvers.offload_floor import lower_with_copies
from solvers.paging import paged, touched_only
from solvers.problem import Problem
from solvers.prune import pruned
from solvers.rematerialise import Rematerialiser
from solvers.simulate import compute_order
from solvers.solution import Solution, Status
from solvers.state_search import StateSearchSolver
from solvers.store_all import StoreAllSolver, keep_all_peak
from solvers.strategies import BY_HAND

_HOST_SHARE = 0.4  # of the time limit, for plans with copies; plans without come after it
_PLAIN_SHARE = 0.5  # of what is left then, for these
_PAGED_SHARE = 0.5  # of what is left then, for plans that page; copies on top of the plans found come after it
_PAGED_BUDGETS = (0.0, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)  # from the least to keep-all
_FIRST_PAGED = 7  # of these, the first tried
_FLOOR_SHARE = 0.4  # of what is left then, for the floor without copies, where the budget is below it
_PAGED_GAP = 0.01  # of the plans whose excess is paged, at least
_PAGED_SOLVES = 4  # of them have time to run to their limit
_FASTER_SHARE = 0.7  # of what is left then, for copies on top of the faster one of two
_HOPELESS = 3  # times the added time of the faster one: copies on top of such a plan are not looked for
_FLOOR_S = 30.0  # for the least budget with copies, where there is no plan
_MOMENTS_SHARE = 0.25  # of the time limit; other solvers come after it
_FAMILY_SHARE = 0.3  # of what is left then, for each published family
_MOST_PRUNED = 2  # of the baselines that fit, the fastest
_WALK_SHARE = 0.5  # of what is left then, where there is no plan yet, to find one or to improve one that is known
_CHAIN_SHARE = 0.6  # of what is left then, for the chain solver
_AGAIN_SHARE = 0.4  # of what that leaves, for the walk
_NEIGHBOURHOODS_S = 20.0  # at most, for the neighbourhoods of the best plan
_PRUNE_S = 2.0  # for the plan of the floor, where the time limit has passed
_TINY = 24  # ops up to which all schedules are searched: mostly within a second
_TINY_HOST = 8  # the same with a host tier, whose copies make states many more
_STATES = 50_000  # of that search


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoSolver:
    """Best plan and best bound of the solvers that suit the problem. Deterministic unless the time limit is hit.

    Attributes:
        time_limit_s: wall-clock limit of the search for a fast plan. Where it finds none, the floor is looked for,
            which has a limit of its own.
        gap: a plan is ``OPTIMAL`` when (step time − lower bound) / lower bound is at most this; the search stops there.
            Problems of a few ops are solved to the optimum whatever it says.

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
        found = self._without_copies(problem, start)
        return found if found.status.has_plan else self._by_the_floor(problem, found, start)

    def _without_copies(self, problem: Problem, start: float) -> Solution:
        """The plan that is found in the time, else a solution without one: ``INFEASIBLE`` where that is proven."""
        if floor_lower_bound(problem).bytes > problem.budget_bytes:
            return Solution(Status.INFEASIBLE, (), 0, 0, problem.keep_all_time_ns, "auto")
        moments = MomentsSolver(gap=self.gap, time_limit_s=self.time_limit_s * _MOMENTS_SHARE).solve(problem)
        best, bound = moments, moments.lower_bound_ns
        if moments.status not in (Status.OPTIMAL, Status.INFEASIBLE):
            best = self._best(problem, moments, start)
        if best.status is not Status.INFEASIBLE and self._is_tiny(problem) and not self._is_proven(best, bound):
            best = self._settle(problem, best, start)
            bound = max(bound, best.lower_bound_ns)
        if not best.status.has_plan:
            return dataclasses.replace(best, lower_bound_ns=bound)
        return self._finished(problem, best, bound, start)

    def _by_the_floor(self, problem: Problem, found: Solution, start: float) -> Solution:
        """The answer where no plan was found: the plan of the floor where that fits, or how much is needed."""
        if found.status is Status.INFEASIBLE:
            return self._infeasible(problem, found, start, None)
        floor = find_floor(problem, enough_bytes=problem.budget_bytes)
        if floor.bytes > problem.budget_bytes:
            return self._infeasible(problem, found, start, floor)
        deadline = max(start + self.time_limit_s, time.perf_counter() + _PRUNE_S)
        return self._finished(problem, pruned(problem, floor.plan, deadline=deadline), found.lower_bound_ns, start)

    def _finished(self, problem: Problem, best: Solution, bound_ns: int, start: float) -> Solution:
        """The plan, improved in the time that is left, with its status."""
        if not self._is_tiny(problem):
            best = self._improved(problem, best, bound_ns, start)
        return dataclasses.replace(
            best,
            status=Status.OPTIMAL if self._within(best, bound_ns) else Status.FEASIBLE,
            lower_bound_ns=min(bound_ns, best.step_time_ns),
            message="",
            solve_seconds=time.perf_counter() - start,
        )

    @staticmethod
    def _is_tiny(problem: Problem) -> bool:
        """Whether a problem is small enough for all schedules to be searched."""
        return len(problem.time_ns) <= _TINY

    @staticmethod
    def _is_proven(plan: Solution, bound_ns: int) -> bool:
        """Whether there is a plan that takes no longer than the bound."""
        return plan.status.has_plan and plan.step_time_ns <= bound_ns

    def _settle(self, problem: Problem, best: Solution, start: float) -> Solution:
        """Search all schedules of a tiny problem for a faster one."""
        search = StateSearchSolver(max_states=_STATES, time_limit_s=max(self._left(start), 0.0))
        return search.solve(problem, best if best.status.has_plan else None)

    def _improved(self, problem: Problem, best: Solution, bound_ns: int, start: float) -> Solution:
        """The plan, or where it is not within the gap and there is time, a faster one near it."""
        left = min(self._left(start), _NEIGHBOURHOODS_S)
        if self._within(best, bound_ns) or left <= 0:
            return best
        return NeighbourhoodSearch(time_limit_s=left).improve(problem, best, enough_ns=int((1 + self.gap) * bound_ns))

    def _with_host(self, problem: Problem, start: float) -> Solution:
        """The plan of the offload solver, or where that is not within the gap, a faster one.

        That is one without copies, or with copies on top of either; the bound is the offload solver's.
        """
        moved = OffloadSolver(gap=self.gap, time_limit_s=self.time_limit_s * _HOST_SHARE).solve(problem)
        bound, is_tiny = moved.lower_bound_ns, len(problem.time_ns) <= _TINY_HOST
        if moved.status is Status.OPTIMAL and (self._is_proven(moved, bound) or not is_tiny):
            return moved
        alone, begin = problem.with_link(None, 0), time.perf_counter()
        solver = dataclasses.replace(self, time_limit_s=max(_PLAIN_SHARE * self._left(start), 1.0))
        plain = solver._without_copies(alone, begin)  # noqa: SLF001
        best = _fastest([moved, plain])
        if is_tiny and best.status is not Status.INFEASIBLE and not self._is_proven(best, bound):
            search = HostSearchSolver(max_states=_STATES, time_limit_s=max(self._left(start), 0.0))
            best = search.solve(problem, best if best.status.has_plan else None)
            bound = max(bound, best.lower_bound_ns)
        elif moved.status is not Status.INFEASIBLE and not self._within(best, bound):
            plans = [moved, plain, *self._paged(problem, plain, start)]
            best = self._copied(problem, plans, bound, start) if _fastest(plans).status.has_plan else best
        if not best.status.has_plan:
            plain = solver._by_the_floor(alone, plain, begin)  # noqa: SLF001
            best = plain if plain.status.has_plan else self._below_the_floor(problem, best, plain, start)
        if not best.status.has_plan:
            return dataclasses.replace(best, lower_bound_ns=bound)
        return dataclasses.replace(
            best,
            status=Status.OPTIMAL if self._within(best, bound) else Status.FEASIBLE,
            lower_bound_ns=min(bound, best.step_time_ns),
            solve_seconds=time.perf_counter() - start,
        )

    def _paged(self, problem: Problem, plain: Solution, start: float) -> list[Solution]:
        """The fastest plan that pages what another plan without copies holds, if there is any.

        The others keep everything, recompute what fits the budget if what may leave takes memory only while it is
        touched, or fit a larger budget without copies: from one of those on the search goes where plans get faster.
        Where none without copies is known within the budget, the first of those is the plan of the floor.
        """
        alone, ample = problem.with_link(None, 0), keep_all_peak(problem)
        least = problem.budget_bytes
        plans = [paged(problem, range(len(problem.time_ns)))]
        if not plain.status.has_plan:
            limit_s = max(_FLOOR_SHARE * self._left(start), 1.0)
            floor = known_plan(alone.with_budget(ample)) or find_floor(alone, time_limit_s=limit_s).plan
            plans.append(paged(problem, compute_order(floor.steps)))
            least = max(least, floor.peak_bytes)
        limit_s = max(_PAGED_SHARE * self._left(start) / _PAGED_SOLVES, 0.5)
        deadline = time.perf_counter() + _PAGED_SOLVES * limit_s
        solver = MomentsSolver(time_limit_s=limit_s, gap=max(self.gap, _PAGED_GAP))

        def page(budgeted: Problem) -> Solution | None:
            recomputing = solver.solve(budgeted)
            return paged(problem, compute_order(recomputing.steps)) if recomputing.status.has_plan else None

        plans.append(page(touched_only(problem)))
        tried: dict[int, Solution | None] = {}
        pending = [_FIRST_PAGED]
        while pending and time.perf_counter() < deadline:
            index = pending.pop(0)
            budget = int(least + _PAGED_BUDGETS[index] * (ample - least))
            tried[index] = page(alone.with_budget(budget))
            fastest = min(tried, key=lambda i: (_time_of(tried[i]), -i))
            following = (fastest + 1,) if tried[fastest] is None else (fastest - 1, fastest + 1)
            pending = [i for i in following if i not in tried and 0 <= i < len(_PAGED_BUDGETS)]
        found = [plan for plan in (*plans, *tried.values()) if plan is not None]
        return [_fastest(found)] if found else []

    def _copied(self, problem: Problem, plans: list[Solution], bound_ns: int, start: float) -> Solution:
        """The fastest plan after copies on top of each, the fastest first."""
        added = {plan.step_time_ns: plan for plan in reversed(plans) if plan.status.has_plan}
        least = min(added) - problem.keep_all_time_ns
        plans = [added[ns] for ns in sorted(added) if ns - problem.keep_all_time_ns <= _HOPELESS * least]
        found = list(plans)
        for plan in plans:
            left = self._left(start) * (_FASTER_SHARE if plan is not plans[-1] else 1.0)
            if left <= 0 or self._within(_fastest(found), bound_ns):
                break
            search = CopySearch(time_limit_s=left)
            found.append(search.improve(problem, plan, enough_ns=int((1 + self.gap) * bound_ns)))
        return _fastest(found)

    def _below_the_floor(self, problem: Problem, moved: Solution, plain: Solution, start: float) -> Solution:
        """The answer where no plan was found, with copies or without: how much is needed, of both.

        The search for that may still find a plan.
        """
        assert plain.floor_bytes is not None
        is_proven = moved.status is Status.INFEASIBLE
        alone = problem.with_link(None, 0).with_budget(plain.floor_bytes)
        known = known_plan(alone) or find_floor(alone, enough_bytes=plain.floor_bytes).plan
        plan, lower = lower_with_copies(problem, known, time_limit_s=_FLOOR_S)
        if plan is not None and plan.peak_bytes <= problem.budget_bytes:
            return plan
        least = plain.floor_bytes if plan is None else plan.peak_bytes
        bound = max(lower.bytes, problem.budget_bytes + 1 if is_proven else 0)
        return dataclasses.replace(
            plain,
            solve_seconds=time.perf_counter() - start,
            message=(
                f"{'no schedule fits' if is_proven else 'no schedule was found that fits'} {problem.budget_bytes:,} "
                f"bytes with {problem.host_bytes:,} bytes of host memory; with copies a plan exists from {least:,} "
                f"bytes on, without them from {plain.floor_bytes:,}"
            ),
            floor_bytes=least,
            floor_lower_bound_bytes=min(bound, least),
            floor_without_copies_bytes=plain.floor_bytes,
        )

    def _best(self, problem: Problem, moments: Solution, start: float) -> Solution:
        """The plan of the moments solver, or a faster one of the other solvers where that is not within the gap.

        What people apply by hand and the published families come first, so that no plan is slower than any of theirs.
        """
        deadline = start + self.time_limit_s
        by_hand = (strategy.solve(problem) for strategy in BY_HAND.values())
        families = (
            dataclasses.replace(f, time_limit_s=self._family_s(start)).solve(problem) for f in BASELINES.values()
        )
        known = [plan for plan in (*by_hand, *families) if plan.status.has_plan]
        known.sort(key=lambda plan: plan.step_time_ns)
        best = _fastest([moments, *(pruned(problem, plan, deadline=deadline) for plan in known[:_MOST_PRUNED])])
        found = None if best.status.has_plan else known_plan(problem)
        if found is not None:
            until = time.perf_counter() + _WALK_SHARE * max(self._left(start), 0.0)
            best = pruned(problem, found, deadline=until)
        if not best.status.has_plan:  # soon, under the rules that the floor is looked for with
            walk = Rematerialiser(rules=FLOOR_RULES, time_limit_s=_WALK_SHARE * self._left(start)).solve(problem)
            best = walk if walk.status.has_plan else moments
        others: tuple[tuple[ChainSolver | Rematerialiser, float], ...] = (
            (ChainSolver(), _CHAIN_SHARE),
            (Rematerialiser(), _AGAIN_SHARE),
        )
        for solver, share in others if best.status.has_plan else ():
            left = self._left(start)
            if not self._within(best, moments.lower_bound_ns) and left > 0:
                limited = dataclasses.replace(solver, time_limit_s=min(solver.time_limit_s, share * left))
                best = _fastest([best, limited.solve(problem)])
        return best

    def _family_s(self, start: float) -> float:
        """Seconds for one family of baselines: mostly more than they take."""
        return max(_FAMILY_SHARE * self._left(start), 0.1)

    def _within(self, plan: Solution, bound_ns: int) -> bool:
        """Whether there is a plan that is at most the gap that was asked for above the bound."""
        return plan.status.has_plan and plan.step_time_ns - bound_ns <= self.gap * bound_ns

    def _left(self, start: float) -> float:
        return self.time_limit_s - (time.perf_counter() - start)

    def _infeasible(self, problem: Problem, found: Solution, start: float, floor: Floor | None) -> Solution:
        """The answer without a plan: how much is needed, from both sides, and which op binds.

        ``floor`` is what was found where infeasibility is not proven, ``None`` where it is.
        """
        how = "no schedule fits" if floor is None else "no schedule was found that fits"
        floor = floor or find_floor(problem)
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


def _time_of(plan: Solution | None) -> float:
    """Step time, infinite without a plan."""
    return math.inf if plan is None else plan.step_time_ns


def _fastest(solutions: list[Solution]) -> Solution:
    """The fastest plan, the first of equal ones; the first solution where none has a plan."""
    return min(solutions, key=lambda s: (not s.status.has_plan, s.step_time_ns if s.status.has_plan else 0))
