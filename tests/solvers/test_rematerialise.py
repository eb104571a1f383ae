import dataclasses

import pytest

from solvers import Rematerialiser, Status, compute_order, simulate, with_frees
from solvers.brute_force import BruteForceSolver
from solvers.prune import prune
from solvers.rematerialise import OutOfBudgetError, rematerialised_order
from solvers.validate import validate
from tests.problems import keep_all_peak, random_chain, random_problem, training_chain


@pytest.mark.parametrize("seed", range(60))
def test_plans_fit_and_are_legal(seed):
    problem = random_problem(seed, max_ops=25)
    solution = Rematerialiser().solve(problem)
    if solution.status.has_plan:
        validate(problem, solution)
    else:
        assert (solution.status, solution.steps) == (Status.INFEASIBLE, ())


def test_most_feasible_problems_are_solved():
    problems = [random_problem(seed) for seed in range(120)] + [random_chain(seed) for seed in range(60)]
    feasible = [p for p in problems if BruteForceSolver(find_floor=False).solve(p).status.has_plan]
    solved = [p for p in feasible if Rematerialiser().solve(p).status.has_plan]
    assert len(solved) >= 0.93 * len(feasible)


@pytest.mark.parametrize("length", [10, 30])
def test_rebuilds_through_many_levels(length):
    """With three units a chain recomputes every activation from the first one: many levels deep."""
    problem = training_chain(length, budget_bytes=4)
    solution = Rematerialiser().solve(problem)
    assert solution.status.has_plan
    validate(problem, solution)
    counts = [compute_order(solution.steps).count(op) for op in range(length)]
    assert max(counts) > 2


def test_recomputes_nothing_where_everything_fits():
    problem = training_chain(8)
    solution = Rematerialiser().solve(problem.with_budget(keep_all_peak(problem)))
    assert (solution.status, solution.step_time_ns) == (Status.OPTIMAL, problem.keep_all_time_ns)


def test_no_room_names_the_op():
    problem = dataclasses.replace(training_chain(4, budget_bytes=1), op_names=tuple("abcdefgh"))
    with pytest.raises(OutOfBudgetError):
        rematerialised_order(problem)
    assert Rematerialiser().solve(problem).message.endswith("b")


def test_never_drops_what_cannot_be_made_again():
    problem = training_chain(6)
    problem = dataclasses.replace(problem, recomputable=(False, True, True, True, False, True, *([True] * 6)))
    for budget in range(3, keep_all_peak(problem) + 1):
        solution = Rematerialiser().solve(problem.with_budget(budget))
        if solution.status.has_plan:
            validate(problem.with_budget(budget), solution)
    assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("seed", range(40))
def test_pruning_keeps_the_budget_and_never_adds_time(seed):
    problem = random_chain(seed, length=12, budget=0.4)
    try:
        order = rematerialised_order(problem, improve=False)
    except OutOfBudgetError:
        pytest.skip("the walk finds no plan for this draw")
    pruned = prune(problem, order)
    assert simulate(problem, with_frees(problem, pruned)).peak_bytes <= problem.budget_bytes
    assert len(pruned) <= len(order)
    assert set(pruned) == set(order)


def test_pruning_removes_every_recomputation_that_fits():
    problem = training_chain(5)
    order = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 0, 1, 2, 7, 0, 1, 8, 0, 9)
    assert prune(problem.with_budget(keep_all_peak(problem)), order) == tuple(range(10))
    lean = prune(problem.with_budget(4), order)
    assert simulate(problem, with_frees(problem, lean)).peak_bytes <= 4
    assert len(lean) < len(order)


def test_same_problem_same_plan():
    problem = random_problem(5, ops=40)
    assert Rematerialiser().solve(problem).steps == Rematerialiser().solve(problem).steps


def test_nothing_is_pruned_after_the_deadline():
    problem = training_chain(5)
    order = (0, 1, 0, 1, *range(2, 10))
    assert prune(problem.with_budget(keep_all_peak(problem)), order, deadline=0.0) == order
