"""Shapes: a new one is planned once and remembered; what depends on the data is guarded or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler import CheckpointSchedulerError
from tests.scheduler.kinds.comparing import BranchOnShape, Wave, bounded, compare, data, fresh, layers, trained

__all__ = ["fresh"]


def counted(model):
    """The module with a list of the budgets that were planned for: one entry for each plan."""
    return bounded(model), model._compiled_call_impl.settings.solver.chosen


def test_variable_lengths():
    def step(model):
        return [trained(data(4, n, 16, seed=n))(model) for n in (8, 12, 8, 5, 12)]

    compare(lambda: layers(16, nn.Dropout(0.2)), step)


def test_each_shape_is_planned_once():
    torch.manual_seed(0)
    model = layers()
    model = bounded(model)
    plans = model._compiled_call_impl.settings.solver.chosen
    for n in (8, 12, 8, 12, 8):
        trained(data(4, n, 16))(model)
    assert len(plans) == 2


def test_a_batch_of_one_and_another_rank():
    def step(model):
        return [trained(data(*shape))(model) for shape in ((4, 16), (1, 16), (2, 3, 16), (16,))]

    compare(layers, step, recomputes=False)


def test_branch_on_a_python_value_is_guarded():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.deep = nn.Linear(16, 16), True

        def forward(self, x, twice=False):
            h = self.inner(x).sin().exp()
            if self.deep:
                h = h.tanh().exp()
            return h * 2 if twice else h

    def step(model):
        results = [trained(data(12, 16))(model)]
        model.deep = False
        results.append(trained(data(12, 16), True)(model))
        model.deep = True
        return results, trained(data(12, 16))(model)

    compare(Branch, step, recomputes=False)


def test_branch_on_a_shape_is_guarded():
    compare(BranchOnShape, lambda model: [trained(data(n, 16))(model) for n in (12, 4, 12)], recomputes=False)


class BranchOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        h = self.inner(x).sin().exp()
        if h.sum() > 0:
            return h.tanh()
        return h.cos()


class ShapeFromData(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x)[x[:, 0].nonzero().squeeze(1)].sin().exp()


class NumberFromData(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x).sin() * x.sum().item()


@pytest.mark.parametrize("make", [BranchOnData, ShapeFromData])
def test_what_depends_on_the_data_is_refused_with_the_reason(make):
    with pytest.raises(CheckpointSchedulerError, match=r"data|graph"):
        trained(data(12, 16))(bounded(make()))


def test_a_number_from_the_data_is_right_or_refused():
    def step(model):
        return [trained(data(12, 16, seed=seed))(model) for seed in range(3)]

    try:
        compare(NumberFromData, step, recomputes=False)
    except CheckpointSchedulerError as error:
        assert "data" in str(error) or "graph" in str(error)  # noqa: PT017


def test_a_refusal_names_the_line():
    with pytest.raises(CheckpointSchedulerError, match=r"test_shapes\.py"):
        trained(data(12, 16))(bounded(BranchOnData()))


def test_expanding_and_reshaping_inside():
    class Reshapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            h = self.inner(x).view(x.shape[0], -1, 4, 4).sin()
            return (h + h.mean(0, keepdim=True).expand_as(h)).exp().flatten(1)

    compare(Reshapes, lambda model: [trained(data(n, 3, 16))(model) for n in (4, 2)], recomputes=False)


def test_wave_of_no_elements_between_others():
    compare(
        lambda: nn.Sequential(nn.Linear(16, 16), Wave()),
        lambda m: [trained(data(n, 16))(m) for n in (3, 0, 3)],
        recomputes=False,
    )
