"""A solver that finds the floor by itself and plans at a share of the way from there to the keep-all peak.

One capture then serves for the range of budgets and for the plan. The strict-budget walk does the work, which takes
milliseconds on small graphs; what is tested with it is that plans run as they say, not that they are the best ones.
"""

from __future__ import annotations

import dataclasses

from solvers.bounds import floor_lower_bound
from solvers.problem import Problem
from solvers.rematerialise import RULES, Rematerialiser
from solvers.simulate import simulate
from solvers.solution import Solution
from solvers.store_all import StoreAllSolver, store_all_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Between:
    """Plans at ``floor + fraction · (keep-all peak − floor)``; the problem's own budget does not matter.

    Attributes:
        fraction: 0 is the least budget that the walk can plan, to a hundredth of the range; 1 keeps all.
        chosen: the budgets in bytes that were planned for, in order; filled by :meth:`solve`.

    """

    fraction: float = 0.0
    chosen: list[int] = dataclasses.field(default_factory=list)

    def solve(self, problem: Problem) -> Solution:
        """Plan at the budget that the fraction stands for."""
        keep_all = simulate(problem, store_all_steps(problem)).peak_bytes
        floor, at_floor = self._floor(problem, keep_all)
        budget = floor + round(self.fraction * (keep_all - floor))
        self.chosen.append(budget)
        bounded = problem.with_budget(budget)
        if budget >= keep_all:
            return StoreAllSolver().solve(bounded)
        solution = Rematerialiser(rules=RULES).solve(bounded)
        return solution if solution.status.has_plan else at_floor  # more room can lead the walk astray

    @staticmethod
    def _floor(problem: Problem, keep_all: int) -> tuple[int, Solution]:
        low, high = floor_lower_bound(problem).bytes, keep_all
        walk = Rematerialiser(rules=RULES)
        best = StoreAllSolver().solve(problem.with_budget(keep_all))
        slack = (high - low) // 100
        candidate = low
        while high > low:
            solution = walk.solve(problem.with_budget(candidate))
            if solution.status.has_plan:
                high, best = candidate, solution
            else:
                low = candidate + 1
            if high - low <= slack:
                break
            candidate = (low + high) // 2
        return high, best
