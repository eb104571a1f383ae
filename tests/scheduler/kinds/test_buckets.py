"""Many input shapes: ``dynamic="bucket"`` reuses schedules, and without it a warning says what many shapes cost."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from scheduler import attach as attachments
from scheduler import measure_peak, plan, plan_of, schedule
from scheduler.backend import checkpoint_scheduler
from scheduler.planner import Settings
from scheduler.remembered import SHAPES_BEFORE_WARNING, structure_of
from solvers.auto import AutoSolver
from tests.scheduler.kinds.comparing import (
    BranchOnShape,
    Wave,
    bounded,
    data,
    fresh,
    layers,
    observe,
    trained,
    unequal,
)

__all__ = ["fresh"]

LARGEST = 32


@dataclasses.dataclass(frozen=True)
class Counting:
    """The portfolio, with the budgets that it was asked for."""

    budgets: list[int] = dataclasses.field(default_factory=list)

    def solve(self, problem):
        self.budgets.append(problem.budget_bytes)
        return AutoSolver(time_limit_s=3).solve(problem)


def make():
    torch.manual_seed(0)
    return layers(16, nn.Dropout(0.2), nn.Linear(32, 32), Wave())


def squares(output):
    return output.square().sum()


def run(model, *lengths):
    """A step for each length, with the loss inside of the schedule where there is one; losses and gradients."""
    seen = []
    for n in lengths:
        model.zero_grad(set_to_none=True)
        x = data(8, n, 16, seed=n)
        loss = model(x, loss_args=()) if attachments.attachment_of(model) is not None else squares(model(x))
        loss.backward()
        seen.append((loss.detach().clone(), [p.grad.clone() for p in model.parameters()]))
        del loss
    return seen


def middle(length=LARGEST):
    """A budget between floor and peak of the step of that length, in bytes."""
    model = bounded(make(), 0.5, loss_fn=squares)
    run(model, length)
    torch._dynamo.reset()
    assert not plan_of(model).is_noop
    return model._compiled_call_impl.settings.solver.chosen[0]


def bucketed(model, budget, **options):
    solver = Counting()
    options = {"loss_fn": squares, "costs": "roofline", "dynamic": "bucket"} | options
    return schedule(model, f"{budget}B", solver=solver, **options), solver.budgets


def test_one_solve_serves_the_smaller_shapes():
    model, solved = bucketed(make(), middle())
    lengths = (32, 31, 28, 24, 31, 8)
    assert unequal(observe(make(), lambda m: run(m, *lengths)), observe(model, lambda m: run(m, *lengths))) == []
    assert len(solved) == 1
    assert plan_of(model).is_noop  # of the last and smallest, which has room for everything


def test_a_reused_schedule_keeps_the_budget_and_its_prediction():
    budget = middle()
    model, solved = bucketed(make(), budget)
    for n in (32, 31, 29, 16):
        run(model, n)  # plans and runs, so that the second is measured
        model.zero_grad(set_to_none=True)
        x = data(8, n, 16)
        peak = measure_peak(lambda x=x: model(x, loss_args=()).backward(), resident=(model, x)).peak_bytes
        plan = plan_of(model)
        assert peak <= budget
        assert abs(plan.peak_bytes / peak - 1) <= 0.01
        assert (n in (31, 29)) == ("reused" in plan.solution.solver)
        assert plan.lower_bound_ns <= plan.step_time_ns
    assert len(solved) == 1


def test_a_larger_shape_is_solved_where_no_schedule_fits():
    model, solved = bucketed(make(), middle())
    run(model, 8, 12, 32, 30)  # the first is solved, and keeping everything fits the second
    assert len(solved) == 2


def test_another_structure_is_solved():
    model, solved = bucketed(BranchOnShape(), 10**9, loss_fn=None)
    for n in (16, 12, 8, 4):
        trained(data(n, 16))(model)
    assert len(solved) == 2


def test_a_saved_plan_is_where_to_start_from():
    budget = middle()
    ahead = plan(make(), f"{budget}B", (data(8, LARGEST, 16),), {"loss_args": ()}, loss_fn=squares)
    model, solved = bucketed(make(), budget, plan=ahead)
    run(model, 32, 30)
    assert solved == []
    assert not plan_of(model).is_noop


def test_measured_costs_come_from_the_larger_shape():
    model = schedule(make(), "100TB", dynamic="bucket")
    trained(data(8, 32, 16))(model)
    largest = plan_of(model)
    trained(data(8, 16, 16))(model)
    assert plan_of(model).costs == largest.costs
    assert any("larger step" in sentence for sentence in plan_of(model).assumptions)
    assert structure_of(plan_of(model).graph) == structure_of(largest.graph)
    assert plan_of(model).graph.fingerprint != largest.graph.fingerprint


@pytest.mark.parametrize("dynamic", [None, "bucket"])
def test_many_shapes_are_warned_of_once(dynamic, caplog):
    model = bounded(nn.Linear(4, 4), dynamic=dynamic)
    for n in range(2, SHAPES_BEFORE_WARNING + 4):
        trained(data(n, 4))(model)
    warnings = [r.getMessage() for r in caplog.records if "input shapes" in r.getMessage()]
    assert len(warnings) == (1 if dynamic is None else 0)
    assert all('dynamic="bucket"' in w and str(SHAPES_BEFORE_WARNING) in w for w in warnings)


def test_captures_beyond_the_limit_start_over(monkeypatch, caplog):
    """Numbers stay, plans are kept, and the warning says what happens."""
    monkeypatch.setattr(attachments, "MOST_CAPTURES", 2)
    plain = make()
    model = bounded(copy.deepcopy(plain))

    def step(model):
        return [trained(data(4, n, 16, seed=n))(model) for n in (8, 9, 10, 8, 9)]

    assert unequal(observe(plain, step), observe(model, step)) == []
    assert len(model._compiled_call_impl.settings.solver.chosen) == 3
    assert "captured for 2 shapes" in caplog.text


def test_only_known_policies():
    with pytest.raises(ValueError, match="bucket"):
        schedule(make(), 1, dynamic=True)
    with pytest.raises(ValueError, match="only schedule"):
        checkpoint_scheduler(None, (), options={"dynamic": "bucket"})
    assert Settings().dynamic is None
