import dataclasses

import pytest

from solvers import AutoSolver, FloorBound, Status, find_floor, floor_lower_bound, simulate, validate
from solvers.baselines import BASELINES
from solvers.bounds import known_plan
from solvers.brute_force import BruteForceSolver
from solvers.strategies import BY_HAND
from tests.problems import keep_all_peak, least_demand, random_chain, random_problem, training_chain


@pytest.mark.parametrize("seed", range(60))
def test_lower_bound_floor_and_upper_bound(seed):
    problem = random_problem(seed) if seed % 2 else random_chain(seed)
    bound = floor_lower_bound(problem)
    assert least_demand(problem) <= bound.bytes
    below = BruteForceSolver().solve(problem.with_budget(bound.bytes - 1))
    assert below.status is Status.INFEASIBLE
    floor = find_floor(problem, tolerance=0.0)
    assert bound.bytes <= floor.lower_bound.bytes <= below.floor_bytes <= floor.bytes <= keep_all_peak(problem)


def test_mostly_the_floor_is_found():
    problems = [random_problem(seed) for seed in range(40)]
    found = [find_floor(p, tolerance=0.0).bytes for p in problems]
    exact = [BruteForceSolver().solve(p.with_budget(floor_lower_bound(p).bytes - 1)).floor_bytes for p in problems]
    assert sum(f == e for f, e in zip(found, exact, strict=True)) >= 34


def test_binding_op():
    problem = dataclasses.replace(training_chain(4), workspace_bytes=(0, 0, 9, 0, 0, 0, 0, 0), static_bytes=100)
    assert floor_lower_bound(problem) == FloorBound(100 + 9 + 1 + 1, 2)


def test_what_cannot_come_back_counts():
    problem = training_chain(4)
    free = floor_lower_bound(problem).bytes
    fixed = dataclasses.replace(problem, recomputable=(False,) * 8)
    assert floor_lower_bound(fixed).bytes == keep_all_peak(problem) > free


def test_everything_that_lives_to_the_end_counts_for_the_last_op():
    problem = dataclasses.replace(training_chain(4), live_at_end=frozenset(range(8)))
    assert floor_lower_bound(problem) == FloorBound(8, 7)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_exists_at_the_floor(seed):
    problem = random_chain(seed, length=10, budget=0.0)
    floor = find_floor(problem)
    at_floor = AutoSolver(time_limit_s=2).solve(problem.with_budget(floor.bytes))
    assert at_floor.status.has_plan
    assert at_floor.peak_bytes <= floor.bytes


@pytest.mark.parametrize("seed", range(4))
def test_the_floor_is_no_higher_than_what_any_baseline_reaches(seed):
    problem = random_chain(seed, length=30)
    floor = find_floor(problem)
    families = [member.peak_bytes for family in BASELINES.values() for member in family.members(problem)]
    by_hand = [strategy.solve(problem.with_budget(10**9)).peak_bytes for strategy in BY_HAND.values()]
    assert floor.bytes <= min(*families, *by_hand)


def test_the_search_ends_with_a_plan_that_suffices():
    problem = random_chain(3, length=30)
    floor = find_floor(problem)
    enough = (floor.bytes + keep_all_peak(problem)) // 2
    found = find_floor(problem, enough_bytes=enough)
    assert floor.bytes < found.bytes <= enough
    assert find_floor(problem, enough_bytes=floor.bytes).bytes == floor.bytes


def test_what_a_search_for_the_floor_has_found_is_known():
    problems = [random_problem(seed) for seed in range(100, 106)]
    floors = [find_floor(problem) for problem in problems]
    for problem, floor in zip(problems[-4:], floors[-4:], strict=True):
        at_floor = problem.with_budget(floor.bytes)
        plan = known_plan(at_floor)
        assert plan is not None
        assert simulate(at_floor, plan.steps).peak_bytes <= floor.bytes
        assert known_plan(problem.with_budget(floor.bytes - 1)) is None
    assert known_plan(problems[0].with_budget(floors[0].bytes)) is None  # only the last few are kept


def test_the_portfolio_has_a_plan_at_a_floor_that_was_found_though_it_has_no_time(monkeypatch):
    problem = random_problem(3, ops=60)
    floor = find_floor(problem)
    at_floor = problem.with_budget(floor.bytes)
    walks = []
    monkeypatch.setattr("solvers.auto.Rematerialiser.solve", lambda *_: walks.append(1))
    solution = AutoSolver(time_limit_s=0.01).solve(at_floor)
    assert solution.status.has_plan
    validate(at_floor, solution)
    assert not walks
