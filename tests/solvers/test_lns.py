import functools

import pytest

from solvers import ChainSolver, Rematerialiser
from solvers.lns import NeighbourhoodSearch
from solvers.validate import validate
from tests.problems import random_chain, random_problem

SEARCH = NeighbourhoodSearch(most=9)


@functools.cache
def _case(seed):
    """A step, and the best plan for it of the solvers that plan without neighbourhoods."""
    chain = seed % 2 == 1
    problem = random_chain(seed, length=20, budget=0.25) if chain else random_problem(seed, ops=40, budget=0.25)
    plans = [solver.solve(problem) for solver in (Rematerialiser(), ChainSolver())]
    return problem, min((p for p in plans if p.status.has_plan), key=lambda p: p.step_time_ns)


CASES = (0, 1, 3, 5, 7)  # of the first eight, those for which there is a plan


@pytest.mark.parametrize("seed", CASES)
def test_plans_fit_and_are_no_slower(seed):
    problem, plan = _case(seed)
    found = SEARCH.improve(problem, plan)
    validate(problem, found)
    assert found.step_time_ns <= plan.step_time_ns


def test_gains_where_walk_and_chain_end():
    gains = [(p.step_time_ns - SEARCH.improve(x, p).step_time_ns) / x.keep_all_time_ns for x, p in map(_case, CASES)]
    assert sum(gain > 0.005 for gain in gains) >= 3


def test_same_plan_same_better_plan():
    problem, plan = _case(CASES[0])
    assert SEARCH.improve(problem, plan).steps == SEARCH.improve(problem, plan).steps


@pytest.mark.parametrize("limits", [{"time_limit_s": 0.0}, {"most": 0}])
def test_limits_are_kept(limits):
    problem, plan = _case(CASES[0])
    assert NeighbourhoodSearch(**limits).improve(problem, plan) is plan


def test_ends_with_a_plan_that_is_good_enough():
    problem, plan = _case(CASES[0])
    assert SEARCH.improve(problem, plan, enough_ns=plan.step_time_ns) is plan
