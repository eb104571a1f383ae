"""The least budget: a plan that runs for real there, nothing below the proof, and nothing touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler import CaptureError, Infeasible, MinimumBudget, minimum_budget, plan, schedule
from tests.models import make_gpt
from tests.planning import exactly, measured_peak


@pytest.fixture(scope="module")
def found() -> MinimumBudget:
    case = make_gpt()
    args, kwargs = case.make_batch(0)
    return minimum_budget(case.model, args, kwargs)


def test_the_plan_runs_within_the_least_budget(found):
    case = make_gpt()
    args, kwargs = case.make_batch(0)
    model = schedule(case.model, sample_args=args, sample_kwargs=kwargs, plan=found.plan)
    measured = measured_peak(model, case)
    assert measured <= found.bytes
    assert measured == pytest.approx(found.bytes, rel=0.01)


def test_bounds_are_in_order(found):
    assert found.plan.static_bytes < found.lower_bound_bytes <= found.bytes < found.plan.keep_all_peak_bytes
    case = make_gpt()
    args, kwargs = case.make_batch(0)
    with pytest.raises(Infeasible):
        plan(case.model, exactly(found.lower_bound_bytes - 1), args, kwargs)


def test_says_what_binds(found):
    text = str(found)
    assert found.binding_op in text
    assert found.binding_module in text
    assert "static" in text


def test_errors_are_those_of_plan():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return y if y.sum().item() > 0 else 2 * y

    with pytest.raises(CaptureError):
        minimum_budget(Breaks(), (torch.ones(2, 4),))


def test_the_loss_outside_of_the_module_counts():
    model, x, target = nn.Linear(8, 4000), torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    loss_fn = nn.functional.cross_entropy
    alone = minimum_budget(model, (x,))
    found = minimum_budget(model, (x,), {"loss_args": (target,)}, loss_fn=loss_fn)
    assert (
        found.plan.keep_all_peak_bytes
        == plan(model, None, (x,), {"loss_args": (target,)}, loss_fn=loss_fn).keep_all_peak_bytes
    )
    assert found.bytes > alone.bytes
