"""A scheduled training gives, bit for bit, the numbers of the plain one, at every budget."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from scheduler import schedule
from tests.models import make_gpt, make_mlp, make_unet
from tests.planning import (
    TIME_LIMIT_S,
    UNLIMITED,
    assert_peak,
    bounded,
    every_model_and_budget,
    model_range,
    range_of,
    run_under,
    scheduled_run,
)
from tests.training import TrainingOptions, compare_training


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "fraction"), every_model_and_budget())
def test_every_step_is_bitwise_the_plain_one_within_the_budget_and_as_predicted(name, fraction):
    run = scheduled_run(name, fraction)
    assert run.differences == []
    assert len(run.peaks) == 3
    for measured in run.peaks:  # the first scheduled step included
        assert_peak(measured, run.plan)
    if fraction == 0.0:  # otherwise this would compare nothing
        assert run.plan.overhead > 0
        assert not run.plan.is_noop


def test_planned_on_the_first_call():
    assert compare_training(make_gpt, bounded(model_range("gpt").at(0.25)), steps=2) == []


def test_a_budget_above_the_peak_is_bitwise_too():
    assert compare_training(make_gpt, bounded(UNLIMITED), steps=2) == []


@pytest.mark.parametrize("make", [make_mlp, make_unet])
def test_gradients_of_inputs(make):
    name = "mlp" if make is make_mlp else "unet"
    options = TrainingOptions(steps=2, input_gradients=True)
    # An input's gradient is one more output of the backward: leave a little room above the floor without it.
    assert run_under(make, model_range(name).at(0.5), options=options).differences == []


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD with momentum"])
def test_optimizers_with_state(make_optimizer):
    keywords: dict[str, Any] = {"lr": 1e-2, **({"momentum": 0.9} if make_optimizer is torch.optim.SGD else {})}
    wrap = bounded(model_range("gpt").at(0.25))
    assert compare_training(make_gpt, wrap, optimizer=lambda p: make_optimizer(p, **keywords)) == []


def test_gradient_accumulation():
    assert compare_training(make_gpt, bounded(UNLIMITED), steps=2, accumulate=3) == []


def test_attention_dropout_and_an_untied_head():
    make = functools.partial(make_gpt, layers=1, attention_dropout=0.1, tied=False)
    run = run_under(make, range_of(make()).at(0.5), options=TrainingOptions(steps=2))
    assert run.differences == []
    assert not run.plan.is_noop


def test_group_norm_unet_at_half():
    make = functools.partial(make_unet, norm="group", batch=1, depth=2)
    run = run_under(make, range_of(make()).at(0.5), options=TrainingOptions(steps=2))
    assert run.differences == []
    assert not run.plan.is_noop


def test_bfloat16_parameters():
    def make():
        case = make_mlp(layers=3)
        case.model.to(torch.bfloat16)
        return case._replace(
            make_batch=lambda seed: ((case.make_batch(seed)[0][0].to(torch.bfloat16),), {}),
        )

    run = run_under(make, range_of(make()).at(0.5), options=TrainingOptions(steps=2))
    assert run.differences == []


def test_autocast_around_the_step():
    case = make_gpt(layers=2)
    twin = make_gpt(layers=2)
    args, kwargs = case.make_batch(0)
    schedule(case.model, model_range("gpt").at(0.5), time_limit_s=TIME_LIMIT_S)
    gradients = []
    for model in (twin.model, case.model):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*args, **kwargs)
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, scheduled = gradients
    assert [name for name in plain if not torch.equal(plain[name], scheduled[name])] == []


class TwoHeads(nn.Module):
    """Two parameters of which one gets no gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).tanh().sum()


def test_a_parameter_without_gradient_keeps_none():
    torch.manual_seed(0)
    model = schedule(TwoHeads(), UNLIMITED)
    model(torch.randn(4, 8)).backward()
    assert model.unused.weight.grad is None
    assert model.used.weight.grad is not None
