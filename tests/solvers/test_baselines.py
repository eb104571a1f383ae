import math

import pytest

from solvers import AutoSolver, Status, compute_order
from solvers.baselines import BASELINES, ChenGreedy, EveryK, MinCut, Revolve
from solvers.strategies import BY_HAND
from solvers.validate import validate
from tests.problems import keep_all_peak, random_chain, training_chain


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("seed", range(4))
def test_plans_are_legal_fit_and_get_no_slower_with_more_memory(baseline, seed):
    times = []
    for fraction in (0.0, 0.3, 0.6, 1.0):
        problem = random_chain(seed, length=12, budget=fraction)
        solution = baseline.solve(problem)
        if solution.status.has_plan:
            validate(problem, solution)
            times.append(solution.step_time_ns)
        else:
            assert not times
            assert solution.floor_bytes > problem.budget_bytes
    assert times
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
def test_something_is_recomputed_where_not_everything_fits(baseline):
    problem = training_chain(16)
    solution = baseline.solve(problem.with_budget(keep_all_peak(problem) - 1))
    assert solution.status is Status.FEASIBLE
    assert solution.step_time_ns > problem.keep_all_time_ns


@pytest.mark.parametrize("checkpoints", [2, 3, 5])
def test_revolve_takes_the_binomial_number_of_steps(checkpoints):
    length = 30
    (r,) = (
        r
        for r in range(1, 30)
        if math.comb(checkpoints + r - 1, checkpoints) < length <= math.comb(checkpoints + r, checkpoints)
    )
    steps = r * length - math.comb(checkpoints + r, r - 1)
    executions = [len(tuple(order)) for order in Revolve().orders(training_chain(length, gradient_bytes=0))]
    # The backward of a stage does not read what the stage makes, so that its own forward is not run again.
    assert executions[checkpoints - 1] == steps + 1 + length


def test_every_k_contains_what_is_done_by_hand():
    problem = training_chain(12)
    for budget in range(5, 14):
        best = EveryK().solve(problem.with_budget(budget))
        for name in ("checkpoint every block", "checkpoint every 2nd block", "√n segments"):
            hand = BY_HAND[name].solve(problem.with_budget(budget))
            assert not hand.status.has_plan or best.step_time_ns <= hand.step_time_ns


def test_greedy_reaches_about_twice_the_root():
    least = ChenGreedy().solve(training_chain(100, budget_bytes=1)).floor_bytes
    assert least <= 2 * 10 + 5


def test_minimum_cut_keeps_the_cheap_and_makes_the_dear_again():
    problem = training_chain(6, activation_bytes=[1, 1, 50, 1, 1, 1], time_ns=[9, 9, 1, 9, 9, 9])
    order = compute_order(MinCut().solve(problem.with_budget(keep_all_peak(problem) - 1)).steps)
    assert [op for op in range(6) if order.count(op) > 1] == [2]


@pytest.mark.parametrize("seed", range(3))
def test_the_portfolio_is_never_slower(seed):
    for fraction in (0.1, 0.4):
        problem = random_chain(seed, length=12, budget=fraction)
        best = AutoSolver(gap=0.0, time_limit_s=3).solve(problem)
        for baseline in BASELINES.values():
            found = baseline.solve(problem)
            if found.status.has_plan:
                assert best.step_time_ns <= found.step_time_ns
