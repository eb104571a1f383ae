"""Demand paging: plans of least memory for an order, the bound that goes with them, and what the portfolio makes."""

import dataclasses
import random

import pytest

from graphs.links import Link
from solvers import AutoSolver, Compute, Offload, OffloadSolver, Prefetch, Problem, Status, find_floor, validate
from solvers.bounds import floor_lower_bound
from solvers.brute_force_offload import OffloadBruteForceSolver
from solvers.offload_floor import find_offload_floor
from solvers.paging import least_paged_bytes, paged, touched_only
from solvers.rematerialise import Rematerialiser
from solvers.simulate import compute_order
from solvers.store_all import keep_all_peak
from tests.problems import random_chain, random_problem

FAST = Link(1e12, 1e12, latency_ns=0, least_bytes=1)


def hosted(seed):
    """A random problem, or for odd seeds a chain, some of whose storages may leave."""
    problem = random_chain(seed, length=6) if seed % 2 else random_problem(seed)
    draw = random.Random(seed)
    movable = frozenset(s for s in range(len(problem.storage_bytes)) if draw.random() < 0.8)
    return dataclasses.replace(problem.with_link(FAST, 10**9), movable=movable)


def orders_of(problem):
    """The plain order, and those of plans that recompute."""
    yield range(len(problem.time_ns))
    alone, peak = problem.with_link(None, 0), keep_all_peak(problem)
    floor = find_floor(alone, time_limit_s=5)
    yield compute_order(floor.plan.steps)
    found = Rematerialiser().solve(alone.with_budget((floor.bytes + peak) // 2))
    if found.status.has_plan:
        yield compute_order(found.steps)


def reverse_chain(length=12):
    """A chain with a backward that reads all of it in reverse, none of which may run again."""
    inputs = [(), *((i - 1,) for i in range(1, length)), (length - 1,)]
    inputs += [tuple(sorted((length + i - 1, length - 1 - i))) for i in range(1, length)]
    ops = 2 * length
    problem = Problem.from_single_outputs((10,) * ops, (10,) * length + (1,) * length, inputs, 60)
    return dataclasses.replace(problem, recomputable=(False,) * ops, link=FAST, host_bytes=10**6)


@pytest.mark.parametrize("seed", range(30))
def test_an_order_pages_from_its_least_budget_on_and_not_below(seed):
    problem = hosted(seed)
    for order in orders_of(problem):
        least = least_paged_bytes(problem, order)
        for budget in (least, least + 1, (least + keep_all_peak(problem)) // 2):
            found = paged(problem.with_budget(budget), order)
            assert found is not None, (seed, budget)
            validate(problem.with_budget(budget), found)
            assert compute_order(found.steps) == tuple(order)
        assert paged(problem.with_budget(least - 1), order) is None


def test_what_is_read_last_leaves_first():
    problem = reverse_chain(6)
    found = paged(problem.with_budget(50), range(12))
    assert found is not None
    gone = [step.storage for step in found.steps if isinstance(step, Offload)]
    assert gone == list(range(len(gone)))  # the first that are made are read last
    assert 0 < len(gone) < 5
    assert paged(problem.with_budget(1000), range(12)).step_time_ns == problem.keep_all_time_ns


def test_no_more_is_copied_than_the_host_has_room_for():
    problem = reverse_chain().with_budget(60)
    whole = paged(problem, range(24))
    copied = 10 * sum(isinstance(step, Offload) for step in whole.steps)
    enough = dataclasses.replace(problem, host_bytes=copied)
    assert paged(enough, range(24)) is not None
    assert paged(dataclasses.replace(problem, host_bytes=copied - 1), range(24)) is None


@pytest.mark.parametrize("seed", range(12))
def test_what_takes_memory_only_while_it_is_touched_bounds_all_schedules(seed):
    chain = random_chain(seed, length=3)
    problem = chain.with_link(Link(1e9, 1e9, latency_ns=1, least_bytes=1), 10**6)
    relaxed = find_floor(touched_only(problem))
    floor = find_offload_floor(problem)
    assert floor.lower_bound == relaxed.lower_bound
    assert floor.bytes == relaxed.bytes == least_paged_bytes(problem, compute_order(relaxed.plan.steps))
    validate(problem.with_budget(floor.bytes), floor.plan)
    below = problem.with_budget(relaxed.lower_bound.bytes - 1)
    assert OffloadBruteForceSolver(max_states=5_000).solve(below).status in (Status.INFEASIBLE, Status.TIME_LIMIT)


def test_what_can_neither_leave_nor_run_again_counts_for_the_floor():
    problem = dataclasses.replace(reverse_chain(4), movable=frozenset({0}))
    assert floor_lower_bound(problem).bytes == 10 + 10 + 10 + 1  # 1, 2 and 3 wait, 0 does not
    assert floor_lower_bound(problem.with_link(None, 0)).bytes == keep_all_peak(problem)
    assert floor_lower_bound(dataclasses.replace(problem, movable=None)).bytes == 10 + 10  # while 1 runs


def test_the_offload_solver_pages_where_its_models_find_nothing():
    problem = reverse_chain()
    solver = OffloadSolver(max_rounds=0)
    found = solver.solve(problem)
    validate(problem, found)
    assert any(isinstance(step, Prefetch) for step in found.steps)
    least = dataclasses.replace(FAST, least_bytes=11)
    assert not solver.solve(problem.with_link(least, 10**6)).status.has_plan


@pytest.mark.parametrize("seed", range(3))
def test_the_portfolio_has_a_plan_wherever_the_floor_with_copies_has(seed):
    """Below what recomputation alone can do with, and above what no schedule fits."""
    chain = random_chain(seed, length=8)
    problem = dataclasses.replace(chain, recomputable=(False,) * len(chain.time_ns)).with_link(FAST, 10**9)
    floor = find_offload_floor(problem)
    assert floor.bytes < find_floor(problem.with_link(None, 0)).bytes
    found = AutoSolver(time_limit_s=3).solve(problem.with_budget(floor.bytes))
    validate(problem.with_budget(floor.bytes), found)
    assert any(isinstance(step, Prefetch) for step in found.steps)
    assert sum(isinstance(step, Compute) for step in found.steps) >= len(problem.time_ns)
