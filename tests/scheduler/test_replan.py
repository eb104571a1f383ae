"""Re-solving a plan, and the trade-off curve."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from scheduler.errors import Infeasible
from scheduler.replan import SweepPoint, knee_of, replan, spread_budgets, sweep
from solvers.strategies import BY_HAND
from tests.scheduler.cli.steps import keep_all_plan
from tests.scheduler.toy import MB, make_plan


def test_replan_keeps_the_step_and_changes_the_budget():
    plan = make_plan({1}, budget=400 * MB)
    again = replan(plan, 200 * MB, time_limit_s=1)
    assert again.graph is plan.graph
    assert again.budget_bytes == 200 * MB
    assert again.peak_bytes <= 200 * MB
    assert not again.is_noop
    assert replan(again, plan.keep_all_peak_bytes).is_noop
    with pytest.raises(Infeasible) as caught:
        replan(plan, plan.static_bytes + MB)
    assert caught.value.static_bytes == plan.static_bytes


@pytest.mark.parametrize("name", BY_HAND)
def test_no_strategy_applied_by_hand_is_faster_in_the_same_memory(name):
    plan = keep_all_plan()
    strategy = BY_HAND[name].solve(plan.problem.with_budget(2**60))
    found = replan(plan, strategy.peak_bytes, time_limit_s=2)
    assert found.step_time_ns <= strategy.step_time_ns * (1 + found.gap)


def test_budgets_from_the_least_to_keep_all():
    plan = keep_all_plan()
    budgets = spread_budgets(plan.problem, 7)
    assert len(budgets) == 7
    assert budgets[-1] == plan.keep_all_peak_bytes
    assert replan(plan, budgets[0], time_limit_s=2).peak_bytes <= budgets[0]
    gaps = {b - a for a, b in itertools.pairwise(budgets)}
    assert max(gaps) - min(gaps) <= 1
    with pytest.raises(ValueError, match="at least 2"):
        spread_budgets(plan.problem, 1)


def test_sweep_is_monotone_and_tells_each_point():
    plan = keep_all_plan(blocks=5)
    calls = []
    budgets = [*spread_budgets(plan.problem, 6), plan.static_bytes + MB]  # the last is impossible
    found = sweep(plan, budgets, time_limit_s=0.5, on_point=lambda: calls.append(1))
    peaks = {b.peak_bytes for b in found.baselines}
    assert len(calls) == len({*budgets, *peaks})
    assert {p.budget_bytes for p in found.solved} == {*sorted(budgets)[1:], *peaks}
    assert all(b.plan.budget_bytes == b.peak_bytes and b.plan_overhead <= b.overhead + 1e-9 for b in found.baselines)
    assert [p.budget_bytes for p in found.points] == sorted(budgets)[1:]
    for lesser, greater in itertools.pairwise(found.solved):
        assert lesser.step_time_ns >= greater.step_time_ns
        assert lesser.lower_bound_ns >= greater.lower_bound_ns
    for point in found.points:
        assert point.peak_bytes <= point.budget_bytes
        assert point.lower_bound_ns <= point.step_time_ns


def point(budget, time):
    return SweepPoint(budget, budget, time, time, 0.0, 0.0)


def test_knee():
    bent = [point(0, 100), point(10, 40), point(20, 20), point(30, 15), point(40, 10)]
    assert knee_of(bent) == 1  # 1 − 1/4 − 1/3; the next one is 1 − 1/2 − 1/9
    straight = [point(x, 100 - x) for x in (0, 10, 20, 30)]
    assert knee_of(straight) is None
    assert knee_of(bent[:2]) is None
    assert knee_of([dataclasses.replace(p, step_time_ns=5) for p in bent]) is None
