import dataclasses
import time

import pytest

from solvers import AutoSolver, BruteForceSolver, Status, compute_order
from solvers.validate import validate
from tests.problems import keep_all_peak, known_cases, random_chain, random_problem, training_chain

CASES = list(known_cases())


def test_nothing_is_recomputed_where_everything_fits():
    problem = training_chain(6)
    solution = AutoSolver().solve(problem.with_budget(keep_all_peak(problem)))
    assert solution.status is Status.OPTIMAL
    assert compute_order(solution.steps) == tuple(range(12))
    assert solution.lower_bound_ns == solution.step_time_ns == problem.keep_all_time_ns


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_known_cases(case):
    solution = AutoSolver(gap=0.0).solve(case.problem)
    if case.order is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.lower_bound_ns <= case.order <= solution.step_time_ns
    validate(case.problem, solution)


def test_infeasible_says_how_much_is_needed_and_which_op_binds():
    problem = dataclasses.replace(
        training_chain(4, budget_bytes=110), static_bytes=108, op_names=tuple("abcdefgh"), op_modules=("layers.0",) * 8
    )
    solution = AutoSolver().solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.steps == ()
    assert problem.budget_bytes < solution.floor_lower_bound_bytes <= solution.floor_bytes
    assert "in layers.0" in solution.message
    assert f"{solution.floor_bytes:,}" in solution.message
    assert AutoSolver().solve(problem.with_budget(solution.floor_bytes)).status.has_plan


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.5])
def test_status_is_about_the_gap_that_was_asked_for(gap):
    for seed in range(6):
        solution = AutoSolver(gap=gap).solve(random_chain(seed, length=8, budget=0.3))
        if solution.status.has_plan:
            assert (solution.status is Status.OPTIMAL) == (solution.gap <= gap)


@pytest.mark.parametrize("seed", range(12))
def test_plans_of_larger_random_graphs_are_legal(seed):
    problem = random_problem(seed, ops=30)
    solution = AutoSolver(time_limit_s=3).solve(problem)
    if solution.status.has_plan:
        validate(problem, solution)
        assert problem.keep_all_time_ns <= solution.lower_bound_ns <= solution.step_time_ns
    else:
        assert solution.floor_bytes > problem.budget_bytes


def test_same_problem_same_plan():
    problem = random_chain(11, length=12, budget=0.5)
    first, second = AutoSolver().solve(problem), AutoSolver().solve(problem)
    assert dataclasses.replace(first, solve_seconds=0.0) == dataclasses.replace(second, solve_seconds=0.0)


SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_larger_budget_is_never_slower(seed):
    """Bounds never rise, and a plan proven to be the best is no slower than any plan of a smaller budget."""
    solutions = [AutoSolver(gap=0.0).solve(random_chain(seed, length=8, budget=share)) for share in SHARES]
    bounds = [s.lower_bound_ns for s in solutions if s.status.has_plan]
    times = [s.step_time_ns for s in solutions if s.status.has_plan]
    assert len(times) >= 4
    assert bounds == sorted(bounds, reverse=True)
    for larger, solution in enumerate(solutions):
        if solution.status is Status.OPTIMAL:
            assert all(solution.step_time_ns <= s.step_time_ns for s in solutions[:larger] if s.status.has_plan)


@pytest.mark.parametrize(("times", "sizes"), [(1_000_003, 1), (1, 1_000_003), (977, 4096)])
def test_units_do_not_matter(times, sizes):
    solver = AutoSolver(gap=1e-4)  # times below are far coarser, and proofs a little less exact
    optimal = 0
    for seed in range(8):
        problem = random_chain(seed, length=8, budget=0.5)
        scaled = dataclasses.replace(
            problem,
            time_ns=tuple(times * t for t in problem.time_ns),
            storage_bytes=tuple(sizes * b for b in problem.storage_bytes),
            workspace_bytes=tuple(sizes * b for b in problem.workspace_bytes),
            budget_bytes=sizes * problem.budget_bytes,
        )
        plain, other = solver.solve(problem), solver.solve(scaled)
        assert plain.status.has_plan == other.status.has_plan
        if plain.status is other.status is Status.OPTIMAL:
            optimal += 1
            assert other.step_time_ns == times * plain.step_time_ns
    assert optimal >= 5


def test_time_limit_is_kept():
    problem = random_problem(2, ops=300, budget=0.2)
    start = time.perf_counter()
    solution = AutoSolver(time_limit_s=1.0, gap=0.0).solve(problem)
    assert time.perf_counter() - start < 30.0
    assert solution.solve_seconds > 0.0


@pytest.mark.parametrize("seed", [1002, 1003, 1008, 1020])
def test_tiny_problems_that_moments_leave_open_are_solved_exactly(seed):
    problem = random_chain(seed, length=5, budget=(seed % 3) / 10)
    optimum = BruteForceSolver(find_floor=False).solve(problem)
    solution = AutoSolver(gap=0.0).solve(problem)
    validate(problem, solution)
    assert solution.step_time_ns == optimum.step_time_ns
