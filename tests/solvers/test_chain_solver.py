import dataclasses

import pytest

from solvers import BruteForceSolver, ChainSolver, Status, compute_order, simulate, with_frees
from solvers.chain import cut, forward_end
from solvers.chain_dp import ChainTable
from solvers.chain_solver import ChainModel, chain_models, least_peak
from solvers.validate import validate
from tests.problems import keep_all_peak, least_demand, random_chain, random_problem, training_chain


def test_a_chain_is_cut_at_every_layer():
    chain = cut(training_chain(6), reach=6, window=0)
    assert [list(region.forward) for region in chain.regions] == [[i] for i in range(6)]
    assert [list(region.backward) for region in chain.regions] == [[], [10, 11], [9], [8], [7], [6]]
    assert [region.entering for region in chain.regions] == [(), (0,), (1,), (2,), (3,), (4,)]
    assert [region.incoming for region in chain.regions] == [(), (9,), (8,), (7,), (6,), ()]
    assert chain.resident == frozenset()
    assert chain.weight_bytes == (1, 1, 1, 1, 1, 0)  # the gradient of the input, at the end; one gradient before


def test_what_crosses_many_regions_is_resident():
    chain_ = training_chain(8)
    inputs = [set(i) for i in chain_.inputs]
    for layer in range(1, 8):
        inputs[layer].add(0)  # as layers read a mask
    problem = dataclasses.replace(chain_, inputs=tuple(tuple(sorted(i)) for i in inputs))
    chain = cut(problem, reach=3, window=0)
    assert chain.resident == {0}
    assert all(0 not in region.entering for region in chain.regions)
    assert set(chain.weight_bytes) == {1, 2}  # the mask, and but for the last region a gradient


def test_what_cannot_be_made_again_and_what_must_stay_is_resident():
    problem = dataclasses.replace(
        training_chain(6), recomputable=(True, True, False, *[True] * 9), live_at_end=frozenset({4, 11})
    )
    assert cut(problem, reach=6, window=0).resident == {2, 4}


def test_no_chain_where_nothing_can_be_cut():
    assert cut(training_chain(1), reach=6, window=0) is None
    assert not ChainSolver().solve(training_chain(1, budget_bytes=1)).status.has_plan


def test_without_phases_the_forward_ends_with_the_op_at_the_peak():
    assert forward_end(dataclasses.replace(training_chain(6), forward_ops=0)) == 7


@pytest.mark.parametrize("seed", range(40))
def test_plans_fit_what_the_table_was_given_and_take_no_longer_than_it_says(seed):
    length = (3, 6, 12)[seed % 3]
    problem = random_problem(seed, ops=25) if seed % 4 == 0 else random_chain(seed, length=length)
    for model in chain_models(problem):
        table = ChainTable(model.stages, keep_all_peak(problem) - problem.static_bytes)
        least = table.least_level()
        for level in () if least is None else {least, (least + table.levels) // 2, table.levels}:
            figures = simulate(problem, with_frees(problem, model.order(table.schedule(level))))
            assert figures.peak_bytes <= level * table.unit + problem.static_bytes
            assert figures.step_time_ns <= problem.keep_all_time_ns + table.cost(level)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(10))
def test_plans_are_legal_and_deterministic(seed, fraction):
    problem = random_chain(seed, length=10, budget=fraction)
    solution = ChainSolver().solve(problem)
    if solution.status.has_plan:
        validate(problem, solution)
        assert solution.steps == ChainSolver().solve(problem).steps
    else:
        assert solution.status is Status.INFEASIBLE
        assert least_peak(problem).peak_bytes > problem.budget_bytes


def chain_of(seed, length):
    """A training chain with random times and activations, and small gradients."""
    source = random_chain(seed, length=length)
    return training_chain(
        length,
        time_ns=source.time_ns[:length],
        activation_bytes=source.storage_bytes[:length],
        gradient_bytes=1,
        backward_time_ns=3,
    )


def test_heterogeneous_chains_against_brute_force():
    equal = feasible = 0
    for seed in range(18):
        problem = chain_of(seed, 3 + seed % 6)
        low, high = least_demand(problem), keep_all_peak(problem)
        for fraction in (0.1, 0.4, 0.7):
            limited = problem.with_budget(low + round(fraction * (high - low)))
            exact = BruteForceSolver(find_floor=False).solve(limited)
            found = ChainSolver().solve(limited)
            if not exact.status.has_plan:
                assert not found.status.has_plan
                continue
            feasible += 1
            if found.status.has_plan:
                assert found.step_time_ns >= exact.step_time_ns
                equal += found.step_time_ns == exact.step_time_ns
    assert feasible > 40
    assert equal >= 0.8 * feasible


def test_several_levels_of_recomputation_reach_budgets_that_segments_do_not():
    solution = least_peak(training_chain(40))
    counts = [compute_order(solution.steps).count(op) for op in range(40)]
    assert solution.peak_bytes == 3
    assert max(counts) > 10


def test_identical_regions_are_searched_once():
    chain = training_chain(30)
    model = ChainModel(chain, cut(chain, reach=30, window=0))
    assert len({id(stage.turns[0].forward_order) for stage in model.stages}) <= 30
    assert len({(len(stage.turns), len(stage.passes)) for stage in model.stages[1:-2]}) == 1


def test_no_region_is_searched_after_the_deadline():
    assert list(chain_models(training_chain(10), deadline=0.0)) == []
    assert not ChainSolver(time_limit_s=0.0).solve(training_chain(10, budget_bytes=3)).status.has_plan


def test_without_time_there_is_no_plan_and_no_least_peak():
    problem = random_chain(3, length=8, budget=0.6)
    assert not ChainSolver(time_limit_s=0.0).solve(problem).status.has_plan
    assert least_peak(problem, deadline=0.0) is None
