"""Orders of the ops: legal, never worse, and held against the least peak of all orders of tiny graphs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings

from graphs.order import check_order, precedence
from solvers.auto import AutoSolver
from solvers.brute_force import BruteForceSolver
from solvers.live import LiveBytes
from solvers.order import least_order_bound, least_peak_order
from solvers.problem import Problem
from solvers.rematerialise import Rematerialiser
from solvers.simulate import simulate
from solvers.solution import Compute
from solvers.store_all import store_all_steps
from solvers.validate import validate
from tests.orders import least_peak_of_all_orders, reordered
from tests.problems import graph_of, keep_all_peak, least_demand, problems, random_problem


def live_bytes(problem, order):
    """Bytes live at each position of an order while everything is kept, static ones included."""
    return (problem.static_bytes + LiveBytes(problem).during(order)).tolist()


@settings(max_examples=60, deadline=None)
@given(problems(max_ops=14))
def test_an_order_is_legal_and_never_has_a_higher_peak(problem):
    graph = graph_of(problem)
    known = precedence(graph)
    order = least_peak_order(problem, known)
    check_order(graph, order)
    other = reordered(problem, order)
    assert least_order_bound(problem, known) <= keep_all_peak(other) <= keep_all_peak(problem)
    assert order == least_peak_order(problem, precedence(graph))
    if keep_all_peak(other) == keep_all_peak(problem) and order != tuple(range(len(order))):
        assert sum(live_bytes(problem, order)) < sum(live_bytes(problem, range(len(order))))


@settings(max_examples=30, deadline=None)
@given(problems())
def test_live_bytes_are_those_of_the_simulation(problem):
    steps = store_all_steps(problem)
    simulated = simulate(problem, steps).live_bytes
    expected = [live for live, step in zip(simulated, steps, strict=True) if isinstance(step, Compute)]
    assert live_bytes(problem, range(len(problem.time_ns))) == expected


def test_mostly_the_least_peak_of_all_orders():
    reached = improvable = improved = 0
    cases = [random_problem(seed, max_ops=11, plain=bool(seed % 2)) for seed in range(120)]
    for problem in cases:
        known = precedence(graph_of(problem))
        found = max(live_bytes(problem, least_peak_order(problem, known)))
        least = least_peak_of_all_orders(problem, known)
        assert least_order_bound(problem, known) <= least <= found
        reached += found == least
        improvable += least < keep_all_peak(problem)
        improved += found < keep_all_peak(problem)
    assert reached >= 0.9 * len(cases)
    assert improved >= 0.85 * improvable > 20


def test_dynamic_programming_is_right():
    rng = random.Random(0)
    for seed in range(20):
        problem = random_problem(seed, ops=rng.randint(3, 6))
        graph = graph_of(problem)
        peaks = []
        for order in itertools.permutations(range(len(problem.time_ns))):
            try:
                check_order(graph, order)
            except ValueError:
                continue
            peaks.append(keep_all_peak(reordered(problem, order)))
        assert min(peaks) == least_peak_of_all_orders(problem, precedence(graph))


def wide_then_narrow(branches: int) -> Problem:
    """Large results of one input, made one after the other before each is reduced; then the mirror image of that."""
    large, small = range(branches), range(branches, 2 * branches)
    back = range(2 * branches + 1, 3 * branches + 1)
    inputs = [[] for _ in large] + [[b] for b in large] + [list(small)] + [[2 * branches] for _ in back]
    inputs += [[b] for b in back]
    sizes = [100] * branches + [1] * branches + [1] + [100] * branches + [1] * branches
    return Problem.from_single_outputs(
        [1] * len(inputs), sizes, inputs, 0, live_at_end=range(3 * branches + 1, 4 * branches + 1)
    )


def test_frees_come_early_and_allocations_late():
    problem = wide_then_narrow(8)
    order = least_peak_order(problem, precedence(graph_of(problem)))
    assert keep_all_peak(problem) >= 800
    assert max(live_bytes(problem, order)) <= 120


def test_a_large_result_with_two_readers_in_separate_loops():
    n = 5
    inputs = [[] for _ in range(n)] + [[i] for i in range(n)] * 2
    problem = Problem.from_single_outputs([1] * 3 * n, [100] * n + [1] * 2 * n, inputs, 0, live_at_end=range(n, 3 * n))
    order = least_peak_order(problem, precedence(graph_of(problem)))
    assert max(live_bytes(problem, order)) == 100 + 2 * n


@pytest.mark.parametrize("seed", range(12))
def test_solvers_take_an_order_whose_storages_are_not_numbered_by_it(seed):
    problem = random_problem(seed, ops=9, plain=bool(seed % 2), budget=0.5)
    order = least_peak_order(problem, precedence(graph_of(problem)))
    low, other = least_demand(problem), reordered(problem, order)
    budget = low + (keep_all_peak(other) - low) // 2
    other = other.with_budget(budget)
    exact = BruteForceSolver().solve(other)
    found = AutoSolver(time_limit_s=2).solve(other)
    assert found.status.has_plan == exact.status.has_plan
    if exact.status.has_plan:
        validate(other, found)
        assert found.step_time_ns == exact.step_time_ns
    walk = Rematerialiser().solve(other)
    if walk.status.has_plan:
        validate(other, walk)
