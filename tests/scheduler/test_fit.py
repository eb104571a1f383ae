"""The largest size against trying every size, and the verdicts."""

from __future__ import annotations

import dataclasses
import types

import pytest

import scheduler.fit as fit_module
from scheduler.errors import Infeasible
from scheduler.fit import activation_bytes, fit
from solvers.simulate import simulate
from solvers.store_all import StoreAllSolver, store_all_steps
from solvers.strategies import BlockCheckpoint
from tests.scheduler.cli.steps import keep_all_plan
from tests.scheduler.toy import MB, STATIC


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A strategy in the solver's place, and a poor guess of the floor: the search has to find its way."""

    def replan(plan, budget, *, solver):
        problem = plan.problem.with_budget(budget)
        solution = solve(problem)
        if not solution.status.has_plan:
            raise Infeasible(budget_bytes=budget, static_bytes=problem.static_bytes)
        return dataclasses.replace(plan, solution=solution, budget_bytes=budget)

    monkeypatch.setattr(fit_module, "replan", replan)
    monkeypatch.setattr(
        fit_module, "find_floor", lambda problem: types.SimpleNamespace(bytes=keep_all_peak(problem) // 3)
    )


def keep_all_peak(problem):
    return simulate(problem, store_all_steps(problem)).peak_bytes


def feasible(size, budget):
    return solve(keep_all_plan(size).problem.with_budget(budget)).status.has_plan


def solve(problem):
    keep_all = StoreAllSolver().solve(problem)
    return keep_all if keep_all.status.has_plan else BlockCheckpoint().solve(problem)


@pytest.mark.parametrize("budget", [301 * MB, 401 * MB, 737 * MB])
@pytest.mark.parametrize("multiple", [1, 2])
def test_the_largest_that_fits(budget, multiple):
    captured = []

    def capture(size):
        captured.append(size)
        return keep_all_plan(size)

    found = fit(capture, budget, multiple=multiple)
    sizes = range(multiple, 90, multiple)
    assert found.largest == max(n for n in sizes if feasible(n, budget))
    assert found.plain == max((n for n in sizes if keep_all_plan(n).keep_all_peak_bytes <= budget), default=0)
    assert found.refused == found.largest + multiple
    assert len(captured) == len(set(captured)) <= 16
    assert [row.size for row in found.rows] == sorted({row.size for row in found.rows})
    assert found.rows[-1].size == found.largest
    for row in found.rows:
        assert row.plan.peak_bytes <= budget
        assert row.per_second == pytest.approx(row.size * 1e9 / row.plan.step_time_ns)
        assert (row.gained_per_gb > 0) <= (not row.plan.is_noop)


def test_first_sizes_that_mislead_cost_few_captures():
    """Needs that hardly grow from 1 to 2: the line through them overshoots by far."""
    captured = []

    def capture(size):
        captured.append(size)
        return keep_all_plan(9 + size if size < 3 else 5 * size)

    found = fit(capture, 5000 * MB)
    assert found.plain >= 3
    assert found.refused is not None
    assert capture(found.plain).keep_all_peak_bytes <= 5000 * MB < capture(found.plain + 1).keep_all_peak_bytes
    assert len(captured) - 2 <= 12


def test_a_limit_on_the_size():
    found = fit(keep_all_plan, 10**12, most=5)
    assert (found.largest, found.refused, found.plain) == (5, None, 5)
    assert not found.worth
    assert "not worth it" in found.verdict


def test_nothing_fits():
    with pytest.raises(Infeasible):
        fit(keep_all_plan, sum(STATIC.values()) + MB)
    with pytest.raises(ValueError, match="is below the least one"):
        fit(keep_all_plan, 10**9, multiple=8, most=4)


def test_it_pays_where_a_step_of_any_size_takes_the_same_time():
    found = fit(keep_all_plan, 500 * MB)  # each op of the toy step takes 1 ms at every size
    assert found.worth
    assert found.fastest.size > found.plain
    assert "faster" in found.verdict


def test_activations_are_the_peak_less_what_stays():
    plan = keep_all_plan(2)
    gradients = 4 * 10 * MB
    assert activation_bytes(plan) == plan.keep_all_peak_bytes - sum(STATIC.values()) - gradients
