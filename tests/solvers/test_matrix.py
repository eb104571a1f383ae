"""Every solver on every problem of one table: bound ≤ optimum ≤ plan, and a plan that the validator accepts."""

import pytest

from solvers import (
    AutoSolver,
    BruteForceSolver,
    ChainSolver,
    ExactSolver,
    MomentsSolver,
    Rematerialiser,
    Status,
    StoreAllSolver,
)
from solvers.baselines import BASELINES
from solvers.state_search import StateSearchSolver
from solvers.strategies import BY_HAND
from solvers.validate import validate
from tests.problems import known_cases, random_chain, random_problem, reversal, training_chain

EXACT = (AutoSolver(), BruteForceSolver(find_floor=False), StateSearchSolver())
SOLVERS = (
    *EXACT,
    ChainSolver(),
    ExactSolver(time_limit_s=10.0),
    MomentsSolver(),
    Rematerialiser(),
    StoreAllSolver(),
    *BASELINES.values(),
    *BY_HAND.values(),
)
PROBLEMS = {
    **{case.name: case.problem for case in list(known_cases())[::3]},
    **{f"reversal of 5 within {budget}": reversal(5, budget) for budget in (1, 2, 3, 5)},
    **{f"training chain within {budget}": training_chain(4, budget_bytes=budget) for budget in (3, 4, 5)},
    **{f"random chain {seed}": random_chain(seed, budget=seed / 4) for seed in range(4)},
    **{f"random problem {seed}": random_problem(seed, max_ops=7, budget=seed / 4) for seed in range(4)},
}


@pytest.fixture(scope="module")
def optimum():
    """Least time of all schedules of each problem; ``None`` where there is none."""
    best = {name: BruteForceSolver(find_floor=False).solve(problem) for name, problem in PROBLEMS.items()}
    return {name: s.step_time_ns if s.status.has_plan else None for name, s in best.items()}


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_bound_optimum_plan(solver, optimum):
    for name, problem in PROBLEMS.items():
        solution = solver.solve(problem)
        best = optimum[name]
        if best is None:
            assert not solution.status.has_plan, name
            continue
        assert solution.lower_bound_ns <= best, name
        if solution.status.has_plan:
            validate(problem, solution)
            assert solution.step_time_ns >= best, name
        if solver in EXACT:
            assert solution.status is Status.OPTIMAL, name
            assert solution.step_time_ns == best, name


def test_the_table_has_problems_of_every_kind(optimum):
    times = [(problem, optimum[name]) for name, problem in PROBLEMS.items()]
    assert sum(best is None for _, best in times) >= 2
    assert sum(best is not None and best > problem.keep_all_time_ns for problem, best in times) >= 8
