"""Solvers against exhaustive search: ``python -m benchmarks.agreement [--graphs N]``.

Random graphs of the four shapes of ``tests/solvers/test_oracle.py``, small enough for every schedule to be looked at.
A plan agrees where its cost equals the least one, to the nanosecond; without any schedule, where the solver says that
none fits. Fails where the portfolio or the search over states disagrees anywhere, or a bound is above the optimum.
"""

from __future__ import annotations

import time
from typing import Final

from benchmarks.common import Table, arguments, finish, write_results
from solvers import AutoSolver, BruteForceSolver, MomentsSolver, Problem, Solution, Status
from solvers.state_search import StateSearchSolver
from solvers.validate import validate
from tests.problems import GRAPH_SHAPES

_Solver = AutoSolver | MomentsSolver | StateSearchSolver

SOLVERS: Final[dict[str, _Solver]] = {
    "portfolio": AutoSolver(),
    "search over states": StateSearchSolver(),
    "moments": MomentsSolver(gap=0.0),
}
EXACT: Final = ("portfolio", "search over states")


def compare(problem: Problem, best: Solution, found: Solution) -> tuple[bool, bool]:
    """Whether the plan costs the least (or none is claimed to fit), and whether the bound is that cost.

    Raises:
        AssertionError: the plan is faster than the fastest, the bound is above it, or the plan is not legal.

    """
    if not best.status.has_plan:
        assert not found.status.has_plan
        return found.status is Status.INFEASIBLE, found.status is Status.INFEASIBLE
    assert found.lower_bound_ns <= best.step_time_ns
    if not found.status.has_plan:
        return False, found.lower_bound_ns == best.step_time_ns
    validate(problem, found)
    assert found.step_time_ns >= best.step_time_ns
    return found.step_time_ns == best.step_time_ns, found.lower_bound_ns == best.step_time_ns


def main() -> None:
    options = arguments(__doc__, graphs=300)
    table = Table(
        "Agreement with exhaustive search",
        ("shape", "graphs", "with a plan", "recomputing", "solver", "equal cost", "bound equal", "seconds"),
    )
    failures = []
    for shape, make in GRAPH_SHAPES.items():
        problems = [make(seed) for seed in range(options.graphs)]
        best = [BruteForceSolver(find_floor=False).solve(problem) for problem in problems]
        planned = sum(b.status.has_plan for b in best)
        recomputing = sum(b.step_time_ns > p.keep_all_time_ns for p, b in zip(problems, best, strict=True))
        for name, solver in SOLVERS.items():
            start = time.process_time()
            found = [compare(p, b, solver.solve(p)) for p, b in zip(problems, best, strict=True)]
            equal, tight = (sum(figures) for figures in zip(*found, strict=True))
            seconds = time.process_time() - start
            count = len(problems)
            rates = (f"{equal / count:.1%}", f"{tight / count:.1%}")
            table.add(shape, count, planned, recomputing, name, *rates, f"{seconds:.0f}")
            if name in EXACT and equal < count:
                failures.append(f"{name} on {shape}: {count - equal} of {count} disagree")
    table.show()
    notes = [
        "equal cost: the plan takes as long as the fastest of all schedules, or none fits and that is said",
        "bound equal: the lower bound is that time too, so that the plan is proven to be the fastest",
        "seconds: of the processor, for all graphs of the shape",
        f"failures: {'; '.join(failures) or 'none'}",
    ]
    if not options.no_write:
        print(write_results("agreement", "Solvers against exhaustive search", [table], notes))
    finish(failures)


if __name__ == "__main__":
    main()
