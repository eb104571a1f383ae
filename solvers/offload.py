"""Offload solver: keep, recompute or move to the host, decided together at moments, with copies beside computation."""

from __future__ import annotations

import dataclasses
import logging

from solvers.bounds import floor_lower_bound
from solvers.extract_offload import overlapped_steps
from solvers.moments_model import Decisions
from solvers.moments_search import MomentsSearch, spaced, violations
from solvers.offload_model import OffloadModel
from solvers.paging import paged
from solvers.problem import Problem
from solvers.solution import Compute, Free, Offload, Prefetch, Solution, Status
from solvers.store_all import StoreAllSolver, keep_all_peak_op

_log = logging.getLogger(__name__)

_MODEL_SHARE = 0.3  # of the gap, to which each model is solved; the rest is for what the steps add to it
_ROOM_SHARE = 0.01  # of the capacity, taken from the model where its plan fits and stalls


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSolver:
    """Least time subject to memory at lazily added moments and to the link; see :mod:`solvers.offload_model`.

    A model is solved for the peak of the keep-all schedule, :mod:`solvers.extract_offload` turns its decisions into
    steps, and the simulator says where these exceed the budget: the first executions that do become moments too. Where
    only rebuilding or copies do, or the steps stall, the capacity of the model is reduced a little. Where none of its
    plans fits, :mod:`solvers.paging` may have one that recomputes nothing.

    Its lower bound is valid for every schedule that first executes the ops in the given order, whatever it recomputes
    and copies. Deterministic as long as the time limit is not hit.

    Attributes:
        gap: stop when (step time − lower bound) / lower bound of the best plan is at most this.
        time_limit_s: wall-clock limit of the whole solve.
        max_rounds: models solved.
        max_moments: no more moments than this are added.
        moments_per_round: how many violated ops become moments at once.

    """

    gap: float = 0.005
    time_limit_s: float = 30.0
    max_rounds: int = 12
    max_moments: int = 16
    moments_per_round: int = 3

    def solve(self, problem: Problem) -> Solution:
        """Solve; ``INFEASIBLE`` means proven so, ``TIME_LIMIT`` that neither a plan nor a proof was found.

        Raises:
            ValueError: the problem has no host tier.

        """
        if not problem.has_host_tier:
            raise ValueError("the problem has no link to a host, or no bytes there: use another solver")
        return _Search(self, problem).run()


class _Search(MomentsSearch):
    """One solve."""

    def __init__(self, options: OffloadSolver, problem: Problem) -> None:
        super().__init__(problem, name="offload", gap=options.gap, time_limit_s=options.time_limit_s)
        self.options = options

    def run(self) -> Solution:
        """Keep all if that fits, else solve models with ever more moments or ever less capacity."""
        problem, options = self.problem, self.options
        keep_all = StoreAllSolver().solve(problem)
        if keep_all.status is Status.OPTIMAL:
            return dataclasses.replace(keep_all, solver="offload")
        lower = floor_lower_bound(problem)
        if lower.bytes > problem.budget_bytes:
            return self.infeasible((lower.op,))
        moments: tuple[int, ...] = (keep_all_peak_op(problem),)
        capacity = problem.capacity_bytes
        for _ in range(options.max_rounds):
            model = OffloadModel(problem, moments, capacity)
            decisions, proven_infeasible = self.solve_model(model, capacity, model_gap=_MODEL_SHARE * options.gap)
            if proven_infeasible and capacity == problem.capacity_bytes:
                return self.infeasible(moments)
            if decisions is None:
                break
            excess, violated = self._consider(decisions)
            if self.is_done() or self.time_left() <= 0:
                break
            fresh = spaced([op for op in violated if op not in moments], options.moments_per_round, problem)
            if fresh and len(moments) < options.max_moments:
                moments = tuple(sorted({*moments, *fresh}))
            else:
                capacity -= max(excess // 2, int(_ROOM_SHARE * problem.capacity_bytes), 1)
                if capacity <= 0:
                    break
        return self._or_paged()

    def _or_paged(self) -> Solution:
        """The answer; where no plan was found, the one that recomputes nothing and pages."""
        if self.best is None:
            found = paged(self.problem, range(len(self.problem.time_ns)))
            if found is not None:
                self.offer(found.steps)
        return self.solution()

    def _consider(self, decisions: Decisions) -> tuple[int, list[int]]:
        """Try the plan that the decisions suggest; return its excess bytes and the ops that exceed, worst first."""
        problem = self.problem
        steps = overlapped_steps(problem, decisions)
        simulation = self.offer(steps)
        _log.debug(
            "peak %.4f of the budget, %d ns, of which %d stalled",
            simulation.peak_bytes / max(problem.budget_bytes, 1),
            simulation.step_time_ns,
            simulation.stall_ns,
        )
        violated = violations(problem, steps, simulation.live_bytes, kinds=(Compute, Free, Offload, Prefetch))
        return max(0, simulation.peak_bytes - problem.budget_bytes), [op for _, op in violated]
