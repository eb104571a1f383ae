import dataclasses

import pytest

from solvers import BruteForceSolver, Rematerialiser, Status
from solvers.rematerialise import EvictionRule
from solvers.state_search import StateSearchSolver
from solvers.validate import validate
from tests.problems import (
    keep_all_peak,
    known_cases,
    random_chain,
    random_problem,
    reversal,
    reversal_time,
    training_chain,
)

CASES = list(known_cases())


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_known_cases(case):
    solution = StateSearchSolver().solve(case.problem)
    if case.order is None:
        assert solution.status is Status.INFEASIBLE
        return
    validate(case.problem, solution)
    assert solution.status is Status.OPTIMAL
    assert solution.step_time_ns == solution.lower_bound_ns == case.order


@pytest.mark.parametrize(("length", "budget"), [(8, 3), (10, 4), (12, 3), (12, 5), (14, 4), (16, 6)])
def test_reversal_of_a_uniform_chain_takes_the_known_number_of_steps(length, budget):
    solution = StateSearchSolver().solve(reversal(length, budget))
    assert solution.status is Status.OPTIMAL
    assert solution.step_time_ns == reversal_time(length, budget - 1)


def test_keeping_everything_adds_nothing():
    problem = training_chain(40)
    solution = StateSearchSolver().solve(problem.with_budget(keep_all_peak(problem)))
    assert solution.status is Status.OPTIMAL
    assert solution.step_time_ns == problem.keep_all_time_ns


def test_a_known_plan_is_returned_where_nothing_is_faster_and_improved_where_something_is():
    poor = EvictionRule(time=0.0, size=0.0, distance=0.0, pin_late=False)
    kept = improved = 0
    for seed in range(30):
        problem = random_chain(seed, length=5, budget=(seed % 3) / 10)
        known = Rematerialiser(rules=(poor,), improve=False).solve(problem)
        if not known.status.has_plan:
            continue
        best = BruteForceSolver(find_floor=False).solve(problem)
        solution = StateSearchSolver().solve(problem, known)
        validate(problem, solution)
        assert solution.status is Status.OPTIMAL
        assert solution.step_time_ns == solution.lower_bound_ns == best.step_time_ns
        kept += solution.solver == "rematerialise"
        improved += solution.solver == "state-search"
    assert kept >= 5
    assert improved >= 5


@pytest.mark.parametrize("states", [1, 5, 25])
def test_the_bound_holds_where_the_work_does_not_suffice(states):
    unfinished = 0
    for seed in range(40):
        problem = random_problem(seed, ops=9, budget=(seed % 3) / 10)
        best = BruteForceSolver(find_floor=False).solve(problem)
        found = StateSearchSolver(max_states=states).solve(problem)
        if found.status is Status.TIME_LIMIT:
            unfinished += 1
            assert not found.steps
        assert not best.status.has_plan or found.lower_bound_ns <= best.step_time_ns
    assert unfinished >= 1


def test_a_plan_that_is_known_comes_back_where_the_work_does_not_suffice():
    problem = random_chain(1002, length=5, budget=0.4)
    known = Rematerialiser(improve=False).solve(problem)
    found = StateSearchSolver(max_states=1).solve(problem, known)
    assert found.status is Status.FEASIBLE
    assert (found.steps, found.step_time_ns) == (known.steps, known.step_time_ns)


def test_what_cannot_be_made_again_is_never_dropped():
    problem = training_chain(4, budget_bytes=4)
    once = dataclasses.replace(problem, recomputable=(False,) * 8)
    assert StateSearchSolver().solve(problem).status is Status.OPTIMAL
    assert StateSearchSolver().solve(once).status is Status.INFEASIBLE


def test_static_bytes_over_the_budget():
    problem = dataclasses.replace(training_chain(3, budget_bytes=5), static_bytes=6)
    assert StateSearchSolver().solve(problem).status is Status.INFEASIBLE
