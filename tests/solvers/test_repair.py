import pytest

from solvers import simulate, with_frees
from solvers.repair import repair
from tests.problems import keep_all_peak, random_chain, random_problem, training_chain


def peak_of(problem, order):
    return simulate(problem, with_frees(problem, order)).peak_bytes


def test_an_order_that_fits_is_left_alone():
    problem = training_chain(6)
    assert repair(problem.with_budget(keep_all_peak(problem)), range(12)) == tuple(range(12))


def test_keep_all_one_unit_over_the_budget_loses_one_activation():
    problem = training_chain(6)
    tight = problem.with_budget(keep_all_peak(problem) - 1)
    order = repair(tight, range(12))
    assert peak_of(tight, order) <= tight.budget_bytes
    assert len(order) <= 14


@pytest.mark.parametrize("seed", range(60))
def test_the_result_is_legal_and_nowhere_worse(seed):
    problem = random_chain(seed, length=8) if seed % 2 else random_problem(seed, ops=14)
    keep_all = range(len(problem.time_ns))
    order = repair(problem, keep_all)
    assert peak_of(problem, order) <= peak_of(problem, keep_all)
    assert set(order) == set(keep_all)


def test_most_chains_a_little_over_the_budget_are_repaired():
    problems = [random_chain(seed, length=10, budget=0.8) for seed in range(40)]
    repaired = [peak_of(p, repair(p, range(20))) <= p.budget_bytes for p in problems]
    assert sum(repaired) >= 36


def test_nothing_is_repaired_after_the_deadline():
    problem = training_chain(6)
    tight = problem.with_budget(keep_all_peak(problem) - 1)
    assert repair(tight, range(12), deadline=0.0) == tuple(range(12))
